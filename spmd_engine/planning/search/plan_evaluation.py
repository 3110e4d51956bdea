"""The evaluation of a plan: the dry run of its whole step, simulated on a machine; and uneven shares from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd, inf
from statistics import fmean
from typing import Any

import numpy as np

from spmd_engine.axes import count_ranks
from spmd_engine.comm.notation import weighted_lengths
from spmd_engine.engine.helpers import helper_ranks
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.engine.state.assignment import BATCH, STATE, WORK, Shares, shares_text
from spmd_engine.models import Model, layout_for
from spmd_engine.planning.dry_run.analyze import analyze
from spmd_engine.planning.dry_run.rank_classes import slot_table_bytes
from spmd_engine.planning.dry_run.step_analysis import RankStep, StepAnalysis, position_of
from spmd_engine.planning.machine.machine import Machine
from spmd_engine.planning.search.placement import shares
from spmd_engine.planning.search.search_space import PIPE, Candidate
from spmd_engine.planning.simulator.communication_bound import least_seconds
from spmd_engine.planning.simulator.simulation import Prediction, simulate

MOST_SLOTS = 12_000  #: layers times micro-batches; larger steps are extrapolated


@dataclass(frozen=True)
class PlanEvaluation:
    """The predicted step of a plan.

    ``whole`` is False for a step with too many micro-batches: then ``analysis`` and ``prediction`` are of as many
    micro-batches as fill the pipeline, and ``seconds`` and ``bytes_sent`` are extrapolated.
    """

    analysis: StepAnalysis
    prediction: Prediction
    seconds: float
    bytes_sent: int
    machine: Machine
    whole: bool = True

    @cached_property
    def order_saves(self) -> float | None:
        """The largest share of the exposed communication that another order of it could save, with gradients in chunks
        of any size; None if not all ranks are simulated."""
        exposed = self.prediction.exposed
        if not self.whole or len(self.prediction.ranks) < self.analysis.ranks:
            return None
        saved = self.prediction.seconds - least_seconds(self.analysis, self.machine)
        return min(max(saved, 0.0) / exposed, 1.0) if exposed else 0.0

    @property
    def peak_rank(self) -> int:
        """The rank that holds most."""
        peaks = self.analysis.peak_bytes_by_rank()
        return peaks.index(max(peaks))

    @property
    def peak_step(self) -> RankStep:
        return self.analysis.of_rank(self.peak_rank)

    @property
    def peak_bytes_by_kind(self) -> dict[str, int]:
        """Bytes that the rank that holds most holds at its peak, by kind."""
        more = {
            "tables of groups": self.analysis.tables_of_rank(self.peak_rank),
            "places of convolutions": self.peak_step.constants,
        }
        return {**self.peak_step.peak.bytes_by_kind, **{kind: size for kind, size in more.items() if size}}

    @property
    def peak_moment(self) -> str:
        """What the rank that holds most computes at its peak."""
        step = self.peak_step
        if not step.computations:
            return "the start"
        computation = step.computations[min(step.peak.computation, len(step.computations) - 1)]
        micro_batch = computation.micro_batch
        return computation.name + (f" of micro-batch {micro_batch}" if micro_batch is not None else "")

    def as_json(self) -> dict[str, Any]:
        """The evaluation as JSON."""
        return {
            "seconds": self.seconds,
            "bytes_sent": self.bytes_sent,
            "peak_bytes": self.analysis.peak_bytes_by_rank(),
            "peak": {
                "rank": self.peak_rank,
                "moment": self.peak_moment,
                "bytes_by_kind": self.peak_bytes_by_kind,
            },
            "order_saves_at_most": self.order_saves,
            "whole": self.whole,
            "approximate": list(self.analysis.approximate),
        }


def _placed(machine: Machine, axes: Mapping[str, int], composition: ParallelConfig) -> Machine:
    """The machine with its ranks in the order of an analysis: those of the mesh, then helper ranks."""
    helpers, order = helper_ranks(composition.assigned), composition.order
    machine = machine.with_ranks(count_ranks(axes) + len(helpers))
    if helpers:
        members = [rank for rank in range(machine.ranks) if rank not in helpers]
        order = [*(members[number] for number in order or range(len(members))), *helpers]
    return machine.placed(order)


def evaluate_step(
    model: Model,
    machine: Machine,
    axes: Mapping[str, int],
    composition: ParallelConfig,
    batch_size: int,
    micro_batches: int,
    **options: Any,
) -> PlanEvaluation:
    """Analyze and simulate one step, with the machine's ranks in the composition's order; ``options`` go to
    ``analyze``."""
    machine = _placed(machine, axes, composition)
    stages = axes.get("pipe", 1)
    few = 2 * stages

    def analyzed(**sizes: int) -> StepAnalysis:
        return with_slot_tables(analyze(model, axes, composition, device=machine.device, **sizes, **options), machine)

    slots = len(model.layers) * micro_batches
    if slots <= MOST_SLOTS or micro_batches <= few + stages:
        analysis = analyzed(batch_size=batch_size, micro_batches=micro_batches)
        prediction = simulate(analysis, machine)
        return PlanEvaluation(analysis, prediction, prediction.seconds, analysis.bytes_sent, machine)
    samples = batch_size // micro_batches
    short = analyzed(batch_size=samples * few, micro_batches=few)
    longer = analyzed(batch_size=samples * (few + stages), micro_batches=few + stages)
    first, second = simulate(short, machine), simulate(longer, machine)
    more = (micro_batches - few) / stages
    return PlanEvaluation(
        replace(longer, micro_batches=micro_batches),
        second,
        first.seconds + more * (second.seconds - first.seconds),
        round(short.bytes_sent + more * (longer.bytes_sent - short.bytes_sent)),
        machine,
        whole=False,
    )


def with_slot_tables(analysis: StepAnalysis, machine: Machine) -> StepAnalysis:
    """The analysis with the slot tables of the machine's nodes; ranks with their own devices hold none."""
    places = machine.places[: analysis.ranks]
    tables = slot_table_bytes(analysis, [str(number) for number, _ in places])
    return replace(
        analysis, tables=[size * (node.cores is not None) for size, (_, node) in zip(tables, places, strict=True)]
    )


