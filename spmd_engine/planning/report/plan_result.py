"""The input of ``plan`` and its result: the plan with its evaluation, or why there is none; as data and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Self

import numpy as np

from spmd_engine.configuration import Configuration, setting
from spmd_engine.engine.optimizers import OPTIMIZERS
from spmd_engine.engine.parallel_config import ModelConfig, ParallelConfig
from spmd_engine.errors import UsageError
from spmd_engine.foreign import json_at
from spmd_engine.models import Model
from spmd_engine.models.lora import LoRAOptions
from spmd_engine.models.names import MODELS, has_weights
from spmd_engine.planning.machine.machine import Machine
from spmd_engine.planning.search.estimate import Estimate
from spmd_engine.planning.search.goals import GOALS, Constraints, Limits
from spmd_engine.planning.search.plan_evaluation import PlanEvaluation
from spmd_engine.planning.search.relaxation import Conflict
from spmd_engine.planning.search.search import Certificate, SearchResult
from spmd_engine.planning.search.search_space import axes_that_cut
from spmd_engine.units import readable_bytes


@dataclass(frozen=True)
class Request:
    """The input of ``plan``."""

    model: Model
    machine: Machine
    ranks: Sequence[int]
    batch_sizes: Sequence[int]
    goal: str = "latency"
    limits: Limits = Limits()
    fixed: Mapping[str, Any] = field(default_factory=dict)  #: of ``search_space.FIXABLE``
    axes: Sequence[str] | None = None
    sequence: int | None = None
    dtype: Any = np.float32
    optimizer: str = "adamw"
    base: ParallelConfig = ParallelConfig()  #: options that are not searched
    seconds: float = 20.0

    def __post_init__(self) -> None:
        if self.goal not in GOALS:
            raise UsageError(f"goal {self.goal!r}: choose {', '.join(GOALS)}")
        for node in self.machine.nodes:
            if str(np.dtype(self.dtype)) not in node.speeds:
                known = ", ".join(node.speeds)
                raise UsageError(
                    f"machine {self.machine.name} has no speed for {np.dtype(self.dtype)}; it has: {known}"
                )
        context = self.model.context
        if self.sequence is not None and 0 < context < self.sequence:
            raise UsageError(
                f"--sequence {self.sequence}: the context of {self.model.name} is {context}; give at most that"
            )
        known = axes_that_cut(self.model)
        for axis in self.axes or ():
            if axis not in known:
                raise UsageError(f"--axes: {axis} shards nothing of {self.model.name}; choose from {', '.join(known)}")
        if not self.seconds >= 0:
            raise UsageError(f"--seconds {self.seconds:g}: it must be at least 0")
        chunks, schedule = self.fixed.get("chunks"), self.fixed.get("schedule")
        if chunks is not None and chunks < (2 if schedule == "interleaved" else 1):
            least = "2, with interleaved" if schedule == "interleaved" else "1"
            raise UsageError(f"--chunks {chunks}: it must be at least {least}")
        if self.optimizer not in OPTIMIZERS:
            raise UsageError(f"optimizer {self.optimizer!r}: choose {', '.join(OPTIMIZERS)}")

    @property
    def analyzed(self) -> dict[str, Any]:
        """The options of ``analyze``."""
        return {"dtype": self.dtype, "sequence": self.sequence, "optimizer": OPTIMIZERS[self.optimizer]()}


@dataclass(frozen=True)
class PlanResult:
    """The plan with its evaluation, or the conflict."""

    request: Request
    search: SearchResult
    plan: Estimate | None = None
    evaluation: PlanEvaluation | None = None  #: None if the step is too large to be simulated
    reasons: Sequence[str] = ()
    conflict: Conflict | None = None
    nearest_evaluation: PlanEvaluation | None = None  #: of the closest plan
    took: float = 0.0  #: seconds of planning
    composition: ParallelConfig | None = None  #: of a given plan
    micro_batches: int = 1  #: of a given plan

    @property
    def why_not(self) -> str:
        """Why nothing fits, in one line."""
        conflict, constraints = self.conflict, Constraints(self.limits, self.request.fixed)
        assert conflict is not None
        shown = [_shown_constraint(name, constraints, self.request) for name in conflict.constraints]
        certificate = self.search.certificate
        if not conflict.decided:
            text = (
                f"time ran out (--seconds {self.request.seconds:g}): of {certificate.candidates:,} candidates "
                f"{certificate.excluded:,} break a constraint by their bounds, {certificate.estimated:,} were "
                f"estimated, and none of these keeps {' and '.join(shown)}; whether another does is unknown"
            )
        elif len(shown) > 1:
            text = f"nothing fits: {' and '.join(shown)} cannot be kept together"
        else:
            text = f"{shown[0]} cannot be kept"
        if (nearest := self.nearest_evaluation) is not None:
            closest = f"the closest plan ({conflict.nearest.candidate}) needs" if conflict.nearest else "it needs"
            size = readable_bytes(nearest.analysis.peak_bytes)
            text += f"; {closest} {size} on rank {nearest.peak_rank} at {nearest.peak_moment}"
        if conflict.relaxations:
            text += f". It would fit with {conflict.relaxations[0].text}"
        return text

    @property
    def limits(self) -> Limits:
        """The limits, with the memory of the machine."""
        return with_machine_memory(self.request.limits, self.request.machine.with_ranks(max(self.request.ranks)))

    def as_json(self) -> dict[str, Any]:
        """The result as JSON."""
        if self.conflict is not None:
            return {
                "fits": False if self.conflict.decided else None,
                "conflict": list(self.conflict.constraints),
                "reason": self.why_not,
                "ways": [
                    {"gives_up": relaxation.gives_up, "with": relaxation.text, **_plain(relaxation.plan)}
                    for relaxation in self.conflict.relaxations
                ],
                **({"nearest": self.nearest_evaluation.as_json()} if self.nearest_evaluation else {}),
            }
        seen = self.evaluation
        found = {
            "fits": True,
            "model": self.request.model.name,
            "machine": self.request.machine.name,
            "goal": self.request.goal,
        }
        if self.plan is not None:
            found |= _plain(self.plan) | {
                "composition": self.plan.candidate.composition(self.request.base).as_json(),
                "micro_batches": self.plan.candidate.micro_batches,
                "batch_size": self.plan.candidate.batch_size,
                "reasons": list(self.reasons),
                "front": [_plain(plan) for plan in self.search.front],
                "certificate": _certificate_as_json(self.search.certificate),
            }
        elif self.composition is not None:
            found |= {
                "composition": self.composition.as_json(),
                "micro_batches": self.micro_batches,
                "batch_size": self.request.batch_sizes[0],
            }
        if seen is not None:
            found |= seen.as_json()
        return found


def plan_file_of(result: PlanResult, model: str, lora: LoRAOptions | None = None) -> PlanFile:
    """The plan file of a result, for the model of this name or path, with these adapters."""
    seen, request = result.evaluation, result.request
    composition, micro_batches, batch_size = result.composition, result.micro_batches, request.batch_sizes[0]
    ranks = max(request.ranks)
    if result.plan is not None:
        candidate = result.plan.candidate
        composition, micro_batches = candidate.composition(request.base), candidate.micro_batches
        batch_size, ranks = candidate.batch_size, candidate.ranks
    assert composition is not None
    if model not in MODELS and not has_weights(model):
        raise UsageError(f"--output: {model} cannot be trained by name, so a plan file for it could not be used")
    return PlanFile(
        ranks=ranks,
        model=ModelConfig(name=model, dtype=str(np.dtype(request.dtype)), lora=lora),
        batch_size=batch_size,
        micro_batches=micro_batches,
        composition=composition,
        optimizer=request.optimizer,
        machine=request.machine.name,
        goal=request.goal,
        seconds=float(seen.seconds if seen else result.plan.seconds),
        bytes_sent=int(seen.bytes_sent if seen else result.plan.sent),
        peak_bytes=int(seen.analysis.peak_bytes if seen else result.plan.memory),
    )


def with_machine_memory(limits: Limits, machine: Machine) -> Limits:
    """The limits with the memory of the machine's ranks. For unequal ranks, whose state may be stored unevenly, it is
    the mean; whether each rank has room is checked by the evaluation of a plan."""
    bytes_of_ranks = memory_limits(limits, machine)
    return replace(limits, memory=fmean(bytes_of_ranks) if machine.heterogeneous else min(bytes_of_ranks))


def memory_limits(limits: Limits, machine: Machine) -> list[float]:
    """Bytes that each rank may hold, by the limits and the machine."""
    sizes = [machine.memory_of(rank) for rank in range(machine.ranks)]
    return [min(limits.memory or size, size) for size in sizes]


def _plain(estimate: Estimate) -> dict[str, Any]:
    """An estimate as JSON."""
    return {
        "plan": str(estimate.candidate),
        "simulated": estimate.simulated,
        "seconds": float(estimate.seconds),
        "bytes_sent": int(estimate.sent),
        "peak_bytes": int(estimate.memory),
        "seconds_by_part": {name: float(value) for name, value in estimate.parts.items()},
        "bytes_by_kind": {name: int(value) for name, value in estimate.holds.items()},
    }


def _certificate_as_json(certificate: Certificate) -> dict[str, Any]:
    numbers = {name: float(getattr(certificate, name)) for name in ("gap", "best", "bound")}
    return numbers | {name: getattr(certificate, name) for name in ("candidates", "excluded", "estimated", "complete")}


def _shown_constraint(name: str, constraints: Constraints, request: Request) -> str:
    if name == "ranks":
        return f"{max(request.ranks)} ranks"
    if name == "batch_size":
        return f"a batch of {min(request.batch_sizes)}"
    return constraints.shown(name)


# --- Plan files: a composition and micro-batches for a model on a number of ranks, and the predicted step


VERSION = 1


@dataclass(frozen=True)
class PlanFile(Configuration):
    """The file that ``plan --output`` writes and ``train --plan`` runs."""

    ranks: int = setting(1, least=1)
    version: int = VERSION
    model: ModelConfig = ModelConfig()
    batch_size: int = setting(16, least=1)  #: samples per step
    micro_batches: int = setting(1, least=1)
    composition: ParallelConfig = ParallelConfig()
    optimizer: str = "adamw"
    machine: str = ""  #: that the plan is for
    goal: str = ""
    seconds: float = 0.0  #: of a step, as predicted
    bytes_sent: int = 0  #: of a step, by all ranks
    peak_bytes: int = 0  #: of the rank that holds most

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """The plan of a file; raises UsageError if it cannot be read or is invalid."""
        content = json_at(path)
        if not isinstance(content, Mapping) or content.get("version") != VERSION or "ranks" not in content:
            raise UsageError(f"{path}: not a plan file; 'plan --output FILE' writes one")
        return cls.from_json(content, str(path))

    def write(self, path: str | Path) -> None:
        """Write the file; raises UsageError if that fails."""
        try:
            Path(path).write_text(json.dumps(self.as_json(), indent=2) + "\n")
        except OSError as error:
            raise UsageError(f"--output {path}: {error.strerror or error}") from error

    def check(self, ranks: int, model: str | None, where: str) -> None:
        """Raise UsageError if the plan is for another number of ranks, or another model."""
        if ranks != self.ranks:
            raise UsageError(
                f"{where} was made for {self.ranks} ranks, and there are {ranks}: start {self.ranks} ranks, or plan "
                "for the ranks that there are"
            )
        if model is not None and model != self.model.name:
            raise UsageError(f"{where} was made for {self.model.name}, not for {model}: plan --model {model}")
