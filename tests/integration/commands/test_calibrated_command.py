"""`python -m harness` with codecs that ask for calibration: measured once, recorded, part of the key, refused without its text."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.started import started

ROOT = Path(__file__).parents[3]
TINY = (
    "model=tiny_llama",
    "corpus=stdlib",
    "task=needle",
    "progress=false",
    "task.lengths=[400]",
    "task.per_cell=1",
    "limit=1",
)
FEW = [
    f"compress.{role}.calibration.{key}={value}"
    for role in ("keys", "values")
    for key, value in (("tokens", 512), ("window", 256))
]


def harness(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return started("harness", arguments, cwd, {"PYTHONPATH": str(ROOT), "KV_HARNESS_CACHE": str(cwd / "cache")})


def records(cwd: Path) -> list[dict[str, Any]]:
    files = sorted((cwd / "results").rglob("records-*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cwd = tmp_path_factory.mktemp("calibrated")
    out = harness(*TINY, "compress=int8_static", *FEW, cwd=cwd)
    assert out.returncode == 0, out.stderr
    assert out.stderr.count("measuring keys and values on 51") == 1, "keys and values share one table"
    return cwd


def test_the_record_says_where_its_scales_come_from(done: Path) -> None:
    (static,) = [r for r in records(done) if r["stack"] != "full"]
    for role in ("keys", "values"):
        info = static["codec_info"][role]
        assert (info["scale"], info["axis"]) == ("calibrated", "channel")
        about = info["calibration"]
        assert (about["corpus"], about["percentile"], about["window"]) == ("stdlib", 100.0, 256)
        assert static["stack_config"][role]["calibration"]["table"] == about["table"]
    assert static["storage"] == "packed"
    n = static["tokens_seen"]
    assert static["bytes"]["logical"]["payload"] == 4 * 2 * 2 * n * 64  # layers, KV heads, keys and values
    assert static["bytes"]["logical"]["metadata"] == 4 * 2 * 2 * 64 * 4
    assert static["kv_bytes_full"] / static["kv_bytes_context"] == pytest.approx(2 * n / (n + 4))


def test_the_same_run_again_measures_nothing_and_adds_nothing(done: Path) -> None:
    before = len(records(done))
    out = harness(*TINY, "compress=int8_static", *FEW, cwd=done)
    assert out.returncode == 0, out.stderr
    assert "measuring" not in out.stderr
    assert len(records(done)) == before


def test_calibration_text_that_is_not_there_ends_the_run_before_the_model(done: Path) -> None:
    out = harness(*TINY, "compress=fp8_e4m3_static", "corpus@compress.keys.calibration.corpus=path",
                  "compress.keys.calibration.corpus.path=nowhere.txt", "model=local", "model.path=no_model", cwd=done)  # fmt: skip
    assert out.returncode != 0
    assert "Traceback" not in out.stderr
    assert len(out.stderr.strip().splitlines()) == 1
