"""Splitting a length into parts, and joining parts to an array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd_engine.comm.shared_memory.cross_memory import RemoteArray, fill


def span(length: int, parts: int, index: int) -> slice:
    """Part ``index`` of ``length`` split into ``parts``: with length = q parts + r, the first r have one more."""
    q, r = divmod(length, parts)
    start = index * q + min(index, r)
    return slice(start, start + q + (index < r))


def spans(lengths: Sequence[int]) -> list[slice]:
    """Consecutive parts of these lengths."""
    parts, end = [], 0
    for length in lengths:
        start, end = end, end + length
        parts.append(slice(start, end))
    return parts


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
