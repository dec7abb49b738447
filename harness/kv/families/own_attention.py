"""Families whose layers compute attention themselves: a layer's own projections, then our attention. It knows no store.

Their modules do not call transformers' attention interface, so `adapt` gives each such layer a forward of ours; the rest of the
model stays as it is. All take and return what the library's own forward does, without attention weights.
"""

from __future__ import annotations

import math
import sys
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.falcon import modeling_falcon
from transformers.models.gpt_neo import modeling_gpt_neo

from harness.kv.attention import NAME, attend
from harness.kv.families.temperature import ATTRIBUTE, Temperature
from harness.stages.softmax import Alibi

Out = tuple[Tensor, None]
SLOPES = "kv_slopes"  # attribute: ALiBi slopes of a layer's query heads, fp32

# These two look up the class of a layer's attention by the name of the implementation.
modeling_falcon.FALCON_ATTENTION_CLASSES[NAME] = modeling_falcon.FalconAttention
modeling_gpt_neo.GPT_NEO_ATTENTION_CLASSES[NAME] = modeling_gpt_neo.GPTNeoSelfAttention


def bloom(self: Any, hidden_states: Tensor, residual: Tensor, *args: Any, **kwargs: Any) -> Out:
    """BloomAttention: biases are rounded to the dtype of the model, counted from the first token."""
    q, k, v = self._reshape(self.query_key_value(hidden_states))
    alibi = Alibi(getattr(self, SLOPES), hidden_states.dtype)
    out, _ = attend(self, q, k, v, None, self.inv_norm_factor, alibi=alibi)
    return self.dense(out.flatten(2)) + residual, None


def mpt(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Out:
    """MptAttention: biases in fp32, counted from the newest key."""
    qkv = self.Wqkv(hidden_states)
    if self.clip_qkv:
        qkv = qkv.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    q, k, v = (x.unflatten(-1, (self.n_heads, self.head_dim)).transpose(1, 2) for x in qkv.chunk(3, dim=2))
    alibi = Alibi(getattr(self, SLOPES), torch.float32, from_newest=True)
    out, _ = attend(self, q, k, v, None, self.softmax_scale, alibi=alibi)
    return self.out_proj(out.flatten(2)), None


def falcon(self: Any, hidden_states: Tensor, alibi: Tensor | None, *args: Any, **kwargs: Any) -> Out:
    """FalconAttention: rotary, or ALiBi multiplied in bf16 and scaled like the scores."""
    q, k, v = (x.transpose(1, 2) for x in self._split_heads(self.query_key_value(hidden_states)))
    settings: dict[str, Any] = {}
    if alibi is None:
        q, k = modeling_falcon.apply_rotary_pos_emb(q, k, *kwargs["position_embeddings"])
    else:
        slopes = getattr(self, SLOPES).bfloat16()
        settings["alibi"] = Alibi(slopes, hidden_states.dtype, divisor=math.sqrt(self.head_dim))
    self.num_key_value_groups = q.shape[1] // k.shape[1]
    out, _ = attend(self, q, k, v, None, self.inv_norm_factor, **settings)
    return self.dense(out.flatten(2)), None


def gpt_neo(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Out:
    """GPTNeoSelfAttention: scores are not scaled; a local layer caches every token and sees the newest ones."""
    heads = (self.num_heads, self.head_dim)
    q, k, v = (
        project(hidden_states).unflatten(-1, heads).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj)
    )
    sees = self.config.window_size if self.attention_type == "local" else None
    out, _ = attend(self, q, k, v, None, 1.0, sees=sees)
    return self.out_proj(out.flatten(2)), None


def xglm(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Out:
    """XGLMAttention: queries are scaled before their product with keys."""
    heads = (self.num_heads, self.head_dim)
    q, k, v = (
        project(hidden_states).unflatten(-1, heads).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj)
    )
    out, _ = attend(self, q * self.scaling, k, v, None, 1.0)
    return self.out_proj(out.flatten(2)), None


FORWARDS = {
    "BloomAttention": bloom,
    "MptAttention": mpt,
    "FalconAttention": falcon,
    "GPTNeoSelfAttention": gpt_neo,
    "XGLMAttention": xglm,
}


def adapt(model: PreTrainedModel) -> None:
    """Let every layer that computes attention itself use ours; models of other families are left alone."""
    for module in model.modules():
        name = type(module).__name__
        if name in FORWARDS:
            if name == "GPTNeoSelfAttention":
                module.layer_idx = module.layer_id
            slopes = _slopes(module, name)
            if slopes is not None:
                setattr(module, SLOPES, slopes)
            module.forward = MethodType(FORWARDS[name], module)  # type: ignore[method-assign]
        elif name == "Llama4TextAttention" and module.attn_temperature_tuning and not module.use_rope:
            # The layer takes positions from the cache, one for the whole batch: each row has its own.
            module.attn_temperature_tuning = False  # type: ignore[assignment]
            setattr(module, ATTRIBUTE, Temperature(float(module.floor_scale), float(module.attn_scale)))  # type: ignore[arg-type]


def _slopes(module: torch.nn.Module, name: str) -> Tensor | None:
    """The family's own ALiBi slopes, fp32: how much its biases change from one position to the next."""
    family: Any = sys.modules[type(module).__module__]
    if name == "MptAttention":
        bias_Q12 = family.build_mpt_alibi_tensor(module.n_heads, 2)
    elif name in ("BloomAttention", "FalconAttention"):
        ones = torch.ones(1, 2, dtype=torch.long)
        bias_Q12 = family.build_alibi_tensor(ones, module.num_heads, torch.float32)
    else:
        return None
    slopes_Q: Tensor = bias_Q12[:, 0, 1] - bias_Q12[:, 0, 0]
    return slopes_Q
