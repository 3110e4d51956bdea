"""One plan looked at closely: its whole step analyzed on shapes, and simulated on a machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from spmd_engine.engine.composition import Composition
from spmd_engine.models import Model
from spmd_engine.planning.analyze import analyze
from spmd_engine.planning.lattice import Candidate
from spmd_engine.planning.machine import Machine
from spmd_engine.planning.simulation import Prediction, simulate
from spmd_engine.planning.step_analysis import RankStep, StepAnalysis

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
                "bytes_by_kind": dict(self.peak_step.peak.bytes_by_kind),
            },
            "whole": self.whole,
            "approximate": list(self.analysis.approximate),
        }


def look(
    model: Model,
    machine: Machine,
    axes: Mapping[str, int],
    composition: Composition,
    batch_size: int,
    micro_batches: int,
    **options: Any,
) -> Foresight:
    """Analyze and simulate one step; ``options`` go to ``analyze``."""
    stages = axes.get("pipe", 1)
    few = 2 * stages
    slots = len(model.layers) * micro_batches
    if slots <= MOST_SLOTS or micro_batches <= few + stages:
        analysis = analyze(model, axes, composition, batch_size=batch_size, micro_batches=micro_batches, **options)
        prediction = simulate(analysis, machine)
        return Foresight(analysis, prediction, prediction.seconds, analysis.bytes_sent)
    each = batch_size // micro_batches
    short = analyze(model, axes, composition, batch_size=each * few, micro_batches=few, **options)
    longer = analyze(model, axes, composition, batch_size=each * (few + stages), micro_batches=few + stages, **options)
    first, second = simulate(short, machine), simulate(longer, machine)
    more = (micro_batches - few) / stages
    return Foresight(
        replace(longer, micro_batches=micro_batches),
        second,
        first.seconds + more * (second.seconds - first.seconds),
        round(short.bytes_sent + more * (longer.bytes_sent - short.bytes_sent)),
        whole=False,
    )


def look_at(model: Model, machine: Machine, candidate: Candidate, base: Composition, **options: Any) -> Foresight:
    """``look`` at a candidate."""
    composition = candidate.composition(base)
    return look(model, machine, candidate.mesh, composition, candidate.batch_size, candidate.micro_batches, **options)
