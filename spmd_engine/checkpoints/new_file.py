"""A new file of a known size that threads fill side by side, written past the system's cache where that can be.

What is written as usual is copied into that cache first, which takes a core as long as a fast disk takes to store it,
and drives out what others have there. What is written directly (O_DIRECT) is not copied; it has to lie in memory, and
in the file, at whole pages. So the file is made in windows of memory, and each is written when it is full.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from dataclasses import dataclass
from mmap import PAGESIZE, mmap
from pathlib import Path
from threading import Condition

import numpy as np

WINDOW = 2 << 20  #: bytes that are written at once
AHEAD = 4  #: windows in memory
PAGE = max(4096, PAGESIZE)  #: bytes; what disks and systems want direct writes to be multiples of


@dataclass
class _Window:
    memory: np.ndarray  #: bytes, from the beginning of a page on
    missing: int  #: bytes, until it is full


class NewFile:
    """``put`` every byte of it once, from any thread; who brings the last one sees the file onto the disk.

    Bytes must be put about in their order: who comes with later ones waits for memory until earlier ones are written.
    If some will never come, ``fail`` frees those who wait. Raises OSError where the file cannot be made.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._size, self._count = size, -(-size // WINDOW)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._is_direct = self._set_direct(True)
        self._changed = Condition()
        self._windows: dict[int, _Window] = {}  # that are being filled, or written
        self._spare: list[np.ndarray] = []  # memory that has been written
        self._written = [False] * self._count
        self._first = 0  # window that is not written
        self._error: BaseException | None = None

    def put(self, offset: int, data: np.ndarray) -> None:
        """These bytes belong there. Raises OSError where they cannot be written, and what others failed of."""
        while data.size:
            number, begin = divmod(offset, WINDOW)
            part = data[: WINDOW - begin]
            window = self._window(number)
            window.memory[begin : begin + part.size] = part
            with self._changed:
                window.missing -= part.size
                is_full = not window.missing
            if is_full:
                self._write(number, window.memory)
            offset, data = offset + part.size, data[part.size :]

    def fail(self, error: BaseException) -> None:
        """Some bytes will not come: whoever waits, or puts more, is told the first such error."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def close(self) -> None:
        """Nobody may be at work on it any more."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _window(self, number: int) -> _Window:
        """That window, as soon as there may be memory for it."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or number < self._first + AHEAD)
            if self._error:
                raise self._error
            if number not in self._windows:
                size = min(WINDOW, self._size - number * WINDOW)
                memory = self._spare.pop() if self._spare else _pages(min(WINDOW, self._size))
                self._windows[number] = _Window(memory, size)
            return self._windows[number]

    def _write(self, number: int, memory: np.ndarray) -> None:
        offset = number * WINDOW
        data = memoryview(memory[: _whole_pages(min(WINDOW, self._size - offset))])
        done = 0
        while done < len(data):
            was_direct = self._is_direct
            try:
                done += os.pwrite(self._descriptor, data[done:], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not was_direct:
                    raise
                self._is_direct = self._set_direct(False)  # of some file systems only the first writes tell
        if not self._is_direct and hasattr(os, "posix_fadvise"):  # to the disk from now on, not when all are waited for
            with suppress(OSError):
                os.posix_fadvise(self._descriptor, offset, done, os.POSIX_FADV_DONTNEED)
        with self._changed:
            self._spare.append(self._windows.pop(number).memory)
            self._written[number] = True
            while self._first < self._count and self._written[self._first]:
                self._first += 1
            is_last = self._first == self._count and not self._windows
            self._changed.notify_all()
        if is_last:
            self._spare.clear()
            os.ftruncate(self._descriptor, self._size)
            os.fsync(self._descriptor)
            self.close()

    def _set_direct(self, wanted: bool) -> bool:
        """Whether, from now on, what is written goes past the cache; not all file systems can."""
        direct = getattr(os, "O_DIRECT", 0)
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        with suppress(OSError):
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | direct if wanted else flags & ~direct)
            return wanted and direct != 0
        return False


def _pages(size: int) -> np.ndarray:
    """Memory for so many bytes, in whole pages."""
    return np.frombuffer(mmap(-1, _whole_pages(size)), np.uint8)


def _whole_pages(size: int) -> int:
    return size + -size % PAGE
