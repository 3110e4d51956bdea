"""From one cut of an array to another in mid-model: rows and columns for samples, and the like."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import numpy as np

from spmd_engine.axes import MeshPosition
from spmd_engine.sharding.notation import nested_span
from spmd_engine.sharding.placement import ArrayPlacement, Placement
from spmd_engine.sharding.rectangles import Rectangle
from spmd_engine.sharding.transfer import TransferPlan, plan_transfer

Axes = tuple[str, ...]


def recut_axes(
    before: Sequence[Axes], after: Sequence[Axes], place: MeshPosition
) -> tuple[Axes, list[tuple[Axes, Axes]]]:
    """Along which axes of a mesh an array's cut changes, and by which of them each dim is cut before and after.

    ``before`` and ``after``: the axes that cut each dim. What both begin with stays as it is.

    >>> recut_axes([("data",), ("rows",)], [("data", "rows"), ()], MeshPosition({"rows": 2, "data": 4}, {}))
    (('rows',), [((), ('rows',)), (('rows',), ())])
    """
    changes = []
    for pair in zip(before, after, strict=True):
        same = len(list(takewhile(lambda axes: axes[0] == axes[1], zip(*pair, strict=False))))
        changes.append((pair[0][same:], pair[1][same:]))
    changed = {axis for pair in changes for axes in pair for axis in axes}
    return tuple(axis for axis in place.axes if axis in changed), changes


def plan_recut(
    shape: Sequence[int], dtype: np.dtype, changes: Sequence[tuple[Axes, Axes]], peers: Sequence[MeshPosition]
) -> TransferPlan:
    """The exchange among ``peers``, who have an array of this ``shape`` together. Of copies, each keeps its own."""
    source, target = (
        ArrayPlacement.of_rectangles(shape, dtype, [(_block(shape, [pair[k] for pair in changes], p),) for p in peers])
        for k in (0, 1)
    )
    return plan_transfer(Placement({"x": source}), Placement({"x": target}))


def _block(shape: Sequence[int], cuts: Sequence[Axes], place: MeshPosition) -> Rectangle:
    sides = zip(shape, cuts, strict=True)
    return Rectangle.of(nested_span(length, axes, place.axes, place.coordinates) for length, axes in sides)
