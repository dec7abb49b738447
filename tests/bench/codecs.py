"""What a codec costs beside int8 with dynamic scales: time to encode and to decode all rows of a context, and scratch bytes.

python tests/bench/codecs.py [name ...]      members of conf/codec, as keys; by default all
The shape is the default model's: 4,096 rows x 30 layers x 3 KV heads x 64, 16-bit cache, fp32 compute, one thread. What a codec
finds on each prompt (`fit`) is part of encoding; what is measured once per model is not.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from harness.stages.codec.xkv import XKV
from harness.stages.encoded import Heads
from tests.support import conf_tree

LAYERS, HEADS, ROWS, D = 30, 3, 4096, 64
BASE = "int8"
BOTH = 5.0  # times int8 that encoding and decoding may take together
BAR = {"int4": 4.0, "kivi2": 4.0, "kivi4": 4.0}
TURNED = "every token is multiplied with a matrix on the way in and on the way out, where int8 passes over its numbers"
PROJECTED = "the heads of a layer are multiplied with a basis on the way in and on the way out, which grows with their number"
WHY = {
    "xkv": "every group of layers of every prompt is decomposed: second moments of 4,096 x 576 numbers and their eigenvectors",
    "kvquant": "the largest numbers of every token are selected, and every other is compared with a codebook",
    **dict.fromkeys(("turboquant", "turboquant_prod", "hadamard_int4", "hadamard_int8"), TURNED),
    **dict.fromkeys(
        ("think", "think_int8"), "the channels that stay are chosen on each prompt, and copied out and in one by one"
    ),
    **dict.fromkeys(("low_rank", "low_rank_heads", "low_rank_int4"), PROJECTED),
    **dict.fromkeys(("mxfp4", "nvfp4"), "every few channels have a scale, and every number is compared with seven cuts"),
}


@contextmanager
def quiet() -> Iterator[None]:
    """Nothing on stderr: the profiler announces itself there from below Python."""
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def scratch(function: Callable[[], object]) -> int:
    """Most bytes a call holds at one time beyond what it was given, its result included, by the allocator's own events."""
    with quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        function()
    held = most = 0
    for event in found.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def best(functions: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Least CPU time of each function, repetitions interleaved: other work on the machine does not count."""
    times = dict.fromkeys(functions, float("inf"))
    for _ in range(repeats):
        for name, function in functions.items():
            start = time.process_time()
            function()
            times[name] = min(times[name], time.process_time() - start)
    return times


def main(names: list[str]) -> int:
    """Print a line a codec; the exit status says whether the bars hold."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    x: Tensor = torch.randn(LAYERS * HEADS, ROWS, D, generator=generator).bfloat16()
    out = torch.empty(LAYERS * HEADS, ROWS + 100, D)[:, :ROWS]  # as in the store: a slice of what attention reads
    heads = Heads(tuple(range(LAYERS)), 0, HEADS)
    plain: dict[str, Any] = {name: conf_tree.member("codec", name).for_role("keys") for name in names}
    plain |= {name: replace(codec, layers=3) for name, codec in plain.items() if isinstance(codec, XKV)}
    codecs = {name: codec.fit(x, heads) for name, codec in plain.items()}
    kept = {name: codec.encode(x) for name, codec in codecs.items()}
    encode = best({name: lambda c=codec: c.fit(x, heads).encode(x) for name, codec in plain.items()}, 3)
    decode = best({name: lambda c=codec, e=kept[name]: c.decode(e, out) for name, codec in codecs.items()}, 15)
    failed, slow = [], []
    print(
        f"{'codec':18}{'bytes/row':>10}{'encode ms':>11}{'x int8':>8}{'decode ms':>11}{'x int8':>8}{'both x int8':>13}"
        f"{'scratch MiB, encode':>21}{'decode':>8}"
    )
    for name, codec in codecs.items():
        size = sum(codec.nbytes(HEADS, ROWS, D, 2)) / (HEADS * ROWS)
        both = (encode[name] + decode[name]) / (encode[BASE] + decode[BASE])
        slower = decode[name] / decode[BASE]
        used = [scratch(f) / 2**20 for f in (lambda c=codec: c.encode(x), lambda c=codec, e=kept[name]: c.decode(e, out))]
        print(
            f"{name:18}{size:10.2f}{encode[name] * 1e3:11.0f}{encode[name] / encode[BASE]:8.2f}{decode[name] * 1e3:11.0f}"
            f"{slower:8.2f}{both:13.2f}{used[0]:21.1f}{used[1]:8.1f}"
        )
        why, bar = WHY.get(name), BAR.get(name, float("inf"))
        slow += [name] if both > BOTH and why is None else []
        failed += [name] if slower > bar and why is None else []
        if why is not None and (both > BOTH or slower > bar):
            print(f"    beyond {f'{BOTH:g} x' if both > BOTH else f'{bar:g} x to decode'} int8, because {why}")
    print(f"decoding is beyond its bar without a reason: {', '.join(failed) or 'none'}")
    print(f"both are beyond {BOTH:g} x int8 without a reason: {', '.join(slow) or 'none'}")
    return len(failed + slow)


if __name__ == "__main__":
    asked = sys.argv[1:] or conf_tree.members("codec")
    sys.exit(main(list(dict.fromkeys([BASE, *asked]))))
