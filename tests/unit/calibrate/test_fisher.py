"""Fisher weights: squared gradients are those of plain autograd on the stock model, and they weight the fit of a codebook."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from harness.calibrate.codebooks import BINS, measured
from harness.calibrate.gradients import squared_gradients
from harness.engine.engine import Engine
from harness.errors import UserError
from harness.kv.attention import NAME
from harness.kv.compat import forward
from harness.stages.codec.codebook import best_points
from harness.stages.codec.kvquant import KVQuant
from harness.stages.stack import Stack
from tests.support.hybrids import HYBRIDS
from tests.support.latent_models import FOUND
from tests.support.make_believe.accelerator import Accelerator
from tests.support.make_believe.trial import spread
from tests.support.tiny_models import build, config, engine, ids
from tests.unit.calibrate.test_calibrate import wanted

WINDOW = ids(90, 4)


def codec(role: str, **settings: Any) -> KVQuant:
    return KVQuant(calibration=wanted(percentile=98), weights="fisher", **settings).for_role(role)


class Watched(DynamicCache):
    """Transformers' own cache, whose keys and values keep their gradients."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        both = [x.clone() if x.requires_grad else x.requires_grad_() for x in (key_states, value_states)]
        for x in both:
            x.retain_grad()
        self.watched = {**getattr(self, "watched", {}), layer_idx: both}
        return super().update(*both, layer_idx, *args, **kwargs)


@lru_cache
def plain_autograd(family: str) -> dict[str, Tensor]:
    """(dL / dx)^2 of eager transformers [h, N, D]: of the projections' outputs (before), and of what the cache is given."""
    model: PreTrainedModel = build(config(family), "eager").requires_grad_(True)
    found: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}

    def note(name: str) -> Any:
        def hook(module: Any, args: Any, out: Tensor) -> None:
            out.retain_grad()
            outputs[name] = out

        return hook

    for i, layer in enumerate(model.model.layers):
        layer.self_attn.k_proj.register_forward_hook(note(f"before.{i}"))
    cache = Watched(config=model.config)
    logits = forward(model, torch.tensor([WINDOW]), torch.arange(len(WINDOW))[None], cache, slice(None))[0]
    torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(WINDOW[1:]), reduction="sum").backward()
    for i, (k, v) in cache.watched.items():
        found |= {f"keys.{i}": k.grad[0].square(), f"values.{i}": v.grad[0].square()}
        flat = outputs[f"before.{i}"].grad[0]
        found[f"before.{i}"] = flat.view(len(flat), *k.shape[1::2]).transpose(0, 1).square()
    return found


