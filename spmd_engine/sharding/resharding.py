"""Functions that ``shard``, ``gather`` and ``reshard`` arrays, and the plans that send the fewest bytes possible."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile

import numpy as np

from spmd_engine.arrays.backend import Array
from spmd_engine.axes import MeshPosition
from spmd_engine.comm import Mesh
from spmd_engine.comm.notation import Spec, nested_span
from spmd_engine.errors import MeshError, NotationError, one_of
from spmd_engine.sharding.placement import ArrayPlacement, Placement
from spmd_engine.sharding.rectangles import Rectangle
from spmd_engine.sharding.transfer import TransferPlan, plan_transfer


def shard(x: Array, sharding: str | Spec, mesh: Mesh) -> Array:
    """This rank's block of ``x``, a whole array that every rank has: a contiguous copy. No communication.

    ``shard(x, "b/data f/model", mesh)``. Raises NotationError if the sharding has another number of dims than
    ``x``, MeshError if it names an axis that the mesh does not have.
    """
    return x[_spec(sharding).block(x.shape, mesh)].copy()


def gather(x: Array, sharding: str | Spec, mesh: Mesh, *, label: str = "") -> Array:
    """The whole array on every rank, from each rank's block ``x``; ``x`` itself if no axis shards it.

    One all_gather for each sharded letter: S (n - 1) / n bytes per rank in all, for an array of S bytes in n shards.
    The backward is ``shard``, of a gradient that is equal on every rank. Errors are those of ``reshard``.
    """
    spec = _spec(sharding)
    replicated = Spec(tuple((letter, ()) for letter in spec.letters))
    return reshard(x, spec, replicated, mesh, label=label)


def reshard(
    x: Array,
    source: str | Spec,
    target: str | Spec | Mesh | None = None,
    mesh: Mesh | None = None,
    *,
    shape: Sequence[int] | None = None,
    label: str = "",
) -> Array:
    """This rank's block of an array sharded as ``target``, from its block ``x`` of the array sharded as ``source``.

    ``reshard(x, "b/data f", "b f/model", mesh)`` or ``reshard(x, "b/data f -> b f/model", mesh)``. ``reshard_plan``
    says how it is done; where nothing changes the result is ``x`` itself. Blocks may be uneven and empty, and of any
    dtype.

    Collective over the axes that no longer shard a letter as before. Only an ``exchange`` needs the ``shape`` of the
    whole array: without it, one all_gather of the blocks' shapes over all axes of ``source`` goes first.

    The backward is the opposite ``reshard``: the gradient of a replicated array is equal on every copy, as the array
    is, so that nothing has to be summed. A gradient that is unreduced over an axis must be reduced first.

    Raises NotationError if the letters differ, or if ``x`` does not have the shape of this rank's block of ``source``;
    MeshError for an axis that the mesh does not have; UsageError for an exchange, or an all_to_all over several axes,
    among more than 512 ranks.
    """
    if isinstance(target, Mesh):
        target, mesh = None, target
    if target is None and isinstance(source, str) and source.count("->") == 1:
        source, target = source.split("->")
    if target is None or mesh is None:
        raise NotationError('reshard takes (x, "b/data f", "b f/model", mesh) or (x, "b/data f -> b f/model", mesh)')
    return reshard_plan(source, target, mesh.axes).do(x, mesh, shape=shape, label=label)


def reshard_plan(source: str | Spec, target: str | Spec, axes: Mapping[str, int]) -> ReshardPlan:
    """The moves from one sharding to another on a mesh of these ``axes``; a pure function, the same on every rank.

    1. A letter that gains axes new to the array is sliced: no bytes.
    2. The innermost axes of one letter that move to another do so by one all_to_all.
    3. A letter that only loses innermost axes is gathered.
    4. If these moves do not end at ``target``, or if there are weights, the only move is an exchange of the
       intersections of old and new blocks: a planned transfer (``plan_transfer``), in rounds if it is large.

    Each plan sends the fewest bytes possible: every rank receives, once, the elements of its new block that its old
    block lacks. For an exchange this holds by construction: an element comes from the one holder at the receiver's
    coordinates on all axes that do not shard the source, so that replicas share the work. It also holds for moves 1 to
    3: after the slices and in the one all_to_all no rank receives elements that it drops later, and none that it
    dropped belong to its new block. With a second all_to_all, or a slice after a gather, it would not hold.

    >>> print(reshard_plan("b/data f", "b f/model", {"data": 2, "model": 2}))
    slice f by model, then all_gather b over data
    >>> print(reshard_plan("b/data,model f", "b/data f/model", {"data": 2, "model": 2}))
    all_to_all b -> f over model
    >>> print(reshard_plan("b/data f/model", "b/model f/data", {"data": 2, "model": 2}))
    exchange over data,model
    """
    source, target = _spec(source), _spec(target)
    _check(source, target, axes)
    old, new = _drop_unit_axes(source, axes), _drop_unit_axes(target, axes)
    moves = [] if old.weights or new.weights else _collectives(old, new)
    if (moves[-1].target if moves else old) != new:
        moves = [GeneralMove(old, new)]
    return ReshardPlan(source, target, axes, tuple(moves))


@dataclass(frozen=True)
class ReshardPlan:
    """The ``moves`` of a ``reshard``, in order; none if nothing changes."""

    source: Spec
    target: Spec
    axes: Mapping[str, int]  #: the mesh's, with their sizes
    moves: tuple[Move, ...]

    def sent(self, shape: Sequence[int], dtype, coordinates: Mapping[str, int]) -> int:
        """The bytes that the rank at these ``coordinates`` sends, for a whole array of this shape and dtype."""
        place = MeshPosition(self.axes, coordinates)
        return sum(move.sent(shape, place) for move in self.moves) * np.dtype(dtype).itemsize

    def do(self, x: Array, mesh: Mesh, *, shape: Sequence[int] | None = None, label: str = "") -> Array:
        """Make the moves with this rank's block ``x``; errors are those of ``reshard``."""
        if x.ndim != len(self.source.dims):
            raise NotationError(f"{self._title}: the array has {x.ndim} dims, of shape {x.shape}")
        if shape is None and any(move.needs_shape for move in self.moves):
            shape = self._find_shape(x, mesh, label)
        if shape is not None:
            self._check_block(x.shape, shape, mesh)
        for move in self.moves:
            x = move.do(x, mesh, shape, label)
        return x

    def __str__(self) -> str:
        return ", then ".join(map(str, self.moves)) or "nothing to do"

    @property
    def _title(self) -> str:
        return f'reshard "{self.source}" -> "{self.target}"'

    def _find_shape(self, x: Array, mesh: Mesh, label: str) -> tuple[int, ...]:
        """The shape of the whole array, from all ranks' blocks."""
        axes = _drop_unit_axes(self.source, mesh.axes).axes
        gathered = mesh.group(axes).all_gather(np.array([x.shape], np.int64), label=label)
        table = gathered.reshape(*(mesh.axes[axis] for axis in axes), x.ndim)
        shape = []
        for dim, (_, names) in enumerate(self.source):
            along = tuple(slice(None) if axis in names else 0 for axis in axes)
            shape.append(int(table[(*along, dim)].sum()))
        for lengths, place in zip(gathered.tolist(), mesh.peers(axes), strict=True):
            self._check_block(lengths, shape, place)  # all ranks' blocks, so that all raise the same error
        return tuple(shape)

    def _check_block(self, lengths: Sequence[int], shape: Sequence[int], place: MeshPosition) -> None:
        expected = self.source.local_shape(shape, place)
        if tuple(lengths) != expected:
            where = ", ".join(f"{axis}={place.coordinates[axis]}" for axis in self.source.axes) or "any rank"
            raise NotationError(
                f'{self._title}: an array of shape {tuple(shape)} sharded as "{self.source}" has the block {expected} '
                f"at {where}; the block there is {tuple(lengths)}"
            )


