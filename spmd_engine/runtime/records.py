"""The records of ranks, read: what ``activity`` has written there."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from typing import NamedTuple
from zlib import crc32

from spmd_engine.runtime.activity import (
    BEAT,
    LINE,
    LINE_WORDS,
    LINES,
    MOST_LINES,
    NOTE,
    NUMBER,
    PATIENCE,
    PHASE,
    PHASE_NUMBER,
    PHASE_SINCE,
    PROCESS,
    SINCE,
    STACK,
    TEXT,
    TEXTS,
    TOLD,
    WORDS,
    Memory,
)


class CallRecord(NamedTuple):
    """A call of a communicator, as its ranks count them."""

    members: tuple[int, ...]  #: the communicator's ranks, by their numbers in the world
    which: int  #: among the communicators of these members, in the order in which they were made
    number: int  #: from 1; 0: a message, which is not counted
    operation: str = ""
    axes: str = ""
    label: str = ""

    @property
    def communicator(self) -> tuple[tuple[int, ...], int]:
        return self.members, self.which


class WaitRecord(NamedTuple):
    """What a rank waits for."""

    call: CallRecord
    seconds: float
    overdue: bool  #: whether it is time to tell
    what: str = ""  #: in words, known after half a second
    missing: tuple[int, ...] = ()  #: ranks of the world for whom it waits, as it sees them
    at: str = ""  #: the line that called


class State(NamedTuple):
    """What a rank is doing, as its record says."""

    rank: int
    process: int
    begun: tuple[CallRecord, ...]  #: the last call begun, of each communicator
    wait: WaitRecord | None
    phase: str  #: "saving, step 40", or nothing
    phase_seconds: float
    stack: str  #: of all its threads, innermost line last
    stack_seconds: float  #: since when it stands so, at most
    condition: str = ""  #: what the system says of its process: "stopped", "gone"
    reported_seconds: float = math.inf  #: since it reported a hang


class Record:
    """The record of any rank, read."""

    def __init__(self, rank: int, memory: Memory) -> None:
        self.rank, self._memory = rank, memoryview(memory)
        self._words = self._memory[WORDS:TEXTS].cast("q")

    @property
    def is_overdue(self) -> bool:
        """Whether it has waited for so long that this should be told."""
        since = self._words[SINCE]
        return bool(since) and since + self._words[PATIENCE] < time.monotonic_ns()

    @property
    def process(self) -> int:
        return self._words[PROCESS]

    @property
    def beat(self) -> int:
        """When whoever watches there was last seen alive."""
        return self._words[BEAT]

    @property
    def told(self) -> int:
        """When it has told of a hang, last."""
        return self._words[TOLD]

    def state(self, condition: str = "", stack: str | None = None) -> State:
        """All of it. ``stack``: where the caller knows that better."""
        words, now = list(self._words), time.monotonic_ns()
        lines = [words[LINES + i * LINE_WORDS :][:LINE_WORDS] for i in range(MOST_LINES)]
        begun = tuple(self._call(line, line[0], line[1]) for line in lines if line[2] and line[0])
        wait = None
        if words[SINCE]:
            line = lines[words[LINE]] if words[LINE] >= 0 else [0, 0, 0, 0]
            call = self._call(line, words[NUMBER], words[TEXT])
            note = _read(self._memory, NOTE) or {}
            note = note if note.get("since") == words[SINCE] else {}  # else of a wait before
            seconds, overdue = (now - words[SINCE]) / 1e9, words[SINCE] + words[PATIENCE] < now
            missing = tuple(note.get("missing", ()))
            wait = WaitRecord(call, seconds, overdue, note.get("what", ""), missing, note.get("at", ""))
        phase = self._text(words[PHASE])
        if words[PHASE_NUMBER]:
            phase += f" {words[PHASE_NUMBER] - 1}"
        return State(
            self.rank,
            words[PROCESS],
            begun,
            wait,
            phase,
            (now - words[PHASE_SINCE]) / 1e9 if phase else 0.0,
            _read(self._memory, STACK) or "" if stack is None else stack,
            (now - words[BEAT]) / 1e9 if stack is None and words[BEAT] else 0.0,
            condition,
            (now - words[TOLD]) / 1e9 if words[TOLD] else math.inf,
        )

    def _call(self, line: Sequence[int], number: int, text: int) -> CallRecord:
        members = _of_ranges(self._text(line[2]))
        operation, axes, label = (self._text(text).split("\t") + [""] * 3)[:3]
        return CallRecord(members, line[3], number, operation, axes, label)

    def _text(self, number: int) -> str:
        length = int.from_bytes(self._memory[number : number + 2], "little") if number else 0
        return bytes(self._memory[number + 2 : number + 2 + length]).decode(errors="replace")


def _read(memory: memoryview, begin: int):
    """What was written there; None if that is nothing, or not whole."""
    for _ in range(3):
        head = bytes(memory[begin : begin + 8])
        length = int.from_bytes(head[:4], "little")
        data = bytes(memory[begin + 8 : begin + 8 + length])
        if not length:
            return None
        if crc32(data).to_bytes(4, "little") == head[4:]:
            return json.loads(data)
    return None


def _of_ranges(text: str) -> tuple[int, ...]:
    ranks: list[int] = []
    for run in filter(None, text.split(",")):
        first, _, last = run.partition("-")
        ranks += range(int(first), int(last or first) + 1)
    return tuple(ranks)
