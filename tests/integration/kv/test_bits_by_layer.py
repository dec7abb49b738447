"""Layers with other codecs in real caches: each layer's store is that of its codec alone, bytes are the formula, evictions work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.calibrate.codec_limits import calibrated
from harness.calibrate.sensitivity import QUERIES, measured
from harness.engine.engine import Engine
from harness.kv.memory import layer_bytes, predict
from harness.kv.sequence_cache import SequenceCache
from harness.notebook import evaluate
from harness.planning.sizes import size
from harness.stages.codec.by_layer import ByLayer
from harness.stages.codec.exact import Exact
from harness.stages.codec.int8 import Int8
from harness.stages.codec.int_groups import IntGroups
from harness.stages.layers.pyramid import Pyramid
from harness.stages.protocols import Needs
from harness.stages.stack import Stack
from tests.integration.models.test_model_load import configured
from tests.support import conf_tree, tiny_models
from tests.support.oracles.sensitivity import moved_outputs
from tests.support.tiny_models import ids

SEEN = 150
KINDS = {"int2": IntGroups(name="int2", bits=2, axis="token", residual=8), "int8": Int8(), "exact": Exact()}


def codec(*names: str) -> ByLayer:
    return ByLayer(name="mixed", codecs=KINDS, layers=names)


def nonzero(sizes: Mapping[str, int]) -> dict[str, int]:
    return {kind: size for kind, size in sizes.items() if size}


def walk(engine: Engine, stack: Stack) -> list[SequenceCache]:
    """The cache after the context, and as it grows; every tensor is of its own size and the sum is the formula's."""
    rows = [engine.compress(engine.prefill(ids(SEEN), conf_tree.everything()), stack, seed=1)]
    for n in (1, 40, 1):
        rows.append(engine.feed([rows[-1]], [ids(n, seed=n)])[0][0])
    for row in rows:
        held = row.bytes()
        assert nonzero(held.logical) == nonzero(held.allocated)
        if len(sizes := {n for layer in row.held() for n in layer}) == 1:
            assert held.total == predict(stack, row.shape, sizes.pop(), 4, row.seen)
    return rows


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_layer_holds_what_its_codec_alone_holds(family: str) -> None:
    engine, names = tiny_models.engine(family), ("int2", "exact", "int2")
    mixed = walk(engine, Stack(keys=codec(*names), values=codec("int8", "int8", "exact")))
    alone = {name: walk(engine, Stack(keys=KINDS[name], values=KINDS[name])) for name in KINDS}
    for layer, (k, v) in enumerate(zip(names, ("int8", "int8", "exact"), strict=True)):
        for role, name in (("keys", k), ("values", v)):
            row, single = mixed[0], alone[name][0]
            found, wanted = (stored(one, layer, role) for one in (row, single))
            assert torch.equal(found, wanted), (layer, role)
    info = mixed[-1].codec_info()
    assert info["keys"]["by_layer"] == list(names)
    assert len(mixed[0].head_groups) == 3, "three pairs of codecs"


def stored(row: SequenceCache, layer: int, role: str) -> torch.Tensor:
    ((part, at),) = row.slots[layer]
    found: torch.Tensor = getattr(part, role).read(torch.float32, at)
    return found


@pytest.mark.parametrize("phase", ["prefill", "chunked", "always"])
def test_evictions_reach_every_layer(phase: str) -> None:
    """Kept sets are those without a codec where nothing that is read differs: after a context that was read exactly."""
    engine, keep = tiny_models.engine("llama"), conf_tree.keep("h2o", 60)
    stack = Stack(keep=keep, phase=phase, chunk=64, keys=codec("int8", "int2", "int8"), values=codec("int8", "int8", "int2"))
    if phase == "chunked":
        row = engine.read_chunked(ids(SEEN), [engine.start(stack, SEEN)])[0][0]
    else:
        row = walk(engine, stack)[0]
        plain = engine.compress(engine.prefill(ids(SEEN), conf_tree.everything()), Stack(keep=keep), seed=1)
        assert [[p.tolist() for p in x] for x in row.kept_positions()] == [
            [p.tolist() for p in x] for x in plain.kept_positions()
        ]
    assert row.held() == [[60, 60]] * 3
    assert nonzero(row.bytes().logical) == nonzero(row.bytes().allocated)
    assert row.bytes().total == predict(stack, row.shape, 60, 4, SEEN)


