"""Writing safetensors files: blocks are made contiguous, hashed, checked for finite values, and flushed to the disk.

A file consists of the length of the header (eight bytes), the header (JSON: the dtype, shape and offset behind the
header of each block), and the blocks, without gaps. The format's library (safetensors 0.8) is not used, because it
computes no hashes and scrambles arrays that are not contiguous.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from mmap import PAGESIZE
from pathlib import Path
from threading import Condition
from typing import NamedTuple

import numpy as np

from spmd_engine.arrays.backend import Array
from spmd_engine.arrays.memory import address_of
from spmd_engine.checkpoints.format.blocks import HASH, IN_CACHE, dtype_name, host_array, is_finite
from spmd_engine.errors import CheckpointError
from spmd_engine.formats.safetensors_header import header

WRITERS = 3  #: threads of a rank: one waits for the disk while two hash, because one is slower than many disks
AT_ONCE = 16  #: blocks in memory that are not yet written


class BlockToWrite(NamedTuple):
    """A block to be written; its name, shape and dtype are known before ``read`` returns its elements."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], Array]


#: The name of the last tensor of a file, U8[blocks 32]: the SHA-256 of each block before it.
HASHES = "sha256"


def write_files(files: Mapping[Path, Sequence[BlockToWrite]], facts: Mapping[str, str]) -> list[tuple[int, bytes]]:
    """Write new files of blocks one after the other, and flush them to the disk. Block names are unique in a file.

    Returns, for each file, the byte at which its first block begins, and the SHA-256 of the hashes of its blocks.

    A file takes memory for at most ``AHEAD`` windows until it is written, besides copies of blocks on a device and of
    those that are not contiguous. Threads hash, check and write the blocks while the disk works; the slower of the two
    sets the time. Raises OSError if a file cannot be written, and CheckpointError for a value that is not finite;
    incomplete files then remain.
    """
    files_begun: list[NewFile] = []
    try:
        with ThreadPoolExecutor(WRITERS, "writing") as threads:
            try:
                # the next begins when the windows of this one are free
                begun = [_begin(path, blocks, facts, threads, files_begun) for path, blocks in files.items()]
                return [(first, digest.result()) for first, digest in begun]
            except BaseException as error:  # also Ctrl-C: writes that have not begun are cancelled
                threads.shutdown(wait=False, cancel_futures=True)
                for file in files_begun:
                    file.fail(error)
                raise
    finally:  # all threads have ended
        for file in files_begun:
            file.close()


def _begin(
    path: Path,
    blocks: Sequence[BlockToWrite],
    facts: Mapping[str, str],
    threads: ThreadPoolExecutor,
    opened: list[NewFile],
) -> tuple[int, Future[bytes]]:
    """Begin to write a file on threads and add it to ``opened``. Return as ``write_files``, in the future."""
    tensors = [(block.name, dtype_name(block.dtype, block.name), block.shape) for block in blocks]
    head, offsets = header([*tensors, (HASHES, "U8", (len(blocks), HASH))], facts)
    file = NewFile(path, offsets[-1])
    opened.append(file)
    file.put(0, np.frombuffer(head, np.uint8))
    hashes: list[Future[bytes]] = []
    for block, offset in zip(blocks, offsets, strict=False):
        if len(hashes) >= AT_ONCE:
            hashes[-AT_ONCE].result()
        hashes.append(threads.submit(_write, file, offset, block.name, host_array(block.read())))
    # Threads take tasks in order: all blocks of the file are written, or being written, when this one begins.
    return offsets[0], threads.submit(_write_hashes, file, offsets[-2], hashes)


def _write_hashes(file: NewFile, offset: int, hashes: Sequence[Future[bytes]]) -> bytes:
    """Write the hashes of a file's blocks behind them, and return the SHA-256 of all."""
    try:
        table = b"".join(digest.result() for digest in hashes)
        file.put(offset, np.frombuffer(table, np.uint8))
    except BaseException as error:
        file.fail(error)
        raise
    return hashlib.sha256(table).digest()


def _write(file: NewFile, offset: int, name: str, host: np.ndarray) -> bytes:
    """Write an array to its place in parts, each of which is hashed and checked while it is in the processor's cache.

    Returns the SHA-256 of its bytes. Raises CheckpointError for a value that is not finite.
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
    return digest.digest()


# --- A new file of a known size that threads fill in parallel, written past the system's page cache if possible
#
# A normal write copies data into the page cache first. That takes a core as long as a fast disk takes to store them,
# and evicts other pages. A direct write (O_DIRECT) copies nothing, but its data must be aligned to pages in memory and
# in the file. So threads fill windows of memory, and each window is written when it is full.


WINDOW = 2 << 20  #: bytes of one write
AHEAD = 4  #: windows in memory
PAGE = max(4096, PAGESIZE)  #: bytes; disks and systems require direct writes of whole multiples


@dataclass
class _Window:
    memory: np.ndarray  #: bytes; begins at a page
    missing: int  #: bytes that are not yet filled


class NewFile:
    """``put`` every byte once, from any thread; the thread that puts the last one flushes the file to the disk.

    Bytes must be put approximately in order: later ones wait for memory until earlier ones are written. If some bytes
    will never be put, ``fail`` releases the waiting threads. Raises OSError if the file cannot be created.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._size, self._count = size, -(-size // WINDOW)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._is_direct = self._set_direct(True)
        self._changed = Condition()
        self._windows: dict[int, _Window] = {}  # windows that are being filled or written
        #: Memory of windows that are not in use. It is from the heap of the thread that opens the file: for the main
        #: thread, that is what the last step has freed.
        self._spare = [_pages(min(WINDOW, size)) for _ in range(min(AHEAD, self._count))]
        self._written = [False] * self._count
        self._first = 0  # the first window that is not written
        self._error: BaseException | None = None

    def put(self, offset: int, data: np.ndarray) -> None:
        """Copy ``data`` to byte ``offset``. Raises OSError if a write fails, or the error of another thread."""
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
        """Report that some bytes will not be put: all threads that wait or put more raise the first such error."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def close(self) -> None:
        """Close the file. No thread may use it any more."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _window(self, number: int) -> _Window:
        """The window of this number; waits until there is memory for it."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or number < self._first + AHEAD)
            if self._error:
                raise self._error
            if number not in self._windows:
                size = min(WINDOW, self._size - number * WINDOW)
                self._windows[number] = _Window(self._spare.pop(), size)
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
                self._is_direct = self._set_direct(False)  # some systems fail only at the first write
        if not self._is_direct and hasattr(os, "posix_fadvise"):  # write it to the disk now, not at the final fsync
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
        """Switch direct writes on or off; return whether they are on, since not all file systems support them."""
        direct = getattr(os, "O_DIRECT", 0)
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        with suppress(OSError):
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | direct if wanted else flags & ~direct)
            return wanted and direct != 0
        return False


def _pages(size: int) -> np.ndarray:
    """Memory for ``size`` bytes, aligned to and in whole pages."""
    memory = np.empty(PAGE + _whole_pages(size), np.uint8)
    first = -address_of(memory) % PAGE
    return memory[first : first + _whole_pages(size)]


def _whole_pages(size: int) -> int:
    return size + -size % PAGE
