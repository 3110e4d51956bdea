"""Whole tensors in new safetensors files, written block by block by any number of ranks or none."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import BinaryIO

import numpy as np

from spmd_engine.checkpoints.dtypes import DTYPES
from spmd_engine.checkpoints.exported_files import ExportedFiles, unfinished_name
from spmd_engine.checkpoints.files import bytes_of
from spmd_engine.checkpoints.read import Sliceable
from spmd_engine.checkpoints.stored_view import StoredView
from spmd_engine.checkpoints.write import header
from spmd_engine.comm.agreement import on_all_ranks, on_rank_zero
from spmd_engine.comm.group import Group
from spmd_engine.errors import CheckpointError
from spmd_engine.sharding.rectangles import Rectangle

AT_ONCE = 8 << 20  #: bytes; tensors up to this are put together in memory


@dataclass
class TensorToWrite:
    """One to be written: the parameters in it, and where in which file it begins."""

    name: str
    dtype: str  #: as files call it
    shape: tuple[int, ...]
    parts: dict[str, StoredView] = field(default_factory=dict)
    file: str = ""
    offset: int = 0

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize


def write_tensors(
    arrays: Mapping[str, Sliceable],
    tensors: Sequence[TensorToWrite],
    folder: Path,
    group: Group | None,
    facts: Mapping[str, str],
    begin: Callable[[], Mapping[str, bytes]] = dict,
) -> None:
    """Write tensors, made of ``arrays`` by name, into their files in a folder.

    The ranks of a ``group``, if one is given, share the blocks that the arrays are stored in: each is read by one of
    them, once, and written to where it belongs. Collective then. No rank holds more than a few blocks. ``begin``, on
    the first rank, may refuse, and says what other files there are to be. Raises CheckpointError, on all ranks, where
    something is damaged, or a file is there already, or cannot be written, which without a group is an OSError. Files
    have their names only when all are complete.
    """
    rank, ranks, new = group.rank if group else 0, group.size if group else 1, ExportedFiles()
    heads = {file: _header([each for each in tensors if each.file == file], facts) for file in _files(tensors)}

    def make() -> None:
        others = begin()
        for file, head in heads.items():
            with new.open(folder / file) as opened:
                opened.write(head)
                size = sum(each.nbytes for each in tensors if each.file == file)
                os.posix_fallocate(opened.fileno(), 0, len(head) + size)
        for file, text in others.items():
            with new.open(folder / file) as opened:
                opened.write(text)

    def write() -> None:
        memory = np.empty(AT_ONCE, np.uint8)
        for tensor, blocks in _share(arrays, tensors, rank, ranks):
            with unfinished_name(folder / tensor.file).open("r+b", buffering=0) as file:
                _write(file, tensor, [(tensor.parts[name], block, arrays[name]) for name, block in blocks], memory)

    try:
        on_rank_zero(group, make, CheckpointError) if group else make()
        on_all_ranks(group, write, CheckpointError) if group else write()
        on_rank_zero(group, new.commit, CheckpointError) if group else new.commit()
    finally:
        new.discard()


def _files(tensors: Sequence[TensorToWrite]) -> list[str]:
    return list(dict.fromkeys(each.file for each in tensors))


def _header(held: Sequence[TensorToWrite], facts: Mapping[str, str]) -> bytes:
    """Of one file; gives each tensor its place there."""
    head = header([(each.name, each.dtype, each.shape) for each in held], facts)
    offset = len(head)
    for each in held:
        each.offset = offset
        offset += each.nbytes
    return head


def _share(
    arrays: Mapping[str, Sliceable], tensors: Sequence[TensorToWrite], rank: int, ranks: int
) -> Iterator[tuple[TensorToWrite, list[tuple[str, Rectangle]]]]:
    """The tensors that a rank writes some of, and which blocks of which arrays: of all of them in order one run, about
    as many bytes as those of others. Small tensors are written by one."""
    total, before = sum(each.nbytes for each in tensors), 0
    for tensor in tensors:
        own, begin, is_small = [], before, tensor.nbytes <= AT_ONCE
        for name, view in tensor.parts.items():
            if name not in arrays or tuple((array := arrays[name]).shape) != view.shape:
                raise CheckpointError(f"there is no {name} of shape {list(view.shape)}: is this another model?")
            for block in array.blocks:
                if (begin if is_small else before) * ranks // total == rank:
                    own.append((name, block))
                before += block.size * DTYPES[tensor.dtype].itemsize
        if own:
            yield tensor, own


def _write(
    file: BinaryIO,
    tensor: TensorToWrite,
    parts: Sequence[tuple[StoredView, Rectangle, Sliceable]],
    memory: np.ndarray,
) -> None:
    """Put parts into their places in a tensor: a small one is put together in ``memory``, and written at once.

    So are parts of a large one that are one run of bytes there. Others are brought there by way of the file's pages,
    which takes more than twice the time.
    """
    dtype, is_small = DTYPES[tensor.dtype], tensor.nbytes <= AT_ONCE
    if is_small:
        whole = memory[: tensor.nbytes].view(dtype).reshape(tensor.shape)
    else:
        whole = np.memmap(file, dtype, "r+", tensor.offset, tensor.shape)
    for view, block, array in parts:
        part, place = np.asarray(array[block.index]), view.place(whole, block.index)
        if is_small or place.size > part.size or not place.flags.c_contiguous:
            view.fill(place, block.index, part)
            continue
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
