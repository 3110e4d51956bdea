"""The order in which the calls of a group begin to move data: that in which they were made."""

from __future__ import annotations

from spmd_engine.comm.condition import Condition
from spmd_engine.comm.pending import Steps


class Turns:
    """Calls by number; each has its turn when those before it are over."""

    def __init__(self) -> None:
        self._open: list[int] = []  # ascending

    def enter(self, number: int) -> None:
        """A call that may have data to move; the last one so far."""
        self._open.append(number)

    def over(self, number: int) -> None:
        """Call ``number`` has begun the last that it has to, or will not."""
        if number in self._open:
            self._open.remove(number)

    def wait(self, number: int) -> Steps:
        """Go on when it is the turn of call ``number``."""
        if self._open[0] != number:
            yield Condition(lambda: self._open[0] == number, lambda rank: False)
