"""Runs of the command in this process, and small models on disk to run; it knows no expectation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import hydra
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig
from transformers import PretrainedConfig, PreTrainedModel

from harness.command import execute
from harness.configure import arms
from harness.models.random_model import byte_tokenizer
from harness.pages import dashboard
from harness.records.shards import load_records
from tests.support import composed_once
from tests.support.tiny_models import build

CELL = ("model=tiny_llama", "corpus=stdlib", "progress=false", "task.lengths=[200]", "task.per_cell=1", "limit=2")
"""Two short needles of the tiny model: for tests of what becomes of records, whatever they say."""

CONF = Path(__file__).parents[2] / "conf"
VOCABULARY = 258  # of the byte tokenizer


@contextmanager
def composed(*overrides: str) -> Iterator[DictConfig]:
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        yield hydra.compose("config", overrides=list(overrides))
    GlobalHydra.instance().clear()


def run(results: Path, *overrides: str, page: bool = True) -> list[dict[str, Any]]:
    """The records of a run on short local text, in the order they were written; `page` says whether its page is written too."""
    given = ["corpus=stdlib", "progress=false", f"results_dir={results}", *overrides]
    pages = nullcontext() if page else mock.patch.object(dashboard, "write")
    with composed(*given) as config, mock.patch.object(arms, "compose_stack", composed_once.compose_stack), pages:
        folder, _ = execute(config, given)
    return list(load_records(folder))


def on_disk(folder: Path, settings: PretrainedConfig, model: PreTrainedModel | None = None) -> tuple[str, ...]:
    """A model as users have it, with a byte tokenizer; returns the overrides that choose it."""
    folder.mkdir(parents=True)
    (model or build(settings, "sdpa")).save_pretrained(folder)
    settings.save_pretrained(folder)
    most = getattr(settings.get_text_config(), "max_position_embeddings", None) or 1024  # bloom's biases have no end
    byte_tokenizer(int(most)).save_pretrained(folder)
    return "model=local", f"model.path={folder}", "model.tokenizer=bytes", "model.device=cpu"
