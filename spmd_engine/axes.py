"""Mesh axes and positions on them, without ranks, so that shardings of any mesh can be planned and drawn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product
from math import prod

from spmd_engine.errors import MeshError, one_of

Over = str | Iterable[str] | None  #: one axis, several, or None for all

MOST = 1 << 16  # ranks of a mesh that ``all_positions`` lists


class MeshPosition:
    """The axes of a mesh and the coordinates of one rank: enough to shard arrays. ``Mesh`` adds groups."""

    axes: Mapping[str, int]
    coordinates: Mapping[str, int]

    def __init__(self, axes: Mapping[str, int], coordinates: Mapping[str, int]) -> None:
        self.axes, self.coordinates = axes, coordinates

    def axis_size(self, over: Over) -> int:
        """The product of the sizes of the axes ``over``; 1 for no axis."""
        return prod(self.axes[name] for name in self._names(over))

    def index(self, over: Over) -> int:
        """This rank's rank in ``Mesh.group(over)``; the last axis varies fastest."""
        position = 0
        for name in self._names(over):
            position = position * self.axes[name] + self.coordinates[name]
        return position

    def peers(self, over: Over) -> list[MeshPosition]:
        """The ranks that differ from this rank only along ``over``, with this rank, in the order of ``Mesh.group``."""
        names = self._names(over)
        all_coordinates = product(*(range(self.axes[name]) for name in names))
        return [
            MeshPosition(self.axes, {**self.coordinates, **dict(zip(names, coordinates, strict=True))})
            for coordinates in all_coordinates
        ]

    def _names(self, over: Over) -> tuple[str, ...]:
        if over is None:
            return tuple(self.axes)
        names = (over,) if isinstance(over, str) else tuple(over)
        for name in names:
            if name not in self.axes:
                raise MeshError(f"unknown mesh axis {name!r} of mesh {self}; {one_of(name, self.axes)}")
        if len(set(names)) < len(names):
            raise MeshError(f"mesh axes {', '.join(names)}: name each axis once")
        return names

    def __str__(self) -> str:
        return axes_text(self.axes)

    def __repr__(self) -> str:
        return f"MeshPosition({self}: {dict(self.coordinates)})"


def all_positions(axes: Mapping[str, int]) -> list[MeshPosition]:
    """Every rank of a mesh with these axes, in rank order: the last axis varies fastest.

    Raises MeshError for an axis of size 0, and for more than MOST ranks.

    >>> [position.coordinates["model"] for position in all_positions({"data": 2, "model": 2})]
    [0, 1, 0, 1]
    """
    mesh = MeshPosition(axes, {})
    if 0 in axes.values() or prod(axes.values()) > MOST:
        raise MeshError(f"mesh {mesh}: sizes are from 1, and their product is at most {MOST} here")
    return mesh.peers(None)


def axes_text(axes: Mapping[str, int]) -> str:
    """Axes as text that ``parse_axes`` reads."""
    return ",".join(f"{axis}={size}" for axis, size in axes.items())


def parse_axes(text: str) -> dict[str, int]:
    """``"data=4,model=2"`` as {"data": 4, "model": 2}; raises MeshError if it cannot be read."""
    axes: dict[str, int] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, equals, size = (p.strip() for p in part.partition("="))
        if not equals or not name.isidentifier() or not size.isdigit():
            raise MeshError(f"cannot read mesh {text!r} at {part!r}; write axes as in data=4,model=2")
        if name in axes:
            raise MeshError(f"mesh {text!r} names axis {name!r} twice")
        axes[name] = int(size)
    if not axes:
        raise MeshError(f"mesh {text!r} names no axis; write axes as in data=4,model=2")
    return axes