def _collectives(source: Spec, target: Spec) -> list[Move]:
    """Slices, at most one all_to_all, and gathers towards ``target``, which they may not reach."""
    moves: list[Move] = []
    spec = source

    def move(kind: type[Move], changes: Mapping[str, tuple[str, ...]]) -> None:
        nonlocal spec
        moves.append(kind(spec, Spec(tuple((letter, changes.get(letter, axes)) for letter, axes in spec))))
        spec = moves[-1].target

    coming = {}
    for letter, axes in source:
        if new := tuple(takewhile(lambda axis: axis not in source.axes, beyond(letter, target, source))):
            coming[letter] = axes + new
    if coming:
        move(Slice, coming)

    for letter, axes in spec:
        moving = beyond(letter, target, spec)
        giver = next((other for other, names in spec if moving and names[-len(moving) :] == moving), None)
        if giver:
            move(AllToAll, {giver: spec.axes_of(giver)[: -len(moving)], letter: axes + moving})
            break

    for letter in reversed(spec.letters):  # the first dim last: only along it are blocks received in place
        if beyond(letter, spec, target) and not beyond(letter, target, spec):
            move(AllGather, {letter: target.axes_of(letter)})
    return moves


def _drop_unit_axes(spec: Spec, axes: Mapping[str, int]) -> Spec:
    """The same sharding without axes of size 1, which shard nothing."""
    dims = tuple((letter, tuple(axis for axis in names if axes[axis] > 1)) for letter, names in spec)
    return Spec(dims, tuple((axis, weights) for axis, weights in spec.weights if axes[axis] > 1))


