"""Every value of every YAML member is checked before anything is made of it: what no number or name can be is one line."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, get_type_hints

import pytest
from omegaconf import OmegaConf

from harness.configure.arms import stack_arms
from harness.configure.objects import arm_of
from harness.configure.typed import TARGET, build, escaped
from harness.errors import UserError
from harness.stages.budget import Amount
from harness.stages.codec.turboquant import TurboQuant
from harness.stages.keep import Keep
from harness.stages.layers.pyramid import Pyramid
from harness.stages.score.h2o import H2O
from harness.stages.share.pooled_heads import PooledHeads
from harness.stages.stack import Stack
from tests.support.conf_tree import composed, members

GROUPS = ("model", "corpus", "task", "compress", "keep", "layers", "heads", "codec")
WHERE = {"model": "model", "corpus": "corpus", "task": "task"}
GIVEN = {"path": "/nonexistent", "repo": "org/name"}  # what members leave to the command line
HUGE = 1 << 70
WRONG: dict[type, tuple[Any, ...]] = {
    bool: (1, 0.0, "true", None),
    int: (True, 4.0, "4", math.nan, math.inf, HUGE, -HUGE, -5, None, [4]),
    float: (True, "0.5", math.nan, math.inf, -math.inf, HUGE, -5.0, None, [0.5]),
    str: (5, True, 1.5, 1e10, math.nan, None, ["a"]),
}
ANY_SIGN = {"seed"}  # below 0 it is a seed as any other


def tree(group: str, name: str) -> dict[str, Any]:
    """A member as a run has it, with what it leaves to the command line."""
    config = composed(group, name)
    for key, value in GIVEN.items():
        if OmegaConf.is_missing(config, key) or (name == "jsonl" and key == "path"):
            config[key] = value
    found: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    return {key: value for key, value in found.items() if group != "compress" or key not in ("name", "points")}


def fields(config: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], type, bool]]:
    """(where, type, whether null is allowed) of all plain arguments of a tree, those that its YAML leaves out too."""
    hints = get_type_hints(resolve_name(config[TARGET]))
    made_later = {name for name, one in resolve_name(config[TARGET]).__dataclass_fields__.items() if not one.init}
    for key, hint in hints.items():
        for kind in WRONG:
            if key not in made_later and hint in (kind, kind | None):
                yield (*path, key), kind, hint != kind
    for key, value in config.items():
        if isinstance(value, Mapping) and TARGET in value:
            yield from fields(value, (*path, key))


def changed(config: Mapping[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    first, *others = path
    return {**config, first: changed(config[first], tuple(others), value) if others else value}


@pytest.mark.parametrize("group, name", [(group, name) for group in GROUPS for name in members(group)])
def test_a_value_of_the_wrong_kind_is_one_line_that_names_it(group: str, name: str) -> None:
    """Kind: YAML's 4.0, true, "4", nan or 10^30 computed with as a number, 123 taken for a name."""
    config, where = tree(group, name), WHERE.get(group, f"stack {name!r}")
    tried = 0
    for path, kind, optional in fields(config):
        for value in WRONG[kind]:
            if (value is None and optional) or (value == -5 and path[-1] in ANY_SIGN):
                continue
            with pytest.raises(UserError) as error:
                build(changed(config, path, value), where)
                pytest.fail(f"{'.'.join(path)}={value!r} was taken")
            line = str(error.value)
            assert "\n" not in line and path[-1] in line and line.startswith(where), line
            tried += 1
    assert tried or not list(fields(config))


OUTSIDE = """
from __future__ import annotations
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal
if TYPE_CHECKING:
    from nowhere import Thing

@dataclass(frozen=True, kw_only=True)
class Data:
    name: str
    bits: int = 4
    sizes: Sequence[int] = ()
    how: Literal["a", "b"] = "a"
    part: Plain | None = None
    about: Mapping[str, float] | None = None

class Plain:
    def __init__(self, bits: int = 4, **others: int) -> None:
        self.bits = bits

def function(bits: int = 4) -> Plain:
    return Plain(bits)

def unresolved(bits: int, thing: Thing | None = None) -> Plain:
    return Plain(bits)
"""


