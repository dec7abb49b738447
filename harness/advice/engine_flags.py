"""The setting of a serving engine that comes nearest to a stack, where there is one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FLAGS = {  # by the codec of keys and values; nearest, not equal: engines group and round in their own ways
    "fp8_e4m3": "vLLM: --kv-cache-dtype fp8_e4m3; SGLang: --kv-cache-dtype fp8_e4m3; TensorRT-LLM: kv_cache_quant_algo FP8",
    "fp8_e5m2": "vLLM: --kv-cache-dtype fp8_e5m2; SGLang: --kv-cache-dtype fp8_e5m2",
    "nvfp4": "TensorRT-LLM: KvCacheConfig(dtype='nvfp4') with a quantized checkpoint; vLLM (0.21 on): --kv-cache-dtype nvfp4",
    "mxfp4": "SGLang: --kv-cache-dtype fp4_e2m1 (groups of 16)",
    "int8": "LMDeploy: --quant-policy 8",
    "int8_static": "TensorRT-LLM: kv_cache_quant_algo INT8",
    "int8_tensor": "TensorRT-LLM: kv_cache_quant_algo INT8",
    "int4_token": "LMDeploy: --quant-policy 4",
    "int4": 'transformers: cache_implementation="quantized" with nbits 4',
    "int2": 'transformers: cache_implementation="quantized" with nbits 2',
}


def flag(stack_config: Mapping[str, Any], codec_info: Mapping[str, Any]) -> str | None:
    """The nearest engine setting of a stack that only stores in fewer bits; None where it does more, or no engine has it.

    codec_info: of a record, which names the codecs that were used.
    """
    codecs = [codec_info.get(role) for role in ("keys", "values")]
    names = {str(one.get("codec", "")) if isinstance(one, Mapping) else "" for one in codecs}
    more = any(stack_config.get(part) is not None for part in ("keep", "share"))
    stored_so = stack_config.get("rope", "post") == "post" and stack_config.get("positions", "original") == "original"
    return FLAGS.get(names.pop()) if len(names) == 1 and stored_so and not more else None
