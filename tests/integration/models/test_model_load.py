"""Models loaded for real: random weights, a local directory and its faults, the hub out of reach, the default model."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue
from transformers import GenerationConfig

from harness.engine.answers import Ask
from harness.engine.engine import Engine
from harness.errors import UserError
from harness.kv.attention import NAME
from harness.models.load import ModelSpec, load
from harness.models.random_model import RandomModel

ROOT = Path(__file__).parents[3]
MODELS = ROOT / "conf" / "model"
HUB_MODELS = {"mistral7b", "llama2_7b", "llama3_8b", "qwen3_8b"}


def configured(name: str, **changes: object) -> ModelSpec:
    found = instantiate(OmegaConf.merge(OmegaConf.load(MODELS / f"{name}.yaml"), changes))
    assert isinstance(found, ModelSpec)
    return found


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A copy of the tiny model's directory, to be damaged."""
    return Path(shutil.copytree(configured("tiny_llama").directory(), tmp_path / "mine"))


def local(directory: Path, **changes: Any) -> ModelSpec:
    return ModelSpec(source="path", path=str(directory), tokenizer="bytes", **changes)


def logits(spec: ModelSpec) -> torch.Tensor:
    lm = load(spec)
    found: torch.Tensor = lm.model(torch.tensor([lm.tokens.encode("some bytes")])).logits
    return found


def test_every_model_of_the_conf_tree_is_a_valid_spec() -> None:
    needs = {"local": {"path": "some/dir"}, "gguf": {"path": "some/model.q4.gguf"}, "hub": {"repo": "org/some-model"}}
    specs = {file.stem: configured(file.stem, **needs.get(file.stem, {})) for file in sorted(MODELS.glob("*.yaml"))}
    assert {name for name in specs if specs[name].name == name} == {"smollm2", "tiny_llama"} | HUB_MODELS
    assert specs["local"].name == "dir"
    assert specs["gguf"].name == "model.q4"
    assert specs["hub"].name == "some-model"
    assert all(hash(spec) == hash(replace(spec)) for spec in specs.values())


@pytest.mark.parametrize("name", ["local", "hub"])
def test_what_must_be_given_is_asked_for(name: str) -> None:
    with pytest.raises(MissingMandatoryValue):
        configured(name)


def test_the_tiny_model_is_ready_to_run() -> None:
    lm = load(configured("tiny_llama"))
    assert load(configured("tiny_llama")) is lm
    assert not lm.model.training
    assert not any(weight.requires_grad for weight in lm.model.parameters())
    assert {weight.dtype for weight in lm.model.parameters()} == {torch.float32}
    assert lm.kv_dtype is torch.bfloat16
    assert lm.eos_ids == (257,)
    assert lm.tokens.max_length == configured("tiny_llama").max_length == 8192
    assert lm.identity == configured("tiny_llama").identity()


def test_random_weights_follow_the_seed_and_leave_the_process_seed_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def weights(cache: str, seed: int) -> bytes:
        monkeypatch.setenv("KV_HARNESS_CACHE", str(tmp_path / cache))
        spec = ModelSpec(source="random", random=RandomModel(layers=1, seed=seed), tokenizer="bytes")
        return (spec.directory() / "model.safetensors").read_bytes()

    before = torch.random.get_rng_state()
    first = weights("one", 0)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert weights("two", 0) == first
    assert weights("one", 1) != first


def test_a_local_directory_gives_the_same_model_and_its_digest_follows_the_content(directory: Path) -> None:
    assert torch.equal(logits(local(directory)), logits(configured("tiny_llama")))
    other = shutil.copytree(directory, directory.parent / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rope_theta_note": 1}))
    assert local(directory).identity()["digest"] != local(other).identity()["digest"]


def test_every_end_token_counts(directory: Path) -> None:
    GenerationConfig(eos_token_id=[2, 7]).save_pretrained(directory)
    assert load(local(directory)).eos_ids == (2, 7, 257)


def damaged(directory: Path, fault: str) -> Path:
    weights = directory / "model.safetensors"
    if fault == "no directory":
        shutil.rmtree(directory)
    elif fault == "no weights":
        weights.unlink()
    elif fault == "no config":
        (directory / "config.json").unlink()
    elif fault == "half the weights":
        weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    elif fault == "broken config":
        (directory / "config.json").write_text("{")
    elif fault == "a layer too few":
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 5}))
    elif fault == "no tokenizer":
        for file in directory.glob("token*"):
            file.unlink()
    return directory


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("no directory", r"^model\.path=.* there is no such directory"),
        ("no config", r"^model\.path=.* holds no config\.json"),
        ("no weights", r"^model\.path=.* holds no weights"),
        ("broken config", r"^the config of the model in .* cannot be read"),
        ("half the weights", r"^the model in .* cannot be loaded"),
        ("a layer too few", r"^the model in .* lacks weights: model\.layers\.4"),
        ("no tokenizer", r"^the tokenizer in .* cannot be loaded"),
    ],
)
def test_a_faulty_directory_is_one_line(directory: Path, fault: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        load(local(damaged(directory, fault)))
    assert "\n" not in str(caught.value)


def test_a_faulty_directory_is_known_before_anything_is_loaded(directory: Path) -> None:
    with pytest.raises(UserError, match=r"model\.path"):
        local(damaged(directory, "no directory")).check()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"source": "web"}, r"model\.source='web' .* wheel, path, gguf, hub, random"),
        ({"source": "path", "path": None}, r"model\.path=None .* source path needs it"),
        ({"source": "hub", "repo": ""}, r"model\.repo=''"),
        ({"dtype": "int8"}, r"model\.dtype='int8' .* float32, bfloat16, float16"),
        ({"kv_dtype": "half"}, r"model\.kv_dtype='half'"),
        ({"tokenizer": "words"}, r"model\.tokenizer='words'"),
    ],
)
def test_a_wrong_value_names_its_key(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        ModelSpec(**{"source": "path", "path": "x", **changes})


@pytest.mark.parametrize(("device", "says"), [("cuda:63", "no such device"), ("quantum", "auto, cpu, cuda")])
def test_a_device_that_is_not_there_is_known_before_loading(device: str, says: str) -> None:
    with pytest.raises(UserError, match=f"model.device='{device}' .* {says}"):
        replace(configured("tiny_llama"), device=device).check()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"device_map": "everywhere"}, "auto, balanced, balanced_low_0, sequential, cpu, cuda"),
        ({"device_map": "cuda:63"}, "no such device"),
        ({"device_map": "auto", "device": "cpu"}, "with model.device='cpu': .* give one of the two"),
    ],
)
def test_a_device_map_that_cannot_be_is_known_before_loading(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=f"model.device_map='{changes['device_map']}' is not possible.*{says}"):
        replace(configured("tiny_llama"), **changes).check()


