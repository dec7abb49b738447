"""Corpora read from real files, packages and a data set on disk."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue

from harness.errors import UserError
from tasks.corpus import HubText, LocalText, StandardLibrary, Text, plain

ROOT = Path(__file__).parents[3]


def local(path: Path) -> LocalText:
    return LocalText(name="mine", licence="own", path=str(path))


def configured(name: str, **changes: object) -> Text:
    found = instantiate(OmegaConf.merge(OmegaConf.load(ROOT / "conf" / "corpus" / f"{name}.yaml"), changes))
    assert isinstance(found, Text)
    return found


def test_a_directory_gives_its_text_files_in_order(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second\n")
    (tmp_path / "a.txt").write_text("première", encoding="utf-8")
    (tmp_path / "c.md").write_text("not text")
    (tmp_path / "d.txt").write_text("  \n")
    assert local(tmp_path).documents() == ("première", "second")


def test_the_digest_is_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    assert local(tmp_path / "a.txt").digest == hashlib.sha256(b"one\n\n").hexdigest()
    (tmp_path / "b.txt").write_text("two")
    assert local(tmp_path / "b.txt").digest != local(tmp_path / "a.txt").digest


def test_what_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    for path, says in (
        ("none", "no such file"),
        ("empty.txt", "corpus mine holds no text"),
        ("latin.txt", "not UTF-8"),
    ):
        with pytest.raises(UserError, match=says) as caught:
            local(tmp_path / path).documents()
        assert "\n" not in str(caught.value)


def test_the_path_must_be_given() -> None:
    with pytest.raises(MissingMandatoryValue):
        configured("path")


def test_the_standard_library_is_english_prose() -> None:
    corpus = configured("stdlib")
    assert isinstance(corpus, StandardLibrary)
    text = "\n".join(corpus.documents())
    assert len(text) > 300_000
    assert text.count(" the ") > 3_000
    assert "\n****" not in text


def test_html_becomes_text() -> None:
    html = "<p>R&eacute;publique <em>du</em>&nbsp;Burundi<br><br>it's  <b>1</b> &lt; 2</p><ul><li>x</li></ul>"
    assert plain(html) == "République du Burundi\nit's 1 < 2\nx"


def test_a_data_set_is_read_by_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    rows = [{"body": "first"}, {"body": "second"}]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    corpus = configured("hub", repo=str(folder), split="train", column="body")
    assert corpus.documents() == ("first", "second")
    with pytest.raises(UserError, match=r"has no column 'text'; it has body"):
        HubText(name="hub", licence="x", repo=str(folder), split="train").documents()


def test_a_data_set_that_cannot_be_had_is_one_line_naming_set_and_revision(tmp_path: Path) -> None:
    code = (
        "from tasks.corpus import HubText; from harness.errors import UserError\n"
        "try: HubText(name='books', licence='x', repo='no/such', split='test', revision='abc').documents()\n"
        "except UserError as error: print(error)"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=120)
    assert done.stderr == ""
    assert done.stdout.count("\n") == 1
    assert done.stdout.startswith("corpus books (repo 'no/such', revision abc, split 'test') cannot be fetched: ")


@pytest.mark.slow
def test_king_james_is_whole() -> None:
    corpus = configured("kjv")
    books = corpus.documents()
    assert len(books) == 66
    assert books[0].startswith("In the beginning God created the heavens and the earth. And the earth was without form")
    assert books[-1].endswith("The grace of our Lord Jesus Christ be with you all. Amen.")
    assert not any(character.isdigit() for book in books for character in book)
    assert corpus.digest == "ef723eef9845c4d3779b558e98c3d3ab6f60b0664728c840c8bb685b5ee2a589"


@pytest.mark.slow
def test_country_reports_give_prose_without_markup() -> None:
    corpus = configured("factbook")
    documents = corpus.documents()
    assert len(documents) == 255
    assert sum(map(len, documents)) == 765_078
    assert not any(mark in document for document in documents for mark in ("<p>", "<br", "&amp;", "&nbsp;", "&eacute;"))
    assert corpus.licence == "public domain"
