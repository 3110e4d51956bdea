"""Finds why blocks are wrong: missing, repeated or averaging reductions, stale values, and other causes.

Each cause is a formula over all ranks' blocks of one tensor; the causes whose formula holds are reported.
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
    """The part of a tensor on one rank."""

    rank: int
    coordinates: Mapping[str, int]
    index: tuple[np.ndarray, ...]  #: the positions in the global array, along each dim
    found: np.ndarray
    expected: np.ndarray
    before: np.ndarray | None = None  #: the values one step before
    base: np.ndarray | None = None  #: the array to which the rest was added; it is no term of a sum over ranks
    base_name: str = "its input"

    @property
    def difference(self) -> np.ndarray:
        return difference(self.found, self.expected)

    @property
    def added(self) -> ComparedBlock:
        """The block without its base."""
        if self.base is None:
            return self
        return replace(self, found=self.found - self.base, expected=self.expected - self.base, base=None)

    def element(self, place: int) -> Element:
        """Return one element, by its position in the flat block."""
        where = np.unravel_index(place, self.found.shape)
        index = tuple(int(places[i]) for places, i in zip(self.index, where, strict=True))
        return Element(index, self.rank, self.coordinates, float(self.found[where]), float(self.expected[where]))


def difference(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Return |found - expected|: 0 where both are NaN or the same infinity, infinite where only one of them is."""
    with np.errstate(invalid="ignore"):
        distance = np.abs(found - expected)
    same = (found == expected) | (np.isnan(found) & np.isnan(expected))
    return np.where(same, 0.0, np.where(np.isnan(distance), np.inf, distance))


def first_and_largest(blocks: Sequence[ComparedBlock], limit: float) -> tuple[Element, Element]:
    """Return the globally first element that differs by more than ``limit``, and the one that differs most."""
    elements = []
    for block in blocks:
        distances = block.difference.reshape(-1)
        if distances.size and distances.max() > limit:
            first, largest = int(np.argmax(distances > limit)), int(np.argmax(distances))
            elements.append((block.element(first), block.element(largest), distances[largest]))
    first = min((first for first, _, _ in elements), key=lambda element: (element.index, element.rank))
    return first, max(elements, key=lambda element: element[2])[1]


def teams_of_replicas(blocks: Sequence[ComparedBlock], axes: Mapping[str, int]) -> Teams:
    """Return, by sets of mesh axes that replicate the tensor, the teams of ranks that differ only along the set.

    Smaller sets come first. A team consists of blocks of the same positions, so no set has an axis that shards the
    tensor.
    """
    teams: Teams = {}
    long = [axis for axis, size in axes.items() if size > 1]
    for over in (over for count in range(1, len(long) + 1) for over in combinations(long, count)):
        by_place: dict[tuple[int, ...], list[ComparedBlock]] = {}
        for block in blocks:
            key = tuple(place for axis, place in block.coordinates.items() if axis not in over)
            by_place.setdefault(key, []).append(block)
        candidates = list(by_place.values())
        if max(map(len, candidates), default=1) > 1 and all(map(_have_same_positions, candidates)):
            teams[over] = candidates
    return teams


def _have_same_positions(team: Sequence[ComparedBlock]) -> bool:
    return all(all(map(np.array_equal, block.index, team[0].index)) for block in team)


# --- Causes


PARAMETER, INITIAL = "parameter", "initial parameter"  # kinds of tensors that are not summed over ranks
VARIABLE = "variable"  # correct values of a function may differ between ranks


@dataclass(frozen=True)
class _Evidence:
    """All ranks' blocks of a tensor, and facts about the tensor."""

    blocks: Sequence[ComparedBlock]
    axes: Mapping[str, int]  #: the mesh axes with their sizes
    limit: float
    kind: str
    micro_batches: int

    @cached_property
    def wrong(self) -> list[ComparedBlock]:
        """The blocks with an element that differs by more than the limit."""
        return [block for block in self.blocks if self.is_off(block.difference)]

    @cached_property
    def teams(self) -> Teams:
        """By axes, the teams of replicas along them in which at least one block is wrong."""
        wrong = {block.rank for block in self.wrong}
        all_teams = teams_of_replicas(self.blocks, self.axes)
        return {over: [team for team in teams if wrong & {x.rank for x in team}] for over, teams in all_teams.items()}

    def is_off(self, difference: np.ndarray) -> bool:
        """Whether a difference is larger than the limit."""
        return bool((difference > self.limit).any())


def diagnose(
    blocks: Sequence[ComparedBlock], axes: Mapping[str, int], limit: float, *, kind: str, micro_batches: int = 1
) -> tuple[Finding, ...]:
    """Return the findings that explain why some blocks differ by more than ``limit`` from the expected values.

    ``axes`` are the mesh axes with their sizes. Causes are tried in order; the first one that fits is returned.
    """
    evidence = _Evidence(blocks, axes, limit, kind, micro_batches)
    of_kind = _CAUSES_BY_KIND.get(kind, (_missing_sum, _multiple, _base_in_sum))
    causes = (*of_kind, _other_block, _missing_halo, _stale, _zero, _transposed)
    causes += () if kind == VARIABLE else (_replicas,)
    return next((findings for cause in causes if (findings := tuple(cause(evidence)))), ())


