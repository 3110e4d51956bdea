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
from spmd_engine.checkpoints.format.manifest import Manifest, StoredArray, StoredBlock
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


class _BlockOfNode(NamedTuple):
    """A block of which ranks of this node need a part."""

    number: int  #: among the blocks of its array
    ranks: list[int]  #: ranks of this node that need a part
    elements: int
    part: Rectangle | None  #: that this rank needs
    place: tuple  #: where that part is in this rank's shard


def parts_of_rank(
    arrays: Sequence[Wanted], rank: int, node_ranks: Sequence[int]
) -> Iterator[tuple[Wanted, list[tuple[StoredBlock, Rectangle, bool, tuple]]]]:
    """The arrays of which a rank needs a part: blocks, its part of each, whether it checks the block, and the part's
    place in its shard.

    Among the ranks of the node that need a block, the one with the least bytes to check so far checks it; or one with
    not much more, if it has already read that file's header.
    """
    loads, readers = dict.fromkeys(node_ranks, 0), {}  # bytes to check, by rank; the last checking rank, by file
    shares: dict[
        tuple[int, int], list[_BlockOfNode]
    ] = {}  # equal layers, and all state of a parameter, have equal ones
    for array in arrays:
        bounds = array.stored.bounds
        kind = id(array.placed), id(bounds)
        if kind not in shares:
            shares[kind] = _shares(bounds, array.placed.held, rank, node_ranks)
        parts = []
        for number, ranks, elements, part, place in shares[kind]:
            file = array.stored.file_of(number)
            least, checker = min(ranks, key=loads.__getitem__), readers.get(file)
            if checker not in ranks or loads[checker] > loads[least] + UNEVEN:
                checker = readers[file] = least
            loads[checker] += elements * array.dtype.itemsize
            if part is not None:
                parts.append((array.stored.blocks[number], part, rank == checker, place))
        if parts:
            yield array, parts


def _shares(bounds: np.ndarray, held: Sequence[Rectangles], rank: int, node_ranks: Sequence[int]) -> list[_BlockOfNode]:
    """The blocks, ``bounds[blocks 2 dims]``, of which ranks of this node need a part."""
    needs, wanted = np.zeros((len(bounds), len(node_ranks)), bool), [held[node_rank] for node_rank in node_ranks]
    owners = [number for number, rectangles in enumerate(wanted) for _ in rectangles]
    parts = np.array([*chain(*wanted)], np.int64).reshape(len(owners), *bounds.shape[1:])
    for number, shared in zip(owners, intersected(bounds, parts).T, strict=True):
        needs[:, number] |= shared
    shares = []
    for number in np.flatnonzero(needs.any(axis=1)).tolist():
        block, part, place = Rectangle(*map(tuple, bounds[number].tolist())), None, ()
        ranks = [node_ranks[place] for place in np.flatnonzero(needs[number]).tolist()]
        if rank in ranks:
            (shard,) = held[rank]
            part = block & shard
            place = (..., *part.within(shard).index)
        shares.append(_BlockOfNode(number, ranks, block.size, part, place))
    return shares


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

    ``headers`` have the hashes of blocks; without them, blocks have their own. ``compares``: also check headers.
    """

    def __init__(self, folder: Path, headers: Headers | None = None, *, compares: bool = True) -> None:
        self._folder, self._headers, self._opening = folder, headers, Lock()
        self._compares = compares and headers is not None
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
        if checked and self._headers is not None and self._compares:
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
        if checked and digest.hexdigest() != (block.sha256 or (self._headers.sha256(block) if self._headers else "")):
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
        self._folder, self._step, self._hashes = folder, manifest.step, manifest.hashes
        self._read: dict[str, HeaderBlocks] = {}
        self._tables: dict[str, bytes] = {}

    def sha256(self, block: StoredBlock) -> str:
        """The SHA-256 that a block has in its file's table of hashes. Raises CheckpointError if that is damaged."""
        path = self._folder / block.file
        if block.file not in self._tables:
            offset, rows, digest = self._hashes[block.file]
            table = np.empty(HASH * rows, np.uint8)
            try:
                with open(path, "rb") as file:
                    read_into(table.data, file.fileno(), offset)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from error
            if sha256(table.data).hexdigest() != digest:
                raise CheckpointError(f"{path} is damaged: the hashes of its blocks are not what was written")
            self._tables[block.file] = table.tobytes()
        return self._tables[block.file][HASH * block.row :][:HASH].hex()

    def check(self, name: str, array: StoredArray, block: StoredBlock) -> None:
        """Raise CheckpointError unless the file's header has the block with the same array, dtype, place and step."""
        if block.file not in self._read:
            path = self._folder / block.file
            step, self._read[block.file] = read_file_header(path)
            if step != str(self._step):
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
