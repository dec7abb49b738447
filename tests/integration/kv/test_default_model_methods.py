"""Codecs with bases and codebooks, merges and measured shares on the default model: what is stored of real text is the oracles'."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from harness.kv.attention import NAME
from harness.models.load import load
from harness.stages.codec.by_layer import ByLayer
from harness.stages.codec.kvquant import KVQuant
from harness.stages.codec.low_rank import LowRank
from harness.stages.codec.turboquant import density_points, gaussian, rotation
from harness.stages.share.aligned_heads import AlignedHeads
from harness.stages.stack import Stack
from tests.integration.models.test_model_load import configured
from tests.support import conf_tree, share_oracles
from tests.support.oracles import codebooks, codec, low_rank
from tests.support.oracles.merged_rows import chances, merged_rows
from tests.support.oracles.sensitivity import moved_outputs
from tests.support.real_text import Real, stored

pytestmark = pytest.mark.slow

LAYERS = (0, 14, 29)
GROUPS = ((0, 1, 2), (12, 13, 14), (27, 28, 29))  # of three layers, in which those lie
N, H, D = 160, 3, 64
ROLES = ("keys", "values")
BUDGET = 56


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    every = sorted({layer for group in GROUPS for layer in group})
    found = Real.of(load(configured("smollm2"), NAME), every, N)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KV_HARNESS_CACHE", str(tmp_path_factory.mktemp("cache")))  # of the tables that it measures
        yield found


def side(x_HND: Tensor) -> Tensor:
    """Heads side by side, [N, H * D], fp64."""
    return x_HND.double().transpose(0, 1).flatten(1)


def equal(got: Tensor, want: Tensor, off: float = 1e-4, most: float = 0.0) -> None:
    """Within `off` of the largest number; a share `most` may differ, whose codes fp32 rounds to the other side."""
    wrong = (got.double() - want.double()).abs() > off * float(want.abs().max())
    assert float(wrong.double().mean()) <= most


# --- low rank ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 3])
def test_palu_is_the_whitened_weight_on_the_same_inputs(real: Real, heads: int) -> None:
    """Its basis comes from keys and values of the calibration text; the oracle's from the projections' inputs and weights."""
    row = real.read("palu", *[f"{role}.{change}" for role in ROLES for change in (f"heads={heads}", "rank.value=0.5")])
    for layer in LAYERS[1:]:  # the first layer's inputs are as many as there are words: too few to be whitened
        seen, inputs = real.calibration.inputs[layer], real.context.inputs[layer].double()
        for role in ROLES:
            got = stored(row, role, layer)
            for at in range(0, H, heads):
                weight = real.weight(role, layer)[at * D : (at + heads) * D]
                want = inputs @ low_rank.palu_whitened(seen, weight, heads * D // 2).T
                equal(side(got[at : at + heads]), want)


def test_a_basis_of_weights_is_their_own_decomposition(real: Real) -> None:
    row = real.read("low_rank_weights", "keys.rank.value=0.5", "values.rank.value=0.5")
    for layer in LAYERS:
        for role in ROLES:
            want = real.context.inputs[layer].double() @ low_rank.truncated(real.weight(role, layer), H * D // 2).T
            equal(side(stored(row, role, layer)), want)


def test_latents_in_four_bits_are_the_latents_rounded(real: Real) -> None:
    stack = real.stack("palu_int4", "keys.rank.value=0.5", "values.rank.value=0.5")
    row = real.engine.compress(real.context.prefix, stack)
    for role in ROLES:
        one = getattr(stack, role)
        assert isinstance(one, LowRank) and one.bases is not None
        basis = one.bases.by_layer[14][0, :, : H * D // 2].double()
        latents = (side(real.context.outputs[f"{role}.14"]) @ basis).float().unflatten(-1, (H, -1)).transpose(0, 1)[:, :40]
        rounded = codec.int_groups(latents, 4, D // 2, "token", False, torch.float32).decoded
        equal(side(stored(row, role, 14)[:, :40]), side(rounded) @ basis.T, 1e-3, most=5e-3)


def test_xkv_is_one_decomposition_of_three_layers(real: Real) -> None:
    row = real.read("xkv", "keys.rank.value=0.2", "values.rank.value=0.2")
    for group in GROUPS:
        for role in ROLES:
            sides = [side(real.context.outputs[f"{role}.{layer}"]) for layer in group]
            for layer, want in zip(group, low_rank.xkv(sides, 3 * H * int(0.2 * D)), strict=True):
                equal(side(stored(row, role, layer)), want)


def test_latents_of_full_rank_are_the_full_cache(real: Real) -> None:
    """MLA made of GQA: one latent of keys and one of values a layer."""
    rows = [real.context.prefix.row, real.read("palu", "keys.rank.value=1.0", "values.rank.value=1.0")]
    for tokens in (real.lm.tokens.encode("What is a latent?"), [17]):
        rows, logits = real.engine.feed(rows, [tokens] * 2)
        assert float((logits[1] - logits[0]).abs().max()) <= 1e-4 * max(1.0, float(logits[0].abs().max()))


# --- codebooks, rotations, channels ------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 4])
def test_kvquant(real: Real, bits: int) -> None:
    """Ranges are a plain sort of the calibration text's keys, one exact number in a hundred, and the first token exact."""
    stack = real.stack("kvquant", f"keys.bits={bits}", f"values.bits={bits}")
    row, k = real.engine.compress(real.context.prefix, stack), round(0.01 * H * D)
    for layer in LAYERS:
        ordered = real.calibration.outputs[f"keys.{layer}"][:, 1:].sort(1).values
        low, high = ordered[:, 3], ordered[:, -4]  # 0.5 % of 703 at each end
        for role in ROLES:
            x, one = real.context.outputs[f"{role}.{layer}"], getattr(stack, role)
            assert isinstance(one, KVQuant) and isinstance(one.table.points, dict)  # type: ignore[union-attr]
            points = one.table.points[layer].tolist()  # type: ignore[union-attr]
            if role == "keys":
                want = codebooks.kvquant_keys(x[:, 1:], low, high, points, k)
            else:
                want = codebooks.kvquant_values(x[:, 1:], points, k)
            got = stored(row, role, layer)
            equal(got[:, 1:], want, most=1e-3 if layer else 1e-2)  # equal words have equal keys there, and ties
            equal(got[:, :1], x[:, :1], 1e-5)


