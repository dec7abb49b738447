"""An MHA form of a GQA model: the same answers from more KV heads."""

from __future__ import annotations

import copy

from transformers import AutoModelForCausalLM, PreTrainedModel

from harness.kv.attention import NAME


def with_repeated_heads(model: PreTrainedModel, times: int) -> PreTrainedModel:
    """The same model with every KV head `times` times."""
    config, weights = copy.deepcopy(model.config), dict(model.state_dict())
    heads = config.num_key_value_heads
    config.num_key_value_heads = heads * times
    for name in [name for name in weights if "k_proj" in name or "v_proj" in name]:
        weights[name] = weights[name].unflatten(0, (heads, -1)).repeat_interleave(times, 0).flatten(0, 1)
    found: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation=NAME)
    found.load_state_dict(weights)
    return found.eval().requires_grad_(False)
