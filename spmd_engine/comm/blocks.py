"""Blocks of arrays by rank: split a length, join blocks, and reduce them in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from types import ModuleType
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.precision import is_half, widened
from spmd_engine.comm.shared_memory.cross_memory import RemoteArray, fill
from spmd_engine.errors import UsageError, one_of


def span(length: int, parts: int, index: int) -> slice:
    """Part ``index`` of ``length`` split into ``parts``: with length = q parts + r, the first r have one more."""
    q, r = divmod(length, parts)
    start = index * q + min(index, r)
    return slice(start, start + q + (index < r))


def spans(lengths: Sequence[int]) -> list[slice]:
    """Consecutive slices of these lengths."""
    return [slice(end - length, end) for length, end in zip(lengths, accumulate(lengths), strict=True)]


def merged(parts: Sequence[slice]) -> list[slice]:
    """The parts that are not empty, in their order, adjacent ones as one."""
    found: list[slice] = []
    for part in parts:
        if found and found[-1].stop == part.start:
            found[-1] = slice(found[-1].start, part.stop)
        elif part.stop > part.start:
            found.append(part)
    return found


def joined(blocks: Sequence[Any], axis: int, dtype: np.dtype, out: np.ndarray | None = None) -> np.ndarray:
    """``blocks`` (Block) joined along ``axis``, in exactly this ``dtype``.

    ``np.concatenate`` without ``out`` would change the byte order, and the order of fields.
    """
    if out is None:
        shape = list(blocks[0].shape)
        shape[axis] = sum([block.shape[axis] for block in blocks])
        out = np.empty(shape, dtype)
    if RemoteArray not in map(type, blocks):
        return np.concatenate(blocks, axis, out)
    for block, place in zip(blocks, spans([block.shape[axis] for block in blocks]), strict=True):
        fill(out[(slice(None),) * axis + (place,)], block)
    return out


# --- Reductions in a fixed order: equal on all ranks, by any transport, also for 16-bit floats


Reducer = Callable[[Array, Sequence[Array]], None]  #: see ``reducer``

_UFUNCS = {"sum": "add", "mean": "add", "max": "maximum", "min": "minimum", "prod": "multiply"}


def reducible(operation: str, x: Array, op: str) -> Array:
    """``x`` in the dtype of its reduction: int64 for bool except in max and min, float64 for the mean of integers.

    Raises UsageError if the dtype has no such reduction. Otherwise only ranks with non-empty parts would raise later.
    """
    if op not in _UFUNCS:
        raise UsageError(f"{operation}: unknown op {op!r}; {one_of(op, _UFUNCS)}")
    if x.dtype.kind == "b" and op in ("sum", "prod", "mean"):
        x = x.astype(np.int64)
    if op == "mean" and x.dtype.kind in "iu":
        x = x.astype(np.float64)
    empty = np.empty(0, x.dtype)
    try:
        if x.dtype.kind in "SU":  # NumPy joins texts by add
            raise TypeError
        reducer(op, x.dtype, np)(empty, [empty, empty])
    except TypeError:
        raise UsageError(f"{operation}: there is no {op} of {x.dtype}; give numbers") from None
    return x


def reduce_into(out: Array, blocks: Sequence[Array], reduction: str) -> None:
    """``out`` = blocks[0] op blocks[1] op ... in that order; 16-bit floats are accumulated in float32.

    ``out`` may be or overlap one of the blocks, and may have the dtype of accumulation.
    """
    xp = backend_of(out).xp
    shares_memory = any(xp.may_share_memory(out, block) for block in blocks)
    # Never into a block: that block may be needed later, and NumPy's in-place product of complex numbers differs in
    # the last bits from one into a new array, so that ranks would differ.
    total = xp.empty_like(out) if shares_memory else out
    reducer(reduction, blocks[0].dtype, xp)(total, blocks)
    if total is not out:
        out[...] = total


def reducer(reduction: str, dtype: np.dtype, xp: ModuleType) -> Reducer:
    """A function (out, blocks) that reduces at least two blocks as ``reduce_into`` does.

    ``out`` may be one of the blocks, as only the last operation writes to it, but must not overlap any other.
    """
    ufunc, mean, half = getattr(xp, _UFUNCS[reduction]), reduction == "mean", is_half(dtype)

    def reduce(out: Array, blocks: Sequence[Array]) -> None:
        if half:
            blocks = [widened(block) for block in blocks]
        total = blocks[0]
        accumulator = xp.empty_like(total) if half or len(blocks) > 2 else out
        for block in blocks[1:-1]:
            total = ufunc(total, block, out=accumulator)
        total = ufunc(total, blocks[-1], out=accumulator if half else out)
        if mean:
            total /= total.dtype.type(len(blocks))
        if half:
            out[...] = total

    return reduce
