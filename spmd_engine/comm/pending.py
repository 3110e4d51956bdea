"""Operations under way, and the one loop in which a rank waits for them.

A collective is a generator: it starts messages, yields their requests, and goes on once they are done. That
reads as a plain algorithm and can be left half-way, which is what `start ... wait` needs. Whoever waits for
one operation moves *all* of its rank's operations on: otherwise two ranks that wait for two operations in
crossed order would wait for ever.
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

Steps = Generator[list, None, Any]  # yields requests, returns the operation's result


class Pending:
    """A started operation. ``wait()`` returns its result, and may be called again."""

    def __init__(
        self,
        communicator: Communicator | None,
        steps: Steps,
        describe: Callable[[], str] = str,
        timeout: float | None = None,
        on_result: Callable[[Any], None] = lambda result: None,
        on_wait: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._communicator = communicator
        self._steps = steps
        self._requests: list = []
        self._timeout = timeout
        self._on_result = on_result
        self._on_wait = on_wait
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

    def advance(self) -> bool:
        """Go on as far as possible without waiting. Returns whether anything moved."""
        moved = False
        while self._communicator.done(self._requests):
            moved = True
            try:
                self._requests = next(self._steps)
            except StopIteration as stop:
                self.result, self.done = stop.value, True
                self._requests = []
                self._on_result(self.result)
                return True
        return moved

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
            self._on_wait(perf_counter() - began)
        return self.result


class Progress:
    """The outstanding operations of one rank."""

    def __init__(self) -> None:
        self._pending: list[Pending] = []

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
            activity = communicator.activity()
            if any([self._advance(pending) for pending in tuple(self._pending)]):
                idle, look_after = 0, perf_counter() - began + LOOK_AFTER
                continue
            idle += 1
            communicator.pause(idle, activity)
            waited = perf_counter() - began
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
        try:
            moved = pending.advance()
        except Exception as error:
            pending.error, moved = error, True
        if (pending.done or pending.error) and pending in self._pending:
            self._pending.remove(pending)
        return moved
