"""The plain values of a run and the spelling of several stacks: one line on what is wrong, before anything is composed."""

from __future__ import annotations

from typing import Any

import pytest

from harness.configure.arguments import check_arguments
from harness.errors import UserError
from harness.evaluation.assemble import Options

GOOD: dict[str, Any] = {"limit": None, "seed": 0, "memory_limit": "4GiB", "results_dir": "results", "progress": True}
BAD = [
    ("limit", 0),
    ("limit", 1.5),
    ("seed", "a"),
    ("seed", [0, 0]),
    ("seed", []),
    ("seed", 10**23),
    ("memory_limit", "foo"),
    ("time_limit", -5),
    ("decoded_views", "on"),
    ("decoded_views", True),
    ("batch_invariant", "auto"),
    ("time_limit", True),
    ("redo", "maybe"),
    ("progress", "maybe"),
    ("results_dir", None),
    ("results_dir", ""),
]


@pytest.mark.parametrize("key, value", BAD)
def test_a_bad_value_is_named_with_its_key(key: str, value: object) -> None:
    with pytest.raises(UserError, match=rf"^{key}=") as error:
        Options.of(GOOD | {key: value})
    assert "\n" not in str(error.value)


def test_good_values_are_taken() -> None:
    found = Options.of(GOOD | {"seed": [3, -1], "limit": 2, "time_limit": 1})
    assert (found.seeds, found.limit, found.time_limit, found.memory_limit) == ((3, -1), 2, 1.0, 4 << 30)


@pytest.mark.parametrize(
    "argument, hint",
    [
        ("compress=int8,h2o", "use stacks=[int8,h2o]"),
        ("stacks=int8,h2o", "use stacks=[int8,h2o]"),
        ("seed=0,1", "use -m seed=0,1"),
        ("compress=[int8]", "several are stacks=[int8]"),
        ("compress.keep.budget.value=0.5", "choose it with compress=NAME"),
    ],
)
def test_a_misspelt_list_is_told_how_to_write_it(argument: str, hint: str) -> None:
    with pytest.raises(UserError) as error:
        check_arguments([argument])
    assert hint in str(error.value)
