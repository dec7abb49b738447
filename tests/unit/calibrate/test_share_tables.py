"""What sharing measures on calibration text equals plain loops over the stock model's cache, and reaches the stack."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from harness.calibrate.codec_limits import calibrated
from harness.calibrate.share_tables import bases, similarities
from harness.engine.engine import Engine
from harness.errors import UserError
from harness.kv.attention import NAME
from harness.models.load import load
from harness.stages.share.aligned_heads import aligned
from harness.stages.share.pooled_heads import PooledHeads
from harness.stages.stack import Stack
from tests.support import conf_tree
from tests.support.tiny_models import engine, ids
from tests.unit.calibrate.test_calibrate import stock

WINDOWS = [ids(100, 1), ids(60, 2), ids(37, 3)]
SMALL = ("calibration.tokens=300", "calibration.window=128")


def test_similarities_are_mean_cosines_of_the_stock_cache() -> None:
    rows = stock("llama", WINDOWS)
    found = similarities(engine("llama"), WINDOWS)
    assert set(found) == {f"similarity.{i}" for i in range(3)}
    for one in range(3):
        for other in range(3):
            both = [torch.cosine_similarity(rows[one][side], rows[other][side], dim=-1).mean() for side in (0, 1)]
            assert abs(float(found[f"similarity.{one}"][other]) - float(sum(both)) / 2) < 1e-5


def test_layers_with_a_window_are_like_none() -> None:
    assert set(similarities(engine("gemma3"), [ids(40)])) == {"similarity.5"}


def test_bases_align_the_rows_of_the_stock_cache() -> None:
    rows, found = stock("llama", WINDOWS), bases(engine("llama"), WINDOWS, PooledHeads(groups=1))
    for layer, sides in enumerate(rows):
        for role, x_HND in zip(("keys", "values"), sides, strict=True):
            expected = aligned(torch.einsum("and,bne->abde", x_HND.double(), x_HND.double())[None])
            assert torch.allclose(found[f"{role}.{layer}"], expected, atol=1e-3)


def test_a_stack_gets_what_its_share_asks_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_HARNESS_CACHE", str(tmp_path))
    lm = load(conf_tree.member("model", "tiny_llama"), NAME)
    run = Engine(lm.model, lm.kv_dtype, lm.eos_ids)
    for name in ("similar_layers", "aligned_heads", "one_latent"):
        share = conf_tree.member("share", name, *SMALL)
        found = [calibrated(Stack(share=share), run, lm).share for _ in range(2)]
        assert found[0] is not None and found[1] is not None
        about = found[0].info()["calibration"]
        assert about == found[1].info()["calibration"]
        assert isinstance(about, dict) and about["tokens"] == 303 and about["corpus"] == "stdlib"
        pinned = replace(share, calibration=replace(share.calibration, table="abc"))
        with pytest.raises(UserError, match=r"calibration\.table='abc' is not possible"):
            calibrated(Stack(share=pinned), run, lm)
    assert len([one for one in (tmp_path / "calibration").iterdir() if not one.name.startswith(".")]) == 3
