"""Halos: of a letter that is cut, what a rank's part of the outputs reads, and that is not its own part.

Outputs are cut as evenly as inputs are, each on their own. So what a rank needs may begin and end anywhere: before or
behind its own part, inside it, several neighbours away, or nowhere, if it has no outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from typing import Protocol

import numpy as np

from spmd_engine.axes import MeshPosition
from spmd_engine.sharding.notation import nested_span
from spmd_engine.sharding.placement import ArrayPlacement, Interval, Placement
from spmd_engine.sharding.rectangles import Rectangle
from spmd_engine.sharding.transfer import TransferPlan, plan_transfer


class Reads(Protocol):
    """What outputs read of a dim, as a ``Window`` of a convolution says. Hashable: transfers are planned once."""

    def outputs(self, length: int) -> int:
        """The number of outputs for ``length`` inputs."""
        ...

    def needs(self, first: int, stop: int, length: int) -> Interval:
        """The interval of inputs, within [0, length), that the outputs [first, stop) read."""
        ...


@dataclass(frozen=True)
class Reach:
    """A dim, and outputs made of it, as one rank has them: intervals of the whole dim and of all outputs."""

    own: Interval  #: inputs that it has
    outputs: Interval  #: outputs that it is to make
    needed: Interval  #: inputs that these read, with the halo; where the letter is not cut, all that there are

    @classmethod
    def of(cls, length: int, reads: Reads, axes: Sequence[str], place: MeshPosition) -> Reach:
        """That of the rank at ``place``, where both are cut over ``axes``."""
        spans = (nested_span(each, axes, place.axes, place.coordinates) for each in (length, reads.outputs(length)))
        own, outputs = ((span.start, span.stop) for span in spans)
        return cls(own, outputs, reads.needs(*outputs, length) if axes else own)


@lru_cache(maxsize=512)  # many layers of a network have halos of the same shapes
def plan_halos(
    shape: tuple[int, ...], dtype: np.dtype, reaches: tuple[tuple[tuple[int, Reach], ...], ...]
) -> TransferPlan | None:
    """How each rank of a group gets what it needs of an array of which each has a part; None if each has it already.

    ``shape`` is that of the whole array, ``reaches`` are of each rank, with the number of the dim; others are whole.
    Only owners give, so that the adjoint leaves sums with them.
    """
    own, needed = (
        [_rectangle(shape, {dim: getattr(reach, what) for dim, reach in each}) for each in reaches]
        for what in ("own", "needed")
    )
    if own == needed:
        return None
    parts, wanted = (tuple((each,) for each in rectangles) for rectangles in (own, needed))
    source = ArrayPlacement(shape, np.dtype(dtype), parts, parts)
    target = ArrayPlacement(shape, np.dtype(dtype), wanted, ((),) * len(wanted))
    return plan_transfer(Placement({"x": source}), Placement({"x": target}), from_owners=True)


def _rectangle(shape: Sequence[int], intervals: Mapping[int, Interval]) -> Rectangle:
    sides = [intervals.get(dim, (0, length)) for dim, length in enumerate(shape)]
    return Rectangle(tuple(start for start, _ in sides), tuple(stop for _, stop in sides))


# --- From one cut of an array to another in mid-model: rows and columns for samples, and the like


Axes = tuple[str, ...]


def reshard_axes(
    before: Sequence[Axes], after: Sequence[Axes], place: MeshPosition
) -> tuple[Axes, list[tuple[Axes, Axes]]]:
    """Along which axes of a mesh an array's cut changes, and by which of them each dim is cut before and after.

    ``before`` and ``after``: the axes that cut each dim. What both begin with stays as it is.

    >>> reshard_axes([("data",), ("rows",)], [("data", "rows"), ()], MeshPosition({"rows": 2, "data": 4}, {}))
    (('rows',), [((), ('rows',)), (('rows',), ())])
    """
    changes = []
    for pair in zip(before, after, strict=True):
        same = len(list(takewhile(lambda axes: axes[0] == axes[1], zip(*pair, strict=False))))
        changes.append((pair[0][same:], pair[1][same:]))
    changed = {axis for pair in changes for axes in pair for axis in axes}
    return tuple(axis for axis in place.axes if axis in changed), changes


def plan_reshard(
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
