"""Records of what each rank does, in memory that other processes can read even if the rank is stopped or killed.

Each rank writes only its own record, so there are no locks. A call takes two stores: its number in its communicator,
and the number of a text that describes it. Only a rank that waits for long writes more: the ranks for which it waits,
since when, and the line that called. Times are nanoseconds of a clock that all processes of a node share.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from zlib import crc32

SIZE = 1 << 16  #: bytes of a record
WARN_AFTER = 60.0  #: seconds of waiting after which a hang is reported; at most half of the timeout

WORDS = 64  # offset of the words, after the mark that others recognise the memory by
BEAT, SINCE, PATIENCE, LINE, NUMBER, TEXT, PHASE, PHASE_NUMBER, PHASE_SINCE, REPORTED, PROCESS, IDLE = range(12)
LINES, MOST_LINES, LINE_WORDS = 16, 128, 4  # in words: the first line; a line is number, text, members, which
TEXTS = WORDS + 8 * (LINES + MOST_LINES * LINE_WORDS)
NOTE, STACK = 24 << 10, 32 << 10  # offsets of the note of a long wait, and of the stacks
_LONGEST = 2000  # bytes of a text

Memory = memoryview | bytearray  # or another writable buffer


class Line:
    """The call counter of a communicator: ``words[0]`` is the number of its last call, ``words[1]`` its text's."""

    def __init__(self, words: list[int] | memoryview, place: int, members: tuple[int, ...]) -> None:
        self.words, self.place, self.members = words, place, members


class Activity:
    """The record of this rank. ``memory`` of SIZE bytes, initially zero, is shared with other ranks' watchdogs, whose
    processes map it by its ``handle``."""

    def __init__(self, memory: Memory | None = None, handle: str = "") -> None:
        self.handle = handle
        self.memory = memoryview(memory if memory is not None else bytearray(SIZE))
        self._words = self.memory[WORDS:TEXTS].cast("q")
        self._words[PROCESS] = os.getpid()
        self._timeout: float | None = 0.0  # the last wait's
        self._texts: dict[str, int] = {}
        self._end = TEXTS + 8  # texts have numbers other than 0
        self._free = list(range(MOST_LINES))[::-1]
        self._created: dict[tuple[int, ...], int] = {}
        #: The records of all ranks of the node, which this one can read.
        self.records: Sequence[Record] = [Record(0, self.memory)]
        self.folder: Path | None = None  #: the run's: reports are also written there
        self.explain: Callable[[], str] = lambda: ""  #: why a wait does not end, from the records of other ranks
        self.on_long_wait: Callable[[], None] | None = None  #: starts a watchdog that is not running yet

    def text(self, text: str) -> int:
        """The number that encodes a short text; 0 if there is no room."""
        number = self._texts.get(text)
        if number is None:
            data = text.encode(errors="replace")
            number, end = self._end, self._end + 2 + len(data)
            if end > NOTE or len(data) > _LONGEST:
                return 0
            self.memory[number + 2 : end] = data
            self.memory[number : number + 2] = len(data).to_bytes(2, "little")
            self._texts[text], self._end = number, end
        return number

    def called(self, operation: str, axes: str, label: str) -> int:
        """The number of the text that describes a call."""
        return self.text(f"{operation}\t{axes}\t{label[:100]}")

    def line(self, members: Sequence[int]) -> Line:
        """A line for a new communicator of these ranks of the world; give it back with ``close``."""
        members = tuple(members)
        self._created[members] = which = self._created.get(members, 0) + 1
        text = self.text(ranges(members))
        if not self._free or not text:
            return Line([0] * LINE_WORDS, -1, members)  # not in the record
        place = self._free.pop()
        begin = LINES + place * LINE_WORDS
        words = self._words[begin : begin + LINE_WORDS]
        words[0], words[1], words[3] = 0, 0, which
        words[2] = text  # last: it makes the line visible
        return Line(words, place, members)

    def close(self, line: Line) -> None:
        """Remove the line of a communicator that is no longer used."""
        if line.place >= 0:
            line.words[2] = 0
            self._free.append(line.place)

    @contextmanager
    def phase(self, text: str, number: int = -1) -> Iterator[None]:
        """Record what the rank does between collectives: ``with activity.phase("saving, step", 40)``."""
        words = self._words
        before = words[PHASE], words[PHASE_NUMBER], words[PHASE_SINCE]
        words[PHASE], words[PHASE_NUMBER], words[PHASE_SINCE] = self.text(text), number + 1, time.monotonic_ns()
        try:
            yield
        finally:
            words[PHASE], words[PHASE_NUMBER], words[PHASE_SINCE] = before

    @contextmanager
    def idle(self, text: str) -> Iterator[None]:
        """As ``phase``, and record that the rank waits for something outside the job, which may take any time."""
        with self.phase(text):
            self._words[IDLE] = 1
            try:
                yield
            finally:
                self._words[IDLE] = 0

    # --- waiting

    def waits(self, line: Line | None, number: int, text: int, timeout: float | None) -> None:
        """Record the start of a wait for a call, of at most ``timeout`` seconds."""
        words = self._words
        words[LINE], words[NUMBER], words[TEXT] = line.place if line is not None else -1, number, text
        if timeout != self._timeout:
            self._timeout = timeout
            words[PATIENCE] = int(1e9 * min(WARN_AFTER, (timeout or 2 * WARN_AFTER) / 2))
        words[SINCE] = time.monotonic_ns()  # last: it makes the wait visible

    def waits_long(self, what: str, missing: Sequence[int], at: str) -> None:
        """Add a note to the wait: the event and the ranks of the world that it waits for, and the line that called."""
        note = {"since": self._words[SINCE], "what": what, "missing": list(missing)[:512], "at": at}
        _write(self.memory, NOTE, STACK, note)
        if self.on_long_wait:
            self.on_long_wait()

    def goes_on(self) -> None:
        """Record that the wait is over."""
        self._words[SINCE] = 0

    def gives_up(self) -> None:
        """Record that the wait timed out. For other waiting ranks this rank is still inside its call."""
        self._words[PATIENCE], self._timeout = 1 << 62, 0.0

    # --- for the watchdog

    def reported(self) -> None:
        """Record that this rank has reported a hang now."""
        self._words[REPORTED] = time.monotonic_ns()

    def beat(self, stack: str) -> None:
        """Record that the watchdog of this process is alive, and the stacks that it sees."""
        _write(self.memory, STACK, SIZE, stack)
        self._words[BEAT] = time.monotonic_ns()


