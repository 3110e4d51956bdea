"""Why blocks differ from what they should be: reductions that are missing, repeated or means, and stale values.

Each cause is a formula over all ranks' blocks of one tensor; those that hold are named.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, product
from math import isclose

import numpy as np

from spmd_engine.verification.report import Cause, Element, Finding

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
            first, largest = int(np.argmax(apart > limit)), int(np.argmax(apart))
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


# --- Causes


PARAMETER, INITIAL = "parameter", "initial parameter"  # kinds of tensors that are not summed over ranks
VARIABLE = "variable"  # of a function: what its ranks have may rightly differ


@dataclass(frozen=True)
class _Evidence:
    """What all ranks have of a tensor, and what is known of it."""

    blocks: Sequence[ComparedBlock]
    axes: Mapping[str, int]  #: of the mesh, with their sizes
    limit: float
    kind: str
    micro_batches: int

    @cached_property
    def wrong(self) -> list[ComparedBlock]:
        """The blocks that are off."""
        return [block for block in self.blocks if self.is_off(block.difference)]

    @cached_property
    def teams(self) -> Teams:
        """By axes, the ranks that differ along them alone and should have the same, where one of them is off."""
        off = {block.rank for block in self.wrong}
        made = teams_of_replicas(self.blocks, self.axes)
        return {over: [team for team in teams if off & {x.rank for x in team}] for over, teams in made.items()}

    def is_off(self, difference: np.ndarray) -> bool:
        """Whether a difference is larger than the limit."""
        return bool((difference > self.limit).any())


def diagnose(
    blocks: Sequence[ComparedBlock], axes: Mapping[str, int], limit: float, *, kind: str, micro_batches: int = 1
) -> tuple[Finding, ...]:
    """The causes that explain blocks some of which differ by more than ``limit`` from what they should be.

    ``axes`` are the mesh's, with their sizes. Causes are tried in order: the first that fits is the answer.
    """
    evidence = _Evidence(blocks, axes, limit, kind, micro_batches)
    of_kind = _CAUSES_BY_KIND.get(kind, (_missing_sum, _multiple, _base_in_sum))
    causes = (*of_kind, _other_block, _missing_halo, _stale, _zero, _transposed)
    causes += () if kind == VARIABLE else (_replicas,)
    return next((found for cause in causes if (found := tuple(cause(evidence)))), ())


def _missing_sum(evidence: _Evidence) -> Iterable[Finding]:
    """What the ranks along some axes have, together, is what each should have."""
    teams, limit = evidence.teams, evidence.limit

    def unsummed(over: tuple[str, ...]) -> bool:
        if not any(_apart(team, limit) for team in teams[over]):
            return False  # they have the same: it has been summed, if not rightly
        added = [[block.added for block in team] for team in teams[over]]
        return any(all(_sums_up(team, limit) for team in way) for way in (added, teams[over]))

    base = next((block for made in teams.values() for team in made for block in team if block.base is not None), None)
    for over in _fewest(filter(unsummed, teams)):
        yield missing_sum(over, f", with {base.base_name} added once," if base is not None else "")


def missing_sum(over: Sequence[str], how: str = "") -> Finding:
    """Ranks have terms of a sum over these axes."""
    axes = _and(over)
    text = f"summed over {axes}{how} it would be right: a reduction over {axes} is missing"
    return Finding(Cause.MISSING_SUM, text, tuple(over))


def _multiple(evidence: _Evidence) -> Iterable[Finding]:
    """All of it is a multiple of what it should be: by which axes would that come about?"""
    wrong, limit = evidence.wrong, evidence.limit
    factor, what = _factor([block.added for block in wrong], limit), "it is"
    if any(block.base is not None for block in wrong):
        what = f"what is added to {wrong[0].base_name} is" if factor else what
        factor = factor or _factor(wrong, limit)
    if not factor:
        return
    times = max(factor, 1 / factor)
    cause, how = (Cause.REPEATED_SUM, "summed once more") if factor > 1 else (Cause.MEAN, "averaged, not summed,")
    said = f"{what} {_ratio(factor)} times what it should be"
    explained = _fewest(
        over for over, made in evidence.teams.items() if all(_is_near(times, len(team)) for team in made)
    )
    for over in explained:
        yield Finding(cause, f"{said}, as if {how} over {' and '.join(over)}", over, factor)
    if evidence.micro_batches > 1 and _is_near(times, evidence.micro_batches):
        yield Finding(cause, f"{said}, as if {how} over the micro-batches", (), factor)
    elif not explained and wrong[0].found.size > 1:  # of one number, any other is a multiple
        yield Finding(Cause.FACTOR, said, (), factor)


def _base_in_sum(evidence: _Evidence) -> Iterable[Finding]:
    """What is off is a multiple of the base: so many ranks added it, and then were summed."""
    wrong = evidence.wrong
    more = [replace(x, found=x.found - x.expected, expected=x.base) for x in wrong if x.base is not None]
    factor = _factor(more, evidence.limit) if len(more) == len(wrong) else None
    if factor is None:
        return
    for over, made in evidence.teams.items():
        if all(_is_near(factor + 1, len(team)) for team in made):
            yield base_in_sum(wrong[0].base_name, over, len(made[0]))


def base_in_sum(base: str, over: tuple[str, ...], times: int) -> Finding:
    """A bias, or whatever else, that is added before a sum over ranks."""
    axes = _and(over)
    text = f"{base} is in it {times} times: added on each rank before the sum over {axes}. Add it once, after the sum"
    return Finding(Cause.BIAS_IN_SUM, text, over)


def _other_block(evidence: _Evidence) -> Iterable[Finding]:
    """Each rank has the very values that another one should have; or, of a whole, their parts in another order."""
    wrong, limit = evidence.wrong, evidence.limit

    def whose(block: ComparedBlock) -> ComparedBlock | None:
        alike = (each for each in evidence.blocks if each.expected.shape == block.found.shape)
        return next((each for each in alike if (difference(block.found, each.expected) <= limit).all()), None)

    if any(block.found.size < 2 or np.ptp(block.found) <= limit for block in wrong):
        return
    if (other := whose(wrong[0])) is not None and all(whose(block) is not None for block in wrong[1:]):
        over = tuple(axis for axis, place in wrong[0].coordinates.items() if place != other.coordinates[axis])
        text = f"rank {wrong[0].rank} has the values of rank {other.rank}: parts along {_and(over)} are swapped"
        yield Finding(Cause.OTHER_BLOCK, text, over)
        return
    for axis, dim in product(evidence.axes, range(wrong[0].found.ndim)):
        if all(_is_permuted(block, evidence.axes[axis], dim, limit) for block in wrong):
            text = f"its parts from the ranks along {axis} are in another order than one device's"
            yield Finding(Cause.OTHER_BLOCK, text, (axis,))
            return


def _is_permuted(block: ComparedBlock, parts: int, dim: int, limit: float) -> bool:
    found, expected = (np.array_split(x, parts, axis=dim) for x in (block.found, block.expected))
    return block.found.shape[dim] >= parts and all(
        any(x.shape == y.shape and (difference(x, y) <= limit).all() for y in expected) for x in found
    )


def _transposed(evidence: _Evidence) -> Iterable[Finding]:
    turned = [replace(block, found=block.found.T) for block in evidence.wrong]
    fits = all(x.found.ndim > 1 and x.found.shape == x.expected.shape for x in turned)
    if fits and not any(evidence.is_off(block.difference) for block in turned):
        yield Finding(Cause.TRANSPOSED, "it is the transpose of what it should be")


def _multiple_of_update(evidence: _Evidence) -> Iterable[Finding]:
    factor = _factor([block.added for block in evidence.wrong], evidence.limit)
    if factor is not None:
        yield Finding(Cause.FACTOR, f"its update is {_ratio(factor)} times what it should be", (), factor)


def _stale(evidence: _Evidence) -> Iterable[Finding]:
    limit = evidence.limit
    if all(block.before is not None and _everywhere_off(block, block.before, limit) for block in evidence.wrong):
        what = "the update did not reach it" if evidence.kind == PARAMETER else "it is the previous step's"
        yield Finding(Cause.STALE, f"what is off did not change in this step: {what}")


def _zero(evidence: _Evidence) -> Iterable[Finding]:
    if all(_everywhere_off(block, np.zeros_like(block.found), evidence.limit) for block in evidence.wrong):
        yield Finding(Cause.ZERO, "what is off is 0: nothing was ever added to it")


def _missing_halo(evidence: _Evidence) -> Iterable[Finding]:
    """Along a sharded dim only the first and the last places of blocks are off, and only where others go on."""
    blocks, wrong = evidence.blocks, evidence.wrong
    for dim in range(wrong[0].found.ndim):
        over = [axis for axis in evidence.axes if _cuts(blocks, axis, dim)]
        length = 1 + max((int(block.index[dim].max()) for block in blocks if block.found.size), default=0)
        edges = [off for block in wrong if (off := _edges_off(block, dim, length, evidence.limit)) is not None]
        if over and len(edges) == len(wrong) and min(edges) < 1:
            what = _and(over)
            text = f"only what lies next to other ranks' parts along {what} is off: a halo over {what} is missing"
            yield Finding(Cause.MISSING_HALO, text, tuple(over))
            return


def _cuts(blocks: Sequence[ComparedBlock], axis: str, dim: int) -> bool:
    """Whether ranks that differ along an axis alone have other places of a dim."""
    first: dict[tuple[int, ...], np.ndarray] = {}
    for block in blocks:
        key = tuple(place for name, place in block.coordinates.items() if name != axis)
        if not np.array_equal(first.setdefault(key, block.index[dim]), block.index[dim]):
            return True
    return False


def _edges_off(block: ComparedBlock, dim: int, length: int, limit: float) -> float | None:
    """Which share of a block's places along a dim is off, if these are its first and last ones where others go on."""
    off = np.any(block.difference > limit, axis=tuple(d for d in range(block.found.ndim) if d != dim))
    right, places = np.flatnonzero(~off), block.index[dim]
    if not len(right):
        return 1.0 if len(places) < length else None
    inner = off[right[0] : right[-1]].any()
    beyond = (off[0] and places[0] == 0) or (off[-1] and places[-1] == length - 1)
    return None if inner or beyond else float(off.mean())


