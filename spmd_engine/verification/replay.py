"""Which line of a user's forward or backward is wrong: one of its arrays is repaired, and the step is made again.

The tensors that disagree say little of the mistake: where the backward forgets to sum dx[b d] {U_model} =
dz[b f/model] · w[d f/model], no gradient of a weight is a sum, or a multiple, of what it should be. So both engines
make the step once more, and every array that their functions bind to a name is compared with one device's of the same
name and line. It may rightly be a block of that, or a term of a sum over ranks. What is neither is suspected, and also
terms that no all_reduce is given; the causes of ``diagnosis`` are tried on them. Then the step is repeated, each time
with one suspected array replaced by what one device has. The first one that makes the wrong tensor right, and no right
one wrong, is where the mistake is made. Arrays that are bound to no name cannot be found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from math import prod
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.engine.base import ShardedEngine
from spmd_engine.verification.bindings import Bindings, Name, ObservedReduction, place
from spmd_engine.verification.comparison import SMALLEST_SCALE, from_first, to_first
from spmd_engine.verification.diagnosis import VARIABLE, ComparedBlock, base_in_sum, diagnose, difference, missing_sum
from spmd_engine.verification.report import Cause, Finding

Axes = tuple[str, ...]
Rank = Mapping[str, int]  # its coordinates
MOST = 150  # repeated steps
MOST_BYTES = 1 << 28  # of arrays that are kept, on each rank
BASES = 8  # how many arrays are tried as what others are added to
OPS = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min, "prod": np.prod}


@dataclass
class Recorded:
    """What one rank's functions bound to names in a step, in order; and what they had reduced before that."""

    coordinates: Rank
    parameters: dict[str, np.ndarray]
    arrays: dict[Name, list[tuple[np.ndarray, int]]] = field(default_factory=dict)
    reductions: list[tuple[ObservedReduction, np.ndarray]] = field(default_factory=list)


@dataclass(frozen=True)
class Repair:
    """What may be wrong with an array, and what each rank is to have instead, each time that its line runs."""

    name: Name
    findings: tuple[Finding, ...]
    values: dict[int, list[np.ndarray]]


def explain(
    engine: ShardedEngine,
    reference: ShardedEngine | None,
    repeat: Callable[[], Sequence[str]],
    alone: Callable[[], None],
    wrong: Sequence[str],
    tolerance: float,
    is_known: bool,
) -> tuple[Finding, ...]:
    """What is wrong in which lines, so that the first of ``wrong`` tensors is; empty if it is not found. Collective.

    ``repeat`` repeats the engine's step, and returns which tensors are off then; ``alone`` repeats the reference's,
    which rank 0 alone has. While some tensor is still wrong, a further mistake is looked for. ``is_known``: what is
    wrong is known, if not in which line, so that lines are left out that one device does not run.
    """
    world, findings, repairs, left = engine.group(), [], {}, MOST
    expected = _record(reference, alone, {}) if reference is not None else None
    while wrong and left > 0:
        everyone = to_first(world, _record(engine, repeat, repairs))
        suspected = iter(())
        if everyone is not None and expected is not None:
            suspected = _suspected(dict(enumerate(everyone)), expected, engine, tolerance, is_known)
        while left > 0 and (repair := from_first(world, next(suspected, None))) is not None:
            left -= 1
            with _bound(engine, {**repairs, repair.name: repair}):
                still = repeat()
            if wrong[0] not in still and set(still) <= set(wrong):
                findings += [replace(each, text=f"{repair.name}: {each.text}") for each in repair.findings]
                repairs[repair.name], wrong = repair, still
                break
        else:
            break
    return tuple(findings)


# --- making the step again


def _record(engine: ShardedEngine, step: Callable[[], Any], repairs: dict[Name, Repair]) -> Recorded:
    """What the engine's functions bind in a step."""
    recorded = Recorded(engine.mesh.coordinates, {name: _host(x) for name, x in engine.parameters.items()})
    held = {id(x) for x in engine.parameters.values()}
    left = MOST_BYTES

    def see(name: Name, array: Array) -> None:
        nonlocal left
        left -= array.nbytes
        if left > 0 and id(array) not in held:
            recorded.arrays.setdefault(name, []).append((_host(array).copy(), len(recorded.reductions)))

    def reduced(reduction: ObservedReduction, array: Array) -> None:
        recorded.reductions.append((reduction, _host(array).copy()))

    with _bound(engine, repairs, see, reduced):
        step()
    return recorded


