"""What is appended to a folder's shards is read once, whoever wrote it, and a line only when it is whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.records import following
from harness.records.following import Following
from tests.support.record_factory import make


def line(key: str) -> bytes:
    return json.dumps(make(key=key)).encode() + b"\n"


def append(shard: Path, *parts: bytes) -> None:
    with shard.open("ab") as file:
        file.writelines(parts)


def test_only_what_was_appended_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = tmp_path / "records-a.jsonl", tmp_path / "records-b.jsonl"
    looks: list[tuple[str, int]] = []
    content = following.content

    def noted(shard: Path, start: int = 0) -> bytes:
        looks.append((shard.name, start))
        return content(shard, start)

    monkeypatch.setattr(following, "content", noted)
    append(one, line("1"), line("2"))
    reader = Following(tmp_path)
    assert [record["key"] for record in reader.fresh()] == ["1", "2"]
    before = one.stat().st_size
    assert list(reader.fresh()) == [] and looks == [(one.name, 0)]
    append(one, line("3"), line("4")[:40])  # a writer is in the middle of a line
    append(two, line("5"))
    assert sorted(record["key"] for record in reader.fresh()) == ["3", "5"]
    assert (one.name, before) in looks and (two.name, 0) in looks
    append(one, line("4")[40:])
    assert [record["key"] for record in reader.fresh()] == ["4"]
    assert [record["key"] for record in Following(tmp_path).fresh(but=one)] == ["5"]
