"""Mesh axes and positions on them, without ranks, so that shardings of any mesh can be planned and drawn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

import numpy as np

from spmd_engine.errors import MeshError, one_of

Over = str | Iterable[str] | None  #: one axis, several, or None for all

PIPE = "pipe"  #: the axis of the stages of a pipeline

MOST = 1 << 16  #: ranks of a mesh


class StageSizes(int):
    """The sizes of an axis that differ between pipeline stages, ``1|2`` as text; as a number, the largest of them.

    >>> axes = parse_axes("pipe=2,model=1|2")
    >>> axes["model"] + 0, axes_text(axes), count_ranks(axes), axes_of_stage(axes, 0)
    (2, 'pipe=2,model=1|2', 3, {'pipe': 2, 'model': 1})
    """

    by_stage: tuple[int, ...]

    def __new__(cls, by_stage: Iterable[int]) -> StageSizes:
        sizes = tuple(by_stage)
        number = super().__new__(cls, max(sizes))
        number.by_stage = sizes
        return number

    def __getnewargs__(self) -> tuple[tuple[int, ...]]:  # for copies and pickles
        return (self.by_stage,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StageSizes) and self.by_stage == other.by_stage

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.by_stage)

    def __str__(self) -> str:
        return "|".join(map(str, self.by_stage))

    __repr__ = __str__


def uneven_axes(axes: Mapping[str, int]) -> tuple[str, ...]:
    """The axes whose sizes differ between stages."""
    return tuple(axis for axis, size in axes.items() if isinstance(size, StageSizes))


def axes_of_stage(axes: Mapping[str, int], stage: int) -> dict[str, int]:
    """The axes with the sizes that they have on one stage."""
    return {axis: size.by_stage[stage] if isinstance(size, StageSizes) else size for axis, size in axes.items()}


def count_ranks(axes: Mapping[str, int]) -> int:
    """The number of ranks of a mesh with these axes: the product of the sizes, or the sum of those of uneven stages."""
    if not uneven_axes(axes):
        return prod(axes.values())
    return sum(prod(axes_of_stage(axes, stage).values()) for stage in range(axes[PIPE])) // axes[PIPE]


class MeshPosition:
    """The axes of a mesh and the coordinates of one rank: enough to shard arrays. ``Mesh`` adds groups.

    If stages are uneven, ``axes`` has the sizes on the stage of this rank.
    """

    axes: Mapping[str, int]
    all_axes: Mapping[str, int]  #: with the sizes of every stage
    coordinates: Mapping[str, int]

    def __init__(self, axes: Mapping[str, int], coordinates: Mapping[str, int]) -> None:
        self.all_axes, self.coordinates = axes, coordinates
        known = PIPE in coordinates and uneven_axes(axes)
        self.axes = axes_of_stage(axes, coordinates[PIPE]) if known else axes

    def axis_size(self, over: Over) -> int:
        """The number of ranks along the axes ``over``, the product of their sizes; 1 for no axis."""
        names = self._names(over)
        return len(self.peers(names)) if self._joins_stages(names) else prod(self.axes[name] for name in names)

    def index(self, over: Over) -> int:
        """This rank's rank in ``Mesh.group(over)``; the last axis varies fastest."""
        names, position = self._names(over), 0
        if self._joins_stages(names):
            return [peer.coordinates for peer in self.peers(names)].index(self.coordinates)
        for name in names:
            position = position * self.axes[name] + self.coordinates[name]
        return position

    def peers(self, over: Over) -> list[MeshPosition]:
        """The ranks that differ from this rank only along ``over``, with this rank, in the order of ``Mesh.group``.

        Raises MeshError for ``pipe`` without the axes along which stages are uneven.
        """
        names = self._names(over)
        joins_stages = self._joins_stages(names, alone=True)
        sizes = self.all_axes if joins_stages else self.axes
        all_coordinates = product(*(range(sizes[name]) for name in names))
        peers = [
            MeshPosition(self.all_axes, {**self.coordinates, **dict(zip(names, coordinates, strict=True))})
            for coordinates in all_coordinates
        ]
        if not joins_stages:
            return peers
        return [peer for peer in peers if all(peer.coordinates[name] < peer.axes[name] for name in names)]

    def summed_over(self, over: Over) -> tuple[tuple[str, ...], bool]:
        """The axes of the group in which to sum values over the axes ``over``, and whether this rank's are counted.

        If stages are uneven, a group over ``pipe`` also extends over their uneven axes, along which values are equal
        copies: those of the first rank are counted.
        """
        names = self._names(over)
        more = [axis for axis in uneven_axes(self.all_axes) if PIPE in names and axis not in names]
        return (*names, *more), all(self.coordinates[axis] == 0 for axis in more)

    def _joins_stages(self, names: tuple[str, ...], alone: bool = False) -> bool:
        """Whether ranks along these axes are on several stages, which are uneven; ``alone``: also if along pipe only.

        Raises MeshError if some of the uneven axes are missing.
        """
        uneven = uneven_axes(self.all_axes)
        if not uneven or PIPE not in names or (names == (PIPE,) and not alone):
            return False
        if missing := [axis for axis in uneven if axis not in names]:
            raise MeshError(
                f"mesh {self}: along {PIPE} alone its stages are uneven; add {', '.join(missing)} to {','.join(names)}"
            )
        return True

    def _names(self, over: Over) -> tuple[str, ...]:
        if over is None:
            return tuple(self.axes)
        if not isinstance(over, Iterable):
            raise MeshError(f"over={over!r}: name mesh axes, of {', '.join(self.axes)}")
        names = (over,) if isinstance(over, str) else tuple(over)
        for name in names:
            if name not in self.axes:
                raise MeshError(f"unknown mesh axis {name!r} of mesh {self}; {one_of(name, self.axes)}")
        if len(set(names)) < len(names):
            raise MeshError(f"mesh axes {', '.join(names)}: name each axis once")
        return names

    def __str__(self) -> str:
        return axes_text(self.all_axes)

    def __repr__(self) -> str:
        return f"MeshPosition({self}: {dict(self.coordinates)})"


