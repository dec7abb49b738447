"""Our engine as an lm-eval model, `kv_harness`, with one stack; importing this registers it.

Settings come as lm-eval's model_args and are composed from conf/ like those of a run.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lm_eval.api import model as lm_eval_model
from lm_eval.api.registry import register_model
from omegaconf import OmegaConf

from harness.calibrate.codec_limits import calibrated
from harness.configure.arms import Arm, stack_arms
from harness.configure.compose import compose, composing
from harness.configure.overrides import is_stack_override
from harness.configure.typed import build
from harness.engine.batches import parse_bytes
from harness.engine.engine import Engine
from harness.engine.owners import by_owner
from harness.engine.requests import Result
from harness.engine.scheduler import Scheduler
from harness.errors import UserError, require
from harness.kv.attention import NAME
from harness.lm_eval.documents import Response, nothing, requests_of, responses
from harness.lm_eval.encoding import Encoder, LmEvalRequest
from harness.models.load import ModelSpec, load
from harness.stages.stack import Stack

MODEL = "kv_harness"
OWN = ("memory_limit", "truncate", "tokenizer")  # model_args that are no configuration
Places = tuple[int, ...]  # of a document's requests, among those that lm-eval asks at once


@dataclass(frozen=True)
class Settings:
    """What `--model_args` say: a model, one stack at one point."""

    spec: ModelSpec
    stack: Stack
    label: str
    point: Mapping[str, Any]
    invariant: bool  # batch_invariant, as a run has it


def settings(arguments: Mapping[str, Any]) -> Settings:
    """Compose conf/model and conf/compress as `python -m harness` does.

    Args:
        arguments: `model` and `compress` name members of those groups; `budget` is the value of the stack's own budget,
            `point` the index of one of the stack's points; every other key is a Hydra override, such as
            `model.kv_dtype=float32`, `compress.keep.sinks=8` or `codec@compress.keys=int4`.

    Raises:
        UserError: a name or key that does not exist; an illegal stack.
    """
    given = dict(arguments)
    budget, point, name = given.pop("budget", None), given.pop("point", None), str(given.pop("compress", "full"))
    require(budget is None or point is None, "point", point, "give a point or a budget, not both")
    overrides = [f"{key}={_spelled(value)}" for key, value in given.items()]
    changes = [one for one in overrides if is_stack_override(one)]
    with composing():
        config = compose([one for one in overrides if one not in changes])
        arm = _arm(name, changes, budget, point)
        spec = build(OmegaConf.to_container(config.model, resolve=True), "model")
    return Settings(spec, arm.stack, arm.label, arm.point, bool(config.batch_invariant))


def _arm(name: str, changes: Sequence[str], budget: Any, point: Any) -> Arm:
    """The stack at one of its points, at a budget, or as its parts say."""
    if budget is not None:
        return stack_arms(name, [*changes, f"compress.keep.budget.value={budget}"])[0]
    if point is None:
        return stack_arms(name, [*changes, "compress.points=[{}]"])[0]
    arms = stack_arms(name, changes)
    allowed = f"a number from 0 to {len(arms) - 1}: {[arm.point for arm in arms]}"
    require(isinstance(point, int) and 0 <= point < len(arms), "point", point, allowed)
    chosen: Arm = arms[point]
    return chosen


def _spelled(value: Any) -> str:
    """A value as Hydra reads it; lm-eval has already parsed the text."""
    return "null" if value is None or value == "None" else str(value).lower() if isinstance(value, bool) else str(value)


@register_model(MODEL)
class KvHarness(lm_eval_model.LM):  # type: ignore[misc]
    """A model whose contexts are compressed before anything is answered: lm-eval's three methods over our engine.

    Responses are never cached: lm-eval's cache would answer one stack with what another one said.

    Args:
        memory_limit: of the stores that decode together.
        truncate: a prompt beyond the model's positions: refuse, or left.
        tokenizer: for lm-eval tasks that make their own data; put in by `harness.lm_eval`.
        batch_size, max_batch_size, device: lm-eval hands them over; batches follow the memory limit, model.device the model.
        arguments: see `settings`.
    """

    def __init__(
        self,
        memory_limit: str | int = "4GiB",
        truncate: str = "refuse",
        tokenizer: str | None = None,
        batch_size: Any = None,
        max_batch_size: Any = None,
        device: str | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__()
        require(truncate in ("refuse", "left"), "truncate", truncate, "one of refuse, left")
        self.settings = settings(arguments)
        self.lm = load(self.settings.spec, NAME)
        engine = Engine(self.lm.model, self.lm.kv_dtype, self.lm.eos_ids, invariant=self.settings.invariant)
        self.settings = replace(self.settings, stack=calibrated(self.settings.stack, engine, self.lm))
        most = self.lm.tokens.max_length
        require(most is not None, "model", self.settings.spec.name, "lm-eval needs to know how many positions it has")
        self.encode = Encoder(self.lm.tokens, int(most or 0), truncate)
        self.scheduler = Scheduler(engine, parse_bytes("memory_limit", memory_limit))
        self.tokenizer = self.lm.tokens.hf
        self._device = self.lm.model.device
        self.not_exercised = 0

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Refused: lm-eval's cache is keyed by the prompt alone."""
        raise UserError("use_cache is not possible: lm-eval's response cache knows neither model nor stack (leave it out)")

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[Response]:
        return self._respond(requests)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[Response]:
        return self._respond(requests)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[Response]:
        return self._respond(requests)

    def _respond(self, instances: Sequence[Any]) -> list[Response]:
        """Answers in the order asked; requests of one document go together, so that choices share their context."""
        by_document: dict[tuple[str, int], list[int]] = {}
        for at, one in enumerate(instances):
            by_document.setdefault((one.task_name, one.doc_id), []).append(at)
        documents = {tuple(places): [self.encode(instances[at]) for at in places] for places in by_document.values()}
        out: dict[int, Response] = {}
        asked = (([(places, self.settings.stack)], requests) for places, requests in documents.items())
        for ended in by_owner(self.scheduler.run(requests_of(asked, self.lm.tokens)), lambda places: places):
            for places, results in ended:
                out.update(zip(places, self._answers(places, documents[places], results), strict=True))
            ended, results = [], []  # their caches go before the next batch begins
        if self.not_exercised:
            print(f"warning: compression not exercised in {self.not_exercised} documents so far", file=sys.stderr)
        return [out[at] for at in range(len(instances))]

    def _answers(
        self, places: Places, requests: Sequence[LmEvalRequest], results: Sequence[Result[Places]]
    ) -> tuple[Response, ...]:
        """Responses of one document; UserError where it has none."""
        for one in results:
            if one.status != "ok":
                print(one.trace, file=sys.stderr, end="")
                raise UserError(f"request {places[0]}: {one.error}")
        self.not_exercised += nothing(requests, results)
        return responses(requests, results, self.lm.tokens)

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The tokenizer's template, for lm-eval's log."""
        return str(self.tokenizer.chat_template or "") if chat_template else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.lm.tokens.render(
            chat_history, add_generation_prompt=add_generation_prompt, continue_final_message=not add_generation_prompt
        )

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes beside its results."""
        return {
            "model_identity": dict(self.lm.identity),
            "stack": self.settings.label,
            "point": dict(self.settings.point),
            "query_aware": True,
            "documents_not_exercised": self.not_exercised,
            "decoding": self.lm.decoding,
        }
