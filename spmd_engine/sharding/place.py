"""Ranks of a mesh that need not exist: what shardings are planned and drawn on, without starting a rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod

from spmd_engine.errors import MeshError

MOST = 1 << 16  # ranks: beyond, listing them all takes longer than anybody waits


@dataclass(frozen=True)
class Place:
    """One rank of a mesh that need not exist: enough of a Mesh to cut arrays by."""

    axes: Mapping[str, int]
    coordinates: Mapping[str, int]

    def axis_size(self, over: str | Iterable[str]) -> int:
        """The number of ranks along one axis or several; 1 along none."""
        return prod(self.axes[axis] for axis in _names(over))

    def index(self, over: str | Iterable[str]) -> int:
        """This rank's position along these axes, of which the last varies fastest, as ``Mesh.index`` counts it."""
        position = 0
        for axis in _names(over):
            position = position * self.axes[axis] + self.coordinates[axis]
        return position

    def __str__(self) -> str:
        return ",".join(f"{axis}={size}" for axis, size in self.axes.items())


def all_places(axes: Mapping[str, int]) -> list[Place]:
    """Every rank of a mesh with these axes, in rank order: the last axis varies fastest.

    Raises MeshError for an axis of size 0, and for more ranks than anybody wants to see listed.

    >>> [place.coordinates["model"] for place in all_places({"data": 2, "model": 2})]
    [0, 1, 0, 1]
    """
    if 0 in axes.values() or prod(axes.values()) > MOST:
        mesh = Place(axes, {})
        raise MeshError(f"mesh {mesh}: sizes are from 1, and together at most {MOST} ranks here")
    everywhere = product(*(range(size) for size in axes.values()))
    return [Place(axes, dict(zip(axes, where, strict=True))) for where in everywhere]


def _names(over: str | Iterable[str]) -> Iterable[str]:
    return (over,) if isinstance(over, str) else over
