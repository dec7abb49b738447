"""What one family needs beside the sizes that all have: by its `model_type`, settings of its configuration."""

from __future__ import annotations

from typing import Any

DECODER = {"is_decoder": True}  # an encoder's configuration that is used as a causal language model
DECODER_ALONE = {"is_decoder": True, "is_encoder_decoder": False}  # the decoder of an encoder-decoder, by itself
HEADS_ALIKE = {"num_key_value_heads": 4}
KINDS = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]

OWN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3], "mamba_d_head": 64, "mamba_n_groups": 1},
    "cohere2_moe": {"first_k_dense_replace": 1},
    "dots1": {"first_k_dense_replace": 1},
    "dots3_note": HEADS_ALIKE,
    "dots3_note_text": HEADS_ALIKE,
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2, "mamba_d_head": 64, "mamba_n_groups": 1},
    "hunyuan_v1_dense": {"head_dim": 32},
    "hunyuan_v1_moe": {"head_dim": 32},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"head_dim": 64, "num_heads": 4, "n_groups": 1},
    "ministral": {"head_dim": 32},
    "nemotron": HEADS_ALIKE,
    "xmod": DECODER | {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
    **dict.fromkeys(
        "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert reformer rembert roberta "
        "roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl".split(),
        DECODER,
    ),
    **dict.fromkeys(
        "bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart prophetnet trocr whisper".split(),
        DECODER_ALONE,
    ),
}
