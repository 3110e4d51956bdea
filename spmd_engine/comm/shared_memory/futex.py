"""Sleep until another rank of the node wakes this one: by futexes in shared memory on Linux, otherwise by polling."""

from __future__ import annotations

import ctypes
import platform
import threading
import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from spmd_engine.arrays.memory import address_of

_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}  # system call numbers
_WAIT, _WAKE = 0, 1
STRONG = ("x86_64", "AMD64", "i686", "i386")  # machines on which other cores see writes in program order


class Waker(Protocol):
    """Wakes ranks that sleep until the slot table changes: Futexes, or events between threads."""

    weak: bool  #: whether other cores may see writes in another order than that of the program

    def fence(self) -> None: ...

    def anyone_sleeps(self) -> bool: ...

    def wake(self, local_ranks: Sequence[int]) -> None: ...


class Futexes:
    """One word for each of a node's ranks, 1 while that rank sleeps or is about to.

    Before a rank sleeps it sets its word (``prepare_to_sleep``) and tests its condition once more. A rank that changes
    shared memory writes first and then wakes the ranks with set words. A full fence lies between setting and testing,
    and between writing and waking: so either the first rank sees the change, or the second sees the set word.
    """

    def __init__(self, words: memoryview, local_rank: int) -> None:
        self._bytes, self._words, self._rank = words, words.cast("i"), local_rank
        self._address = address_of(np.frombuffer(words, np.uint8))
        self._all_awake = bytes(len(words))
        self._futex = _futex()
        self._lock = threading.Lock()
        self.weak = platform.machine() not in STRONG

    def fence(self) -> None:
        """Full memory fence.

        Taking and releasing a lock is a full fence on x86. On other machines accesses before and after may move
        into the locked region; locking twice prevents both.
        """
        lock = threading.Lock()  # a new one: that of ``anyone_sleeps`` stays locked if an interrupt comes there
        for _ in range(1 + self.weak):
            with lock:
                pass

    def prepare_to_sleep(self) -> None:
        self._words[self._rank] = 1
        self.fence()

    def sleep(self, seconds: float) -> None:
        """Return when woken, after ``seconds``, or spuriously earlier."""
        self._futex(self._address + 4 * self._rank, _WAIT, 1, seconds)
        self._words[self._rank] = 0

    def anyone_sleeps(self) -> bool:
        """Whether some rank of the node may sleep without having seen earlier writes."""
        if not self.weak and self._lock.acquire(False):  # as ``fence``, in half the time of ``with``
            self._lock.release()
        else:
            self.fence()
        return self._bytes.tobytes() != self._all_awake

    def wake(self, local_ranks: Sequence[int]) -> None:
        for rank in local_ranks:
            if self._words[rank]:
                self._words[rank] = 0
                self._futex(self._address + 4 * rank, _WAKE, 1, None)


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def _futex():
    """The system call futex(address, operation, value, seconds), or a substitute."""
    number = _FUTEX.get(platform.machine())
    if number is None or platform.system() != "Linux":
        return lambda address, operation, value, seconds: seconds and time.sleep(min(seconds, 1e-3))
    call = ctypes.CDLL(None).syscall
    call.restype = ctypes.c_long
    arguments = [ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    call.argtypes = [*arguments, ctypes.c_void_p, ctypes.c_int]

    def futex(address: int, operation: int, value: int, seconds: float | None) -> None:
        limit = _Timespec(int(seconds), int(seconds % 1 * 1e9)) if seconds is not None else None
        call(number, address, operation, value, ctypes.addressof(limit) if limit is not None else None, None, 0)

    return futex
