"""Arrays that live in a file while they are not in use: optimizer state, saved activations.

After Rajbhandari et al., "ZeRO-Infinity" (2021). The file has no name: it is unlinked as soon as it is open, so that it
vanishes with its process, also a killed one, and nobody can remove it in the meantime. Its space is reserved before it
is used. Threads move pieces between the file and aligned buffers by explicit reads and writes, past the system's page
cache, which would count against the memory limit of the job. A memory map would end a process by SIGBUS on a full disk.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from mmap import mmap
from pathlib import Path
from threading import RLock
from typing import Any, TypeVar, cast
from uuid import uuid4
from weakref import WeakValueDictionary, finalize, ref

import numpy as np

from spmd_engine.arrays.backend import Array, Backend, backend_of
from spmd_engine.arrays.fused import alike
from spmd_engine.arrays.memory import address_of
from spmd_engine.arrays.meta.array import has_shapes_only
from spmd_engine.arrays.meta.meter import meter
from spmd_engine.axes import PIPE, count_ranks
from spmd_engine.comm.pending import Pending
from spmd_engine.errors import UsageError
from spmd_engine.requirements import Case, effect_if, requirement
from spmd_engine.units import readable_bytes

T = TypeVar("T")

PIECE = 2 << 20  #: bytes that are read or written at once
PAGE = 4096  #: bytes: direct reads and writes begin and end at multiples of them
THREADS = 3  #: of a file: one reads ahead while others write behind
KINDS = ("optimizer", "parameters", "activations")
PLACES = ("disk", "host")


class OffloadError(UsageError):
    """The disk of offloaded arrays is full, or cannot be read or written."""


@dataclass(frozen=True)
class Offload:
    """What lives elsewhere while it is not in use: some of ``KINDS``, in a file in this ``folder``, or on the host."""

    kinds: tuple[str, ...] = ()
    folder: str = "."
    to: str = "disk"  #: one of ``PLACES``

    def open(self, backend: Backend) -> OffloadFile | None:
        """The file of a rank, whose arrays are of the backend; None if nothing is offloaded, and in a dry run.

        Raises UsageError if there can be no such file.
        """
        if not self.kinds or has_shapes_only(backend):
            return None
        self.check(on_device=backend.on_device)
        return OffloadFile(self.folder) if self.to == "disk" else HostMemory(backend)

    def check(self, *, on_device: bool) -> None:
        """Raise UsageError if this cannot be offloaded from where arrays are."""
        if on_device and (others := [kind for kind in self.kinds if kind != "optimizer"]):
            raise UsageError(f"--offload {others[0]}: those of a device stay there; choose --offload optimizer")
        if self.kinds and self.to == "host" and not on_device:
            raise UsageError("--offload-to host: without a device everything is on the host; choose --offload-to disk")

    @classmethod
    def parse(cls, text: str | None, folder: str | None = None, to: str | None = None) -> Offload:
        """``"optimizer,activations"`` as an ``Offload``; raises UsageError for unknown kinds."""
        kinds = tuple(dict.fromkeys(part.strip() for part in (text or "").split(",") if part.strip()))
        for kind in kinds:
            if kind not in KINDS:
                raise UsageError(f"--offload {text}: there is no {kind!r} to offload; choose among {', '.join(KINDS)}")
        return cls(kinds, folder or ".", to or "disk")


@requirement("offload", "zero", nearest="Choose --zero 3 or 0")
def _parameters_to_offload(case: Case) -> str | None:
    """parameters of ZeRO 3, or those that every rank updates whole"""
    storage, has_replicas = case.options.storage, count_ranks(case.axes) > case.axes.get(PIPE, 1)
    if "parameters" in storage.offload.kinds and storage.stage(case.axes) in (1, 2) and has_replicas:
        return f"with --zero {case.options.zero} every rank holds them whole"
    return None


REQUIREMENTS = (
    _parameters_to_offload,
    *(
        effect_if(option, lambda case: case.options.storage.offload.kinds, "--offload", "without --offload")
        for option in ("offload_to", "offload_dir")
    ),
)


class OffloadFile:
    """A file of arrays, with the threads that read and write it."""

    def __init__(self, folder: str) -> None:
        """Raises OffloadError if the folder cannot hold such a file."""
        self.folder = folder
        if kind := _in_memory(folder):
            raise OffloadError(f"--offload-dir {folder}: it is in memory ({kind}); name a folder on a disk")
        path = Path(folder, f".spmd-offload-{uuid4().hex}")
        try:
            self._descriptor, self._direct = _open(path)
            os.unlink(path)
        except OSError as error:
            reason = error.strerror or str(error)
            raise OffloadError(f"--offload-dir {folder}: it cannot be written ({reason}); name another one") from error
        finalize(self, os.close, self._descriptor)
        self._begin()

    def _begin(self) -> None:
        self._end, self._free, self._lock = 0, dict[int, list[int]](), RLock()
        self._buffers: list[np.ndarray] = []
        self._threads = ThreadPoolExecutor(THREADS, "offload")

    def reserve(self, size: int, *, zeros: bool = False) -> int:
        """The offset of ``size`` bytes, rounded up to pages, that nothing else uses; all ``zeros``, or of any value.

        Raises OffloadError if the disk is full.
        """
        size = _pages(size)
        with self._lock:
            if self._free.get(size) and not zeros:
                return self._free[size].pop()
            offset, self._end = self._end, self._end + size
        if size:
            self._grow(offset, size)
        return offset

    def _grow(self, offset: int, size: int) -> None:
        """Reserve new bytes."""
        try:
            os.posix_fallocate(self._descriptor, offset, size)
        except OSError as error:
            why = f"cannot hold {readable_bytes(self._end)} of offloaded arrays"
            raise self._error(why, error) from error

    def give_back(self, offset: int, size: int) -> None:
        """Let others use bytes that ``reserve`` returned."""
        with self._lock:
            self._free.setdefault(_pages(size), []).append(offset)

    def take_buffer(self) -> np.ndarray:
        """A buffer of ``PIECE`` bytes, for direct reads and writes; ``keep_buffer`` lets it be taken again."""
        with self._lock:
            if self._buffers:
                return self._buffers.pop()
        return np.frombuffer(cast(Any, mmap(-1, PIECE)), np.uint8)

    def keep_buffer(self, buffer: np.ndarray) -> None:
        with self._lock:
            self._buffers.append(buffer)

    def free_buffers(self) -> None:
        """Free the memory of all buffers that are not taken."""
        with self._lock:
            self._buffers.clear()

    def submit(self, call: Callable[..., T], *arguments: Any, **options: Any) -> Future[T]:
        """Call a function on one of the threads."""
        return self._threads.submit(call, *arguments, **options)

    def read(self, offset: int, buffer: np.ndarray) -> None:
        """Fill whole pages of a buffer from the file."""
        self._move(self._read, offset, buffer, "read")

    def write(self, offset: int, buffer: np.ndarray) -> None:
        """Write whole pages of a buffer to the file."""
        self._move(self._write, offset, buffer, "written")

    def read_all(self, offset: int, data: np.ndarray) -> np.ndarray:
        """Fill ``data`` with bytes from the beginning of a page on."""
        self.transfer(offset, data, into_file=False)
        return data

    def write_all(self, offset: int, data: np.ndarray) -> None:
        """Write bytes from the beginning of a page on; the rest of the last page is undefined."""
        self.transfer(offset, data, into_file=True, keeps_rest=False)

    def transfer(self, start: int, data: np.ndarray, *, into_file: bool, keeps_rest: bool = True) -> None:
        """Move bytes between memory and any place in the file, page by page through a buffer. What a page holds
        besides stays, with ``keeps_rest``."""
        buffer, end = self.take_buffer(), start + len(data)
        for first in range(start // PAGE * PAGE, end, PIECE):
            pages = buffer[: min(PIECE, _pages(end) - first)]
            begin, stop = max(first, start), min(first + len(pages), end)
            if not into_file or keeps_rest and (begin, stop) != (first, first + len(pages)):
                self.read(first, pages)
            within, place = pages[begin - first : stop - first], data[begin - start : stop - start]
            if into_file:
                within[...] = place
                self.write(first, pages)
            else:
                place[...] = within
        self.keep_buffer(buffer)

    def _move(self, operation: Any, offset: int, buffer: np.ndarray, verb: str) -> None:
        view, done = memoryview(cast(Any, buffer)), 0
        try:
            while done < len(view):
                moved = operation(offset + done, view[done:])
                if moved <= 0:
                    raise OSError(errno.EIO, f"the file ends before byte {offset + len(view)}")
                done += moved
        except OSError as error:
            raise self._error(f"cannot be {verb}", error) from error

    # The only two calls that touch the disk: tests make them slow, short or fail.

    def _read(self, offset: int, view: memoryview) -> int:
        moved = os.preadv(self._descriptor, [view], offset)
        self._uncache(offset, moved)
        return moved

    def _write(self, offset: int, view: memoryview) -> int:
        moved = os.pwritev(self._descriptor, [view], offset)
        self._uncache(offset, moved)
        return moved

    def _uncache(self, offset: int, size: int) -> None:
        """Where direct transfers do not work, drop what the page cache has of the file."""
        if not self._direct and hasattr(os, "posix_fadvise"):
            os.fdatasync(self._descriptor)
            os.posix_fadvise(self._descriptor, offset, size, os.POSIX_FADV_DONTNEED)

    def _error(self, why: str, error: OSError) -> OffloadError:
        reason = error.strerror or str(error)
        return OffloadError(
            f"offload file in {self.folder}: it {why} ({reason}). Free space, or name another disk by --offload-dir, "
            "and continue from the last checkpoint (--resume)"
        )


class HostMemory(OffloadFile):
    """Memory of the host in place of a file, for arrays of a device."""

    def __init__(self, backend: Backend) -> None:
        self._pinned, self._blocks = backend.pinned_empty, dict[int, np.ndarray]()
        self._begin()

    def _grow(self, offset: int, size: int) -> None:
        self._blocks[offset] = self._pinned(size, np.uint8)
        self._blocks[offset][...] = 0

    def _block(self, offset: int, size: int) -> np.ndarray:
        first = max(start for start in tuple(self._blocks) if start <= offset)
        return self._blocks[first][offset - first : offset - first + size]

    def _read(self, offset: int, view: memoryview) -> int:
        np.asarray(view)[...] = self._block(offset, len(view))
        return len(view)

    def _write(self, offset: int, view: memoryview) -> int:
        self._block(offset, len(view))[...] = np.asarray(view)
        return len(view)


def _open(path: Path) -> tuple[int, bool]:
    """A new file, and whether it is read and written past the page cache."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with suppress(OSError, AttributeError):  # a file system, or a system, without direct transfers
        return os.open(path, flags | os.O_DIRECT, 0o600), True
    with suppress(FileNotFoundError):
        os.unlink(path)
    return os.open(path, flags, 0o600), False


