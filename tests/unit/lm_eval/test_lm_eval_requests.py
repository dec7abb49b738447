"""lm-eval's requests as ids: lm-eval's own encoding, windows and cutting are the reference; what cannot be run is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import processors

from harness.errors import UserError
from harness.evaluation.lm_eval_runner import file_names
from harness.lm_eval.encoding import Encoder, answer_text, generation_limits, stopper
from harness.models.random_model import byte_tokenizer
from harness.models.tokenizer import Tokenizer
from tasks.lm_eval_task import Document, LmEval, _example

BOS, EOS = 256, 257


def encoder(most: int = 64, truncate: str = "refuse", *, adds_bos: bool = False) -> Encoder:
    hf = byte_tokenizer(512)
    if not adds_bos:
        hf.backend_tokenizer.post_processor = processors.Sequence([])
    return Encoder(Tokenizer(hf, 512), most, truncate)


def reference(encode: Encoder) -> Any:
    """lm-eval's own way from texts to ids, with our tokenizer in it."""
    from lm_eval.api.model import TemplateLM

    class Reference(TemplateLM):  # type: ignore[misc]
        eot_token_id, prefix_token_id = EOS, BOS

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            plain = add_special_tokens is False or string.startswith("<bos>")
            return list(encode.tokens.hf.encode(string, add_special_tokens=not plain))

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> Any:
            return [(context, target) for _, context, target in requests]

        def loglikelihood_rolling(self, requests: Any, **_: Any) -> Any: ...

        def generate_until(self, requests: Any, **_: Any) -> Any: ...

    return Reference()


class Asked:
    def __init__(self, *args: str) -> None:
        self.args = args


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize(
    ("context", "continuation"), [("The sky is", " blue"), ("ends in blanks  ", "word"), ("", "whole"), ("<bos>Twice", " no")]
)
def test_contexts_and_targets_are_lm_evals(adds_bos: bool, context: str, continuation: str) -> None:
    encode = encoder(adds_bos=adds_bos)
    ((first, target),) = reference(encode).loglikelihood([Asked(context, continuation)], disable_tqdm=True)
    mine = encode.score(context, continuation)
    if mine.windows:
        (window,) = mine.windows
        assert (list(window.ids), window.scored) == (first + target, len(target))
    else:
        assert (list(mine.ids), list(mine.target)) == (first, target)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 33, 70])
def test_windows_are_lm_evals(length: int) -> None:
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    text = "abcdefghij" * 7
    ids = encoder().encode(text[:length])
    theirs = [
        (tuple(a + b), len(b))
        for a, b in map(make_disjoint_window, get_rolling_token_windows(ids, prefix_token=BOS, max_seq_len=16, context_len=1))
    ]
    assert [(w.ids, w.scored) for w in encoder(16).rolling(text[:length]).windows] == theirs


def test_a_whole_text_starts_with_exactly_one_bos() -> None:
    for adds_bos in (False, True):
        (window,) = encoder(adds_bos=adds_bos).rolling("abc").windows
        assert window.ids == (BOS, 97, 98, 99)


@pytest.mark.parametrize(
    ("text", "until"),
    [
        ("one. two\nthree", [".", "\n"]),
        ("one. two\nthree", ["\n", "."]),
        ("\n42\nmore", ["\n"]),
        ("no stop", ["zz", ""]),
        ("a<eos>b", []),
    ],
)
def test_answers_are_cut_as_lm_eval_cuts_them(text: str, until: Sequence[str]) -> None:
    from lm_eval.models.utils import postprocess_generated_text

    encode = encoder()
    request = encode.generate("context", {"until": list(until), "max_gen_toks": 8})
    assert request.until[-1] == "<eos>"
    ids = encode.tokens.encode(text.replace("<eos>", ""))
    theirs = postprocess_generated_text(encode.tokens.decode(ids), [*until, "<eos>"], None)
    assert answer_text(encode.tokens, ids, request.until) == theirs
    assert stopper(encode.tokens, request.until)(ids) == any(s in text.replace("<eos>", "") for s in until if s)


