"""Limits measured on calibration text equal a plain sort of the stock model's cache, are kept by content, and reach the codecs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import DynamicCache

from harness.calibrate.codec_limits import FILE, calibrated, limits, measure
from harness.engine.engine import Engine
from harness.errors import UserError
from harness.kv.attention import NAME
from harness.kv.compat import forward
from harness.models.load import LM, ModelSpec, load
from harness.stages.codec.int8 import Int8
from harness.stages.encoded import Heads
from harness.stages.limits import Calibration
from harness.stages.stack import Stack
from tests.support import conf_tree
from tests.support.tiny_models import build, config, engine, ids, tiny_g

SMALL = {"tokens": 300, "window": 128}


@pytest.fixture(scope="module")
def lm() -> LM:
    spec: ModelSpec = conf_tree.member("model", "tiny_llama")
    return load(replace(spec, kv_dtype="float32"), NAME)


@pytest.fixture
def run(lm: LM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setenv("KV_HARNESS_CACHE", str(tmp_path))
    return Engine(lm.model, lm.kv_dtype, lm.eos_ids)


def wanted(**changes: Any) -> Calibration:
    return Calibration(**{"corpus": conf_tree.member("corpus", "stdlib"), **SMALL, **changes})


def stock(family: str, windows: list[list[int]]) -> list[tuple[Tensor, Tensor]]:
    """Keys and values [H, N, D] of each layer, all windows one after another, as stock transformers caches them."""
    model, found = build(config(family), "sdpa"), []
    with torch.inference_mode():
        for window in windows:
            cache = DynamicCache(config=model.config)
            forward(model, torch.tensor([window]), torch.arange(len(window))[None], cache, slice(None))
            found.append([(layer.keys[0], layer.values[0]) for layer in cache.layers])
    return [tuple(torch.cat([one[i][side] for one in found], 1) for side in (0, 1)) for i in range(len(found[0]))]  # type: ignore[misc]


@pytest.mark.parametrize("percentile", [100, 99.5, 95, 90])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_limits_are_the_nearest_rank_of_a_plain_sort(family: str, percentile: float) -> None:
    windows = [ids(100, 1), ids(100, 2), ids(37, 3)]
    found = measure(engine(family), windows, percentile)
    rank = {100: 237, 99.5: 236, 95: 226, 90: 214}[percentile]  # ceil(percentile / 100 * 237)
    rows = stock(family, windows)
    assert set(found) == {f"{role}.{layer}" for role in ("keys", "values") for layer in range(len(rows))}
    for layer, sides in enumerate(rows):
        for role, x in zip(("keys", "values"), sides, strict=True):
            want = x.abs().sort(dim=1).values[:, rank - 1]
            assert torch.allclose(found[f"{role}.{layer}"], want, rtol=1e-5, atol=1e-6)


def test_only_layers_that_are_compressed_are_measured() -> None:
    found = measure(Engine(build(tiny_g(), NAME), torch.float32), [ids(80)], 100)
    assert set(found) == {"keys.5", "values.5"}


def test_the_table_is_measured_once_and_kept_by_content(
    lm: LM, run: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = limits(run, lm, wanted())
    assert "measuring keys and values on 30" in capsys.readouterr().err
    again = limits(run, lm, wanted())
    assert "measuring" not in capsys.readouterr().err
    for role in ("keys", "values"):
        assert again[role].about == first[role].about
        for layer, table in first[role].by_layer.items():
            assert torch.equal(again[role].by_layer[layer], table)
    (file,) = (tmp_path / "calibration").rglob(FILE)
    assert {tuple(t.shape) for t in load_file(file).values()} == {(2, 64)}
    for changed in (wanted(tokens=301), wanted(percentile=99), wanted(corpus=text(tmp_path, "Other words. " * 60))):
        limits(run, lm, changed)
    assert len([*(tmp_path / "calibration").rglob(FILE)]) == 4
    file.write_bytes(b"cut short")
    assert torch.equal(limits(run, lm, wanted())["keys"].by_layer[0], first["keys"].by_layer[0])


def text(folder: Path, words: str) -> Any:
    (folder / "text.txt").write_text(words)
    return conf_tree.member("corpus", "path", f"path={folder / 'text.txt'}")


def test_windows_begin_like_a_prompt_and_short_text_is_counted(lm: LM, run: Engine, tmp_path: Path) -> None:
    short = limits(run, lm, wanted(corpus=text(tmp_path, "Five words are enough here.")))["keys"]
    bos = list(lm.tokens.bos_ids)
    ids_of = [*bos, *lm.tokens.encode("Five words are enough here.\n\n")]
    assert bos
    assert short.about["tokens"] == len(ids_of)
    assert torch.equal(short.by_layer[3], measure(run, [ids_of], 100)["keys.3"])


def test_a_stack_gets_limits_where_it_asks_and_holds_its_own_text(lm: LM, run: Engine, tmp_path: Path) -> None:
    assert calibrated(plain := Stack(keys=Int8()), run, lm) is plain
    changes = [f"{role}.calibration.{k}={v}" for role in ("keys", "values") for k, v in SMALL.items()]
    raw = conf_tree.config("compress", "int8_static", *changes)
    stack = calibrated(conf_tree.instantiate(raw, _convert_="all"), run, lm)
    keys, values = stack.keys.info(), stack.values.info()
    assert keys["scale"] == values["scale"] == "calibrated"
    assert keys["calibration"] == values["calibration"]
    about: Any = keys["calibration"]
    assert (about["corpus"], about["percentile"]) == ("stdlib", 100.0)
    assert json.dumps(keys)
    window = [*lm.tokens.bos_ids, *lm.tokens.encode(conf_tree.member("corpus", "stdlib").documents()[0])][:120]
    ((part, at),) = run.prefill(window).row.slots[2]
    x = part.keys.exact()[at]
    codec = stack.keys.fit(x, Heads((2,), 0, 2))
    e = codec.encode(x)
    out = torch.empty_like(x)
    codec.decode(e, out)
    assert int(e.clipped) == 0
    assert bool(((out - x).abs() <= e.shared["scale"][:, None] * 0.5001 + 1e-7).all())


def test_a_pinned_table_must_be_what_is_measured(lm: LM, run: Engine) -> None:
    table = str(limits(run, lm, wanted())["keys"].about["table"])
    assert limits(run, lm, wanted(table=table))["keys"].about["table"] == table
    with pytest.raises(
        UserError, match=r"codec\.calibration\.table='0a1b' is not possible: this model and text give [0-9a-f]{64}"
    ):
        limits(run, lm, wanted(table="0a1b"))


def test_a_window_without_room_is_refused(lm: LM, run: Engine) -> None:
    with pytest.raises(UserError, match=r"codec\.calibration\.window=1 is not possible"):
        limits(run, lm, wanted(window=1))
