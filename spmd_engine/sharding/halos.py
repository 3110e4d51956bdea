"""Halos: the elements of a sharded dim that a rank's outputs read outside the rank's own shard.

Outputs are sharded as evenly as inputs, but independently of them. So the interval that a rank needs may begin and end
before, inside or behind its own shard, several neighbours away, or be empty, if the rank has no outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from typing import Protocol

import numpy as np

from spmd_engine.axes import MeshPosition
from spmd_engine.comm.notation import EVEN, Weights, nested_span
from spmd_engine.sharding.placement import ArrayPlacement, Interval, Placement
from spmd_engine.sharding.rectangles import Rectangle
from spmd_engine.sharding.transfer import TransferPlan, plan_transfer


class Reads(Protocol):
    """The inputs of a dim that given outputs read, such as a ``Window``. Hashable: transfers are planned once."""

    def outputs(self, length: int) -> int:
        """The number of outputs for ``length`` inputs."""
        ...

    def needs(self, first: int, stop: int, length: int) -> Interval:
        """The interval of inputs, within [0, length), that the outputs [first, stop) read."""
        ...


@dataclass(frozen=True)
class Reach:
    """The intervals of a dim that one rank holds and needs, and of the outputs that it computes from the dim."""

    own: Interval  #: inputs that the rank holds
    outputs: Interval  #: outputs that the rank computes
    needed: Interval  #: inputs that these read, with the halo; all inputs where the letter is not sharded

    @classmethod
    def of(cls, length: int, reads: Reads, axes: Sequence[str], place: MeshPosition, weights: Weights = EVEN) -> Reach:
        """The reach of the rank at ``place``, with inputs and outputs sharded over ``axes``, evenly or by weights."""
        sizes = length, reads.outputs(length)
        spans = (nested_span(size, axes, place.axes, place.coordinates, weights) for size in sizes)
        held, outputs = ((span.start, span.stop) for span in spans)
        return cls(held, outputs, reads.needs(*outputs, length) if axes else held)


@lru_cache(maxsize=512)  # many layers of a network have halos of the same shapes
def plan_halos(
    shape: tuple[int, ...], dtype: np.dtype, reaches: tuple[tuple[tuple[int, Reach], ...], ...]
) -> TransferPlan | None:
    """The transfer from each rank's shard of an array to what its outputs need; None where both are equal on all ranks.

    ``shape`` is the shape of the whole array; ``reaches`` has each rank's pairs of a dim and its reach; the other dims
    are whole. Only owners send, so that the adjoint leaves sums with them.
    """
    held, needed = (
        [_rectangle(shape, {dim: getattr(reach, side) for dim, reach in dims}) for dims in reaches]
        for side in ("own", "needed")
    )
    if held == needed:
        return None
    parts, wanted = (tuple((rectangle,) for rectangle in rectangles) for rectangles in (held, needed))
    source = ArrayPlacement(shape, np.dtype(dtype), parts, parts)
    target = ArrayPlacement(shape, np.dtype(dtype), wanted, ((),) * len(wanted))
    return plan_transfer(Placement({"x": source}), Placement({"x": target}), from_owners=True)


def _rectangle(shape: Sequence[int], intervals: Mapping[int, Interval]) -> Rectangle:
    sides = [intervals.get(dim, (0, length)) for dim, length in enumerate(shape)]
    return Rectangle(tuple(start for start, _ in sides), tuple(stop for _, stop in sides))


# --- Resharding between the layers of a model, such as from rows and columns to samples


Axes = tuple[str, ...]


def reshard_axes(
    before: Sequence[Axes], after: Sequence[Axes], place: MeshPosition
) -> tuple[Axes, list[tuple[Axes, Axes]]]:
    """The mesh axes along which an array's sharding changes, and the changed axes of each dim before and after.

    ``before`` and ``after``: the axes that shard each dim. Their common first axes do not change.

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
    shape: Sequence[int],
    dtype: np.dtype,
    changes: Sequence[tuple[Axes, Axes]],
    weights: Sequence[tuple[Weights, Weights]],
    peers: Sequence[MeshPosition],
) -> TransferPlan:
    """The exchange among ``peers``, which hold an array of this ``shape`` together. A rank keeps what it has.

    ``changes`` and ``weights`` have, for each dim, the axes and their weights before and after.
    """

    def block(side: int, place: MeshPosition) -> Rectangle:
        dims = zip(shape, changes, weights, strict=True)
        return Rectangle.of(
            nested_span(length, axes[side], place.axes, place.coordinates, by[side]) for length, axes, by in dims
        )

    source, target = (
        ArrayPlacement.of_rectangles(shape, dtype, [(block(side, peer),) for peer in peers]) for side in (0, 1)
    )
    return plan_transfer(Placement({"x": source}), Placement({"x": target}))
