"""Uneven shares for unequal ranks, from the evaluation of a plan with even ones; and how slow unequal stages are.

Samples are shared by speed, state by the memory that is left on a rank: these are not the same shares (Guo et al.,
"Cephalo", 2024).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd, inf

import numpy as np

from spmd_engine.axes import position_of
from spmd_engine.comm.notation import weighted_lengths
from spmd_engine.engine.state.assignment import BATCH, STATE, WORK, Shares, shares_text
from spmd_engine.models import Model, layout_for
from spmd_engine.planning.machine.machine import Machine
from spmd_engine.planning.search.placement import shares
from spmd_engine.planning.search.search_space import PIPE, Candidate
from spmd_engine.planning.simulator.step_evaluation import PlanEvaluation

ALIKE = 1.05  #: the largest ratio of speeds, or of memories, that counts as equal
PARTS = 64  #: parts per rank in which shares of state, and of heads and widths, are counted
STORED = ("optimizer state", "gradients", "parameters")  #: in the order in which the ZeRO stages shard them


def work_shares(model: Model, candidate: Candidate, evaluation: PlanEvaluation, limits: Sequence[float]) -> str | None:
    """The shares of samples, and along ``model`` of heads and widths, by the speed of the ranks along each axis, as for
    ``--shares``; None: even shares."""
    positions = {rank: position_of(rank, candidate.mesh) for rank in evaluation.prediction.working}
    by_axis = {}
    for axis, size in candidate.axes:
        parts = _parts_along(axis, candidate)
        if size == 1 or parts < size:
            continue
        seconds = [0.0] * size
        for rank, work in evaluation.prediction.working.items():
            index = positions[rank].coordinates[axis]
            seconds[index] = max(seconds[index], work * evaluation.machine.node(rank).contention)
        if min(seconds) > 0 and max(seconds) > ALIKE * min(seconds):
            speeds = [1 / time for time in seconds]
            numbers = shares(speeds, parts)
            if axis == "model":  # the part of each letter is rounded by itself, and not to end soonest
                heads = fewest_along_model(model, candidate.mesh)
                by_head = shares(speeds, heads)
                numbers = numbers if tuple(weighted_lengths(heads, numbers)) == by_head else by_head
            by_axis[axis] = _at_least(WORK[axis], numbers)
    return _format_uneven(by_axis)


def _parts_along(axis: str, candidate: Candidate) -> int:
    """The parts of work that ranks along an axis divide by speed: samples of a micro-batch, or parts of all heads and
    widths; 0 along other axes, which no proposed plan divides by speed."""
    if axis in BATCH:
        return candidate.batch_size // candidate.micro_batches // (candidate.batch_ranks // candidate.mesh[axis])
    return PARTS * candidate.mesh[axis] if axis == "model" else 0


def fewest_along_model(model: Model, axes: Mapping[str, int]) -> int:
    """The least size of a letter that axis ``model`` shards: usually the number of key heads."""
    layout = layout_for(model, position_of(0, axes))
    sizes = (
        size for _, layer in model.layers for letter, size in layer.sizes.items() if "model" in layout.axes(letter)
    )
    return min(sizes, default=0)


def state_shares(model: Model, candidate: Candidate, evaluation: PlanEvaluation, limits: Sequence[float]) -> str | None:
    """The shares of ZeRO's state by the free memory of the ranks along each axis, as for ``--state-shares``; None: even
    shares. ``limits`` are the bytes that each rank may hold."""
    kinds, by_axis = STORED[: candidate.zero], {}
    peaks = evaluation.analysis.peak_bytes_by_rank()
    free = []
    for rank, peak in enumerate(peaks):
        stored = sum(evaluation.analysis.of_rank(rank).before.get(kind, 0) for kind in kinds)
        free.append(max(limits[rank] - (peak - stored), 0.0))
    positions = [position_of(rank, candidate.mesh) for rank in range(len(peaks))]
    for axis, size in candidate.axes:
        if axis not in STATE or size == 1 or not kinds:
            continue
        least = [inf] * size
        for position, room in zip(positions, free, strict=True):
            least[position.coordinates[axis]] = min(least[position.coordinates[axis]], room)
        if max(least) > ALIKE * min(least):
            by_axis[axis] = _divide_by_gcd(shares(least, PARTS * size))
    return _format_uneven(by_axis)


def _at_least(least: int, numbers: Sequence[int]) -> tuple[int, ...]:
    """The shares with at least 0 or 1 on each rank, taken from the largest shares."""
    counts = list(numbers)
    while min(counts) < least:
        counts[counts.index(0)] += 1
        counts[counts.index(max(counts))] -= 1
    return _divide_by_gcd(counts)


def _format_uneven(by_axis: Mapping[str, tuple[int, ...]]) -> str | None:
    return shares_text({axis: numbers for axis, numbers in by_axis.items() if len(set(numbers)) > 1}) or None


def _divide_by_gcd(numbers: Sequence[int]) -> tuple[int, ...]:
    divisor = gcd(*numbers)
    return tuple(number // divisor for number in numbers)


# --- Slowdown of pipeline stages on unequal nodes


def stage_slowdowns(machine: Machine, seconds: Mapping[str, float], candidate: Candidate, given: Shares) -> np.ndarray:
    """The factor by which each stage is slower than with ranks like rank 0 and even shares: float64[stages].

    Along axes that shard samples, and ``model``, ranks get work by their speeds, as in ``work_shares``; along other
    axes all ranks wait for the slowest. ``seconds`` are those of the same work, by the name of the kind of node;
    ``given`` are fixed shares.
    """
    factors = np.ones(candidate.ranks)
    if machine.heterogeneous:
        placed = machine.with_ranks(candidate.ranks).placed(candidate.order)
        factors = np.array([seconds[node.name] for _, node in placed.places])
        factors /= seconds[machine.node(0).name]
    factors = factors.reshape([size for _, size in candidate.axes])
    names = [axis for axis, _ in candidate.axes]
    for axis in sorted(set(names) - {PIPE}, key=lambda name: (name in BATCH, names.index(name))):
        dim = names.index(axis)
        size, parts = factors.shape[dim], _parts_along(axis, candidate)
        # shares are those of a whole axis: the slowest rank on the other axes counts
        slowest = np.moveaxis(factors, dim, 0).reshape(size, -1).max(axis=1)
        counts = _counts_by_speed(slowest, parts, WORK.get(axis, 0), given.get(axis))
        shape = [size if number == dim else 1 for number in range(len(names))]
        factors = (factors * counts.reshape(shape) / counts.mean()).max(axis=dim, keepdims=True)
    return factors.reshape(-1)


def _counts_by_speed(factors: np.ndarray, parts: int, least: int, fixed: tuple[int, ...] | None) -> np.ndarray:
    """The parts of work, at least ``least``, of each rank along an axis: float64[size]; equal ones if they are few, or
    ranks are equal."""
    if fixed is not None:
        return np.array(fixed, float)
    if parts < len(factors) or factors.min() == factors.max():
        return np.ones(len(factors))
    return np.maximum(np.array(shares(list(1 / factors), parts), float), least)
