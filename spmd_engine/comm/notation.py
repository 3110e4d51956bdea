"""The written form of a sharding: ``"b/data s d"``, read "b sharded over data, s, d"."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING

from spmd_engine.arrays.backend import Array
from spmd_engine.axes import MeshPosition
from spmd_engine.comm.blocks import span
from spmd_engine.errors import MeshError, NotationError, one_of

if TYPE_CHECKING:
    from spmd_engine.comm.mesh import Mesh

Weights = Mapping[str, tuple[int, ...]]  #: axis -> the weights of its ranks, for the axes that have any
EVEN: Weights = MappingProxyType({})  #: no axis has weights


@dataclass(frozen=True)
class Spec:
    """The dims of an array, by letter, with the mesh axes that shard each.

    A dim over several axes, ``"b/data,expert"``, is split over the first, then each part over the next. Shards are as
    even as possible: of n = q P + r, the first r shards have one more. Weights change that: ``"b/data:3:1"`` gives the
    first of the two ranks along data three times as much as the second.
    """

    dims: tuple[tuple[str, tuple[str, ...]], ...]
    weights: tuple[tuple[str, tuple[int, ...]], ...] = ()  #: by axis, for the axes that have any

    @staticmethod
    @cache  # shardings are parsed in every step
    def parse(text: str) -> Spec:
        """Read ``"d f/model"``. Raises NotationError for repeated letters or an axis that shards two dims."""
        dims: list[tuple[str, tuple[str, ...]]] = []
        weights: dict[str, tuple[int, ...]] = {}
        for term in text.split():
            letter, slash, axes = term.partition("/")
            fields = [axis.split(":") for axis in axes.split(",")] if slash else []
            readable = all(name.isidentifier() and all(map(str.isdecimal, shares)) for name, *shares in fields)
            if len(letter) != 1 or not letter.isalpha() or not readable:
                raise NotationError(
                    f'cannot read sharding "{text}" at "{term}"; write letters as in "b/data s d", weights as in '
                    '"b/data:3:1"'
                )
            dims.append((letter, tuple(name for name, *_ in fields)))
            weights |= {name: tuple(map(int, shares)) for name, *shares in fields if shares}
        return Spec(tuple(dims), tuple(weights.items())).checked(text)

    def checked(self, text: str | None = None) -> Spec:
        letters = [letter for letter, _ in self.dims]
        if len(set(letters)) != len(letters):
            raise NotationError(f'sharding "{text or self}" names a letter twice')
        axes = self.axes
        for axis in axes:
            if axes.count(axis) > 1:
                sharded = " and ".join(letter for letter, names in self.dims if axis in names)
                raise NotationError(
                    f'sharding "{text or self}": axis "{axis}" shards {sharded}; only diagonal blocks would be left. '
                    "One axis shards at most one letter of an array"
                )
        for axis, weights in self.weights:
            if not any(weights):
                raise NotationError(f'sharding "{text or self}": all weights of "{axis}" are 0, so no rank has a part')
        return self

    @property
    def letters(self) -> str:
        return "".join(letter for letter, _ in self.dims)

    @property
    def axes(self) -> tuple[str, ...]:
        """All mesh axes that shard this array."""
        return tuple(axis for _, names in self.dims for axis in names)

    def axes_of(self, letter: str) -> tuple[str, ...]:
        return dict(self.dims)[letter]

    def cuts_of(self, letter: str) -> tuple[tuple[str, tuple[int, ...] | None], ...]:
        """The axes that shard a letter, each with its weights; None where it shards evenly."""
        weights = dict(self.weights)
        return tuple((axis, weights.get(axis)) for axis in self.axes_of(letter))

    def part(self, dim: int, length: int, place: MeshPosition) -> slice:
        """This rank's part of one dim, ``length`` long in all."""
        return nested_span(length, self.dims[dim][1], place.axes, place.coordinates, dict(self.weights))

    def block(self, shape: Sequence[int], place: MeshPosition) -> tuple[slice, ...]:
        """This rank's part of an array of the whole ``shape``, as slices."""
        if len(shape) != len(self.dims):
            raise NotationError(f'sharding "{self}" has {len(self.dims)} dims, the array has shape {tuple(shape)}')
        weights = dict(self.weights)
        return tuple(
            nested_span(size, axes, place.axes, place.coordinates, weights)
            for size, (_, axes) in zip(shape, self.dims, strict=True)
        )

    def local_shape(self, shape: Sequence[int], place: MeshPosition) -> tuple[int, ...]:
        return tuple(part.stop - part.start for part in self.block(shape, place))

    def largest_shape(self, shape: Sequence[int], place: MeshPosition) -> tuple[int, ...]:
        """The shape of the largest block of any rank: without weights the first rank's, which has the remainder."""
        if not self.weights:
            return self.local_shape(shape, MeshPosition(place.axes, dict.fromkeys(place.axes, 0)))
        axes = [self.dims[dim][1] for dim in range(len(shape))]
        lengths = ([self.part(dim, n, peer) for peer in place.peers(axes[dim])] for dim, n in enumerate(shape))
        return tuple(max(part.stop - part.start for part in parts) for parts in lengths)

    def gather(self, x: Array, mesh: Mesh, label: str = "") -> Array:
        """The whole array on every rank, from each rank's block. Collective over the axes that shard it."""
        for dim, (_, axes) in enumerate(self.dims):
            for axis in reversed(axes):
                x = mesh.all_gather(x, dim, over=axis, label=label)
        return x

    def __iter__(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        return iter(self.dims)

    def __str__(self) -> str:
        weights = {axis: "".join(f":{share}" for share in shares) for axis, shares in self.weights}
        terms = ((letter, ",".join(axis + weights.get(axis, "") for axis in axes)) for letter, axes in self.dims)
        return " ".join(letter + ("/" + axes if axes else "") for letter, axes in terms)


def nested_span(
    length: int,
    axes: Sequence[str],
    sizes: Mapping[str, int],
    coordinates: Mapping[str, int],
    weights: Weights = EVEN,
) -> slice:
    """The part of ``length`` at ``coordinates``: split over the first axis, that part over the second, and so on."""
    start, stop = 0, length
    for axis in axes:
        if axis not in sizes:
            raise MeshError(f'a sharding uses axis "{axis}", which the mesh does not have; {one_of(axis, sizes)}')
        if axis in weights:
            part = _weighted_span(stop - start, axis, weights[axis], sizes[axis], coordinates[axis])
        else:
            part = span(stop - start, sizes[axis], coordinates[axis])
        start, stop = start + part.start, start + part.stop
    return slice(start, stop)


def _weighted_span(length: int, axis: str, weights: tuple[int, ...], size: int, index: int) -> slice:
    if len(weights) != size:
        listed = ":".join(map(str, weights))
        raise MeshError(f'a sharding is over "{axis}:{listed}", in {len(weights)} parts; axis {axis} has {size} ranks')
    lengths = weighted_lengths(length, weights)
    start = sum(lengths[:index])
    return slice(start, start + lengths[index])


def weighted_lengths(length: int, weights: Sequence[int]) -> list[int]:
    """``length`` as integer parts in the ratio of ``weights``, each within one of its exact share.

    The parts are rounded down; the remainder goes, one each, to the parts that lost most, the first of equal ones
    first. So equal weights split as evenly as ``span`` does.

    >>> weighted_lengths(10, (3, 1)), weighted_lengths(11, (1, 1, 1))
    ([8, 2], [4, 4, 3])
    """
    total = sum(weights)
    lengths = [length * weight // total for weight in weights]
    lost = sorted(range(len(weights)), key=lambda part: -(length * weights[part] % total))
    for part in lost[: length - sum(lengths)]:
        lengths[part] += 1
    return lengths
