"""Parameter groups: neighbours that share one flat buffer, and so one collective and one optimizer pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

from spmd_engine.arrays.backend import Array
from spmd_engine.axes import MeshPosition

THRESHOLD = 1 << 20  # bytes: below this, one more neighbour costs less than one more collective
CAP = 32 << 20  # bytes: beyond this, neighbours share nothing: what is gathered for one is held for all


class Sum(NamedTuple):
    """The ranks over which a gradient is unreduced after a backward, and which of them share its state.

    ``over`` are mesh axes; ``cut`` those of them along which gradients, optimizer state and, fully sharded,
    parameters are stored in parts. ``stages``, if there are several, are the pipeline's places that hold the
    parameter: a tied one is summed over them, too.
    """

    over: tuple[str, ...] = ()
    cut: tuple[str, ...] = ()
    stages: tuple[int, ...] = ()
    shares: tuple[int, ...] = ()  #: what each owner has beside the others, in their order; (): as much each


class Home(NamedTuple):
    """The ranks that have a parameter, where not all of a stage do: those with this ``part`` along these axes."""

    axes: tuple[str, ...]
    part: int

    def has(self, place: MeshPosition) -> bool:
        """Whether the rank at ``place`` is one of them."""
        return place.index(self.axes) == self.part


@dataclass(frozen=True)
class Member:
    """A parameter as this rank uses it."""

    name: str
    shape: tuple[int, ...]  #: of the local block
    decay: bool  #: whether weight decay applies
    summed: Sum
    largest: int  #: elements of the largest block on any rank, by which every rank cuts the same groups
    chunk: int = 0  #: the chunk of layers that it belongs to
    home: Home | None = None  #: the ranks that have it; None: all of the stage
    small: bool = False  #: whether it is stored in no parts, being too small, though others are

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def row(self) -> int:
        """Elements of one row, of which an owner has none or all."""
        return max(1, prod(self.shape[1:]))

    def shaped(self, flat: Array) -> Array:
        """Some of its rows, flat, in their shape."""
        return flat.reshape(self.shape_of(flat.size))

    def shape_of(self, size: int) -> tuple[int, ...]:
        """The shape of so many elements of it, whole rows."""
        return self.shape if size == self.size else (size // self.row, *self.shape[1:])


Place = tuple[str, slice, tuple[int, ...]]  # the name of a segment, what of it, and in what shape


class ParameterGroup:
    """Members whose gradients are summed over the same ranks, side by side in one flat array.

    Decayed members lie first, so that weight decay is one segment. An *interval* is a part of the flat array;
    the owners' intervals end where rows do, so that everyone owns rectangles of whole arrays.
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
        """The flat array in ``parts`` consecutive intervals, as even, or as near to the owners' shares, as rows
        allow."""
        shares = self.summed.shares or (1,) * parts
        ends = accumulate(shares[:-1], initial=0)
        cuts = [self._row_boundary(self.size * end // sum(shares)) for end in ends]
        return [slice(*pair) for pair in pairwise([*cuts, self.size])]

    def _row_boundary(self, position: int) -> int:
        """The beginning of a row that is nearest to a position."""
        for member in self.members:
            span = self.spans[member.name]
            if position < span.stop:
                return span.start + round((position - span.start) / member.row) * member.row
        return self.size

    def rows(self, interval: slice) -> dict[str, slice]:
        """Of each member, the rows (of its first dim) that lie in an interval."""
        found = {}
        for member in self.members:
            span = self.spans[member.name]
            part = _part_within(span, interval) if member.size else span
            rows = slice((part.start - span.start) // member.row, (part.stop - span.start) // member.row)
            found[member.name] = rows if member.size else slice(0, *member.shape[:1])
        return found

    def views(self, flat: Array, interval: slice | None = None) -> dict[str, Array]:
        """A flat array of an interval (None: of all) as one array a member: those of its rows that are in it."""
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
        """A flat array of an interval, cut where weight decay ends; what is empty is left out."""
        interval = interval or self.whole
        end = min(max(self._decayed, interval.start), interval.stop) - interval.start
        cut = {f"{self.name}/decayed": flat[:end], f"{self.name}/plain": flat[end:]}
        return {name: part for name, part in cut.items() if part.size}

    def join(self, segments: Mapping[str, Array], like: Array, interval: slice | None = None) -> dict[str, Array]:
        """Arrays by member, as ``views`` gives them, from arrays by segment: views, since rows are not divided.

        ``like`` is an array of the module of those segments: an empty block belongs to none, yet must be there,
        since collectives go by name on all ranks.
        """
        return {member.name: joined(self.place(member, interval), segments, like) for member in self.members}

    def place(self, member: Member, interval: slice | None = None) -> Place:
        """Of the rows of a member that lie in an interval: their segment, where in it they are, and their shape."""
        interval = interval or self.whole
        kind = "decayed" if member.decay else "plain"
        span = slice(0, self._decayed) if member.decay else slice(self._decayed, self.size)
        first = _part_within(span, interval).start
        part = _part_within(self.spans[member.name], interval)
        shape = member.shape_of(part.stop - part.start)
        return f"{self.name}/{kind}", slice(part.start - first, part.stop - first), shape


def joined(place: Place, segments: Mapping[str, Array], like: Array) -> Array:
    """What ``ParameterGroup.join`` has of one member, whose place it is."""
    segment, part, shape = place
    if segment not in segments:
        return like[:0].reshape(shape if 0 in shape else (0, *shape[1:]))
    return segments[segment][part].reshape(shape)


def make_groups(
    members: Iterable[Member], itemsize: int, threshold: int = THRESHOLD, cap: int = CAP, kind: str = "group"
) -> list[ParameterGroup]:
    """Group neighbours in order: a group grows until it has ``threshold`` bytes, never beyond ``cap``.

    A parameter larger than the cap stands alone, and so does one that several stages of a pipeline hold: the
    stages' other parameters differ. Members with different homes are never together, nor small ones with others, and
    those of other homes, or small ones, do not part neighbours. So, given the members of all homes, every rank makes
    the same groups under the same names, of which it then has some.
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
        more = member.largest * itemsize
        alone = len(member.summed.stages) > 1
        if batch and (alone or _part_ways(batch[0], member) or size + more > cap or size >= threshold):
            yield batch
            batch, size = [], 0
        batch.append(member)
        size += more
        if alone:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _part_ways(one: Member, other: Member) -> bool:
    return one.summed != other.summed or one.chunk != other.chunk


def _part_within(span: slice, interval: slice) -> slice:
    """The part of ``span`` that lies in an interval: within ``span``, and empty, where they do not meet."""
    if interval.start <= span.start and span.stop <= interval.stop:
        return span
    start = min(max(span.start, interval.start), span.stop)
    return slice(start, max(start, min(span.stop, interval.stop)))
