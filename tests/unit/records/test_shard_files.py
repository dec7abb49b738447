"""Shards, manifests and claims as files: only plain ones are opened, what does not fit is named, clocks decide nothing."""

from __future__ import annotations

import errno
import fcntl
import json
from pathlib import Path
from typing import Any

import pytest

from harness.errors import UserError
from harness.files.package_data import once
from harness.records import store as store_module
from harness.records.claims import Claims, held
from harness.records.progress import manifests, state
from harness.records.shards import latest, load_records, read
from harness.records.store import Store
from harness.types import Record
from tests.support import hostile
from tests.support.record_factory import make, write_shard


class Work:
    """One record to make."""

    def __init__(self, key: str) -> None:
        self.key = self.claim = key


def record(key: str, **changes: Any) -> Record:
    made = make(key=key, **changes)
    return Record(**{name: made[name] for name in Record.__dataclass_fields__ if name in made})


def made(store: Store[Work], keys: str) -> list[str]:
    """The keys that a store hands out, each written at once."""
    found = []
    for free in store.rounds([Work(key) for key in keys]):
        for group in free:
            found += [work.key for work in group]
            store.append([record(work.key) for work in group])
    return found


@pytest.mark.parametrize("name", hostile.UNFIT)
def test_a_value_that_does_not_fit_is_named_and_passed_over(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The kind: null, text, huge or negative numbers, times without a zone, paths for names; no report ends there."""
    shard = write_shard(tmp_path, [make(), make(example_id="other", key="k") | {name: hostile.UNFIT[name]}])
    loaded = read(tmp_path)
    assert len(loaded) == 1 and len(loaded.unfit) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{shard}:2 is no whole record: ") and line.endswith("; passed over")


def test_many_bad_lines_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_shard(tmp_path, [make(), *(make(key=str(at), seed=None) for at in range(50))])
    assert len(load_records(tmp_path).unfit) == 50
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4 and lines[-1].endswith("47 more lines passed over")


def test_a_failed_record_without_values_fits(tmp_path: Path) -> None:
    empty = make(status="failed", score=None, output=None, kv_bytes_context=None, error="x", metrics={"nll": None}, depth=None)
    write_shard(tmp_path, [empty, make(key="k", score="-Infinity", metrics={"kl": "Infinity"})])
    assert len(read(tmp_path)) == 2 and not read(tmp_path).unfit


def test_what_is_no_plain_file_is_named_and_never_opened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = hostile.build(tmp_path)
    assert {one["key"] for one in read(run)} == {one["key"] for one in hostile.records()}
    told = manifests(run)
    assert len(told) == 2, "the plain and whole ones"
    said = capsys.readouterr().err
    for name in ("link", "dangling", "folder", "pipe", "socket"):
        assert sum(f"records-{name}.jsonl is a " in line for line in said.splitlines()) == 1, name
    assert "records-notes.jsonl:1 is not a record of this program" in said
    assert hostile.untouched(tmp_path) == []
    assert all(one.isprintable() for one in said.splitlines())


def test_a_writers_name_is_never_a_path(tmp_path: Path) -> None:
    """The kind: names from a folder as parts of paths."""
    run = hostile.build(tmp_path)
    for name in ("../../../victim", "../../outside/victim", "..", "", "a/b", "host-1-abcdef"):
        assert not held(run / "claims", name)
    with pytest.raises(UserError, match="claim="):
        Claims(run / "claims").take("../x")
    assert state(run).writers == 0
    assert hostile.untouched(tmp_path) == []


def test_a_store_writes_nothing_through_a_link_and_cuts_nothing_that_is_not_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The kind: links, hard links and other people's files under names of ours."""
    run = hostile.build(tmp_path)
    notes = (run / "records-notes.jsonl").read_bytes()
    store: Store[Work] = Store(run)
    assert made(store, "ab") == ["a", "b"]
    store.close()
    assert hostile.untouched(tmp_path) == [] and (run / "records-notes.jsonl").read_bytes() == notes
    assert (run / "claims" / "host-1-abcdef.lock").is_symlink(), "left alone"
    capsys.readouterr()
    linked = hostile.build(tmp_path / "linked", links_to_folders=True)
    for name in ("manifests", "claims", "failures", "series"):
        with pytest.raises(UserError, match=rf"{name} is a link, not a folder of this run: nothing is written there"):
            Store(linked)
        (linked / name).unlink()
    other = tmp_path / "run"
    other.symlink_to(tmp_path / "linked" / "outside")
    with pytest.raises(UserError, match="run is a link"):
        Store(other)
    assert hostile.untouched(tmp_path / "linked") == []


def test_a_shard_of_ours_is_still_mended(tmp_path: Path) -> None:
    shard = write_shard(tmp_path, [make(key="a"), make(key="b")], "gone-1-abcdef")
    whole = shard.read_bytes()
    for text, left in ((whole[:-30], whole[: whole.index(b"\n") + 1]), (whole[:-1], whole), (b'{"key": "cut', b"")):
        shard.write_bytes(text)
        Store[Work](tmp_path).close()
        assert shard.read_bytes() == left


def test_the_later_try_counts_whatever_the_clocks_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kind: order told by wall clocks. Clocks go back, machines are a day behind, redo runs on one of them."""
    today, yesterday = "2026-01-02T00:00:00.000000+00:00", "2026-01-01T00:00:00.000000+00:00"
    first = make(key="a", written_at=today, attempt=1, score=0.0)
    again = make(key="a", written_at=yesterday, attempt=2, score=1.0)
    failed = make(key="a", written_at=today, attempt=3, status="failed", score=None)
    assert latest([first, again]) == latest([again, first]) == [again]
    assert latest([failed, again, first]) == [again]
    write_shard(tmp_path, [first, make(key="b", written_at=today), make(key="c", written_at=today, status="failed")], "before")
    monkeypatch.setattr(store_module, "now", lambda: yesterday)
    store: Store[Work] = Store(tmp_path, redo=True)
    assert made(store, "abc") == ["a", "b", "c"] and store.done == {"a", "b", "c"}, "its own records count, behind or not"
    store.close()
    assert {(one["key"], one["status"], one["attempt"], one["written_at"]) for one in read(tmp_path)} == {
        (key, "ok", 2, yesterday) for key in "abc"
    }
    assert not read(tmp_path).redo_failed
    store = Store(tmp_path, redo=True)
    store.append([record("a", status="failed", score=None)])
    store.close()
    assert store.done == set() and read(tmp_path).redo_failed == {"a"}, (
        "a failure to make it again, on a clock that stands still"
    )


def test_nothing_to_write_makes_no_shard(tmp_path: Path) -> None:
    """The kind: work that is done though there is nothing to do: a file and a flush for no record."""
    store: Store[Work] = Store(tmp_path)
    store.append([])
    assert not list(tmp_path.glob("records-*"))
    store.close()


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_without_locks_work_goes_on_and_says_so(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The kind: waiting for what never comes. No lock can be had, and a writer of another machine died with its files there."""
    (tmp_path / "claims").mkdir()
    for name in ("a", "b", "other-1-abcdef"):
        (tmp_path / "claims" / f"{name}.lock").write_text("4711\nother\n")

    def missing(handle: int, how: int) -> None:
        raise OSError(code, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", missing)
    store: Store[Work] = Store(tmp_path)
    assert made(store, "ab") == ["a", "b"]
    store.close()
    (line,) = [one for one in capsys.readouterr().err.splitlines() if "no locks" in one]
    assert line.startswith(f"{tmp_path / 'claims'}: ") and "done twice" in line
    assert not held(tmp_path / "claims", "a")
    monkeypatch.setenv("KV_HARNESS_CACHE", str(tmp_path / "cache"))
    target = tmp_path / "cache" / "thing"
    assert once(target, lambda folder: (folder / "file").touch()) == target and (target / "file").exists()


def test_a_claim_that_nobody_gives_up_is_waited_for_a_while_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The kind, where locks are there: the server of a network disk keeps those of a machine that is gone."""
    for name, value in {"WAIT": 0.01, "TELL": 0.02, "PATIENCE": 0.05}.items():
        monkeypatch.setattr(store_module, name, value)
    gone = Claims(tmp_path / "claims")
    (tmp_path / "claims").mkdir()
    assert gone.take("a")
    store: Store[Work] = Store(tmp_path)
    assert made(store, "ab") == ["b", "a"]
    said = capsys.readouterr().err
    assert "waiting for 1 records that other writers claimed" in said and "made here as well" in said
    store.close()
    gone.close()


def test_a_manifest_that_does_not_fit_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_shard(tmp_path, [make()])
    (tmp_path / "manifests").mkdir()
    bad = [
        hostile.manifest(time="2026-01-01T00:00:00"),
        hostile.manifest(config={"x": 10**30}),
        hostile.manifest(writer="../x"),
        [1],
    ]
    for number, told in enumerate(bad):
        (tmp_path / "manifests" / f"{number}.json").write_text(json.dumps(told))
    assert manifests(tmp_path) == []
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(bad) and all("is no manifest: " in one for one in lines)
