"""Safetensors files of blocks: written contiguous, hashed on the way and put on disk; read with their hashes checked.

The format: eight bytes that say how long the header is, the header (JSON: of each block dtype, shape, and where it
lies behind the header), and the blocks, without gaps. Written here and not by its library, which hashes nothing, and
which writes arrays scrambled that are not contiguous (safetensors 0.8).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.checkpoints.dtypes import DTYPES, dtype_name
from spmd_engine.errors import CheckpointError
from spmd_engine.sharding.rectangles import Rectangle

HASHERS = 2  #: threads that hash what one rank writes: one alone is slower than many disks
TO_DISK = 8 << 20  #: bytes that the system is told to write to the disk, and not to wait for more
AHEAD = 16  #: blocks that may be written and wait to be hashed
IN_CACHE = 1 << 18  #: bytes that are hashed, and then looked at while they are in the processor's cache


@dataclass(frozen=True)
class BlockToWrite:
    """A block to be written: what it is, known before it is there."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], Array]


@dataclass(frozen=True)
class Written:
    """Where a block lies in its file."""

    dtype: str  #: as files call it
    offset: int  #: bytes from the file's beginning
    sha256: str  #: of its bytes


def write_blocks(path: Path, blocks: Sequence[BlockToWrite], facts: Mapping[str, str]) -> list[Written]:
    """Write a new file of blocks, one after the other, each with a name of its own, and see it onto the disk.

    Beside that, threads hash the blocks and look at their values: what takes longer, the disk or they, is what a file
    takes. Raises OSError where it cannot be written, and CheckpointError for a block with a value that is not finite.
    """
    dtypes = [dtype_name(block.dtype, block.name) for block in blocks]
    head = header([(block.name, dtype, block.shape) for block, dtype in zip(blocks, dtypes, strict=True)], facts)
    hashes: list[Future[str]] = []
    offsets, begun = [len(head)], 0
    with path.open("xb") as file, ThreadPoolExecutor(HASHERS, "hashing") as hashers:
        file.write(head)
        for block in blocks:
            host = host_array(block.read())
            hashes.append(hashers.submit(_sha256_of_finite, block.name, host))
            file.write(bytes_of(host))
            offsets.append(offsets[-1] + host.nbytes)
            if offsets[-1] - begun >= TO_DISK:
                _begin_to_sync(file, begun, offsets[-1] - begun)
                begun = offsets[-1]
            if len(hashes) > AHEAD:
                hashes[-AHEAD].result()  # until it is hashed, a block is held
        file.flush()
        os.fsync(file.fileno())
        sha256 = [each.result() for each in hashes]
        return [Written(*each) for each in zip(dtypes, offsets[:-1], sha256, strict=True)]


def _begin_to_sync(file: BinaryIO, offset: int, nbytes: int) -> None:
    """Let the system write these bytes to the disk from now on, not only when all are waited for."""
    if hasattr(os, "posix_fadvise"):
        file.flush()
        with suppress(OSError):  # it is only advice
            os.posix_fadvise(file.fileno(), offset, nbytes, os.POSIX_FADV_DONTNEED)


def _sha256_of_finite(name: str, host: np.ndarray) -> str:
    """The SHA-256 of an array's bytes; raises CheckpointError for a value that is not finite."""
    digest, flat, finite = hashlib.sha256(), host.reshape(-1), True
    for first in range(0, flat.size, IN_CACHE // host.itemsize):
        part = flat[first : first + IN_CACHE // host.itemsize]
        digest.update(part.view(np.uint8))
        finite = finite and is_finite(part)
    if not finite:
        raise CheckpointError(f"{name} has values that are not finite: not saved")
    return digest.hexdigest()


def header(blocks: Sequence[tuple[str, str, Sequence[int]]], facts: Mapping[str, str]) -> bytes:
    """The first bytes of a file of blocks: name, dtype and shape of each, in the order in which they follow."""
    described: dict[str, object] = {"__metadata__": dict(facts)}
    end = 0
    for name, dtype, shape in blocks:
        begin, end = end, end + int(np.prod(shape, dtype=np.int64)) * DTYPES[dtype].itemsize
        described[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the blocks are aligned
    return len(text).to_bytes(8, "little") + text


def read_block(
    path: Path,
    offset: int,
    shape: Sequence[int],
    dtype: np.dtype,
    sha256: str,
    name: str,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """A block, its hash checked; raises CheckpointError for any byte that is not the one that was written.

    ``out``, contiguous, of this shape and dtype, is where it is read to, if given.
    """
    block = np.empty(shape, dtype) if out is None else out
    data = memoryview(block.reshape(-1).view(np.uint8))
    try:
        with path.open("rb", buffering=0) as file:
            read_into(data, file.fileno(), offset, path, name)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if hashlib.sha256(data).hexdigest() != sha256:
        raise damaged(path, name, offset, data.nbytes)
    return block


def read_into(data: memoryview, descriptor: int, offset: int, path: Path, name: str) -> None:
    """Fill ``data`` from an open file, from this byte on. Raises OSError; CheckpointError if the file ends before."""
    done = 0
    while done < data.nbytes and (count := os.preadv(descriptor, [data[done:]], offset + done)):
        done += count
    if done < data.nbytes:
        raise CheckpointError(f"{path} is cut short: {name} should go on to byte {offset + data.nbytes}")


def damaged(path: Path, name: str, offset: int, nbytes: int) -> CheckpointError:
    """What is said of a block whose hash is not the one that was written."""
    return CheckpointError(
        f"{path} is damaged: {name} is not what was written (bytes {offset} to {offset + nbytes}; its "
        "SHA-256 differs). Take this checkpoint from a copy, or remove its folder to go on from the one before"
    )


def block_name(name: str, piece: Rectangle, shape: Sequence[int]) -> str:
    """What a block is called in its file: as its array, if it is all of it."""
    return name if piece == Rectangle.whole(shape) else f"{name}{piece}"


def is_finite(x: np.ndarray) -> bool:
    """Whether all values are finite: numbers that are, and whatever is no number."""
    return x.dtype.kind not in "fcV" or bool(np.isfinite(x).all())


def host_array(block: Array) -> np.ndarray:
    """A block on the host in C order, little-endian."""
    host = np.asarray(backend_of(block).to_host(block), order="C")
    return host.astype(host.dtype.newbyteorder("<"), copy=False) if host.dtype.byteorder == ">" else host


def bytes_of(host: np.ndarray) -> memoryview:
    """The bytes of a contiguous array."""
    return memoryview(host.reshape(-1).view(np.uint8))
