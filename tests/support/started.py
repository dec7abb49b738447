"""Starts commands as `python -m MODULE` would, without the seconds that importing takes: each is a fork of one process that has
imported everything, with arguments, environment, folder, search path, output and exit code of its own.

As a script it is that process: a line of JSON in for each command, a line out with its exit code. What a fresh interpreter does
is held by the tests that start one (the canonical command, what --help imports, workers of launchers).
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]
LOADED = ("harness.command", "harness.report", "harness.verify", "harness.lm_eval.model", "lm_eval._cli", "plotly.graph_objects",
          "plotly.subplots", "pyarrow.parquet", "transformers.models.llama.modeling_llama", "hydra.core.plugins")  # fmt: skip


def harness(*arguments: str, cwd: Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command with its results below cwd; `path` is searched for modules before the project's root."""
    return started("harness", arguments, cwd, {"PYTHONPATH": os.pathsep.join(map(str, [*([path] if path else []), ROOT]))})


def started(
    module: str, arguments: Sequence[str], cwd: Path, env: Mapping[str, str] | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """`python -m module arguments` in a folder; `env` is added to the environment."""
    everything = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    with tempfile.TemporaryDirectory() as place:
        out, err = Path(place, "out"), Path(place, "err")
        wanted = {"module": module, "arguments": list(arguments), "cwd": str(cwd), "env": everything, "timeout": timeout}
        code = _ask(wanted | {"out": str(out), "err": str(err)})
        return subprocess.CompletedProcess([module, *arguments], code, out.read_text(), err.read_text())


@lru_cache(maxsize=1)
def _parent() -> subprocess.Popen[str]:
    """The process that has imported everything: one for every process that tests, it ends with it."""
    command = [sys.executable, "-m", "tests.support.started"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(_end, process)
    return process


def _end(process: subprocess.Popen[str]) -> None:
    process.communicate()


def _ask(wanted: Mapping[str, Any]) -> int:
    process = _parent()
    assert process.stdin and process.stdout
    process.stdin.write(json.dumps(wanted) + "\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    assert answer, "the process that starts commands ended: what it printed on stderr says why"
    code: int | None = json.loads(answer)
    if code is None:
        raise subprocess.TimeoutExpired([wanted["module"], *wanted["arguments"]], wanted["timeout"])
    return code


# --- the parent and its children ---------------------------------------------------------------------------------


def _become(wanted: Mapping[str, Any], base: Sequence[str]) -> NoReturn:
    """What a fresh interpreter would do from here on; never returns."""
    code = 1
    try:
        os.setsid()
        os.chdir(wanted["cwd"])
        os.environ.clear()
        os.environ.update(wanted["env"])
        sys.path[:] = [wanted["cwd"], *filter(None, wanted["env"].get("PYTHONPATH", "").split(os.pathsep)), *base]
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(wanted[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for option in filter(None, wanted["env"].get("PYTHONWARNINGS", "").split(",")):
            warnings._setoption(option)  # type: ignore[attr-defined]  # what the interpreter does with -W
        sys.argv = [wanted["module"], *wanted["arguments"]]
        sys.modules.pop(_main_of(wanted["module"]), None)  # it is to be run as __main__, as if nobody had imported it
        runpy.run_module(wanted["module"], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if not isinstance(stop.code, int | None):
            print(stop.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _main_of(module: str) -> str:
    """The module that `python -m module` runs: of a package, the one inside."""
    return f"{module}.__main__" if hasattr(sys.modules.get(module), "__path__") else module


def _wait(pid: int, timeout: float) -> int | None:
    """Exit code as subprocess gives it; None, and the child and its children are gone, where it took too long."""
    until = time.monotonic() + timeout
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None
        time.sleep(0.005)


def main() -> None:
    """Import what the commands import, then start what is asked for, one after another."""
    gc.disable()  # while importing makes what stays
    for name in LOADED:
        importlib.import_module(name)
    atexit._clear()  # exit functions of what was imported here are no child's
    base = [entry for entry in sys.path if entry not in ("", str(ROOT))]
    gc.freeze()
    gc.enable()
    for line in sys.stdin:
        wanted = json.loads(line)
        pid = os.fork()
        if not pid:
            _become(wanted, base)
        print(json.dumps(_wait(pid, wanted["timeout"])), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
