"""Writing safetensors files of blocks: each contiguous, hashed and looked at on the way, and seen onto the disk.

The format: eight bytes that say how long the header is, the header (JSON: of each block dtype, shape, and where it
lies behind the header), and the blocks, without gaps. Written here and not by its library, which hashes nothing, and
which writes arrays scrambled that are not contiguous (safetensors 0.8).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np

from spmd_engine.arrays.backend import Array
from spmd_engine.checkpoints.dtypes import DTYPES, dtype_name
from spmd_engine.checkpoints.files import IN_CACHE, host_array, is_finite
from spmd_engine.checkpoints.new_file import NewFile
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
            digest.update(as_bytes)
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
