"""Time, memory and page of a report of 2,800 points and 30,000 records, and of half as many.

`python tests/bench/report.py [POINTS EXAMPLES]`: prints seconds, the peak of the process's memory above that of its imports, and
the size of the page with and without Plotly itself, a process for each size.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from plotly.offline import get_plotlyjs

from tests.support import record_factory as records

BUDGETS = 20  # points of a stack
SCORERS = ("h2o", "snapkv", "tova", "knorm", "keydiff", "random", "pyramid")


def config(stack: int, fraction: float) -> dict[str, object]:
    """A resolved stack with about as many settings as a real one."""
    codec = {"_target_": "harness.stages.codec.int_groups.IntGroups", "name": "int4", "bits": 4, "group": 32, "residual": stack}
    scorer = {"_target_": f"harness.stages.score.{SCORERS[stack % 7]}.Scorer", "window": 32, "kernel": 7, "pool": "max"}
    budget = {"_target_": "harness.stages.budget.Budget", "unit": "fraction", "value": fraction}
    keep = {"_target_": "harness.stages.keep.Keep", "scorer": scorer, "sinks": 4, "recent": None, "budget": budget}
    return {"_target_": "harness.stages.stack.Stack", "phase": "prefill", "keep": keep, "keys": codec, "values": codec}


def fill(folder: Path, points: int, examples: int) -> None:
    """A run folder of this many points, each on as many examples."""
    asked = list(records.grid(lengths=(1024, 4096), depths=5, repeats=-(-examples // 10)))[:examples]
    with (folder / "records-bench.jsonl").open("w") as file:
        for example in asked:
            file.write(json.dumps(records.answer(example, "full", None)) + "\n")
            for i in range(points - 1):
                stack, fraction = i // BUDGETS, round(0.02 + 0.04 * (i % BUDGETS), 3)
                one = records.answer(example, "snapkv", fraction) | {"stack_config": config(stack, fraction)}
                one |= {"stack": f"{SCORERS[stack % 7]}_int4_residual{stack}", "key": records.sha(i, example["example_id"])}
                file.write(json.dumps(one) + "\n")


def measure(folder: Path) -> None:
    """The report of a run folder, in a process of its own."""
    from harness.pages.outputs import write_all

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    write_all(folder)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    page = (folder / "dashboard.html").stat().st_size
    own = page - len(get_plotlyjs().encode())
    print(f"{seconds:.1f} s, peak {peak / 1024:.0f} MiB ({(peak - before) / 1024:.0f} above the imports), ", end="")
    print(f"page {page / 1e6:.2f} MB ({own / 1e6:.2f} without Plotly)", flush=True)


def main() -> None:
    """Both sizes, or one that was asked for; or the measurement of a folder."""
    if sys.argv[1:2] == ["--measure"]:
        measure(Path(sys.argv[2]))
        return
    points, examples = (int(sys.argv[1]), int(sys.argv[2])) if len(sys.argv) > 2 else (2800, 11)
    for n in (points // 2, points):
        with tempfile.TemporaryDirectory() as folder:
            fill(Path(folder), n, examples)
            print(f"{n} points, {n * examples} records: ", end="", flush=True)
            subprocess.run([sys.executable, __file__, "--measure", folder], check=True)


if __name__ == "__main__":
    main()
