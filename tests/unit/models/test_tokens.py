"""Token ids: one BOS, three pieces, text that survives, tokenizers that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Core
from transformers import LlamaConfig, PreTrainedTokenizerFast

from harness.errors import UserError
from harness.models.random_model import byte_tokenizer
from harness.models.tokenizer import Tokenizer
from harness.types import Tokens

BOS, EOS = 256, 257
TEMPLATE_WITH_BOS = "{{ bos_token }}[U]{{ messages[0]['content'] }}[/U]"
TEMPLATE_WITHOUT = "[U]{{ messages[0]['content'] }}[/U]"


def tokens(*, template: str | None = TEMPLATE_WITH_BOS, adds_bos: bool = True) -> Tokenizer:
    hf = byte_tokenizer(512)
    hf.chat_template = template
    if not adds_bos:
        hf.backend_tokenizer.post_processor = processors.Sequence([])
    return Tokenizer(hf, 512)


def test_it_is_what_tasks_ask_for() -> None:
    assert isinstance(tokens(), Tokens)
    assert tokens().max_length == 512


def test_a_byte_is_its_own_id_and_specials_are_stripped() -> None:
    assert tokens().encode("Aé\n") == [65, 0xC3, 0xA9, 10]
    assert tokens().decode([BOS, 65, 0xC3, 0xA9, EOS]) == "Aé"


@pytest.mark.parametrize("template", [TEMPLATE_WITH_BOS, TEMPLATE_WITHOUT])
@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("context", ["text", "<bos>text", ""])
def test_exactly_one_bos_where_the_model_expects_one(template: str, chat: bool, context: str) -> None:
    ids = tokens(template=template).prompt(context, "q", "a", chat=chat).ids
    assert ids[0] == BOS
    assert ids[1:2] != (BOS,)
    if not (chat and context.startswith("<bos>")):  # a BOS inside the user's own words stays
        assert ids.count(BOS) == 1


def test_no_bos_where_the_model_expects_none() -> None:
    plain = tokens(adds_bos=False)
    assert plain.bos_ids == ()
    assert BOS not in plain.prompt("text", "q", "a", chat=False).ids
    assert plain.prompt("text", "q", "a", chat=True).ids.count(BOS) == 1  # the template's own


def test_the_three_pieces_stand_inside_the_template() -> None:
    made = tokens().prompt("context ", "question", "answer", chat=True)
    bare = tokens().hf.decode
    assert bare(list(made.context)) == "<bos>[U]context "
    assert bare(list(made.question)) == "question[/U]"
    assert bare(list(made.answer_prefix)) == "answer"


def test_chat_without_a_template_is_refused() -> None:
    with pytest.raises(UserError, match="no chat template"):
        tokens(template=None).prompt("c", "q", "a", chat=True)


@pytest.mark.parametrize("template", ["constant", "{{ messages[0]['content'] }}{{ messages[0]['content'] }}"])
def test_a_template_that_does_not_show_the_message_once_is_refused(template: str) -> None:
    with pytest.raises(UserError, match="exactly once"):
        tokens(template=template).prompt("c", "q", "a", chat=True)


def test_the_prompt_does_not_follow_the_calendar() -> None:
    template = "{{ date_string if date_string is defined else strftime_now('%d') }}{{ messages[0]['content'] }}"
    made = tokens(template=template).prompt("c", "q", "", chat=True)
    assert tokens().decode(made.ids) == "26 Jul 2024cq"


def saved(core: Core, folder: Path) -> Path:
    """A directory as a model's: tokenizer files beside a config."""
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>").save_pretrained(folder)
    LlamaConfig().save_pretrained(folder)
    return folder


def bytewise() -> Core:
    core: Core = byte_tokenizer(512).backend_tokenizer
    return core


def test_a_byte_tokenizer_is_refused_unless_it_is_asked_for(tmp_path: Path) -> None:
    folder = saved(bytewise(), tmp_path)
    assert Tokenizer.load(folder, max_length=512, bytewise=True).encode("a") == [97]
    with pytest.raises(UserError, match=r"1\.00 characters a token .* model\.tokenizer=bytes"):
        Tokenizer.load(folder, max_length=512)


def test_a_tokenizer_that_changes_text_is_refused(tmp_path: Path) -> None:
    core = bytewise()
    core.normalizer = normalizers.Lowercase()
    with pytest.raises(UserError, match="does not return the same text"):
        Tokenizer.load(saved(core, tmp_path), max_length=512, bytewise=True)


def test_a_directory_without_a_tokenizer_is_one_line(tmp_path: Path) -> None:
    LlamaConfig().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"^the tokenizer in .* cannot be loaded.*$"):
        Tokenizer.load(tmp_path, max_length=512)


def sentencepiece_like() -> Tokenizer:
    """A BPE that puts a space of its own before a text, as Llama 2's does."""
    vocab = {piece: i for i, piece in enumerate(["<unk>", "▁", "\n", *"abcdefghijklmnopqrstuvwxyz.?"])}
    core = Core(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    core.decoder = decoders.Metaspace(prepend_scheme="first")
    core.add_special_tokens([AddedToken("<eos>", special=True)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>"))


def test_pieces_join_without_a_space_that_nobody_wrote() -> None:
    made = sentencepiece_like().prompt("some text.\n", "what is it?\n", "it is", chat=False)
    assert sentencepiece_like().decode(made.ids) == "some text.\nwhat is it?\nit is"
