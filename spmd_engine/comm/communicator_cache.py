"""Communicators, kept for whoever next needs one of the same ranks: MPI refuses to make more than some 2,000."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

KEPT = 32  # communicators that nobody uses any more


class Freeable(Protocol):
    """What is kept."""

    def close(self) -> None:
        """Give back all that it holds."""


@dataclass
class _Entry:
    communicator: Freeable
    users: int = 0


class CommunicatorCache:
    """A rank's communicators by their members. Meshes that have groups of the same ranks share one.

    Ranks belong to different groups, so one may have closed what another still keeps. Therefore all members of a group
    ask each other first: only if all have theirs do they use it, else they make another.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[int, ...], _Entry] = {}  # the least recently used first

    def get(self, members: Sequence[int]) -> Freeable | None:
        """The communicator of these members, if there is one."""
        entry = self._entries.get(tuple(members))
        return entry.communicator if entry is not None else None

    def use(self, communicator: Freeable, members: Sequence[int]) -> None:
        """One more uses it; another one of the same members that nobody uses is closed."""
        key = tuple(members)
        entry = self._entries.pop(key, None)
        if entry is None or entry.communicator is not communicator:
            if entry is not None and not entry.users:
                entry.communicator.close()
            entry = _Entry(communicator)
        entry.users += 1
        self._entries[key] = entry

    def leave(self, members: Sequence[int]) -> None:
        """One uses it no more. Of those that nobody uses, the last ``KEPT`` stay."""
        entry = self._entries.get(tuple(members))
        if entry is None or not entry.users:
            return
        entry.users -= 1
        unused = [key for key, each in self._entries.items() if not each.users]
        for key in unused[: max(0, len(unused) - KEPT)]:
            self._entries.pop(key).communicator.close()