@pytest.mark.parametrize(
    "values, wanted",
    [
        ({"bits": 4.0}, "task.bits=4.0 is not possible: a whole number"),
        ({"name": 12}, """task.name=12 is not possible: a text; as a text it is "'12'\""""),
        ({"name": " "}, "task.name=' ' is not possible: a text that is not empty"),
        ({"sizes": [1, True]}, "task.sizes=[1, True] is not possible: a list (each a whole number)"),
        ({"sizes": 3}, "task.sizes=3 is not possible"),
        ({"how": "c"}, "task.how='c' is not possible: one of a, b"),
        ({"part": "int8"}, "task.part='int8' is not possible: a part of its own"),
        ({"part": {TARGET: "outer_typed.Plain", "bits": True}}, "task.part.bits=True is not possible"),
        ({"part": {TARGET: "outer_typed.function", "bits": "4"}}, "task.part.bits='4' is not possible"),
        ({"about": {"x": "1"}}, "task.about={'x': '1'} is not possible: a dictionary"),
        ({"about": {"x": math.nan}}, "task.about.x=nan is not possible: a finite number"),
        ({"bit": 4}, "task.bit=4 is not possible: Data takes "),
        ({"part": {TARGET: "outer_typed.function", "of": "x"}}, "task.part.of='x' is not possible: function takes bits; ~task"),
        ({"part": {TARGET: "outer_typed.unresolved"}}, "task.part.bits is missing: unresolved takes bits, thing"),
    ],
)
def test_a_class_from_outside_the_project_is_checked_alike(
    values: dict[str, Any], wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kind: the rule stands where things are built, not in each class."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "outer_typed.py").write_text(OUTSIDE)
    good = {TARGET: "outer_typed.Data", "name": "x"}
    assert build(good | {"bits": 3, "sizes": [1, 2], "about": {"x": 1}}, "task").bits == 3
    assert build({TARGET: "outer_typed.unresolved", "bits": 2}, "task").bits == 2
    with pytest.raises(UserError) as error:
        build(good | values, "task")
    assert str(error.value).startswith(f"task: {wanted}"), error.value


@pytest.mark.parametrize(
    ("name", "changes", "wanted"),
    [
        (
            "low_rank_weights",
            ["codec@compress.values=exact"],
            "stack 'low_rank_weights': point values.rank.value=0.5 is not possible: values has of, or set compress.points",
        ),
        (
            "low_rank_weights",
            ["codec@compress.values=exact", "compress.points=[{keys.rank.value: 0.5}]"],
            "stack 'low_rank_weights' at {'keys.rank.value': 0.5}: compress.values.of='weights' is not possible: Exact takes "
            "name; ~compress.values.of takes it out",
        ),
        (
            "h2o",
            ["keep@compress.keep=window", "+compress.keep.scorer.window=4"],
            "compress.keep.scorer.window=4 is not possible: ",
        ),
        (
            "transmla",
            ["share@compress.share=minicache"],
            "point share.fraction=0.375 is not possible: share has t, retain, start",
        ),
    ],
)
def test_a_key_that_another_part_had_is_one_line(name: str, changes: list[str], wanted: str) -> None:
    """Kind: a part is swapped, and what was set in the one before it stays set."""
    with pytest.raises(UserError) as error:
        stack_arms(name, changes)
    assert wanted in str(error.value) and "\n" not in str(error.value)


def test_what_was_left_over_can_be_taken_out() -> None:
    points = "compress.points=[{keys.rank.value: 0.5}]"
    (arm,) = stack_arms("low_rank_weights", ["codec@compress.values=exact", "~compress.values.of", points])
    assert not arm.stack.values.lossy


@pytest.mark.parametrize("config", [None, 5, "x", [], {}, {"name": "x"}])
def test_what_is_no_part_at_all_is_one_line(config: Any) -> None:
    with pytest.raises(UserError, match=r"^model=.*a member of conf/model"):
        build(config, "model")


@pytest.mark.parametrize("text", ["${x}", "a/${x}.jsonl", r"a\${x}", r"\\${x}", "${", "}${oc.env:HOME}", r"a\b", "$${x}$"])
def test_a_text_that_looks_like_a_reference_arrives_as_it_is(text: str) -> None:
    """Kind: a resolved value that is resolved once more; a path, a prompt or a stop string may hold it."""
    needle = tree("task", "needle") | {"intro": text, "stop": [text, "b"]}
    found = build(needle, "task")
    assert (found.intro, found.stop) == (text, (text, "b"))
    assert OmegaConf.to_container(OmegaConf.create(escaped({"a": [text]})), resolve=True) == {"a": [text]}


@pytest.mark.parametrize(
    ("stack", "where"),
    [
        (Stack(keys=TurboQuant(bits=True)), "compress.keys.bits=True"),
        (Stack(values=TurboQuant(bits=4.0)), "compress.values.bits=4.0"),  # type: ignore[arg-type]
        (Stack(share=PooledHeads(groups=True)), "compress.share.groups=True"),
        (Stack(keep=Keep(scorer=H2O(), sinks=True, budget=Amount(value=0.5))), "compress.keep.sinks=True"),
        (Stack(keep=Keep(scorer=H2O(), layers=Pyramid(protected=True), budget=Amount(value=0.5))), "protected=True"),
    ],
)
def test_a_part_that_exists_as_an_object_is_held_to_the_same_rule(stack: Stack, where: str) -> None:
    """Found by: `bits=4.0` of a stack made in Python was a TypeError in each of its records, `groups=True` one group."""
    with pytest.raises(UserError, match=re.escape(where)):
        arm_of(stack)
