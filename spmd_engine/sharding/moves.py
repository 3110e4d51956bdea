"""The moves that turn an array cut one way into the same array cut another way, and what each of them sends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from spmd_engine.arrays.backend import Array
from spmd_engine.axes import MeshPosition
from spmd_engine.comm.mesh import Mesh
from spmd_engine.errors import NotationError
from spmd_engine.sharding.notation import Spec, nested_span
from spmd_engine.sharding.placement import ArrayPlacement, Placement
from spmd_engine.sharding.rectangles import Rectangle
from spmd_engine.sharding.transfer import TransferPlan, plan_transfer


@dataclass(frozen=True)
class Move(ABC):
    """One step from blocks cut as ``source`` to blocks cut as ``target``: the same letters, other axes.

    What a rank sends is where its old block meets another's new one, to the ranks at its own coordinates on all
    axes but ``over``. Along the others nothing has to go: they cut as before, or did not cut, and all had the same.
    """

    source: Spec
    target: Spec

    @property
    def over(self) -> tuple[str, ...]:
        """The axes that cease to cut a letter as they did, outer ones first: ranks along them exchange."""
        return tuple(axis for letter, _ in self.source for axis in beyond(letter, self.source, self.target))

    @property
    def needs_shape(self) -> bool:
        """Whether ``do`` must be told the shape of the whole array."""
        return False

    def sent(self, shape: Sequence[int], place: MeshPosition) -> int:
        """How many elements of an array of the whole ``shape`` the rank at ``place`` sends."""
        mine = Rectangle.of(self.source.block(shape, place))
        others = (peer for peer in place.peers(self.over) if peer.coordinates != place.coordinates)
        return sum((mine & Rectangle.of(self.target.block(shape, peer))).size for peer in others)

    @abstractmethod
    def do(self, x: Array, mesh: Mesh, shape: Sequence[int] | None, label: str) -> Array:
        """This rank's new block from its old one. Collective over ``over``."""

    def _changed(self, into: Spec, out_of: Spec) -> tuple[str, int, tuple[str, ...]]:
        """The first letter that more axes cut in ``into``, its dim, and those axes."""
        gained = ((letter, beyond(letter, into, out_of)) for letter, _ in into)
        return next((letter, dim, axes) for dim, (letter, axes) in enumerate(gained) if axes)

    def _check_joined(self, dim: int, before: Array, after: Array, mesh: Mesh) -> None:
        """Raise NotationError if what this rank gave along ``dim`` is not its part of what came of it."""
        part = nested_span(after.shape[dim], self.over, mesh.axes, mesh.coordinates)
        if before.shape[dim] != part.stop - part.start:
            letter = self.source.letters[dim]
            raise NotationError(
                f'reshard "{self.source}" -> "{self.target}": the blocks are {after.shape[dim]} long together along '
                f"{letter}, so this rank's must be {part.stop - part.start}; it is {before.shape[dim]}"
            )


def beyond(letter: str, one: Spec, other: Spec) -> tuple[str, ...]:
    """The axes that cut ``letter`` in ``one``, without the first few by which ``other`` cuts it alike."""
    cuts, others = one.cuts_of(letter), other.cuts_of(letter)
    alike = next((i for i, cut in enumerate(cuts) if others[i : i + 1] != (cut,)), len(cuts))
    return one.axes_of(letter)[alike:]


class Slice(Move):
    """Axes come in: each rank keeps its part of what it has. No communication."""

    def do(self, x: Array, mesh: Mesh, shape: Sequence[int] | None, label: str) -> Array:
        coming = (beyond(letter, self.target, self.source) for letter, _ in self.source)
        parts = [nested_span(n, axes, mesh.axes, mesh.coordinates) for n, axes in zip(x.shape, coming, strict=True)]
        return x[tuple(parts)].copy()

    def __str__(self) -> str:
        gained = ((letter, beyond(letter, self.target, self.source)) for letter, _ in self.target)
        return "slice " + ", ".join(f"{letter} by {','.join(axes)}" for letter, axes in gained if axes)


class AllGather(Move):
    """The innermost axes of one letter go: its parts are joined, by one all_gather over all of them."""

    def do(self, x: Array, mesh: Mesh, shape: Sequence[int] | None, label: str) -> Array:
        _, dim, _ = self._changed(self.source, self.target)
        joined = mesh.group(self.over).all_gather(x, dim, label=label)
        self._check_joined(dim, x, joined, mesh)
        return joined

    def __str__(self) -> str:
        letter, _, axes = self._changed(self.source, self.target)
        return f"all_gather {letter} over {','.join(axes)}"


class AllToAll(Move):
    """The innermost axes of one letter become the innermost ones of another."""

    def do(self, x: Array, mesh: Mesh, shape: Sequence[int] | None, label: str) -> Array:
        _, joined, _ = self._changed(self.source, self.target)
        _, cut, axes = self._changed(self.target, self.source)
        splits = None
        if len(axes) > 1:  # cut by the first, then each part by the next: not always as evenly as by all at once
            parts = (nested_span(x.shape[cut], axes, mesh.axes, peer.coordinates) for peer in mesh.peers(axes))
            splits = [part.stop - part.start for part in parts]
        moved = mesh.group(axes).all_to_all(x, cut, joined, splits=splits, label=label)
        if splits is not None:
            moved, _ = moved
        self._check_joined(joined, x, moved, mesh)
        return moved

    def __str__(self) -> str:
        joined, _, axes = self._changed(self.source, self.target)
        cut, _, _ = self._changed(self.target, self.source)
        return f"all_to_all {joined} -> {cut} over {','.join(axes)}"


class GeneralMove(Move):
    """Anything else: each rank sends each other one exactly what its old block and the other's new one share."""

    @property
    def needs_shape(self) -> bool:
        return True

    def do(self, x: Array, mesh: Mesh, shape: Sequence[int] | None, label: str) -> Array:
        if shape is None:
            raise NotationError(f'reshard "{self.source}" -> "{self.target}": the shape of the whole array is needed')
        where = tuple(mesh.axes.items()), tuple(mesh.coordinates.items())
        plan = _exchange_plan(self, tuple(shape), x.dtype, *where)
        return plan.execute(mesh.group(self.over), {"x": [x]}, label=label)["x"][0]

    def __str__(self) -> str:
        return f"exchange over {','.join(self.over)}"


@lru_cache(maxsize=256)
def _exchange_plan(
    move: GeneralMove,
    shape: tuple[int, ...],
    dtype: np.dtype,
    axes: tuple[tuple[str, int], ...],
    coordinates: tuple[tuple[str, int], ...],
) -> TransferPlan:
    """The transfer among the ranks that differ only along the axes of an exchange: no others need each other."""
    places = MeshPosition(dict(axes), dict(coordinates)).peers(move.over)
    old, new = (ArrayPlacement.of_spec(spec, shape, dtype, places) for spec in (move.source, move.target))
    return plan_transfer(Placement({"x": old}), Placement({"x": new}))