def test_an_exact_layer_keeps_no_encoded_one_alive() -> None:
    """The first tokens of all layers come in one tensor; after the first chunk each pair of codecs has its own."""
    engine = tiny_models.engine("llama")
    stack = Stack(keep=conf_tree.keep("h2o", 100), phase="chunked", chunk=64, keys=codec("int8", "exact", "int2"))
    row = engine.feed([engine.start(stack, SEEN)], [ids(64)])[0][0]
    assert row.held() == [[64, 64]] * 3, "nothing has gone yet"
    held = row.bytes()
    assert nonzero(held.logical) == nonzero(held.allocated)
    assert held.total == predict(stack, row.shape, 64, 4, 64) + 4 * 6 * 64, "and the sums of H2O while the context is read"


def test_layers_that_keep_other_numbers_of_tokens_have_their_own_bits() -> None:
    engine = tiny_models.engine("llama")
    stack = Stack(keep=conf_tree.keep("snapkv", 60, layers=Pyramid()), keys=codec("int8", "int2", "int8"))
    row = walk(engine, stack)[0]
    assert len({n for layer in row.held() for n in layer}) == 3
    layers = row.shape.full_layers
    by_hand = sum(
        sum(layer_bytes(stack.at(i, layers), row.shape.layers[i], row.held()[i][0], 4, SEEN).values()) for i in layers
    )
    assert row.bytes().total == by_hand == size(stack, row.shape, SEEN, 4).high


# --- the order of layers on calibration text -----------------------------------------------------------------------------


def oracle(engine: Engine, ids_of: Sequence[int], low: IntGroups, role: str) -> list[tuple[float, float]]:
    """(|o' - o|^2, |o|^2) of each layer."""
    whole = engine.prefill(ids_of, Needs(queries=QUERIES))
    changed = engine.compress(whole, Stack(keys=low) if role == "keys" else Stack(values=low))
    return [moved_outputs(whole, changed, layer) for layer in engine.shape.full_layers]


@pytest.mark.parametrize("role", ["keys", "values"])
def test_sensitivity_is_the_error_of_attention_outputs(role: str) -> None:
    engine, low = tiny_models.engine("llama"), IntGroups(name="int2", bits=2, residual=8).for_role(role)
    windows = [ids(100, 1), ids(80, 2)]
    found = measured(engine, windows, low, role)
    parts = [oracle(engine, window, low, role) for window in windows]
    for layer in engine.shape.full_layers:
        error, total = (sum(one[layer][at] for one in parts) for at in (0, 1))
        assert float(found[f"{role}.{layer}"]) == pytest.approx((error / total) ** 0.5, rel=1e-4)
        assert error > 0


def test_a_run_records_the_order_and_keys_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_HARNESS_CACHE", str(tmp_path / "cache"))
    small: dict[str, Any] = {f"compress.{r}.calibration.tokens": 300 for r in ("keys", "values")}
    made = []
    for bits in (3, 2.5):
        changes = {f"compress.{r}.mean_bits": bits for r in ("keys", "values")}
        run = evaluate(
            model="tiny_llama", compress="kvtuner_3bit", limit=1, results_dir=str(tmp_path), **small, **changes,
            **{"task.lengths": [384]},
        )  # fmt: skip
        made += [record for record in run.records if record["stack"] != "full"]
    assert [record["status"] for record in made] == ["ok", "ok"], made[0]["error"]
    tables = [record["codec_info"]["keys"]["calibration"]["table"] for record in made]
    assert tables[0] == tables[1], "one calibration serves every mean"
    assert made[0]["stack_config"]["keys"]["calibration"]["table"] == tables[0]
    assert made[0]["codec_info"]["values"]["calibration"]["table"] != tables[0]
    chosen = made[0]["codec_info"]["keys"]["by_layer"]
    assert sorted(chosen) == ["int2", "int2", "int4", "int4"]
    assert sorted(made[1]["codec_info"]["keys"]["by_layer"]) == ["int2", "int2", "int2", "int4"]
    assert made[0]["key"] != made[1]["key"]
    assert made[0]["kv_bytes_context"] > made[1]["kv_bytes_context"]


def test_the_measured_order_reaches_the_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.kv.attention import NAME
    from harness.models.load import load

    monkeypatch.setenv("KV_HARNESS_CACHE", str(tmp_path))
    lm = load(configured("tiny_llama"), NAME)
    engine = Engine(lm.model, torch.float32)
    changes = [f"{r}.calibration.{k}={v}" for r in ("keys", "values") for k, v in (("tokens", 200), ("window", 100))]
    stack = calibrated(conf_tree.member("compress", "kvtuner_3bit", *changes), engine, lm)
    assert isinstance(stack.keys, ByLayer) and stack.keys.limits is not None
    found = {layer: float(x) for layer, x in stack.keys.limits.by_layer.items()}
    best = sorted(found, key=lambda layer: -found[layer])[:2]
    row = engine.compress(engine.prefill(ids(200)), stack)
    for layer in range(4):
        ((part, _),) = row.slots[layer]
        assert part.keys.codec.name == ("int4" if layer in best else "int2")
