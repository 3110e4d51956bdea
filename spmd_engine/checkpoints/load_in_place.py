"""Loading into existing arrays: each rank reads its part of each block directly into its shard.

Among the ranks of a node that need a block, one reads all of it and checks its hash; the others read their parts of the
same file through the node's page cache. A checkpoint's files never change. So a node reads the blocks of its ranks from
the disk once and hashes them once, and ranks exchange only whether all succeeded.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain, count
from math import prod
from pathlib import Path
from threading import Lock
from typing import NamedTuple, Self

import numpy as np

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.precision import rounded
from spmd_engine.checkpoints.format.blocks import HASH, IN_CACHE, block_name, bytes_of, is_finite, read_into
from spmd_engine.checkpoints.format.manifest import Manifest, Pieces, StoredArray, StoredBlock, StoredFile
from spmd_engine.comm import Group
from spmd_engine.comm.agreement.rank_zero import on_all_ranks
from spmd_engine.comm.shared_memory.cores import cores_here
from spmd_engine.errors import CheckpointError
from spmd_engine.formats.safetensors_file import read_header
from spmd_engine.formats.safetensors_header import dtype_of
from spmd_engine.sharding.placement import ArrayPlacement, Rectangles
from spmd_engine.sharding.rectangles import Rectangle, intersected

AT_ONCE = 64 << 20  #: bytes, approximately, of temporary arrays for shards that cannot be read into
UNEVEN = 8 << 20  #: bytes that a rank may check more than others, so that fewer ranks read one file
_FAR = np.iinfo(np.int64).max
READERS = 4  #: threads of a rank that read and hash, if it has so many cores


@dataclass(frozen=True)
class Wanted:
    """An array to be filled."""

    name: str
    stored: StoredArray
    placed: ArrayPlacement
    here: Array | None  #: this rank's block; None if it has none

    @property
    def dtype(self) -> np.dtype:
        """The stored dtype."""
        return dtype_of(self.stored.dtype)

    def on_host(self) -> np.ndarray:
        """``here`` if it can be read into, otherwise an array of its shape and the stored dtype."""
        x: Array = self.here
        readable = isinstance(x, np.ndarray) and x.dtype == self.dtype and x.flags.c_contiguous
        return x if readable else np.empty(x.shape, self.dtype)


def fill(group: Group, arrays: Sequence[Wanted], folder: Path, headers: Headers, nodes: Sequence[Hashable]) -> None:
    """Fill this rank's shards of ``arrays`` from the files in a checkpoint's folder. Collective.

    ``arrays`` is the same on all ranks; ``nodes`` has an identifier of each rank's node. Raises CheckpointError on
    every rank if one rank could not read its part, or if the part is damaged.
    """

    def fill_local() -> None:
        node_ranks = [rank for rank, node in enumerate(nodes) if node == nodes[group.rank]]
        threads = max(1, min(READERS, int(cores_here() // len(node_ranks))))
        with PartReader(folder, headers) as reader:
            reads: list[PartOfBlock] = []
            staged: list[tuple[Wanted, np.ndarray]] = []  # arrays that cannot be read into, and temporary ones
            for array, parts in parts_of_rank(arrays, group.rank, node_ranks):
                host = array.on_host()
                reads += [
                    PartOfBlock(array.name, array.stored, block, part, checked, host[place])
                    for block, part, checked, place in parts
                ]
                if host is not array.here:
                    staged.append((array, host))
                    if sum(temporary.nbytes for _, temporary in staged) > AT_ONCE:
                        _read(reader, reads, threads)
                        _move(staged)
            _read(reader, reads, threads)
            _move(staged)

    on_all_ranks(group, fill_local, CheckpointError)


def _read(reader: PartReader, reads: list[PartOfBlock], threads: int) -> None:
    """Read all parts, approximately in order, on ``threads`` threads including this one, and empty the list.

    While a part is hashed, the system reads the next from the disk.
    """
    numbers, errors = count(), []

    def work() -> None:
        try:
            for number in numbers:
                if errors or number >= len(reads):
                    return
                if number + 1 < len(reads) and reads[number + 1].checked:  # another rank reads the others from the disk
                    reader.expect(reads[number + 1])
                reader.read(reads[number])
        except BaseException as error:  # also Ctrl-C: the other threads stop
            errors.append(error)
            raise

    if threads == 1:
        work()
    else:
        with ThreadPoolExecutor(threads - 1, "reading") as pool:
            futures = [pool.submit(work) for _ in range(threads - 1)]
            work()
        for future in futures:
            future.result()
    reads.clear()


def _move(staged: list[tuple[Wanted, np.ndarray]]) -> None:
    """Copy temporary arrays into the shards that they were read for, and empty the list."""
    for array, host in staged:
        shard: Array = array.here
        shard[...] = rounded(backend_of(shard).asarray(host), shard.dtype)
    staged.clear()


class _Shares(NamedTuple):
    """The blocks of an array of which ranks of this node need a part. Ranks are numbers among those of the node."""

    alone: np.ndarray  #: elements of blocks that one rank alone needs, by rank
    writers: np.ndarray  #: the ranks that wrote these blocks
    readers: np.ndarray  #: the ranks that need them
    several: list[tuple[int, list[int], int]]  #: blocks that several need: number, ranks, elements
    mine: dict[int, tuple[Rectangle, tuple]]  #: by number: the part that this rank needs, and its place in the shard


def parts_of_rank(
    arrays: Sequence[Wanted], rank: int, node_ranks: Sequence[int]
) -> Iterator[tuple[Wanted, list[tuple[StoredBlock, Rectangle, bool, tuple]]]]:
    """The arrays of which a rank needs a part: blocks, its part of each, whether it checks the block, and the part's
    place in its shard.

    Among the ranks of the node that need a block, the one with the least bytes to check so far checks it; or one with
    not much more, if it has already read that file's header.
    """
    loads, here = np.zeros(len(node_ranks), np.int64), list(node_ranks).index(rank)  # bytes to check, by rank
    last: dict[str, np.ndarray] = {}  # by section and rank that wrote a file: the last rank that checks a block of it
    shares: dict[tuple[int, int], _Shares] = {}  # equal layers, and all state of a parameter, have equal ones
    for array in arrays:
        pieces, itemsize, section = array.stored.blocks.pieces, array.dtype.itemsize, array.stored.blocks.section
        kind = id(array.placed), id(pieces)
        if kind not in shares:
            shares[kind] = _shares(pieces, array.placed.held, rank, node_ranks)
        alone, writers, readers, several, mine = shares[kind]
        if section.name not in last:
            last[section.name] = np.full(1 + section.files.ranks.max(initial=0), -1)
        last[section.name][writers] = readers
        loads += alone * itemsize
        checked = dict.fromkeys(mine, True)
        for number, ranks, elements in several:
            file = pieces.ranks[number]
            least, checker = min(ranks, key=loads.__getitem__), int(last[section.name][file])
            if checker not in ranks or loads[checker] > loads[least] + UNEVEN:
                checker = last[section.name][file] = least
            loads[checker] += elements * itemsize
            if number in mine:
                checked[number] = checker == here
        if mine:
            blocks = array.stored.blocks
            yield array, [(blocks[number], part, checked[number], place) for number, (part, place) in mine.items()]


def _shares(pieces: Pieces, held: Sequence[Rectangles], rank: int, node_ranks: Sequence[int]) -> _Shares:
    """The blocks of an array in these ``pieces`` of which ranks of this node need a part."""
    bounds, wanted = pieces.bounds, [held[node_rank] for node_rank in node_ranks]
    owners = [number for number, rectangles in enumerate(wanted) for _ in rectangles]
    parts = np.array([*chain(*wanted)], np.int64).reshape(len(owners), *bounds.shape[1:])
    needs = np.zeros((len(bounds), len(node_ranks)), bool)
    around = np.stack([parts[:, 0].min(axis=0, initial=_FAR), parts[:, 1].max(axis=0, initial=0)])[None]
    near = np.flatnonzero(intersected(bounds, around))
    for number, shared in zip(owners, intersected(bounds[near], parts).T, strict=True):
        needs[near, number] |= shared
    counts = needs.sum(axis=1)
    single, sizes = np.flatnonzero(counts == 1), pieces.sizes
    readers, alone = needs[single].argmax(axis=1), np.zeros(len(node_ranks), np.int64)
    np.add.at(alone, readers, sizes[single])
    several = [
        (number, np.flatnonzero(needs[number]).tolist(), int(sizes[number]))
        for number in np.flatnonzero(counts > 1).tolist()
    ]
    mine = {}
    for number in np.flatnonzero(needs[:, list(node_ranks).index(rank)]).tolist():
        (shard,) = held[rank]
        part = Rectangle(*map(tuple, bounds[number].tolist())) & shard
        mine[number] = part, (..., *part.within(shard).index)
    return _Shares(alone, pieces.ranks[single], readers, several, mine)


# --- Parts of blocks, read from a checkpoint's files directly into shards, and hashed on the way if required


@dataclass(frozen=True)
class PartOfBlock:
    """A part of a stored block, and the array that it is read into. Neither is empty."""

    name: str  #: the array's
    array: StoredArray
    block: StoredBlock
    part: Rectangle  #: the part, in the coordinates of the array; within the block
    checked: bool  #: whether the whole block is read and checked
    place: np.ndarray  #: has the shape of the part and the array's dtype

    @property
    def row(self) -> int:
        """The bytes of a row of the block; rows are contiguous in the file."""
        return prod(self.block.rectangle.shape[1:]) * dtype_of(self.array.dtype).itemsize

    @property
    def within(self) -> tuple[slice, ...]:
        """The place of the part in the block: its rows, and the index within each row."""
        return self.part.within(self.block.rectangle).index or (slice(0, 1),)

    @property
    def rows(self) -> slice:
        """The rows of the block that are read."""
        return slice(0, (self.block.rectangle.shape or (1,))[0]) if self.checked else self.within[0]


class PartReader:
    """Reads parts of blocks from a folder's files, and opens each file once. Thread-safe; ``with`` closes the files.

    ``headers`` have the hashes of blocks. ``compares``: also check headers.
    """

    def __init__(self, folder: Path, headers: Headers, *, compares: bool = True) -> None:
        self._folder, self._headers, self._compares, self._opening = folder, headers, compares, Lock()
        self._descriptors: dict[str, int] = {}

    def expect(self, wanted: PartOfBlock) -> None:
        """Let the system read a part from the disk in the background, because it will be needed soon."""
        if hasattr(os, "posix_fadvise"):
            block, rows, row = wanted.block, wanted.rows, wanted.row
            first, size = block.offset + rows.start * row, (rows.stop - rows.start) * row
            with suppress(OSError):  # the later read reports the error
                os.posix_fadvise(self._descriptor(block.file), first, size, os.POSIX_FADV_WILLNEED)

    def read(self, asked: PartOfBlock) -> None:
        """Read a part into its place.

        If the part is ``checked``, the file's header must agree with the manifest, and the whole block is read, some
        rows at a time, which are hashed and tested while they are in the processor's cache. Raises CheckpointError for
        damage, and for values that are not finite.
        """
        block, part, rows, row, checked = asked.block, asked.part, asked.rows, asked.row, asked.checked
        if checked and self._compares:
            self._headers.check(asked.name, asked.array, block)
        name, shape = f"{asked.name}{block.rectangle}", block.rectangle.shape or (1,)
        wanted, *across = asked.within
        place = asked.place.reshape(part.shape or (1,))
        is_direct = part.shape[1:] == shape[1:] and place.flags.c_contiguous
        step = max(1, IN_CACHE // row) if checked or not is_direct else rows.stop - rows.start
        digest, finite, spare = sha256(), True, None
        for first in range(rows.start, rows.stop, step):
            last = min(first + step, rows.stop)
            begin, end = max(first, wanted.start), min(last, wanted.stop)  # those of these rows that belong to the part
            target = place[begin - wanted.start : end - wanted.start] if begin < end else None
            into = target if is_direct and (begin, end) == (first, last) else None
            if into is None:
                spare = np.empty((step, *shape[1:]), place.dtype) if spare is None else spare
                into = spare[: last - first]
            data = bytes_of(into)
            self._fill(data, block, block.offset + first * row, name)
            if checked:
                digest.update(data)
                finite = finite and is_finite(into)
            if target is not None and into is not target:
                target[...] = into[(slice(begin - first, end - first), *across)]
        if checked and digest.digest() != self._headers.sha256(block):
            raise CheckpointError(
                f"{self._folder / block.file} is damaged: {name} is not what was written (bytes {block.offset} to "
                f"{block.offset + shape[0] * row}; its SHA-256 differs). Take this checkpoint from a copy, or remove "
                "its folder to continue from the previous one"
            )
        if not finite:
            raise CheckpointError(f"{self._folder / block.file}: {name} has values that are not finite")

    def _fill(self, data: memoryview, block: StoredBlock, offset: int, name: str) -> None:
        """Read bytes of a block's file, from ``offset`` on."""
        try:
            if read_into(data, self._descriptor(block.file), offset):
                return
        except OSError as error:
            raise CheckpointError(f"{self._folder / block.file} cannot be read: {error}") from error
        end = offset + data.nbytes
        raise CheckpointError(f"{self._folder / block.file} is truncated: {name} should extend to byte {end}")

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


