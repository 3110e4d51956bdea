"""Tapes: what forwards save for backwards, one stack for each micro-batch in flight."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

from spmd_engine.errors import UsageError


class Tape:
    """A stack. ``push(a, b)`` in the forward, ``a, b = pop()`` in the backward, in opposite order."""

    def __init__(self, recording: bool = True) -> None:
        self._entries: list[tuple[Any, ...]] = []
        self._recording = recording

    def push(self, *arrays: Any) -> None:
        if self._recording:
            self._entries.append(arrays)

    def pop(self) -> Any:
        """The last entry: the array if one was pushed, else a tuple. Raises UsageError if the tape is empty."""
        if not self._entries:
            raise UsageError(
                "tape.pop(): the tape is empty: a backward without a forward of the same micro-batch, or after one in "
                "inference mode, or backward pops more than forward pushes"
            )
        entry = self._entries.pop()
        return entry[0] if len(entry) == 1 else entry

    def __len__(self) -> int:
        return len(self._entries)


class Tapes:
    """The tapes of all micro-batches in flight, and the current one."""

    def __init__(self) -> None:
        self._tapes: dict[Hashable, Tape] = {}
        self._current: Hashable = 0
        self._recording = True

    @property
    def current(self) -> Tape:
        if not self._recording:
            return Tape(recording=False)
        return self._tapes.setdefault(self._current, Tape())

    @property
    def recording(self) -> bool:
        return self._recording

    @contextmanager
    def select(self, micro_batch: Hashable) -> Iterator[None]:
        previous, self._current = self._current, micro_batch
        try:
            yield
        finally:
            if not self._tapes.get(self._current):  # empty
                self._tapes.pop(self._current, None)
            self._current = previous

    @contextmanager
    def off(self) -> Iterator[None]:
        previous, self._recording = self._recording, False
        try:
            yield
        finally:
            self._recording = previous

    def __len__(self) -> int:
        return sum(1 for tape in self._tapes.values() if len(tape))
