"""Operations in progress, the conditions that they wait for, and the loop in which a rank waits.

A collective is a generator: it starts a transfer, yields a Condition to wait for, and continues once it holds. So it
reads like a plain algorithm and can be suspended, which ``start_...`` and ``wait`` need. A rank that waits for one
operation advances *all* of its operations: otherwise two ranks that wait for two operations in opposite order would
deadlock.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event, RLock, Thread
from time import perf_counter, sleep
from types import FrameType
from typing import TYPE_CHECKING, Any

from spmd_engine.arrays.backend import enter_device
from spmd_engine.errors import CommunicationTimeout, MismatchError, RankAborted, SpmdError
from spmd_engine.runtime.activity import Activity, Line

if TYPE_CHECKING:
    from spmd_engine.comm.communicators.communicator import Communicator

TIMEOUT = 1800.0  #: seconds that a rank waits for others by default

CHECK_AFTER = 0.5  #: seconds without progress after which a rank checks whether awaited ranks have ended
PUBLISH_AFTER = 0.5  #: seconds of waiting after which a rank publishes its call; then after twice as long
APART_AFTER = 10.0  #: seconds without progress after which ranks that end in different calls are a mismatch
MESSAGES_AFTER = 2.0  #: CHECK_AFTER for messages, which a rank may have sent before it ended
PERIOD = 1e-3  #: seconds between two polls of the progress thread: 125 kB at 1 Gbit/s

_PACKAGES = tuple(str(Path(__file__).parents[1] / name) + os.sep for name in ("arrays", "comm"))


class Condition:
    """A condition that an operation waits for: messages, words in shared memory, or its place in the call order.

    ``is_met``: whether it holds. ``has_begun``: whether a rank has done its part, or is about to. ``messages``: whether
    this rank must poll; otherwise the rank that writes into shared memory wakes the others.
    """

    __slots__ = ("is_met", "has_begun", "messages")

    def __init__(self, is_met: Callable[[], bool], has_begun: Callable[[int], bool], messages: bool = False) -> None:
        self.is_met, self.has_begun, self.messages = is_met, has_begun, messages


class CallOrder:
    """The calls of a communicator in the order in which they were made. A library's collectives must start in this
    order: each call waits until all earlier ones have started their last."""

    def __init__(self) -> None:
        self._open: list[int] = []  # ascending

    def enter(self, number: int) -> None:
        """Add a call that may have data to move; the last one so far."""
        self._open.append(number)

    def finish(self, number: int) -> None:
        """Call ``number`` has started its last collective, or needs none."""
        if number in self._open:
            self._open.remove(number)

    def wait(self, number: int) -> Iterator[Condition]:
        """Continue when all calls before ``number`` have finished."""
        if self._open[0] != number:
            yield Condition(lambda: self._open[0] == number, lambda rank: False)


Steps = Generator[Condition, None, Any]  #: yields conditions to wait for, returns the operation's result


class Queued:
    """The result of an operation that other streams of a device write: complete at ``event``. ``held``: what they read.

    ``use()`` lets the computations queued from now on wait for the event, not the host, and returns the result.
    """

    __slots__ = ("result", "_backend", "_event", "_held")

    def __init__(self, result: Any, backend: Any, event: Any, held: Any = None) -> None:
        self.result, self._backend, self._event, self._held = result, backend, event, held

    def use(self) -> Any:
        self._backend.follow(self._event)
        return self.result


class RanksEnded(Exception):
    """Thrown into an operation that waits for ranks of its communicator after their programs have ended."""

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(ranks)
        self.ranks = list(ranks)


class Pending:
    """A started operation. ``wait()`` returns its result, and may be called again."""

    __slots__ = ("done", "result", "error")

    def __init__(self) -> None:
        self.done = False
        self.result: Any = None
        self.error: Exception | None = None  # raised by wait() of this operation, whichever wait() encountered it

    @classmethod
    def completed(cls, result: Any) -> Pending:
        """An operation that is done, with this result."""
        pending = Pending()
        pending.result, pending.done = result, True
        return pending

    def wait(self) -> Any:
        """Block, without spinning for long, until the result is available.

        Raises MismatchError if ranks made different calls, CommunicationTimeout if others did not arrive in time.
        """
        return self.result


class Operation(Pending):
    """An operation in progress, which executes ``steps`` as their conditions hold. ``what``: its description."""

    __slots__ = ("communicator", "_steps", "awaited", "_timeout", "_what", "until_the_end")

    def __init__(self, communicator: Communicator, steps: Steps, timeout: float | None = None, what: str = "") -> None:
        self.done, self.result, self.error = False, None, None
        self.communicator, self._steps, self._timeout, self._what = communicator, steps, timeout, what
        self.awaited: Condition | None = None  #: None: the operation can continue
        self.until_the_end = False  #: whether programs end in this call

    # --- methods that subclasses override

    def describe(self) -> str:
        """The call that it waits for, as text."""
        return self._what

    def call(self) -> tuple[Line | None, int, int]:
        """The communicator's line, the number of this call in it, and the number of its text (see Activity)."""
        return None, 0, 0

    def on_end(self) -> None:
        """Called when the result or the error is available."""

    def on_wait(self, seconds: float) -> None:
        """Called after the start and after each wait, with its seconds."""

    @property
    def must_poll(self) -> bool:
        """Whether the operation waits for messages, for which this rank must poll."""
        return self.awaited is None or self.awaited.messages

    @property
    def check_after(self) -> float:
        """Seconds without progress after which to check whether awaited ranks have ended."""
        return MESSAGES_AFTER if self.must_poll else CHECK_AFTER

    def is_ready(self) -> bool:
        """Whether the operation can continue."""
        return self.awaited is None or self.awaited.is_met()

    def advance(self, ended: Sequence[int] = ()) -> bool:
        """Continue as far as possible without waiting. Returns whether the operation advanced.

        ``ended``: awaited ranks that have ended their programs. The operation may have to notify other ranks before
        it ends itself.
        """
        moved = False
        try:
            if ended:
                self.awaited = self._steps.throw(RanksEnded(ended))
            while self.awaited is None or self.awaited.is_met():
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
        if not self.done:
            began = perf_counter()
            try:
                self.communicator.progress.wait_for(self, self._timeout)
            except SpmdError as error:
                raise error.with_traceback(None) from None  # report the caller's line, not this one
            self.on_wait(perf_counter() - began)
        if type(self.result) is Queued:
            self.result = self.result.use()
        return self.result


