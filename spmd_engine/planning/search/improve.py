"""The local search: from starts to better neighbours, until none is better, or its budget is spent."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from copy import copy
from itertools import takewhile
from math import inf
from time import process_time
from typing import TypeVar

SIMULATION = 300


GRACE = 2.0  #: seconds of processor time after the time limit, in which what has begun may end


class OutOfTime(Exception):
    """The time limit is over, and what has begun takes too long."""


class Budget:
    """Evaluations that may still be made: one for a bound or an estimate, SIMULATION for a simulated step.

    Phases that follow one another use what is left, or a ``part`` of it. The time limit, in ``seconds`` of processor
    time, only stops them; ``stopped`` says whether it did. ``clock`` returns seconds.
    """

    def __init__(self, evaluations: float, seconds: float = inf, clock: Callable[[], float] = process_time) -> None:
        self._whole, self._end = self, evaluations
        self._clock, self._deadline = clock, clock() + seconds
        self._spent, self._stopped = 0.0, False

    @property
    def stopped(self) -> bool:
        """Whether time ran out before the evaluations were made."""
        return self._whole._stopped

    @property
    def left(self) -> float:
        """The evaluations that may still be made; 0 when time has run out."""
        left = max(0.0, self._end - self._whole._spent)
        if left and self._clock() > self._deadline:
            self._whole._stopped = True
            return 0.0
        return left

    @property
    def overdue(self) -> bool:
        """Whether the time limit of the whole is over, by more than GRACE: then nothing begins or goes on."""
        if late := self._clock() > self._whole._deadline + GRACE:
            self._whole._stopped = True
        return late

    def check_time(self) -> None:
        """Raise OutOfTime if the budget is ``overdue``."""
        if self.overdue:
            raise OutOfTime

    def spend(self, evaluations: float = 1) -> None:
        """Count evaluations, in all parts."""
        self._whole._spent += evaluations

    def part(self, share: float = 1.0, most: float = inf) -> Budget:
        """A share of the evaluations and of the time that are left, from now on; at most so many evaluations."""
        part, now = copy(self), self._clock()
        part._end = self._whole._spent + min(share * self.left, most)
        part._deadline = now + share * (self._deadline - now)
        return part


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

    def scored(point: T) -> tuple[float, ...]:
        if point not in scores:
            scores[point] = score(point)
        return scores[point]

    def affordable(several: Iterable[T]) -> Iterable[T]:
        return takewhile(lambda point: point in scores or not scores or budget.left, several)

    for start in affordable(starts):
        scored(start)
    for start in sorted(scores, key=scored)[:descents]:
        current: T | None = start
        while current is not None:
            least = scores[current]
            current = next((point for point in affordable(near(current)) if scored(point) < least), None)
    return sorted(scores, key=scored)
