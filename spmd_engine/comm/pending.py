"""Operations under way, and the one loop in which a rank waits for them.

A collective is a generator: it starts something, yields what to wait for, and goes on once that is done: a list of
messages' requests, or a function that says whether something has come true in memory that ranks share. So it reads
as a plain algorithm and can be left half-way, which is what `start ... wait` needs. Whoever waits for one operation
moves *all* of its rank's operations on: otherwise two ranks that wait for two operations in crossed order would wait
for ever.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from time import perf_counter
from typing import TYPE_CHECKING, Any

from spmd_engine.errors import CommunicationTimeout, MismatchError, SpmdError

if TYPE_CHECKING:
    from spmd_engine.comm.communicator import Communicator

TIMEOUT = 1800.0  #: seconds a rank waits for others, unless it is told another number
WARN_AFTER = 60.0  #: seconds after which a rank that waits says so; then after four times as long, and so on

LOOK_AFTER = 0.5  #: seconds without progress after which a rank looks whether those it waits for have ended

logger = logging.getLogger(__name__)

Steps = Generator[list | Callable[[], bool], None, Any]  # yields what to wait for, returns the operation's result


class Pending:
    """A started operation. ``wait()`` returns its result, and may be called again."""

    __slots__ = (
        *("_communicator", "_steps", "_awaited", "_timeout", "_on_result", "_on_end", "_on_wait"),
        *("describe", "until_the_end", "done", "result", "error"),
    )

    def __init__(
        self,
        communicator: Communicator | None,
        steps: Steps,
        describe: Callable[[], str] = str,
        timeout: float | None = None,
        on_result: Callable[[Any], None] | None = None,
        on_end: Callable[[], None] | None = None,
        on_wait: Callable[[float], None] | None = None,
    ) -> None:
        """``on_end`` is called after a result and after an error, ``on_wait`` with the seconds a wait took."""
        self._communicator = communicator
        self._steps = steps
        self._awaited: list | Callable[[], bool] = []
        self._timeout = timeout
        self._on_result, self._on_end, self._on_wait = on_result, on_end, on_wait
        self.describe = describe
        self.until_the_end = False  #: whether this is the meeting in which programs end
        self.done = False
        self.result: Any = None
        self.error: Exception | None = None  # raised by its own wait(), whoever met it first

    @classmethod
    def completed(cls, result: Any) -> Pending:
        pending = cls(None, iter(()))  # type: ignore[arg-type]
        pending.result, pending.done = result, True
        return pending

    @property
    def sends_messages(self) -> bool:
        """Whether it waits for messages, which come only to those who look."""
        return isinstance(self._awaited, list)

    def advance(self) -> bool:
        """Go on as far as possible without waiting. Returns whether anything moved."""
        moved = False
        try:
            while self.is_there():
                moved = True
                self._awaited = next(self._steps)
            return moved
        except StopIteration as stop:
            self.result, self.done, self._awaited = stop.value, True, []
            if self._on_result:
                self._on_result(self.result)
        except Exception as error:
            self.error = error
        if self._on_end:
            self._on_end()
        return True

    def is_there(self) -> bool:
        """Whether what it waits for has come."""
        awaited = self._awaited
        return self._communicator.done(awaited) if isinstance(awaited, list) else awaited()

    def wait(self) -> Any:
        """Block, without spinning, until the result is there.

        Raises MismatchError if ranks called different things, CommunicationTimeout if others did not come.
        """
        if not self.done:
            began = perf_counter()
            try:
                self._communicator.progress.wait_for(self, self._timeout)
            except SpmdError as error:
                raise error.with_traceback(None) from None  # the caller's line matters, not this machinery's
            if self._on_wait:
                self._on_wait(perf_counter() - began)
        return self.result


class Progress:
    """The outstanding operations of one rank."""

    def __init__(self) -> None:
        self._pending: list[Pending] = []
        self.idle_seconds = 0.0  #: spent in waits with nothing to do: for others to come, not for data to move

    def begin(self, pending: Pending) -> Pending:
        """Start an operation: its first messages leave now."""
        self._pending.append(pending)
        self._advance(pending)
        return pending

    def wait_for(self, wanted: Pending, timeout: float | None) -> None:
        communicator = wanted._communicator
        began = perf_counter()
        warn_after, look_after = WARN_AFTER, LOOK_AFTER
        idle = 0
        while not wanted.done:
            if wanted.error is not None:
                raise wanted.error
            activity = communicator.activity(idle)
            if any([self._advance(pending) for pending in tuple(self._pending)]):
                idle, look_after = 0, perf_counter() - began + LOOK_AFTER
                continue
            idle += 1
            messages = any([pending.sends_messages for pending in self._pending])
            paused = perf_counter()
            communicator.pause(idle, activity, messages, wanted.is_there)
            now = perf_counter()
            self.idle_seconds += now - paused
            waited = now - began
            if timeout and waited > timeout:
                # It stays under way: its messages may still come, into memory that must then still be there.
                raise CommunicationTimeout(f"waited {timeout:g} s: {wanted.describe()}")
            if waited > look_after:
                if not wanted.until_the_end and (ended := communicator.ended()):
                    raise MismatchError(f"waits for ranks whose program has ended ({ended}): {wanted.describe()}")
                look_after = waited + LOOK_AFTER
            if waited > warn_after:
                logger.warning("has waited %.0f s: %s", waited, wanted.describe())
                warn_after *= 4

    def _advance(self, pending: Pending) -> bool:
        moved = pending.advance()
        if (pending.done or pending.error) and pending in self._pending:
            self._pending.remove(pending)
        return moved
