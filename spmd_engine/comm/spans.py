"""An array's length cut into parts, and parts joined to an array again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spmd_engine.comm.shared_memory.cross_memory import Block, RemoteArray, fill


def span(length: int, parts: int, index: int) -> slice:
    """Part ``index`` of ``length`` cut in ``parts``: with length = q parts + r, the first r have one more."""
    q, r = divmod(length, parts)
    start = index * q + min(index, r)
    return slice(start, start + q + (index < r))


def spans(lengths: Sequence[int]) -> list[slice]:
    """Parts of these lengths, one after the other."""
    parts, end = [], 0
    for length in lengths:
        start, end = end, end + length
        parts.append(slice(start, end))
    return parts


def joined(blocks: Sequence[Block], axis: int, dtype: np.dtype, out: np.ndarray | None = None) -> np.ndarray:
    """``blocks`` of this ``dtype``, one after the other along ``axis``.

    NumPy alone would bring their bytes into the machine's order, and their fields into an order of its own.
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
