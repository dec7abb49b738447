"""GGUF files: another architecture than the default model's gives the same logits, and what cannot be read is refused in a line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config

from harness.errors import UserError
from harness.models.gguf_tokenizer import build_tokenizer
from harness.models.load import ModelSpec, load
from harness.models.random_model import byte_tokenizer
from tests.support.tiny_models import SHAPE, build

BYTES = sorted(byte_tokenizer(64).get_vocab().items(), key=lambda item: item[1])[:256]
TOKENS = [*(token for token, _ in BYTES), "<|endoftext|>", "th", "the"]
MERGES = ["t h", "th e"]
NORMAL, CONTROL = 1, 3
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_HARNESS_CACHE", str(tmp_path / "cache"))


def qwen() -> PreTrainedModel:
    shape = SHAPE | {"vocab_size": len(TOKENS), "num_key_value_heads": 2, "intermediate_size": 64}
    return build(Qwen2Config(**shape, tie_word_embeddings=False), "sdpa")


def written(path: Path, model: PreTrainedModel, kind: str = "qwen2", pre: str = "qwen2") -> Path:
    """The model as llama.cpp's tools write it: transposed nowhere, biases beside weights."""
    config, writer = model.config, gguf.GGUFWriter(path, kind)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([NORMAL] * 256 + [CONTROL, NORMAL, NORMAL])
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(256)
    for name, weight in model.state_dict().items():
        writer.add_tensor(renamed(name), weight.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def renamed(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in OUTER:
        return f"{OUTER[stem]}.{kind}"
    _, _, number, *rest = stem.split(".")
    return f"blk.{number}.{LAYER['.'.join(rest)]}.{kind}"


def test_another_architecture_gives_the_logits_of_the_model_it_was_made_of(tmp_path: Path) -> None:
    model = qwen()
    spec = ModelSpec(source="gguf", path=str(written(tmp_path / "tiny.gguf", model)), tokenizer="bytes")
    lm = load(spec)
    ids = lm.tokens.encode("the other thing")
    assert ids[0] == TOKENS.index("the")
    with torch.inference_mode():
        assert torch.equal(lm.model(torch.tensor([ids])).logits, model(torch.tensor([ids])).logits)
    assert lm.model.config.model_type == "qwen2" and lm.eos_ids == (256,)
    assert spec.name == "tiny" and set(spec.identity()) == {"source", "file", "digest", "dtype", "kv_dtype"}


def test_what_cannot_be_read_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("no model")
    model = qwen()
    for path, why in (
        (tmp_path / "none.gguf", "no such file"),
        (tmp_path / "text.gguf", "not a GGUF file"),
        (written(tmp_path / "a.gguf", model, kind="rwkv6"), "general.architecture='rwkv6', which transformers does not read"),
        (written(tmp_path / "b.gguf", model, pre="martian"), "tokenizer.ggml.pre='martian' is not supported"),
    ):
        with pytest.raises(UserError, match=why) as refused:
            load(ModelSpec(source="gguf", path=str(path), tokenizer="bytes"))
        assert "\n" not in str(refused.value)


def pieces(tokens: dict[str, float], **more: Any) -> dict[str, Any]:
    """A header with sentence pieces and their scores."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *tokens]
    return {
        "general.architecture": "gemma3",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": names,
        "tokenizer.ggml.scores": [0.0] * 259 + list(tokens.values()),
        "tokenizer.ggml.token_type": [CONTROL] * 3 + [6] * 256 + [NORMAL] * len(tokens),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": False,
        **more,
    }


def test_pieces_merge_by_their_scores_not_by_the_best_split() -> None:
    """The best-scored union merges first, as the pieces were trained; a unigram model would take the longest pieces."""
    letters = dict.fromkeys("\u2581abc", -100.0)
    tokenizer = build_tokenizer(pieces(letters | {"ab": -1.0, "bc": -2.0, "abc": -50.0, "\u2581ab": -3.0}))
    split = tokenizer.convert_ids_to_tokens(tokenizer.encode("abc cab abc", add_special_tokens=False))
    assert split == ["abc", "\u2581", "c", "ab", "\u2581ab", "c"]
    assert tokenizer.encode("a")[0] == 1
    for text in ("abc  cab", "abc\n\u20ac 🙂 b"):  # what is no piece is bytes
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_a_tokenizer_of_another_kind_is_refused() -> None:
    with pytest.raises(UserError, match=r"tokenizer.ggml.model='bert' is not supported"):
        build_tokenizer(pieces({}) | {"tokenizer.ggml.model": "bert"})