def evaluate_plan(
    model: Model, machine: Machine, candidate: Candidate, base: ParallelConfig, **options: Any
) -> PlanEvaluation:
    """Analyze and simulate the step of a candidate; ``options`` go to ``analyze``."""
    composition = candidate.composition(base)
    return evaluate_step(
        model, machine, candidate.mesh, composition, candidate.batch_size, candidate.micro_batches, **options
    )


# --- Uneven shares for unequal ranks. Samples are shared by speed, state by the memory that is left on a rank: these
# --- are not the same shares (Guo et al., "Cephalo", 2024)


ALIKE = 1.05  #: the largest ratio of speeds, or of memories, that counts as equal
PARTS = 64  #: parts per rank in which shares of state, and of heads and widths, are counted
STORED = ("optimizer state", "gradients", "parameters")  #: in the order in which the ZeRO stages shard them


def peak_memory(analysis: StepAnalysis, limits: Sequence[float]) -> float:
    """Bytes of the rank that holds most.

    With memory ``limits`` of unequal ranks: the largest share of its own limit that a rank holds, times their mean.
    """
    if not limits:
        return analysis.peak_bytes
    peaks = zip(analysis.peak_bytes_by_rank(), limits, strict=True)
    return max(peak / limit for peak, limit in peaks) * fmean(limits)


def work_shares(
    model: Model, candidate: Candidate, evaluation: PlanEvaluation, machine: Machine, limits: Sequence[float]
) -> str | None:
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
            seconds[index] = max(seconds[index], work * machine.node(rank).contention)
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


def state_shares(
    model: Model, candidate: Candidate, evaluation: PlanEvaluation, machine: Machine, limits: Sequence[float]
) -> str | None:
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


def stage_slowdowns(
    machine: Machine, seconds: Mapping[str, float], candidate: Candidate, given: Shares
) -> np.ndarray | None:
    """The factor by which each stage is slower than with ranks like rank 0 and even shares: float64[stages]; None if
    all ranks are equal and no shares are given.

    Along axes that shard samples, and ``model``, ranks get work by their speeds, as in ``work_shares``; along other
    axes all ranks wait for the slowest. ``seconds`` are those of the same work, by the name of the kind of node;
    ``given`` are fixed shares.
    """
    if not machine.heterogeneous and not given:
        return None
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
