"""What is recommended from folders that may be anybody's, and from records that say less than they seem to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.advice.engine_flags import flag
from harness.advice.evidence import evidence
from harness.recommend import main
from tests.support.hostile import manifest
from tests.support.record_factory import ROW, make

INT8 = {role: {"codec": "int8"} for role in ("keys", "values")}


def folder(place: Path, units: list[dict[str, Any]], about: dict[str, Any] | None = None, **arm: Any) -> Path:
    """A run of the full cache and int8, both right on every one of these examples; `about`: its manifest."""
    place.mkdir(parents=True)
    row = {"stack": "int8", "stack_config": {"keep": None}, "codec_info": INT8, "kv_bytes_context": 500 * ROW} | arm
    records = [make(**(one | more)) for one in units for more in ({}, row)]
    (place / "records-a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    (place / "manifests").mkdir()
    (place / "manifests" / "20260101T000000Z-a.json").write_text(json.dumps(manifest(command=[]) if about is None else about))
    return place


def units(n: int, **more: Any) -> list[dict[str, Any]]:
    return [{"example_id": f"e{i}", "group_id": f"g{i}"} | more for i in range(n)]


def said(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    assert main([str(one) for one in arguments]) == code
    found = capsys.readouterr()
    return found.out + found.err


def test_a_document_is_one_unit_whatever_the_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Found by: twenty documents asked with ten seeds counted as 200 units, and gave a guarantee that takes 149.

    The kind: whatever is concluded from examples counts documents.
    """
    asked = [one | {"seed": seed} for seed in range(10) for one in units(20)]
    run = folder(tmp_path / "run", asked)
    (found,) = evidence([run])
    (arm,) = found.arms
    assert arm.candidate.units is not None and arm.candidate.units.n == 20
    assert "no guarantee" in said(capsys, run, "--max-loss", "0.02")


@pytest.mark.parametrize("size", [0, -5])
def test_a_point_without_bytes_is_no_candidate(tmp_path: Path, capsys: pytest.CaptureFixture[str], size: int) -> None:
    """Found by: records of 0 bytes were the smallest cache with a guarantee. Negative ones do not even read."""
    run = folder(tmp_path / "run", units(160), kv_bytes_context=size)
    text = said(capsys, run, "--max-loss", "0.02")
    assert "with confidence" not in text
    assert ("int8: bytes of 160 of 160 examples are missing or not above zero" in text) == (size == 0)


def test_a_full_cache_without_bytes_divides_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Found by: a ratio to 0 bytes was a traceback."""
    run = folder(tmp_path / "run", units(160, kv_bytes_context=0), kv_bytes_context=500 * ROW)
    assert "int8: " in said(capsys, run, "--max-loss", "0.02")


def test_what_compressed_nothing_is_no_evidence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Found by: a stack whose exact tail held every context whole was recommended for longer ones, as it lost nothing."""
    run = folder(tmp_path / "run", units(160), status="not_exercised")
    text = said(capsys, run, "--max-loss", "0.02")
    assert "left out: int8: nothing was compressed on any of its examples" in text and "with confidence" not in text


def test_units_that_compressed_nothing_do_not_count(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", units(12))
    lines = (run / "records-a.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    for one in records[1::4]:  # int8 on every second example
        one["status"] = "not_exercised"
    (run / "records-a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    (arm,) = evidence([run])[0].arms
    assert arm.candidate.units is not None and arm.candidate.units.n == 6


MODELS: list[Any] = ["x", 5, None, [], {"_target_": "os.system"}, {"source": "path"}, {"_target_": "tasks.needle.Needle"}]


@pytest.mark.parametrize("model", MODELS)
def test_a_model_that_a_manifest_makes_up_is_not_known(tmp_path: Path, capsys: pytest.CaptureFixture[str], model: Any) -> None:
    """Found by: a model that was a text was a traceback. The kind: nothing of a folder is believed to have a type."""
    run = folder(tmp_path / "run", units(160), manifest(config={"model": model}))
    text = said(capsys, run, "--max-loss", "0.02", "--seq", "1500")
    assert "no bytes at 1500 tokens: the shape of smollm2 is not known here" in text


@pytest.mark.parametrize(
    ("task", "command"), [("x", 5), (None, "a text"), ([1], [1, None, "task.per_cell=2"]), ({"per_cell": True}, {"a": 1})]
)
def test_commands_and_tasks_that_a_manifest_makes_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], task: Any, command: Any
) -> None:
    run = folder(tmp_path / "run", units(40), manifest(config={"task": task}, command=command))
    text = said(capsys, run, "--max-loss", "0.02")
    assert "149 units like these would settle it" in text and "python -m harness" in text and "limit=149" in text
    assert "no quality evidence at 9000" in said(capsys, run, "--max-loss", "0.02", "--seq", "9000")


@pytest.mark.parametrize("info", [{"keys": "x", "values": 3}, {"keys": [], "values": {}}])
def test_codecs_that_a_record_makes_up_have_no_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], info: dict[str, Any]
) -> None:
    run = folder(tmp_path / "run", units(160), codec_info=info)
    assert "nearest in engines" not in said(capsys, run, "--max-loss", "0.02")


def test_no_engine_shares_stores_or_keeps_keys_before_rope() -> None:
    """Found by: int8 over merged layers was given the flag of an engine's plain int8."""
    assert flag({"keep": None}, INT8) is not None
    for more in ({"share": {"_target_": "x"}}, {"keep": {}}, {"rope": "pre"}, {"positions": "cache"}):
        assert flag({"keep": None} | more, INT8) is None


def test_a_folder_given_twice_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Found by: the same run twice was answered jointly over two tasks."""
    run = folder(tmp_path / "run", units(160))
    text = said(capsys, run, tmp_path / "run" / ".", "--max-loss", "0.02")
    assert "jointly" not in text and text.count("with confidence") == 1


def test_stale_records_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The kind: whoever reads a folder speaks of the same records, and says which it left out."""
    about = manifest() | {"samples": {"0": {f"e{i}": "d" for i in range(6)}}}
    run = folder(tmp_path / "run", units(8), about)
    assert "4 stale record(s)" in said(capsys, run, "--max-loss", "0.02")
