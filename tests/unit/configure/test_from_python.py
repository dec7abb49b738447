"""Arguments of the Python face mean what they say: as overrides, as stacks that exist as objects, and in a record's key."""

from __future__ import annotations

import linecache
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser

import harness
from harness.configure.from_python import composed, model_overrides, overrides_of, spelled
from harness.configure.objects import arm_of, described, divided, with_values
from harness.errors import UserError
from harness.evaluation.planned import arm_digest
from harness.records.keys import code_hash
from harness.stages.codec.int8 import Int8

CELL = """
from dataclasses import dataclass
import harness

SCALE = 2.0

def size(x):
    return x.norm(dim=-1)

@dataclass(frozen=True)
class Mine(harness.Scorer):
    power: float = 1.0

    def score(self, view):
        return SCALE * size(view.v_HND) ** self.power
"""


def cell(text: str, *, source: bool = True) -> type[Any]:
    """The class that a notebook's cell defines: its text is known to linecache, and to no file."""
    name = f"<cell {abs(hash(text))}>"
    if source:
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, name, "exec"), space)
    found: type[Any] = space["Mine"]
    return found


def plus(a: int, b: int = 0) -> int:
    return a + b


def stack(scorer: Any, value: float = 0.5) -> harness.Stack:
    return harness.Stack(keep=harness.Keep(scorer=scorer, budget=harness.Budget(value=value)))


def test_importing_the_package_loads_nothing_and_every_public_name_is_there() -> None:
    code = "import harness, sys; assert not {'torch', 'hydra', 'pandas'} & set(sys.modules); print(*harness.__all__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == sorted(done.stdout.split()) == sorted(harness.__all__)
    assert all(getattr(harness, name) is not None for name in harness.__all__)
    assert set(harness.__all__) <= set(dir(harness))
    with pytest.raises(AttributeError, match="no attribute 'nosuch'"):
        harness.nosuch  # noqa: B018


VALUES = [
    *(None, True, 3, -0.25, 1e-9, "word", "two words", "it's", "null", "True", "1", "", "a,b", "back\\slash\\", "\\'", "x=y"),
    *([1, "a b", None], {"key": [1, {"deep": "it's"}]}, "~/data/file.jsonl", "a: b", "[x]", "{y}"),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_reads_back_as_itself(value: Any) -> None:
    def plain(read: Any) -> Any:
        if isinstance(read, dict):
            return {plain(key): plain(one) for key, one in read.items()}
        return [plain(one) for one in read] if isinstance(read, list) else getattr(read, "text", read)

    override = OverridesParser.create().parse_override(f"key={spelled(value)}")
    assert plain(override.value()) == value


def test_a_text_with_a_reference_stays_that_text() -> None:
    config = composed(["task=jsonl", *overrides_of({"task__path": "~/data/${x}.jsonl"})])
    assert config.task.path == "~/data/${x}.jsonl"


def test_keywords_are_dotted_and_models_may_be_folders_or_repositories(tmp_path: Path) -> None:
    assert overrides_of({"task__lengths": [300], "codec@compress.keys": "int8"}) == [
        "task.lengths=[300]",
        "codec@compress.keys=int8",
    ]
    assert overrides_of({"keep__sinks": 4, "codec@compress.keys": "int8"}, "compress") == [
        "compress.keep.sinks=4",
        "codec@compress.keys=int8",
    ]
    assert model_overrides("smollm2") == ["model=smollm2"]
    assert model_overrides("ORG/A-1.5B") == ["model=hub", "model.repo='ORG/A-1.5B'"]
    assert model_overrides(tmp_path)[0] == "model=local"


def test_a_program_that_uses_hydra_itself_keeps_its_own(tmp_path: Path) -> None:
    import hydra

    (tmp_path / "theirs.yaml").write_text("mine: 1\n")
    with hydra.initialize_config_dir(str(tmp_path), version_base="1.3"):
        assert composed(["compress=int8"]).compress.name == "int8"
        assert hydra.compose("theirs").mine == 1


def test_what_cannot_be_composed_is_one_line() -> None:
    with pytest.raises(UserError, match=r"^model=nosuch is not there: gguf, hub, "):
        composed(["model=nosuch"])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return SCALE *", "return 0.5 * SCALE *"),
        ("x.norm(dim=-1)", "x.abs().sum(-1)"),
        ("SCALE = 2.0", "SCALE = 3.0"),
        ("@dataclass(frozen=True)", "@dataclass(frozen=True, eq=False)"),
    ],
    ids=["its own code", "a function it calls", "a value it reads", "a decorator"],
)
def test_another_version_of_a_cell_is_another_key(old: str, new: str) -> None:
    """Kind: a scorer of a notebook was changed, and its older records stood for it."""
    same = [arm_digest(arm_of(stack(cell(CELL)()))) for _ in range(2)]
    assert same[0] == same[1]
    assert arm_digest(arm_of(stack(cell(CELL.replace(old, new))()))) != same[0]


