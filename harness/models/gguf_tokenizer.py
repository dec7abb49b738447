"""The tokenizer of a GGUF header, built from its own tokens: byte-level BPE with its merges, or sentence pieces with scores.

`from_pretrained(gguf_file=)` is not used for it: it turns scored pieces into a unigram model, which splits text otherwise than
the model was trained on, and sets wrong BOS and EOS for others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from harness.errors import UserError

_CONTROL, _BYTE = 3, 6  # GGUF's token types: special tokens, single bytes
_SPACE = "\u2581"  # how sentence pieces write a space
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS = {  # `tokenizer.ggml.pre` -> how text is split before its merges
    "qwen2": _WORDS % "",
    "llama-bpe": _WORDS % "{1,3}",
    "gpt-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
}
_ROLES = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}


def build_tokenizer(fields: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """The tokenizer of a GGUF header.

    Raises:
        UserError: another kind of tokenizer, or another way to split text, than those known here.
    """
    kind, tokens = fields.get("tokenizer.ggml.model"), list(fields["tokenizer.ggml.tokens"])
    if kind == "gpt2":
        core = _byte_level(fields, tokens)
    elif kind == "llama":
        core = _pieces(fields, tokens)
    else:
        raise UserError(
            f"the file's tokenizer.ggml.model={kind!r} is not supported: gpt2 (byte-level BPE) and llama (pieces) are"
        )
    types = fields.get("tokenizer.ggml.token_type", [])
    special = [token for token, of in zip(tokens, types, strict=False) if of == _CONTROL]
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    roles = {
        role: tokens[at] for role, name in _ROLES.items() if (at := fields.get(f"tokenizer.ggml.{name}_token_id")) is not None
    }
    if fields.get("tokenizer.ggml.add_bos_token") and "bos_token" in roles:
        bos = (roles["bos_token"], fields["tokenizer.ggml.bos_token_id"])
        core.post_processor = processors.TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        **roles,
        chat_template=fields.get("tokenizer.chat_template"),
        model_max_length=fields.get(f"{fields['general.architecture']}.context_length"),
        clean_up_tokenization_spaces=False,
    )


def _byte_level(fields: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    pre = fields.get("tokenizer.ggml.pre")
    if pre not in _PATTERNS:
        known = ", ".join(_PATTERNS)
        raise UserError(f"the file's tokenizer.ggml.pre={pre!r} is not supported: how it splits text is known for {known}")
    merges = [(left, right) for left, right in (merge.split(" ", 1) for merge in fields["tokenizer.ggml.merges"])]
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    if pre == "qwen2":
        core.normalizer = normalizers.NFC()
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERNS[pre]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    return core


def _pieces(fields: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    """Sentence pieces as BPE: two pieces merge where their union is a piece, the best-scored union first."""
    scores, vocab = fields["tokenizer.ggml.scores"], {token: i for i, token in enumerate(tokens)}
    found = []
    for token, at in vocab.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                found.append((-scores[at], at, vocab[left], vocab[right], left, right))
    merges = [(one[4], one[5]) for one in sorted(found)]
    unknown = fields.get("tokenizer.ggml.unknown_token_id")
    core = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges,
            byte_fallback=True,
            fuse_unk=True,
            unk_token=None if unknown is None else tokens[unknown],
        )
    )
    front = fields.get("tokenizer.ggml.add_space_prefix", True)
    core.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend(_SPACE)] if front else []), normalizers.Replace(" ", _SPACE)]
    )
    core.decoder = decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(content=" ", left=1)] if front else []),
        ]
    )
    return core