def _bound(engine: ShardedEngine, repairs: dict[Name, Repair], see=lambda *_: None, reduced=lambda *_: None):
    """Meanwhile arrays of these names are bound to the repaired ones."""
    times = dict.fromkeys(repairs, 0)

    def repaired(name: Name, array: Array) -> Array | None:
        other = None
        if name in repairs:
            values = repairs[name].values.get(engine.mesh.rank, ())
            if times[name] < len(values):
                other = backend_of(array).asarray(values[times[name]].astype(array.dtype))
            times[name] += 1
        see(name, array if other is None else other)
        return other

    return Bindings(repaired, reduced)


# --- what is suspected, on rank 0


def _suspected(
    everyone: Mapping[int, Recorded], expected: Recorded, engine: ShardedEngine, tolerance: float, is_known: bool
) -> Iterator[Repair]:
    """Arrays that may be where the mistake is made, the likeliest first.

    What is known to be wrong comes first, then parts of sums, most of which are rightly so; then what is wrong in a way
    that nothing explains, as may rightly be what a rank computes of its part alone.
    """
    smallest = SMALLEST_SCALE * max((_scale(x) for runs in expected.arrays.values() for x, _ in runs), default=0.0)
    axes = {axis: n for axis, n in engine.mesh.axes.items() if n > 1}
    parts, unexplained, right = [], [], []
    for name in {name: None for each in everyone.values() for name in each.arrays}:
        here = {rank: each for rank, each in everyone.items() if name in each.arrays}
        if (wholes := _wholes(name, expected, {len(each.arrays[name]) for each in here.values()})) is None:
            parts += () if is_known else _sums(name, here, axes)
            continue
        found = _Found(name, here, wholes, axes, tolerance * max(_scale(wholes[0]), smallest))
        if not found.is_known:
            continue
        if found.first < 0:
            right.append(name)
            continue
        repairs = list(found.repairs(None)) or [each for base in found.bases(right) for each in found.repairs(base)]
        for repair in repairs:
            if repair.findings[0].cause is Cause.MISSING_SUM:
                if not found.is_summed(repair.findings[0].axes):
                    parts.append(repair)
            else:
                yield repair
        unexplained += found.unexplained()
    yield from parts
    yield from unexplained


def _wholes(name: Name, expected: Recorded, times: set[int]) -> list[np.ndarray] | None:
    """What one device has each time that the line runs; None if it runs another number of times there.

    Of a line that only several ranks run, it is what the name was bound to before.
    """
    if name not in expected.arrays:
        before = [x for x in expected.arrays if (x.file, x.name) == (name.file, name.name) and _is_before(x, name)]
        if not before:
            return None
        name = max(before)
    wholes = [x for x, _ in expected.arrays[name]]
    return wholes if {len(wholes)} == times else None


def _scale(x: np.ndarray) -> float:
    return float(np.abs(x[np.isfinite(x)]).max(initial=0.0))


def _sums(name: Name, here: Mapping[int, Recorded], axes: Rank) -> Iterator[Repair]:
    """Sums over ranks that have other values of one shape, where it is not known what one device has."""
    where = [each.coordinates for each in here.values()]
    runs = [[x for x, _ in run] for run in zip(*(each.arrays[name] for each in here.values()), strict=False)]

    def are_reduced(op: str, over: Axes, alike: Callable[[np.ndarray, np.ndarray], bool]) -> bool:
        return all(all(map(alike, run, _reduced(where, run, op, over))) for run in runs)

    for over in _sets(axes):
        if are_reduced("sum", over, lambda x, y: x.shape == y.shape) and not are_reduced("max", over, np.array_equal):
            made = [_reduced(where, run, "sum", over) for run in runs]
            yield Repair(name, (missing_sum(over),), dict(zip(here, map(list, zip(*made, strict=True)), strict=True)))


def _is_before(one: Name, other: Name) -> bool:
    return one.line < other.line or other.name.startswith("what ")  # a function returns on one line or another


@dataclass(frozen=True)
class _Run:
    """What the ranks have bound to a name when its line ran once: their blocks, in each way in which it may be cut."""

    ways: dict[tuple[Axes, ...], list[ComparedBlock]]
    limit: float

    @property
    def right(self) -> list[ComparedBlock] | None:
        return next((blocks for blocks in self.ways.values() if not self.is_off(blocks)), None)

    def is_off(self, blocks: Sequence[ComparedBlock]) -> bool:
        return any((block.difference > self.limit).any() for block in blocks)

    def taken(self, cut: tuple[Axes, ...]) -> list[ComparedBlock]:
        """The blocks that are right, or else of that cut, or of any."""
        return self.right or self.ways.get(cut) or next(iter(self.ways.values()))


