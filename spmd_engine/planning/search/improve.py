"""The local search: from starts to better neighbours, until none is better."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import takewhile
from typing import TypeVar

from spmd_engine.planning.search.budget import Budget

T = TypeVar("T", bound=Hashable)
Neighbourhood = Callable[[T], Iterable[T]]  #: what differs from something in one way, and may be better
Score = Callable[[T], tuple[float, ...]]  #: less is better; scoring spends from the budget


def improved(
    starts: Sequence[T], near: Neighbourhood[T], score: Score[T], budget: Budget, *, descents: int = 1
) -> list[T]:
    """All that was scored, the best first; the first start in any case, others while the budget lasts.

    From each of the best ``descents`` starts, the first neighbour that is better comes next, until none is.
    """
    scores: dict[T, tuple[float, ...]] = {}

    def scored(each: T) -> tuple[float, ...]:
        if each not in scores:
            scores[each] = score(each)
        return scores[each]

    def affordable(several: Iterable[T]) -> Iterable[T]:
        return takewhile(lambda each: each in scores or not scores or budget.left, several)

    for start in affordable(starts):
        scored(start)
    for start in sorted(scores, key=scored)[:descents]:
        current: T | None = start
        while current is not None:
            least = scores[current]
            current = next((each for each in affordable(near(current)) if scored(each) < least), None)
    return sorted(scores, key=scored)
