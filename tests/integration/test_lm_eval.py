"""lm-eval through our engine: against its own hf model, under extreme compression, in whole runs, on its command line.

LM_EVAL_SAMPLES sets how many documents are compared with the hf model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.lm.lm_eval_model import KvHarness
from harness.types import UserError
from tasks.lm_eval import Document
from tests import lm_eval_tasks
from tests.lm_eval_tasks import ANSWER, CHOICE, CLOZE, TEXT

ROOT = Path(__file__).parents[2]
SAMPLES = int(os.environ.get("LM_EVAL_SAMPLES", "3"))


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_fetched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The RULER tasks used here need no sentence tokenizer: an empty folder keeps nltk from fetching one."""
    folder = tmp_path_factory.mktemp("nltk")
    (folder / "tokenizers" / "punkt_tab").mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NLTK_DATA", str(folder))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


@pytest.fixture(scope="session")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lm_eval_tasks.write(tmp_path_factory.mktemp("local_tasks"), max(SAMPLES, 3))


def ours(**arguments: Any) -> KvHarness:
    return KvHarness(**{"model": "smollm2", "model.kv_dtype": "float32", "model.device": "cpu"} | arguments)


def asked(model: KvHarness, folder: Path, name: str, n: int = SAMPLES) -> list[Document]:
    settings: dict[str, Any] = {"name": name, "include_path": str(folder)}
    if name == "niah_single_1":
        settings |= {"metadata": {"max_seq_lengths": [1024]}, "generation": {"max_gen_toks": 24}}
    return lm_eval_tasks.loaded(model.tokenizer, **settings)[:n]


def answers(model: Any, documents: list[Document]) -> list[Any]:
    instances = [one for document in documents for one in document.instances]
    return list(getattr(model, instances[0].request_type)(instances))


@pytest.fixture(scope="module")
def full() -> KvHarness:
    return ours()


@pytest.fixture(scope="module")
def reference(full: KvHarness) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=full.tokenizer.name_or_path, dtype="float32", device="cpu", batch_size=1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of lm-eval and what it loads
@pytest.mark.parametrize("name", ["niah_single_1", ANSWER, CHOICE, CLOZE, TEXT])
def test_full_cache_is_lm_evals_own_hf_model(full: KvHarness, reference: Any, local: Path, name: str) -> None:
    documents = asked(full, local, name)
    mine, theirs = answers(full, documents), answers(reference, documents)
    print(name, len(documents), "documents", _largest(mine, theirs))
    assert len(mine) == len(theirs)
    for one, other in zip(mine, theirs, strict=True):
        if isinstance(one, str):
            assert one == other
        elif isinstance(one, tuple):
            assert one[1] == other[1]
            assert one[0] == pytest.approx(other[0], abs=1e-4)
        else:
            n = len(full.encode.rolling(documents[mine.index(one)].instances[0].args[0]).windows[0].ids) - 1
            assert one / n == pytest.approx(other / n, abs=1e-6)
            assert one == pytest.approx(other, abs=1e-3)


def _largest(mine: list[Any], theirs: list[Any]) -> float:
    def number(value: Any) -> float:
        return 0.0 if isinstance(value, str) else value[0] if isinstance(value, tuple) else value

    return max(abs(number(one) - number(other)) for one, other in zip(mine, theirs, strict=True))
