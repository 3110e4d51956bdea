"""The evaluation of a step: its dry run, simulated on a machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Any

from spmd_engine.axes import count_ranks
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.models import Model
from spmd_engine.planning.dry_run.analyze import analyze
from spmd_engine.planning.dry_run.rank_classes import slot_table_bytes
from spmd_engine.planning.dry_run.step_analysis import RankStep, StepAnalysis
from spmd_engine.planning.machine.machine import Machine
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
        return self.peak_step.peak_moment

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
    """The machine with its ranks in the order of an analysis: those of the mesh, then the others."""
    others, order = composition.ranks_outside, composition.order
    machine = machine.with_ranks(count_ranks(axes) + len(others))
    if others:
        members = [rank for rank in range(machine.ranks) if rank not in others]
        order = [*(members[number] for number in order or range(len(members))), *others]
    return machine.placed(order)


def evaluate_step(
    model: Model,
    machine: Machine,
    axes: Mapping[str, int],
    composition: ParallelConfig,
    batch_size: int,
    micro_batches: int,
    *,
    known: StepAnalysis | None = None,
    **options: Any,
) -> PlanEvaluation:
    """Analyze and simulate one step, with the machine's ranks in the composition's order.

    ``options`` go to ``analyze``. ``known``: the analysis of the whole step, which does not depend on the order.
    """
    machine = _placed(machine, axes, composition)
    stages = axes.get("pipe", 1)
    few = 2 * stages

    def analyzed(**sizes: int) -> StepAnalysis:
        return analyze(model, axes, composition, device=machine.device, **sizes, **options)

    slots = len(model.layers) * micro_batches
    if slots <= MOST_SLOTS or micro_batches <= few + stages:
        analysis = known or analyzed(batch_size=batch_size, micro_batches=micro_batches)
        analysis = with_slot_tables(analysis, machine)
        prediction = simulate(analysis, machine)
        return PlanEvaluation(analysis, prediction, prediction.seconds, analysis.bytes_sent, machine)
    samples = batch_size // micro_batches
    short, longer = (
        with_slot_tables(analyzed(batch_size=samples * n, micro_batches=n), machine) for n in (few, few + stages)
    )
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


def peak_memory(analysis: StepAnalysis, limits: Sequence[float]) -> float:
    """Bytes of the rank that holds most.

    With memory ``limits`` of unequal ranks: the largest share of its own limit that a rank holds, times their mean.
    """
    if not limits:
        return analysis.peak_bytes
    peaks = zip(analysis.peak_bytes_by_rank(), limits, strict=True)
    return max(peak / limit for peak, limit in peaks) * fmean(limits)
