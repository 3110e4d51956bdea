"""Read ordinary memory of another process on the node with one copy, on Linux (process_vm_readv)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from functools import cache
from math import prod

import numpy as np

from spmd_engine.arrays.memory import address_of
from spmd_engine.errors import SpmdError

_AT_ONCE = 1 << 30  # most bytes of a system call
_PR_SET_PTRACER, _ANY = 0x59616D61, ctypes.c_ulong(-1)  # prctl(2)


class _Range(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("size", ctypes.c_size_t)]


@cache
def _process_vm_readv() -> Callable[..., int] | None:
    """The system call process_vm_readv; None if the system lacks it."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if call is not None:
        number, pointer = ctypes.c_ulong, ctypes.c_void_p
        call.argtypes = [ctypes.c_int, pointer, number, pointer, number, number]
        call.restype = ctypes.c_ssize_t
    return call


def allow_reading() -> None:
    """Let other processes of this user read this one's memory, which Yama (Ubuntu) permits only to parents."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PTRACER, _ANY, 0, 0, 0)  # fails without Yama, which is harmless


class CrossMemory:
    """Reads memory of this node's ranks: ``processes`` by local rank. ``can_read`` tests whether this is permitted."""

    def __init__(self, processes: Sequence[int]) -> None:
        self._processes = list(processes)
        self._here, self._there = _Range(), _Range()
        self._ranges = ctypes.addressof(self._here), 1, ctypes.addressof(self._there), 1, 0
        self._call = _process_vm_readv()

    def can_read(self, local_rank: int, address: int, expected: bytes) -> bool:
        """Whether ``read`` returns the ``expected`` bytes at ``address``."""
        data = np.empty(len(expected), np.uint8)
        try:
            self.read(local_rank, address, data)
        except SpmdError:
            return False
        return data.tobytes() == expected

    def read(self, local_rank: int, address: int, out: np.ndarray) -> None:
        """Fill contiguous ``out`` from ``address`` in another rank's memory. Raises SpmdError if the system refuses."""
        start, done = address_of(out), 0
        while done < out.nbytes:
            self._here.address, self._there.address = start + done, address + done
            self._here.size = self._there.size = min(out.nbytes - done, _AT_ONCE)
            moved = self._call(self._processes[local_rank], *self._ranges) if self._call is not None else 0
            if moved <= 0:
                reason = os.strerror(ctypes.get_errno())
                raise SpmdError(f"cannot read the memory of process {self._processes[local_rank]}: {reason}")
            done += moved


class RemoteArray:
    """A contiguous array in another rank's memory, parts of which are read on demand."""

    __slots__ = ("reader", "local_rank", "address", "shape", "dtype")

    def __init__(
        self, reader: CrossMemory, local_rank: int, address: int, shape: Sequence[int], dtype: np.dtype
    ) -> None:
        self.reader, self.local_rank, self.address = reader, local_rank, address
        self.shape, self.dtype = tuple(shape), dtype

    def flat(self) -> RemoteArray:
        return RemoteArray(self.reader, self.local_rank, self.address, (prod(self.shape),), self.dtype)

    def __getitem__(self, index: slice | tuple[slice, ...]) -> RemoteArray:
        """A part along the first axis."""
        part = index[0] if isinstance(index, tuple) else index
        start, stop, _ = part.indices(self.shape[0])
        row = prod(self.shape[1:]) * self.dtype.itemsize
        shape = (max(stop - start, 0), *self.shape[1:])
        return RemoteArray(self.reader, self.local_rank, self.address + start * row, shape, self.dtype)

    def read(self, out: np.ndarray | None = None) -> np.ndarray:
        """The values, in ``out`` if that is contiguous."""
        values = out if out is not None and out.flags.c_contiguous else np.empty(self.shape, self.dtype)
        self.reader.read(self.local_rank, self.address, values)
        return values

    def copy(self) -> np.ndarray:
        return self.read()


Block = np.ndarray | RemoteArray  #: a rank's array in memory that this rank can read


def to_array(block: Block) -> np.ndarray:
    """``block`` as an array to compute with."""
    return block.read() if isinstance(block, RemoteArray) else block


def flat(block: Block) -> Block:
    """``block`` with one dimension."""
    return block.flat() if isinstance(block, RemoteArray) else block.reshape(-1)


def fill(out: np.ndarray, block: Block) -> None:
    """``out`` = ``block``, which may be ``out`` itself."""
    if isinstance(block, RemoteArray):
        block = block.read(out)
    if block is not out:
        out[...] = block