@pytest.mark.parametrize("device_map", ["auto", "cpu"])
def test_a_device_map_places_the_model_and_answers_are_the_same(device_map: str) -> None:
    found = []
    for spec in (configured("tiny_llama"), replace(configured("tiny_llama"), device_map=device_map)):
        lm = load(spec, NAME)
        engine = Engine(lm.model, lm.kv_dtype)
        prefix = engine.prefill(range(3, 60))
        found.append(engine.answer([Ask(row=prefix.row, held=[5, 6], max_new=8)])[0].ids)
    assert found[0] == found[1]


def test_the_kind_of_device_is_part_of_what_a_model_is() -> None:
    plain = configured("tiny_llama", device="cpu")
    assert "device" not in plain.identity()
    for changes in ({"device": "cuda"}, {"device": "cuda:1"}, {"device": "auto", "device_map": "cuda:0"}):
        assert replace(plain, **changes).identity() == plain.identity() | {"device": "cuda"}


def test_a_shape_that_cannot_be_is_refused() -> None:
    with pytest.raises(UserError, match=r"model\.random\.kv_heads=3"):
        RandomModel(kv_heads=3)


def outcome(spec: str, tmp_path: Path, **environment: str) -> str:
    """What a fresh process prints of the error, for settings that are read at import."""
    code = (
        "from harness.models.load import ModelSpec, load; from harness.errors import UserError\n"
        f"try: load({spec})\n"
        "except UserError as error: print(error)"
    )
    everything = {**os.environ, "HF_HOME": str(tmp_path), **environment}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=everything, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("environment", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}])
def test_a_hub_out_of_reach_is_one_line(tmp_path: Path, environment: dict[str, str]) -> None:
    said = outcome("ModelSpec(source='hub', repo='org/model', revision='abc')", tmp_path, **environment)
    assert said.startswith("model.repo='org/model' (revision abc) cannot be fetched: the hub cannot be reached")
    assert said.count("\n") == 1


def test_a_cached_repository_loads_offline_at_its_commit(tmp_path: Path, directory: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--org--model"
    shutil.copytree(directory, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    spec = "ModelSpec(source='hub', repo='org/model', tokenizer='bytes')"
    code = f"from harness.models.load import ModelSpec, load\nprint(load({spec}).identity['revision'])"
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == f"{commit}\n", done.stderr


@pytest.mark.slow
def test_the_default_model_reads_english() -> None:
    lm = load(configured("smollm2"))
    assert lm.eos_ids == (0, 2)
    assert lm.tokens.max_length == 8192
    assert lm.tokens.bos_ids == ()
    pieces = [lm.tokens.hf.decode([i]) for i in lm.tokens.encode("in 1611, the")]
    assert pieces == ["in", " ", "1", "6", "1", "1", ",", " the"]
    corpus = instantiate(OmegaConf.load(ROOT / "conf" / "corpus" / "kjv.yaml"))
    ids = torch.tensor([lm.tokens.encode(corpus.documents()[42][:8000])[:1024]])  # the Gospel of John
    scores = lm.model(ids).logits[0]
    loss = torch.nn.functional.cross_entropy(scores[:-1], ids[0, 1:])
    assert float(loss.exp()) < 20  # 14.8 measured; rotary rows in the wrong order give 148


@pytest.mark.slow
def test_the_default_model_answers_a_chat_and_ends_its_turn() -> None:
    lm = load(configured("smollm2"))
    context = "The special magic number for Paris is 7319264.\n"
    question = "What is the special magic number for Paris?"
    made = lm.tokens.prompt(context, question, "The special magic number for Paris is", chat=True)
    assert made.ids[0] == 1
    assert lm.tokens.hf.decode(made.ids[:2]) == "<|im_start|>system"
    answer = lm.model.generate(torch.tensor([made.ids]), max_new_tokens=16, do_sample=False)[0, len(made.ids) :].tolist()
    assert lm.tokens.decode(answer) == " 7319264."
    assert answer[-1] in lm.eos_ids
