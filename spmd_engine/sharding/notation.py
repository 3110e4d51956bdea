"""The written form of a sharding: ``"b/data s d"``, read "b divided by data, s, d"."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from spmd_engine.arrays.backend import Array
from spmd_engine.comm.algorithms import span
from spmd_engine.comm.mesh import Mesh
from spmd_engine.comm.place import Place
from spmd_engine.errors import MeshError, NotationError


@dataclass(frozen=True)
class Spec:
    """The dims of an array, by letter, with the mesh axes that cut each.

    A dim cut by several axes, ``"b/data,expert"``, is cut by the first, then each part by the next. Shards
    are as even as they can be: of n = q P + r, the first r parts have one more.
    """

    dims: tuple[tuple[str, tuple[str, ...]], ...]

    @classmethod
    def parse(cls, text: str) -> Spec:
        """Read ``"d f/model"``. Raises NotationError for repeated letters or an axis that cuts two dims."""
        return _parsed(text)

    @classmethod
    def _parse(cls, text: str) -> Spec:
        dims: list[tuple[str, tuple[str, ...]]] = []
        for term in text.split():
            letter, slash, axes = term.partition("/")
            names = tuple(axes.split(",")) if slash else ()
            if len(letter) != 1 or not letter.isalpha() or not all(name.isidentifier() for name in names):
                raise NotationError(f'cannot read sharding "{text}" at "{term}"; write letters as in "b/data s d"')
            dims.append((letter, names))
        return cls(tuple(dims)).checked(text)

    def checked(self, text: str | None = None) -> Spec:
        letters = [letter for letter, _ in self.dims]
        if len(set(letters)) != len(letters):
            raise NotationError(f'sharding "{text or self}" names a letter twice')
        axes = self.axes
        for axis in axes:
            if axes.count(axis) > 1:
                cut = " and ".join(letter for letter, names in self.dims if axis in names)
                raise NotationError(
                    f'sharding "{text or self}": axis "{axis}" cuts {cut}; only diagonal blocks would be left. '
                    "One axis cuts at most one letter of an array"
                )
        return self

    @property
    def letters(self) -> str:
        return "".join(letter for letter, _ in self.dims)

    @property
    def axes(self) -> tuple[str, ...]:
        """All mesh axes that cut this array."""
        return tuple(axis for _, names in self.dims for axis in names)

    def axes_of(self, letter: str) -> tuple[str, ...]:
        return dict(self.dims)[letter]

    def block(self, shape: Sequence[int], place: Place) -> tuple[slice, ...]:
        """This rank's part of an array of the whole ``shape``, as slices."""
        if len(shape) != len(self.dims):
            raise NotationError(f'sharding "{self}" has {len(self.dims)} dims, the array has shape {tuple(shape)}')
        return tuple(
            nested_span(size, axes, place.axes, place.coordinates)
            for size, (_, axes) in zip(shape, self.dims, strict=True)
        )

    def local_shape(self, shape: Sequence[int], place: Place) -> tuple[int, ...]:
        return tuple(part.stop - part.start for part in self.block(shape, place))

    def largest_shape(self, shape: Sequence[int], place: Place) -> tuple[int, ...]:
        """The largest block that any rank has: that of the first, which gets one more where cuts are uneven."""
        first = dict.fromkeys(place.axes, 0)
        parts = (nested_span(n, axes, place.axes, first) for n, (_, axes) in zip(shape, self.dims, strict=True))
        return tuple(part.stop - part.start for part in parts)

    def gather(self, x: Array, mesh: Mesh, label: str = "") -> Array:
        """The whole array on every rank, from each rank's block. Collective over the axes that cut it."""
        for dim, (_, axes) in enumerate(self.dims):
            for axis in reversed(axes):
                x = mesh.all_gather(x, dim, over=axis, label=label)
        return x

    def __iter__(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        return iter(self.dims)

    def __str__(self) -> str:
        return " ".join(letter + ("/" + ",".join(axes) if axes else "") for letter, axes in self.dims)


@cache
def _parsed(text: str) -> Spec:
    """Shardings are read in every step."""
    return Spec._parse(text)


def nested_span(
    length: int, axes: Sequence[str], sizes: Mapping[str, int], coordinates: Mapping[str, int]
) -> slice:
    """The part of ``length`` at ``coordinates``: cut by the first axis, that part by the second, and so on."""
    start, stop = 0, length
    for axis in axes:
        if axis not in sizes:
            raise MeshError(f'a sharding cuts over axis "{axis}"; the mesh has only {", ".join(sizes)}')
        part = span(stop - start, sizes[axis], coordinates[axis])
        start, stop = start + part.start, start + part.stop
    return slice(start, stop)