def _missing_sum(evidence: _Evidence) -> Iterable[Finding]:
    """The sum of the blocks over some axes is what each rank should have."""
    teams, limit = evidence.teams, evidence.limit

    def unsummed(over: tuple[str, ...]) -> bool:
        if not any(_differ(team, limit) for team in teams[over]):
            return False  # equal blocks have been summed already, though perhaps wrongly
        added = [[block.added for block in team] for team in teams[over]]
        return any(all(_is_sum_expected(team, limit) for team in terms) for terms in (added, teams[over]))

    base = next((x for axis_teams in teams.values() for team in axis_teams for x in team if x.base is not None), None)
    for over in _smallest(filter(unsummed, teams)):
        yield missing_sum(over, f", with {base.base_name} added once," if base is not None else "")


def missing_sum(over: Sequence[str], how: str = "") -> Finding:
    """Return the finding that ranks have terms of a sum over these axes."""
    axes = " and ".join(over)
    text = f"summed over {axes}{how} it would be right: a reduction over {axes} is missing"
    return Finding(Cause.MISSING_SUM, text, tuple(over))


def _multiple(evidence: _Evidence) -> Iterable[Finding]:
    """All values are one multiple of the expected values; the sizes of axes may explain the factor."""
    wrong, limit = evidence.wrong, evidence.limit
    factor, subject = _factor([block.added for block in wrong], limit), "it is"
    if any(block.base is not None for block in wrong):
        subject = f"what is added to {wrong[0].base_name} is" if factor else subject
        factor = factor or _factor(wrong, limit)
    if not factor:
        return
    times = max(factor, 1 / factor)
    cause, reduction = (Cause.REPEATED_SUM, "summed once more") if factor > 1 else (Cause.MEAN, "averaged, not summed,")
    text = f"{subject} {_ratio(factor)} times what it should be"
    explained = _smallest(
        over for over, teams in evidence.teams.items() if all(_is_near(times, len(team)) for team in teams)
    )
    for over in explained:
        yield Finding(cause, f"{text}, as if {reduction} over {' and '.join(over)}", over, factor)
    if evidence.micro_batches > 1 and _is_near(times, evidence.micro_batches):
        yield Finding(cause, f"{text}, as if {reduction} over the micro-batches", (), factor)
    elif not explained and wrong[0].found.size > 1:  # every number is a multiple of any other
        yield Finding(Cause.FACTOR, text, (), factor)


def _base_in_sum(evidence: _Evidence) -> Iterable[Finding]:
    """The error is a multiple of the base, because several ranks added the base before a sum."""
    wrong = evidence.wrong
    errors = [replace(x, found=x.found - x.expected, expected=x.base) for x in wrong if x.base is not None]
    factor = _factor(errors, evidence.limit) if len(errors) == len(wrong) else None
    if factor is None:
        return
    for over, teams in evidence.teams.items():
        if all(_is_near(factor + 1, len(team)) for team in teams):
            yield base_in_sum(wrong[0].base_name, over, len(teams[0]))


def base_in_sum(base: str, over: tuple[str, ...], times: int) -> Finding:
    """Return the finding that a bias or another array is added before a sum over ranks."""
    axes = " and ".join(over)
    text = f"{base} is in it {times} times: added on each rank before the sum over {axes}. Add it once, after the sum"
    return Finding(Cause.BIAS_IN_SUM, text, over)


def _other_block(evidence: _Evidence) -> Iterable[Finding]:
    """Each rank has the values that another rank should have, or the ranks' parts in another order."""
    wrong, limit = evidence.wrong, evidence.limit

    def owner(block: ComparedBlock) -> ComparedBlock | None:
        same_shape = (other for other in evidence.blocks if other.expected.shape == block.found.shape)
        return next((other for other in same_shape if (difference(block.found, other.expected) <= limit).all()), None)

    if any(block.found.size < 2 or np.ptp(block.found) <= limit for block in wrong):
        return
    if (other := owner(wrong[0])) is not None and all(owner(block) is not None for block in wrong[1:]):
        over = tuple(axis for axis, place in wrong[0].coordinates.items() if place != other.coordinates[axis])
        text = f"rank {wrong[0].rank} has the values of rank {other.rank}: parts along {' and '.join(over)} are swapped"
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
    transposed = [replace(block, found=block.found.T) for block in evidence.wrong]
    fits = all(x.found.ndim > 1 and x.found.shape == x.expected.shape for x in transposed)
    if fits and not any(evidence.is_off(block.difference) for block in transposed):
        yield Finding(Cause.TRANSPOSED, "it is the transpose of what it should be")


def _multiple_of_update(evidence: _Evidence) -> Iterable[Finding]:
    factor = _factor([block.added for block in evidence.wrong], evidence.limit)
    if factor is not None:
        yield Finding(Cause.FACTOR, f"its update is {_ratio(factor)} times what it should be", (), factor)


