"""lm-eval through our engine: against its own hf model, under extreme compression, in whole runs, on its command line.

LM_EVAL_SAMPLES sets how many documents are compared with the hf model.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from harness.lm_eval.model import KvHarness
from tasks.lm_eval_task import Document
from tests.support import lm_eval_tasks
from tests.support.lm_eval_tasks import ANSWER, CHOICE, CLOZE, TEXT
from tests.support.started import started

ROOT = Path(__file__).parents[3]
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
        settings |= {"metadata": {"max_seq_lengths": [256]}, "generation": {"max_gen_toks": 12}}
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
    for one, other in zip(mine, theirs, strict=True):
        if isinstance(one, str):
            assert one == other
        elif isinstance(one, tuple):
            assert one[1] == other[1]
            assert one[0] == pytest.approx(other[0], abs=1e-4)
        else:
            # A whole text is a sum of hundreds of nats, and hf sums in fp32: two units in its last place.
            assert one == pytest.approx(other, abs=1e-4, rel=2**-22)


def _largest(mine: list[Any], theirs: list[Any]) -> float:
    def number(value: Any) -> float:
        return 0.0 if isinstance(value, str) else value[0] if isinstance(value, tuple) else value

    return max(abs(number(one) - number(other)) for one, other in zip(mine, theirs, strict=True))


EXTREME: dict[str, dict[str, Any]] = {
    "4 rows": {
        "compress": "window",
        "compress.keep.budget.unit": "tokens",
        "compress.keep.budget.value": 4,
    },
    "2 bits": {
        "compress": "int4",
        **{f"compress.{s}.{k}": v for s in ("keys", "values") for k, v in (("bits", 2), ("residual", 0))},
    },
}


Answered = list[tuple[Document, list[Any]]]


@pytest.fixture(scope="module")
def exact(full: KvHarness, local: Path) -> Callable[[str], Answered]:
    """Three documents of a task with the full cache's answers to each, which are asked for once."""
    return cache(lambda name: [(document, answers(full, [document])) for document in asked(full, local, name, 3)])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("extreme", EXTREME)
@pytest.mark.parametrize("name", [CHOICE, CLOZE, TEXT])
def test_extreme_compression_changes_every_document(exact: Callable[[str], Answered], name: str, extreme: str) -> None:
    model = ours(**EXTREME[extreme])
    for document, of_full in exact(name):
        lossy = answers(model, [document])
        assert len(of_full) == len(lossy)
        assert any(one != other for one, other in zip(of_full, lossy, strict=True))
    assert model.not_exercised == 0


def harness(*arguments: str, results: Path, include: Path) -> subprocess.CompletedProcess[str]:
    command = ["model=tiny_llama", "model.device=cpu", "task=lm_eval", "progress=false"]
    return started("harness", [*command, f"task.include_path={include}", f"results_dir={results}", *arguments], ROOT)


def records(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for shard in results.glob("*/records-*.jsonl") for line in shard.read_text().splitlines()]


