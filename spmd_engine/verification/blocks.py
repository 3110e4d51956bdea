"""A tensor as all ranks have it: what each found, and what each should have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from spmd_engine.verification.report import Element

Teams = dict[tuple[str, ...], list[list["ComparedBlock"]]]


@dataclass(frozen=True)
class ComparedBlock:
    """One rank's part."""

    rank: int
    coordinates: Mapping[str, int]
    index: tuple[np.ndarray, ...]  #: of each dim, which places of the whole these are
    found: np.ndarray
    expected: np.ndarray
    before: np.ndarray | None = None  #: what this rank had a step ago
    base: np.ndarray | None = None  #: what the rest was added to: no part of any sum over ranks made for it
    base_name: str = "its input"

    @property
    def difference(self) -> np.ndarray:
        return difference(self.found, self.expected)

    @property
    def added(self) -> ComparedBlock:
        """What was added to the base alone."""
        if self.base is None:
            return self
        return replace(self, found=self.found - self.base, expected=self.expected - self.base, base=None)

    def element(self, place: int) -> Element:
        """One element, by its place in the flat block."""
        where = np.unravel_index(place, self.found.shape)
        index = tuple(int(places[i]) for places, i in zip(self.index, where, strict=True))
        return Element(index, self.rank, self.coordinates, float(self.found[where]), float(self.expected[where]))


def difference(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """|found - expected|; 0 where both are the same infinity or no number, infinite where only one of them is."""
    with np.errstate(invalid="ignore"):
        apart = np.abs(found - expected)
    same = (found == expected) | (np.isnan(found) & np.isnan(expected))
    return np.where(same, 0.0, np.where(np.isnan(apart), np.inf, apart))


def first_and_largest(blocks: Sequence[ComparedBlock], limit: float) -> tuple[Element, Element]:
    """Of the elements that are off by more than ``limit``: the first in the whole array, and the one most off."""
    elements = []
    for block in blocks:
        apart = block.difference.reshape(-1)
        if apart.size and apart.max() > limit:
            first, largest = np.argmax(apart > limit), np.argmax(apart)
            elements.append((block.element(first), block.element(largest), apart[largest]))
    first = min((first for first, _, _ in elements), key=lambda element: (element.index, element.rank))
    return first, max(elements, key=lambda each: each[2])[1]


def teams_of_replicas(blocks: Sequence[ComparedBlock], axes: Mapping[str, int]) -> Teams:
    """For every set of mesh axes along which all ranks have the same places: the ranks that differ only along it.

    Smaller sets come first. Only blocks of the same places make a team, so an axis that cuts the tensor is in no set.
    """
    teams: Teams = {}
    long = [axis for axis, size in axes.items() if size > 1]
    for over in (over for count in range(1, len(long) + 1) for over in combinations(long, count)):
        by_place: dict[tuple[int, ...], list[ComparedBlock]] = {}
        for block in blocks:
            key = tuple(place for axis, place in block.coordinates.items() if axis not in over)
            by_place.setdefault(key, []).append(block)
        made = list(by_place.values())
        if max(map(len, made), default=1) > 1 and all(map(_alike, made)):
            teams[over] = made
    return teams


def _alike(team: Sequence[ComparedBlock]) -> bool:
    return all(all(map(np.array_equal, block.index, team[0].index)) for block in team)