def test_a_base_of_a_cell_is_part_of_the_key() -> None:
    text = (
        CELL.replace("class Mine(", "class Base(")
        + "\nclass Mine(Base):\n    def default_recent(self, tokens, sinks):\n        return 0\n"
    )
    before = arm_digest(arm_of(stack(cell(text)())))
    assert arm_digest(arm_of(stack(cell(text.replace("SCALE *", "SCALE +"))()))) != before


def test_fields_are_part_of_the_key_and_of_the_label() -> None:
    mine = cell(CELL)
    one, two = arm_of(stack(mine())), arm_of(stack(mine(power=2.0)))
    assert (one.label, two.label) == ("mine", "mine (power 2.0)")
    assert one.point == {"keep.budget.value": 0.5}
    assert arm_digest(one) != arm_digest(two)


def test_a_class_without_source_is_refused_with_what_to_do() -> None:
    with pytest.raises(UserError, match=r"Mine has no source that can be read.*write it into a file"):
        arm_of(stack(cell(CELL + "\n# nowhere", source=False)()))


def test_a_stack_of_this_project_brings_no_source_and_hashes_as_by_name() -> None:
    arm = arm_of(harness.Stack(keys=Int8(), values=Int8()))
    assert arm.label.startswith("int8") and "_source_" not in str(arm.config)
    assert code_hash(arm.config) == code_hash({})


def test_tensors_are_told_apart_by_content_and_what_has_none_is_refused() -> None:
    assert described(torch.zeros(2), "x") != described(torch.ones(2), "x")
    assert described({1, 2}, "x") == described({2, 1}, "x")
    assert described(partial(plus, 1), "x") != described(partial(plus, 2), "x")
    with pytest.raises(UserError, match=r"keep\.scorer\.made=<generator"):
        described((one for one in "ab"), "keep.scorer.made")


def test_stacks_by_name_as_values_and_with_labels() -> None:
    mine = stack(cell(CELL)())
    assert divided("int8") == (["int8"], [])
    assert divided(["int8", mine, ["h2o", "compress.keep.sinks=4"]]) == (
        ["int8", ["h2o", "compress.keep.sinks=4"]],
        [(None, mine)],
    )
    assert divided({"a": mine, "b": [mine, mine]}) == ([], [("a", mine), ("b", mine), ("b", mine)])
    found = with_values([], [("a", mine), ("a", mine), (None, harness.Stack())])
    assert [arm.label for arm in found] == ["a"], "the same twice is one, and the full cache is there anyway"
    for wrong in ([], [3], {"a": "int8"}):
        with pytest.raises(UserError, match="stacks="):
            divided(wrong)
    with pytest.raises(UserError, match="a label of your own"):
        with_values(found, [("a", mine)])


def test_a_cell_that_names_what_cannot_be_hashed_is_refused_in_one_line() -> None:
    register = (
        "\nMINE = {}\n"
        + CELL.replace("return SCALE *", "return len(MINE) * SCALE *")
        + "\nMINE['size'] = size\nMINE['all'] = MINE\n"
    )
    with pytest.raises(UserError, match="names a value that holds itself"):
        arm_of(stack(cell(register)()))


def test_a_class_of_attributes_alone_needs_no_source_of_its_own() -> None:
    text = CELL.replace("class Mine(", "class Base(") + "\nclass Mine(Base):\n    kind = 1\n"
    keys = [
        arm_digest(arm_of(stack(cell(changed)())))
        for changed in (text, text.replace("kind = 1", "kind = 2"), text.replace("SCALE *", "SCALE +"))
    ]
    assert len(set(keys)) == 3
