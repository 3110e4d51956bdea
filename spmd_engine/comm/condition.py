"""What an operation waits for, and for whom: messages, words that others write into shared memory, or its turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spmd_engine.comm.transports.messages import Ranks


class Condition:
    """Something to come true; ``has_begun`` says of a rank that it has done its part, or goes on to do it.

    ``messages``: whether it comes to those alone who look; who writes into shared memory wakes the others.
    """

    __slots__ = ("is_so", "has_begun", "messages")

    def __init__(self, is_so: Callable[[], bool], has_begun: Callable[[int], bool], messages: bool = False) -> None:
        self.is_so, self.has_begun, self.messages = is_so, has_begun, messages


class Requests(Condition):
    """That messages are complete, of which ``add`` tells."""

    __slots__ = ("_ranks", "_requests", "_peers")

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(lambda: ranks.done(self._requests), self._is_done_with, messages=True)
        self._ranks, self._requests, self._peers = ranks, [], []

    def add(self, rank: int, requests: list) -> Requests:
        """These, too, are of messages from or to ``rank``."""
        self._requests += requests
        self._peers += [self._ranks.outer(rank)] * len(requests)
        return self

    def _is_done_with(self, rank: int) -> bool:
        return self._ranks.done([each for each, peer in zip(self._requests, self._peers, strict=True) if peer == rank])


class Turns:
    """Calls by number, in the order in which they were made; each has its turn when those before it are over."""

    def __init__(self) -> None:
        self._open: list[int] = []  # ascending

    def enter(self, number: int) -> None:
        """A call that may have data to move; the last one so far."""
        self._open.append(number)

    def over(self, number: int) -> None:
        """Call ``number`` has begun the last that it has to, or will not."""
        if number in self._open:
            self._open.remove(number)

    def wait(self, number: int) -> Iterator[Condition]:
        """Go on when it is the turn of call ``number``."""
        if self._open[0] != number:
            yield Condition(lambda: self._open[0] == number, lambda rank: False)