class Progress:
    """The operations of one rank that are in progress."""

    def __init__(self, activity: Activity | None = None) -> None:
        self.activity = activity or Activity()  #: the present activity of this rank, which others can read
        self._pending: list[Operation] = []
        self._patient = False
        self.idle_seconds = 0.0  #: spent waiting for other ranks, not for data to move
        self.lock = RLock()  #: held while operations start or advance, and while shared memory is allocated
        self.on_begin: Callable[[], None] | None = None  #: wakes the progress thread
        self.aborts: list[Callable[[SpmdError], None]] = []  #: end the work of devices that waits for other ranks

    @contextmanager
    def patience(self) -> Iterator[None]:
        """In this block no wait of this rank has a timeout: others may be idle (see ``Activity.idle``)."""
        self._patient = True
        try:
            yield
        finally:
            self._patient = False

    def begin(self, pending: Operation, spin_tests: int = 0) -> Operation:
        """Start an operation and send its first messages. Spin for ``spin_tests`` tests, then return."""
        with self.lock:
            pending.advance()
            while (awaited := pending.awaited) is not None and pending.error is None:
                if spin_tests == 0 or not self.spin(spin_tests, awaited.is_met):
                    self._pending.append(pending)
                    break
                pending.advance()
        if self._pending:
            self._wake_thread()
        return pending

    def _wake_thread(self) -> None:
        if self.on_begin is not None and self._pending:
            self.on_begin()

    def advance_all(self) -> bool:
        """Advance all operations as far as possible without waiting. Returns whether some are still in progress."""
        with self.lock:
            for pending in tuple(self._pending):
                self._advance(pending)
            return bool(self._pending)

    def wait_for(self, wanted: Operation, timeout: float | None) -> None:
        """Return when ``wanted`` is done; raise its error, or CommunicationTimeout."""
        try:
            with self.lock:
                while not (wanted.done or wanted.error):
                    if self.spin(wanted.communicator.spin_tests, wanted.is_ready):
                        self._advance(wanted)
                    else:
                        self._wait_long_for(wanted, None if self._patient else timeout)
        finally:
            self._wake_thread()
        if wanted.error is not None:
            raise wanted.error

    def spin(self, spin_tests: int, test: Callable[..., Any], *arguments: Any) -> Any:
        """The first true value of ``test(*arguments)`` within ``spin_tests`` more tests, or its last value.

        Where each rank has a core, the others usually arrive before a sleeping rank would wake.
        """
        if value := test(*arguments):
            return value
        began = perf_counter()
        for _ in range(spin_tests):
            if value := test(*arguments):
                break
        self.idle_seconds += perf_counter() - began
        return value

    def _wait_long_for(self, wanted: Operation, timeout: float | None) -> None:
        """Advance all operations until ``wanted`` is done; yield the processor in between."""
        self.activity.waits(*wanted.call(), timeout)
        end = self.activity.goes_on
        try:
            self._advance_until(wanted, timeout)
        except (CommunicationTimeout, RankAborted) as error:
            end = self.activity.gives_up if isinstance(error, CommunicationTimeout) else end
            self.abort(error)
            raise
        finally:
            end()

    def abort(self, cause: SpmdError) -> None:
        """End the work of devices that waits for other ranks, since these do not arrive."""
        for abort in self.aborts:
            abort(cause)

    def _advance_until(self, wanted: Operation, timeout: float | None) -> None:
        communicator = wanted.communicator
        began = moved = perf_counter()
        check_after, publish_after, idle = wanted.check_after, PUBLISH_AFTER, 0
        ended: Sequence[int] = ()
        while not (wanted.done or wanted.error):
            communicator.prepare_to_pause(idle)
            if any([self._advance(pending) for pending in tuple(self._pending)]):
                moved = perf_counter()
                idle, check_after = 0, moved - began + wanted.check_after
                continue
            idle += 1
            messages = any([pending.must_poll for pending in self._pending])
            paused = perf_counter()
            communicator.pause(idle, messages)
            now = perf_counter()
            self.idle_seconds += now - paused
            waited = now - began
            if timeout and waited > timeout:
                # The operation stays in progress: its messages may still arrive, and need their memory.
                cause = self.activity.explain()
                raise CommunicationTimeout(f"waited {timeout:g} s: {wanted.describe()}{f'; {cause}' if cause else ''}")
            if waited <= min(check_after, publish_after):
                continue
            others = [rank for rank in range(communicator.size) if rank != communicator.rank]
            missing = [rank for rank in others if wanted.awaited and not wanted.awaited.has_begun(rank)]
            if waited > check_after:
                if wanted.until_the_end and self._pending == [wanted]:  # this rank's part in all other calls is done
                    communicator.announce_end()
                # What a rank sent before its end may arrive after this rank's last look: its end counts at the next
                # check, if it is still missing after more looks. A rank that ends waits until all ranks end, though
                # its next message comes from one. If all wait to end, they have made different calls.
                awaited = others if wanted.until_the_end else missing
                gone = [rank for rank in awaited if rank in ended]
                ended = communicator.ended(awaited)
                if gone and (not wanted.until_the_end or (len(gone) == len(others) and now - moved > APART_AFTER)):
                    self._advance(wanted, gone)
                check_after = waited + CHECK_AFTER  # the missing ranks now have requests to report their end
            if waited > publish_after:
                members = [communicator.members[rank] for rank in missing]
                self.activity.waits_long(wanted.describe(), members, _calling_line())
                publish_after = 2 * waited

    def _advance(self, pending: Operation, ended: Sequence[int] = ()) -> bool:
        moved = pending.advance(ended)
        if (pending.done or pending.error) and pending in self._pending:
            self._pending.remove(pending)
        return moved


