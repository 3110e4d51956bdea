"""The processor time of a search, which its phases share."""

from __future__ import annotations

from collections.abc import Callable
from time import process_time


class Budget:
    """Seconds of processor time from now on. Phases that follow one another use what is left, or a ``part`` of it.

    ``clock`` returns seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = process_time) -> None:
        self._clock, self._ends = clock, clock() + seconds

    @property
    def left(self) -> float:
        """Seconds until it is spent, at least 0."""
        return max(0.0, self._ends - self._clock())

    def part(self, share: float) -> Budget:
        """A share of what is left, from now on."""
        return Budget(share * self.left, self._clock)
