"""Parts of blocks, read from a checkpoint's files straight to where they belong, and hashed on the way if asked."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from pathlib import Path
from threading import Lock
from typing import Self

import numpy as np

from spmd_engine.checkpoints.dtypes import DTYPES
from spmd_engine.checkpoints.files import IN_CACHE, bytes_of, cut_short, damaged, is_finite, read_into
from spmd_engine.checkpoints.headers import Headers
from spmd_engine.checkpoints.manifest import StoredArray, StoredBlock
from spmd_engine.errors import CheckpointError
from spmd_engine.sharding.rectangles import Rectangle


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