def _everywhere_off(block: ComparedBlock, other: np.ndarray, limit: float) -> bool:
    """Whether a block has the very values of another array wherever it is off."""
    return bool((block.found == other)[block.difference > limit].all())


def _replicas(evidence: _Evidence) -> Iterable[Finding]:
    teams, limit = evidence.teams, evidence.limit
    for over in _fewest(over for over, made in teams.items() if any(_apart(team, limit) for team in made)):
        axes = _and(over)
        yield Finding(
            Cause.REPLICAS_DIFFER,
            f"ranks along {axes} differ from each other, and should not: a collective over {axes} is missing before",
            over,
        )


def _apart(team: Sequence[ComparedBlock], limit: float) -> bool:
    return any((difference(block.found, team[0].found) > limit).any() for block in team)


def _sums_up(team: Sequence[ComparedBlock], limit: float) -> bool:
    total = sum((block.found for block in team[1:]), team[0].found)
    return all((difference(total, block.expected) <= len(team) * limit).all() for block in team)


def _factor(blocks: Sequence[ComparedBlock], limit: float) -> float | None:
    """f, if all blocks are f times what they should be; by least squares, then tried. None: there is none."""
    found = np.concatenate([block.found.reshape(-1) for block in blocks])
    expected = np.concatenate([block.expected.reshape(-1) for block in blocks])
    if not (np.abs(expected) > limit).any() or not np.isfinite(found).all():
        return None
    square = float(expected @ expected)
    factor = float(found @ expected) / square
    fits = (difference(found, factor * expected) <= max(1.0, abs(factor)) * limit).all()
    return factor if fits and factor else None


def _and(axes: Iterable[str]) -> str:
    return " and ".join(axes)


def _fewest(sets: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Of sets of axes, those with the fewest."""
    found = list(sets)
    return [over for over in found if len(over) == min(map(len, found))]


def _ratio(factor: float) -> str:
    """``2``, ``1/3`` or ``0.417``."""
    if 0 < factor < 1 and _is_near(1 / factor, round(1 / factor)):
        return f"1/{round(1 / factor)}"
    return f"{factor:.6g}"


def _is_near(number: float, whole: int) -> bool:
    return isclose(number, whole, rel_tol=1e-4)  # in float32, no better


#: What is tried first of tensors that are not summed over ranks; of all others, that a reduction is wrong.
_CAUSES_BY_KIND = {PARAMETER: (_multiple_of_update,), INITIAL: ()}
