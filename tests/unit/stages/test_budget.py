"""Budgets: decimal fractions exactly, the most tokens for a number of bytes, refusals in one line."""

from __future__ import annotations

from typing import Any

import pytest

from harness.errors import UserError
from harness.kv.memory import predict
from harness.kv.shape import LayerShape, ModelShape
from harness.stages.budget import Amount
from harness.stages.stack import Stack
from tests.support import conf_tree
from tests.support.oracles.keep import tokens_of_fraction

SHAPE = ModelShape((LayerShape(2, 64, 64),) * 3 + (LayerShape(2, 64, 64, 16),), 4)


def nothing(n: int) -> int:
    raise AssertionError("bytes are not asked for")


@pytest.mark.parametrize(
    ("value", "context", "tokens"),
    [(0.1, 30, 3), (0.1, 31, 4), (0.29, 100, 29), (0.57, 100, 57), (0.07, 100, 7), (1.0, 77, 77), (1, 77, 77), (0.2, 525, 105)],
)
def test_a_fraction_is_exact_decimal_arithmetic_rounded_up(value: float, context: int, tokens: int) -> None:
    assert Amount(value=value).tokens(context, nothing) == tokens == tokens_of_fraction(value, context)


def test_every_hundredth_of_every_length() -> None:
    for percent in range(1, 101):
        for context in (1, 2, 3, 99, 100, 101, 1024):
            found = Amount(value=percent / 100).tokens(context, nothing)
            assert found == -(-percent * context // 100)
            assert 1 <= found <= context


def test_tokens_are_taken_as_they_are() -> None:
    assert Amount(unit="tokens", value=64).tokens(10, nothing) == 64
    assert Amount(unit="tokens", value=64.0).tokens(1000, nothing) == 64


# --- bytes -------------------------------------------------------------------------------------------------------


def most_rows(stack: Stack, context: int, value: int) -> int:
    """By trying every number of tokens."""
    fits = [n for n in range(context + 1) if predict(stack, SHAPE, n, 2, context) <= value]
    return max(fits, default=0)


def stacks() -> list[str]:
    return [n for n in conf_tree.members("compress") if conf_tree.stack(n).keep is not None]


@pytest.mark.parametrize("name", stacks())
def test_bytes_give_the_most_rows_that_fit(name: str) -> None:
    context = 200
    stack = conf_tree.stack(name)
    whole = predict(stack, SHAPE, context, 2, context)
    for value in (whole, whole - 1, whole + 1, whole // 2, whole // 3, whole * 9 // 10, SHAPE.full_bytes(context, 2)):
        found = Amount(unit="bytes", value=value).tokens(context, lambda n: predict(stack, SHAPE, n, 2, context))
        assert found == most_rows(stack, context, value)


def test_the_bytes_of_the_whole_context_keep_it_whole() -> None:
    """A full context stores no positions, so it takes less than one that lost a token."""
    stack = conf_tree.stack("snapkv", "keep.budget.unit=bytes", f"keep.budget.value={SHAPE.full_bytes(200, 2)}")
    assert stack.budget(200, lambda n: predict(stack, SHAPE, n, 2, 200)) == 200


def test_rows_rise_with_bytes_in_every_stack() -> None:
    for name in stacks():
        stack = conf_tree.stack(name)
        sizes = [predict(stack, SHAPE, n, 2, 200) for n in range(201)]
        rows = [Amount(unit="bytes", value=v).tokens(200, sizes.__getitem__) for v in range(50_000, 400_000, 25_000)]
        assert rows == sorted(rows)


def test_too_few_bytes_for_one_example_are_refused_for_it() -> None:
    stack = conf_tree.stack("sink_h2o", "keep.budget.unit=bytes", "keep.budget.value=10")
    with pytest.raises(UserError, match=r"keep\.budget\.value=0 tokens is too small"):
        stack.budget(200, lambda n: predict(stack, SHAPE, n, 2, 200))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"unit": "percent", "value": 10},
            r"keep\.budget\.unit='percent' is not possible: allowed are tokens, fraction, bytes",
        ),
        ({"value": 0.0}, r"keep\.budget\.value=0\.0 .* above 0 and at most 1"),
        ({"value": 1.1}, r"keep\.budget\.value=1\.1"),
        ({"value": float("nan")}, r"keep\.budget\.value=nan"),
        ({"value": "0.5"}, r"keep\.budget\.value='0\.5' .* a number"),
        ({"value": True}, r"keep\.budget\.value=True .* a number"),
        ({"unit": "tokens", "value": 0}, r"keep\.budget\.value=0 .* a positive whole number of tokens"),
        ({"unit": "tokens", "value": 2.5}, r"keep\.budget\.value=2\.5"),
        ({"unit": "bytes", "value": -1}, r"keep\.budget\.value=-1 .* of bytes"),
        ({"unit": "bytes", "value": float("inf")}, r"keep\.budget\.value=inf"),
    ],
)
def test_settings_are_refused_in_one_line(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        Amount(**fields)
