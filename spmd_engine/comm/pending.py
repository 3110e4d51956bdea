"""Operations under way, and the one loop in which a rank waits for them.

A collective is a generator: it starts something, yields what to wait for, a Condition, and goes on once that is so. So
it reads as a plain algorithm and can be left half-way, which is what `start ... wait` needs. Whoever waits for one
operation moves *all* of its rank's operations on: otherwise two ranks that wait for two operations in crossed order
would wait for ever.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from threading import Event, RLock, Thread
from time import perf_counter, sleep
from types import FrameType
from typing import TYPE_CHECKING, Any

from spmd_engine.comm.condition import Condition
from spmd_engine.errors import CommunicationTimeout, MismatchError, SpmdError
from spmd_engine.runtime.activity import Activity, Line

if TYPE_CHECKING:
    from spmd_engine.comm.communicators.communicator import Communicator

TIMEOUT = 1800.0  #: seconds a rank waits for others, unless it is told another number

LOOK_AFTER = 0.5  #: seconds without progress after which a rank looks whether those it waits for have ended
SAY_AFTER = 0.5  #: seconds of waiting after which a rank publishes for whom; then after twice as long, and so on
APART_AFTER = 10.0  #: seconds without progress after which ranks that all have ended, but never meet, are a mismatch
MESSAGES_AFTER = 2.0  #: as many for messages, which may be on their way from a rank that has ended
PERIOD = 1e-3  #: seconds between looks of the thread: at 1 Gbit/s, 125 kB come meanwhile

_PACKAGE = str(Path(__file__).parent) + os.sep

Steps = Generator[Condition, None, Any]  # yields what to wait for, returns the operation's result


class RanksEnded(Exception):
    """Thrown into an operation that waits for ranks whose programs have ended: these, of its communicator."""

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(ranks)
        self.ranks = list(ranks)


class Pending:
    """A started operation. ``wait()`` returns its result, and may be called again."""

    __slots__ = ("communicator", "_steps", "awaited", "_timeout", "_what", "until_the_end", "done", "result", "error")

    def __init__(
        self, communicator: Communicator | None, steps: Steps | None, timeout: float | None = None, what: str = ""
    ) -> None:
        self.communicator, self._steps, self._timeout, self._what = communicator, steps, timeout, what
        self.awaited: Condition | None = None  #: None: nothing, it can go on
        self.until_the_end = False  #: whether this is the call in which programs end
        self.done = False
        self.result: Any = None
        self.error: Exception | None = None  # raised by its own wait(), whoever met it first

    @classmethod
    def completed(cls, result: Any) -> Pending:
        pending = Pending(None, None)
        pending.result, pending.done = result, True
        return pending

    # What kinds of operations add.

    def describe(self) -> str:
        """What is waited for."""
        return self._what

    def call(self) -> tuple[Line | None, int, int]:
        """Which call this is: of which communicator, its number there, and that of its text; see ``Activity``."""
        return None, 0, 0

    def on_end(self) -> None:
        """Called once the result is here, or the error."""

    def on_wait(self, seconds: float) -> None:
        """Called after its start and each wait for it, with the time that took."""

    @property
    def needs_looks(self) -> bool:
        """Whether it waits for messages, which come only to those who look."""
        return self.awaited is None or self.awaited.messages

    @property
    def patience(self) -> float:
        """Seconds without progress after which to look whether those it waits for have ended."""
        return MESSAGES_AFTER if self.needs_looks else LOOK_AFTER

    def is_there(self) -> bool:
        """Whether what it waits for has come."""
        return self.awaited is None or self.awaited.is_so()

    def waits_for(self, rank: int) -> bool:
        """Whether it is ``rank``, maybe among others, for whom it waits."""
        return self.awaited is not None and not self.awaited.has_begun(rank)

    def advance(self, ended: Sequence[int] = ()) -> bool:
        """Go on as far as possible without waiting. Returns whether anything moved.

        ``ended``: ranks for whom it waits, but whose programs are over; it may have to tell others before it ends, too.
        """
        moved = False
        try:
            if ended:
                self.awaited = self._steps.throw(RanksEnded(ended))
            while self.is_there():
                moved = True
                self.awaited = next(self._steps)
            return moved
        except StopIteration as stop:
            self.result, self.done, self.awaited = stop.value, True, None
        except RanksEnded as error:
            self.error = MismatchError(f"waits for ranks whose program has ended ({error.ranks}): {self.describe()}")
        except Exception as error:
            self.error = error
        self.on_end()
        return True

    def wait(self) -> Any:
        """Block, without spinning, until the result is there.

        Raises MismatchError if ranks called different things, CommunicationTimeout if others did not come.
        """
        if not self.done:
            began = perf_counter()
            try:
                self.communicator.progress.wait_for(self, self._timeout)
            except SpmdError as error:
                raise error.with_traceback(None) from None  # the caller's line matters, not this machinery's
            self.on_wait(perf_counter() - began)
        return self.result


class Progress:
    """The outstanding operations of one rank."""

    def __init__(self, activity: Activity | None = None) -> None:
        self.activity = activity or Activity()  #: what this rank is doing, for others to read
        self._pending: list[Pending] = []
        self.idle_seconds = 0.0  #: spent in waits with nothing to do: for others to come, not for data to move
        self.lock = RLock()  #: held by whoever starts operations, moves them on, or uses the memory that ranks share
        self.on_begin: Callable[[], None] | None = None  #: wakes what moves them on while this rank computes

    def begin(self, pending: Pending, spin_tests: int = 0) -> Pending:
        """Start an operation: its first messages leave now. Stay with it while others are within ``spin_tests``."""
        with self.lock:
            pending.advance()
            while not (pending.done or pending.error):
                if spin_tests == 0 or not self.spin(pending.is_there, spin_tests):
                    self._pending.append(pending)
                    break
                pending.advance()
        self._wake_thread()
        return pending

    def _wake_thread(self) -> None:
        if self.on_begin is not None and self._pending:
            self.on_begin()

    def move_on(self) -> bool:
        """Take all operations as far as they go without waiting. Returns whether some are still under way."""
        with self.lock:
            for pending in tuple(self._pending):
                self._advance(pending)
            return bool(self._pending)

    def wait_for(self, wanted: Pending, timeout: float | None) -> None:
        """Return when ``wanted`` is done; raise its error, or CommunicationTimeout."""
        try:
            with self.lock:
                while not (wanted.done or wanted.error):
                    if self.spin(wanted.is_there, wanted.communicator.spin_tests):
                        self._advance(wanted)
                    else:
                        self._wait_long_for(wanted, timeout)
        finally:
            self._wake_thread()
        if wanted.error is not None:
            raise wanted.error

    def spin(self, is_there: Callable[[], bool], spin_tests: int) -> bool:
        """Whether it is there, within that many tests.

        Others are seldom far, where each has a core: by the time this rank had slept, they would have come.
        """
        if is_there():
            return True
        began = perf_counter()
        for _ in range(spin_tests):
            if is_there():
                break
        else:
            spin_tests = 0
        self.idle_seconds += perf_counter() - began
        return spin_tests > 0

    def _wait_long_for(self, wanted: Pending, timeout: float | None) -> None:
        """Move all operations on until ``wanted`` is done, leaving the processor to others in between."""
        self.activity.waits(*wanted.call(), timeout)
        end = self.activity.goes_on
        try:
            self._move_on_until(wanted, timeout)
        except CommunicationTimeout:
            end = self.activity.gives_up
            raise
        finally:
            end()

    def _move_on_until(self, wanted: Pending, timeout: float | None) -> None:
        communicator = wanted.communicator
        began = moved = perf_counter()
        look_after, say_after, idle = wanted.patience, SAY_AFTER, 0
        while not (wanted.done or wanted.error):
            communicator.prepare_to_pause(idle)
            if any([self._advance(pending) for pending in tuple(self._pending)]):
                moved = perf_counter()
                idle, look_after = 0, moved - began + wanted.patience
                continue
            idle += 1
            messages = any([pending.needs_looks for pending in self._pending])
            paused = perf_counter()
            communicator.pause(idle, messages)
            now = perf_counter()
            self.idle_seconds += now - paused
            waited = now - began
            if timeout and waited > timeout:
                # It stays under way: its messages may still come, into memory that must then still be there.
                why = self.activity.explain()
                raise CommunicationTimeout(f"waited {timeout:g} s: {wanted.describe()}{f'; {why}' if why else ''}")
            if waited <= min(look_after, say_after):
                continue
            suspects = [r for r in range(communicator.size) if r != communicator.rank and wanted.waits_for(r)]
            if waited > look_after:
                if wanted.until_the_end:
                    communicator.announce_end()
                ended = communicator.ended(suspects)
                # Who is at the end waits for others to come there. If all are, they have made unlike calls before.
                if ended and (not wanted.until_the_end or (len(ended) == len(suspects) and now - moved > APART_AFTER)):
                    self._advance(wanted, ended)
                look_after = waited + LOOK_AFTER  # now those were asked who may have ended
            if waited > say_after:
                missing = [communicator.line.members[rank] for rank in suspects]
                self.activity.waits_long(wanted.describe(), missing, _calling_line())
                say_after = 2 * waited

    def _advance(self, pending: Pending, ended: Sequence[int] = ()) -> bool:
        moved = pending.advance(ended)
        if (pending.done or pending.error) and pending in self._pending:
            self._pending.remove(pending)
        return moved


class ProgressThread:
    """Moves a rank's messages on while it computes: MPI moves data only inside its own calls.

    It looks once in a while, and only while the rank has operations under way and is not itself in a call: who is holds
    ``Progress.lock``. Measured between two hosts at 1 Gbit/s, an all_reduce of 16 MiB that takes 160 ms took as long
    after 400 ms of other work as without any, and so it did with a look every 30 ms; with this, none. Call ``wake``
    when operations are under way, and ``stop`` before the transport ends.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress, self._stopped, self._work = progress, False, Event()
        self._thread = Thread(target=self._run, name="spmd_engine progress", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        self._work.set()

    def stop(self) -> None:
        self._stopped = True
        self._work.set()
        self._thread.join()

    def _run(self) -> None:
        progress = self._progress
        while not self._stopped:
            self._work.wait()
            sleep(PERIOD)
            self._work.clear()
            if progress.lock.acquire(blocking=False):  # else the rank moves them on itself, and wakes this when it ends
                try:
                    if progress.move_on():
                        self._work.set()
                finally:
                    progress.lock.release()


def _calling_line() -> str:
    """The innermost line of this thread that is not communication's own."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame is not None else ""