@pytest.fixture(scope="module")
def run(local: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All four output types and a group, three stacks; made once."""
    results = tmp_path_factory.mktemp("results")
    done = harness(f"task.name=[{ANSWER},{CHOICE},{CLOZE},{TEXT}]", *STACKS, "limit=8", results=results, include=local)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith(str(results))
    return results


STACKS = ("stacks=[int8,window]",)  # window has four points


def test_a_run_records_every_document_under_every_stack(run: Path) -> None:
    found = records(run)
    assert len(found) == len({r["key"] for r in found}) == 2 * 4 * 6
    assert {r["status"] for r in found} == {"ok"}
    assert all(r["query_aware"] and len(r["first_ids"]) == 4 for r in found)
    assert {r["task"]: (r["metric"], r["aggregate"]) for r in found} == {
        ANSWER: ("exact_match", "mean"),
        CHOICE: ("acc", "mean"),
        CLOZE: ("perplexity", "exp_weighted"),
        TEXT: ("word_perplexity", "exp_weighted"),
    }
    for document in {r["example_id"] for r in found}:
        same = [r for r in found if r["example_id"] == document]
        assert len({r["prompt_sha256"] for r in same}) == 1
        by_stack = {r["stack"]: r for r in same if r["point"] in ({}, {"keep.budget.value": 0.25})}
        assert (
            by_stack["window"]["kv_bytes_context"] < by_stack["int8"]["kv_bytes_context"] < by_stack["full"]["kv_bytes_context"]
        )
        assert by_stack["full"]["kv_bytes_context"] == by_stack["full"]["kv_bytes_full"]
        if same[0]["task"] == TEXT:
            assert 0.45 < by_stack["window"]["metrics"]["exercised"] < 0.55


def test_records_aggregate_to_lm_evals_own_results(run: Path) -> None:
    for stack, point in (("full", {}), ("int8", {}), ("window", {"keep.budget.value": 0.25})):
        name = stack + "".join(f"-{key}={value}" for key, value in point.items())
        own = json.loads(next(run.glob(f"*/lm_eval-{name}.json")).read_text())
        for name in (CHOICE, CLOZE, TEXT):
            mine = [r for r in records(run) if (r["task"], r["stack"], r["point"]) == (name, stack, point)]
            mean = sum(r["score"] * r["weight"] for r in mine) / sum(r["weight"] for r in mine)
            value = math.exp(mean) if mine[0]["aggregate"] == "exp_weighted" else mean
            metric = mine[0]["metric"]
            assert own["results"][name][f"{metric},none"] == pytest.approx(value, rel=1e-9)
            has_error = name != TEXT  # lm-eval gives none for perplexities per word
            assert isinstance(own["results"][name][f"{metric}_stderr,none"], float) == has_error
        assert len(own["samples"][ANSWER]) == 2 * 2  # documents x filters
        assert "doc" not in own["samples"][ANSWER][0]


def test_the_same_command_again_adds_nothing_and_more_documents_only_themselves(run: Path, local: Path, tmp_path: Path) -> None:
    results = Path(shutil.copytree(run, tmp_path / "again"))
    before = len(records(results))
    arguments = (f"task.name=[{ANSWER},{CHOICE},{CLOZE},{TEXT}]", *STACKS)
    assert harness(*arguments, "limit=8", results=results, include=local).returncode == 0
    assert len(records(results)) == before
    assert harness(*arguments, "limit=9", results=results, include=local).returncode == 0
    assert len(records(results)) == before + 6


def test_texts_too_short_to_compress_are_marked(local: Path, tmp_path: Path) -> None:
    short = {"doc_to_target": "{{word}}"}
    folder = lm_eval_tasks.write(tmp_path / "short", 3, **{TEXT: short})
    done = harness(f"task.name={TEXT}", "compress=int8", "limit=2", results=tmp_path / "out", include=folder)
    assert done.returncode == 0, done.stderr
    assert {(r["stack"], r["status"]) for r in records(tmp_path / "out")} == {("full", "ok"), ("int8", "not_exercised")}


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["task.name=no_such_task"], "task.name=['no_such_task'] is not possible"),
        ([f"task.name={ANSWER}", "task.generation={do_sample:true}"], "ask for sampling"),
        ([f"task.name={CHOICE}", "task.metric=bleu"], "task.metric='bleu' is not possible"),
        ([f"task.name={CHOICE}", "task.include_path=/no/such/folder"], "there is no such folder"),
    ],
)
def test_mistakes_end_in_one_line(local: Path, tmp_path: Path, arguments: list[str], line: str) -> None:
    done = harness(*arguments, "limit=1", results=tmp_path, include=local)
    assert done.returncode == 1
    assert line in done.stderr
    assert "Traceback" not in done.stderr


def command_line(*arguments: str) -> subprocess.CompletedProcess[str]:
    return started("harness.lm_eval", arguments, ROOT)


def test_lm_evals_command_line_runs_a_stack_of_ours(local: Path, run: Path, tmp_path: Path) -> None:
    model = "model=tiny_llama,compress=int8,model.device=cpu"
    arguments = ["run", "--model", "kv_harness", "--model_args", model, "--include_path", str(local), "--limit", "2"]
    tasks = ["--tasks", f"{ANSWER},{CHOICE},{CLOZE},{TEXT}", "--output_path", str(tmp_path)]
    done = command_line(*arguments, *tasks)
    assert done.returncode == 0, done.stderr
    found = json.loads(next(tmp_path.rglob("results_*.json")).read_text())
    fused = json.loads(next(run.glob("*/lm_eval-int8.json")).read_text())
    for name, values in fused["results"].items():
        for key, value in values.items():
            if isinstance(value, float) and "_stderr" not in key:
                assert found["results"][name][key] == pytest.approx(value, rel=1e-5)
    assert found["config"]["stack"] == "int8"


@pytest.mark.parametrize(
    ("extra", "line"),
    [
        (["--use_cache", "answers.db"], "use_cache='answers.db' is not possible"),
        (["--gen_kwargs", "do_sample=true"], "ask for sampling"),
        (["--model_args", "model=tiny_llama,compress=no_such_stack"], "compress=no_such_stack is not there: "),
        (["--model_args", "model=tiny_llama,compress=window,point=9"], "point=9 is not possible"),
    ],
)
def test_mistakes_on_lm_evals_command_line_end_in_one_line(local: Path, extra: list[str], line: str) -> None:
    model = ["--model", "kv_harness", "--model_args", "model=tiny_llama,model.device=cpu"]
    rest = ["--include_path", str(local), "--tasks", ANSWER, "--limit", "1", *extra]
    done = command_line("run", *model, *rest)
    assert done.returncode == 1
    assert line in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_plain_lm_eval_runs_our_tasks(full_directory: str, tmp_path: Path) -> None:
    metadata = {"lengths": [1500], "per_cell": 1, "tokens": 800, "documents": 2, "corpus": "stdlib"}
    arguments = ["--model", "hf", "--model_args", f"pretrained={full_directory},dtype=float32", "--device", "cpu"]
    tasks = ["--include_path", "tasks/lm_eval_yaml", "--tasks", "kv_needle,kv_stream", "--limit", "2"]
    output = ["--metadata", json.dumps(metadata), "--output_path", str(tmp_path), "--log_samples"]
    plain = [sys.executable, "-m", "lm_eval", "run"]  # in an interpreter that has imported nothing of ours
    done = subprocess.run([*plain, *arguments, *tasks, *output], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(next(tmp_path.rglob("results_*.json")).read_text())
    assert set(found["results"]["kv_needle"]) >= {"contains,none", "strict,none", "exact,none", "f1,none"}
    assert found["results"]["kv_stream"]["byte_perplexity,none"] > 1


@pytest.fixture(scope="session")
def full_directory() -> str:
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    return str(instantiate(OmegaConf.load(ROOT / "conf" / "model" / "tiny_llama.yaml")).directory())
