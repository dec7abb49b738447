"""Layers of other kinds: each family equals stock transformers with everything kept and a masked cache with rows evicted, or is
refused by its configuration in one line that says why."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

from harness.engine.engine import Engine
from harness.errors import UserError
from harness.kv.compat import forward, shape_of
from harness.models.random_model import byte_tokenizer
from harness.stages.stack import Stack
from tests.integration.commands.test_command import harness, records
from tests.support import conf_tree
from tests.support.masked_reference import NAME as REFERENCE
from tests.support.masked_reference import MaskedCache
from tests.support.tiny_models import SHAPE, WINDOW, build, ids, tiny_g

TINY = SHAPE | {"num_key_value_heads": 2}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
ONE_GLOBAL = {"num_hidden_layers": 4, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}


def config(kind: str, **settings: Any) -> PretrainedConfig:
    """A config class of transformers by its name; skipped where this version has none."""
    if not hasattr(transformers, kind):
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    return getattr(transformers, kind)(**(TINY | settings))


SUPPORTED: dict[str, Callable[[], PretrainedConfig]] = {
    "scale of its own, granite": lambda: config("GraniteConfig", attention_multiplier=0.05, residual_multiplier=0.8),
    "scale of its own, gemma3": lambda: config(
        "Gemma3TextConfig", **ONE_GLOBAL, head_dim=32, sliding_window=WINDOW, query_pre_attn_scalar=77, initializer_range=0.12
    ),
    "global layers without rotation, cohere2": lambda: config(
        "Cohere2Config", **ONE_GLOBAL, sliding_window=WINDOW, initializer_range=0.15, logit_scale=1.0
    ),
    "global layers without rotation, exaone4": lambda: config("Exaone4Config", **ONE_GLOBAL, sliding_window=WINDOW),
    "norms after attention, olmo3": lambda: config("Olmo3Config", **ONE_GLOBAL, sliding_window=WINDOW),
    "some layers without rotation, smollm3": lambda: config("SmolLM3Config", no_rope_layers=[1, 1, 0]),
    "part of a head rotated, phi": lambda: config("PhiConfig", partial_rotary_factor=0.5),
    "part of a head rotated, stablelm": lambda: config("StableLmConfig", partial_rotary_factor=0.25),
    "part of a head rotated, glm": lambda: config("GlmConfig", head_dim=32),
    "part of a head rotated, gpt_neox": lambda: transformers.GPTNeoXConfig(**SHAPE),
    "windows in the upper layers, qwen2": lambda: config(
        "Qwen2Config", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "experts, mixtral": lambda: config("MixtralConfig", sliding_window=None, num_local_experts=4),
    "experts, qwen3_moe": lambda: config("Qwen3MoeConfig", **EXPERTS, num_experts=4, head_dim=32),
    "one KV head, gpt_bigcode": lambda: transformers.GPTBigCodeConfig(
        vocab_size=128, n_embd=128, n_layer=3, n_head=4, n_positions=1024, initializer_range=0.05
    ),
}
REFUSED: dict[str, tuple[Callable[[], PretrainedConfig], str]] = {
    "no positions, whisper": (lambda: transformers.WhisperConfig(is_decoder=True, is_encoder_decoder=False), "no positions"),
    "layers that attend to images, mllama": (lambda: transformers.MllamaConfig(), "attend to images"),
    "tokens chosen by an indexer, glm_moe_dsa": (lambda: config("GlmMoeDsaConfig"), "indexer"),
    "no attention, mamba2": (lambda: transformers.Mamba2Config(), "no layer of it attends"),
    "no cache, openai-gpt": (lambda: transformers.OpenAIGPTConfig(), "keeps no cache"),
    "a learned mask, doge": (lambda: transformers.DogeConfig(), "learned mask"),
    "two attentions a layer, diffllama": (lambda: transformers.DiffLlamaConfig(), "attend twice"),
    "a window cached and not kept to, moshi": (lambda: transformers.MoshiConfig(), "window"),
    "heads that are experts, jetmoe": (lambda: transformers.JetMoeConfig(), "heads"),
    "both directions, bert": (lambda: transformers.BertConfig(), "later tokens"),
    "both directions, gemma3": (lambda: config("Gemma3TextConfig", use_bidirectional_attention=True), "later tokens"),
    "encoder and decoder, t5": (lambda: transformers.T5Config(), "encoder-decoders"),
}


@lru_cache(maxsize=2)
def engine(name: str) -> Engine:
    return Engine(build(SUPPORTED[name](), "kv_harness"), torch.float32)


@pytest.mark.parametrize("name", SUPPORTED)
def test_supported_everything_kept_equals_stock(name: str) -> None:
    """A prompt beyond the window, a chunk, single tokens."""
    ours, model = engine(name), build(SUPPORTED[name](), "sdpa")
    cache, row, seen = DynamicCache(config=model.config), ours.start(), 0
    for n in (40, 9, 1, 1):
        tokens = ids(n, seed=n)
        with torch.inference_mode():
            positions = torch.arange(seen, seen + n)[None]
            expected = forward(model, torch.tensor([tokens]), positions, cache, torch.tensor([-1]))[0]
        (row,), found = ours.feed([row], [tokens])
        assert torch.equal(found, expected), (seen, float((found - expected).abs().max()))
        seen += n
    for layer, expected in zip(ours.shape.layers, cache.layers, strict=True):
        held = expected.keys[0]  # what the bytes of the full cache are counted from
        assert (layer.heads, layer.held(seen), layer.d_key) == tuple(held.shape)
        assert layer.d_value == expected.values.shape[-1]


@pytest.mark.parametrize("name", SUPPORTED)
@pytest.mark.parametrize("phase", ["prefill", "always"])
def test_supported_rows_evicted_equal_rows_masked(name: str, phase: str) -> None:
    ours = engine(name)
    windows = [layer.window for layer in ours.shape.layers]
    reference, unmasked = (MaskedCache(build(SUPPORTED[name](), REFERENCE), windows) for _ in range(2))
    context, tokens = ids(90), ids(7, seed=1)
    row = ours.compress(ours.prefill(context), Stack(keep=conf_tree.keep("knorm", 48), phase=phase))
    assert {n for layer in ours.shape.full_layers for n in row.held()[layer]} <= {48}
    for one in (reference, unmasked):
        one.feed(context, None)
    away = 0.0
    for _ in range(3):
        expected, plain = reference.feed(tokens, row.kept_positions()), unmasked.feed(tokens, None)
        (row,), logits = ours.feed([row], [tokens])
        scale = max(1.0, float(expected.abs().max()))
        assert float((logits[0] - expected).abs().max()) <= 2e-6 * scale
        away = max(away, float((plain - expected).abs().max()))
        tokens = [int(expected.argmax())]
    assert away > 1e-3, "masking changes nothing: the comparison has no power"


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_line_that_says_why(name: str) -> None:
    make, why = REFUSED[name]
    found = make()
    with pytest.raises(UserError, match=rf"^model type '[\w-]+' is not supported: .*{why}") as refused:
        shape_of(found)
    assert "\n" not in str(refused.value)


def directory(path: Path, model: PreTrainedModel | None, settings: PretrainedConfig) -> Path:
    """A model as users have it on disk; without weights where `model` is None."""
    path.mkdir()
    if model is not None:
        model.save_pretrained(path)
    settings.save_pretrained(path)
    byte_tokenizer(1024).save_pretrained(path)
    return path


def test_case_28_records_list_the_global_layer_alone(tmp_path: Path) -> None:
    """TINY-G through the command: 300 tokens, a needle near position 20, 64 rows of the global layer."""
    settings = tiny_g()
    settings.vocab_size = 258
    where = directory(tmp_path / "gemma", build(settings, "sdpa"), settings)
    budget = ["compress=streaming", "compress.points=[{keep.budget.unit: tokens, keep.budget.value: 64}]"]
    model = ("model=local", f"model.path={where}", "model.tokenizer=bytes", "corpus=stdlib", "progress=false")
    out = harness(*model, "task.lengths=[420]", "task.depths=[0.1]", "task.max_new_tokens=10", *budget, "limit=1", cwd=tmp_path)
    assert out.returncode == 0, out.stderr
    full, evicted = sorted(records(tmp_path / out.stdout.strip().splitlines()[-1]), key=lambda r: r["stack"])
    assert (full["stack"], full["layers_compressed"]) == ("full", [])
    assert (evicted["stack"], evicted["layers_compressed"]) == ("streaming", [5])
    row = 2 * 64 * 2  # K and V of one token, head dim 64, bf16
    seen = evicted["tokens_seen"]
    assert full["kv_bytes_context"] == evicted["kv_bytes_full"] == row * (5 * 63 + seen)
    assert evicted["kv_bytes_context"] == row * (5 * 63 + 64) + 4 * 64
    assert evicted["entries_touched"] == seen - 64


def test_a_model_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    where = directory(tmp_path / "twice", None, transformers.DiffLlamaConfig())
    (where / "model.safetensors").touch()  # nothing that could be loaded
    out = harness("model=local", f"model.path={where}", "corpus=stdlib", "compress=int8", cwd=tmp_path)
    assert out.returncode != 0 and "Traceback" not in out.stderr
    assert "model type 'diffllama' is not supported: its layers attend twice" in out.stderr.splitlines()[0]
