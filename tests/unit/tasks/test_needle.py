"""The needle task on real prose: exact lengths, one needle at a sentence boundary, the same prompts everywhere."""

from __future__ import annotations

import hashlib
import os
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from harness.errors import UserError
from harness.types import Example, Tokens
from tasks import scoring
from tasks.corpus import StandardLibrary
from tasks.haystack import Prose, cut
from tasks.hidden import KINDS
from tasks.needle import Needle
from tasks.words import KEYS, VALUES
from tests.support.byte_tokens import ByteTokens
from tests.support.texts import Text

ROOT = Path(__file__).resolve().parents[3]
BYTES = ByteTokens()
PROSE = StandardLibrary(name="stdlib", licence="PSF-2.0")
DEPTHS = (0.0, 0.1, 0.5, 0.93, 1.0)


def size(task: Needle, example: Example, tokens: Tokens = BYTES) -> int:
    prompt = tokens.prompt(example.context, example.question, example.answer_prefix, chat=task.chat)
    return len(prompt.ids) + example.max_new_tokens


def sentence(example: Example) -> str:
    return next(
        s for s in re.findall(r"The special magic \w+ for [A-Z]\w+ is: .*?\.", example.context) if example.answers[0] in s
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("distractors", [0, 3])
def test_length_is_exact_and_the_needle_stands_once(kind: str, chat: bool, distractors: int) -> None:
    task = Needle(lengths=(900, 1024, 3001), depths=DEPTHS, per_cell=2, kind=kind, chat=chat, distractor_needles=distractors)
    examples = task.examples(BYTES, PROSE, seed=3)
    assert len(examples) == 30 and len({e.id for e in examples}) == 30
    for example in examples:
        assert size(task, example) == example.length
        prompt = example.context + example.question + example.answer_prefix
        assert prompt.count(sentence(example)) == 1
        assert len(example.distractors) == distractors
        for value in (*example.answers, *example.distractors):
            assert prompt.casefold().count(value.casefold()) >= 1
            assert scoring.occurrences(prompt, value) == 1
            assert value not in example.question + example.answer_prefix


def test_the_prose_around_the_needle_is_verbatim() -> None:
    text = "\n\n".join(document.strip() for document in PROSE.documents())
    for example in Needle(lengths=(900,), depths=DEPTHS, per_cell=3).examples(BYTES, PROSE, seed=0):
        before, after = example.context.split(sentence(example))
        assert before.rstrip() in text and after.strip() in text
        assert (before.rstrip() + after).strip() in text or not before.strip()


@pytest.mark.parametrize("length", [900, 4000])
def test_depth_is_the_nearest_sentence_boundary(length: int) -> None:
    known = [s.strip() for s in Prose.of(PROSE).sentences]
    for example in Needle(lengths=(length,), depths=DEPTHS, per_cell=3).examples(BYTES, PROSE, seed=1):
        before, after = (part.strip() for part in example.context.split(sentence(example)))
        prose = Prose.of(Text((before + "\n\n" + after,))).sentences
        assert not before or any(before.endswith(s) or s.endswith(before) for s in known)
        assert not (before and after) or any(after.startswith(s) for s in known)
        assert example.depth is not None
        miss = abs(len(before) - example.depth * (len(before) + len(after)))
        assert miss <= max(map(len, prose)) / 2 + 4  # half the longest sentence, and the spaces around the needle
        assert not (example.depth == 0 and before) and not (example.depth == 1 and after)


def test_edges_stand_outside_the_prose() -> None:
    first, last = Needle(lengths=(900,), depths=(0, 1)).examples(BYTES, PROSE, seed=5)
    assert first.context.startswith(sentence(first))
    assert last.context.endswith(sentence(last))


def digests(examples: Sequence[Example]) -> dict[str, str]:
    return {
        e.id: BYTES.prompt(e.context, e.question, e.answer_prefix, chat=False).sha256 + "".join(e.answers) for e in examples
    }


def test_same_prompts_whatever_else_is_asked() -> None:
    whole = digests(Needle(lengths=(900, 1200), depths=DEPTHS, per_cell=3).examples(BYTES, PROSE, seed=7))
    random.seed(99)
    turned = digests(Needle(lengths=(1200, 900), depths=DEPTHS[::-1], per_cell=3).examples(BYTES, PROSE, seed=7))
    part = digests(Needle(lengths=(900,), depths=(0.5,)).examples(BYTES, PROSE, seed=7))
    assert whole == turned
    assert part.items() <= whole.items()
    other = digests(Needle(lengths=(900, 1200), depths=DEPTHS, per_cell=3).examples(BYTES, PROSE, seed=8))
    assert not set(other.values()) & set(whole.values())


def test_same_prompts_in_another_process() -> None:
    code = "from tests.unit.tasks.test_needle import fingerprint; print(fingerprint())"
    env = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == fingerprint()


def fingerprint() -> str:
    task = Needle(lengths=(900,), per_cell=2, kind="uuid", distractor_needles=2)
    return hashlib.sha256(repr(task.examples(BYTES, PROSE, seed=11)).encode()).hexdigest()


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("n", [2, 3])
def test_several_questions_share_a_context(n: int, chat: bool) -> None:
    task = Needle(lengths=(1024,), depths=DEPTHS, per_cell=2, questions=n, distractor_needles=1, chat=chat)
    examples = task.examples(BYTES, PROSE, seed=3)
    assert len(examples) == 10 * n and len({e.id for e in examples}) == 10 * n
    for first in range(0, len(examples), n):
        same = examples[first : first + n]
        assert [e.order for e in same] == list(range(1, n + 1))
        assert len({(e.context, e.group_id) for e in same}) == 1
        assert len({e.answers for e in same}) == len({e.question for e in same}) == n
        assert max(size(task, e) for e in same) == 1024
        depths = [e.depth for e in same]
        assert depths[0] in DEPTHS and all(d is not None and 0 <= d <= 1 for d in depths) and len(set(depths)) == n
        for example in same:
            assert example.context.count(sentence(example)) == 1
            assert len(example.distractors) == n and not set(example.distractors) & set(example.answers)
        by_depth = sorted(same, key=lambda e: e.depth or 0.0)
        assert by_depth == sorted(same, key=lambda e: e.context.index(sentence(e)))


def test_one_question_is_what_it_was_without_the_setting() -> None:
    one = Needle(lengths=(900,), questions=1).examples(BYTES, PROSE, seed=3)
    assert [e.id for e in one] == [f"number-900-{d}-0" for d in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert {e.order for e in one} == {None}


def test_later_questions_on_what_was_compressed_in_view_of_the_first() -> None:
    task = Needle(lengths=(1024,), per_cell=2, questions=2, query_aware=True, aware_of="first")
    own = Needle(lengths=(1024,), per_cell=2, questions=2, query_aware=True)
    examples = task.examples(BYTES, PROSE, seed=3)
    for first, second in zip(examples[::2], examples[1::2], strict=True):
        prompts = [BYTES.prompt(e.context, e.question, e.answer_prefix, chat=False) for e in (first, second)]
        seen, held = zip(*(prompt.split(True) for prompt in prompts), strict=True)
        assert seen[0] == seen[1]
        assert BYTES.decode(seen[0]) == first.context + first.question
        assert BYTES.decode(held[0]) == first.answer_prefix
        asked = BYTES.decode(held[1])
        assert asked.startswith("\n\nWhat is the special magic number for ") and asked.endswith(" is:")
        assert asked not in BYTES.decode(seen[0])
        assert size(task, second) == 1024
    asked_alone = [(e.context, e.question) for e in own.examples(BYTES, PROSE, seed=3)]
    assert len(set(asked_alone)) == len(asked_alone)  # each is compressed in view of its own question


def test_a_limit_covers_the_grid_first() -> None:
    examples = Needle(lengths=(900, 1000), depths=(0, 1), per_cell=2).examples(BYTES, PROSE, seed=0)
    assert [(e.length, e.depth) for e in examples[:4]] == [(900, 0), (900, 1), (1000, 0), (1000, 1)]
    assert len({e.group_id for e in examples}) > 4


@pytest.mark.parametrize("kind", KINDS)
def test_answers_that_know_nothing_score_nothing(kind: str) -> None:
    task = Needle(lengths=(1100,), per_cell=2, kind=kind, distractor_needles=3)
    for example in task.examples(BYTES, PROSE, seed=2):
        for stub in ("", example.answer_prefix, example.question, " ".join(example.distractors)):
            assert task.score(example, stub).value == 0.0
        right = task.score(example, f" {example.answers[0]}.")
        assert right.value == right.metrics["strict"] == right.metrics["exact"] == right.metrics["f1"] == 1.0
        dump = task.score(example, ", ".join((*example.distractors, *example.answers)))
        assert dump.value == 1.0 and dump.metrics["strict"] == 0.0 and dump.metrics["f1"] < 1.0


def test_dumping_the_word_list_is_not_strictly_right() -> None:
    task = Needle(lengths=(900,), kind="word")
    example = task.examples(BYTES, PROSE, seed=2)[0]
    assert task.score(example, " ".join(VALUES)).metrics == pytest.approx(
        {"contains": 1.0, "strict": 0.0, "exact": 0.0, "f1": 2 / (len(VALUES) + 1)}
    )


def test_a_value_that_the_prose_holds_is_drawn_again() -> None:
    taken = set(VALUES[: len(VALUES) - 10])
    prose = Text((". ".join(f"He said {word} of it" for word in [*taken, *KEYS[10:]]) + ".",))
    task = Needle(lengths=(len(prose.texts[0]) // 2,), depths=DEPTHS, per_cell=2, kind="word")
    for example in task.examples(BYTES, prose, seed=0):
        assert scoring.occurrences(example.context, example.answers[0]) == 1


def test_word_lists_are_apart() -> None:
    keys, values = {k.casefold() for k in KEYS}, {v.casefold() for v in VALUES}
    assert len(keys) == len(KEYS) and len(values) == len(VALUES) and not keys & values
    assert max(len(" " + v) for v in VALUES) <= KINDS["word"]


def test_refusals_name_key_value_and_limit() -> None:
    def examples(tokens: Tokens = BYTES, corpus: Any = PROSE, **settings: Any) -> None:
        Needle(**settings).examples(tokens, corpus, seed=0)

    with pytest.raises(UserError, match=r"task\.lengths=\[512, 1024\].*largest usable length of this model is 512"):
        examples(ByteTokens(max_length=512), lengths=[512, 1024])
    with pytest.raises(UserError, match=r"task\.lengths=\[100\].*need (\d+) tokens") as refused:
        examples(lengths=[100])
    least = int(re.findall(r"need (\d+)", str(refused.value))[0])
    assert size(Needle(), Needle(lengths=[least + 20]).examples(BYTES, PROSE, 0)[0]) == least + 20
    with pytest.raises(UserError, match=r"corpus mine is too short for task\.lengths=\[1024\]"):
        examples(corpus=Text(("One sentence. Another one.",)))
    for empty in ((), ("",), ("  \n ",)):
        with pytest.raises(UserError, match=r"corpus mine is empty.*\[1024\]"):
            examples(corpus=Text(empty))
    with pytest.raises(UserError, match="corpus=None"):
        examples(corpus=None)
    with pytest.raises(UserError, match=r"task\.max_new_tokens=5.*takes 8 tokens"):
        examples(max_new_tokens=5)


def test_a_prompt_may_fill_the_model_to_the_last_position() -> None:
    task = Needle(lengths=(512,), chat=True, max_new_tokens=64)
    for example in task.examples(ByteTokens(max_length=512), PROSE, seed=0):
        assert size(task, example) == 512


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lengths", []),
        ("lengths", 1024),
        ("lengths", ["1024"]),
        ("lengths", [1024.0]),
        ("lengths", [True]),
        ("lengths", [0]),
        ("lengths", [512, 512]),
        ("depths", [1.5]),
        ("depths", [50]),
        ("depths", ["0.5"]),
        ("depths", [0, 0.0]),
        ("per_cell", 0),
        ("per_cell", "4"),
        ("kind", "Number"),
        ("distractor_needles", -1),
        ("distractor_needles", len(KEYS)),
        ("questions", 0),
        ("questions", len(KEYS) + 1),
        ("aware_of", "second"),
        ("aware_of", "first"),
        ("max_new_tokens", 0),
        ("query_aware", "false"),
        ("chat", 1),
        ("metric", "bleu"),
        ("stop", [1]),
        ("stop", [""]),
        ("stop", None),
        ("needle", "no marks"),
        ("question", "What is it?"),
        ("question", "{key} {value}"),
        ("answer_prefix", "{value}"),
        ("answer_prefix", None),
        ("intro", "Remember {key}"),
    ],
)
def test_a_setting_of_the_wrong_kind_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(UserError, match=rf"^task\.{key}="):
        Needle(**{key: value})


def test_text_without_sentence_ends_still_gives_exact_lengths() -> None:
    for text in ("word " * 3000, "x" * 9000, "naïve café " * 900):
        task = Needle(lengths=(901,), depths=DEPTHS)
        assert all(size(task, example) == 901 for example in task.examples(BYTES, Text((text,)), seed=0))


def test_cut_takes_words_first_then_characters() -> None:
    sentence = " Blessed are the meek"
    assert cut(sentence, len("the meek"), len) == "the meek"
    assert cut(sentence, len("he meek"), len) == "he meek"
    assert cut(sentence, len(sentence) - 1, len) == "Blessed are the meek"
    assert cut(sentence, 0, len) == ""
    assert cut("今日は", 4, lambda text: len(text.encode())) == ""
    assert cut("a 今日は", 6, lambda text: len(text.encode())) == "日は"


def test_sentences_joined_are_the_corpus() -> None:
    prose = Prose.of(PROSE)
    assert "".join(prose.sentences).strip() == "\n\n".join(document.strip() for document in PROSE.documents())
    assert len(prose.sentences) == len(prose.origins) == len(set(prose.origins)) > 3000
    said = Prose.of(Text(('Mr. Hale said "No." He left! Why?\n\nA heading\n\nThe end',)))
    assert [s.strip() for s in said.sentences] == ['Mr. Hale said "No."', "He left!", "Why?", "A heading", "The end"]


def test_the_yaml_is_the_schema_and_its_defaults() -> None:
    settings = OmegaConf.load(ROOT / "conf/task/needle.yaml")
    task = instantiate(settings, _convert_="all")
    assert isinstance(task, Needle)
    assert task == Needle(per_cell=settings.per_cell)
    assert set(settings) - {"_target_"} == set(Needle.__dataclass_fields__)
    assert hash(task)


@pytest.mark.slow
@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_exact_on_the_real_tokenizer_and_prose(kind: str, chat: bool) -> None:
    from harness.models.tokenizer import Tokenizer

    spec = instantiate(OmegaConf.load(ROOT / "conf/model/smollm2.yaml"))
    tokens = Tokenizer.load(spec.directory(), max_length=spec.max_length)
    corpus = instantiate(OmegaConf.load(ROOT / "conf/corpus/kjv.yaml"))
    task = Needle(lengths=(256, 257, 1024, 8192), depths=DEPTHS, per_cell=2, kind=kind, chat=chat, distractor_needles=1)
    for example in task.examples(tokens, corpus, seed=0):
        assert size(task, example, tokens) == example.length
        ids = tokens.prompt(example.context, example.question, example.answer_prefix, chat=chat).ids
        assert tokens.decode(ids).count(sentence(example)) == 1


@pytest.mark.parametrize("length", [300, 1500])
def test_exact_on_a_tokenizer_that_puts_a_space_before_whatever_starts(length: int) -> None:
    from tokenizers import Tokenizer as Core
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from harness.models.tokenizer import Tokenizer

    core = Core(models.BPE(unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    core.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(vocab_size=1500, special_tokens=["<unk>"], show_progress=False)
    core.train_from_iterator(PROSE.documents(), trainer)
    tokens = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>"))
    task = Needle(lengths=(length,), depths=DEPTHS, per_cell=3, max_new_tokens=20)
    for example in task.examples(tokens, PROSE, seed=0):
        assert size(task, example, tokens) == length
