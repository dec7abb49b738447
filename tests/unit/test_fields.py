"""Fields that are given in several spellings and read in one."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from dataclasses import FrozenInstanceError, dataclass, fields, replace

import pytest

from harness.fields import read_as


@dataclass(frozen=True, kw_only=True)
class Shelf:
    needed: Sequence[int] = read_as(lambda one, given: tuple(given))
    sizes: Sequence[int] = read_as(lambda one, given: tuple(given), (1, 2))
    name: str = read_as(lambda one, given: given or f"{len(one.sizes)} sizes", "")


def test_spellings_are_one_value() -> None:
    given, same = Shelf(needed=[3], sizes=[1, 2]), Shelf(needed=(3,))
    assert given == same and hash(given) == hash(same) and given.sizes == (1, 2)
    assert given.name == "2 sizes" and Shelf(needed=[], name="own").name == "own"


def test_copies_read_the_same_and_replace_reads_anew() -> None:
    one = Shelf(needed=[3])
    assert pickle.loads(pickle.dumps(one)) == copy.deepcopy(one) == replace(one) == one
    assert replace(one, sizes=[4]).sizes == (4,)


def test_it_is_a_frozen_field_like_any_other() -> None:
    assert [(f.name, f.default) for f in fields(Shelf)][1:] == [("sizes", (1, 2)), ("name", "")]
    with pytest.raises(TypeError, match="needed"):
        Shelf()  # type: ignore[call-arg]
    with pytest.raises(FrozenInstanceError):
        Shelf(needed=[]).sizes = (1,)  # type: ignore[misc]
