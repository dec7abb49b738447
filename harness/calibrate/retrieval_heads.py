"""`python -m harness.calibrate.retrieval_heads model=NAME out=F`: which KV heads look back and copy.

A small calibration for `compress=duo compress.keep.heads.file=F`. Random tokens come twice; a head that retrieves looks, from a
token of the second copy, at the token that followed it in the first. A variant: DuoAttention (arXiv 2410.10819) trains a gate
for each head on long passkey texts; here heads are scored by what they attend to, as induction and retrieval heads are found
(arXiv 2404.15574). No weight is touched.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from harness.configure.arguments import check_arguments
from harness.configure.compose import compose
from harness.configure.options import MOST_SEED
from harness.configure.overrides import own_keys, single
from harness.configure.typed import build
from harness.engine.engine import Engine
from harness.errors import UserError, require
from harness.files.paths import page_path
from harness.kv.attention import NAME
from harness.models.load import LM, ModelSpec, load
from harness.stages.budget import Amount
from harness.stages.keep import Keep
from harness.stages.protocols import LayerView, Needs, Scorer
from harness.stages.stack import Stack


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """How heads are found: `share` of all KV heads retrieve, scored on `repeats` sequences of `tokens` random tokens, twice."""

    share: float = 0.5
    tokens: int = 256
    repeats: int = 4
    seed: int = 0
    out: str = "retrieval_heads.json"

    def __post_init__(self) -> None:
        ok = isinstance(self.share, (int, float)) and 0 < self.share <= 1
        require(ok, "share", self.share, "a fraction above 0 and at most 1")
        for name in ("tokens", "repeats"):
            value = getattr(self, name)
            require(type(value) is int and value > 1, name, value, "a whole number above 1")
        require(type(self.seed) is int and abs(self.seed) < MOST_SEED, "seed", self.seed, "a whole number below 2^63")
        require(isinstance(self.out, str), "out", self.out, "a file to write")
        require(self.file.parent.is_dir(), "out", self.out, "a file in a folder that is there")

    @property
    def file(self) -> Path:
        """Where the list goes."""
        return page_path("out", self.out)


@dataclass(frozen=True)
class CopyProbe(Scorer):
    """Writes down how much each KV head copies from a sequence that ends in `tokens` tokens twice; keeps tokens by position."""

    tokens: int
    found: dict[int, Tensor] = field(default_factory=dict)

    @property
    def needs(self) -> Needs:
        return Needs(queries=self.tokens)

    def score(self, view: LayerView) -> Tensor:
        """Per head, the mean weight that token i of the second copy gives to token i + 1 of the first."""
        weights_HWN = view.window_attention(self.tokens)
        i = torch.arange(self.tokens - 1, device=weights_HWN.device)
        first = view.n - 2 * self.tokens
        self.found[view.layer] = weights_HWN[:, i, first + i + 1].mean(-1).cpu()
        return view.pos_HN.float()


def copy_scores(engine: Engine, bos: Sequence[int], how: Calibration) -> dict[int, Tensor]:
    """Scores [H] of every layer that can be compressed, mean over the repeats."""
    total: dict[int, Tensor] = {}
    special = torch.tensor(sorted({*bos, *engine.eos}), dtype=torch.long)
    words = torch.arange(int(engine.model.config.get_text_config(decoder=True).vocab_size))
    words = words[~torch.isin(words, special)]
    generator = torch.Generator().manual_seed(how.seed)
    for _ in range(how.repeats):
        text = words[torch.randint(len(words), (how.tokens,), generator=generator)].tolist()
        probe = CopyProbe(how.tokens)
        ids = [*bos, *text, *text]
        keep = Keep(scorer=probe, budget=Amount(unit="tokens", value=len(ids) - 1), recent=0)
        engine.compress(engine.prefill(ids, probe.needs), Stack(keep=keep))
        total = {layer: total.get(layer, torch.zeros(())) + scores / how.repeats for layer, scores in probe.found.items()}
    return total


def retrieval_heads(scores: dict[int, Tensor], share: float) -> list[list[int]]:
    """[layer, KV head] pairs of the best `share` of all heads, rounded up, in order; ties go to the earlier head."""
    ranked = sorted((-float(s), layer, head) for layer, heads in scores.items() for head, s in enumerate(heads))
    return sorted([layer, head] for _, layer, head in ranked[: ceil(share * len(ranked))])


def calibrate(lm: LM, name: str, how: Calibration) -> dict[str, Any]:
    """What the JSON file holds.

    Raises:
        UserError: the model has fewer positions than two copies take, or no layer that can be compressed.
    """
    bos = lm.tokens.bos_ids
    most = lm.tokens.max_length
    need = len(bos) + 2 * how.tokens
    require(most is None or need <= most, "tokens", how.tokens, f"two copies take {need} positions, the model has {most}")
    engine = Engine(lm.model, lm.kv_dtype, lm.eos_ids)
    require(bool(engine.shape.full_layers), "model", name, "every layer has a sliding window: there is nothing to split")
    require(not any(engine.latents), "model", name, "all heads of a layer read one latent: none can keep tokens of its own")
    scores = copy_scores(engine, bos, how)
    return {
        "model": name,
        "identity": dict(lm.identity),
        "calibration": {"method": "copy", "share": how.share, "tokens": how.tokens, "repeats": how.repeats, "seed": how.seed},
        "heads": retrieval_heads(scores, how.share),
        "scores": {str(layer): [round(float(x), 6) for x in heads] for layer, heads in scores.items()},
    }


def _composed(arguments: Sequence[str]) -> tuple[ModelSpec, Calibration]:
    """(model, calibration) of the command line: model=... as everywhere, and the fields of Calibration."""
    own, model = own_keys(arguments, Calibration.__dataclass_fields__, ("model",))
    check_arguments(model)
    given = {key: single(text) for key, text in own.items()}
    for key, value in given.items():
        if key != "out" and type(value) not in (int, float):
            raise UserError(f"{own[key]} is not possible: a number")
    how = Calibration(**given | {"share": float(given.get("share", Calibration.share))})
    spec: ModelSpec = build(OmegaConf.to_container(compose(model).model, resolve=True), "model")
    return spec, how


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the list; a user's mistake ends in one line."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(given):
        print(__doc__)
        return
    try:
        spec, how = _composed(given)
        found = calibrate(load(spec, NAME), spec.name, how)
        how.file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        sys.exit(f"error: out={how.out!r} cannot be written: {error.strerror}")
    except UserError as error:
        sys.exit(f"error: {error}")
    total = sum(map(len, found["scores"].values()))
    sys.stdout.write(f"{len(found['heads'])} of {total} KV heads of {spec.name} retrieve: {how.out}\n")
    sys.stdout.write(f"use it with: compress=duo compress.keep.heads.file={how.out}\n")


if __name__ == "__main__":
    main()
