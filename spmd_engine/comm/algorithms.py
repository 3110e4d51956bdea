"""Collectives as exchanges of messages: written once, for any communicator and any array module.

Each is a generator (see ``pending``). Blocks go straight from owner to reader, all at once, so that a rank
which was away meets finished messages when it looks; sums are made here, in rank order, so that they are
the same on every rank, for every transport, and for the 16-bit floats that MPI does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from types import ModuleType
from typing import Protocol

import numpy as np

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.comm.awaited import Requests
from spmd_engine.comm.pending import Steps
from spmd_engine.errors import UsageError

PIECE = 4 << 20  # bytes of each rank's block that are received before they are reduced


class Ranks(Protocol):
    """What an algorithm needs of a communicator."""

    rank: int
    size: int

    def outer(self, rank: int) -> int:
        """The number of a rank in the whole communicator."""

    def start_send(self, data: Array, to: int, tag: int) -> list:
        """See ``Communicator``."""

    def start_receive(self, data: Array, source: int, tag: int) -> list:
        """See ``Communicator``."""


class Part:
    """Some ranks of a communicator, this one among them, in an order of their own: enough to exchange messages."""

    def __init__(self, communicator: Ranks, members: Sequence[int]) -> None:
        self.members = list(members)  #: ranks of the communicator
        self.rank, self.size = self.members.index(communicator.rank), len(self.members)
        self._communicator = communicator

    def outer(self, rank: int) -> int:
        return self.members[rank]

    def start_send(self, data: Array, to: int, tag: int) -> list:
        return self._communicator.start_send(data, self.members[to], tag)

    def start_receive(self, data: Array, source: int, tag: int) -> list:
        return self._communicator.start_receive(data, self.members[source], tag)


def exchange(comm: Ranks, outgoing: Sequence[Array | None], incoming: Sequence[Array | None], tag: int) -> Steps:
    """Send ``outgoing[r]`` to each other rank r and fill ``incoming[r]`` from it; None or empty: nothing."""
    backends = {id(b): b for b in (backend_of(x) for x in (*outgoing, *incoming) if x is not None)}
    for backend in backends.values():
        backend.synchronize()  # MPI reads and writes device memory without asking the stream that uses it
    requests = Requests()
    for step in range(1, comm.size):  # rank r begins with r + 1: nobody is everyone's first target
        source = (comm.rank - step) % comm.size
        if incoming[source] is not None and incoming[source].size:
            requests.add(comm.outer(source), comm.start_receive(incoming[source], source, tag))
    for step in range(1, comm.size):
        to = (comm.rank + step) % comm.size
        if outgoing[to] is not None and outgoing[to].size:
            requests.add(comm.outer(to), comm.start_send(outgoing[to], to, tag))
    yield requests


def all_gather(comm: Ranks, own: Array, blocks: Sequence[Array], tag: int) -> Steps:
    """Fill every other rank's block of ``blocks`` with what that rank has as ``own``."""
    yield from exchange(comm, [own] * comm.size, blocks, tag)


