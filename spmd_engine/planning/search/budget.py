"""The evaluations of a search, which its phases share."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from math import inf
from time import process_time

SIMULATION = 100


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

    def spend(self, evaluations: float = 1) -> None:
        """Count evaluations, in all parts."""
        self._whole._spent += evaluations

    def part(self, share: float = 1.0, most: float = inf) -> Budget:
        """A share of the evaluations and of the time that are left, from now on; at most so many evaluations."""
        part, now = copy(self), self._clock()
        part._end = self._whole._spent + min(share * self.left, most)
        part._deadline = now + share * (self._deadline - now)
        return part
