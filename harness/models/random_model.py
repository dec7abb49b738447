"""A small llama-type model with random weights and a byte tokenizer, written as a transformers directory.

For trying a set-up in seconds; its answers mean nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from harness.errors import require

_BOS, _EOS = 256, 257
_CHAT = (
    "{{ bos_token }}{% for message in messages %}<{{ message['role'] }}>\n{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class RandomModel:
    """Shape and seed of a random model. Vocabulary: 256 bytes, BOS (256), EOS (257)."""

    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    positions: int = 8192
    seed: int = 0

    def __post_init__(self) -> None:
        for key in ("layers", "heads", "kv_heads", "head_dim", "positions"):
            value = getattr(self, key)
            require(isinstance(value, int) and value > 0, f"model.random.{key}", value, "a whole number above 0")
        require(isinstance(self.seed, int), "model.random.seed", self.seed, "a whole number")
        require(self.heads % self.kv_heads == 0, "model.random.kv_heads", self.kv_heads, f"a divisor of {self.heads} heads")
        require(self.head_dim % 2 == 0, "model.random.head_dim", self.head_dim, "an even number (rotary pairs)")

    def write(self, directory: Path) -> None:
        """Fill an existing folder with config, weights and tokenizer; the same fields give the same weights."""
        width = self.heads * self.head_dim
        config = LlamaConfig(
            vocab_size=258,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.positions,
            bos_token_id=_BOS,
            eos_token_id=_EOS,
            pad_token_id=_EOS,
            dtype="float32",
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = LlamaForCausalLM(config)
        config.save_pretrained(directory)
        model.generation_config.save_pretrained(directory)
        save_file(model.state_dict(), directory / "model.safetensors", metadata={"format": "pt"})
        byte_tokenizer(self.positions).save_pretrained(directory)


def byte_tokenizer(positions: int) -> PreTrainedTokenizerFast:
    """A tokenizer with one token a byte (id = byte); BOS in front when special tokens are added."""
    printable = {
        *range(33, 127),
        *range(161, 173),
        *range(174, 256),
    }  # these bytes are their own characters in the byte-level alphabet
    moved = iter(range(256, 512))
    vocab = {chr(byte if byte in printable else next(moved)): byte for byte in range(256)}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<bos>", "<eos>")])
    core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", _BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<eos>",
        chat_template=_CHAT,
        model_max_length=positions,
        clean_up_tokenization_spaces=False,
    )