def reduce_scatter(comm: Ranks, blocks: Sequence[Array], out: Array, reduction: str, tag: int) -> Steps:
    """``out`` = the reduction over ranks, in rank order, of everyone's ``blocks[rank]``."""
    backend = backend_of(out)
    flat_blocks, flat_out = [block.reshape(-1) for block in blocks], out.reshape(-1)
    step = max(1, PIECE // out.itemsize)
    space = backend.empty((comm.size, min(step, out.size)), out.dtype)
    for start in range(0, max(block.size for block in flat_blocks), step):
        piece = slice(start, start + step)
        ours = flat_out[piece]
        received = list(space[:, : ours.size])
        yield from exchange(comm, [block[piece] for block in flat_blocks], received, tag)
        received[comm.rank] = flat_blocks[comm.rank][piece]
        if ours.size:
            reduce_into(ours, received, reduction)


def all_reduce(comm: Ranks, x: Array, out: Array, reduction: str, tag: int) -> Steps:
    """``out`` = the reduction of flat ``x`` over ranks: a reduce_scatter, then an all_gather. ``out`` may be ``x``."""
    bounds = [span(x.size, comm.size, r) for r in range(comm.size)]
    ours = out[bounds[comm.rank]]
    yield from reduce_scatter(comm, [x[part] for part in bounds], ours, reduction, tag)
    yield from all_gather(comm, ours, [out[part] for part in bounds], tag + 1)


def broadcast(comm: Ranks, x: Array, root: int, tag: int) -> Steps:
    """Fill ``x`` from ``root``: cut into a part a rank, then gathered, so that no one sends it n times."""
    bounds = [span(x.size, comm.size, r) for r in range(comm.size)]
    ours = x[bounds[comm.rank]]
    if comm.rank == root:
        yield from exchange(comm, [x[part] for part in bounds], [None] * comm.size, tag)
    else:
        incoming: list[Array | None] = [None] * comm.size
        incoming[root] = ours
        yield from exchange(comm, [None] * comm.size, incoming, tag)
    outgoing = [None if r == root else ours for r in range(comm.size)]
    others = [None if comm.rank == root else x[part] for part in bounds]
    yield from exchange(comm, outgoing, others, tag + 1)


def span(length: int, parts: int, index: int) -> slice:
    """Part ``index`` of ``length`` cut in ``parts``: with length = q parts + r, the first r have one more."""
    q, r = divmod(length, parts)
    start = index * q + min(index, r)
    return slice(start, start + q + (index < r))


def spans(lengths: Sequence[int]) -> list[slice]:
    """Parts of these lengths, one after the other."""
    ends = list(accumulate(lengths))
    return [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]


def joined(
    blocks: Sequence[np.ndarray], axis: int, dtype: np.dtype, out: np.ndarray | None = None
) -> np.ndarray:
    """``blocks`` of this ``dtype``, one after the other along ``axis``.

    NumPy alone would bring their bytes into the machine's order, and their fields into an order of its own.
    """
    if out is None:
        shape = list(blocks[0].shape)
        shape[axis] = sum([block.shape[axis] for block in blocks])
        out = np.empty(shape, dtype)
    return np.concatenate(blocks, axis, out)


_UFUNCS = {"sum": "add", "mean": "add", "max": "maximum", "min": "minimum", "prod": "multiply"}


def reducible(operation: str, x: Array, op: str) -> Array:
    """``x`` in the dtype in which its reduction is made: bool is counted, the mean of integers is float64.

    Raises UsageError if there is no such reduction: later it would raise only on ranks that have something to reduce.
    """
    if op not in _UFUNCS:
        raise UsageError(f"{operation}: unknown op {op!r}; choose one of {', '.join(_UFUNCS)}")
    if x.dtype.kind == "b" and op in ("sum", "prod", "mean"):
        x = x.astype(np.int64)
    if op == "mean" and x.dtype.kind in "iu":
        x = x.astype(np.float64)
    nothing = np.empty(0, x.dtype)
    try:
        reducer(op, x.dtype, np)(nothing, [nothing, nothing])
    except TypeError:
        raise UsageError(f"{operation}: there is no {op} of {x.dtype}") from None
    return x


def reduce_into(out: Array, blocks: Sequence[Array], reduction: str) -> None:
    """``out`` = blocks[0] op blocks[1] op ... in that order; 16-bit floats are accumulated in float32.

    ``out`` may be, or overlap, one of the blocks.
    """
    xp = backend_of(out).xp
    overlap = any(xp.may_share_memory(out, block) for block in blocks)
    # Never into a block: it may have to wait for its turn, and NumPy multiplies complex numbers in place
    # with other last bits than into a new array, so that ranks would differ.
    total = xp.empty_like(out) if overlap else out
    reducer(reduction, out.dtype, xp)(total, blocks)
    if total is not out:
        out[...] = total


def reducer(reduction: str, dtype: np.dtype, xp: ModuleType) -> Callable[[Array, Sequence[Array]], None]:
    """A function (out, blocks) for at least two blocks, like ``reduce_into`` but for an ``out`` that overlaps none.

    It may be one of them, though: only the last operation writes to it.
    """
    ufunc, mean, half = getattr(xp, _UFUNCS[reduction]), reduction == "mean", accumulated_in(dtype) != dtype

    def reduce(out: Array, blocks: Sequence[Array]) -> None:
        if half:
            blocks = [block.astype(np.float32) for block in blocks]
        total = blocks[0]
        between = xp.empty_like(total) if half or len(blocks) > 2 else out
        for block in blocks[1:-1]:
            total = ufunc(total, block, out=between)
        total = ufunc(total, blocks[-1], out=between if half else out)
        if mean:
            total /= total.dtype.type(len(blocks))
        if half:
            out[...] = total

    return reduce


def accumulated_in(dtype: np.dtype) -> np.dtype:
    """The dtype in which arrays of ``dtype`` are added up: float32 for float16 and bfloat16, else their own."""
    half = dtype.itemsize == 2 and (dtype.kind == "f" or dtype.isbuiltin == 2)  # 2: bfloat16, of ml_dtypes
    return np.dtype(np.float32) if half else dtype