def _check(source: Spec, target: Spec, axes: Mapping[str, int]) -> None:
    title = f'reshard "{source}" -> "{target}"'
    if source.letters != target.letters:
        same = sorted(source.letters) == sorted(target.letters)
        advice = "transpose the array first" if same else "both sides must name the same dims"
        raise NotationError(f"{title}: the letters {source.letters} and {target.letters} differ; {advice}")
    for axis in (*source.axes, *target.axes):
        if axis not in axes:
            raise MeshError(f'{title}: axis "{axis}", which the mesh does not have; {one_of(axis, axes)}')


def _spec(sharding: str | Spec) -> Spec:
    return sharding if isinstance(sharding, Spec) else Spec.parse(sharding)


# --- The moves from one sharding of an array to another, and the number of elements that each sends


@dataclass(frozen=True)
class Move(ABC):
    """One step from blocks sharded as ``source`` to blocks sharded as ``target``: the same letters, other axes.

    A rank sends the intersections of its old block with the new blocks of the ranks at its own coordinates on all axes
    but ``over``. Nothing has to be sent along the other axes: they shard as before, or their ranks had equal copies.
    """

    source: Spec
    target: Spec

    @property
    def over(self) -> tuple[str, ...]:
        """The axes that no longer shard a letter as they did, outer ones first: ranks along them exchange."""
        return tuple(axis for letter, _ in self.source for axis in beyond(letter, self.source, self.target))

    @property
    def needs_shape(self) -> bool:
        """Whether ``do`` needs the shape of the whole array."""
        return False

    def sent(self, shape: Sequence[int], place: MeshPosition) -> int:
        """The number of elements that the rank at ``place`` sends, of an array of the whole ``shape``."""
        mine = Rectangle.of(self.source.block(shape, place))
        others = (peer for peer in place.peers(self.over) if peer.coordinates != place.coordinates)
        return sum((mine & Rectangle.of(self.target.block(shape, peer))).size for peer in others)

    @abstractmethod
    def do(self, x: Array, mesh: Mesh, shape: Sequence[int] | None, label: str) -> Array:
        """This rank's new block from its old one. Collective over ``over``."""

    def _changed(self, into: Spec, out_of: Spec) -> tuple[str, int, tuple[str, ...]]:
        """The first letter that more axes shard in ``into``, its dim, and those axes."""
        gained = ((letter, beyond(letter, into, out_of)) for letter, _ in into)
        return next((letter, dim, axes) for dim, (letter, axes) in enumerate(gained) if axes)

    def _check_joined(self, dim: int, before: Array, after: Array, mesh: Mesh) -> None:
        """Raise NotationError if ``before`` is not as long along ``dim`` as this rank's part of ``after``."""
        part = nested_span(after.shape[dim], self.over, mesh.axes, mesh.coordinates)
        if before.shape[dim] != part.stop - part.start:
            letter = self.source.letters[dim]
            raise NotationError(
                f'reshard "{self.source}" -> "{self.target}": the blocks are {after.shape[dim]} long together along '
                f"{letter}, so this rank's must be {part.stop - part.start}; it is {before.shape[dim]}"
            )


