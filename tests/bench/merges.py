"""What merging costs beside int8 with dynamic scales: time to store a context and to read it once in every layer.

python tests/bench/merges.py [tokens]
As shares.py, with H2O keeping a fifth of the tokens; without a merge it stands in the first line.
"""

from __future__ import annotations

import sys

import torch
from shares import BAR, HEADS, LAYERS, TOKENS, exact, seconds

from harness.stages.protocols import Stats
from harness.stages.stack import Stack
from tests.support import conf_tree

WHY = {
    name: "every token that goes is compared with every one that stays, which grows with the square of the context"
    for name in ("d2o", "lookm")
}


def stacks() -> dict[str, Stack]:
    """int8, H2O alone, and H2O with every merge."""
    keep = conf_tree.keep("h2o", TOKENS // 5)
    merges = {name: Stack(keep=keep, merge=conf_tree.member("merge", name)) for name in conf_tree.members("merge")}
    return {"int8": conf_tree.stack("int8"), "drop": Stack(keep=keep), **merges}


def main() -> None:
    """A line for every merge, the reason where one takes more than the bar, and exit code 1 where there is none."""
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(1)
    stats = [Stats(column_sums_HN=torch.rand(HEADS, TOKENS, generator=g)) for _ in range(LAYERS)]
    whole, made = exact(), stacks()
    best = dict.fromkeys(made, (float("inf"), float("inf")))
    for _ in range(3):
        for name, stack in made.items():
            best[name] = min(best[name], seconds(whole, stack, stats), key=sum)
    base, late = sum(best["int8"]), []
    for name, (store, read) in best.items():
        print(f"{name:10} store {store / base:5.2f}  read {read / base:5.2f}  together {(store + read) / base:5.2f} x int8")
        if store + read > BAR * base:
            late += [] if name in WHY else [name]
            print(f"    beyond {BAR:g} x int8, because {WHY[name]}" if name in WHY else "    beyond its bar")
    sys.exit(bool(late))


if __name__ == "__main__":
    main()
