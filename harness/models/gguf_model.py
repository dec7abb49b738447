"""Conversion of a llama-type GGUF file to a transformers directory: config, weights, tokenizer.

Weights are dequantized to float32, which represents every value of a block-quantized file exactly, and GGUF's order of the
rotary rows of the Q and K weights is undone. `from_pretrained(gguf_file=)` is not used: it sets the wrong BOS and EOS for such
models, needs a further package, and the result cannot always be saved.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from harness.errors import UserError

_CONTROL = 3  # GGUF's token type of special tokens
_END_OF_TEXT = "<|endoftext|>"  # ends a document (another token ends a chat message); generation stops on both

_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def convert(source: Path, directory: Path) -> None:
    """Write a GGUF model as a transformers directory.

    Args:
        source: the GGUF file; architecture `llama`, byte-level BPE tokenizer of the `smollm` kind.
        directory: existing folder to fill with config, generation config, safetensors and tokenizer files.

    Raises:
        UserError: another architecture or tokenizer.
    """
    reader = gguf.GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    for key, known in (("general.architecture", "llama"), ("tokenizer.ggml.pre", "smollm")):
        if fields.get(key) != known:
            raise UserError(f"{source.name} has {key}={fields.get(key)!r}; this conversion supports {known!r} only")
    tokenizer = build_tokenizer(fields)
    tensors = {name: tensor for entry in reader.tensors for name, tensor in [_tensor(entry, fields)]}
    config = _config(fields, tied="lm_head.weight" not in tensors)
    config.save_pretrained(directory)
    stops = [config.eos_token_id, *([0] if fields["tokenizer.ggml.tokens"][0] == _END_OF_TEXT else [])]
    GenerationConfig(bos_token_id=config.bos_token_id, eos_token_id=stops, pad_token_id=config.pad_token_id).save_pretrained(
        directory
    )
    tokenizer.save_pretrained(directory)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def build_tokenizer(fields: dict[str, Any]) -> PreTrainedTokenizerFast:
    """The tokenizer of a GGUF header: byte-level BPE over its tokens and merges, digits one by one."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True) if kind == _CONTROL]
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[fields["tokenizer.ggml.eos_token_id"]],
        pad_token=tokens[fields["tokenizer.ggml.padding_token_id"]],
        unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]],
        chat_template=fields["tokenizer.chat_template"],
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )


def _config(fields: dict[str, Any], *, tied: bool) -> LlamaConfig:
    width, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=fields["llama.vocab_size"],
        hidden_size=width,
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        head_dim=width // heads,
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=fields["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
        tie_word_embeddings=tied,
        dtype="float32",
    )


def _tensor(entry: Any, fields: dict[str, Any]) -> tuple[str, Tensor]:
    """Name and float32 weights of one tensor, in transformers' form."""
    weight = torch.tensor(gguf.dequantize(entry.data, entry.tensor_type), dtype=torch.float32)
    words = entry.name.split(".")
    if words[0] != "blk":
        return f"{_OUTER[words[0]]}.weight", weight.contiguous()
    heads = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}
    if words[2] in heads:
        weight = _rotary_halves(weight, fields[heads[words[2]]])
    return f"model.layers.{words[1]}.{_TENSORS[words[2]]}.weight", weight.contiguous()


def _rotary_halves(weight: Tensor, heads: int) -> Tensor:
    """From interleaved rotary pairs (GGUF) to first and second half (transformers), head by head."""
    pairs = weight.reshape(heads, -1, 2, weight.shape[-1])
    return pairs.transpose(1, 2).reshape(weight.shape)
