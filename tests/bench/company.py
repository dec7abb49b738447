"""Requests alone, in batches of 3, 16 and 48, and shuffled: whose logits, answers and kept sets depend on what decodes beside them.

With batch_invariant=true no bit may differ; with false the share of answers and kept sets that differ is printed. The cost is
the time of the same decoding under true over that under false, in turns within this run.

python tests/bench/company.py [requests] [new tokens] [overrides such as model=tiny_llama ...]
"""

from __future__ import annotations

import hashlib
import random
import sys
import time
from dataclasses import dataclass

import torch
from measure import prose, setup

from harness.configure.arms import Arm
from harness.engine.engine import Engine
from harness.kv.sequence_cache import SequenceCache
from harness.models.load import LM
from harness.stages.protocols import Needs

LENGTHS, QUESTION = (400, 357), 9
SIZES = (3, 16, 48)


@dataclass(frozen=True)
class Told:
    """What a request came to: a digest of each step's logits, the tokens, and the kept positions at the end."""

    logits: tuple[bytes, ...]
    tokens: tuple[int, ...]
    kept: bytes


Work = list[tuple[SequenceCache, list[int]]]


def digest(tensors: list[torch.Tensor]) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        found.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return found.digest()


def work(engine: Engine, lm: LM, arms: list[Arm], n: int) -> Work:
    """n requests: contexts of two lengths in turn, each under every arm, with questions of three lengths."""
    text, found = prose(lm, 200 * (-(-n // len(arms)) + 3)), []
    needs = Needs()
    for arm in arms:
        needs |= arm.stack.needs
    while len(found) < n:
        at = len(found) // len(arms)
        prefix = engine.prefill(text[200 * at : 200 * at + LENGTHS[at % 2]], needs)
        for i, arm in enumerate(arms[: n - len(found)]):
            question = text[-1 - QUESTION - i % 3 : -1]
            found.append((engine.compress(prefix, arm.stack, seed=at), question))
    return found


def decode(engine: Engine, asked: Work, new: int) -> list[Told]:
    """The batch's greedy answers; the first forward reads the questions."""
    rows, feed = [row for row, _ in asked], [question for _, question in asked]
    seen: list[list[bytes]] = [[] for _ in asked]
    tokens: list[list[int]] = [[] for _ in asked]
    for _ in range(new):
        rows, logits = engine.feed(rows, feed)
        for i, one in enumerate(logits):
            seen[i].append(digest([one]))
            tokens[i].append(int(one.argmax()))
        feed = [[mine[-1]] for mine in tokens]
    kept = [digest([head for layer in row.kept_positions() for head in layer]) for row in rows]
    return [Told(tuple(a), tuple(b), c) for a, b, c in zip(seen, tokens, kept, strict=True)]


def batches(n: int) -> dict[str, list[list[int]]]:
    """How requests are put together: alone, in order by each size, and shuffled by each size."""
    order = random.Random(0).sample(range(n), n)
    ways = {"alone": [[i] for i in range(n)]}
    for name, places in (("", list(range(n))), (", shuffled", order)):
        ways |= {f"batches of {size}{name}": [places[i : i + size] for i in range(0, n, size)] for size in SIZES}
    return ways


def main() -> None:
    n, new = int(sys.argv[1]) if len(sys.argv) > 1 else 500, int(sys.argv[2]) if len(sys.argv) > 2 else 12
    lm, arms = setup(*sys.argv[3:])
    arms = [arm for arm in arms if not arm.stack.chunked]
    engines = {flag: Engine(lm.model, lm.kv_dtype, (), invariant=flag) for flag in (True, False)}
    asked = work(engines[False], lm, arms, n)
    print(f"{n} requests of {len(arms)} arms, {new} tokens each")
    alone: dict[bool, list[Told]] = {}
    for name, ways in batches(n).items():
        seconds = dict.fromkeys(engines, 0.0)
        found: dict[bool, dict[int, Told]] = {flag: {} for flag in engines}
        for wave in ways:
            for flag, engine in engines.items():
                start = time.perf_counter()
                found[flag] |= zip(wave, decode(engine, [asked[i] for i in wave], new), strict=True)
                seconds[flag] += time.perf_counter() - start
        for flag in engines:
            mine = [found[flag][i] for i in range(n)]
            first = alone.setdefault(flag, mine)
            pairs = list(zip(first, mine, strict=True))
            differ = [sum(getattr(a, what) != getattr(b, what) for a, b in pairs) for what in ("logits", "tokens", "kept")]
            print(f"{name}, batch_invariant={str(flag).lower()}: {differ[0]} of {n} requests have other logits, "
                  f"{differ[1]} other answers, {differ[2]} other kept sets")  # fmt: skip
        print(f"{name}: true takes {seconds[True] / seconds[False]:.2f} of the time of false")


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
