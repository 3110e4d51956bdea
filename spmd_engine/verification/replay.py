"""Finds the wrong line of a user's forward or backward: repairs one of its arrays, and repeats the step.

The tensors that disagree reveal little about the mistake: if the backward forgets to sum dx[b d] {U_model} =
dz[b f/model] · w[d f/model], no weight gradient is a sum or a multiple of the right one. So both engines repeat the
step, and every array that their functions bind to a name is compared with one device's array of the same name and
line. A right array is a block of that array, or a term of a sum over ranks. Suspected are arrays that are neither, and
terms that are no argument of an all_reduce; the causes of ``diagnosis`` are tried on them. Then the step is repeated
with one suspected array at a time replaced by one device's. The mistake is in the first line whose replacement makes
the wrong tensor right and no right one wrong. Arrays that are bound to no name are not observed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from math import prod
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.engine import ShardedEngine
from spmd_engine.verification.bindings import Bindings, Name, ObservedReduction, place
from spmd_engine.verification.comparison import SMALLEST_SCALE, from_first, on_host, to_first
from spmd_engine.verification.diagnosis import VARIABLE, ComparedBlock, base_in_sum, diagnose, difference, missing_sum
from spmd_engine.verification.report import Cause, Finding

Axes = tuple[str, ...]
Rank = Mapping[str, int]  # coordinates by axis
MOST = 150  # repeated steps
MOST_BYTES = 1 << 28  # recorded arrays on each rank
BASES = 8  # arrays to try as bases, to which other arrays are added
OPS = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min, "prod": np.prod}


@dataclass
class Recorded:
    """Arrays that one rank's functions bound to names in a step, each with the number of reductions before it."""

    coordinates: Rank
    parameters: dict[str, np.ndarray]
    arrays: dict[Name, list[tuple[np.ndarray, int]]] = field(default_factory=dict)
    reductions: list[tuple[ObservedReduction, np.ndarray]] = field(default_factory=list)


@dataclass(frozen=True)
class Repair:
    """What may be wrong with an array, and the values that replace it on each rank, each time that its line runs."""

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
    """Return the mistakes that make the first of ``wrong`` tensors wrong, with their lines. Collective.

    ``repeat`` repeats the engine's step and returns the tensors that are then wrong; ``alone`` repeats the step of the
    reference, which only rank 0 has. The search continues while a tensor is wrong; the result is empty if no mistake is
    found. ``is_known``: the cause is known but not the line, so lines that one device does not run are left out.
    """
    world, findings, repairs, steps_left = engine.group(), [], {}, MOST
    expected = _record(reference, alone, {}) if reference is not None else None
    while wrong and steps_left > 0:
        recorded = to_first(world, _record(engine, repeat, repairs))
        candidates = iter(())
        if recorded is not None and expected is not None:
            candidates = _candidate_repairs(dict(enumerate(recorded)), expected, engine, tolerance, is_known)
        while steps_left > 0 and (repair := from_first(world, next(candidates, None))) is not None:
            steps_left -= 1
            with _bind_repairs(engine, {**repairs, repair.name: repair}):
                still_wrong = repeat()
            if wrong[0] not in still_wrong and set(still_wrong) <= set(wrong):
                findings += [replace(finding, text=f"{repair.name}: {finding.text}") for finding in repair.findings]
                repairs[repair.name], wrong = repair, still_wrong
                break
        else:
            break
    return tuple(findings)


# --- Repeat the step


def _record(engine: ShardedEngine, step: Callable[[], Any], repairs: dict[Name, Repair]) -> Recorded:
    """Return the arrays that the engine's functions bind in a step."""
    recorded = Recorded(engine.mesh.coordinates, {name: on_host(x) for name, x in engine.parameters.items()})
    parameter_ids = {id(x) for x in engine.parameters.values()}
    bytes_left = MOST_BYTES

    def see(name: Name, array: Array) -> None:
        nonlocal bytes_left
        bytes_left -= array.nbytes
        if bytes_left > 0 and id(array) not in parameter_ids:
            recorded.arrays.setdefault(name, []).append((on_host(array).copy(), len(recorded.reductions)))

    def reduced(reduction: ObservedReduction, array: Array) -> None:
        recorded.reductions.append((reduction, on_host(array).copy()))

    with _bind_repairs(engine, repairs, see, reduced):
        step()
    return recorded


def _bind_repairs(engine: ShardedEngine, repairs: dict[Name, Repair], see=lambda *_: None, reduced=lambda *_: None):
    """Return a context in which these names are bound to repaired arrays."""
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