def all_positions(axes: Mapping[str, int]) -> list[MeshPosition]:
    """Every rank of a mesh with these axes, in rank order: the last axis varies fastest.

    Raises MeshError for axes that ``checked_axes`` refuses.

    >>> [position.coordinates["model"] for position in all_positions({"data": 2, "model": 2})]
    [0, 1, 0, 1]
    """
    return MeshPosition(checked_axes(axes), {}).peers(None)


def position_of(rank: int, axes: Mapping[str, int]) -> MeshPosition:
    """The position of a rank on the axes, in row-major order."""
    if uneven_axes(axes):
        return all_positions(axes)[rank]
    coordinates = {}
    for axis in list(axes)[::-1]:
        rank, coordinates[axis] = divmod(rank, axes[axis])
    return MeshPosition(axes, {axis: coordinates[axis] for axis in axes})


def rank_grid(axes: Mapping[str, int], ranks: Sequence[int] | None = None) -> np.ndarray:
    """The rank at each position, int[axes], from those by position (None: in order); -1 where a stage has none.

    >>> rank_grid({"pipe": 2, "model": StageSizes((1, 2))}).tolist()
    [[0, -1], [1, 2]]
    """
    grid = np.full([int(size) for size in axes.values()], -1)
    numbers = range(count_ranks(axes)) if ranks is None else ranks
    if grid.size == len(numbers):
        grid[...] = np.reshape(numbers, grid.shape)
    else:
        for position, number in zip(all_positions(axes), numbers, strict=True):
            grid[tuple(position.coordinates.values())] = number
    return grid


def axes_text(axes: Mapping[str, int]) -> str:
    """Axes as text that ``parse_axes`` reads."""
    return ",".join(f"{axis}={size}" for axis, size in axes.items())


def axes_as_json(axes: Mapping[str, int]) -> dict[str, int | list[int]]:
    """Axes as JSON that ``checked_axes`` reads."""
    return {axis: list(size.by_stage) if isinstance(size, StageSizes) else size for axis, size in axes.items()}


def parse_axes(text: str) -> dict[str, int]:
    """``"data=4,model=2"`` as {"data": 4, "model": 2}; ``"pipe=2,model=1|2"`` has stages of one and of two ranks.

    Raises MeshError if it cannot be read.
    """
    axes: dict[str, int] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, equals, size = (p.strip() for p in part.partition("="))
        sizes = size.split("|")
        numbers = all(number.strip().isdecimal() and len(number) <= 100 for number in sizes)
        if not equals or not name.isidentifier() or not numbers:
            raise MeshError(f"cannot read mesh {text!r} at {part!r}; write axes as in data=4,model=2")
        if name in axes:
            raise MeshError(f"mesh {text!r} names axis {name!r} twice")
        axes[name] = int(sizes[0]) if len(sizes) == 1 else StageSizes(map(int, sizes))
    if not axes:
        raise MeshError(f"mesh {text!r} names no axis; write axes as in data=4,model=2")
    return checked_axes(axes)


def checked_axes(axes: Mapping[str, Any]) -> dict[str, int]:
    """Axes whose sizes may be given for each stage, ``{"pipe": 2, "model": (1, 2)}``, as ``StageSizes``.

    Raises MeshError unless they are given for each stage, are whole numbers from 1, and make at most MOST ranks: code
    that lists the ranks of a mesh may rely on it.
    """
    checked: dict[str, int] = {}
    for axis, size in axes.items():
        if not axis.isidentifier():
            raise MeshError(f"mesh axis {axis!r}: a name has letters, digits and _ only, and begins with a letter")
        by_stage = size.by_stage if isinstance(size, StageSizes) else size
        numbers = by_stage if isinstance(by_stage, (tuple, list)) else [by_stage]
        if not all(type(number) is int and number > 0 for number in numbers):
            raise MeshError(f"mesh axis {axis!r} has size {size!r}; sizes are whole numbers from 1")
        if isinstance(by_stage, (tuple, list)):
            if axis == PIPE or len(by_stage) != axes.get(PIPE):
                listed = "|".join(map(str, by_stage))
                raise MeshError(
                    f"{axis}={listed} has {len(by_stage)} sizes: one for each stage is needed, as in pipe=2,model=1|2"
                )
            by_stage = by_stage[0] if len(set(by_stage)) == 1 else StageSizes(by_stage)
        checked[axis] = by_stage
    if prod(checked.values()) > MOST:
        raise MeshError(f"mesh {axes_text(axes)}: the product of the sizes is above {MOST}")
    return checked
