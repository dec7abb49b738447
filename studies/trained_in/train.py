"""Training of one tiny model; the same recipe for every design."""

from __future__ import annotations

import copy
import hashlib
import json
import random
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PretrainedConfig

from harness.models.random_model import byte_tokenizer
from studies.trained_in.designs import POSITIONS, described
from studies.trained_in.start import start_alike
from studies.trained_in.texts import IGNORED, LENGTH, prose_batch, recall_batch

RECIPE = "recipe.json"


@dataclass(frozen=True)
class Recipe:
    """Steps of AdamW on recall and prose together; the mean losses of digits, echoes and prose are added."""

    steps: int = 600
    recall_rows: int = 16
    prose_rows: int = 8
    rate: float = 4e-3
    warm_up: int = 30
    decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.98)
    clip: float = 1.0


def trained(config: PretrainedConfig, seed: int, prose: bytes, folder: Path, recipe: Recipe) -> Path:
    """The model's directory under `folder`, trained unless it is there; its name holds a digest of all that decides it."""
    decided = {"recipe": asdict(recipe), "seed": seed, "config": described(config), "prose": hashlib.sha256(prose).hexdigest()}
    name = hashlib.sha256(json.dumps(decided, sort_keys=True, default=str).encode()).hexdigest()[:12]
    place = folder / f"{config.model_type}-{name}"
    if (place / RECIPE).is_file():
        return place
    losses = _train(model := _fresh(config, seed), seed, prose, recipe)
    partial = place.with_name(f"{place.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    byte_tokenizer(POSITIONS).save_pretrained(partial)
    (partial / RECIPE).write_text(json.dumps(decided | {"losses": losses}, indent=1, default=str), encoding="utf-8")
    shutil.rmtree(place, ignore_errors=True)
    partial.rename(place)  # a directory under its name is a finished one
    return place


def _fresh(config: PretrainedConfig, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="sdpa").train()
    start_alike(model)
    return model


def _train(model: torch.nn.Module, seed: int, prose: bytes, recipe: Recipe) -> list[tuple[int, float, float]]:
    """Trains in place; (step, recall loss, prose loss) in nats, every fiftieth step and the last."""
    draw = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.rate, betas=recipe.betas, weight_decay=recipe.decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, recipe))
    losses = []
    every = torch.arange(LENGTH)  # not by a number: readers of shared stores in transformers then drop the rest of their tokens
    for step in range(1, recipe.steps + 1):
        pairs, digits, echoes = recall_batch(draw, recipe.recall_rows)
        text, letters = prose_batch(draw, recipe.prose_rows, prose)
        logits = model(input_ids=torch.cat([pairs, text]), use_cache=False, logits_to_keep=every).logits
        recall, language = logits[: recipe.recall_rows], logits[recipe.recall_rows :]
        parts = _loss(recall, digits), _loss(language, letters), _loss(recall, echoes)
        optimizer.zero_grad()
        torch.stack(parts).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == recipe.steps:
            losses.append((step, round(parts[0].item(), 4), round(parts[1].item(), 4)))
            print(f"  step {step}: recall {losses[-1][1]}, prose {losses[-1][2]}", flush=True)
    return losses


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets[:, 1:].flatten(), ignore_index=IGNORED)


def _rate(step: int, recipe: Recipe) -> float:
    """Linear warm-up, then linear decay to a tenth."""
    if step < recipe.warm_up:
        return (step + 1) / recipe.warm_up
    return 1 - 0.9 * (step - recipe.warm_up) / max(recipe.steps - recipe.warm_up, 1)
