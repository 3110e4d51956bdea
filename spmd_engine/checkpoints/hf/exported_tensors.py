"""Writing whole tensors to new files, block by block, by any number of ranks or none."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import BinaryIO

import numpy as np

from spmd_engine.checkpoints.format.blocks import bytes_of
from spmd_engine.checkpoints.hf.weights import StoredView
from spmd_engine.checkpoints.read import Sliceable
from spmd_engine.comm.agreement.rank_zero import on_all_ranks, on_rank_zero
from spmd_engine.comm.group import Group
from spmd_engine.comm.shared_memory.cores import cores_here
from spmd_engine.errors import CheckpointError
from spmd_engine.formats.safetensors_header import dtype_of
from spmd_engine.sharding.rectangles import Rectangle

WRITERS = 4  #: threads of a rank, if it has so many cores
LARGEST_HALF = 65504.0  #: the largest float16
AT_ONCE = 8 << 20  #: bytes; tensors up to this size are assembled in memory


@dataclass
class TensorToWrite:
    """A tensor to be written: its parameters, and its first byte in its file."""

    name: str
    dtype: str  #: its name in files
    shape: tuple[int, ...]
    parts: dict[str, StoredView] = field(default_factory=dict)
    offset: int = 0

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * dtype_of(self.dtype).itemsize


Files = Mapping[Path, Sequence[TensorToWrite]]
#: From names, dtypes and shapes to the header of a file, the first byte of each tensor, and the file's size.
Head = Callable[[Sequence[tuple[str, str, Sequence[int]]]], tuple[bytes, list[int]]]


def write_tensors(
    arrays: Mapping[str, Sliceable],
    files: Files,
    group: Group | None,
    head: Head,
    begin: Callable[[], Mapping[Path, bytes]] = dict,
) -> None:
    """Write new files of tensors, which are assembled from ``arrays``, with headers by ``head``.

    If a ``group`` is given, its ranks share the stored blocks of the arrays, and the call is collective: one rank reads
    each block once and writes it to its place. A rank holds at most a few blocks. ``begin`` runs on the first rank; it
    may raise an error, and returns the other files to write. Raises CheckpointError, on all ranks, if a block is
    damaged, or a file exists already or cannot be written; the latter is an OSError without a group. Files get their
    names only when all are complete.
    """
    rank, ranks, new = group.rank if group else 0, group.size if group else 1, ExportedFiles()
    threads = max(1, min(WRITERS, int(cores_here() // ranks)))
    heads = {path: _header(tensors, head) for path, tensors in files.items()}

    def make() -> None:
        others = begin()
        for path, (content, size) in heads.items():
            with new.open(path) as file:
                file.write(content)
                os.posix_fallocate(file.fileno(), 0, size)
        for path, content in others.items():
            with new.open(path) as file:
                file.write(content)

    def write() -> None:
        with ThreadPoolExecutor(threads, "exporting") as pool:
            list(pool.map(write_blocks, _share(arrays, files, rank, ranks)))

    def write_blocks(work: tuple[Path, TensorToWrite, list[tuple[str, Rectangle]]]) -> None:
        path, tensor, blocks = work
        with unfinished_name(path).open("r+b", buffering=0) as file:
            _write(file, tensor, [(tensor.parts[name], block, arrays[name]) for name, block in blocks])

    try:
        on_rank_zero(group, make, CheckpointError) if group else make()
        on_all_ranks(group, write, CheckpointError) if group else write()
        on_rank_zero(group, new.commit, CheckpointError) if group else new.commit()
    finally:
        new.discard()


def _header(tensors: Sequence[TensorToWrite], head: Head) -> tuple[bytes, int]:
    """The header of one file, and its size; also sets each tensor's ``offset``."""
    content, offsets = head([(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors])
    for tensor, offset in zip(tensors, offsets, strict=False):
        tensor.offset = offset
    return content, offsets[-1]


def _share(
    arrays: Mapping[str, Sliceable], files: Files, rank: int, ranks: int
) -> Iterator[tuple[Path, TensorToWrite, list[tuple[str, Rectangle]]]]:
    """The tensors of which a rank writes a part, and the blocks of arrays that it writes.

    A rank's blocks are consecutive, and have about as many bytes as those of others. One rank writes a small tensor.
    """
    tensors = [(path, tensor) for path, in_file in files.items() for tensor in in_file]
    total, before = sum(tensor.nbytes for _, tensor in tensors), 0
    for path, tensor in tensors:
        blocks, begin, is_small = [], before, tensor.nbytes <= AT_ONCE
        for name, view in tensor.parts.items():
            if name not in arrays or tuple((array := arrays[name]).shape) != view.shape:
                raise CheckpointError(f"there is no {name} of shape {list(view.shape)}: is this another model?")
            for block in array.blocks:
                if (begin if is_small else before) * ranks // total == rank:
                    blocks.append((name, block))
                before += block.size * dtype_of(tensor.dtype).itemsize
        if blocks:
            yield path, tensor, blocks


def _write(file: BinaryIO, tensor: TensorToWrite, parts: Sequence[tuple[StoredView, Rectangle, Sliceable]]) -> None:
    """Write parts to their places in a tensor: a small tensor is assembled in memory, and written at once.

    A part of a large tensor that is contiguous in the file is written directly. Other parts are copied into the mapped
    file, which takes more than twice the time.
    """
    dtype, is_small = dtype_of(tensor.dtype), tensor.nbytes <= AT_ONCE
    if is_small:
        target = np.zeros(tensor.shape, dtype)
    else:
        target = np.memmap(file, dtype, "r+", tensor.offset, tensor.shape)
    for view, block, array in parts:
        part, place = np.asarray(array[block.index]), view.place(target, block.index)
        if dtype == np.float16 and part.dtype != dtype and (most := float(np.abs(part).max(initial=0))) > LARGEST_HALF:
            raise CheckpointError(
                f"{tensor.name} has a number of magnitude {most:g}, but the largest of float16 is {LARGEST_HALF:g}: "
                "export bfloat16 or float32"
            )
        if is_small or place.size > part.size or not place.flags.c_contiguous:
            view.fill(place, block.index, part)
        else:
            run = np.empty(place.shape, dtype)
            view.fill(run, block.index, part)
            _write_run(file.fileno(), bytes_of(run), tensor.offset + _address(place) - _address(target))
    if is_small:
        _write_run(file.fileno(), bytes_of(target), tensor.offset)


def _write_run(descriptor: int, data: memoryview, offset: int) -> None:
    """Write ``data`` at ``offset``, and let the system begin to write it to the disk now, not at the final fsync."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            os.posix_fadvise(descriptor, offset, done, os.POSIX_FADV_DONTNEED)


def _address(x: np.ndarray) -> int:
    return x.__array_interface__["data"][0]


# --- New files that get their names when all are complete, and replace no existing file


class ExportedFiles:
    """Files that are written under temporary names: ``open`` each, ``commit`` all, and ``discard`` in any case."""

    def __init__(self) -> None:
        self._created: list[Path] = []
        self._paths: list[Path] = []

    def open(self, path: Path) -> BinaryIO:
        """Create the file that is to become ``path``, under its ``unfinished_name``.

        Raises CheckpointError if a file of either name exists already, OSError if it cannot be created.
        """
        self._refuse_existing(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = unfinished_name(path).open("xb")
        except FileExistsError:
            raise CheckpointError(
                f"{unfinished_name(path)} is there already, from an export that is running or failed: remove it, if "
                "none is running"
            ) from None
        self._created.append(unfinished_name(path))
        self._paths.append(path)
        return file

    def commit(self) -> None:
        """Flush the files to the disk and give them their names, in the order of ``open``. Raises as ``open`` does."""
        for path in self._paths:
            self._refuse_existing(path)
            with unfinished_name(path).open("rb") as file:
                os.fsync(file.fileno())
        for path in self._paths:
            os.rename(unfinished_name(path), path)
            self._created.append(path)
        self._created.clear()

    def discard(self) -> None:
        """Remove the created files that are not committed."""
        for path in self._created:
            with suppress(OSError):
                path.unlink()
        self._created.clear()

    def _refuse_existing(self, path: Path) -> None:
        if os.path.lexists(path):
            raise CheckpointError(f"{path} is there already; export to another place, or move it away")


def unfinished_name(path: Path) -> Path:
    """The name of a file until it is complete."""
    return path.with_name(f".{path.name}-unfinished")