def _in_memory(folder: str) -> str:
    """The kind of the file system of a folder if it is in memory, else ""."""
    with suppress(OSError):
        device = f"{os.major(dev := os.stat(folder).st_dev)}:{os.minor(dev)}"
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            fields = line.split()
            kind = fields[fields.index("-") + 1]
            if fields[2] == device and kind in ("tmpfs", "ramfs"):
                return kind
    return ""


def _pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


# --- Arrays in a file


class AwayArray:
    """An array in an ``OffloadFile``, in C order; zeros at first.

    Indexing, by slices only, makes a view and reads nothing; ``numpy.asarray`` reads, assignment writes. ``present``
    streams whole arrays through memory. In a dry run (``file`` is None), nothing is read or written but counted.
    """

    def __init__(self, file: OffloadFile | None, shape: Sequence[int], dtype: Any, backend: Backend) -> None:
        """Reserve the space, for zeros of the backend; raises OffloadError if there is none."""
        self.shape, self.dtype, self._backend, self._file = tuple(shape), np.dtype(dtype), backend, file
        self._offset = file.reserve(self.nbytes, zeros=True) if file is not None else 0  # of the first element
        self._first = 0  # elements before this view's first row
        self._inside: tuple[slice, ...] | None = None  # the part of each row; None: all
        self._row_shape = self.shape[1:]
        self._has_pages = True  # whether no other elements are in its pages

    ndim = property(lambda self: len(self.shape))
    size = property(lambda self: prod(self.shape))
    itemsize = property(lambda self: self.dtype.itemsize)
    nbytes = property(lambda self: self.size * self.dtype.itemsize)

    def __len__(self) -> int:
        return self.shape[0]

    def _view(self, first: int, shape: tuple[int, ...], row: tuple[int, ...], inside: Any = None) -> AwayArray:
        view = AwayArray.__new__(AwayArray)
        vars(view).update(vars(self), _first=first, shape=shape, _row_shape=row, _inside=inside)
        view._has_pages = self._has_pages and view.size == self.size
        return view

    def reshape(self, *shape: Any) -> AwayArray:
        """A view in another shape of whole rows."""
        sizes = tuple(shape[0]) if isinstance(shape[0], tuple) else shape
        if -1 in sizes:
            sizes = tuple(self.size // -prod(sizes) if n == -1 else n for n in sizes)
        if self._inside is not None or prod(sizes) != self.size:
            raise ValueError(f"an array of shape {self.shape} cannot be viewed in shape {sizes}")
        return self._view(self._first, sizes, sizes[1:])

    def __getitem__(self, index: Any) -> AwayArray:
        parts = [part for part in (index if isinstance(index, tuple) else (index,)) if part is not Ellipsis]
        if not parts or not self.shape:
            return self
        spans = [slice(*part.indices(n)[:2]) for part, n in zip(parts, self.shape, strict=False)]
        spans += [slice(0, n) for n in self.shape[len(spans) :]]
        before = self._inside or tuple(slice(0, n) for n in self._row_shape)
        inside = tuple(slice(a.start + b.start, a.start + b.stop) for a, b in zip(before, spans[1:], strict=True))
        whole = all((a.start, a.stop) == (0, n) for a, n in zip(inside, self._row_shape, strict=True))
        first = self._first + spans[0].start * prod(self._row_shape)
        shape = tuple(max(0, span.stop - span.start) for span in spans)
        return self._view(first, shape, self._row_shape, None if whole else inside)

    def _rows(self) -> np.ndarray:
        """The whole rows of this view, read from the file."""
        rows = np.empty((*self.shape[:1], *self._row_shape), self.dtype)
        self._transfer(rows.reshape(-1).view(np.uint8), into_file=False)
        return rows

    def _part(self, rows: np.ndarray) -> np.ndarray:
        return rows if self._inside is None else rows[(slice(None), *self._inside)]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self._part(self._rows()).astype(dtype or self.dtype, copy=False)

    def copy(self) -> np.ndarray:
        """A copy in memory."""
        return np.asarray(self)

    def __setitem__(self, index: Any, value: Any) -> None:
        target = self[index]
        if not target.size:
            return
        whole = target._inside is None
        rows = np.empty((*target.shape[:1], *target._row_shape), target.dtype) if whole else target._rows()
        target._part(rows)[...] = backend_of(value).to_host(value)
        target._transfer(rows.reshape(-1).view(np.uint8), into_file=True)

    def __iadd__(self, x: Any) -> AwayArray:
        self[...] = np.asarray(self) + x
        return self

    def start_read(self, into: Array) -> Pending:
        """Begin to fill a contiguous array of this shape on the host."""
        if self._file is None:
            meter().transfer(self.nbytes, 0)
            return Pending.completed(into)
        place = self._offset + self._first * self.itemsize
        moving = self._file.submit(self._file.transfer, place, into.reshape(-1).view(np.uint8), into_file=False)
        return FileRead(moving, into)

    def _transfer(self, data: np.ndarray, *, into_file: bool) -> None:
        """Move bytes between memory and the place of this view."""
        place = self._offset + self._first * self.itemsize
        cast(OffloadFile, self._file).transfer(place, data, into_file=into_file)

    # --- pieces of a flat array, for ``present``

    def pieces(self) -> Iterator[slice]:
        """The elements in pieces."""
        step = PIECE // self.itemsize
        return (slice(first, min(first + step, self.size)) for first in range(0, self.size, step))


class FileRead(Pending):
    """An array that is being read."""

    __slots__ = ("_moving", "_into")

    def __init__(self, moving: Future[None], into: Array) -> None:
        super().__init__()
        self._moving, self._into = moving, into

    def wait(self) -> Array:
        self._moving.result()
        return self._into


class _Piece:
    """A piece of an array on its way from the file, in memory, or on its way back."""

    def __init__(self, array: AwayArray, part: slice) -> None:
        self._array, self._file = array, cast(OffloadFile, array._file)
        size = (part.stop - part.start) * array.itemsize
        self._place = array._offset + (array._first + part.start) * array.itemsize
        if array._has_pages:
            self._buffer: np.ndarray | None = self._file.take_buffer()
            self._pages, self._host = self._buffer[: _pages(size)], self._buffer[:size].view(array.dtype)
            self._moving = self._file.submit(self._file.read, self._place, self._pages)
        else:  # its first or last page holds other elements, too
            self._buffer, self._pages = None, np.empty(size, np.uint8)
            self._host = self._pages.view(array.dtype)
            self._moving = self._file.submit(self._file.transfer, self._place, self._pages, into_file=False)

    def loaded(self) -> Array:
        """The elements, once they are read."""
        self._moving.result()
        self._elements: Array = self._array._backend.asarray(self._host)
        return self._elements

    def start_store(self) -> None:
        """Begin to write the elements back; only when the piece before is stored, with which it may share a page."""
        backend, file = self._array._backend, self._file
        if backend.on_device:
            self._host[...] = backend.to_host(self._elements)
        if self._buffer is not None:
            self._moving = file.submit(file.write, self._place, self._pages)
        else:
            self._moving = file.submit(file.transfer, self._place, self._pages, into_file=True)

    def stored(self) -> None:
        """Wait until the elements are written."""
        self._moving.result()
        if self._buffer is not None:
            self._file.keep_buffer(self._buffer)


def present(sets: Sequence[Sequence[Array]]) -> Iterator[tuple[int, slice, list[Array]]]:
    """The flat arrays of each set in memory, as (number of the set, slice, elements of each array in it).

    Arrays that are away come in pieces: the next piece is read, and the last one written, while the caller changes one.
    Arrays of one set have equal sizes and dtypes.
    """
    away = {n: x for n, arrays in enumerate(sets) for x in arrays if isinstance(x, AwayArray)}  # one of each such set
    for number, arrays in enumerate(sets):
        if number not in away:
            yield number, slice(None), [array.reshape(-1) for array in arrays]
        elif away[number]._file is None:
            yield from _present_shapes(number, arrays, away[number])
    pieces = iter([(n, part) for n, array in away.items() if array._file is not None for part in array.pieces()])
    loading: deque[tuple[int, slice, list[Any]]] = deque()
    storing: list[_Piece] = []
    file = None
    while True:
        while len(loading) < 2 and (piece := next(pieces, None)):
            number, part = piece
            loading.append((number, part, [_piece_of(array, part) for array in sets[number]]))
        if not loading:
            break
        number, part, arrays = loading.popleft()
        yield number, part, [array.loaded() if isinstance(array, _Piece) else array for array in arrays]
        for array in storing:
            array.stored()
        storing, file = [array for array in arrays if isinstance(array, _Piece)], away[number]._file
        for array in storing:
            array.start_store()
    for array in storing:
        array.stored()
    if file is not None:
        file.free_buffers()


def _piece_of(array: Array, part: slice) -> Any:
    return _Piece(array, part) if isinstance(array, AwayArray) else array.reshape(-1)[part]


def _present_shapes(number: int, arrays: Sequence[Array], away: AwayArray) -> Iterator[tuple[int, slice, list[Array]]]:
    """``present`` in a dry run: buffers of three pieces of each array, and the bytes that are read and written."""
    size, step, count = away.size, PIECE // away.itemsize, sum(isinstance(array, AwayArray) for array in arrays)
    buffers = [away._backend.empty(3 * min(step, size), away.dtype) for _ in range(count)]
    for first in alike(range(0, size, step), buffers[0], last=size % step != 0):
        part, free = slice(first, min(first + step, size)), iter(buffers)
        moved = (part.stop - part.start) * count * away.itemsize
        meter().transfer(moved, moved)
        yield (
            number,
            part,
            [
                next(free)[: part.stop - part.start] if isinstance(array, AwayArray) else array.reshape(-1)[part]
                for array in arrays
            ],
        )


# --- Activations: what the forward of a layer saves for its backward


SMALL = 1 << 14  #: bytes: smaller arrays stay in memory


class Stash:
    """What forwards save, written behind and read ahead.

    Arrays in tuples, lists and dicts are moved, whole memory blocks at a time: a block that several layers save is
    stored once. Parameters, shared memory and small arrays stay. The last layer's stay until the next layer saves,
    since a backward may follow at once. A stored block keeps its place in the file while a saved tree refers to it.
    """

    def __init__(self, file: OffloadFile) -> None:
        self._file = file
        self._blocks: WeakValueDictionary[int, _MemoryBlock] = WeakValueDictionary()  # by the id of their memory
        self._last: list[ref[_MemoryBlock]] = []  # of the last layer
        self._writing: list[ref[_MemoryBlock]] = []  # of the layer before

    def put(self, saved: Any, parameters: Any = ()) -> Any:
        """``saved`` with blocks in place of arrays, for ``take``; ``parameters`` are a layer's own arrays, by name."""
        stay, fresh = set[int](), list[ref[_MemoryBlock]]()
        _mapped(parameters, lambda x: stay.add(id(_memory_of(x))))

        def away(x: Array) -> Any:
            memory = _memory_of(x)
            if memory is None or memory.nbytes < SMALL or id(memory) in stay:
                return x
            block = self._blocks.get(id(memory))
            if block is None or not block.holds(memory):
                block = self._blocks[id(memory)] = _MemoryBlock(self._file, memory)
                fresh.append(ref(block))
            return _ArrayInBlock(block, x)

        tree = _mapped(saved, away)
        for block in _living(self._last):
            block.start_write()
        for block in _living(self._writing):
            block.finish_write()
        self._writing, self._last = self._last, fresh
        return tree

    def expect(self, tree: Any) -> None:
        """Begin to read what ``take`` will be asked for next."""
        _mapped(tree, lambda view: view.block.start_read(), _ArrayInBlock)

    def take(self, tree: Any) -> Any:
        """What was ``put``, with the same bits and strides."""
        return _mapped(tree, lambda view: view.array(), _ArrayInBlock)


class _MemoryBlock:
    """The memory of an array: present, in the file, or on its way."""

    def __init__(self, file: OffloadFile, memory: np.ndarray) -> None:
        self._file, self._size, self._seen = file, memory.nbytes, ref(memory)
        self._memory: np.ndarray | None = memory  # None while it is only in the file
        self._writing: Future[None] | None = None
        self._reading: Future[np.ndarray] | None = None
        self._written = False

    def holds(self, memory: np.ndarray) -> bool:
        return self._seen() is memory

    def start_write(self) -> None:
        if self._memory is not None and not self._written and self._writing is None:
            file, place, size = self._file, self._file.reserve(self._size), self._size
            self._place, self._writing = place, file.submit(file.write_all, place, _bytes_of(self._memory))
            # Not while it is being written: another block would be written to the same place at the same time.
            finalize(self, self._writing.add_done_callback, lambda _: file.give_back(place, size))

    def finish_write(self) -> None:
        if self._writing is not None:
            self._writing.result()
            self._memory, self._writing, self._written = None, None, True

    def start_read(self) -> None:
        if self._memory is None and self._reading is None:
            self._memory = self._seen()  # perhaps another layer has it
            if self._memory is None:
                # Allocated by this thread: the heap of another would keep as much freed memory again.
                self._reading = self._file.submit(self._file.read_all, self._place, np.empty(self._size, np.uint8))

    def present(self) -> np.ndarray:
        """The memory, which only the caller holds from now on if it is in the file too."""
        self.start_read()
        if self._reading is not None:
            self._memory, self._reading = self._reading.result(), None
            self._seen = ref(self._memory)
        memory = cast(np.ndarray, self._memory)
        if self._written:
            self._memory = None
        return memory


class _ArrayInBlock:
    """An array as a part of a block."""

    def __init__(self, block: _MemoryBlock, x: np.ndarray) -> None:
        self.block, self._shape, self._dtype, self._strides = block, x.shape, x.dtype, x.strides
        self._offset = address_of(x) - address_of(cast(np.ndarray, _memory_of(x)))

    def array(self) -> np.ndarray:
        memory = _bytes_of(self.block.present())
        return np.ndarray(self._shape, self._dtype, cast(Any, memory), self._offset, self._strides)


def _memory_of(x: Array) -> np.ndarray | None:
    """The array that owns the memory of ``x``; None if another object does, or it has gaps."""
    while isinstance(x, np.ndarray) and x.base is not None:
        x = x.base
    return x if isinstance(x, np.ndarray) and (x.flags.c_contiguous or x.flags.f_contiguous) else None


def _bytes_of(memory: np.ndarray) -> np.ndarray:
    return (memory if memory.flags.c_contiguous else memory.T).reshape(-1).view(np.uint8)


def _mapped(tree: Any, change: Callable[[Any], Any], kind: type = np.ndarray) -> Any:
    """The tree of tuples, lists and dicts with each leaf of a kind changed; the tree itself if none is."""
    if isinstance(tree, kind):
        return change(tree)
    if isinstance(tree, dict):
        parts = [_mapped(part, change, kind) for part in tree.values()]
        same = all(a is b for a, b in zip(parts, tree.values(), strict=True))
        return tree if same else dict(zip(tree, parts, strict=True))
    if isinstance(tree, (tuple, list)):
        parts = [_mapped(part, change, kind) for part in tree]
        if all(a is b for a, b in zip(parts, tree, strict=True)):
            return tree
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return tree


def _living(blocks: Iterable[ref[_MemoryBlock]]) -> Iterator[_MemoryBlock]:
    return (block for reference in blocks if (block := reference()) is not None)