def _write(memory: memoryview, begin: int, end: int, content: object) -> None:
    """Write content such that a reader detects an incomplete write."""
    data = json.dumps(content).encode()
    if len(data) > end - begin - 8:
        return
    memory[begin : begin + 8] = bytes(8)
    memory[begin + 8 : begin + 8 + len(data)] = data
    memory[begin : begin + 8] = len(data).to_bytes(4, "little") + crc32(data).to_bytes(4, "little")


def stack_of(frame: FrameType | None) -> str:
    """A thread's stack, a line each, the innermost last.

    The thread goes on meanwhile. Some versions of Python then give another object as a caller's frame, or fail: the
    stack then has the frames seen before, and a line that says why there are no more.
    """
    lines = []
    try:
        while frame is not None and len(lines) < 60:
            lines.append(f"  {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}")
            frame = frame.f_back
    except Exception as error:
        lines.append(f"  (its callers cannot be read: {type(error).__name__}: {error})")
    return "\n".join(lines[::-1])


def frames_of_others() -> dict[int, FrameType]:
    """The frames of all other threads, by number. This thread's own frame is left out: it would be part of a reference
    cycle that keeps the other frames, and their arrays, alive."""
    frames = sys._current_frames()
    del frames[threading.get_ident()]
    return frames


def stacks_here(names: Mapping[int, str]) -> str:
    """The stacks of this process's other threads, with ``names`` by thread number; the main thread's last."""
    frames = sorted(frames_of_others().items(), key=lambda item: names.get(item[0]) == "MainThread")
    stacks = [f"{names.get(number, 'thread')}:\n{stack_of(frame)}" for number, frame in frames]
    return "\n".join(stacks)[-(SIZE - STACK) // 2 :]


def ranges(ranks: Sequence[int]) -> str:
    """Ranks as text: ``0-3,8``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


# --- Reading the records


class CallRecord(NamedTuple):
    """A call, numbered as the ranks of its communicator count them."""

    members: tuple[int, ...]  #: the communicator's ranks, as ranks of the world
    which: int  #: the number of the communicator among those with these members, in order of creation
    number: int  #: from 1; 0: a message; these are not counted
    operation: str = ""
    axes: str = ""
    label: str = ""

    @classmethod
    def from_json(cls, content: Any) -> CallRecord:
        """The call that JSON holds as a list."""
        members, *rest = content
        return cls(tuple(members), *rest)

    @property
    def communicator(self) -> tuple[tuple[int, ...], int]:
        return self.members, self.which


class WaitRecord(NamedTuple):
    """A wait of a rank."""

    call: CallRecord
    seconds: float
    overdue: bool  #: whether it is to be reported
    what: str = ""  #: the event that it waits for; recorded after half a second
    missing: tuple[int, ...] = ()  #: ranks of the world for which it waits, by its record
    at: str = ""  #: the line that called


class State(NamedTuple):
    """The activity of a rank, by its record."""

    rank: int
    process: int
    begun: tuple[CallRecord, ...]  #: the last call begun, of each communicator
    wait: WaitRecord | None
    phase: str  #: "saving, step 40", or empty
    phase_seconds: float
    stack: str  #: the stacks of all its threads, innermost line last
    stack_seconds: float  #: its age
    condition: str = ""  #: what the operating system says about its process: "stopped", "gone"
    reported_seconds: float = math.inf  #: since it reported a hang
    idle: bool = False  #: whether it waits for something outside the job

    @classmethod
    def from_json(cls, content: Any) -> State:
        """The state that JSON holds as a list, like every named tuple."""
        rank, process, begun, wait, *rest = content
        if wait is not None:
            call, seconds, overdue, what, missing, at = wait
            wait = WaitRecord(CallRecord.from_json(call), seconds, overdue, what, tuple(missing), at)
        return cls(rank, process, tuple(CallRecord.from_json(call) for call in begun), wait, *rest)


class Record:
    """A reader of the record of a rank."""

    def __init__(self, rank: int, memory: Memory) -> None:
        self.rank, self._memory = rank, memoryview(memory)
        self._words = self._memory[WORDS:TEXTS].cast("q")

    @property
    def is_overdue(self) -> bool:
        """Whether it has waited for so long that this should be reported."""
        since = self._words[SINCE]
        return bool(since) and since + self._words[PATIENCE] < time.monotonic_ns()

    @property
    def process(self) -> int:
        return self._words[PROCESS]

    @property
    def beat(self) -> int:
        """When the watchdog of that process last recorded that it is alive."""
        return self._words[BEAT]

    @property
    def reported(self) -> int:
        """When the rank last reported a hang."""
        return self._words[REPORTED]

    def state(self, condition: str = "", stack: str | None = None) -> State:
        """The content of the record. ``stack`` replaces the recorded one."""
        words, now = list(self._words), time.monotonic_ns()
        lines = [words[LINES + i * LINE_WORDS :][:LINE_WORDS] for i in range(MOST_LINES)]
        begun = tuple(self._call(line, line[0], line[1]) for line in lines if line[2] and line[0])
        wait = None
        if words[SINCE]:
            line = lines[words[LINE]] if words[LINE] >= 0 else [0, 0, 0, 0]
            call = self._call(line, words[NUMBER], words[TEXT])
            note = _read(self._memory, NOTE) or {}
            note = note if note.get("since") == words[SINCE] else {}  # else it belongs to an earlier wait
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
            (now - words[REPORTED]) / 1e9 if words[REPORTED] else math.inf,
            bool(words[IDLE]),
        )

    def _call(self, line: Sequence[int], number: int, text: int) -> CallRecord:
        members = _parse_ranges(self._text(line[2]))
        operation, axes, label = (self._text(text).split("\t") + [""] * 3)[:3]
        return CallRecord(members, line[3], number, operation, axes, label)

    def _text(self, number: int) -> str:
        length = int.from_bytes(self._memory[number : number + 2], "little") if number else 0
        return bytes(self._memory[number + 2 : number + 2 + length]).decode(errors="replace")


def _read(memory: memoryview, begin: int):
    """The content at ``begin``; None if it is empty or incomplete."""
    for _ in range(3):
        head = bytes(memory[begin : begin + 8])
        length = int.from_bytes(head[:4], "little")
        data = bytes(memory[begin + 8 : begin + 8 + length])
        if not length:
            return None
        if crc32(data).to_bytes(4, "little") == head[4:]:
            return json.loads(data)
    return None


def _parse_ranges(text: str) -> tuple[int, ...]:
    ranks: list[int] = []
    for run in filter(None, text.split(",")):
        first, _, last = run.partition("-")
        ranks += range(int(first), int(last or first) + 1)
    return tuple(ranks)
