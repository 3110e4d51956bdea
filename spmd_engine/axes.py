"""Named axes of ranks and positions on them; the mesh need not exist, so that shardings can be planned and drawn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product
from math import prod

from spmd_engine.errors import MeshError, one_of

Over = str | Iterable[str] | None  #: one axis, several, or None for all

MOST = 1 << 16  # ranks that are listed


class MeshPosition:
    """The axes of a mesh, and one rank's coordinates on them: enough to shard arrays. A Mesh is one, with ranks."""

    axes: Mapping[str, int]
    coordinates: Mapping[str, int]

    def __init__(self, axes: Mapping[str, int], coordinates: Mapping[str, int]) -> None:
        self.axes, self.coordinates = axes, coordinates

    def axis_size(self, over: Over) -> int:
        """The number of ranks along one axis or several; 1 along none."""
        return prod(self.axes[name] for name in self._names(over))

    def index(self, over: Over) -> int:
        """This rank's position along these axes, of which the last varies fastest: its rank in ``Mesh.group``."""
        position = 0
        for name in self._names(over):
            position = position * self.axes[name] + self.coordinates[name]
        return position

    def peers(self, over: Over) -> list[MeshPosition]:
        """The ranks that differ from this one only along ``over``, itself among them, as ``Mesh.group`` orders them."""
        names = self._names(over)
        everywhere = product(*(range(self.axes[name]) for name in names))
        return [
            MeshPosition(self.axes, {**self.coordinates, **dict(zip(names, where, strict=True))})
            for where in everywhere
        ]

    def _names(self, over: Over) -> tuple[str, ...]:
        if over is None:
            return tuple(self.axes)
        names = (over,) if isinstance(over, str) else tuple(over)
        for name in names:
            if name not in self.axes:
                raise MeshError(f"unknown mesh axis {name!r} of mesh {self}; {one_of(name, self.axes)}")
        if len(set(names)) < len(names):
            raise MeshError(f"mesh axes {', '.join(names)}: each can be named once")
        return names

    def __str__(self) -> str:
        return ",".join(f"{axis}={size}" for axis, size in self.axes.items())

    def __repr__(self) -> str:
        return f"MeshPosition({self}: {dict(self.coordinates)})"


def all_positions(axes: Mapping[str, int]) -> list[MeshPosition]:
    """Every rank of a mesh with these axes, in rank order: the last axis varies fastest.

    Raises MeshError for an axis of size 0, and for more than MOST ranks.

    >>> [place.coordinates["model"] for place in all_positions({"data": 2, "model": 2})]
    [0, 1, 0, 1]
    """
    mesh = MeshPosition(axes, {})
    if 0 in axes.values() or prod(axes.values()) > MOST:
        raise MeshError(f"mesh {mesh}: sizes are from 1, and together at most {MOST} ranks here")
    return mesh.peers(None)


def parse_axes(text: str) -> dict[str, int]:
    """``"data=4,model=2"`` as {"data": 4, "model": 2}; raises MeshError saying what is wrong."""
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
