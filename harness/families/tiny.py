"""A tiny configuration and random model of any causal-LM family that transformers has.

Sizes are found by the names that transformers' configurations use for them; what a family needs beside that is in `own_sizes`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from harness.families.own_sizes import OWN

VOCABULARY, WIDTH, WINDOW, LAYERS = 128, 128, 16, 4

Values = dict[str, Any]
SIZES: tuple[tuple[int, str], ...] = (  # a size, the names that configurations have for it; set where a configuration has them
    (VOCABULARY, "vocab_size unpadded_vocab_size vocab_size_per_layer_input encoder_hash_byte_group_vocab"),
    (WIDTH, "hidden_size n_embd d_model d_embed embedding_size embedding_dim input_embedding_size output_embedding_size"),
    (WIDTH, "word_embed_proj_dim lru_width attention_hidden_size emb_dim"),
    (96, "intermediate_size moe_intermediate_size shared_expert_intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim"),
    (96, "n_inner ffn_hidden_size expert_ffn_hidden_size intermediate_size_mlp dense_intermediate_size dim_ff dff d_inner"),
    (96, "shared_intermediate_size moe_shared_expert_intermediate_size shared_experts_intermediate_size feed_forward_size"),
    (LAYERS, "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers"),
    (LAYERS, "num_encoder_layers num_blocks"),
    (4, "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads encoder_attention_heads"),
    (4, "num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads index_n_heads"),
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    (4, "linear_num_value_heads linear_num_heads mamba_n_heads mamba_num_heads"),
    (2, "num_key_value_heads num_kv_heads swa_num_key_value_heads num_global_key_value_heads linear_num_key_heads n_groups"),
    (2, "num_experts_per_tok num_experts_per_token moe_topk moe_k"),
    (1, "n_group topk_group num_expert_group n_shared_experts num_shared_experts moe_num_shared_experts"),
    (1, "first_k_dense_replace num_dense_layers moe_layer_start_index"),
    (32, "head_dim swa_head_dim global_head_dim v_head_dim attention_head_size d_head dim_head d_kv index_head_dim"),
    (32, "linear_key_head_dim linear_value_head_dim linear_head_dim kv_lora_rank q_lora_rank hidden_size_per_layer_input"),
    (32, "mamba_d_state ssm_state_size state_size mamba_head_dim"),
    (16, "qk_rope_head_dim qk_nope_head_dim rotary_dim laurel_rank"),
    (WINDOW, "sliding_window sliding_window_size window_size attention_window_size local_attention"),
    (1024, "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions model_max_length context_length"),
)
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SPREAD = ("initializer_range", "init_std", "initializer_factor", "embed_init_std")  # of random weights
SIZE_OF = {name: size for size, names in SIZES for name in names.split()}


def families() -> list[str]:
    """The `model_type`s of the installed transformers whose configuration has a causal language model."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(family: str) -> PretrainedConfig:
    """A configuration of a family with a few small layers of every kind that its default one has.

    Raises whatever transformers raises where it cannot be made.
    """
    return _shrunk(CONFIG_MAPPING[family](), dict(OWN.get(family, {})))


def _shrunk(full: PretrainedConfig, own: Values) -> PretrainedConfig:
    """The same kind of configuration with small sizes; parts that are configurations are shrunk too."""
    values: Values = {}
    latent = bool(getattr(full, "qk_rope_head_dim", None))
    for name, value in vars(full).items():
        if isinstance(value, PretrainedConfig):
            mine = own.pop(name, {})
            values[name] = _shrunk(value, dict(mine))
        elif name in TOKENS and value is not None:
            values[name] = TOKENS[name]
        elif latent and name == "head_dim":
            values[name] = SIZE_OF["qk_rope_head_dim"]
        elif latent and name == "num_key_value_heads":
            values[name] = SIZE_OF["num_attention_heads"]
        elif name in SIZE_OF and value and all(type(one) is int for one in (value if isinstance(value, list) else [value])):
            values[name] = SIZE_OF[name]
        elif name in SPREAD:
            values[name] = 0.05
    values |= own
    found = type(full)(**values)
    wanted = _squeezed(full, found)
    return found if wanted is None or "layer_types" in own else type(full)(**values | wanted)


def _squeezed(full: PretrainedConfig, tiny: PretrainedConfig) -> Values | None:
    """Layer types with every kind of the full configuration, where the tiny one lacks one of them."""
    kinds, found = getattr(full, "layer_types", None), getattr(tiny, "layer_types", None)
    if not kinds or not found or set(found) >= set(kinds):
        return None
    first = list(dict.fromkeys(kinds))
    return {"layer_types": [*[first[0]] * max(0, len(found) - len(first)), *first]}


def build(config: PretrainedConfig, attention: str, weights: Mapping[str, torch.Tensor] | None = None) -> PreTrainedModel:
    """A random fp32 model of a configuration, ready to read; with given weights, or with the same ones every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=attention)
        for weight in model.parameters():
            if weight.dim() == 1:  # norms and biases start at 1 and 0: give them something to do
                weight.data += 0.2 * torch.randn(weight.shape)
    if weights is not None:
        model.load_state_dict(weights)
    found: PreTrainedModel = model.eval().requires_grad_(False).to(torch.float32)
    return found
