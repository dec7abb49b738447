"""Mistakes in a user's own scorer, codec or score are named, never computed with."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from harness.errors import UserError
from harness.kv.token_store import TokenStore
from harness.records.keys import code_hash
from harness.stages.budget import Amount
from harness.stages.codec.int8 import Int8
from harness.stages.encoded import Encoded
from harness.stages.keep import Keep
from harness.stages.protocols import LayerView, Scorer, Stats
from harness.types import Score


@dataclass(frozen=True, kw_only=True)
class HeadScale(Int8):
    """One scale a head: it would be cut and joined like a row."""

    def encode(self, x_HND: Tensor) -> Encoded:
        scale = x_HND.abs().amax((1, 2), keepdim=True) / 127
        return Encoded({"codes": (x_HND / scale).round().to(torch.int8)}, {"scale": scale}, x_HND.shape[1])


@dataclass(frozen=True, kw_only=True)
class Returns(Int8):
    """Returns rows where it should write them."""

    def decode(self, e: Encoded, out_HND: Tensor) -> Tensor:  # type: ignore[override]
        return e.payload["codes"] * e.metadata["scale"]


@dataclass(frozen=True, kw_only=True)
class Short(Scorer):
    """One score too few."""

    def score(self, view: LayerView) -> Tensor:
        return view.pos_HN[:, 1:].float()


def test_a_codec_whose_metadata_has_no_token_axis_is_refused() -> None:
    with pytest.raises(ValueError, match=r"codec int8 encoded 10 tokens of 2 heads .* 'scale' of shape \(2, 1, 1\)"):
        TokenStore.of(torch.randn(2, 10, 4), HeadScale(), None)


def test_a_codec_that_returns_rows_is_refused() -> None:
    with pytest.raises(TypeError, match="must write into out_HND"):
        TokenStore.of(torch.randn(2, 10, 4), Returns(), None).read(torch.float32)


def test_a_score_of_the_wrong_shape_is_refused() -> None:
    pos = torch.arange(10, dtype=torch.int32).expand(2, 10)
    view = LayerView(0, 10, pos, Stats(), lambda: torch.zeros(2, 10, 4), lambda: torch.zeros(2, 10, 4))
    with pytest.raises(ValueError, match=r"Short returned scores of shape \(2, 9\), not \[H, N\] = \(2, 10\)"):
        Keep(scorer=Short(), budget=Amount(unit="tokens", value=4)).choose([view], 4)


@pytest.mark.parametrize("value", ["good", None])
def test_a_score_that_is_no_number_is_refused(value: object) -> None:
    with pytest.raises(UserError, match="score value="):
        Score(value=value)  # type: ignore[arg-type]


def test_a_base_class_outside_the_project_is_part_of_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "outer_base.py").write_text("class Base:\n    pass\n")
    (tmp_path / "outer_mine.py").write_text("from outer_base import Base\nclass Mine(Base):\n    pass\n")
    config = {"codec": {"_target_": "outer_mine.Mine"}}
    before = code_hash(config)
    assert before != code_hash({})
    (tmp_path / "outer_base.py").write_text("class Base:\n    changed = True\n")
    for name in ("outer_base", "outer_mine"):
        sys.modules.pop(name)
    from harness.records import keys

    keys._hash_files.cache_clear()
    assert code_hash(config) != before