@pytest.mark.parametrize("name", ["turboquant", "turboquant_prod"])
def test_turboquant(real: Real, name: str) -> None:
    row = real.read(name, "keys.bits=3", "values.bits=3")
    turn, s = (f(64, 0, torch.float64, torch.device("cpu")) for f in (lambda *a: rotation("qr", *a), gaussian))
    for layer in LAYERS:
        for role in ROLES:
            got, prod = stored(row, role, layer), role == "keys" and name.endswith("prod")
            points = density_points(D, 2 if prod else 3).tolist()
            for h in range(H):
                for n in range(0, N, 16):
                    x = real.context.exact(role, layer)[h, n].tolist()
                    want = codebooks.turboquant_prod(x, turn, points, s) if prod else codebooks.turboquant_mse(x, turn, points)
                    equal(got[h, n], torch.tensor(want), 1e-3)


def test_think_removes_the_channels_that_matter_least(real: Real) -> None:
    row, rounded = real.read("think"), real.read("think_int8")
    for layer in LAYERS:
        queries, exact = real.context.prefix.stats[layer].queries_QWD, real.context.exact("keys", layer)
        assert queries is not None
        kept = codebooks.think_channels(queries[:, -32:].unflatten(0, (H, -1)), exact, 38)  # type: ignore[no-untyped-call]
        got = stored(row, "keys", layer)
        equal(got[:, -32:], exact[:, -32:], 0)
        equal(stored(row, "values", layer), real.context.exact("values", layer), 0)
        for h, channels in enumerate(kept):
            want = torch.zeros(N - 32, D)
            want[:, channels] = exact[h, :-32, channels]
            equal(got[h, :-32], want, 0)
            if layer:  # what is left, by another codec
                left = codec.int8_per_token(exact[h : h + 1, :24, channels], torch.float32).decoded[0]
                equal(stored(rounded, "keys", layer)[h, :24, channels], left)