class _Found:
    """What the ranks have bound to a name, beside what one device has."""

    def __init__(
        self, name: Name, here: Mapping[int, Recorded], wholes: Sequence[np.ndarray], axes: Rank, limit: float
    ) -> None:
        self.name, self.here, self.axes, self.limit = name, here, axes, limit
        self.runs = [
            _Run(self._ways({rank: each.arrays[name][k][0] for rank, each in here.items()}, whole), limit)
            for k, whole in enumerate(wholes)
        ]
        wrong = (k for k, run in enumerate(self.runs) if run.right is None)
        self.first = next(wrong, -1)  #: the first run that is wrong; -1: none is

    @property
    def is_known(self) -> bool:
        return all(run.ways for run in self.runs)

    def is_summed(self, over: Axes) -> bool:
        """Whether an all_reduce over these axes is given it."""

        def given(rank: int) -> bool:
            x = self.here[rank].arrays[self.name][self.first][0]
            sums = (y for r, y in self.here[rank].reductions if r.op == "sum" and set(r.axes) == set(over))
            return any(np.array_equal(x, y) for y in sums)

        return all(map(given, self.here))

    def bases(self, right: Sequence[Name]) -> list[tuple[str, dict[int, np.ndarray]]]:
        """What it may have been added to: parameters, and arrays that are right."""
        first = next(iter(self.here.values()))
        every = [(name, {rank: each.parameters[name] for rank, each in self.here.items()}) for name in first.parameters]
        for name in right:
            if all(name in each.arrays for each in self.here.values()):
                every.append((name.name, {rank: each.arrays[name][-1][0] for rank, each in self.here.items()}))
        fitting = [base for base in every if all(self._broadcasts(x, rank) for rank, x in base[1].items())]
        return sorted(fitting, key=lambda base: min(x.ndim for x in base[1].values()))[:BASES]  # biases first

    def _broadcasts(self, x: np.ndarray, rank: int) -> bool:
        shape = self.here[rank].arrays[self.name][self.first][0].shape
        return 0 < x.ndim <= len(shape) and shape[len(shape) - x.ndim :] == x.shape

    def repairs(self, base: tuple[str, dict[int, np.ndarray]] | None) -> Iterator[Repair]:
        """What one device has, in each way in which what the ranks have instead can be explained."""
        for cut, blocks in self.runs[self.first].ways.items():
            if base is not None:
                whole = {block.rank: np.broadcast_to(base[1][block.rank], block.found.shape) for block in blocks}
                blocks = [replace(block, base=whole[block.rank], base_name=base[0]) for block in blocks]
            findings = tuple(self._by_reductions(blocks)) or diagnose(blocks, self.axes, self.limit, kind=VARIABLE)
            if not findings:
                continue
            yield self._repaired(findings, cut)
            if base is not None and findings[0].cause is Cause.MISSING_SUM:  # or is the sum made later?
                over = findings[0].axes
                finding = base_in_sum(base[0], over, prod(self.axes[axis] for axis in over))
                yield Repair(self.name, (finding,), {x.rank: [_once(x, over)] * len(self.runs) for x in blocks})

    def unexplained(self) -> list[Repair]:
        text = "it differs from what one device has, and nothing before it does: look at this line"
        return [self._repaired((Finding(Cause.FIRST, text),), cut) for cut in self.runs[self.first].ways]

    def _repaired(self, findings: tuple[Finding, ...], cut: tuple[Axes, ...]) -> Repair:
        taken = [run.taken(cut) for run in self.runs]
        values = {blocks[0].rank: [block.expected for block in blocks] for blocks in zip(*taken, strict=True)}
        return Repair(self.name, findings, values)

    def _by_reductions(self, blocks: Sequence[ComparedBlock]) -> Iterator[Finding]:
        """It is what an all_reduce before it has made: of what, over which axes?"""
        here = [self.here[block.rank] for block in blocks]
        lists = [each.reductions[: each.arrays[self.name][self.first][1]] for each in here]

        def are(arrays: Sequence[np.ndarray], what: str) -> bool:
            """Whether these are what ranks have found, or what is expected of them, but for the base."""
            wanted = [getattr(block.added, what) for block in blocks]
            return all(
                x.shape == y.shape and (difference(x, y) <= self.limit * len(blocks)).all()
                for x, y in zip(arrays, wanted, strict=True)
            )

        for given in reversed(list(zip(*lists, strict=False))):
            reduction, sources = given[0][0], [x for _, x in given]
            if any(each != reduction for each, _ in given):
                continue

            def reduced(op: str, over: Axes, sources: Sequence[np.ndarray] = sources) -> list[np.ndarray]:
                return _reduced([each.coordinates for each in here], sources, op, over)

            op, over, line = reduction.op, reduction.axes, f"the all_reduce{self._elsewhere(reduction)}"
            if not are(reduced(op, over), "found"):
                continue
            axes, many = " and ".join(over), prod(self.axes[axis] for axis in over)
            if op == "sum" and are(sources, "expected"):
                same = are(reduced("mean", over), "expected")
                what = "of what has been summed" if same else "of different parts"
                text = f"{line} sums over {axes}, {what}: it is one too many"
                yield Finding(Cause.REPEATED_SUM if same else Cause.EXTRA_SUM, text, over, many if same else 1.0)
            elif op != "sum" and are(reduced("sum", over), "expected"):
                text, is_mean = f"{line} takes the {op} over {axes}, where the sum is right", op == "mean"
                yield Finding(
                    Cause.MEAN if is_mean else Cause.OTHER_REDUCTION, text, over, 1 / many if is_mean else 1.0
                )
            else:
                others = (other for other in _sets(self.axes) if not set(other) >= set(over))
                for other in (other for other in others if are(reduced(op, other), "expected")):
                    text = f"{line} is over {axes}: over {' and '.join(other)} it would be right"
                    yield Finding(Cause.WRONG_AXIS, text, other)
            return

    def _elsewhere(self, reduction: ObservedReduction) -> str:
        """The line of an all_reduce, unless it is this one."""
        is_here = (reduction.file, reduction.line) == (self.name.file, self.name.line)
        return "" if is_here else f" {place(reduction.file, reduction.line)}"

    # --- how it may be cut

    def _ways(self, run: Mapping[int, np.ndarray], whole: np.ndarray) -> dict[tuple[Axes, ...], list[ComparedBlock]]:
        if any(x.ndim != whole.ndim for x in run.values()):
            return {}
        dims = [
            [()] if all(x.shape[dim] == n for x in run.values()) else _sets(self.axes)
            for dim, n in enumerate(whole.shape)
        ]
        cuts = (cut for cut in product(*dims) if len(set(sum(cut, ()))) == len(sum(cut, ())))
        return {cut: blocks for cut in cuts if (blocks := self._blocks(run, whole, cut))}

    def _blocks(self, run: Mapping[int, np.ndarray], whole: np.ndarray, cut: Sequence[Axes]) -> list[ComparedBlock]:
        """The ranks' blocks, if these are what such a cut gives them; else nothing."""
        index: dict[int, tuple[np.ndarray, ...]] = dict.fromkeys(run, ())
        for dim, axes in enumerate(cut):
            lengths = {self._place(rank, axes): x.shape[dim] for rank, x in run.items()}
            places = sorted(lengths)
            ends = dict(zip(places, np.cumsum([lengths[place] for place in places]).tolist(), strict=True))
            if ends[places[-1]] != whole.shape[dim]:
                return []
            for rank in run:
                end = ends[self._place(rank, axes)]
                index[rank] += (np.arange(end - lengths[self._place(rank, axes)], end),)
        if any(run[rank].shape != tuple(map(len, index[rank])) for rank in run):
            return []
        return [
            ComparedBlock(rank, self.here[rank].coordinates, index[rank], x, whole[np.ix_(*index[rank])])
            for rank, x in run.items()
        ]

    def _place(self, rank: int, axes: Axes) -> tuple[int, ...]:
        return tuple(self.here[rank].coordinates[axis] for axis in axes)


def _once(block: ComparedBlock, over: Axes) -> np.ndarray:
    """What a rank has, without the base unless it is the first one along these axes."""
    return block.found if not any(block.coordinates[axis] for axis in over) else block.found - block.base


def _reduced(where: Sequence[Rank], arrays: Sequence[np.ndarray], op: str, over: Axes) -> list[np.ndarray]:
    """What an all_reduce of the ranks' arrays over some axes gives each of them; empty where shapes differ."""
    teams: dict[tuple, list[np.ndarray]] = {}
    keys = [tuple(place for axis, place in coordinates.items() if axis not in over) for coordinates in where]
    for key, x in zip(keys, arrays, strict=True):
        teams.setdefault(key, []).append(x)
    made = {key: OPS[op](x, axis=0) if len({y.shape for y in x}) == 1 else np.empty(0) for key, x in teams.items()}
    return [made[key] for key in keys]


def _sets(axes: Rank) -> list[Axes]:
    return [over for count in range(1, len(axes) + 1) for over in combinations(axes, count)]


def _host(array: Array) -> np.ndarray:
    return np.asarray(backend_of(array).to_host(array))
