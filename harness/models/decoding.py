"""A line for records: answers are chosen greedily from raw logits; generation settings of the model that are ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Settings that change no token of greedy decoding, or that the harness sets itself: end tokens, lengths, caches, outputs.
_NO_MATTER = (
    *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "max_length", "max_new_tokens"),
    *("transformers_version", "_from_model_config", "use_cache", "cache_implementation", "cache_config", "max_cache_len"),
    *("return_dict_in_generate", "output_attentions", "output_hidden_states", "output_logits", "output_scores"),
    *("compile_config", "disable_compile", "continuous_batching_config", "prefill_chunk_size", "low_memory", "is_assistant"),
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_early_exit"),
    *("assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight", "max_matching_ngram_size"),
    *("prompt_lookup_num_tokens", "speculation_type", "use_mtp", "renormalize_logits", "remove_invalid_values"),
)
_OF_SAMPLING = ("temperature", "top_k", "top_p", "top_h", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
_OF_BEAMS = ("length_penalty", "early_stopping", "num_beam_groups", "diversity_penalty", "num_return_sequences", "constraints")
_NEUTRAL = {
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "guidance_scale", "num_beams", "num_beam_groups"), 1),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens"), 0),
    "num_return_sequences": 1,
}


def decoding(settings: Mapping[str, Any]) -> str:
    """`greedy`, then the generation settings that would choose other tokens: all are ignored."""
    without = set(_NO_MATTER)
    without |= set() if settings.get("do_sample") else set(_OF_SAMPLING)
    without |= set() if (settings.get("num_beams") or 1) > 1 else set(_OF_BEAMS)
    found = {
        name: value
        for name, value in sorted(settings.items())
        if name not in without and value not in (None, False, [], {}, ()) and value != _NEUTRAL.get(name)
    }
    words = ", ".join(f"{name}={_short(value)}" for name, value in found.items())
    return f"greedy; not honoured: {words}" if words else "greedy"


def _short(value: Any) -> str:
    long = isinstance(value, list | tuple | dict) and len(value) > 4
    return f"[{len(value)} entries]" if long else str(value)
