"""Question data sets: column mapping on real data sets written to disk, SQuAD files good and bad, and no network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from harness.errors import UserError
from tasks.hub_qa import HubQA
from tests.support.byte_tokens import ByteTokens

ROOT = Path(__file__).resolve().parents[3]
BYTES = ByteTokens()
NAMES = ("squad", "hotpotqa", "longbench")
CONTEXT = "Anna has 12 apples and Ben has a pear."
SQUAD = {
    "version": "1.1",
    "data": [
        {
            "title": "Fruit",
            "paragraphs": [
                {
                    "context": CONTEXT,
                    "qas": [
                        {"id": "a", "question": "How many apples?", "answers": [{"text": "12", "answer_start": 9}] * 2},
                        {"id": "b", "question": "Who has a pear?", "answers": [{"text": "Ben"}, {"text": "Ben has"}]},
                        {"id": "c", "question": "Who has none?", "answers": [], "is_impossible": True},
                        {"id": "d", "question": "Who?", "answers": [{"text": "Anna"}, {"text": "Ben"}]},
                    ],
                },
                {"context": "Else.", "qas": [{"id": "e", "question": " Why? ", "answers": [{"text": "no"}]}]},
            ],
        }
    ],
}


def written(folder: Path, content: object) -> str:
    path = folder / "squad.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return str(path)


def configured(name: str, **changes: Any) -> HubQA:
    settings = OmegaConf.merge(OmegaConf.load(ROOT / f"conf/task/{name}.yaml"), changes)
    task: HubQA = instantiate(settings, _convert_="all")
    return task


def stored(folder: Path, rows: list[dict[str, Any]], split: str = "test") -> str:
    """A data set in plain files, read as those of the hub are."""
    place = folder / "set"
    place.mkdir()
    (place / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(place)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()


def test_a_squad_file_becomes_examples(tmp_path: Path) -> None:
    task = configured("squad", path=written(tmp_path, SQUAD))
    first, second, third, last = task.examples(BYTES, None, seed=0)
    assert [e.id for e in (first, second, third, last)] == ["a", "b", "d", "e"]  # c has no answer
    assert first.context == CONTEXT and first.group_id == "Fruit" and first.stop == ("\n",)
    assert (first.question, first.answer_prefix) == ("\n\nQuestion: How many apples?", "\nAnswer:")
    assert first.answers == ("12",) and second.answers == ("Ben", "Ben has")
    assert last.question == "\n\nQuestion: Why?" and last.distractors == ()
    chat = configured("squad", path=task.path, chat=True, max_new_tokens=9).examples(BYTES, None, seed=1)[0]
    assert (chat.answer_prefix, chat.max_new_tokens) == ("Answer:", 9)


def test_answers_to_other_questions_are_rivals(tmp_path: Path) -> None:
    task = configured("squad", path=written(tmp_path, SQUAD))
    first, second, third, _ = task.questions
    assert first.distractors == ("Ben", "Ben has", "Anna")
    assert second.distractors == ("12", "Anna")
    assert third.distractors == ("12",)
    for example in task.questions:
        for stub in ("", example.answer_prefix):
            score = task.score(example, stub)
            assert score.value == 0.0 and set(score.metrics.values()) == {0.0}
        said = task.score(example, f" {example.answers[-1]}.")
        assert said.value == said.metrics["strict"] == said.metrics["exact"] == 1.0
    for example in task.questions[:3]:
        dump = task.score(example, CONTEXT)
        assert dump.metrics["contains"] == 1.0 and dump.metrics["strict"] == 0.0 and dump.value < 0.5


def test_a_list_of_documents_gets_its_titles(tmp_path: Path) -> None:
    row = {
        "id": "h1",
        "question": "Which came first?",
        "answer": "yes",
        "type": "comparison",
        "context": {"title": ["A", "B"], "sentences": [["One.", " Two."], ["Three."]]},
    }
    task = configured("hotpotqa", repo=stored(tmp_path, [row], "validation"), subset=None)
    (example,) = task.examples(BYTES, None, seed=0)
    assert example.context == "A\nOne. Two.\n\nB\nThree."
    assert (example.answers, example.id, example.group_id) == (("yes",), "h1", "h1")


def test_plain_columns_and_an_instruction(tmp_path: Path) -> None:
    rows = [
        {"context": CONTEXT, "question": "How many?", "answers": ["12", "twelve"], "length": 9},
        {"context": "Else.", "question": "Who?", "answers": ["Ben"], "length": 2},
    ]
    task = configured("longbench", repo=stored(tmp_path, rows), subset=None)
    one, two = task.examples(BYTES, None, seed=0)
    assert one.context == f"{task.intro}\n\n{CONTEXT}"
    assert (one.id, one.answers, one.stop) == ("0", ("12", "twelve"), ())
    assert one.group_id != two.group_id
    assert task.score(one, " twelve").value == 1.0
    part = configured("longbench", repo=task.repo, subset=None, split="test[:1]")
    assert [e.id for e in part.questions] == ["0"]


def test_a_prompt_beyond_the_model_is_refused_or_cut_and_marked(tmp_path: Path) -> None:
    long = {"context": "start " + "word " * 100 + "end", "question": "Who?", "answers": ["Ben"]}
    repo = stored(tmp_path, [long])
    small = ByteTokens(max_length=300)
    with pytest.raises(UserError, match=r"data set '.*set'.*, example 0: .* \d{3} tokens and the model has 300"):
        configured("longbench", repo=repo, subset=None).examples(small, None, seed=0)
    for side, keeps in (("left", ("end",)), ("middle", ("Answer the", "end"))):
        task = configured("longbench", repo=repo, subset=None, truncate=side)
        (example,) = task.examples(small, None, seed=0)
        ids = small.prompt(example.context, example.question, example.answer_prefix, chat=False).ids
        assert example.truncated and len(ids) + example.max_new_tokens == 300
        assert all(word in example.context for word in keeps)
    with pytest.raises(UserError, match="question and answer alone"):
        configured("longbench", repo=repo, subset=None, truncate="left").examples(ByteTokens(max_length=57), None, 0)


@pytest.fixture(scope="module")
def without_network(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a fresh process, whose settings are read at import, prints for each task."""
    code = (
        "import json; from hydra.utils import instantiate; from omegaconf import OmegaConf\n"
        "said = {}\n"
        f"for name in {list(NAMES)!r}:\n"
        "    try: instantiate(OmegaConf.load(f'conf/task/{name}.yaml'), _convert_='all')\n"
        "    except Exception as error:\n"
        "        while error.__cause__ is not None: error = error.__cause__\n"
        "        said[name] = f'{type(error).__name__} {error}'\n"
        "print(json.dumps(said))"
    )
    env = {**os.environ, "HF_HOME": str(tmp_path_factory.mktemp("hub")), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    said: dict[str, str] = json.loads(run.stdout)
    return said


@pytest.mark.parametrize("name", NAMES)
def test_without_network_one_line_names_data_set_and_revision(without_network: dict[str, str], name: str) -> None:
    settings, said = OmegaConf.load(ROOT / f"conf/task/{name}.yaml"), without_network[name]
    assert said.startswith(f"UserError data set '{settings.repo}' (revision {settings.revision}")
    assert "cannot be fetched: " in said and "\n" not in said


@pytest.mark.parametrize("name", NAMES)
def test_a_yaml_is_the_schema_and_pins_a_commit(name: str) -> None:
    settings = OmegaConf.load(ROOT / f"conf/task/{name}.yaml")
    assert set(settings) - {"_target_"} == set(HubQA.__dataclass_fields__) - {"needs_corpus"}
    assert len(settings.revision) == 40 and int(settings.revision, 16)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "is not JSON: Expecting value at line 1"),
        ("[" * 100000, "is not JSON"),
        ([1], "no list 'data'"),
        ({"data": [{"title": "x"}]}, r"data\[0\] is not in the SQuAD format: no list 'paragraphs'"),
        ({"data": [{"paragraphs": [{"context": "c"}]}]}, r"data\[0\]\.paragraphs\[0\] .* no list 'qas'"),
        ({"data": [{"paragraphs": [{"qas": [{"id": "a", "question": "q", "answers": []}]}]}]}, "no text 'context'"),
        ({"data": [{"paragraphs": [{"context": "c", "qas": [{"id": 1, "question": "q", "answers": []}]}]}]}, "'id'"),
        ({"data": []}, "holds no question with an answer"),
        ({"data": SQUAD["data"] * 2}, "id 'a' occurs twice"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path: Path, content: object, says: str) -> None:
    path = written(tmp_path, content)
    with pytest.raises(UserError, match=says) as refused:
        HubQA(
            name="x", path=path, columns={"context": "context", "question": "question", "answers": "answers.text", "id": "id"}
        )
    assert path in str(refused.value) and "\n" not in str(refused.value)


