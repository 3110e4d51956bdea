"""Output that does not matter enough to end a program: what cannot be written is lost, and the program goes on."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO


class LossyStream:
    """A text stream that loses what it cannot write: its reader has ended, its terminal is closed, its disk is full."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, write: Callable[[], object]) -> None:
        try:
            write()
        except OSError:
            with suppress(OSError):
                self._empty_buffer()

    def _empty_buffer(self) -> None:
        """Write what the stream still holds to /dev/null: it would fail again, at the latest when the program ends."""
        number = self._stream.fileno()
        kept, null = os.dup(number), os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, number)
            self._stream.flush()
        finally:
            os.dup2(kept, number)
            os.close(kept)
            os.close(null)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def lossy_output(*names: str) -> Iterator[None]:
    """In this context ``sys.stdout`` or ``sys.stderr``, by these names, lose what they cannot write.

    Standard streams that were closed when the program started become /dev/null.
    """
    for name, mode in {"stdin": "r", "stdout": "w", "stderr": "w"}.items():
        if getattr(sys, name) is None:  # in this order each gets its own number, and no file of the job does
            setattr(sys, name, open(os.devnull, mode))
    before = {name: getattr(sys, name) for name in names}
    lossy = {name: LossyStream(stream) for name, stream in before.items()}
    for name, stream in lossy.items():
        setattr(sys, name, stream)
    try:
        yield
    finally:
        for name, stream in lossy.items():
            stream.flush()
            if getattr(sys, name) is stream:
                setattr(sys, name, before[name])
