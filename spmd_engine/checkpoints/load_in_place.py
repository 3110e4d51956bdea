"""Loading into arrays that are there: each rank reads what it wants of each block straight to where it belongs.

Of those on a node who want some of a block, one reads all of it and checks its hash; the others read their part of the
same file, through the cache that a node has for its files. A checkpoint's files are never written to again. So a node
reads what its ranks want from the disk once, hashes it once, and nothing passes between ranks but that all is well.
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
    cut_short,
    damaged,
    is_finite,
    read_into,
)
from spmd_engine.checkpoints.format.manifest import StoredArray, StoredBlock
from spmd_engine.comm.agreement.rank_zero import on_all_ranks
from spmd_engine.comm.group import Group
from spmd_engine.comm.shared_memory.cores import cores_here
from spmd_engine.errors import CheckpointError
from spmd_engine.formats.safetensors_file import read_header
from spmd_engine.sharding.placement import ArrayPlacement, Rectangles, ranks_of_blocks
from spmd_engine.sharding.rectangles import Rectangle, meetings

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
        """As ``here``, of the dtype that is stored: itself, if it can be read into."""
        x: Array = self.here
        readable = isinstance(x, np.ndarray) and x.dtype == self.dtype and x.flags.c_contiguous
        return x if readable else np.empty(x.shape, self.dtype)


def fill(group: Group, arrays: Sequence[Wanted], folder: Path, headers: Headers, nodes: Sequence[Hashable]) -> None:
    """Fill this rank's parts of ``arrays``, the same on all ranks, from the files in a checkpoint's folder. Collective.

    ``nodes``: of each rank, what tells its node from others. Raises CheckpointError on every rank if one could not
    read, or found damage in, what it was to read.
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
    """Read them all, in about this order, on so many threads, this one among them; none is left in the list.

    While one is hashed, the system reads the next from the disk.
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
        except BaseException as error:  # also Ctrl-C: what has not begun need not be read any more
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
    """Bring what was read beside arrays into them; none is left in the list."""
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
    """The arrays that a rank wants some of; of each the blocks, which part of them, whether the rank checks the block,
    and where the part belongs in its array.

    Of those ``near``, on its node, that want some of a block, that one checks it who has least to check so far; or not
    much more, if it has that file's header already.
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
    """Who wants what of each block."""
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
    """Of each block, the ranks that hold some of it."""
    ranks = ranks_of_blocks(held)
    if not ranks or len(blocks) < 2:  # a single one is all of the array
        return [sorted({rank for some in ranks.values() for rank in some})] * len(blocks)
    shared = meetings(blocks, ranks)[2].tolist()
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
        """Have the system bring from the disk what will be read soon, if it has it not, while others work."""
        if hasattr(os, "posix_fadvise"):
            block, rows, row = wanted.block, wanted.rows, wanted.row
            first, size = block.offset + rows.start * row, (rows.stop - rows.start) * row
            with suppress(OSError):  # who reads it tells
                os.posix_fadvise(self._descriptor(block.file), first, size, os.POSIX_FADV_WILLNEED)

    def read(self, asked: PartOfBlock) -> None:
        """Fill its place.

        ``checked``: the file's header must say of the block what the manifest says, and all of it is read, some rows
        at a time, which are hashed, and looked at, while the cache has them. Raises CheckpointError for what is not
        what was written, and for values that are not finite.
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
        """Read so many bytes of a block's file from there on."""
        try:
            if read_into(data, self._descriptor(block.file), offset):
                return
        except OSError as error:
            raise CheckpointError(f"{self._folder / block.file} cannot be read: {error}") from error
        raise cut_short(self._folder / block.file, name, offset + data.nbytes)

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

Said = dict[str, tuple[str, list[int], int]]  # of each block: dtype, shape, and where it begins in the file


class Headers:
    """Those of the files in a checkpoint's folder, of this step; each is read when it is first asked for."""

    def __init__(self, folder: Path, step: int) -> None:
        self._folder, self._step = folder, step
        self._read: dict[str, Said] = {}

    def check(self, name: str, array: StoredArray, block: StoredBlock) -> None:
        """Raise CheckpointError unless the file says the same of a block: its array, dtype, place and step."""
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


def read_file_header(path: Path) -> tuple[str, Said]:
    """Which step a safetensors file is of, and what it says of its blocks. Raises CheckpointError."""
    try:
        blocks, after, _ = read_header(path, LARGEST)
        facts = blocks.pop("__metadata__", {})
        return facts.get("step", ""), {
            name: (each["dtype"], each["shape"], after + each["data_offsets"][0]) for name, each in blocks.items()
        }
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{path}: its header cannot be read ({error})") from error
