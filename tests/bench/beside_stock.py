"""What our stores cost beside stock transformers: one sequence with everything kept, on random models of any family.

python tests/bench/beside_stock.py tiny|wide [family ...] [--steps N] [--tokens N] [--repeats N]

Two models with the same weights: one with transformers' own cache and attention (sdpa; eager where it has no other), one with
ours. prefill: one forward of a prompt. answers: a prompt that is held, then as many tokens as there are steps, greedily: our engine
as a run calls it against transformers' `generate`. steps: the bare forwards of the same, without the choice of tokens.
CPU time of one thread, so that other work on the machine does not count; in turns, the best of each. wide: layers as wide as
those of the default model, as many as the tiny ones have.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from measure import ALL_VIEWS
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from harness.engine.answers import Ask
from harness.engine.engine import Engine
from harness.families import oracle
from harness.families.tiny import VOCABULARY, build, tiny_config
from harness.kv.attention import NAME
from harness.kv.compat import cache_name, forward

FAMILIES = ["llama", "gpt_oss", "mimo_v2_flash", "granite_swa", "gemma2", "vaultgemma"]
FAMILIES += ["qwen3_next", "qwen3_5_text", "kimi_linear", "nemotron_h", "jamba", "bamba", "falcon_h1", "granitemoehybrid"]
FAMILIES += ["lfm2", "olmo_hybrid", "minimax", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu", "minicpm3"]
FAMILIES += ["longcat_flash", "gemma3n_text", "gemma4_text"]
WIDE: dict[str, Any] = {  # set where a configuration has them
    "hidden_size": 576,
    "intermediate_size": 1536,
    "moe_intermediate_size": 384,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "swa_num_attention_heads": 9,
    "swa_num_key_value_heads": 3,
    "mamba_n_heads": 18,
    "mamba_d_head": 64,
    "mamba_num_heads": 36,
    "mamba_d_ssm": 1152,
    "max_position_embeddings": 8192,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 9,
    "head_dim": 32,
    "kv_lora_rank": 256,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "qk_head_dim": 64,
    "v_head_dim": 64,
}
MIMO: dict[str, Any] = {"num_attention_heads": 12, "v_head_dim": 64}  # its sliding layers have twice the KV heads


def config_of(family: str, *, wide: bool) -> PretrainedConfig:
    """The tiny configuration of a family, or one that is as wide as the default model."""
    tiny = tiny_config(family)
    if not wide:
        return tiny
    sizes = WIDE | (LATENT if getattr(tiny, "kv_lora_rank", None) else {}) | (MIMO if family == "mimo_v2_flash" else {})
    settings = tiny.to_dict()
    return type(tiny)(**settings | {name: size for name, size in sizes.items() if settings.get(name)})


def stock_of(config: PretrainedConfig) -> PreTrainedModel:
    """The model as transformers runs it."""
    try:
        return build(config, "sdpa")
    except ValueError:
        return build(config, "eager")


def least(functions: dict[str, Callable[[], list[float]]], repeats: int) -> dict[str, float]:
    """The seconds that each function says its steps took: of every step the fewest, in turns, and summed."""
    seconds: dict[str, list[float]] = {}
    for _ in range(repeats):
        for name, function in functions.items():
            took = function()
            seconds[name] = [min(pair) for pair in zip(took, seconds.get(name, took), strict=True)]
    return {name: sum(took) for name, took in seconds.items()}


def timed(step: Callable[[int], None], steps: int) -> list[float]:
    """CPU seconds of each step."""
    took = []
    for at in range(steps):
        start = time.process_time()
        step(at)
        took.append(time.process_time() - start)
    return took


@torch.inference_mode()
def ratios(config: PretrainedConfig, tokens: int, steps: int, repeats: int) -> tuple[float, float, float]:
    """(prefill, answers, steps) of ours to stock."""
    model = stock_of(config)
    run = Engine(build(config, NAME, model.state_dict()), torch.float32)
    generator = torch.Generator().manual_seed(0)
    ids: list[int] = torch.randint(3, VOCABULARY, (tokens,), generator=generator).tolist()

    def stock(cache: Cache, fed: list[int], seen: int) -> None:
        forward(model, torch.tensor([fed]), torch.arange(seen, seen + len(fed))[None], cache, [len(fed) - 1])

    _, first = oracle.alone(model, ids[:1], 0, None)  # shows which cache the model makes for itself

    def stock_reads() -> list[float]:
        cache = DynamicCache(config=model.config) if type(first) is DynamicCache else type(first)()
        return timed(lambda _: stock(cache, ids, 0), 1)

    def ours_reads() -> list[float]:
        return timed(lambda _: run.prefill(ids, length=tokens + steps) and None, 1)

    read = least({"stock": stock_reads, "ours": ours_reads}, repeats)
    _, held = oracle.alone(model, ids, 0, None)
    prefix = run.prefill(ids, length=tokens + steps)

    def stock_decodes() -> list[float]:
        cache = copy.deepcopy(held)
        return timed(lambda at: stock(cache, [ids[at]], tokens + at), steps)

    def ours_decodes() -> list[float]:
        row = prefix.row

        def step(at: int) -> None:
            nonlocal row
            (row,), _ = run.feed([row], [[ids[at]]])

        return timed(step, steps)

    def stock_answers() -> list[float]:
        settings = {cache_name(type(model).forward): copy.deepcopy(held), "max_new_tokens": steps, "do_sample": False}

        def answer(_: int) -> None:
            model.generate(torch.tensor([[*ids, ids[0]]]), eos_token_id=None, pad_token_id=0, **settings)

        return timed(answer, 1)

    def ours_answers() -> list[float]:
        ask = Ask(row=prefix.row, held=ids[:1], max_new=steps)
        return timed(lambda _: run.answer([ask], ALL_VIEWS) and None, 1)

    decoded = least({"stock": stock_decodes, "ours": ours_decodes}, repeats)
    answered = least({"stock": stock_answers, "ours": ours_answers}, repeats)
    return tuple(one["ours"] / one["stock"] for one in (read, answered, decoded))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("size", choices=("tiny", "wide"))
    parser.add_argument("families", nargs="*")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for family in asked.families or FAMILIES:
        config = config_of(family, wide=asked.size == "wide")
        prefill, answer, step = ratios(config, asked.tokens, asked.steps, asked.repeats)
        said = f"prefill of {asked.tokens} tokens {prefill:.3f}, answers of {asked.steps} tokens {answer:.3f}, "
        said += f"bare decode steps {step:.3f} of stock"
        print(f"{family}, {asked.size}: {said}", flush=True)


if __name__ == "__main__":
    main()