# --- Suspected arrays, on rank 0


def _candidate_repairs(
    recorded: Mapping[int, Recorded], expected: Recorded, engine: ShardedEngine, tolerance: float, is_known: bool
) -> Iterator[Repair]:
    """Yield repairs of arrays that may be wrong, the likeliest first.

    Arrays with an explained error come first; then terms of sums, most of which are right; then arrays with an
    unexplained difference, which may be right if a rank computes them from its part alone.
    """
    smallest = SMALLEST_SCALE * max((_scale(x) for runs in expected.arrays.values() for x, _ in runs), default=0.0)
    axes = {axis: n for axis, n in engine.mesh.all_axes.items() if n > 1}
    terms, unexplained, right = [], [], []
    for name in {name: None for record in recorded.values() for name in record.arrays}:
        records = {rank: record for rank, record in recorded.items() if name in record.arrays}
        if (expected_runs := _expected_runs(name, expected, {len(x.arrays[name]) for x in records.values()})) is None:
            terms += () if is_known else _missing_sums(name, records, axes)
            continue
        array = _ComparedArray(name, records, expected_runs, axes, tolerance * max(_scale(expected_runs[0]), smallest))
        if not array.is_known:
            continue
        if array.first < 0:
            right.append(name)
            continue
        repairs = list(array.repairs(None)) or [x for base in array.bases(right) for x in array.repairs(base)]
        for repair in repairs:
            if repair.findings[0].cause is Cause.MISSING_SUM:
                if not array.is_summed(repair.findings[0].axes):
                    terms.append(repair)
            else:
                yield repair
        unexplained += array.unexplained()
    yield from terms
    yield from unexplained


def _expected_runs(name: Name, expected: Recorded, counts: set[int]) -> list[np.ndarray] | None:
    """Return one device's array for each run of the line; None if the numbers of runs differ.

    For a line that one device does not run, it is the array that was bound to the name before.
    """
    if name not in expected.arrays:
        earlier = [x for x in expected.arrays if (x.file, x.name) == (name.file, name.name) and _is_before(x, name)]
        if not earlier:
            return None
        name = max(earlier)
    runs = [x for x, _ in expected.arrays[name]]
    return runs if {len(runs)} == counts else None


def _scale(x: np.ndarray) -> float:
    return float(np.abs(x[np.isfinite(x)]).max(initial=0.0))


def _missing_sums(name: Name, ranks: Mapping[int, Recorded], axes: Rank) -> Iterator[Repair]:
    """Yield sums over ranks with different values of one shape, where one device's array is unknown."""
    coordinates = [record.coordinates for record in ranks.values()]
    runs = [[x for x, _ in run] for run in zip(*(record.arrays[name] for record in ranks.values()), strict=False)]

    def are_reduced(op: str, over: Axes, equal: Callable[[np.ndarray, np.ndarray], bool]) -> bool:
        return all(all(map(equal, run, _all_reduced(coordinates, run, op, over))) for run in runs)

    for over in _axis_sets(axes):
        if are_reduced("sum", over, lambda x, y: x.shape == y.shape) and not are_reduced("max", over, np.array_equal):
            sums = [_all_reduced(coordinates, run, "sum", over) for run in runs]
            yield Repair(name, (missing_sum(over),), dict(zip(ranks, map(list, zip(*sums, strict=True)), strict=True)))


def _is_before(one: Name, other: Name) -> bool:
    return one.line < other.line or other.name.startswith("what ")  # a function may return on several lines


@dataclass(frozen=True)
class _Run:
    """Arrays that the ranks bound to a name in one run of its line: their blocks, for each possible sharding."""

    shards: dict[tuple[Axes, ...], list[ComparedBlock]]
    limit: float

    @property
    def right(self) -> list[ComparedBlock] | None:
        return next((blocks for blocks in self.shards.values() if not self.is_off(blocks)), None)

    def is_off(self, blocks: Sequence[ComparedBlock]) -> bool:
        return any((block.difference > self.limit).any() for block in blocks)


