"""Unlike ranks: the shares of work and of state that suit them, from a step that was foreseen with even ones.

Work goes by speed: samples over the seconds that a rank works for them, as its node computes. State goes by memory:
what is left on a rank beside all that is not stored in parts. The two are not the same share (Guo et al., "Cephalo",
2024).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd
from statistics import fmean

from spmd_engine.axes import MeshPosition
from spmd_engine.engine.state.split_weights import STATE, WORK, said
from spmd_engine.planning.dry_run.match_calls import place_of
from spmd_engine.planning.dry_run.step_analysis import StepAnalysis
from spmd_engine.planning.machine.machine import Machine
from spmd_engine.planning.search.placement import shares
from spmd_engine.planning.search.plan_evaluation import Foresight
from spmd_engine.planning.search.search_space import Candidate

ALIKE = 1.05  #: how far ranks' speeds, or their memories, may be apart to count as the same
OF_STATE = 64  #: parts in which shares of state are counted
STORED = ("optimizer state", "gradients", "parameters")  #: as the stages of ZeRO put them in parts, one after another


def needed(analysis: StepAnalysis, rooms: Sequence[float]) -> float:
    """Bytes of the rank that holds most. Where ranks are unlike, and each has one of these ``rooms``: of the mean of
    these the same share as of its own on the rank that has least to spare."""
    if not rooms:
        return analysis.peak_bytes
    peaks = zip(analysis.peak_bytes_by_rank(), rooms, strict=True)
    return max(peak / room for peak, room in peaks) * fmean(rooms)


def work_shares(candidate: Candidate, seen: Foresight, machine: Machine) -> str | None:
    """What each rank along an axis should have of the samples, as ``--shares`` says it; None: as many each."""
    places = {rank: place_of(rank, candidate.mesh) for rank in seen.prediction.working}
    found = {}
    for axis, size in candidate.axes:
        if axis not in WORK or size == 1:
            continue
        seconds = [0.0] * size
        for rank, work in seen.prediction.working.items():
            at = places[rank].coordinates[axis]
            seconds[at] = max(seconds[at], work * machine.crowd(rank))
        others = candidate.batch_ranks // size
        samples = candidate.batch_size // candidate.micro_batches // others
        if min(seconds) > 0 and max(seconds) > ALIKE * min(seconds) and samples >= size:
            found[axis] = _at_least_one(shares([1 / each for each in seconds], samples))
    return _said_unequal(found)


def state_shares(candidate: Candidate, seen: Foresight, room: Sequence[float]) -> str | None:
    """What each rank along an axis should store of what ZeRO has in parts, as ``--state-shares`` says it, where
    ``room`` is what each may hold in bytes; None: as much each."""
    kinds, found = STORED[: candidate.zero], {}
    peaks = seen.analysis.peak_bytes_by_rank()
    stored = [sum(seen.analysis.of_rank(rank).before.get(kind, 0) for kind in kinds) for rank in range(len(peaks))]
    free = [max(room[rank] - (peaks[rank] - stored[rank]), 0.0) for rank in range(len(peaks))]
    places: list[MeshPosition] = [place_of(rank, candidate.mesh) for rank in range(len(peaks))]
    for axis, size in candidate.axes:
        if axis not in STATE or size == 1 or not kinds:
            continue
        least = [min(f for f, place in zip(free, places, strict=True) if place.coordinates[axis] == at)
                 for at in range(size)]  # fmt: skip
        if max(least) > ALIKE * min(least):
            found[axis] = _reduced(shares(least, OF_STATE * size))
    return _said_unequal(found)


def _at_least_one(numbers: Sequence[int]) -> tuple[int, ...]:
    """The same, but that nobody has nothing: the richest give."""
    given = list(numbers)
    while 0 in given:
        given[given.index(0)] += 1
        given[given.index(max(given))] -= 1
    return _reduced(given)


def _said_unequal(found: Mapping[str, tuple[int, ...]]) -> str | None:
    return said({axis: numbers for axis, numbers in found.items() if len(set(numbers)) > 1}) or None


def _reduced(numbers: Sequence[int]) -> tuple[int, ...]:
    most = gcd(*numbers)
    return tuple(number // most for number in numbers)