def test_files_that_are_not_there_or_not_text(tmp_path: Path) -> None:
    columns = {"context": "context", "question": "question", "answers": "answers.text"}
    with pytest.raises(UserError, match="cannot be read: No such file"):
        HubQA(name="x", path=str(tmp_path / "none.json"), columns=columns)
    (tmp_path / "bad.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="is not UTF-8 text: byte 0"):
        HubQA(name="x", path=str(tmp_path / "bad.json"), columns=columns)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"name": ""}, r"^task\.name="),
        ({"path": None}, r"^task\.repo=None .*task\.path=FILE"),
        ({"path": None, "repo": "a/b"}, r"^task\.revision=None .*commit"),
        ({"columns": {"context": "context"}}, r"^task\.columns="),
        ({"columns": {"context": "c", "question": "q", "answers": "a", "more": "x"}}, r"^task\.columns="),
        ({"columns": {"context": "text", "question": "question", "answers": "answers"}}, "row 0 has no column 'text'; it has id"),
        ({"columns": {"context": "context", "question": "question", "answers": "answers"}}, "is not a text"),
        ({"question": "no mark"}, r"^task\.question="),
        ({"answer_prefix": None}, r"^task\.answer_prefix="),
        ({"max_new_tokens": 0}, r"^task\.max_new_tokens="),
        ({"metric": "bleu"}, r"^task\.metric="),
        ({"chance": 1}, r"^task\.chance="),
        ({"truncate": "right"}, r"^task\.truncate="),
        ({"chat": "no"}, r"^task\.chat="),
        ({"stop": [1]}, r"^task\.stop="),
    ],
)  # fmt: skip
def test_a_setting_of_the_wrong_kind_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    columns = {"context": "context", "question": "question", "answers": "answers.text"}
    with pytest.raises(UserError, match=says):
        HubQA(**{"name": "x", "path": written(tmp_path, SQUAD), "columns": columns, **changes})
