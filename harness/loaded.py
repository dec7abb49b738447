"""`harness.load`: a model to ask questions of a context that was compressed once."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from typing import Any

from omegaconf import OmegaConf
from torch import Tensor

from harness.calibrate.codec_limits import calibrated
from harness.configure.arms import FULL, arms_of
from harness.configure.from_python import composed, model_overrides, overrides_of
from harness.configure.typed import build, check_fields
from harness.engine.answers import Ask
from harness.engine.engine import Engine
from harness.engine.logits import UNSOUND
from harness.engine.requests import draw_seed
from harness.errors import UserError, require
from harness.kv.attention import NAME
from harness.kv.sequence_cache import SequenceCache
from harness.models.load import LM, ModelSpec
from harness.models.load import load as load_weights
from harness.stages.stack import Stack


def load(model: str | PathLike[str] = "smollm2", **settings: Any) -> LoadedModel:
    """Load a model; a second call with the same arguments takes what is loaded.

    Args:
        model: a member of conf/model, a folder with a model, or a repository ORG/NAME of the hub.
        settings: other fields of the model's configuration, such as dtype="bfloat16" or device="cpu".

    Raises:
        UserError: whatever cannot be had or read; one line.
    """
    composition = composed([*model_overrides(model), *overrides_of(settings, "model")])
    config: dict[str, Any] = OmegaConf.to_container(composition.model, resolve=True)  # type: ignore[assignment]
    spec: ModelSpec = build(config, "model")
    lm = load_weights(spec, NAME)
    engine = Engine(lm.model, lm.kv_dtype, lm.eos_ids, invariant=bool(composition.batch_invariant))
    return LoadedModel(spec.name, lm, engine)


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to compress and to answer; `lm.model` is transformers' own, `lm.tokens` the tokenizer."""

    name: str
    lm: LM
    engine: Engine

    def cache(self, context: str, *, stack: str | Stack = FULL, chat: bool = False, **changes: Any) -> CompressedContext:
        """Read a context and compress its cache, as a run does; the question is not seen.

        Args:
            context: the text.
            stack: a member of conf/compress, or a `Stack` value.
            chat: put the model's chat template around context and question.
            changes: of a stack by name, `__` being a dot: keep__budget__value=0.25.

        Raises:
            UserError: a stack that is not there, has several budgets and none chosen, or does not fit the context.
        """
        require(isinstance(context, str) and bool(context), "context", context, "a text")
        chosen = calibrated(_stack(stack, changes), self.engine, self.lm)
        ids = self.lm.tokens.prompt(context, "", "", chat=chat).context
        return CompressedContext(self, context, chat, ids, self._compressed(chosen, ids))

    def _compressed(self, stack: Stack, ids: tuple[int, ...]) -> SequenceCache:
        if stack.chunked:
            return self.engine.read_chunked(ids, [self.engine.start(stack, len(ids), draw_seed(ids))])[0][0]
        return self.engine.compress(self.engine.prefill(ids, stack.needs), stack, draw_seed(ids))


@dataclass(frozen=True)
class CompressedContext:
    """A compressed context. Asking changes nothing of it, so that every question meets the same store.

    Where a model's rotation depends on the length of the text, it is that of the context alone.
    """

    owner: LoadedModel
    context: str
    chat: bool
    ids: tuple[int, ...]
    store: SequenceCache

    def ask(self, question: str, *, answer_prefix: str = "", max_new_tokens: int = 32) -> str:
        """Greedy answer to a question that follows the context.

        Args:
            question: follows the context as it stands, so it brings its own blank or line break.
            answer_prefix: the first words of the answer; they are not repeated in what is returned.
            max_new_tokens: most tokens of the answer; it may end before, at one of the model's end tokens.

        Raises:
            UserError: nothing is asked, or the logits are no distribution.
        """
        whole = type(max_new_tokens) is int and max_new_tokens > 0
        require(whole, "max_new_tokens", max_new_tokens, "a positive whole number")
        prompt = self.owner.lm.tokens.prompt(self.context, question, answer_prefix, chat=self.chat)
        held = prompt.question + prompt.answer_prefix
        require(bool(held), "question", question, "a question, or the first words of an answer")
        (answer,) = self.owner.engine.answer([Ask(row=self.store, held=held, max_new=max_new_tokens)])
        if answer.stop_reason == "unsound":
            raise UserError(UNSOUND)
        return self.owner.lm.tokens.decode(answer.ids)

    @property
    def bytes(self) -> int:
        """Allocated bytes of the compressed context, everything included: `kv_bytes_context` of a record."""
        return self.store.bytes().total

    @property
    def full_bytes(self) -> int:
        """Bytes of the full cache of the same context in the same dtype."""
        return self.owner.engine.shape.full_bytes(self.store.seen, self.store.itemsize)

    @property
    def kept_positions(self) -> list[list[Tensor]]:
        """Positions of the tokens that stayed, int32, per layer and KV head."""
        return self.store.kept_positions()


def _stack(stack: str | Stack, changes: dict[str, Any]) -> Stack:
    """The one stack that is meant."""
    if isinstance(stack, Stack):
        require(not changes, "stack", stack, "a Stack value is taken as it is; changes are for stacks by name")
        check_fields(stack, "compress")
        return stack
    given = [*overrides_of({"compress": stack}), *overrides_of(changes, "compress")]
    found = arms_of(composed(given), given)
    found = found[1:] or found  # the first one is the full cache
    if len(found) > 1:
        knobs = ", ".join(f"{key.replace('.', '__')}={value}" for key, value in found[0].point.items())
        raise UserError(f"stack={stack!r} has {len(found)} budgets: choose one, such as {knobs}")
    return found[0].stack
