"""Parameter groups: neighbouring parameters in one flat buffer, with one collective and one optimizer pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

from spmd_engine.arrays.backend import Array
from spmd_engine.axes import MeshPosition

THRESHOLD = 1 << 20  # bytes: below this, one more neighbour costs less than one more collective
CAP = 32 << 20  # bytes: no larger groups, since an unshard for one member holds all of them in memory


class Sum(NamedTuple):
    """The ranks over which a gradient is unreduced after a backward, and which of them share its state.

    ``over`` are mesh axes; ``sharded`` are those of them that shard gradients, optimizer state and, at ZeRO stage 3,
    parameters. ``stages``, if there are several, are the pipeline stages that hold the parameter. Its gradient is
    summed over those whose layers use it: all, as of a tied parameter, or ``computed_on``, the first of which sends the
    sum to the others.
    """

    over: tuple[str, ...] = ()
    sharded: tuple[str, ...] = ()
    stages: tuple[int, ...] = ()
    shares: tuple[int, ...] = ()  #: relative shares of the owners, in their order; (): equal
    computed_on: tuple[int, ...] = ()  #: some of ``stages``; (): all


class Home(NamedTuple):
    """The ranks that have a parameter that only some ranks of a stage have: those with ``part`` along ``axes``."""

    axes: tuple[str, ...]
    part: int

    def has(self, place: MeshPosition) -> bool:
        """Whether the rank at ``place`` has the parameter."""
        return place.index(self.axes) == self.part


@dataclass(frozen=True)
class Member:
    """A parameter as this rank uses it."""

    name: str
    shape: tuple[int, ...]  #: the local block's
    decay: bool  #: whether weight decay applies
    summed: Sum
    largest: int  #: elements of the largest block on any rank, so that every rank makes the same groups
    unit: int = 0  #: members of different units are in different groups
    home: Home | None = None  #: the ranks that have it; None: all of the stage
    small: bool = False  #: whether it is too small to be sharded, unlike others

    @cached_property
    def size(self) -> int:
        return prod(self.shape)

    @cached_property
    def row(self) -> int:
        """Elements of one row, which is never split between owners."""
        return max(1, prod(self.shape[1:]))

    def shaped(self, flat: Array) -> Array:
        """``flat``, which has some of its rows, reshaped."""
        return flat.reshape(self.shape_of(flat.size))

    def shape_of(self, size: int) -> tuple[int, ...]:
        """The shape of ``size`` of its elements, which are whole rows."""
        return self.shape if size == self.size else (size // self.row, *self.shape[1:])


Place = tuple[str, slice, tuple[int, ...]]  # the name of a segment, the slice of it, and the shape of that slice


class ParameterGroup:
    """Members whose gradients are summed over the same ranks, side by side in one flat array.

    Decayed members come first, so that weight decay is one segment. An *interval* is a part of the flat array; the
    owners' intervals end where rows do, so that every rank owns rectangles of whole arrays.
    """

    def __init__(self, index: int, members: Sequence[Member], kind: str = "group") -> None:
        self.name = f"{kind}{index}"
        self.members = sorted(members, key=lambda member: not member.decay)
        self.summed, self.home = members[0].summed, members[0].home
        ends = [0, *accumulate(member.size for member in self.members)]
        self.spans = {m.name: slice(*pair) for m, pair in zip(self.members, pairwise(ends), strict=True)}
        self.size = ends[-1]
        self.whole = slice(0, self.size)
        self._decayed = sum(member.size for member in self.members if member.decay)

    def intervals(self, parts: int) -> list[slice]:
        """The flat array in ``parts`` consecutive intervals, even or by the owners' shares, rounded to rows."""
        shares = self.summed.shares or (1,) * parts
        ends = accumulate(shares[:-1], initial=0)
        starts = [self._row_boundary(self.size * end // sum(shares)) for end in ends]
        return [slice(*pair) for pair in pairwise([*starts, self.size])]

    def _row_boundary(self, position: int) -> int:
        """The row boundary nearest to a position."""
        for member in self.members:
            span = self.spans[member.name]
            if position < span.stop:
                return span.start + round((position - span.start) / member.row) * member.row
        return self.size

    def rows(self, interval: slice) -> dict[str, slice]:
        """The rows (of the first dim) of each member that lie in an interval."""
        rows_by_member = {}
        for member in self.members:
            span = self.spans[member.name]
            part = _part_within(span, interval) if member.size else span
            rows = slice((part.start - span.start) // member.row, (part.stop - span.start) // member.row)
            rows_by_member[member.name] = rows if member.size else slice(0, *member.shape[:1])
        return rows_by_member

    def views(self, flat: Array, interval: slice | None = None) -> dict[str, Array]:
        """A flat array of an interval (None: of all) as one array per member, with the member's rows in it."""
        first = interval.start if interval else 0
        views = {}
        for member in self.members:
            part = _part_within(self.spans[member.name], interval or self.whole)
            views[member.name] = member.shaped(flat[part.start - first : part.stop - first])
        return views

    def runs(self, flat: Array, wanted: Callable[[str], bool], interval: slice | None = None) -> list[Array]:
        """The parts of a flat array of an interval that hold wanted members, neighbours joined."""
        interval = interval or self.whole
        bounds: list[list[int]] = []
        for member in self.members:
            part = _part_within(self.spans[member.name], interval)
            if part.start < part.stop and wanted(member.name):
                if bounds and bounds[-1][1] == part.start - interval.start:
                    bounds[-1][1] = part.stop - interval.start
                else:
                    bounds.append([part.start - interval.start, part.stop - interval.start])
        return [flat[start:stop] for start, stop in bounds]

    def segments(self, flat: Array, interval: slice | None = None) -> dict[str, Array]:
        """A flat array of an interval, split where weight decay ends, without empty segments."""
        interval = interval or self.whole
        end = min(max(self._decayed, interval.start), interval.stop) - interval.start
        segments = {f"{self.name}/decayed": flat[:end], f"{self.name}/plain": flat[end:]}
        return {name: part for name, part in segments.items() if part.size}

    def place(self, member: Member, interval: slice | None = None) -> Place:
        """Where a member's rows of an interval are: their segment, their slice of it, and their shape."""
        interval = interval or self.whole
        kind = "decayed" if member.decay else "plain"
        span = slice(0, self._decayed) if member.decay else slice(self._decayed, self.size)
        first = _part_within(span, interval).start
        part = _part_within(self.spans[member.name], interval)
        shape = member.shape_of(part.stop - part.start)
        return f"{self.name}/{kind}", slice(part.start - first, part.stop - first), shape


def joined(place: Place, segments: Mapping[str, Array], like: Array) -> Array:
    """The array of one member, as ``views`` returns it, from arrays by segment: a view, since rows are not split.

    ``like`` is any array of the segments' backend: empty segments are missing, but collectives need all names on all
    ranks.
    """
    segment, part, shape = place
    if segment not in segments:
        return like[:0].reshape(shape if 0 in shape else (0, *shape[1:]))
    return segments[segment][part].reshape(shape)


def make_groups(
    members: Iterable[Member], itemsize: int, threshold: int = THRESHOLD, cap: int = CAP, kind: str = "group"
) -> list[ParameterGroup]:
    """Group neighbours in order: a group grows until it has ``threshold`` bytes, never beyond ``cap``.

    A parameter larger than the cap is a group alone. Members with different homes or units are never in one group, nor
    small members with others; but members of another home, or small ones, do not separate neighbours. So every rank,
    given the members of all homes, makes the same groups under the same names, and stores some of them.
    """
    position, by_home = {}, {}
    for number, member in enumerate(members):
        position[member.name] = number
        by_home.setdefault((member.home, member.small), []).append(member)
    batches = [batch for neighbours in by_home.values() for batch in _batches(neighbours, itemsize, threshold, cap)]
    batches.sort(key=lambda batch: position[batch[0].name])
    return [ParameterGroup(i, batch, kind) for i, batch in enumerate(batches)]


def _batches(members: Iterable[Member], itemsize: int, threshold: int, cap: int) -> Iterator[list[Member]]:
    batch: list[Member] = []
    size = 0  # bytes
    for member in members:
        nbytes = member.largest * itemsize
        differs = batch and (batch[0].summed, batch[0].unit) != (member.summed, member.unit)
        if batch and (differs or size + nbytes > cap or size >= threshold):
            yield batch
            batch, size = [], 0
        batch.append(member)
        size += nbytes
    if batch:
        yield batch


def _part_within(span: slice, interval: slice) -> slice:
    """The part of ``span`` that lies in an interval; an empty slice within ``span`` where they do not overlap."""
    if interval.start <= span.start and span.stop <= interval.stop:
        return span
    start = min(max(span.start, interval.start), span.stop)
    return slice(start, max(start, min(span.stop, interval.stop)))
