"""A digest of arrays that does not depend on their sharding: equal on all meshes, computed without moving the arrays.

The digest sums each element's bits times an odd number, which depends on the array's name and the element's place in
the global array. Sums are modulo 2^64, so their order does not matter. An array is summed in chunks of whole rows, so
that a difference is located to within a chunk. A flipped bit always changes the sum of its chunk, since it adds a power
of two times an odd number. The digest does not protect against intent; the SHA-256 in the manifest do.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from zlib import crc32

import numpy as np

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.checkpoints.format.blocks import dtype_name
from spmd_engine.checkpoints.format.manifest import MODEL, OPTIMIZER
from spmd_engine.checkpoints.read import Checkpoint
from spmd_engine.checkpoints.save import write_plans
from spmd_engine.engine import ShardedEngine
from spmd_engine.engine.optimizers import Optimizer
from spmd_engine.errors import ReplicasDifferError
from spmd_engine.sharding import Rectangle
from spmd_engine.sharding.placement import Placement, Rectangles, ranks_with_the_same

CHUNK = 1 << 18  #: elements of a chunk, approximately
_AT_ONCE = 1 << 15  # elements: a few temporaries of that size stay in cache


@dataclass(frozen=True)
class ArrayDigest:
    """The sums of an array's chunks."""

    shape: tuple[int, ...]
    dtype: str
    sums: np.ndarray  #: uint64, one for each chunk

    @property
    def rows(self) -> int:
        """Rows of a chunk."""
        return rows_of_chunk(self.shape)

    def text(self) -> str:
        """Sixteen hexadecimal digits that represent the shape, the dtype and all sums."""
        content = f"{self.shape}{self.dtype}".encode() + self.sums.astype("<u8").tobytes()
        return hashlib.sha256(content).hexdigest()[:16]


Digests = Mapping[str, ArrayDigest]  # by section and name: "model/block0/mlp/w0"


def digest_of_engine(engine: ShardedEngine, optimizer: Optimizer | None = None) -> Digests:
    """The digests of all arrays that a checkpoint would hold, equal on all ranks. Collective: one small all_reduce."""
    plans = write_plans(engine, optimizer)
    tables: dict[str, tuple[tuple[int, ...], str, np.ndarray]] = {}
    for plan in plans:
        for name, placed in plan.placement.items():
            dtype = dtype_name(placed.dtype, name)
            tables[f"{plan.section}/{name}"] = placed.shape, dtype, np.zeros(chunks_of(placed.shape), np.uint64)
        for name, piece, block in plan.blocks_of(engine.group().rank):
            key = f"{plan.section}/{name}"
            _add(tables[key][2], key, block, piece, tables[key][0])
    flat = np.concatenate([table for _, _, table in tables.values()] or [np.zeros(0, np.uint64)])
    flat = engine.group().all_reduce(flat.view(np.int64), label="digest").view(np.uint64)
    ends = np.cumsum([len(table) for _, _, table in tables.values()])[:-1].tolist()
    sums = np.split(flat, ends) if tables else []
    return {
        key: ArrayDigest(shape, dtype, chunk_sums)
        for (key, (shape, dtype, _)), chunk_sums in zip(tables.items(), sums, strict=True)
    }


def digest_of_checkpoint(checkpoint: Checkpoint) -> Digests:
    """The digests of all arrays in a checkpoint, read block by block with a check of the hashes."""
    digests = {}
    for section in (MODEL, OPTIMIZER):
        for name, array in checkpoint.manifest.sections.get(section, {}).items():
            key, sums = f"{section}/{name}", np.zeros(chunks_of(array.shape), np.uint64)
            for block in array.blocks:
                _add(sums, key, checkpoint.read_block(name, array, block), block.rectangle, array.shape)
            digests[key] = ArrayDigest(array.shape, array.dtype, sums)
    return digests


def digest_text(digests: Digests) -> str:
    """One line for all arrays: 64 hexadecimal digits."""
    content = {key: digest.text() for key, digest in digests.items()}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def differences(one: Digests, other: Digests) -> list[str]:
    """Sentences for the differences of two digests: arrays that only one has, rows of chunks with different sums."""
    sentences = [f"{key}: only one of the two has it" for key in sorted(set(one) ^ set(other))]
    for key in one:
        if key not in other:
            continue
        a, b = one[key], other[key]
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            sentences.append(f"{key}: {a.dtype}{list(a.shape)} and {b.dtype}{list(b.shape)}")
            continue
        for chunk in np.flatnonzero(a.sums != b.sums).tolist():
            first, last = chunk * a.rows, min((chunk + 1) * a.rows, a.shape[0] if a.shape else 1)
            sentences.append(f"{key}: rows {first} to {last - 1} of {list(a.shape)} differ")
    return sentences


