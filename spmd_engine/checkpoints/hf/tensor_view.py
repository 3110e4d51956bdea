"""A parameter as it lies in a tensor of somebody's file: which part of it that is, and in which order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from string import ascii_lowercase

import numpy as np

from spmd_engine.models.weight_map import TensorSlice

CHUNK, ROWS = 1 << 15, 16  #: elements, and rows, at least, that are copied at a time


@dataclass(frozen=True)
class StoredView:
    """The letters of a parameter, ``dims`` as "d h r k", and those of the tensor that it is ``stored`` in."""

    dims: str
    sizes: Mapping[str, int]  #: of all letters, whole
    stored: TensorSlice

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole parameter."""
        return tuple(self.sizes[letter] for letter in self.dims.split())

    @property
    def split(self) -> list[list[int]]:
        """The sizes of the letters of each dim of the tensor."""
        of_more = {**self.stored.at, **self.stored.among}
        sizes = {**self.sizes, **{letter: count for letter, (_, count) in of_more.items()}}
        return [[sizes[letter] for letter in word] for word in self.stored.dims.split()]

    @property
    def in_file(self) -> str:
        """The letters of the tensor, in its order."""
        return self.stored.dims.replace(" ", "")

    def index(self, spans: tuple[slice, ...]) -> list[slice | int]:
        """For each letter of the tensor, which part of it is this part of the parameter."""
        wanted: dict[str, slice | int] = dict(zip(self.dims.split(), spans, strict=True))
        wanted |= {letter: number for letter, (number, _) in self.stored.at.items()}
        for letter, (first, _) in self.stored.among.items():
            span = wanted[letter]
            wanted[letter] = slice(first + span.start, first + span.stop)
        if self.stored.pairs:
            wanted["k"] = slice(0, self.sizes["k"])
        return [wanted[letter] for letter in self.in_file]

    def copy(self, part: np.ndarray, spans: tuple[slice, ...], out: np.ndarray) -> None:
        """Copy what ``index`` has of the tensor into ``out``, that part of the parameter, in its dtype."""
        if self.stored.pairs:
            k = self.dims.split().index("k")
            part = part.take(self._places()[spans[k]], axis=self._left.index("k"))
        _turn(part, out.transpose([self.dims.split().index(letter) for letter in self._left]))
        if self.stored.offset:
            out += self.stored.offset

    def place(self, tensor: np.ndarray, spans: tuple[slice, ...]) -> np.ndarray:
        """What ``index`` has of the whole tensor: a view."""
        if self.stored.rows is not None:
            tensor = tensor[slice(*self.stored.rows[:2])]
        return tensor.reshape([size for sizes in self.split for size in sizes])[(..., *self.index(spans))]

    def fill(self, place: np.ndarray, spans: tuple[slice, ...], part: np.ndarray) -> None:
        """Put a part of the parameter into its ``place``, or an array like that, whose dtype it gets."""
        if self.stored.offset:
            part = part - self.stored.offset
        place = place.transpose([self._left.index(letter) for letter in self.dims.split()])
        if self.stored.pairs:
            k = self.dims.split().index("k")
            np.moveaxis(place, k, 0)[self._places()[spans[k]]] = np.moveaxis(part, k, 0)
        else:
            _turn(part, place)

    @property
    def _left(self) -> list[str]:
        """The letters of the tensor that the parameter has, in the tensor's order."""
        return [letter for letter in self.in_file if letter not in self.stored.at]

    def _places(self) -> np.ndarray:
        """Where in the file each number of a head is."""
        numbers = np.arange(self.sizes["k"])
        if self.stored.pairs == "halves":  # there, and neighbours here
            return numbers.reshape(2, -1).T.reshape(-1)
        return numbers.reshape(-1, 2).T.reshape(-1)


def as_it_is(shape: tuple[int, ...]) -> StoredView:
    """The view of an array that is stored as a tensor of the same dims."""
    dims = " ".join(ascii_lowercase[: len(shape)])
    return StoredView(dims, dict(zip(dims.split(), shape, strict=True)), TensorSlice("", dims))


def _turn(part: np.ndarray, target: np.ndarray) -> None:
    """Copy, some rows at a time: they get their dtype as they lie and are then turned, out of the processor's cache.

    Not fewer than make a line of that cache when they are columns. It takes two thirds of the time, or less.
    """
    part, target = np.atleast_1d(part), np.atleast_1d(target)
    rows = max(ROWS, CHUNK * len(part) // max(1, part.size))
    for first in range(0, len(part), rows):
        target[first : first + rows] = part[first : first + rows].astype(target.dtype)
