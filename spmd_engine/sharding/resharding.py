"""Arrays cut, gathered and cut anew: ``shard``, ``gather``, and ``reshard`` with the fewest bytes that can do it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from spmd_engine.arrays.backend import Array
from spmd_engine.axes import MeshPosition
from spmd_engine.comm.mesh import Mesh
from spmd_engine.errors import MeshError, NotationError, one_of
from spmd_engine.sharding.moves import AllGather, AllToAll, GeneralMove, Move, Slice, beyond
from spmd_engine.sharding.notation import Spec


def shard(x: Array, sharding: str | Spec, mesh: Mesh) -> Array:
    """This rank's block of ``x``, a whole array that every rank has: a contiguous copy. No communication.

    ``shard(x, "b/data f/model", mesh)``. Raises NotationError if the sharding has another number of dims than
    ``x``, MeshError if it names an axis that the mesh does not have.
    """
    return x[_spec(sharding).block(x.shape, mesh)].copy()


def gather(x: Array, sharding: str | Spec, mesh: Mesh, *, label: str = "") -> Array:
    """The whole array on every rank, from each rank's block ``x``; ``x`` itself if nothing cuts it.

    One all_gather for each letter that is cut: S (n - 1) / n bytes a rank in all, for an array of S bytes cut in n.
    The backward is ``shard``, of a gradient that is the same on every rank. Errors are those of ``reshard``.
    """
    spec = _spec(sharding)
    whole = Spec(tuple((letter, ()) for letter in spec.letters))
    return reshard(x, spec, whole, mesh, label=label)


def reshard(
    x: Array,
    source: str | Spec,
    target: str | Spec | Mesh | None = None,
    mesh: Mesh | None = None,
    *,
    shape: Sequence[int] | None = None,
    label: str = "",
) -> Array:
    """This rank's block of an array cut as ``target``, from its block ``x`` of the same array cut as ``source``.

    ``reshard(x, "b/data f", "b f/model", mesh)`` or ``reshard(x, "b/data f -> b f/model", mesh)``. How it is done
    is told by ``reshard_plan``; where nothing changes the result is ``x`` itself. Blocks may be uneven and empty,
    and of any dtype.

    Collective over the axes that go or move. Only an ``exchange`` has to know the ``shape`` of the whole array: if
    that is not given, one all_gather of the blocks' lengths over all axes of ``source`` goes before it.

    The backward is ``reshard`` the other way: a replicated array's gradient is, like the array, the same on every
    copy, so that both are the whole array's, cut, and nothing has to be summed. A gradient still unreduced over an
    axis is no such array: reduce it first.

    Raises NotationError if the letters differ, or if ``x`` is not the block that ``source`` says; MeshError for an
    axis that the mesh does not have; UsageError for an exchange, or an all_to_all over several axes, among more than
    512 ranks.
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

    1. Letters that only axes new to the array come to cut are sliced: no bytes.
    2. The innermost axes of one letter that become another's move by one all_to_all.
    3. Letters whose innermost axes only go are gathered.
    4. If that does not end at ``target``, or weights are in play, all is one exchange of the intersections of old and
       new blocks: a planned transfer (``plan_transfer``), in rounds where it is large.

    Each sends the fewest bytes that can do it: every rank receives what its new block has and its old one had not,
    once. An exchange does so by its making, from the one holder at the rank's own coordinates on all axes that do
    not cut the source, so that copies share the work. So do 1 to 3: after the slices and in the one all_to_all
    no rank receives what it drops later, and nothing it dropped belongs to its new block. With a second all_to_all,
    or a slice after a gather, that would not hold.

    >>> print(reshard_plan("b/data f", "b f/model", {"data": 2, "model": 2}))
    slice f by model, then all_gather b over data
    >>> print(reshard_plan("b/data,model f", "b/data f/model", {"data": 2, "model": 2}))
    all_to_all b -> f over model
    >>> print(reshard_plan("b/data f/model", "b/model f/data", {"data": 2, "model": 2}))
    exchange over data,model
    """
    source, target = _spec(source), _spec(target)
    _check(source, target, axes)
    old, new = _cutting(source, axes), _cutting(target, axes)
    moves = [] if old.weights or new.weights else _collectives(old, new)
    if (moves[-1].target if moves else old) != new:
        moves = [GeneralMove(old, new)]
    return ReshardPlan(source, target, axes, tuple(moves))


@dataclass(frozen=True)
class ReshardPlan:
    """What ``reshard`` will do: ``moves`` in order, none where nothing changes."""

    source: Spec
    target: Spec
    axes: Mapping[str, int]  #: of the mesh, with their sizes
    moves: tuple[Move, ...]

    def sent(self, shape: Sequence[int], dtype, coordinates: Mapping[str, int]) -> int:
        """The bytes that the rank at these ``coordinates`` sends, for a whole array of this shape and dtype."""
        place = MeshPosition(self.axes, coordinates)
        return sum(move.sent(shape, place) for move in self.moves) * np.dtype(dtype).itemsize

    def do(self, x: Array, mesh: Mesh, *, shape: Sequence[int] | None = None, label: str = "") -> Array:
        """Make the moves with this rank's block ``x``; as ``reshard`` says."""
        if x.ndim != len(self.source.dims):
            raise NotationError(f"{self._said}: the array has {x.ndim} dims, of shape {x.shape}")
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
    def _said(self) -> str:
        return f'reshard "{self.source}" -> "{self.target}"'

    def _find_shape(self, x: Array, mesh: Mesh, label: str) -> tuple[int, ...]:
        """The whole shape, from everyone's lengths."""
        axes = _cutting(self.source, mesh.axes).axes
        everyone = mesh.group(axes).all_gather(np.array([x.shape], np.int64), label=label)
        table = everyone.reshape(*(mesh.axes[axis] for axis in axes), x.ndim)
        shape = []
        for dim, (_, names) in enumerate(self.source):
            along = tuple(slice(None) if axis in names else 0 for axis in axes)
            shape.append(int(table[(*along, dim)].sum()))
        for lengths, place in zip(everyone.tolist(), mesh.peers(axes), strict=True):
            self._check_block(lengths, shape, place)  # everybody's, so that all raise alike
        return tuple(shape)

    def _check_block(self, lengths: Sequence[int], shape: Sequence[int], place: MeshPosition) -> None:
        expected = self.source.local_shape(shape, place)
        if tuple(lengths) != expected:
            where = ", ".join(f"{axis}={place.coordinates[axis]}" for axis in self.source.axes) or "any rank"
            raise NotationError(
                f'{self._said}: an array of shape {tuple(shape)} cut as "{self.source}" has the block {expected} '
                f"at {where}; the block there is {tuple(lengths)}"
            )


