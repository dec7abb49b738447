"""Names are never paths, `~` is the home folder, and both are found again by status and report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.errors import UserError
from harness.evaluation.assemble import results_folder, run_folder
from harness.files.package_data import fetch, fetch_many
from harness.files.paths import page_path, user_path
from harness.models.load import ModelSpec
from harness.models.sources import Wheel
from harness.records.keys import code_hash, named_files, other_code, run_id
from harness.stages.heads.head_list import head_list
from tests.support.started import started

SHA = "0" * 64
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    "name, start",
    [
        ("org/tiny", "org_tiny-"),
        ("../escaped", "_escaped-"),
        ("/etc/x", "_etc_x-"),
        ("..", "model-"),
        (".", "model-"),
        ("", "model-"),
        ("-rf", "rf-"),
        ("a\\b\nc", "a_b_c-"),
        ("niah_single_1+b.c", "niah_single_1+b.c-"),
        ("模型", "模型-"),
        ("x" * 400, "x" * 96 + "-"),
    ],
)
def test_a_run_is_one_folder_whatever_its_names(name: str, start: str) -> None:
    """Kind: a label used as a path; of models and of tasks."""
    as_model, as_task = run_id(name, "jsonl", {}), run_id("tiny", name, {})
    assert as_model.startswith(start) and as_model.endswith("44136fa3")
    assert as_task.startswith("tiny-" + start.replace("model-", "task-"))
    for found in (as_model, as_task):
        assert Path(found).name == found and not found.startswith((".", "-")) and len(found.encode()) < 255


def test_a_model_in_the_present_folder_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "mine"
    (home / "sub").mkdir(parents=True)
    monkeypatch.chdir(home / "sub")
    names = {path: ModelSpec(source="path", path=path).name for path in (".", "..", "../sub/", "/", "~", "a/b")}
    monkeypatch.setenv("HOME", str(home))
    assert names | {"~": ModelSpec(source="path", path="~").name} == {
        ".": "sub", "..": "mine", "../sub/": "sub", "/": "path", "~": "mine", "a/b": "b",
    }  # fmt: skip


def test_the_home_folder_is_meant_in_every_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kind: a folder named ~."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert results_folder({"results_dir": "~/kvres"}) == tmp_path / "kvres"
    (tmp_path / "heads.json").write_text(json.dumps({"heads": [[0, 1]]}))
    assert head_list("keep.heads", None, "~/heads.json") == {(0, 1)}
    before = code_hash({"file": "~/heads.json"})
    assert before == code_hash({"file": str(tmp_path / "heads.json")}) != code_hash({}), "what the file holds is in the key"
    with pytest.raises(UserError, match="home folder"):
        user_path("~no_such_user_here/x")


def test_a_run_folder_is_inside_the_results(tmp_path: Path) -> None:
    model = {"_target_": "harness.models.load.ModelSpec", "name": "../../escaped", "source": "hub", "repo": "org/name"}
    task = {"_target_": "tasks.stream.Stream"}
    plain = {"limit": None, "seed": 0, "memory_limit": "4GiB", "progress": False, "results_dir": str(tmp_path / "results")}
    folder = run_folder({"model": model, "task": task, **plain})
    assert folder.parent == tmp_path / "results" and "/" not in folder.name


@pytest.mark.parametrize("package", ["../../x", "a/b", "--index-url=x", "a b", "", "a\nb"])
def test_a_package_is_a_name(package: str) -> None:
    for call in (
        lambda: fetch(package, "1.0", SHA, "m", SHA),
        lambda: fetch_many(package, "1.0", SHA, "m"),
        lambda: Wheel(package=package, version="1.0", sha256=SHA, member="m", member_sha256=SHA),
    ):
        with pytest.raises(UserError, match="package="):
            call()


def test_a_sweep_in_the_home_folder_is_there(tmp_path: Path) -> None:
    """The jobs too: Hydra composes them anew, from what was typed."""
    (tmp_path / "q.jsonl").write_text('{"context": "The code is 12.", "question": "Which?", "answers": ["12"]}\n')
    tiny = ("model=tiny_llama", "corpus=stdlib", "progress=false", "task=jsonl", "task.path=q.jsonl", "compress=int8")
    arguments = ["-m", *tiny, 'hydra.sweep.dir="~/sweep"', 'results_dir="~/runs"']
    env = {"HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    out = started("harness", arguments, tmp_path, env)
    assert out.returncode == 0, out.stderr
    assert not (tmp_path / "~").exists()
    assert (tmp_path / "home" / "sweep" / "0").is_dir()
    assert [run.name.rpartition("-")[0] for run in (tmp_path / "home" / "runs").iterdir()] == ["tiny_llama-jsonl"]


def test_a_file_to_write_is_one_and_links_to_it_are_followed(tmp_path: Path) -> None:
    """The kind: a path that is renamed over must be a plain file, and not one that is written beside it."""
    (tmp_path / "link.html").symlink_to(tmp_path / "there.html")
    assert page_path("out", str(tmp_path / "link.html")) == tmp_path / "there.html"
    for wrong, beside in ((str(tmp_path), ()), ("/dev/null", ()), ("", ()), (str(tmp_path / "x.csv"), (".csv",))):
        with pytest.raises(UserError, match="out="):
            page_path("out", wrong, beside)


@pytest.mark.parametrize("name", ["a" * 5000, "~nobody_of_this_name/x", "x\0y", "/"])
def test_a_manifest_may_name_files_that_no_system_has(name: str) -> None:
    """Found by: a report ended in a traceback on a folder whose configuration named a file of 5,000 letters."""
    assert list(named_files({"part": {"file": name}})) == []
    assert isinstance(other_code({"config": {"part": {"file": name}}, "code_sha256": "0"}), bool)


def test_a_list_of_heads_that_is_nested_without_end_is_no_list(tmp_path: Path) -> None:
    file = tmp_path / "heads.json"
    file.write_text('{"heads":' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(UserError, match="RecursionError"):
        head_list("keep.heads", None, str(file))
