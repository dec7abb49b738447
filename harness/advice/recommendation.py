"""From evidence to what to ship, in words: under a memory limit, or with a limit on the loss."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from harness.advice.evidence import Arm, Evidence, joint
from harness.advice.guarantee import Candidate, Test, choose, choose_by, least_units, needed_units, p_value
from harness.advice.sized import Sizes, sizes
from harness.configure.overrides import key_of
from harness.pages.units import iec, score_text, share_text


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What is asked for.

    Attributes:
        max_loss, confidence: of the share of units that lose an answer; None without a guarantee.
        budget: bytes of all sequences together; None without a limit.
        seq, batch: tokens of a sequence and their number, that the bytes are for; seq None takes those that were measured.
    """

    max_loss: float | None = None
    confidence: float = 0.95
    budget: int | None = None
    seq: int | None = None
    batch: int = 1


def advice(found: Sequence[Evidence], wish: Wish) -> Iterator[str]:
    """Lines: what is recommended for each task, for all of them jointly, and what would settle what is open."""
    for one in found:
        yield from _of_task(one, wish)
    same = {one.model for one in found}
    if len(found) > 1 and len(same) == 1 and wish.max_loss is not None:
        yield from _jointly(found, wish)


def _of_task(one: Evidence, wish: Wish) -> Iterator[str]:
    yield one.title
    if wish.seq is not None and one.longest < wish.seq / 2:
        longer = f"task.lengths=[{wish.seq}]" if "lengths" in _task(one) else f"task.tokens={wish.seq}"
        yield (
            f"  no quality evidence at {wish.seq} tokens: the longest context scored has {one.longest}, less than half of it; "
            f"settle it with: {_command(one, [longer])}"
        )
        return
    yield from (f"  left out: {line}" for line in one.left_out)
    if not one.arms:
        yield "  nothing but the full cache was measured" if not one.left_out else "  nothing else was measured"
        return
    sized = sizes(one, wish.seq) if wish.seq is not None else None
    if sized is not None and sized.shape is None:
        yield f"  no bytes at {wish.seq} tokens: {sized.why}"
        return
    arms = [arm for arm in one.arms if _fits(arm, sized, wish)]
    if wish.budget is not None and not arms:
        yield f"  nothing that was measured fits {iec(wish.budget)}"
        return
    yield from _guaranteed(one, arms, sized, wish) if wish.max_loss is not None else _best(one, arms, sized, wish)


def _task(one: Evidence) -> Mapping[str, object]:
    """The task's settings, as far as the manifest of a folder that may be anybody's holds some."""
    found = one.manifest.get("config", {}).get("task")
    return found if isinstance(found, Mapping) else {}


def _bytes(arm: Arm, sized: Sizes | None) -> float:
    """Bytes of one sequence; measured where no length is asked for."""
    found = arm.candidate.nbytes if sized is None else sized.of(arm)
    return math.inf if found is None else found


def _fits(arm: Arm, sized: Sizes | None, wish: Wish) -> bool:
    return wish.budget is None or wish.batch * _bytes(arm, sized) <= wish.budget


def _best(one: Evidence, arms: Sequence[Arm], sized: Sizes | None, wish: Wish) -> Iterator[str]:
    """The arm that scores best under the memory limit; of equal ones the smallest."""
    full = sized.full if sized is not None else None
    if full is not None and wish.budget is not None and wish.batch * full <= wish.budget:
        yield f"  the full cache fits: {iec(wish.batch * full)} of {iec(wish.budget)}"
    scored = [arm for arm in arms if math.isfinite(arm.score)]
    if not scored:
        yield "  no quality evidence for anything that fits"
        return
    higher = bool(one.higher_is_better)
    best = max(scored, key=lambda arm: (arm.score if higher else -arm.score, -_bytes(arm, sized)))
    n = best.candidate.units.n if best.candidate.units else 0
    size = f"{iec(wish.batch * _bytes(best, sized))}, {share_text(best.ratio)} of the full cache as measured"
    scores = f"score {score_text(best.score)} beside {score_text(one.full_score)} of the full cache, on {n} units"
    yield f"  {best.candidate.label}: {size}; {scores}"
    yield from _flag(best)
    yield "  the best of those that fit is chosen by its score: --max-loss gives a guarantee that holds for the choice"


