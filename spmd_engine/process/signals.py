"""SIGINT (Ctrl-C), SIGTERM and SIGUSR1: a flag while there is something to save first, otherwise an exception."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from time import monotonic
from types import FrameType, TracebackType
from typing import Any

AGAIN = 1.0  #: seconds within which a second signal is the first one's echo: launchers and shells may both send it

#: What ends a program. Batch systems send SIGTERM, or SIGUSR1, some time before they take the machine away.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
REQUEUE = 75  #: exit code of a job that has saved and is to be queued again; EX_TEMPFAIL of sysexits.h


class Interrupted(KeyboardInterrupt):
    """A signal ends the program at once, wherever it is."""

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.number = number


def exit_code(error: KeyboardInterrupt) -> int:
    """That of a program which a signal ended, as shells count it: 130 for SIGINT, 143 for SIGTERM, 138 for SIGUSR1."""
    return 128 + getattr(error, "number", signal.SIGINT)


class Handlers:
    """``with Handlers(handle): ...``: the ENDING signals call ``handle(number, frame)`` meanwhile.

    A signal that is ignored, as shells have it for jobs in the background, stays so. Python gives signals to the main
    thread alone; on another, a virtual rank's, nothing changes.
    """

    def __init__(self, handle: Callable[[int, FrameType | None], None]) -> None:
        self._handle = handle
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in ENDING:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):  # None: not set by Python
                    self._previous[number] = signal.signal(number, self._handle)

    def __exit__(self, *error: object) -> None:
        while self._previous:
            signal.signal(*self._previous.popitem())


def raise_interrupted() -> Handlers:
    """Meanwhile the ENDING signals raise Interrupted."""

    def handle(number: int, frame: FrameType | None) -> None:
        raise Interrupted(number)

    return Handlers(handle)


class StopFlag:
    """While open, the ENDING signals are only noted in ``received``, so that work in steps can end after one of them.

    A second signal, unless it follows within AGAIN seconds, raises Interrupted at once. So does closing the flag, if
    a signal has come of which nobody took notice with ``take``.
    """

    def __init__(self) -> None:
        self.received = 0  #: the number of the signal that this process got; 0 for none
        self.taken = 0  #: the number of the signal for which the work ends
        self._since = 0.0
        self._handlers = Handlers(self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.received:
            self.received, self._since = number, monotonic()
        elif monotonic() - self._since > AGAIN:
            raise Interrupted(number)

    def take(self, number: int) -> None:
        """The work ends for signal ``number``, which perhaps another rank got; 0 for none."""
        if number and not self.taken:
            self.taken = number
            if not self.received:
                self.received, self._since = number, monotonic()

    def __enter__(self) -> StopFlag:
        self._handlers.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._handlers.__exit__()
        if self.received and not self.taken and kind is None:
            raise Interrupted(self.received)
