"""Who gives which rectangles to whom, so that each element goes once to every rank that lacks it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from spmd_engine.comm.spans import span
from spmd_engine.errors import UsageError
from spmd_engine.sharding.placement import ArrayPlacement
from spmd_engine.sharding.rectangles import Grid, Rectangle


@dataclass(frozen=True)
class Route:
    """What one rank gives to some ranks, itself perhaps among them: ``parts``, one behind the other."""

    sender: int
    receivers: tuple[int, ...]  #: ascending
    parts: tuple[tuple[str, Rectangle], ...]  #: name of the array, and what of it

    @property
    def size(self) -> int:
        """How many elements it has."""
        return self._ends[-1]

    @cached_property
    def _ends(self) -> list[int]:
        return [0, *accumulate(part.size for _, part in self.parts)]

    def portion(self, number: int, of: int) -> Iterator[tuple[str, Rectangle]]:
        """One of so many consecutive portions, as even as can be, as rectangles."""
        mine = span(self.size, of, number)
        for (name, part), (start, stop) in zip(self.parts, pairwise(self._ends), strict=True):
            for each in part.elements(max(mine.start, start) - start, min(mine.stop, stop) - start):
                yield name, each


def find_routes(
    source: Mapping[str, ArrayPlacement],
    target: Mapping[str, ArrayPlacement],
    nodes: Sequence[Hashable],
    from_owners: bool,
) -> dict[np.dtype, tuple[Route, ...]]:
    """All routes by which ``target`` comes about, by dtype; the same on every rank.

    A rank that has an element keeps it. What it lacks it gets once: from one of its own node, if one there has it;
    and of several of those, from the one that has the least to send so far, the first of these. ``nodes``: of each
    rank, anything that tells its node from others.

    Raises UsageError where somebody wants what nobody has.
    """
    load = [0] * len(nodes)  # bytes that each rank sends
    found: dict[np.dtype, dict[tuple[int, tuple[int, ...]], list[tuple[str, Rectangle]]]] = {}
    for name, wanted in target.items():
        routes = found.setdefault(wanted.dtype, {})
        for holders, takers, elements, rectangles in _exchanged(name, source[name], wanted, from_owners):
            receivers: dict[int, list[int]] = {}
            for taker in takers:
                sender = taker
                if taker not in holders:
                    near = [rank for rank in holders if nodes[rank] == nodes[taker]]
                    sender = min(near or holders, key=load.__getitem__)
                    load[sender] += elements * wanted.dtype.itemsize
                receivers.setdefault(sender, []).append(taker)
            for sender, ranks in receivers.items():
                routes.setdefault((sender, tuple(ranks)), []).extend((name, part) for part in rectangles)
    return {
        dtype: tuple(Route(*ends, tuple(parts)) for ends, parts in sorted(routes.items()))
        for dtype, routes in found.items()
    }


def _exchanged(
    name: str, source: ArrayPlacement, target: ArrayPlacement, from_owners: bool
) -> Iterator[tuple[list[int], list[int], int, list[Rectangle]]]:
    """The array in parts, by who has each and who wants it: these ranks, how many elements, and the rectangles."""
    given = source.owned if from_owners else source.held
    everything = [each for side in (given, target.held) for held in side for each in held]
    grid = Grid(source.shape, everything)
    sizes = grid.sizes()
    ranks = len(given)
    # Of each side, rank and cell, the number of the rank's rectangle that has the cell: parts never go across two.
    number = np.full((2, ranks, *grid.shape), -1, np.int32)
    for side, placed in enumerate((given, target.held)):
        for rank, held in enumerate(placed):
            for i, each in enumerate(held):
                if each.size:
                    number[(side, rank, *grid.cells(each))] = i
    had, wanted = (number >= 0).any(axis=1)
    for lacking in grid.rectangles(wanted & ~had)[:1]:
        raise UsageError(
            f"{name}: ranks hold {sizes[had].sum()} of its {sizes.sum()} elements; is its sharding right? "
            f"Nobody holds the one at {lacking.start}"
        )
    if not sizes.size:
        return
    patterns, which = np.unique(number.reshape(2 * ranks, -1), axis=1, return_inverse=True)
    which = which.reshape(grid.shape)
    for i, pattern in enumerate(patterns.T >= 0):
        takers = np.flatnonzero(pattern[ranks:]).tolist()
        if takers:
            mask = which == i
            holders = np.flatnonzero(pattern[:ranks]).tolist()
            yield holders, takers, int(sizes[mask].sum()), grid.rectangles(mask)


def count_rounds(routes: Sequence[Route], ranks: int, most: int) -> int:
    """In how many portions to cut the routes, so that of each no rank sends, or receives, more than ``most`` elements.

    0 if nothing has to be sent at all. A portion of a route is at least an element, until there are no more.
    """
    travelling = [route for route in routes if route.receivers != (route.sender,)]
    if not travelling:
        return 0
    sizes = np.array([route.size for route in travelling])
    ends = [(i, route.sender, to) for i, route in enumerate(travelling) for to in route.receivers if to != route.sender]
    number, senders, receivers = np.array(ends).T

    def largest(rounds: int) -> int:
        portions = (-(-sizes // rounds))[number]
        return int(max(np.bincount(side, portions, ranks).max() for side in (senders, receivers)))

    return 1 + bisect_left(range(1, int(sizes.max())), True, key=lambda rounds: largest(rounds) <= most)