def _guaranteed(one: Evidence, arms: Sequence[Arm], sized: Sizes | None, wish: Wish) -> Iterator[str]:
    assert wish.max_loss is not None
    if not one.bounded:
        yield "  no guarantee: a loss of this score (a perplexity, a cost) has no limit; take a task of right and wrong answers"
        return
    by_label = {arm.candidate.label: arm for arm in arms}
    candidates = [replace(arm.candidate, nbytes=_bytes(arm, sized)) for arm in arms]
    found = choose(candidates, wish.max_loss, wish.confidence, peeked=one.peeked)
    if found.chosen is not None:
        arm, units = by_label[found.chosen.label], found.chosen.units
        assert units is not None
        size = f"{iec(wish.batch * found.chosen.nbytes)}, {share_text(arm.ratio)} of the full cache as measured"
        promise = f"at most {wish.max_loss:g} of units lose an answer, with confidence {wish.confidence:g}"
        yield f"  {arm.candidate.label}: {size}; {promise} ({units.losses.sum():g} of {units.n} did)"
        yield from _flag(arm)
    cheaper = [test for test in found.failed if found.chosen is None or test.candidate.nbytes < found.chosen.nbytes]
    open_ = [test for test in cheaper if needed_units(test.candidate.units, wish.max_loss, test.error) is not None]
    if found.chosen is None:
        yield "  no guarantee for any point" if open_ else f"  every point loses more than {wish.max_loss:g} on these units"
    if open_:
        yield from _more(one, min(open_, key=lambda test: test.p_value), wish)


def _flag(arm: Arm) -> Iterator[str]:
    if arm.flag is not None:
        yield f"  nearest in engines: {arm.flag}"


def _more(one: Evidence, test: Test, wish: Wish) -> Iterator[str]:
    """How many units would settle the test that came nearest, and the command that makes them."""
    assert wish.max_loss is not None
    units, label = test.candidate.units, test.candidate.label
    needed = needed_units(units, wish.max_loss, test.error)
    assert needed is not None
    n, lost = (units.n, units.losses.sum()) if units else (0, 0)
    least = least_units(wish.max_loss, test.error)
    yield f"  {label}: {lost:g} of {n} units lose an answer (p = {test.p_value:.3g}, wanted {test.error:.3g})"
    yield f"  {needed} units like these would settle it, never fewer than {least}: {_command(one, _enough(one, needed, n))}"


def _enough(one: Evidence, needed: int, n: int) -> list[str]:
    """Overrides that give a task so many units: more needles a cell, or more examples."""
    cell = _task(one).get("per_cell")
    if type(cell) is int and cell > 0 and n:
        return [f"task.per_cell={math.ceil(cell * needed / n)}", "limit=null"]
    return [f"limit={needed}"]


def _command(one: Evidence, changes: Sequence[str]) -> str:
    """The command of the run with these overrides in the place of its own."""
    replaced = {key_of(change) for change in changes}
    given = one.manifest.get("command")
    known = [text for text in given if isinstance(text, str)] if isinstance(given, list) else []
    kept = [text for text in known if key_of(text) not in replaced]
    return shlex.join(["python", "-m", "harness", *kept, *changes])


def _jointly(found: Sequence[Evidence], wish: Wish) -> Iterator[str]:
    """One arm for all tasks: it must pass on each, so the joint p-value is the largest."""
    assert wish.max_loss is not None
    yield f"{found[0].model} · jointly over {len(found)} tasks and modes"
    table = list(joint(found))
    if not table:
        yield "  no stack was measured on all of them at the same point"
        return
    candidates = [_joint_candidate(arms) for arms in table]
    worst = {
        candidate.label: max(
            p_value(arm.candidate.units, wish.max_loss, peeked=one.peeked) if arm.candidate.units and one.bounded else 1.0
            for arm, one in zip(arms, found, strict=True)
        )
        for candidate, arms in zip(candidates, table, strict=True)
    }
    chosen = choose_by(candidates, worst, wish.confidence).chosen
    if chosen is None:
        yield "  no guarantee for any point on all of them"
    else:
        promise = f"at most {wish.max_loss:g} of units lose an answer on each of them, with confidence {wish.confidence:g}"
        yield f"  {chosen.label}: {promise}"


def _joint_candidate(arms: Sequence[Arm]) -> Candidate:
    """One point in several runs, at the largest of its sizes."""
    return replace(arms[0].candidate, nbytes=max(arm.candidate.nbytes for arm in arms))
