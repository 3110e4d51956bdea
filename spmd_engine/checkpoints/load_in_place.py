"""Loading into existing arrays: each rank reads its part of each block straight to where it belongs.

Among the ranks of a node that need a block, one reads all of it and checks its hash; the others read their part of the
same file, through the node's file cache. A checkpoint's files never change. So a node reads what its ranks need from
the disk once and hashes it once, and ranks exchange nothing but whether all succeeded.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from itertools import count
from math import prod
from pathlib import Path
from threading import Lock
from typing import Self

import numpy as np

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.checkpoints.format.blocks import (
    DTYPES,
    IN_CACHE,
    block_name,
    bytes_of,
    damaged,
    is_finite,
    read_into,
    truncated,
)
from spmd_engine.checkpoints.format.manifest import StoredArray, StoredBlock
from spmd_engine.comm.agreement.rank_zero import on_all_ranks
from spmd_engine.comm.group import Group
from spmd_engine.comm.shared_memory.cores import cores_here
from spmd_engine.errors import CheckpointError
from spmd_engine.formats.safetensors_file import read_header
from spmd_engine.sharding.placement import ArrayPlacement, Rectangles, ranks_of_blocks
from spmd_engine.sharding.rectangles import Rectangle, intersections

AT_ONCE = 64 << 20  #: bytes, about, that are read beside the arrays, where those cannot be read into
UNEVEN = 8 << 20  #: bytes that a rank may check more than others, rather than that several read one file
READERS = 4  #: threads that read and hash for a rank, where it has so many cores


@dataclass(frozen=True)
class Wanted:
    """An array to be filled."""

    name: str
    stored: StoredArray
    placed: ArrayPlacement
    here: Array | None  #: this rank's block; None if it has none

    @property
    def dtype(self) -> np.dtype:
        """The one that is stored."""
        return DTYPES[self.stored.dtype]

    def on_host(self) -> np.ndarray:
        """An array like ``here`` of the stored dtype: itself, if it can be read into."""
        x: Array = self.here
        readable = isinstance(x, np.ndarray) and x.dtype == self.dtype and x.flags.c_contiguous
        return x if readable else np.empty(x.shape, self.dtype)


def fill(group: Group, arrays: Sequence[Wanted], folder: Path, headers: Headers, nodes: Sequence[Hashable]) -> None:
    """Fill this rank's parts of ``arrays``, the same on all ranks, from the files in a checkpoint's folder. Collective.

    ``nodes``: an identifier of each rank's node. Raises CheckpointError on every rank if one could not read its part,
    or found it damaged.
    """

    def fill_here() -> None:
        near = [rank for rank, node in enumerate(nodes) if node == nodes[group.rank]]
        threads = max(1, min(READERS, int(cores_here() // len(near))))
        with PartReader(folder, headers) as reader:
            reads: list[PartOfBlock] = []
            beside: list[tuple[Wanted, np.ndarray]] = []  # what cannot be read into, and what is read in its place
            for array, parts in _mine(arrays, group.rank, near):
                host = array.on_host()
                reads += [
                    PartOfBlock(array.name, array.stored, block, part, checked, host[place])
                    for block, part, checked, place in parts
                ]
                if host is not array.here:
                    beside.append((array, host))
                    if sum(each.nbytes for _, each in beside) > AT_ONCE:
                        _read(reader, reads, threads)
                        _move(beside)
            _read(reader, reads, threads)
            _move(beside)

    on_all_ranks(group, fill_here, CheckpointError)


def _read(reader: PartReader, reads: list[PartOfBlock], threads: int) -> None:
    """Read all of them, in about this order, on so many threads, including this one; empties the list.

    While a part is hashed, the system reads the next from the disk.
    """
    numbers, errors = count(), []

    def work() -> None:
        try:
            for number in numbers:
                if errors or number >= len(reads):
                    return
                if number + 1 < len(reads) and reads[number + 1].checked:  # the rest is read by another rank, too
                    reader.expect(reads[number + 1])
                reader.read(reads[number])
        except BaseException as error:  # also Ctrl-C: the rest need not be read any more
            errors.append(error)
            raise

    if threads == 1:
        work()
    else:
        with ThreadPoolExecutor(threads - 1, "reading") as others:
            reading = [others.submit(work) for _ in range(threads - 1)]
            work()
        for each in reading:
            each.result()
    reads.clear()


def _move(beside: list[tuple[Wanted, np.ndarray]]) -> None:
    """Copy what was read into temporary arrays to where it belongs; empties the list."""
    for array, host in beside:
        here: Array = array.here
        here[...] = backend_of(here).asarray(host)
    beside.clear()


#: Of a block: the ranks of this node that want some of it, its elements, and what of it this rank wants, if it does,
#: and where that belongs in its array.
_Share = tuple[list[int], int, Rectangle | None, tuple]


def _mine(
    arrays: Sequence[Wanted], rank: int, near: Sequence[int]
) -> Iterator[tuple[Wanted, list[tuple[StoredBlock, Rectangle, bool, tuple]]]]:
    """The arrays of which a rank needs a part, with their blocks, its part of each, whether it checks the block, and
    where the part belongs in its array.

    Among the ranks ``near``, on its node, that need a block, the one with the least to check so far checks it; or one
    with not much more, if it has read that file's header already.
    """
    loads, readers = dict.fromkeys(near, 0), {}  # bytes to check; who has checked something of a file
    known: dict[tuple, list[_Share]] = {}  # layers of a kind, and all state of a parameter, are alike
    for array in arrays:
        blocks = array.stored.blocks
        kind = id(array.placed), tuple(each.rectangle for each in blocks)
        if kind not in known:
            known[kind] = _shares(kind[1], array.placed.held, rank, loads)
        parts = []
        for block, (ranks, size, part, place) in zip(blocks, known[kind], strict=True):
            if ranks:
                least, checks = min(ranks, key=loads.__getitem__), readers.get(block.file)
                if checks not in ranks or loads[checks] > loads[least] + UNEVEN:
                    checks = readers[block.file] = least
                loads[checks] += size * array.dtype.itemsize
                if part is not None:
                    parts.append((block, part, rank == checks, place))
        if parts:
            yield array, parts


def _shares(
    blocks: tuple[Rectangle, ...], held: tuple[Rectangles, ...], rank: int, near: Iterable[int]
) -> list[_Share]:
    """The ranks that need each block, and what this rank needs of it."""
    found = []
    for block, wanting in zip(blocks, _wanting(blocks, held), strict=True):
        part, place = None, ()
        if rank in wanting:
            (here,) = held[rank]
            part = block & here
            place = (..., *part.within(here).index)
        found.append(([each for each in near if each in wanting], block.size, part, place))
    return found


def _wanting(blocks: tuple[Rectangle, ...], held: tuple[Rectangles, ...]) -> list[list[int]]:
    """For each block, the ranks that hold some of it."""
    ranks = ranks_of_blocks(held)
    if not ranks or len(blocks) < 2:  # a single one is all of the array
        return [sorted({rank for some in ranks.values() for rank in some})] * len(blocks)
    shared = intersections(blocks, ranks)[2].tolist()
    return [
        sorted({rank for n, some in zip(sizes, ranks.values(), strict=True) if n for rank in some}) for sizes in shared
    ]


# --- Parts of blocks, read from a checkpoint's files straight to where they belong, and hashed on the way if asked


@dataclass(frozen=True)
class PartOfBlock:
    """A part of a stored block, and where it is to be read to. Neither is empty."""

    name: str  #: of the array
    array: StoredArray
    block: StoredBlock
    part: Rectangle  #: of the array, within the block
    checked: bool  #: whether all of the block is read, and checked
    place: np.ndarray  #: of the shape of the part, and of the array's dtype

    @property
    def row(self) -> int:
        """The bytes of a row of the block; its file has one behind the other."""
        return prod(self.block.rectangle.shape[1:]) * DTYPES[self.array.dtype].itemsize

    @property
    def within(self) -> tuple[slice, ...]:
        """Where the part lies in the block: rows, and what of them."""
        return self.part.within(self.block.rectangle).index or (slice(0, 1),)

    @property
    def rows(self) -> slice:
        """The rows that are read."""
        return slice(0, (self.block.rectangle.shape or (1,))[0]) if self.checked else self.within[0]


class PartReader:
    """Reads parts of the blocks in a folder's files, each of which it opens once. Any thread may; ``with`` closes."""

    def __init__(self, folder: Path, headers: Headers) -> None:
        self._folder, self._headers, self._opening = folder, headers, Lock()
        self._descriptors: dict[str, int] = {}

    def expect(self, wanted: PartOfBlock) -> None:
        """Have the system read from the disk, in the background, what will be needed soon."""
        if hasattr(os, "posix_fadvise"):
            block, rows, row = wanted.block, wanted.rows, wanted.row
            first, size = block.offset + rows.start * row, (rows.stop - rows.start) * row
            with suppress(OSError):  # reading it reports the error
                os.posix_fadvise(self._descriptor(block.file), first, size, os.POSIX_FADV_WILLNEED)

    def read(self, asked: PartOfBlock) -> None:
        """Fill its place.

        ``checked``: the file's header must agree with the manifest, and all of the block is read, some rows at a time,
        which are hashed and tested while the cache has them. Raises CheckpointError for damage, and for values that are
        not finite.
        """
        block, part, rows, row, checked = asked.block, asked.part, asked.rows, asked.row, asked.checked
        if checked:
            self._headers.check(asked.name, asked.array, block)
        name, shape = f"{asked.name}{block.rectangle}", block.rectangle.shape or (1,)
        wanted, *across = asked.within
        place = asked.place.reshape(part.shape or (1,))
        is_straight = part.shape[1:] == shape[1:] and place.flags.c_contiguous
        step = max(1, IN_CACHE // row) if checked or not is_straight else rows.stop - rows.start
        digest, finite, spare = sha256(), True, None
        for first in range(rows.start, rows.stop, step):
            last = min(first + step, rows.stop)
            begin, end = max(first, wanted.start), min(last, wanted.stop)  # what of these rows belongs here
            here = place[begin - wanted.start : end - wanted.start] if begin < end else None
            into = here if is_straight and (begin, end) == (first, last) else None
            if into is None:
                spare = np.empty((step, *shape[1:]), place.dtype) if spare is None else spare
                into = spare[: last - first]
            data = bytes_of(into)
            self._fill(data, block, block.offset + first * row, name)
            if checked:
                digest.update(data)
                finite = finite and is_finite(into)
            if here is not None and into is not here:
                here[...] = into[(slice(begin - first, end - first), *across)]
        if checked and digest.hexdigest() != block.sha256:
            raise damaged(self._folder / block.file, name, block.offset, shape[0] * row)
        if not finite:
            raise CheckpointError(f"{self._folder / block.file}: {name} has values that are not finite")

    def _fill(self, data: memoryview, block: StoredBlock, offset: int, name: str) -> None:
        """Read bytes of a block's file, from ``offset`` on."""
        try:
            if read_into(data, self._descriptor(block.file), offset):
                return
        except OSError as error:
            raise CheckpointError(f"{self._folder / block.file} cannot be read: {error}") from error
        raise truncated(self._folder / block.file, name, offset + data.nbytes)

    def _descriptor(self, file: str) -> int:
        with self._opening:
            if file not in self._descriptors:
                self._descriptors[file] = os.open(self._folder / file, os.O_RDONLY | os.O_CLOEXEC)
            return self._descriptors[file]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])


