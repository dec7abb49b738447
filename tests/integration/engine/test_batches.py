"""Batches under a memory limit: the same records whatever the limit, one line where nothing fits."""

from __future__ import annotations

from pathlib import Path

from tests.integration.commands.test_command import TINY, harness, records

VARIES = ("timings", "written_at", "writer")
POINTS = ",".join(f"{{keep.budget.value:{0.05 * i:.2f}}}" for i in range(1, 12))


def made(tmp_path: Path, limit: str) -> dict[str, dict]:
    cwd = tmp_path / limit
    cwd.mkdir()
    out = harness(
        *TINY, "task.lengths=[400]", "compress=sink_h2o_int8", f"compress.points=[{POINTS}]", f"memory_limit={limit}", cwd=cwd
    )
    assert out.returncode == 0, out.stderr
    found = records(cwd / out.stdout.strip().splitlines()[-1])
    return {record["key"]: record for record in found}


def test_small_batches_make_the_same_records(tmp_path: Path) -> None:
    small, large = made(tmp_path, "8MiB"), made(tmp_path, "4GiB")
    assert small.keys() == large.keys() and len(small) == 2 * 12
    most = {name: max(r["timings"]["batch_sequences"] for r in found.values()) for name, found in (("s", small), ("l", large))}
    assert most["s"] < most["l"], "the limit made the batches smaller"
    for key, record in small.items():
        other = large[key]
        assert {k: v for k, v in record.items() if k not in VARIES} == {k: v for k, v in other.items() if k not in VARIES}
