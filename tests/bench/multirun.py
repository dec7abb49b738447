"""`-m compress=` over eight stacks against one run of the same eight stacks. Prints both wall times and their ratio.

python tests/bench/multirun.py [OVERRIDE...], by default a minute on the tiny model; for the default model:
python tests/bench/multirun.py model=smollm2 corpus=kjv task.lengths=[2048] limit=6
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from measure import best

ROOT = Path(__file__).parents[2]
STACKS = "int8,int4,streaming,h2o,sink_h2o_int8,snapkv,tova,knorm"
TINY = ["model=tiny_llama", "corpus=stdlib", "task.lengths=[2048]", "limit=6"]
OVERRIDES = ["progress=false", *(sys.argv[1:] or TINY)]


def run(*arguments: str) -> None:
    """One command in a folder of its own, so that nothing is there already."""
    with tempfile.TemporaryDirectory() as cwd:
        command = [sys.executable, "-m", "harness", *OVERRIDES, *arguments]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run(command, cwd=cwd, env=env, check=True, stdout=subprocess.DEVNULL)


times = best({"fused": lambda: run(f"stacks=[{STACKS}]"), "multirun": lambda: run("-m", f"compress={STACKS}")}, 2)
print(f"8 stacks: one run {times['fused']:.1f} s, -m {times['multirun']:.1f} s, ratio {times['multirun'] / times['fused']:.2f}")
