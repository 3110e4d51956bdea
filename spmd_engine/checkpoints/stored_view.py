"""A parameter as it lies in a tensor of somebody's file: which part of it that is, and in which order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from spmd_engine.models.stored_names import Stored


@dataclass(frozen=True)
class StoredView:
    """The letters of a parameter, ``dims`` as "d h r k", and those of the tensor that it is ``stored`` in."""

    dims: str
    sizes: Mapping[str, int]  #: of all letters, whole
    stored: Stored

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole parameter."""
        return tuple(self.sizes[letter] for letter in self.dims.split())

    @property
    def split(self) -> list[list[int]]:
        """The sizes of the letters of each dim of the tensor."""
        sizes = {**self.sizes, **{letter: count for letter, (_, count) in self.stored.at.items()}}
        return [[sizes[letter] for letter in word] for word in self.stored.dims.split()]

    @property
    def in_file(self) -> str:
        """The letters of the tensor, in its order."""
        return self.stored.dims.replace(" ", "")

    def index(self, spans: tuple[slice, ...]) -> list[slice | int]:
        """For each letter of the tensor, which part of it is this part of the parameter."""
        wanted: dict[str, slice | int] = dict(zip(self.dims.split(), spans, strict=True))
        wanted |= {letter: number for letter, (number, _) in self.stored.at.items()}
        if self.stored.pairs:
            wanted["k"] = slice(0, self.sizes["k"])
        return [wanted[letter] for letter in self.in_file]

    def as_parameter(self, part: np.ndarray, spans: tuple[slice, ...]) -> np.ndarray:
        """What ``index`` has of the tensor, as that part of the parameter; a view unless pairs lie otherwise."""
        left = [letter for letter in self.in_file if letter not in self.stored.at]
        part = part.transpose([left.index(letter) for letter in self.dims.split()])
        if not self.stored.pairs:
            return part
        k = self.dims.split().index("k")
        return part.take(self._places()[spans[k]], axis=k)

    def write(self, tensor: np.ndarray, spans: tuple[slice, ...], part: np.ndarray) -> None:
        """Put a part of the parameter into its place in the whole tensor, whose dtype it gets."""
        whole = tensor.reshape([size for sizes in self.split for size in sizes])
        view = whole[tuple(self.index(spans))]
        left = [letter for letter in self.in_file if letter not in self.stored.at]
        view = view.transpose([left.index(letter) for letter in self.dims.split()])
        if not self.stored.pairs:
            view[...] = part
            return
        k = self.dims.split().index("k")
        np.moveaxis(view, k, 0)[self._places()[spans[k]]] = np.moveaxis(part, k, 0)

    def _places(self) -> np.ndarray:
        """Where in the file each number of a head is."""
        numbers = np.arange(self.sizes["k"])
        if self.stored.pairs == "halves":  # there, and neighbours here
            return numbers.reshape(2, -1).T.reshape(-1)
        return numbers.reshape(-1, 2).T.reshape(-1)