def rows_of_chunk(shape: tuple[int, ...]) -> int:
    """The number of rows of an array in a chunk."""
    return max(1, CHUNK // max(1, prod(shape[1:])))


def chunks_of(shape: tuple[int, ...]) -> int:
    """The number of chunks of an array."""
    return -(-shape[0] // rows_of_chunk(shape)) if shape else 1


def _add(sums: np.ndarray, key: str, block: Array, rectangle: Rectangle, shape: tuple[int, ...]) -> None:
    """Add the contributions of a rectangle's elements to the sums of their chunks."""
    if not rectangle.size:
        return
    host = np.asarray(backend_of(block).to_host(block), order="C")
    bits = host.reshape(-1).view(np.dtype(f"u{host.dtype.itemsize}")).reshape(len(host) if shape else 1, -1)
    within = np.zeros(1, np.uint64)  # the places of the rectangle's elements in a whole row
    for start, stop, length in zip(rectangle.start[1:], rectangle.stop[1:], shape[1:], strict=True):
        within = (within[:, None] * np.uint64(length) + np.arange(start, stop, dtype=np.uint64)).reshape(-1)
    seed = np.uint64(crc32(key.encode())) << np.uint64(32)
    row, first = np.uint64(prod(shape[1:])), rectangle.start[0] if shape else 0
    at_once, rows = max(1, _AT_ONCE // len(within)), rows_of_chunk(shape)
    with np.errstate(over="ignore"):
        for top in range(0, len(bits), at_once):
            part = bits[top : top + at_once].astype(np.uint64)
            numbers = np.arange(first + top, first + top + len(part), dtype=np.uint64)
            part *= _odd_numbers(numbers[:, None] * row + within + seed)
            np.add.at(sums, (numbers // np.uint64(rows)).astype(np.int64), part.sum(axis=1, dtype=np.uint64))


def _odd_numbers(x: np.ndarray) -> np.ndarray:
    """An odd number for each element: splitmix64 (Steele, Lea and Flood, 2014), with the last bit set."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    x |= np.uint64(1)
    return x


# --- Replicas must be equal to the bit


def compare_replicas(engine: ShardedEngine, optimizer: Optimizer | None = None) -> None:
    """Raise ReplicasDifferError, on every rank, unless all ranks that hold a block have the same bits of it.

    One all_gather compares the CRC-32 of the CRC-32s of a rank's blocks of parameters, buffers and the optimizer's
    state, for those arrays together that are divided in the same way, which detects any single flipped bit. A second
    one finds the blocks that differ. Processors or libraries that round differently may differ in last bits.
    Collective.
    """
    kinds: list[tuple[str, Placement, Mapping[str, Array]]] = [
        ("", engine.placement(), {**engine.parameters, **engine.buffers})
    ]
    if optimizer is not None and optimizer.state:
        owned = engine.placement(owned=True)
        kinds += [(f"{kind} of ", owned, engine.named(state)) for kind, state in sorted(optimizer.state.items())]
    group, firsts = engine.group(), dict[int, tuple[np.ndarray, bytes]]()
    arrays: list[tuple[str, Sequence[Rectangles], np.ndarray]] = []  # with ``ranks_with_the_same``
    alike: dict[bytes, list[int]] = {}  # those that are divided in the same way
    checksums = np.zeros(sum(len(placement) for _, placement, _ in kinds), np.uint32)
    for kind, placement, blocks in kinds:
        for name, placed in placement.items():
            if id(placed) not in firsts:  # equal layers share it
                first = ranks_with_the_same(placed.held)
                firsts[id(placed)] = first, first.tobytes()
            first, key = firsts[id(placed)]
            if placed.held[group.rank]:
                checksums[len(arrays)] = _checksum(blocks[name])
            alike.setdefault(key, []).append(len(arrays))
            arrays.append((f"{kind}{name}", placed.held, first))
    combined = np.array([crc32(checksums[numbers].data) for numbers in alike.values()], np.uint32)
    gathered = group.all_gather(combined, label="replicas").reshape(group.size, -1)
    if not any(_differ(sums, arrays[i][2]).any() for sums, (i, *_) in zip(gathered.T, alike.values(), strict=True)):
        return
    gathered = group.all_gather(checksums, label="replicas").reshape(group.size, -1)
    differ = sorted(
        (int(rank), number)
        for number, (_, _, first) in enumerate(arrays)
        for rank in np.unique(first[_differ(gathered[:, number], first)])
    )
    lowest, number = differ[0]
    name, held, first = arrays[number]
    sums = {rank: int(gathered[rank, number]) for rank in np.flatnonzero(first == lowest).tolist()}
    more = f" (and {len(differ) - 1} more blocks)" if len(differ) > 1 else ""
    raise ReplicasDifferError(
        f"{name}{held[lowest][0]} is not the same on the ranks that hold it{more}: {_differing_ranks(sums)}. A bit was "
        "flipped, or a rank computed another value; continue from the last checkpoint (--resume). On several kinds "
        "of processors, which round differently, switch the comparison off: --check-replicas-every 0"
    )


def _differ(sums: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Which ranks have another sum than the first rank with the same block; -1: they have none."""
    return (first >= 0) & (sums != sums[first])


def _differing_ranks(sums: Mapping[int, int]) -> str:
    """The ranks that differ from the majority, or all groups of equal ranks if there is no majority."""
    counts = Counter(sums.values()).most_common()
    if len(counts) > 1 and counts[0][1] == counts[1][1]:
        groups = [[rank for rank in sums if sums[rank] == value] for value, _ in counts]
        return " against ".join(f"rank {', '.join(map(str, ranks))}" for ranks in groups)
    others = [str(rank) for rank in sums if sums[rank] != counts[0][0]]
    return f"rank {', '.join(others)} differs from {counts[0][1]} others that agree"


def _checksum(array: Array) -> int:
    host = np.asarray(backend_of(array).to_host(array), order="C")
    return crc32(host.reshape(-1).view(np.uint8).data)
