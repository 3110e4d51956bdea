"""Metrics: of how many targets something holds, apart from every model. Only ever summed, as losses are."""

from __future__ import annotations

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.comm.group import Group


def right_classes(
    outputs: Array, targets: Array, *, mask: Array | None = None, over: Group | None = None, start: int = 0
) -> float:
    """How many targets[...] are the class of the largest score in outputs[... c]; of equal ones, the lowest class.

    Targets are global numbers of classes, mask[...] is 0 where one does not count. Where c is cut, ``over`` is the
    group of ranks that hold it and ``start`` the first c of this rank: largest scores and their classes are reduced
    over it, and all of them get the same result.
    """
    xp = backend_of(outputs).xp
    scores = outputs.reshape(targets.size, outputs.shape[-1])
    count, width = scores.shape
    none = xp.iinfo(xp.int64).max  # beyond every class
    top = scores.max(axis=1) if width else xp.full(count, -xp.inf, scores.dtype)
    if over is not None:
        top = over.all_reduce(top, "max", label="metric")
    numbers = xp.arange(start, start + width)
    found = xp.where(scores == top[:, None], numbers, none).min(axis=1, initial=none)
    if over is not None:
        found = over.all_reduce(found, "min", label="metric")
    right = found == targets.reshape(-1).astype(xp.int64)
    return float(right.sum() if mask is None else (right * mask.reshape(-1)).sum())
