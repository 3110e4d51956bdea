"""Signals that end a program: a flag while there is something to save, otherwise an exception."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from types import FrameType, TracebackType
from typing import Any

AGAIN = 1.0  #: seconds within which a second signal repeats the first: launchers and shells may both send it

#: Ctrl-C, kill, the warning of batch systems before a time limit, and a closed terminal.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
REQUEUE = 75  #: exit code that asks for requeueing; EX_TEMPFAIL of sysexits.h


class Interrupted(KeyboardInterrupt):
    """A signal ends the program at once, wherever it is."""

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.number = number


def exit_code(error: KeyboardInterrupt, arguments: Sequence[str] = ()) -> int:
    """The exit code after a signal: 128 + its number (130 for SIGINT, 143 for SIGTERM).

    With --requeue among the program's ``arguments`` it is REQUEUE, except for SIGINT, which a user sends.
    """
    number = getattr(error, "number", signal.SIGINT)
    return REQUEUE if "--requeue" in arguments and number != signal.SIGINT else 128 + number


class Handlers:
    """``with Handlers(handle): ...``: in this context the ENDING signals call ``handle(number, frame)``.

    A signal that is ignored, as in background jobs of a shell, stays ignored, and with ``but_defaults`` a signal with
    the system's default action keeps it. Python gives signals to the main thread alone; on another thread, such as a
    virtual rank's, nothing changes. Where Python cannot raise an Interrupted (in a callback from C, in ``__del__``),
    its signal is sent again a moment later.
    """

    def __init__(self, handle: Callable[[int, FrameType | None], None], but_defaults: bool = False) -> None:
        self._handle = handle
        self._stay = (signal.SIG_IGN, None, *([signal.SIG_DFL] if but_defaults else []))  # None: not set by Python
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._hook, sys.unraisablehook = sys.unraisablehook, self._send_again
            for number in ENDING:
                if signal.getsignal(number) not in self._stay:
                    self._previous[number] = signal.signal(number, self._handle)

    def __exit__(self, *error: object) -> None:
        if threading.current_thread() is threading.main_thread():
            while self._previous:
                signal.signal(*self._previous.popitem())
            sys.unraisablehook = self._hook

    def _send_again(self, unraisable: sys.UnraisableHookArgs) -> None:
        if isinstance(unraisable.exc_value, Interrupted):
            timer = threading.Timer(0.05, os.kill, (os.getpid(), unraisable.exc_value.number))
            timer.daemon = True
            timer.start()
        else:
            self._hook(unraisable)


def raise_interrupted() -> Handlers:
    """Handlers with which the ENDING signals raise Interrupted."""

    def handle(number: int, frame: FrameType | None) -> None:
        raise Interrupted(number)

    return Handlers(handle)


class StopFlag:
    """While open, the ENDING signals are only recorded in ``received``, so that work in steps can end after a step.

    A second signal, unless it follows within AGAIN seconds, raises Interrupted at once. So does the first one while
    there is nothing ``to_save``, and closing the flag after a signal without a call of ``take``.
    ``but_defaults``: see ``Handlers``.
    """

    def __init__(self, to_save: bool = True, but_defaults: bool = False) -> None:
        self.to_save = to_save
        self.received = 0  #: the number of the signal that this process received; 0 for none
        self.taken = 0  #: the number of the signal for which the work ends
        self._since = 0.0
        self._handlers = Handlers(self._note, but_defaults)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.to_save:
            raise Interrupted(number)
        if not self.received:
            self.receive(number)
        elif monotonic() - self._since > AGAIN:
            raise Interrupted(number)

    def receive(self, number: int) -> None:
        """Record a signal that this process, or one that reports it here, has received; the first one counts."""
        if number and not self.received:
            self.received, self._since = number, monotonic()

    def take(self, number: int) -> None:
        """Record that the work ends for signal ``number``, which another rank may have received; 0 for none."""
        if number and not self.taken:
            self.taken = number
            self.receive(number)

    def __enter__(self) -> StopFlag:
        self._handlers.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._handlers.__exit__()
        if self.received and not self.taken and kind is None:
            raise Interrupted(self.received)
