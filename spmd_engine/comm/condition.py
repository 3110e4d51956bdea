"""What an operation waits for, and for whom: messages, or words that others write into shared memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spmd_engine.comm.communicator import Communicator


class Requests(list):
    """Requests of messages, with the ranks at their other ends."""

    def __init__(self) -> None:
        self._peers: list[int] = []

    def add(self, rank: int, requests: list) -> Requests:
        """These, too, are of messages from or to ``rank``."""
        self += requests
        self._peers += [rank] * len(requests)
        return self

    def waits_for(self, rank: int, communicator: Communicator) -> bool:
        """Whether a message from or to ``rank`` is not complete."""
        own = [request for request, peer in zip(self, self._peers, strict=True) if peer == rank]
        return not communicator.done(own)


class LibraryRequest(list):
    """The request of a library's collective, which begins when all ranks have agreed to it: nobody is missing."""

    def waits_for(self, rank: int, communicator: Communicator) -> bool:
        """Whether ``rank`` might not come."""
        return False


class Condition:
    """Something to come true in memory that ranks share; ``has_begun`` says of a rank whether it takes part in it."""

    __slots__ = ("_is_so", "_has_begun")

    def __init__(self, is_so: Callable[[], bool], has_begun: Callable[[int], bool]) -> None:
        self._is_so, self._has_begun = is_so, has_begun

    def __call__(self) -> bool:
        return self._is_so()

    def waits_for(self, rank: int, _: Communicator) -> bool:
        """Whether ``rank`` has not begun: one that has goes on even while its program ends."""
        return not self._has_begun(rank)