# --- Headers of a checkpoint's files, which must agree with the manifest


LARGEST = 1 << 30  #: bytes of a header, or a manifest

HeaderBlocks = dict[str, tuple[str, list[int], int]]  # of each block: dtype, shape, and where it begins in the file


class Headers:
    """The headers of the files in a checkpoint's folder, of this step; each is read when it is first needed."""

    def __init__(self, folder: Path, step: int) -> None:
        self._folder, self._step = folder, step
        self._read: dict[str, HeaderBlocks] = {}

    def check(self, name: str, array: StoredArray, block: StoredBlock) -> None:
        """Raise CheckpointError unless the file's header has the block with the same array, dtype, place and step."""
        if block.file not in self._read:
            path = self._folder / block.file
            step, self._read[block.file] = read_file_header(path)
            if step != str(self._step):
                raise CheckpointError(f"{path} is damaged, or of another checkpoint: it says step {step!r:.40}")
        said = self._read[block.file].get(block_name(name, block.rectangle, array.shape))
        if said != (array.dtype, list(block.rectangle.shape), block.offset):
            raise CheckpointError(
                f"{self._folder / block.file}: its header and the manifest differ in {name}{block.rectangle}: one of "
                "them was altered"
            )


def read_file_header(path: Path) -> tuple[str, HeaderBlocks]:
    """The step that a safetensors file belongs to, and what its header has of its blocks. Raises CheckpointError."""
    try:
        blocks, after, _ = read_header(path, LARGEST)
        facts = blocks.pop("__metadata__", {})
        return facts.get("step", ""), {
            name: (each["dtype"], each["shape"], after + each["data_offsets"][0]) for name, each in blocks.items()
        }
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{path}: its header cannot be read ({error})") from error
