"""Puts the results of an owner's requests together: whoever asked for several gets them all at once, in the order asked."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

from harness.engine.requests import Owner, Result


def by_owner(
    batches: Iterable[Sequence[Result[Owner]]], name: Callable[[Owner], Hashable]
) -> Iterator[list[tuple[Owner, list[Result[Owner]]]]]:
    """For every batch, the owners whose results are all there now, with their results; others wait.

    Results hold the caches of a batch: who reads this lets go of one list before the next is asked for.

    Args:
        batches: results as `Scheduler.run` yields them.
        name: what tells owners apart.
    """
    waiting: dict[Hashable, list[Result[Owner]]] = {}
    for batch in batches:
        yield _whole(batch, waiting, name)
        del batch


def _whole(
    batch: Sequence[Result[Owner]], waiting: dict[Hashable, list[Result[Owner]]], name: Callable[[Owner], Hashable]
) -> list[tuple[Owner, list[Result[Owner]]]]:
    found = []
    for one in batch:
        owner = one.request.owner
        mine = waiting.setdefault(name(owner), [])
        mine.append(one)
        if len(mine) == one.request.count:
            del waiting[name(owner)]
            found.append((owner, sorted(mine, key=lambda each: each.request.index)))
    return found
