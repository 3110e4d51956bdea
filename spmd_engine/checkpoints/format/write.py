"""Writing safetensors files of blocks: each contiguous, hashed and looked at on the way, and seen onto the disk.

The format: eight bytes that say how long the header is, the header (JSON: of each block dtype, shape, and where it
lies behind the header), and the blocks, without gaps. Written here and not by its library, which hashes nothing, and
which writes arrays scrambled that are not contiguous (safetensors 0.8).
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from mmap import PAGESIZE, mmap
from pathlib import Path
from threading import Condition
from typing import NamedTuple

import numpy as np

from spmd_engine.arrays.backend import Array
from spmd_engine.checkpoints.format.blocks import DTYPES, IN_CACHE, dtype_name, host_array, is_finite
from spmd_engine.errors import CheckpointError

WRITERS = 3  #: threads of a rank: while one waits for the disk, two hash, of which one is slower than many disks
AT_ONCE = 16  #: blocks that are held, until they have been written


class BlockToWrite(NamedTuple):
    """A block to be written: what it is, known before it is there."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], Array]


class Written(NamedTuple):
    """Where a block lies in its file."""

    dtype: str  #: as files call it
    offset: int  #: bytes from the file's beginning
    sha256: str  #: of its bytes


def write_files(files: Mapping[Path, Sequence[BlockToWrite]], facts: Mapping[str, str]) -> list[list[Written]]:
    """Write new files of blocks, one after the other, each with a name of its own in its file, and see them onto disk.

    Threads hash the blocks, look at their values, and write them: what takes longer, the disk or they, is what files
    take. Raises OSError where one cannot be written, and CheckpointError for a value that is not finite; files are then
    left as they are.
    """
    opened: list[NewFile] = []
    try:
        with ThreadPoolExecutor(WRITERS, "writing") as threads:
            try:
                begun = [_begin(path, blocks, facts, threads, opened) for path, blocks in files.items()]
                return [[Written(dtype, offset, hashed.result()) for dtype, offset, hashed in each] for each in begun]
            except BaseException as error:  # also Ctrl-C: what has not begun need not be written any more
                threads.shutdown(wait=False, cancel_futures=True)
                for each in opened:
                    each.fail(error)
                raise
    finally:  # no thread is at work on them
        for each in opened:
            each.close()


def _begin(
    path: Path,
    blocks: Sequence[BlockToWrite],
    facts: Mapping[str, str],
    threads: ThreadPoolExecutor,
    opened: list[NewFile],
) -> list[tuple[str, int, Future[str]]]:
    """Have threads write a file, which is added to ``opened``: of each block dtype, offset, and its hash to be."""
    dtypes = [dtype_name(block.dtype, block.name) for block in blocks]
    head = header([(block.name, dtype, block.shape) for block, dtype in zip(blocks, dtypes, strict=True)], facts)
    offsets = [len(head)]
    for block, dtype in zip(blocks, dtypes, strict=True):
        offsets.append(offsets[-1] + _nbytes(dtype, block.shape))
    file = NewFile(path, offsets[-1])
    opened.append(file)
    file.put(0, np.frombuffer(head, np.uint8))
    hashes: list[Future[str]] = []
    for block, offset in zip(blocks, offsets, strict=False):
        if len(hashes) >= AT_ONCE:
            hashes[-AT_ONCE].result()
        hashes.append(threads.submit(_write, file, offset, block.name, host_array(block.read())))
    return list(zip(dtypes, offsets[:-1], hashes, strict=True))


def _write(file: NewFile, offset: int, name: str, host: np.ndarray) -> str:
    """Put an array into its place, some of it at a time, which is hashed and looked at while it is in the cache.

    Returns the SHA-256 of its bytes; raises CheckpointError for a value that is not finite.
    """
    digest, flat = hashlib.sha256(), host.reshape(-1)
    try:
        for first in range(0, flat.size, IN_CACHE // host.itemsize):
            part = flat[first : first + IN_CACHE // host.itemsize]
            as_bytes = part.view(np.uint8)
            digest.update(as_bytes.data)
            if not is_finite(part):
                raise CheckpointError(f"{name} has values that are not finite: not saved")
            file.put(offset + first * host.itemsize, as_bytes)
    except BaseException as error:
        file.fail(error)
        raise
    return digest.hexdigest()


def header(blocks: Sequence[tuple[str, str, Sequence[int]]], facts: Mapping[str, str]) -> bytes:
    """The first bytes of a file of blocks: name, dtype and shape of each, in the order in which they follow."""
    described: dict[str, object] = {"__metadata__": dict(facts)}
    end = 0
    for name, dtype, shape in blocks:
        begin, end = end, end + _nbytes(dtype, shape)
        described[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the blocks are aligned
    return len(text).to_bytes(8, "little") + text


def _nbytes(dtype: str, shape: Sequence[int]) -> int:
    return prod(shape) * DTYPES[dtype].itemsize


# --- A new file of a known size that threads fill side by side, written past the system's cache where that can be
#
# What is written as usual is copied into that cache first, which takes a core as long as a fast disk takes to store
# it, and drives out what others have there. What is written directly (O_DIRECT) is not copied; it has to lie in
# memory, and in the file, at whole pages. So the file is made in windows of memory, and each is written when it is
# full.


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
        """Close the file, on which no thread may be working any more."""
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
        data = memory[: _whole_pages(min(WINDOW, self._size - offset))].data
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