def _stale(evidence: _Evidence) -> Iterable[Finding]:
    limit = evidence.limit
    if all(block.before is not None and _is_equal_where_off(block, block.before, limit) for block in evidence.wrong):
        reason = "the update did not reach it" if evidence.kind == PARAMETER else "it is the previous step's"
        yield Finding(Cause.STALE, f"what is off did not change in this step: {reason}")


def _zero(evidence: _Evidence) -> Iterable[Finding]:
    if all(_is_equal_where_off(block, np.zeros_like(block.found), evidence.limit) for block in evidence.wrong):
        yield Finding(Cause.ZERO, "what is off is 0: nothing was ever added to it")


def _missing_halo(evidence: _Evidence) -> Iterable[Finding]:
    """Along a sharded dim only the first and last positions of blocks differ, and only next to other ranks' blocks."""
    blocks, wrong = evidence.blocks, evidence.wrong
    for dim in range(wrong[0].found.ndim):
        over = [axis for axis in evidence.axes if _shards_dim(blocks, axis, dim)]
        length = 1 + max((int(block.index[dim].max()) for block in blocks if block.found.size), default=0)
        shares = [off for block in wrong if (off := _edge_share(block, dim, length, evidence.limit)) is not None]
        if over and len(shares) == len(wrong) and min(shares) < 1:
            axes = " and ".join(over)
            text = f"only what lies next to other ranks' parts along {axes} is off: a halo over {axes} is missing"
            yield Finding(Cause.MISSING_HALO, text, tuple(over))
            return


def _shards_dim(blocks: Sequence[ComparedBlock], axis: str, dim: int) -> bool:
    """Return whether an axis shards a dim: ranks that differ only along the axis have different positions."""
    first: dict[tuple[int, ...], np.ndarray] = {}
    for block in blocks:
        key = tuple(place for name, place in block.coordinates.items() if name != axis)
        if not np.array_equal(first.setdefault(key, block.index[dim]), block.index[dim]):
            return True
    return False


def _edge_share(block: ComparedBlock, dim: int, length: int, limit: float) -> float | None:
    """Return the share of wrong positions along a dim, if all of them are at edges next to other blocks; else None."""
    off = np.any(block.difference > limit, axis=tuple(d for d in range(block.found.ndim) if d != dim))
    right, places = np.flatnonzero(~off), block.index[dim]
    if not len(right):
        return 1.0 if len(places) < length else None
    inner = off[right[0] : right[-1]].any()
    beyond = (off[0] and places[0] == 0) or (off[-1] and places[-1] == length - 1)
    return None if inner or beyond else float(off.mean())


def _is_equal_where_off(block: ComparedBlock, other: np.ndarray, limit: float) -> bool:
    """Return whether a block has exactly the values of another array wherever the block is wrong."""
    return bool((block.found == other)[block.difference > limit].all())


def _replicas(evidence: _Evidence) -> Iterable[Finding]:
    teams, limit = evidence.teams, evidence.limit
    for over in _smallest(over for over, replicas in teams.items() if any(_differ(team, limit) for team in replicas)):
        axes = " and ".join(over)
        yield Finding(
            Cause.REPLICAS_DIFFER,
            f"ranks along {axes} differ from each other, and should not: a collective over {axes} is missing before",
            over,
        )


def _differ(team: Sequence[ComparedBlock], limit: float) -> bool:
    return any((difference(block.found, team[0].found) > limit).any() for block in team)


def _is_sum_expected(team: Sequence[ComparedBlock], limit: float) -> bool:
    total = sum((block.found for block in team[1:]), team[0].found)
    return all((difference(total, block.expected) <= len(team) * limit).all() for block in team)


def _factor(blocks: Sequence[ComparedBlock], limit: float) -> float | None:
    """Return f if all blocks are f times the expected ones, else None: f by least squares, then checked."""
    found = np.concatenate([block.found.reshape(-1) for block in blocks])
    expected = np.concatenate([block.expected.reshape(-1) for block in blocks])
    if not (np.abs(expected) > limit).any() or not np.isfinite(found).all():
        return None
    squared_norm = float(expected @ expected)
    factor = float(found @ expected) / squared_norm
    fits = (difference(found, factor * expected) <= max(1.0, abs(factor)) * limit).all()
    return factor if fits and factor else None


def _smallest(sets: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return the sets with the fewest axes."""
    candidates = list(sets)
    return [over for over in candidates if len(over) == min(map(len, candidates))]


def _ratio(factor: float) -> str:
    """``2``, ``1/3`` or ``0.417``."""
    if 0 < factor < 1 and _is_near(1 / factor, round(1 / factor)):
        return f"1/{round(1 / factor)}"
    return f"{factor:.6g}"


def _is_near(number: float, whole: int) -> bool:
    return isclose(number, whole, rel_tol=1e-4)  # the precision of factors in float32


#: The first causes to try for tensors that are not summed over ranks; for all others, wrong reductions come first.
_CAUSES_BY_KIND = {PARAMETER: (_multiple_of_update,), INITIAL: ()}
