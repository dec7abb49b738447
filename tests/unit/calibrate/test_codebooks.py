"""Codebooks fitted on calibration text: ranges and points equal a plain sort and plain means of the stock model's cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.calibrate.codebooks import BINS, measured
from harness.calibrate.codec_limits import calibrated, limits
from harness.engine.engine import Engine
from harness.kv.attention import NAME
from harness.models.load import LM, ModelSpec, load
from harness.stages.codec.codebook import best_points, midpoints
from harness.stages.codec.kvquant import KVQuant
from harness.stages.stack import Stack
from tests.support import conf_tree
from tests.support.tiny_models import engine, ids
from tests.unit.calibrate.test_calibrate import SMALL, stock, wanted

WINDOWS = [ids(100, 1), ids(100, 2), ids(37, 3)]


def codec(role: str, **settings: Any) -> KVQuant:
    return KVQuant(calibration=wanted(percentile=98), **settings).for_role(role)


def exact(family: str, side: int, *, unrotated: bool = False) -> list[Tensor]:
    """Rows [H, N, D] of every layer, each window without its first token."""
    found = []
    for layer, rope in enumerate(engine(family).ropes):
        windows = [stock(family, [window])[layer][side] for window in WINDOWS]
        if unrotated:
            assert rope is not None
            windows = [rope.unrotate(x, torch.arange(x.shape[1])) for x in windows]
        found.append(torch.cat([x[:, 1:] for x in windows], 1))
    return found


@pytest.mark.parametrize("unrotated", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_key_ranges_are_a_sort_and_points_the_means_of_their_numbers(family: str, unrotated: bool) -> None:
    found = measured(engine(family), WINDOWS, codec("keys"), "keys", unrotated=unrotated)
    for layer, x in enumerate(exact(family, 0, unrotated=unrotated)):
        low, high = (found[f"keys.{layer}.{what}"] for what in ("low", "high"))
        n = x.shape[1]
        assert n == 234
        ordered = x.sort(1).values
        assert torch.allclose(low, ordered[:, 2], atol=1e-5)  # 1 % of 234 at each end is left out
        assert torch.allclose(high, ordered[:, n - 3], atol=1e-5)
        u = ((x - (low + high)[:, None] / 2) / ((high - low)[:, None] / 2)).transpose(0, 1).reshape(n, -1)
        k = max(1, round(0.01 * u.shape[1]))
        left = u.abs().sort(1).values[:, :-k]
        signed = u.gather(1, u.abs().sort(1).indices[:, :-k])
        assert left.shape == signed.shape
        means_hold(signed.flatten().clamp(-1, 1), found[f"keys.{layer}.counts"])


def means_hold(units: Tensor, counts: Tensor) -> None:
    """All numbers are counted, and no point is farther than two bins from the mean of the numbers that are nearest to it."""
    assert int(counts.sum()) == len(units)
    points = best_points((torch.arange(BINS) + 0.5) * 2 / BINS - 1, counts, 8)
    owner = torch.bucketize(units, midpoints(points))
    for i, point in enumerate(points.tolist()):
        assert point == pytest.approx(float(units[owner == i].mean()), abs=4 / BINS)


def test_value_points_are_the_means_of_numbers_in_their_token_s_range() -> None:
    found = measured(engine("llama"), WINDOWS, codec("values"), "values")
    for layer, x in enumerate(exact("llama", 1)):
        rows = x.transpose(0, 1).flatten(1)
        far = (rows - rows.mean(1, keepdim=True)).abs().sort(1).indices[:, : -max(1, round(0.01 * rows.shape[1]))]
        rest = rows.gather(1, far)
        low, high = rest.amin(1, keepdim=True), rest.amax(1, keepdim=True)
        means_hold((2 * (rest - low) / (high - low) - 1).flatten(), found[f"values.{layer}.counts"])
    assert set(found) == {f"values.{layer}.counts" for layer in engine("llama").shape.full_layers}


@pytest.fixture(scope="module")
def lm() -> LM:
    spec: ModelSpec = conf_tree.member("model", "tiny_llama")
    return load(replace(spec, kv_dtype="float32"), NAME)


def test_a_stack_is_measured_in_the_basis_its_keys_are_stored_in(
    lm: LM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KV_HARNESS_CACHE", str(tmp_path))
    run = Engine(lm.model, lm.kv_dtype, lm.eos_ids)
    changes = [f"{role}.calibration.{k}={v}" for role in ("keys", "values") for k, v in SMALL.items()]
    before: Stack = conf_tree.instantiate(conf_tree.config("compress", "kvquant", *changes), _convert_="all")
    found = [calibrated(replace(before, rope=rope), run, lm) for rope in ("pre", "post")]
    said = [one.keys.info()["calibration"] for one in found]
    assert said[0] != said[1] and said[0]["rope"] == "pre" and "rope" not in said[1]  # type: ignore[index,operator]
    assert found[0].values.info() == found[1].values.info(), "values have no rotation, and share one table"
    assert capsys.readouterr().err.count("measuring keys and values") == 3
    other = replace(before, keys=replace(before.keys, bits=2), values=replace(before.values, bits=2))
    assert calibrated(other, run, lm).keys.info()["calibration"] == said[0], "one table for every number of bits"
    again = calibrated(before, run, lm)
    assert "measuring" not in capsys.readouterr().err
    assert again.keys.info() == found[0].keys.info()
    row = run.compress(run.prefill(ids(200)), again)
    assert run.feed([row], [ids(3)])[1].isfinite().all()
    assert row.bytes().total < run.compress(run.prefill(ids(200)), Stack()).bytes().total / 5


def test_limits_of_a_stack_with_cache_positions_are_those_before_rope(
    lm: LM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were measured after it, and so mixed the channels of a pair that are stored apart."""
    monkeypatch.setenv("KV_HARNESS_CACHE", str(tmp_path))
    run = Engine(lm.model, lm.kv_dtype, lm.eos_ids)
    tables = [limits(run, lm, wanted(), unrotated=basis) for basis in (False, True)]
    assert torch.equal(tables[0]["values"].by_layer[0], tables[1]["values"].by_layer[0])
    assert not torch.allclose(tables[0]["keys"].by_layer[0], tables[1]["keys"].by_layer[0], rtol=1e-2)
    static = conf_tree.instantiate(
        conf_tree.config("codec", "int8_static", *(f"calibration.{k}={v}" for k, v in SMALL.items())), _convert_="all"
    )
    used = calibrated(Stack(keys=static, positions="cache"), run, lm)
    assert used.keys.info()["calibration"]["rope"] == "pre"  # type: ignore[index]
