"""``OffloadTarget``: a place where arrays live while they are not in use; and the targets that are not files."""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from mmap import mmap
from threading import RLock
from typing import Any, TypeVar, cast

import numpy as np

from spmd_engine.arrays import CPU, Backend
from spmd_engine.arrays.memory import address_of
from spmd_engine.arrays.meta.array import ShapedArray
from spmd_engine.arrays.meta.meter import Memory, meter
from spmd_engine.errors import UsageError
from spmd_engine.units import readable_bytes

T = TypeVar("T")

PIECE = 2 << 20  #: bytes that are read or written at once
PAGE = 4096  #: bytes: reads and writes begin and end at multiples of them
THREADS = 3  #: threads of a target: one reads ahead while others write behind


class OffloadError(UsageError):
    """The place of offloaded arrays is full, or cannot be read or written."""


class OffloadTarget(ABC):
    """A space of bytes, in whole pages, with the threads that read and write it.

    A target of your own is a class, made from a folder and the backend of the arrays, that defines ``where``, ``grow``,
    ``read`` and ``write``, and perhaps ``remedy`` and ``needs_device``; it has a line in ``TARGETS``
    (``offload/config.py``). An OSError or MemoryError of these becomes an OffloadError that says where, and what to do.
    """

    where: str  #: the beginning of errors: "offload file in /data"
    remedy: str = "Free space"
    needs_device: bool = False  #: whether only arrays of a device can live there
    piece = PIECE
    smallest = 1 << 14  #: bytes: smaller arrays among saved activations stay in memory
    has_bytes = True  #: False in a dry run, in which arrays are shapes
    arrays: type = np.ndarray  #: the type of saved activations that live there

    @abstractmethod
    def grow(self, offset: int, size: int) -> None:
        """Make room for ``size`` bytes of zeros, whole pages, from ``offset``, the end, on."""

    @abstractmethod
    def read(self, offset: int, view: memoryview) -> int:
        """Fill the beginning of ``view``, at least a byte, from ``offset`` on; return how many bytes. Several threads
        call it at the same time, also while others write elsewhere."""

    @abstractmethod
    def write(self, offset: int, view: memoryview) -> int:
        """As ``read``, in the other direction."""

    def __init__(self, folder: str = ".", backend: Backend = CPU) -> None:
        """A target in this folder, of ``--offload-dir``, for arrays of the backend: a subclass uses what it needs."""
        self._end, self._free, self._lock = 0, dict[int, list[int]](), RLock()
        #: memory of a piece each, for reads and writes, while nothing uses it
        self.buffers = deque[np.ndarray]()
        self._threads = ThreadPoolExecutor(THREADS, "offload")

    # --- space

    def reserve(self, size: int, *, zeros: bool = False) -> int:
        """The offset of ``size`` bytes, rounded up to pages, that nothing else uses; all ``zeros``, or of any value.

        Raises OffloadError if there is no room.
        """
        size = pages(size)
        with self._lock:
            if self._free.get(size) and not zeros:
                return self._free[size].pop()
            offset, self._end = self._end, self._end + size
        if size:
            with self._named_errors(f"cannot hold {readable_bytes(self._end)} of offloaded arrays"):
                self.grow(offset, size)
        return offset

    def give_back(self, offset: int, size: int) -> None:
        """Let others use bytes that ``reserve`` returned."""
        with self._lock:
            self._free.setdefault(pages(size), []).append(offset)

    # --- transfers, on the threads

    def submit(self, call: Callable[..., T], *arguments: Any, **options: Any) -> Future[T]:
        """Call a function on one of the threads."""
        return self._threads.submit(call, *arguments, **options)

    def start_read(self, offset: int, into: Any) -> Future[Any]:
        """Begin to fill a contiguous array; the result is the array."""
        return self.submit(self.read_all, offset, into)

    def start_load(self, offset: int, size: int) -> Future[Any]:
        """Begin to fill new memory of this size, which this thread allocates: the heap of another would keep as much
        freed memory again. The result is the memory."""
        return self.submit(self.read_all, offset, np.empty(size, np.uint8))

    def start_store(self, offset: int, memory: Any) -> Future[None]:
        """Begin to write the whole memory of an array, to whole pages."""
        return self.submit(self.write_all, offset, bytes_of(memory))

    def read_all(self, offset: int, data: np.ndarray) -> np.ndarray:
        """Fill ``data`` with the bytes from any offset on."""
        self.transfer(offset, bytes_of(data), writes=False)
        return data

    def write_all(self, offset: int, data: np.ndarray) -> None:
        """Write bytes from the beginning of a page on; the rest of the last page is undefined."""
        self.transfer(offset, data, writes=True, keeps_rest=False)

    def transfer(self, start: int, data: np.ndarray, *, writes: bool, keeps_rest: bool = True) -> None:
        """Read or write the bytes of ``data``, from any offset on: at once if they are whole pages, else page by page
        through a buffer. What a page holds besides stays, with ``keeps_rest``."""
        if not (start % PAGE or len(data) % PAGE or address_of(data) % PAGE):
            self._move(start, data, writes)
            return
        buffer, end = self.take_buffer(), start + len(data)
        for first in range(start // PAGE * PAGE, end, self.piece):
            part = buffer[: min(self.piece, pages(end) - first)]
            begin, stop = max(first, start), min(first + len(part), end)
            if not writes or keeps_rest and (begin, stop) != (first, first + len(part)):
                self._move(first, part, writes=False)
            within, place = part[begin - first : stop - first], data[begin - start : stop - start]
            if writes:
                within[...] = place
                self._move(first, part, writes=True)
            else:
                place[...] = within
        self.buffers.append(buffer)

    def take_buffer(self) -> np.ndarray:
        """One of the ``buffers``, to which it returns after use, or a new one, which begins at a page."""
        with suppress(IndexError):
            return self.buffers.pop()
        return np.frombuffer(cast(Any, mmap(-1, self.piece)), np.uint8)

    def _move(self, offset: int, buffer: np.ndarray, writes: bool) -> None:
        """Read or write whole pages."""
        move, view, done = self.write if writes else self.read, memoryview(cast(Any, buffer)), 0
        with self._named_errors(f"cannot be {'written' if writes else 'read'}"):
            while done < len(view):
                moved = move(offset + done, view[done:])
                if moved <= 0:
                    raise OSError(errno.EIO, f"the file ends before byte {offset + len(view)}")
                done += moved

    @contextmanager
    def _named_errors(self, why: str) -> Iterator[None]:
        """In this context errors of the methods that a target defines become an OffloadError."""
        try:
            yield
        except (OSError, MemoryError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise OffloadError(
                f"{self.where}: it {why} ({reason}). {self.remedy}, and continue from the last checkpoint (--resume)"
            ) from error


def pages(size: int) -> int:
    """A number of bytes, rounded up to whole pages."""
    return -(-size // PAGE) * PAGE


def bytes_of(memory: np.ndarray) -> np.ndarray:
    """The bytes of an array that is contiguous, by rows or by columns."""
    return (memory if memory.flags.c_contiguous else memory.T).reshape(-1).view(np.uint8)


# --- Memory of the host, for arrays of a device


class HostTarget(OffloadTarget):
    """Pinned memory, from which the device copies fastest."""

    where, remedy, needs_device = "memory of the host", "Use --offload-to disk", True

    def __init__(self, folder: str, backend: Backend) -> None:
        super().__init__()
        self._pinned, self._blocks = backend.pinned_empty, dict[int, np.ndarray]()

    def grow(self, offset: int, size: int) -> None:
        block = self._pinned(size, np.uint8)
        block[...] = 0
        self._blocks[offset] = block

    def read(self, offset: int, view: memoryview) -> int:
        np.asarray(view)[...] = self._block(offset, len(view))
        return len(view)

    def write(self, offset: int, view: memoryview) -> int:
        self._block(offset, len(view))[...] = np.asarray(view)
        return len(view)

    def _block(self, offset: int, size: int) -> np.ndarray:
        first = max(start for start in tuple(self._blocks) if start <= offset)
        return self._blocks[first][offset - first : offset - first + size]


# --- In a dry run: shapes without bytes, whose transfers are counted


class ShapesTarget(OffloadTarget):
    """No place: what is read and written counts on the meter of the rank."""

    where, has_bytes, arrays = "dry run", False, ShapedArray
    smallest = 1  # what a layer saves is one array here

    def __init__(self, holds_buffers: bool = False) -> None:
        """``holds_buffers``: whether its threads' buffers are always in memory, as with offloaded activations."""
        super().__init__()
        size = THREADS * self.piece * holds_buffers
        self._held = meter().allocate(size, "communication buffers", "offload")

    def grow(self, offset: int, size: int) -> None:
        """Shapes need no room."""

    def read(self, offset: int, view: memoryview) -> int:
        meter().transfer(len(view), 0)
        return len(view)

    def write(self, offset: int, view: memoryview) -> int:
        meter().transfer(0, len(view))
        return len(view)

    def start_read(self, offset: int, into: ShapedArray) -> Future[ShapedArray]:
        meter().transfer(into.nbytes, 0)
        return _done(into)

    def start_load(self, offset: int, size: int) -> Future[Memory]:
        with meter().taking("activations", "read ahead"):
            return _CountedWhenNeeded(meter().allocate(size))

    def start_store(self, offset: int, memory: Memory) -> Future[None]:
        meter().transfer(0, memory.nbytes)
        return _done(None)


def _done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


class _CountedWhenNeeded(Future[Memory]):
    """A read that counts once a rank waits for it, as the simulation of a step expects."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self.set_result(memory)

    def result(self, timeout: float | None = None) -> Memory:
        memory = super().result(timeout)
        meter().transfer(memory.nbytes, 0)
        return memory