class ProgressThread:
    """Advances a rank's messages while the rank computes: MPI moves data only inside its own calls.

    It polls every PERIOD, only while the rank has operations in progress and is not in a call itself (a call holds
    ``Progress.lock``). Measured between two hosts at 1 Gbit/s: the wait for an all_reduce of 16 MiB after 400 ms of
    other work took 160 ms without this thread and with a poll every 30 ms, but no time with this thread. Call ``wake``
    when operations are in progress, and ``stop`` before the transport ends.
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
            enter_device()
            sleep(PERIOD)
            self._work.clear()
            if progress.lock.acquire(blocking=False):  # otherwise the rank itself advances its operations
                try:
                    if progress.advance_all():
                        self._work.set()
                finally:
                    progress.lock.release()


def _calling_line() -> str:
    """The innermost line of this thread outside the packages ``comm`` and ``arrays``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGES):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame is not None else ""


# --- Results of operations under way, to which a function is still to be applied


class Deferred:
    """A function to call with the result of an operation that is under way.

    ``finish()`` waits for the operation and calls the function, which may start another operation; ``wait()`` waits for
    that one, too, and returns the value. It does so once: the value is not kept.
    """

    __slots__ = ("_pending", "_then", "_value")

    def __init__(self, pending: Any, then: Callable[[Any], Any]) -> None:
        """``pending``: of the operation; it has a method ``wait()``."""
        self._pending: Any = pending
        self._then: Any = then
        self._value: Any = None

    def finish(self) -> None:
        """Wait for the operation and call the function; do not wait for an operation that this starts."""
        if self._pending is not None:
            self._value = self._then(self._pending.wait())
            self._pending = self._then = None

    def wait(self) -> Any:
        """The value."""
        self.finish()
        value, self._value = self._value, None
        return wait_for(value)


class Several:
    """Messages under way; ``wait()`` returns what is received by each."""

    def __init__(self, messages: Iterable[Pending]) -> None:
        self._messages = list(messages)

    def wait(self) -> list[Any]:
        return [message.wait() for message in self._messages]


UNDER_WAY = (Pending, Deferred)


def wait_for(x: Any) -> Any:
    """``x``, or its value if it is under way."""
    return x.wait() if isinstance(x, UNDER_WAY) else x


def then(x: Any, do: Callable[[Any], Any]) -> Any:
    """``do(x)``; deferred if ``x`` is under way."""
    return Deferred(x, do) if isinstance(x, UNDER_WAY) else do(x)