class _ComparedArray:
    """The arrays that the ranks bound to a name, compared with one device's."""

    def __init__(
        self, name: Name, records: Mapping[int, Recorded], expected: Sequence[np.ndarray], axes: Rank, limit: float
    ) -> None:
        self.name, self.records, self.axes, self.limit = name, records, axes, limit
        self.runs = [
            _Run(self._split({rank: record.arrays[name][k][0] for rank, record in records.items()}, whole), limit)
            for k, whole in enumerate(expected)
        ]
        wrong = (k for k, run in enumerate(self.runs) if run.right is None)
        self.first = next(wrong, -1)  #: the first wrong run; -1: all are right

    @property
    def is_known(self) -> bool:
        return all(run.shards for run in self.runs)

    def is_summed(self, over: Axes) -> bool:
        """Return whether the array is the argument of an all_reduce over these axes."""

        def is_argument(rank: int) -> bool:
            x = self.records[rank].arrays[self.name][self.first][0]
            sums = (y for r, y in self.records[rank].reductions if r.op == "sum" and set(r.axes) == set(over))
            return any(np.array_equal(x, y) for y in sums)

        return all(map(is_argument, self.records))

    def bases(self, right: Sequence[Name]) -> list[tuple[str, dict[int, np.ndarray]]]:
        """Return arrays to which it may have been added: parameters, and right arrays."""
        first = next(iter(self.records.values()))
        bases = [(name, {rank: x.parameters[name] for rank, x in self.records.items()}) for name in first.parameters]
        for name in right:
            if all(name in record.arrays for record in self.records.values()):
                bases.append((name.name, {rank: record.arrays[name][-1][0] for rank, record in self.records.items()}))
        fitting = [base for base in bases if all(self._broadcasts(x, rank) for rank, x in base[1].items())]
        return sorted(fitting, key=lambda base: min(x.ndim for x in base[1].values()))[:BASES]  # biases first

    def _broadcasts(self, x: np.ndarray, rank: int) -> bool:
        shape = self.records[rank].arrays[self.name][self.first][0].shape
        return 0 < x.ndim <= len(shape) and shape[len(shape) - x.ndim :] == x.shape

    def repairs(self, base: tuple[str, dict[int, np.ndarray]] | None) -> Iterator[Repair]:
        """Yield one device's values for each explanation of the ranks' values."""
        for sharding, blocks in self.runs[self.first].shards.items():
            if base is not None:
                bases = {block.rank: np.broadcast_to(base[1][block.rank], block.found.shape) for block in blocks}
                blocks = [replace(block, base=bases[block.rank], base_name=base[0]) for block in blocks]
            findings = tuple(self._explain_reduction(blocks)) or diagnose(blocks, self.axes, self.limit, kind=VARIABLE)
            if not findings:
                continue
            yield self._repair(findings, sharding)
            if base is not None and findings[0].cause is Cause.MISSING_SUM:  # or the base is added before a later sum
                over = findings[0].axes
                finding = base_in_sum(base[0], over, prod(self.axes[axis] for axis in over))
                yield Repair(self.name, (finding,), {x.rank: [_drop_base(x, over)] * len(self.runs) for x in blocks})

    def unexplained(self) -> list[Repair]:
        text = "it differs from what one device has, and nothing before it does: look at this line"
        return [self._repair((Finding(Cause.FIRST, text),), sharding) for sharding in self.runs[self.first].shards]

    def _repair(self, findings: tuple[Finding, ...], sharding: tuple[Axes, ...]) -> Repair:
        # the blocks of each run that are right, or those of this sharding, or those of any sharding
        runs = [run.right or run.shards.get(sharding) or next(iter(run.shards.values())) for run in self.runs]
        values = {blocks[0].rank: [block.expected for block in blocks] for blocks in zip(*runs, strict=True)}
        return Repair(self.name, findings, values)

    def _explain_reduction(self, blocks: Sequence[ComparedBlock]) -> Iterator[Finding]:
        """Yield findings if the array is the result of an earlier all_reduce that is wrong."""
        records = [self.records[block.rank] for block in blocks]
        lists = [record.reductions[: record.arrays[self.name][self.first][1]] for record in records]

        def are(arrays: Sequence[np.ndarray], attribute: str) -> bool:
            """Return whether the arrays are the ranks' found or expected blocks, without the base."""
            values = [getattr(block.added, attribute) for block in blocks]
            return all(
                x.shape == y.shape and (difference(x, y) <= self.limit * len(blocks)).all()
                for x, y in zip(arrays, values, strict=True)
            )

        for calls in reversed(list(zip(*lists, strict=False))):
            reduction, sources = calls[0][0], [x for _, x in calls]
            if any(other != reduction for other, _ in calls):
                continue

            def reduced(op: str, over: Axes, sources: Sequence[np.ndarray] = sources) -> list[np.ndarray]:
                return _all_reduced([record.coordinates for record in records], sources, op, over)

            op, over, line = reduction.op, reduction.axes, f"the all_reduce{self._place_if_elsewhere(reduction)}"
            if not are(reduced(op, over), "found"):
                continue
            axes, size = " and ".join(over), prod(self.axes[axis] for axis in over)
            if op == "sum" and are(sources, "expected"):
                same = are(reduced("mean", over), "expected")
                terms = "of what has been summed" if same else "of different parts"
                text = f"{line} sums over {axes}, {terms}: it is one too many"
                yield Finding(Cause.REPEATED_SUM if same else Cause.EXTRA_SUM, text, over, size if same else 1.0)
            elif op != "sum" and are(reduced("sum", over), "expected"):
                text, is_mean = f"{line} takes the {op} over {axes}, where the sum is right", op == "mean"
                yield Finding(
                    Cause.MEAN if is_mean else Cause.OTHER_REDUCTION, text, over, 1 / size if is_mean else 1.0
                )
            else:
                others = (other for other in _axis_sets(self.axes) if not set(other) >= set(over))
                for other in (other for other in others if are(reduced(op, other), "expected")):
                    text = f"{line} is over {axes}: over {' and '.join(other)} it would be right"
                    yield Finding(Cause.WRONG_AXIS, text, other)
            return

    def _place_if_elsewhere(self, reduction: ObservedReduction) -> str:
        """Return the place of an all_reduce, or "" if it is on this line."""
        is_same_line = (reduction.file, reduction.line) == (self.name.file, self.name.line)
        return "" if is_same_line else f" {place(reduction.file, reduction.line)}"

    # --- Possible shardings

    def _split(self, run: Mapping[int, np.ndarray], full: np.ndarray) -> dict[tuple[Axes, ...], list[ComparedBlock]]:
        if any(x.ndim != full.ndim for x in run.values()):
            return {}
        dims = [
            [()] if all(x.shape[dim] == n for x in run.values()) else _axis_sets(self.axes)
            for dim, n in enumerate(full.shape)
        ]
        shardings = (sharding for sharding in product(*dims) if len(set(sum(sharding, ()))) == len(sum(sharding, ())))
        return {sharding: blocks for sharding in shardings if (blocks := self._blocks(run, full, sharding))}

    def _blocks(self, run: Mapping[int, np.ndarray], full: np.ndarray, sharding: Sequence[Axes]) -> list[ComparedBlock]:
        """Return the ranks' blocks if their shapes fit the sharding; else nothing."""
        index: dict[int, tuple[np.ndarray, ...]] = dict.fromkeys(run, ())
        for dim, axes in enumerate(sharding):
            lengths = {self._position(rank, axes): x.shape[dim] for rank, x in run.items()}
            positions = sorted(lengths)
            ends = dict(zip(positions, np.cumsum([lengths[position] for position in positions]).tolist(), strict=True))
            if ends[positions[-1]] != full.shape[dim]:
                return []
            for rank in run:
                end = ends[self._position(rank, axes)]
                index[rank] += (np.arange(end - lengths[self._position(rank, axes)], end),)
        if any(run[rank].shape != tuple(map(len, index[rank])) for rank in run):
            return []
        return [
            ComparedBlock(rank, self.records[rank].coordinates, index[rank], x, full[np.ix_(*index[rank])])
            for rank, x in run.items()
        ]

    def _position(self, rank: int, axes: Axes) -> tuple[int, ...]:
        return tuple(self.records[rank].coordinates[axis] for axis in axes)


def _drop_base(block: ComparedBlock, over: Axes) -> np.ndarray:
    """Return a block without its base, but with it on the first rank along these axes."""
    return block.found if not any(block.coordinates[axis] for axis in over) else block.found - block.base


def _all_reduced(coordinates: Sequence[Rank], arrays: Sequence[np.ndarray], op: str, over: Axes) -> list[np.ndarray]:
    """Return the results of an all_reduce of the ranks' arrays over some axes; empty where shapes differ."""
    teams: dict[tuple, list[np.ndarray]] = {}
    keys = [tuple(place for axis, place in rank.items() if axis not in over) for rank in coordinates]
    for key, x in zip(keys, arrays, strict=True):
        teams.setdefault(key, []).append(x)
    results = {key: OPS[op](x, axis=0) if len({y.shape for y in x}) == 1 else np.empty(0) for key, x in teams.items()}
    return [results[key] for key in keys]


def _axis_sets(axes: Rank) -> list[Axes]:
    return [over for count in range(1, len(axes) + 1) for over in combinations(axes, count)]
