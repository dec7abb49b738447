"""Runs the command in children forked from one process that has loaded everything, so that many can be killed in seconds.

As a script: `python -m tests.support.forked` reads steps from its input, a line of JSON each, runs it and prints what came of it.
A step is {"arguments": [...]} and, where wanted, "workers": n runs at once; "after_records": k or "after_s": t, to kill all with
SIGKILL when k records more than before are there or after t seconds; "cut": bytes to cut off the newest shard afterwards;
"file_limit": bytes that a file may have, as on a full disk; "env": {...}.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any


def lines(results: Path) -> int:
    """Whole lines in all shards below a folder."""
    return sum(shard.read_bytes().count(b"\n") for shard in results.glob("*/records-*.jsonl"))


def child(one: dict[str, Any], log: Path) -> int:
    """Fork one run of the command; returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.environ.update(one.get("env", {}))
        if one.get("file_limit"):
            resource.setrlimit(resource.RLIMIT_FSIZE, (one["file_limit"], one["file_limit"]))
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        from harness.__main__ import main

        sys.argv = ["harness", *one["arguments"]]
        main()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
        if not isinstance(stop.code, int):
            print(stop.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def step(one: dict[str, Any], log: Path) -> dict[str, Any]:
    """Run one step of the plan."""
    results = Path(next(a for a in one["arguments"] if a.startswith("results_dir=")).split("=", 1)[1])
    before, start = lines(results), time.monotonic()
    alive = {child(one, log) for _ in range(one.get("workers", 1))}
    codes: list[int] = []
    killed = False
    while alive:
        for pid in list(alive):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                alive.discard(pid)
                codes.append(os.waitstatus_to_exitcode(status))
        k, t = one.get("after_records"), one.get("after_s")
        if not killed and (
            (k is not None and lines(results) >= before + k) or (t is not None and time.monotonic() > start + t)
        ):
            killed = True
            for pid in alive:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    if one.get("cut"):
        shard = max(results.glob("*/records-*.jsonl"), key=lambda path: path.stat().st_mtime_ns)
        os.truncate(shard, max(shard.stat().st_size - one["cut"], 0))
    text = log.read_text()
    return {
        "codes": codes,
        "killed": killed,
        "records": lines(results) - before,
        "text": text,
        "seconds": time.monotonic() - start,
    }


def main() -> None:
    """Load everything that a child would, then run steps in the current directory."""
    from hydra import compose, initialize_config_dir

    import harness.command  # noqa: F401
    from harness.__main__ import CONF
    from harness.configure.typed import build
    from harness.kv.attention import NAME
    from harness.models.load import load

    with initialize_config_dir(str(CONF), version_base="1.3"):
        load(build(compose("config", overrides=["model=tiny_llama"]).model, "model"), NAME)
    gc.freeze()  # what is loaded is no child's to walk through
    for number, line in enumerate(sys.stdin):
        print(json.dumps(step(json.loads(line), Path(f"step{number}.log"))), flush=True)


if __name__ == "__main__":
    main()