def test_quarot_rounds_rotated_tokens(real: Real) -> None:
    row, turn = real.read("hadamard_int4"), torch.tensor(codec.hadamard(D), dtype=torch.float64) / 8
    for role in ROLES:
        turned = (real.context.exact(role, 14)[:, :40].double() @ turn).float()
        want = codec.int_groups(turned, 4, D, "token", False, torch.float32).decoded @ turn
        equal(stored(row, role, 14)[:, :40], want, 1e-4, most=5e-3)


def test_kvtuner_ranks_layers_by_the_error_of_their_outputs(real: Real) -> None:
    stack = real.stack("kvtuner_3bit")
    for role in ROLES:
        mixed = getattr(stack, role)
        assert isinstance(mixed, ByLayer) and mixed.limits is not None
        found, whole = mixed.limits.by_layer, real.calibration.prefix
        changed = real.engine.compress(whole, Stack(**{role: mixed.codecs["int2"]}))
        for layer in LAYERS:
            error, total = moved_outputs(whole, changed, layer)
            assert float(found[layer]) == pytest.approx((error / total) ** 0.5, rel=1e-3)
        row, best = real.engine.compress(real.context.prefix, stack), sorted(found, key=lambda i: -float(found[i]))[:15]
        named = [getattr(row.slots[layer][0].head_group, role).codec.name for layer in range(30)]
        assert named == ["int4" if layer in best else "int2" for layer in range(30)]


# --- merges ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cam", "d2o", "kvmerger", "lookm"])
def test_merges(real: Real, name: str) -> None:
    stack = Stack(keep=conf_tree.keep("h2o", BUDGET), merge=conf_tree.member("merge", name))
    row = real.engine.compress(real.context.prefix, stack, seed=3)
    merged = 0
    for layer in LAYERS:
        exact = [real.context.exact(role, layer) for role in ROLES]
        sums = real.context.prefix.stats[layer].column_sums_HN
        for h in range(H):
            stay = row.kept_positions()[layer][h].tolist()
            draws = chances(3, layer, h, [n for n in range(N) if n not in stay])
            want = merged_rows(name, [x[h] for x in exact], stay, None if sums is None else sums[h], draws, None)
            merged += want.given
            for role, x in zip(ROLES, want.rows, strict=True):
                equal(stored(row, role, layer)[h], x, 2e-5)
    assert merged > 0


# --- shares that are measured ------------------------------------------------------------------------------------


def test_similar_layers_are_paired_by_mean_cosines(real: Real) -> None:
    row = real.read("similar_layers")
    rows = [[real.calibration.exact(role, layer) for role in ROLES] for layer in range(30)]
    alike = {
        (low, high): float(torch.stack([torch.cosine_similarity(x, y, -1) for x, y in zip(rows[low], rows[high], strict=True)]).mean())
        for high in range(30)
        for low in range(high)
    }  # fmt: skip
    owners: dict[int, int] = {}
    for low, high in sorted(alike, key=lambda pair: -alike[pair]):
        if len(owners) < 7 and not {low, high} & {*owners, *owners.values()}:
            owners[high] = low
    assert row.layout.owners == owners
    for reader, owner in owners.items():
        for role in ROLES:
            equal(stored(row, role, reader), real.context.exact(role, owner), 0)


def test_aligned_heads_are_turned_to_their_mean_and_back(real: Real) -> None:
    """One stored head; each matrix is the best rotation (Procrustes) towards the others as these are turned."""
    stack = real.stack("gqa_aligned", "share.groups=1")
    share = stack.share
    assert isinstance(share, AlignedHeads) and share.measured is not None
    row = real.engine.compress(real.context.prefix, stack)
    for layer in LAYERS:
        for role in ROLES:
            basis, seen = share.measured.basis(f"{role}.{layer}", H, D).double(), real.calibration.exact(role, layer).double()
            equal(stored(row, role, layer), share_oracles.aligned(real.context.exact(role, layer), basis.float(), 1))
            equal(basis @ basis.mT, torch.eye(D).expand(H, -1, -1), 1e-5)
            others = seen[0] @ basis[0] + seen[1] @ basis[1]
            u, _, vh = torch.linalg.svd(seen[2].T @ others)
            equal(basis[2], u @ vh, 1e-3)
