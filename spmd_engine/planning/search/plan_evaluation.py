"""One plan looked at closely: its whole step analyzed on shapes, and simulated on a machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.models import Model
from spmd_engine.planning.dry_run.analyze import analyze
from spmd_engine.planning.dry_run.slot_table_memory import tables_of
from spmd_engine.planning.dry_run.step_analysis import RankStep, StepAnalysis
from spmd_engine.planning.machine.machine import Machine
from spmd_engine.planning.search.search_space import Candidate
from spmd_engine.planning.simulator.simulation import Prediction, simulate

MOST_SLOTS = 12_000  #: layers of a stage, times stages and micro-batches, that are analyzed one by one


@dataclass(frozen=True)
class Foresight:
    """What a plan's step will do. ``whole`` is False if it is too long to be looked at in all its micro-batches: then
    ``analysis`` is of as many as fill the pipeline, each as large as the plan's, and the seconds are continued."""

    analysis: StepAnalysis
    prediction: Prediction
    seconds: float
    bytes_sent: int
    whole: bool = True

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
        """What that rank holds then."""
        more = {
            "tables of groups": self.analysis.tables_of_rank(self.peak_rank),
            "places of convolutions": self.peak_step.constants,
        }
        return {**self.peak_step.peak.bytes_by_kind, **{kind: size for kind, size in more.items() if size}}

    @property
    def peak_moment(self) -> str:
        """What that rank computes then."""
        step = self.peak_step
        if not step.computations:
            return "the start"
        computation = step.computations[min(step.peak.computation, len(step.computations) - 1)]
        at = f" of micro-batch {computation.micro_batch}" if computation.micro_batch is not None else ""
        return computation.name + at

    def as_json(self) -> dict[str, Any]:
        """What programs ask for."""
        return {
            "seconds": self.seconds,
            "bytes_sent": self.bytes_sent,
            "peak_bytes": self.analysis.peak_bytes_by_rank(),
            "peak": {
                "rank": self.peak_rank,
                "moment": self.peak_moment,
                "bytes_by_kind": self.peak_bytes_by_kind,
            },
            "whole": self.whole,
            "approximate": list(self.analysis.approximate),
        }


def look(
    model: Model,
    machine: Machine,
    axes: Mapping[str, int],
    composition: ParallelConfig,
    batch_size: int,
    micro_batches: int,
    **options: Any,
) -> Foresight:
    """Analyze and simulate one step; ``options`` go to ``analyze``."""
    stages = axes.get("pipe", 1)
    few = 2 * stages

    def analyzed(**sizes: int) -> StepAnalysis:
        return with_tables(analyze(model, axes, composition, **sizes, **options), machine)

    slots = len(model.layers) * micro_batches
    if slots <= MOST_SLOTS or micro_batches <= few + stages:
        analysis = analyzed(batch_size=batch_size, micro_batches=micro_batches)
        prediction = simulate(analysis, machine)
        return Foresight(analysis, prediction, prediction.seconds, analysis.bytes_sent)
    each = batch_size // micro_batches
    short = analyzed(batch_size=each * few, micro_batches=few)
    longer = analyzed(batch_size=each * (few + stages), micro_batches=few + stages)
    first, second = simulate(short, machine), simulate(longer, machine)
    more = (micro_batches - few) / stages
    return Foresight(
        replace(longer, micro_batches=micro_batches),
        second,
        first.seconds + more * (second.seconds - first.seconds),
        round(short.bytes_sent + more * (longer.bytes_sent - short.bytes_sent)),
        whole=False,
    )


def with_tables(analysis: StepAnalysis, machine: Machine) -> StepAnalysis:
    """With the tables of groups as the machine's nodes have them: devices of their own hold none."""
    places = machine.places[: analysis.ranks]
    tables = tables_of(analysis, [str(number) for number, _ in places])
    return replace(
        analysis, tables=[size * (node.cores is not None) for size, (_, node) in zip(tables, places, strict=True)]
    )


def look_at(model: Model, machine: Machine, candidate: Candidate, base: ParallelConfig, **options: Any) -> Foresight:
    """``look`` at a candidate."""
    composition = candidate.composition(base)
    return look(model, machine, candidate.mesh, composition, candidate.batch_size, candidate.micro_batches, **options)
