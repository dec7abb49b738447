"""What one family needs beside the sizes that all have: by its `model_type`, settings of its configuration."""

from __future__ import annotations

from typing import Any

DECODER = {"is_decoder": True}  # an encoder's configuration that is used as a causal language model
DECODER_ALONE = {"is_decoder": True, "is_encoder_decoder": False}  # the decoder of an encoder-decoder, by itself
HEADS_ALIKE = {"num_key_value_heads": 4}
LATENT_SLIDING = {
    "num_key_value_heads": 4,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 32,
    "swa_kv_lora_rank": 32,
    "swa_head_dim": 32,
    "swa_qk_nope_head_dim": 16,
    "swa_v_head_dim": 32,
}
INDEXED = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 32,
    "indexer_budget": 32,
    "indexer_compress_ratio": 4,
}
TWICE_AS_WIDE = {"attention_hidden_size": 256, "attention_head_dim": 64, "num_key_value_heads": 4, "n_mamba_heads": 4}
SLIDING = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
SHARED = {"num_hidden_layers": 6, "num_kv_shared_layers": 2}  # the last layers read the stores of earlier ones

OWN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3], "mamba_d_head": 64, "mamba_n_groups": 1},
    "cohere_compass_text": {
        "layer_types": SLIDING,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4]},
            "full_attention": None,
        },
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note": {
        "vision_config": {
            "pyramid_num_routed": [-1, -1, 2, 4],
            "adapter_in_dim": 128,
            "adapter_out_dim": 128,
            "adapter_input_size": 128,
        },
        "text_config": LATENT_SLIDING,
    },
    "dots3_note_text": LATENT_SLIDING,
    "falcon": {"new_decoder_architecture": False},
    "gemma3n_text": SHARED | {"layer_types": SLIDING + SLIDING[2:]},
    "gemma4_text": SHARED | {"layer_types": SLIDING + SLIDING[2:], "global_head_dim": 64},
    "gpt_bigcode": {"num_key_value_heads": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoe_swa": {"initializer_range": 0.03},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2, "mamba_d_head": 64, "mamba_n_groups": 1},
    "hunyuan_v1_dense": {"head_dim": 32},
    "hunyuan_v1_moe": {"head_dim": 32},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"head_dim": 64, "num_heads": 4, "n_groups": 1},
    "ministral": {"head_dim": 32},
    "nemotron": HEADS_ALIKE,
    "qwen4_exp": {"text_config": INDEXED},
    "qwen4_exp_text": INDEXED,
    "reformer": DECODER | {"axial_pos_embds_dim": [64, 64]},
    "xmod": DECODER | {"default_language": "en_XX"},
    "zamba": TWICE_AS_WIDE | {"num_hidden_layers": 6, "attn_layer_period": 3, "attn_layer_offset": 1},
    "zamba2": TWICE_AS_WIDE | {"layers_block_type": ["linear_attention", "hybrid"] * 2, "mamba_headdim": 64},
    "zaya": {"num_experts_per_tok": 1},
    **dict.fromkeys(
        "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta "
        "roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl".split(),
        DECODER,
    ),
    **dict.fromkeys(
        "bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart prophetnet trocr whisper".split(),
        DECODER_ALONE,
    ),
}
