"""From the overrides of a sweep to its jobs: combinations that differ only in the stack become one job, which prefills once.

Only overrides are read: nothing is composed, nothing started.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString, Transformer
from hydra.errors import HydraException

from harness.configure.overrides import is_stack_override, key_of
from harness.errors import UserError

_WORDS = ("true", "false", "null", "nan", "inf")  # not strings unless quoted


@dataclass(frozen=True)
class Job:
    """What one process runs.

    Attributes:
        shared: overrides of everything but the stack.
        stacks: for every stack the overrides that choose and change it; none where the command line names no stack.
    """

    shared: tuple[str, ...]
    stacks: tuple[tuple[str, ...], ...] = ()

    @property
    def overrides(self) -> list[str]:
        """The job as a command line; several stacks become members of `stacks=[...]`."""
        if len(self.stacks) <= 1:
            return [*self.shared, *itertools.chain(*self.stacks)]
        return [*self.shared, f"stacks=[{','.join(map(_member, self.stacks))}]"]

    def split(self) -> list[Job]:
        """One job a stack."""
        return [Job(self.shared, (stack,)) for stack in self.stacks]


def fold(overrides: Sequence[Override]) -> list[Job]:
    """All combinations of the swept values, those that differ only in the stack in one job; order as written.

    Raises:
        UserError: an interval, which has no list of values; stacks= together with compress=.
    """
    if any(o.key_or_group == "stacks" for o in overrides) and any(o.key_or_group == "compress" for o in overrides):
        raise UserError("compress= together with stacks= is not possible: name every stack in compress=a,b or in stacks=[a,b]")
    choices = {override.get_key_element(): _values(override) for override in overrides}  # the last of a key wins
    jobs: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for combination in itertools.product(*choices.values()):
        shared = tuple(o for o in combination if not is_stack_override(o))
        stack = tuple(o for o in combination if is_stack_override(o))
        jobs.setdefault(shared, [])
        if stack and stack not in jobs[shared]:
            jobs[shared].append(stack)
    return [Job(shared, tuple(stacks)) for shared, stacks in jobs.items()]


def deferred(arguments: Sequence[str]) -> list[str]:
    """Arguments of a sweep with every fixed change of the stack as a sweep over its one value.

    Hydra composes once before the sweep, without the swept keys: a change of a swept stack would have nothing to change.
    """
    return [_deferred(a) if is_stack_override(a) and key_of(a) != "compress" else a for a in arguments]


def _deferred(argument: str) -> str:
    try:
        override = OverridesParser.create().parse_override(argument)
    except HydraException:  # Hydra itself will say so
        return argument
    if override.is_sweep_override() or override.is_delete():
        return argument
    return f"{override.get_key_element()}=choice({override.get_value_element_as_str()})"


def _values(override: Override) -> list[str]:
    if not override.is_sweep_override():
        return [str(override.input_line)]
    if not override.is_discrete_sweep():
        raise UserError(f"{override.input_line} has no list of values: -m takes a,b,c, range(a,b), choice(a,b) or glob(a*)")
    return [f"{override.get_key_element()}={_text(value)}" for value in override.sweep_iterator()]


def _text(value: object) -> str:
    """A value in Hydra's grammar; its own spelling of strings loses quotes that they need."""
    plain = not isinstance(value, str) or (re.fullmatch(r"[A-Za-z_][\w./-]*", value) and value.lower() not in _WORDS)
    return str(Transformer.str(value)) if plain else quoted(str(value))  # type: ignore[arg-type]


def _member(stack: Iterable[str]) -> str:
    """A stack as a member of `stacks=[...]`: its name, or a list of its name and its own overrides."""
    chosen = [o.split("=", 1)[1] for o in stack if key_of(o) == "compress"]
    changes = [o for o in stack if key_of(o) != "compress"]
    if not chosen:
        raise UserError(f"{' '.join(changes)} changes one stack: choose it with compress=NAME")
    return f"[{','.join([chosen[0], *map(quoted, changes)])}]" if changes else chosen[0]


def quoted(text: str) -> str:
    """A text in Hydra's grammar, whatever it holds."""
    return QuotedString(text, Quote.single).with_quotes()