def test_one_text_or_a_list_of_stop_strings_and_every_name_of_the_length() -> None:
    assert generation_limits({"until": "\n", "max_gen_toks": 3}) == (3, ("\n",))
    assert generation_limits({"until": ["\n"], "max_new_tokens": 3}) == (3, ("\n",))
    assert generation_limits({}) == (256, ())


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"do_sample": True}, "ask for sampling"),
        ({"temperature": 0.7}, "ask for sampling"),
        ({"num_beams": 4}, "'num_beams'"),
        ({"repetition_penalty": 1.2}, "'repetition_penalty'"),
    ],
)
def test_what_greedy_decoding_cannot_do_is_refused(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        generation_limits(settings)


def test_a_prompt_beyond_the_model_is_refused_or_cut_and_marked() -> None:
    settings = {"max_gen_toks": 8}
    with pytest.raises(UserError, match="a prompt of 60 tokens with 8 tokens of answer is beyond the model's 64 positions"):
        encoder().generate("x" * 60, settings)
    cut = encoder(truncate="left").generate("y" * 10 + "x" * 56, settings)
    assert cut.truncated
    assert len(cut.ids) == 56
    assert set(cut.ids) == {ord("x")}
    assert not encoder().generate("x" * 56, settings).truncated


DRAWN = """
import random
from datasets import Dataset
def draw(**metadata):
    return {"test": Dataset.from_list([{"text": str(random.random())} for _ in range(3)])}
"""
DRAWN_YAML = """
task: %s
custom_dataset: !function drawn.draw
output_type: generate_until
test_split: test
doc_to_text: "{{text}}"
doc_to_target: "{{text}}"
generation_kwargs: {until: [], max_gen_toks: 4}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


@pytest.mark.filterwarnings("ignore")  # of lm-eval and what it loads
def test_prompts_depend_on_the_seed_alone(tmp_path: Path) -> None:
    (tmp_path / "drawn.py").write_text(DRAWN)
    for name in ("draws_a", "draws_b"):
        (tmp_path / f"{name}.yaml").write_text(DRAWN_YAML % name)

    def prompts(names: list[str], seed: int) -> dict[str, str]:
        task = LmEval(name=names, include_path=str(tmp_path))
        tokens = encoder().tokens
        return {one.id: one.context for one in task.examples(tokens, None, seed)}

    together, swapped = prompts(["draws_a", "draws_b"], 0), prompts(["draws_b", "draws_a"], 0)
    assert together == swapped
    assert prompts(["draws_b"], 0) == {key: text for key, text in together.items() if key.startswith("draws_b")}
    assert not set(prompts(["draws_b"], 1).values()) & set(together.values())
    assert list(together)[:2] == ["draws_a-0", "draws_b-0"]  # a limit covers every task


def test_results_of_every_stack_have_a_file_of_their_own() -> None:
    """Found by: two labels that differ in a blank wrote one file, and a long one ended the run once all was made."""
    arms = ["h2o keep.budget.value=0.5", "a b", "a-b", "A-b", "x" * 4000, "x" * 4000 + "y", "模" * 300]
    found = file_names(arms)
    assert found["h2o keep.budget.value=0.5"] == "h2o-keep.budget.value=0.5"
    assert len({name.casefold() for name in found.values()}) == len(arms)
    assert all(len(name.encode()) < 200 and "/" not in name for name in found.values())


def test_documents_about_one_passage_are_one_group() -> None:
    """Found by: six questions on each of ten passages were sixty independent documents to every interval.

    The kind: what shares a text is not independent, whoever made the task. The stand-in is what is read of lm-eval's task.
    """
    task = SimpleNamespace(OUTPUT_TYPE="generate_until", doc_to_target=lambda doc: doc["word"])
    asked = SimpleNamespace(args=("a prompt", {}), request_type="generate_until")

    def group(name: str = "t", **doc: Any) -> str:
        return _example(task, Document(name, 0, {"word": "x"} | doc, (asked,))).group_id

    assert group(passage="One text.", question="a") == group(passage="One text.", question="b") != group(passage="Another.")
    assert group("t", article=["One", "text"]) != group("u", article=["One", "text"])
    assert group(group_id="genesis", context="One text.") == group(group_id="genesis", context="Another.")
    assert group(question="alone") == group(context="") == ""