def _collectives(source: Spec, target: Spec) -> list[Move]:
    """Slices, at most one all_to_all, gathers: as far as these go; ``target`` may be elsewhere."""
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
        giver = next((other for other, cuts in spec if moving and cuts[-len(moving) :] == moving), None)
        if giver:
            move(AllToAll, {giver: spec.axes_of(giver)[: -len(moving)], letter: axes + moving})
            break

    for letter in reversed(spec.letters):  # the first dim last: only along it are blocks received in place
        if beyond(letter, spec, target) and not beyond(letter, target, spec):
            move(AllGather, {letter: target.axes_of(letter)})
    return moves


def _cutting(spec: Spec, axes: Mapping[str, int]) -> Spec:
    """The same sharding without axes of size 1, which cut nothing."""
    dims = tuple((letter, tuple(axis for axis in names if axes[axis] > 1)) for letter, names in spec)
    return Spec(dims, tuple((axis, weights) for axis, weights in spec.weights if axes[axis] > 1))


def _check(source: Spec, target: Spec, axes: Mapping[str, int]) -> None:
    said = f'reshard "{source}" -> "{target}"'
    if source.letters != target.letters:
        same = sorted(source.letters) == sorted(target.letters)
        what = "transpose the array first" if same else "both sides must name the same dims"
        raise NotationError(f"{said}: the letters {source.letters} and {target.letters} differ; {what}")
    for axis in (*source.axes, *target.axes):
        if axis not in axes:
            raise MeshError(f'{said}: a sharding cuts over axis "{axis}", which the mesh has not; {one_of(axis, axes)}')


def _spec(sharding: str | Spec) -> Spec:
    return sharding if isinstance(sharding, Spec) else Spec.parse(sharding)
