"""What a rank is doing, in memory that others can read, also while it is stopped or has been killed.

Each rank writes its own record and nobody else's, so there is nothing to lock. A call costs it two stores: which call
of its communicator it began last, and the number of a text that says what that is. Only who waits for long says more:
for whom, since when, and from which line. Times are nanoseconds of the clock that all processes of a node share.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from zlib import crc32

SIZE = 1 << 16  #: bytes of a record
WARN_AFTER = 60.0  #: seconds of waiting after which it is told who waits for whom; at most half of the timeout

WORDS = 64  # where the words begin, behind what marks the memory; see ``node``
BEAT, SINCE, PATIENCE, LINE, NUMBER, TEXT, PHASE, PHASE_NUMBER, PHASE_SINCE, TOLD, PROCESS = range(11)
LINES, MOST_LINES, LINE_WORDS = 16, 128, 4  # of words: where lines begin; a line is number, text, members, which
TEXTS = WORDS + 8 * (LINES + MOST_LINES * LINE_WORDS)
NOTE, STACK = 24 << 10, 32 << 10  # where there is room for what a wait tells, and for stacks
_LONGEST = 2000  # bytes of a text

Memory = memoryview | bytearray  # or anything else that can be written to and sliced


class Line:
    """Where the calls of one communicator are counted: ``words[0]`` is the last one's number, ``words[1]`` its text."""

    def __init__(self, words: list[int] | memoryview, place: int, members: tuple[int, ...]) -> None:
        self.words, self.place, self.members = words, place, members


class Activity:
    """The record of this rank. ``memory`` of SIZE bytes, zero at first, is shared with the others that watch."""

    def __init__(self, memory: Memory | None = None) -> None:
        self.memory = memoryview(memory if memory is not None else bytearray(SIZE))
        self._words = self.memory[WORDS:TEXTS].cast("q")
        self._words[PROCESS] = os.getpid()
        self._timeout: float | None = 0.0  # of the last wait
        self._texts: dict[str, int] = {}
        self._end = TEXTS + 8  # texts have numbers other than 0
        self._free = list(range(MOST_LINES))[::-1]
        self._made: dict[tuple[int, ...], int] = {}
        self.folder: Path | None = None  #: for reports, beside what is logged
        self.explain: Callable[[], str] = lambda: ""  #: why a wait has no end, as far as others can be seen
        self.on_long_wait: Callable[[], None] | None = None  #: starts whoever watches, if nobody does before

    def text(self, text: str) -> int:
        """The number by which a short text is known from now on; 0 if there is no room for more."""
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
        """The number of the text for such calls."""
        return self.text(f"{operation}\t{axes}\t{label[:100]}")

    def line(self, members: Sequence[int]) -> Line:
        """A line for a new communicator of these ranks of the world; give it back with ``close``."""
        members = tuple(members)
        self._made[members] = which = self._made.get(members, 0) + 1
        text = self.text(ranges(members))
        if not self._free or not text:
            return Line([0] * LINE_WORDS, -1, members)  # for nobody to read
        place = self._free.pop()
        begin = LINES + place * LINE_WORDS
        words = self._words[begin : begin + LINE_WORDS]
        words[0], words[1], words[3] = 0, 0, which
        words[2] = text  # last: now there is such a line
        return Line(words, place, members)

    def close(self, line: Line) -> None:
        """The communicator is used no more."""
        if line.place >= 0:
            line.words[2] = 0
            self._free.append(line.place)

    @contextmanager
    def phase(self, text: str, number: int = -1) -> Iterator[None]:
        """Say what is done meanwhile, beside collectives: ``with activity.phase("saving, step", 40)``."""
        words = self._words
        before = words[PHASE], words[PHASE_NUMBER], words[PHASE_SINCE]
        words[PHASE], words[PHASE_NUMBER], words[PHASE_SINCE] = self.text(text), number + 1, time.monotonic_ns()
        try:
            yield
        finally:
            words[PHASE], words[PHASE_NUMBER], words[PHASE_SINCE] = before

    # --- waiting

    def waits(self, line: Line | None, number: int, text: int, timeout: float | None) -> None:
        """A wait begins, for that call, for at most ``timeout`` seconds."""
        words = self._words
        words[LINE], words[NUMBER], words[TEXT] = line.place if line is not None else -1, number, text
        if timeout != self._timeout:
            self._timeout = timeout
            words[PATIENCE] = int(1e9 * min(WARN_AFTER, (timeout or 2 * WARN_AFTER) / 2))
        words[SINCE] = time.monotonic_ns()  # last: now it waits

    def waits_long(self, what: str, missing: Sequence[int], at: str) -> None:
        """Say more of this wait: for what, for which ranks of the world, and from which line it was called."""
        told = {"since": self._words[SINCE], "what": what, "missing": list(missing)[:512], "at": at}
        _write(self.memory, NOTE, STACK, told)
        if self.on_long_wait:
            self.on_long_wait()

    def goes_on(self) -> None:
        """The wait is over."""
        self._words[SINCE] = 0

    def gives_up(self) -> None:
        """The wait is over, for nobody came: to others that still wait this rank is where it was."""
        self._words[PATIENCE], self._timeout = 1 << 62, 0.0

    # --- for who watches

    @property
    def told(self) -> int:
        """When this rank has told of a hang, last."""
        return self._words[TOLD]

    @told.setter
    def told(self, when: int) -> None:
        self._words[TOLD] = when

    def beat(self, stack: str) -> None:
        """Whoever watches in this process lives, and sees its threads there."""
        _write(self.memory, STACK, SIZE, stack)
        self._words[BEAT] = time.monotonic_ns()


def _write(memory: memoryview, begin: int, end: int, content: object) -> None:
    """Write something, so that who reads it meanwhile sees that it is not whole."""
    data = json.dumps(content).encode()
    if len(data) > end - begin - 8:
        return
    memory[begin : begin + 8] = bytes(8)
    memory[begin + 8 : begin + 8 + len(data)] = data
    memory[begin : begin + 8] = len(data).to_bytes(4, "little") + crc32(data).to_bytes(4, "little")


def stack_of(frame: FrameType | None) -> str:
    """A thread's stack, a line each, the innermost last."""
    lines = []
    while frame is not None and len(lines) < 60:
        lines.append(f"  {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    return "\n".join(lines[::-1])


def frames_of_others() -> dict[int, FrameType]:
    """Where all threads but this one are, by number. This one's own frame, which would hold the others', and so what
    they compute with, until garbage is looked for, is left out."""
    frames = sys._current_frames()
    del frames[threading.get_ident()]
    return frames


def stacks_here(names: Mapping[int, str]) -> str:
    """Those of this process's other threads, which have these names by number; the main thread's last."""
    frames = sorted(frames_of_others().items(), key=lambda item: names.get(item[0]) == "MainThread")
    told = [f"{names.get(number, 'thread')}:\n{stack_of(frame)}" for number, frame in frames]
    return "\n".join(told)[-(SIZE - STACK) // 2 :]


def ranges(ranks: Sequence[int]) -> str:
    """``0-3,8``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
