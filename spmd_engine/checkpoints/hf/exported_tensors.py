"""Whole tensors in new safetensors files, written block by block by any number of ranks or none."""

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

from spmd_engine.checkpoints.format.blocks import DTYPES, bytes_of
from spmd_engine.checkpoints.format.write import header
from spmd_engine.checkpoints.hf.weights import StoredView
from spmd_engine.checkpoints.read import Sliceable
from spmd_engine.comm.agreement.rank_zero import on_all_ranks, on_rank_zero
from spmd_engine.comm.group import Group
from spmd_engine.comm.shared_memory.cores import cores_here
from spmd_engine.errors import CheckpointError
from spmd_engine.sharding.rectangles import Rectangle

WRITERS = 4  #: threads of a rank, where it has so many cores
AT_ONCE = 8 << 20  #: bytes; tensors up to this are put together in memory


@dataclass
class TensorToWrite:
    """One to be written: the parameters in it, and where in its file it begins."""

    name: str
    dtype: str  #: as files call it
    shape: tuple[int, ...]
    parts: dict[str, StoredView] = field(default_factory=dict)
    offset: int = 0

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize


Files = Mapping[Path, Sequence[TensorToWrite]]


def write_tensors(
    arrays: Mapping[str, Sliceable],
    files: Files,
    group: Group | None,
    facts: Mapping[str, str],
    begin: Callable[[], Mapping[Path, bytes]] = dict,
) -> None:
    """Write new files of tensors, which are made of ``arrays``, and ``facts`` of them.

    The ranks of a ``group``, if one is given, share the blocks that the arrays are stored in: each is read by one of
    them, once, and written to where it belongs. Collective then. No rank holds more than a few blocks. ``begin``, on
    the first rank, may refuse, and says what other files there are to be. Raises CheckpointError, on all ranks, where
    something is damaged, or a file is there already, or cannot be written, which without a group is an OSError. Files
    have their names only when all are complete.
    """
    rank, ranks, new = group.rank if group else 0, group.size if group else 1, ExportedFiles()
    threads = max(1, min(WRITERS, int(cores_here() // ranks)))
    heads = {path: _header(held, facts) for path, held in files.items()}

    def make() -> None:
        others = begin()
        for path, held in files.items():
            with new.open(path) as opened:
                opened.write(heads[path])
                os.posix_fallocate(opened.fileno(), 0, len(heads[path]) + sum(each.nbytes for each in held))
        for path, content in others.items():
            with new.open(path) as opened:
                opened.write(content)

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


def _header(held: Sequence[TensorToWrite], facts: Mapping[str, str]) -> bytes:
    """Of one file; gives each tensor its place there."""
    head = header([(each.name, each.dtype, each.shape) for each in held], facts)
    offset = len(head)
    for each in held:
        each.offset = offset
        offset += each.nbytes
    return head


def _share(
    arrays: Mapping[str, Sliceable], files: Files, rank: int, ranks: int
) -> Iterator[tuple[Path, TensorToWrite, list[tuple[str, Rectangle]]]]:
    """The tensors that a rank writes some of, and which blocks of which arrays.

    Of all in order that is one run, about as many bytes as those of others. A small tensor is one rank's.
    """
    tensors = [(path, each) for path, held in files.items() for each in held]
    total, before = sum(each.nbytes for _, each in tensors), 0
    for path, tensor in tensors:
        own, begin, is_small = [], before, tensor.nbytes <= AT_ONCE
        for name, view in tensor.parts.items():
            if name not in arrays or tuple((array := arrays[name]).shape) != view.shape:
                raise CheckpointError(f"there is no {name} of shape {list(view.shape)}: is this another model?")
            for block in array.blocks:
                if (begin if is_small else before) * ranks // total == rank:
                    own.append((name, block))
                before += block.size * DTYPES[tensor.dtype].itemsize
        if own:
            yield path, tensor, own


def _write(file: BinaryIO, tensor: TensorToWrite, parts: Sequence[tuple[StoredView, Rectangle, Sliceable]]) -> None:
    """Put parts into their places in a tensor: a small one is put together in memory, and written at once.

    Parts of a large one are written where they are one run of bytes there. Others are brought there by way of the
    file's pages, which takes more than twice the time.
    """
    dtype, is_small = DTYPES[tensor.dtype], tensor.nbytes <= AT_ONCE
    if is_small:
        whole = np.zeros(tensor.shape, dtype)
    else:
        whole = np.memmap(file, dtype, "r+", tensor.offset, tensor.shape)
    for view, block, array in parts:
        part, place = np.asarray(array[block.index]), view.place(whole, block.index)
        if is_small or place.size > part.size or not place.flags.c_contiguous:
            view.fill(place, block.index, part)
        else:
            run = np.empty(place.shape, dtype)
            view.fill(run, block.index, part)
            _write_run(file.fileno(), bytes_of(run), tensor.offset + _address(place) - _address(whole))
    if is_small:
        _write_run(file.fileno(), bytes_of(whole), tensor.offset)


def _write_run(descriptor: int, data: memoryview, offset: int) -> None:
    """Write so many bytes there, and have the system see them onto the disk from now on, not when all are there."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            os.posix_fadvise(descriptor, offset, done, os.POSIX_FADV_DONTNEED)


def _address(x: np.ndarray) -> int:
    return x.__array_interface__["data"][0]


# --- New files beside others' files: all of them have their names when all are complete, and nothing there is replaced


class ExportedFiles:
    """Files that are being written under other names: ``open`` each, ``commit`` all, and ``discard`` in any case."""

    def __init__(self) -> None:
        self._made: list[Path] = []
        self._paths: list[Path] = []

    def open(self, path: Path) -> BinaryIO:
        """A new file that is to be ``path``, under its ``unfinished_name``.

        Raises CheckpointError where something of either name is there already, OSError where it cannot be made.
        """
        self._refuse_existing(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = unfinished_name(path).open("xb")
        except FileExistsError:
            raise CheckpointError(
                f"{unfinished_name(path)} is there already, of an export that is going on or broke off: remove it, if "
                "none is going on"
            ) from None
        self._made.append(unfinished_name(path))
        self._paths.append(path)
        return file

    def commit(self) -> None:
        """See them onto the disk and give them their names, the first ones first. Raises as ``open`` does."""
        for path in self._paths:
            self._refuse_existing(path)
            with unfinished_name(path).open("rb") as file:
                os.fsync(file.fileno())
        for path in self._paths:
            os.rename(unfinished_name(path), path)
            self._made.append(path)
        self._made.clear()

    def discard(self) -> None:
        """Remove what was made, unless it was committed."""
        for path in self._made:
            with suppress(OSError):
                path.unlink()
        self._made.clear()

    def _refuse_existing(self, path: Path) -> None:
        if os.path.lexists(path):
            raise CheckpointError(f"{path} is there already; export to another place, or move it away")


def unfinished_name(path: Path) -> Path:
    """What a file is called until it is complete."""
    return path.with_name(f".{path.name}-unfinished")