# --- The headers of a checkpoint's files, which must agree with the manifest, and the hashes of their blocks


LARGEST = 1 << 30  #: bytes of a header, or a manifest

HeaderBlocks = dict[str, tuple[str, list[int], int]]  # by block name: dtype, shape, and first byte in the file


class Headers:
    """The headers of the files of a checkpoint, and the hashes of their blocks; each is read on first use."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self._manifest = folder, manifest
        self._read: dict[str, HeaderBlocks] = {}
        self._tables: dict[str, bytes] = {}

    def sha256(self, block: StoredBlock) -> bytes:
        """The SHA-256 that a block has in its file's table of hashes. Raises CheckpointError if that is damaged."""
        if block.file not in self._tables:
            stored = self._manifest.file(block.file)
            self._tables[block.file] = self._table(stored) if stored.hashes is None else stored.hashes
        return self._tables[block.file][HASH * block.row :][:HASH]

    def _table(self, stored: StoredFile) -> bytes:
        """The table of hashes of a file."""
        path, table = self._folder / stored.name, np.empty(HASH * stored.blocks, np.uint8)
        try:
            with open(path, "rb") as file:
                read_into(table.data, file.fileno(), stored.end)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if sha256(table.data).hexdigest() != stored.sha256:
            raise CheckpointError(f"{path} is damaged: the hashes of its blocks are not what was written")
        return table.tobytes()

    def check(self, name: str, array: StoredArray, block: StoredBlock) -> None:
        """Raise CheckpointError unless the file's header has the block with the same array, dtype, place and step."""
        if block.file not in self._read:
            path = self._folder / block.file
            step, self._read[block.file] = read_file_header(path)
            if step != str(self._manifest.step):
                raise CheckpointError(f"{path} is damaged, or of another checkpoint: it says step {step!r:.40}")
        in_header = self._read[block.file].get(block_name(name, block.rectangle, array.shape))
        if in_header != (array.dtype, list(block.rectangle.shape), block.offset):
            raise CheckpointError(
                f"{self._folder / block.file}: its header and the manifest differ in {name}{block.rectangle}: one of "
                "them was altered"
            )


def read_file_header(path: Path) -> tuple[str, HeaderBlocks]:
    """The step in the header of a safetensors file, and its blocks. Raises CheckpointError."""
    try:
        blocks, after, _ = read_header(path, LARGEST)
        facts = blocks.pop("__metadata__", {})
        return facts.get("step", ""), {
            name: (block["dtype"], block["shape"], after + block["data_offsets"][0]) for name, block in blocks.items()
        }
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{path}: its header cannot be read ({error})") from error