@pytest.mark.parametrize("unrotated", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_squares_are_those_of_plain_autograd(family: str, unrotated: bool) -> None:
    want, found = plain_autograd(family), squared_gradients(engine(family), WINDOW, unrotated=unrotated)
    assert set(found) == {f"{role}.{i}" for role in ("keys", "values") for i in range(3)}
    for name, x in found.items():
        oracle = want[name.replace("keys", "before") if unrotated else name]
        assert x.dtype == torch.float32 and torch.allclose(x, oracle, rtol=1e-3, atol=1e-6 * float(oracle.max()))
        assert float(x[:, -1].abs().max()) == 0, "nothing follows the last token"


def test_one_prefill_without_weights_gradients_and_the_model_stays_as_it_was() -> None:
    run = engine("llama")
    before = run.feed([run.prefill(WINDOW[:40]).row], [WINDOW[40:]])[1]
    squared_gradients(run, WINDOW)
    assert all(p.grad is None and not p.requires_grad for p in run.model.parameters())
    assert torch.equal(run.feed([run.prefill(WINDOW[:40]).row], [WINDOW[40:]])[1], before)


@pytest.mark.parametrize(("dtype", "kv_dtype"), [("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "bfloat16")])
def test_half_precision_gives_fp32_squares_near_those_of_fp32(dtype: str, kv_dtype: str) -> None:
    model = build(config("llama"), NAME, getattr(torch, dtype))
    found = squared_gradients(Engine(model, getattr(torch, kv_dtype)), WINDOW, unrotated=True)
    for name, exact in squared_gradients(engine("llama"), WINDOW, unrotated=True).items():
        x = found[name]
        assert x.dtype == torch.float32 and x.isfinite().all()
        near = torch.nn.functional.cosine_similarity(x.sqrt().flatten(), exact.sqrt().flatten(), dim=0)
        assert float(near) > 0.999


def test_a_model_over_two_devices_gives_what_the_host_gives() -> None:
    want = measured(Engine(build(config("llama"), NAME), torch.bfloat16), [WINDOW], codec("keys"), "keys", unrotated=True)
    with Accelerator(lacks=[torch.float64]).on():
        run = Engine(spread(build(config("llama"), NAME)), torch.bfloat16)
        found = measured(run, [WINDOW], codec("keys"), "keys", unrotated=True)
    assert set(found) == set(want)
    for name, x in want.items():  # a number on the edge of a bin may fall to either side
        sums = (one.double().cumsum(0) if name.endswith("counts") else one for one in (found[name], x))
        assert torch.allclose(*sums, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("role", ["keys", "values"])
def test_bins_hold_f_times_the_square_of_the_range_of_what_is_not_exact(role: str) -> None:
    """sum_i F_i (x_i - x'_i)^2 in units of a range s is sum_i F_i s_i^2 (u_i - u'_i)^2."""
    windows = [WINDOW, ids(50, 5)]
    found = measured(engine("llama"), windows, codec(role), role)
    for layer in range(3):
        total = np.zeros(BINS)
        for window in windows:
            prefix = engine("llama").prefill(window)
            ((part, at),) = prefix.row.slots[layer]
            x = (part.keys if role == "keys" else part.values).exact()[at][:, 1:].transpose(0, 1).flatten(1).double()
            f = squared_gradients(engine("llama"), window)[f"{role}.{layer}"][:, 1:].transpose(0, 1).flatten(1).double()
            if role == "keys":
                low, high = (found[f"keys.{layer}.{end}"].flatten().double() for end in ("low", "high"))
                middle, half = (low + high) / 2, ((high - low) / 2).expand_as(x)
                far = ((x - middle) / half).abs()
            else:
                far = (x - x.mean(1, keepdim=True)).abs()
                rest = far.argsort(1)[:, :-1]
                low, high = (getattr(x.gather(1, rest), end)(1, keepdim=True) for end in ("amin", "amax"))
                middle, half = (low + high) / 2, ((high - low) / 2).expand_as(x)
            kept = far.argsort(1)[:, :-1]  # one number in 64 is exact
            u = (((x - middle) / half).gather(1, kept)).clamp(-1, 1).flatten()
            weight = (f * half.square()).gather(1, kept).flatten()
            total += np.histogram(u, BINS, (-1, 1), weights=weight)[0]
        mine = found[f"{role}.{layer}.counts"].numpy()
        assert mine.sum() == pytest.approx(total.sum(), rel=1e-3)  # of a token's numbers at two ends of ranges either is exact
        assert np.abs(np.cumsum(mine) - np.cumsum(total)).max() < 1e-2 * total.sum()  # a number on an edge may fall either way


def slow_lloyd(values: list[float], weights: list[float], size: int) -> list[float]:
    """Weighted k-means of single numbers as it is written: each to its nearest point, each point to its numbers' mean."""
    fine = np.cumsum(np.array(weights) ** (1 / 3))
    points = [values[min(int(np.searchsorted(fine, (i + 0.5) / size * fine[-1])), len(values) - 1)] for i in range(size)]
    while True:
        owner = [min(range(size), key=lambda i: (abs(v - points[i]), i)) for v in values]
        moved = list(points)
        for i in range(size):
            mine = [(v, w) for v, w, o in zip(values, weights, owner, strict=True) if o == i]
            if total := sum(w for _, w in mine):
                moved[i] = sum(v * w for v, w in mine) / total
        if max(abs(a - b) for a, b in zip(moved, points, strict=True)) < 1e-12:
            return moved
        points = moved


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_weighted_fit_is_lloyd_s(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    values = torch.randn(300, generator=generator, dtype=torch.float64).sort().values
    weights = torch.rand(300, generator=generator, dtype=torch.float64).pow(8)  # a few numbers carry most of the weight
    weights[::7] = 0
    assert best_points(values, weights, size).tolist() == pytest.approx(slow_lloyd(values.tolist(), weights.tolist(), size))


def test_weights_lower_the_weighted_error_and_raise_the_plain_one() -> None:
    run, plain = engine("llama"), KVQuant(calibration=wanted(percentile=98)).for_role("keys")
    fisher = measured(run, [WINDOW], codec("keys"), "keys")
    counts = {"fisher": fisher, "plain": measured(run, [WINDOW], plain, "keys")}
    centres = (torch.arange(BINS, dtype=torch.float64) + 0.5) * 2 / BINS - 1
    for layer in range(3):
        name = f"keys.{layer}.counts"
        points = {kind: best_points(centres, found[name], 4) for kind, found in counts.items()}
        for mine, other in pairwise(("fisher", "plain", "fisher")):
            weights = counts[mine][name]
            assert _error(centres, weights, points[mine]) < _error(centres, weights, points[other])


def _error(values: Tensor, weights: Tensor, points: Tensor) -> float:
    return float(((values[:, None] - points).abs().amin(1).square() * weights).sum())


def test_models_that_no_gradient_passes_are_refused_in_one_line() -> None:
    stack = Stack(values=codec("values"))
    latent = build(FOUND["deepseek_v3"][1](), NAME)
    for model, why in ((latent, "it stores latents"), (build(HYBRIDS["qwen3_5"](), NAME), "recurrent")):
        run = Engine(model, torch.float32)
        with pytest.raises(
            UserError, match=rf"^compress\.values\.weights='fisher' is not possible .*{why}.* legal is weights=plain$"
        ):
            run.check(stack)
        run.check(Stack(values=replace(codec("values"), weights="plain")))
    with pytest.raises(UserError, match=r"gradients of the keys of layer 0 are all 0 or too large .* legal are"):
        measured(engine("llama"), [WINDOW[:1]], codec("keys", sinks=0), "keys")


def test_settings_name_the_weights_and_leave_plain_tables_where_they_are() -> None:
    plain = KVQuant(calibration=wanted())
    assert "weights" not in plain.settings and plain.info()["weights"] == "plain"
    assert codec("keys").settings["weights"] == codec("keys").info()["weights"] == "fisher"
    assert codec("keys").nbytes(2, 10, 16, 2) == plain.for_role("keys").nbytes(2, 10, 16, 2)
    with pytest.raises(UserError, match=r"codec\.weights='hessian' is not possible: allowed are plain, fisher"):
        KVQuant(calibration=wanted(), weights="hessian")