def beyond(letter: str, one: Spec, other: Spec) -> tuple[str, ...]:
    """The axes that shard ``letter`` in ``one``, from the first that does not shard it equally in ``other``."""
    axes, other_axes = one.cuts_of(letter), other.cuts_of(letter)
    common = next((i for i, axis in enumerate(axes) if other_axes[i : i + 1] != (axis,)), len(axes))
    return one.axes_of(letter)[common:]


class Slice(Move):
    """New axes shard letters: each rank keeps its part of its block. No communication."""

    def do(self, x: Array, mesh: Mesh, shape: Sequence[int] | None, label: str) -> Array:
        coming = (beyond(letter, self.target, self.source) for letter, _ in self.source)
        parts = [nested_span(n, axes, mesh.axes, mesh.coordinates) for n, axes in zip(x.shape, coming, strict=True)]
        return x[tuple(parts)].copy()

    def __str__(self) -> str:
        gained = ((letter, beyond(letter, self.target, self.source)) for letter, _ in self.target)
        return "slice " + ", ".join(f"{letter} by {','.join(axes)}" for letter, axes in gained if axes)


class AllGather(Move):
    """The innermost axes of one letter no longer shard it: one all_gather over all of them joins its parts."""

    def do(self, x: Array, mesh: Mesh, shape: Sequence[int] | None, label: str) -> Array:
        _, dim, _ = self._changed(self.source, self.target)
        joined = mesh.group(self.over).all_gather(x, dim, label=label)
        self._check_joined(dim, x, joined, mesh)
        return joined

    def __str__(self) -> str:
        letter, _, axes = self._changed(self.source, self.target)
        return f"all_gather {letter} over {','.join(axes)}"


class AllToAll(Move):
    """The innermost axes of one letter become the innermost axes of another."""

    def do(self, x: Array, mesh: Mesh, shape: Sequence[int] | None, label: str) -> Array:
        _, joined, _ = self._changed(self.source, self.target)
        _, split, axes = self._changed(self.target, self.source)
        splits = None
        if len(axes) > 1:  # split over one axis after the other: may be less even than over all at once
            parts = (nested_span(x.shape[split], axes, mesh.axes, peer.coordinates) for peer in mesh.peers(axes))
            splits = [part.stop - part.start for part in parts]
        moved = mesh.group(axes).all_to_all(x, split, joined, splits=splits, label=label)
        if splits is not None:
            moved, _ = moved
        self._check_joined(joined, x, moved, mesh)
        return moved

    def __str__(self) -> str:
        joined, _, axes = self._changed(self.source, self.target)
        split, _, _ = self._changed(self.target, self.source)
        return f"all_to_all {joined} -> {split} over {','.join(axes)}"


class GeneralMove(Move):
    """Any other change: each rank sends each other one the intersection of its old block and the other's new one."""

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
    """The transfer among the ranks that differ only along the axes of an exchange; other ranks take no part."""
    places = MeshPosition(dict(axes), dict(coordinates)).peers(move.over)
    old, new = (ArrayPlacement.of_spec(spec, shape, dtype, places) for spec in (move.source, move.target))
    return plan_transfer(Placement({"x": old}), Placement({"x": new}))
