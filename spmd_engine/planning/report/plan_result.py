"""What ``plan`` is asked, and what it answers: the plan, looked at closely, or why there is none; as data and JSON."""

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
from spmd_engine.planning.search.plan_evaluation import Foresight
from spmd_engine.planning.search.relaxation import Conflict
from spmd_engine.planning.search.search import Certificate, Found
from spmd_engine.planning.search.search_space import axes_that_cut
from spmd_engine.units import readable_bytes


@dataclass(frozen=True)
class Request:
    """What is asked."""

    model: Model
    machine: Machine
    ranks: Sequence[int]
    batch_sizes: Sequence[int]
    goal: str = "latency"
    limits: Limits = Limits()
    fixed: Mapping[str, Any] = field(default_factory=dict)  #: of ``lattice.FIXABLE``
    axes: Sequence[str] | None = None
    sequence: int | None = None
    dtype: Any = np.float32
    optimizer: str = "adamw"
    base: ParallelConfig = ParallelConfig()  #: what of a composition is not searched
    seconds: float = 20.0

    def __post_init__(self) -> None:
        if self.goal not in GOALS:
            raise UsageError(f"goal {self.goal!r}: choose {', '.join(GOALS)}")
        for node in self.machine.nodes:
            if str(np.dtype(self.dtype)) not in node.speeds:
                known = ", ".join(node.speeds)
                raise UsageError(
                    f"machine {self.machine.name} says no speed for {np.dtype(self.dtype)}; it has: {known}"
                )
        context = self.model.context
        if self.sequence is not None and 0 < context < self.sequence:
            raise UsageError(
                f"--sequence {self.sequence}: the context of {self.model.name} is {context}; give at most that"
            )
        known = axes_that_cut(self.model)
        for axis in self.axes or ():
            if axis not in known:
                raise UsageError(f"--axes: {axis} shards nothing of {self.model.name}; choose of {', '.join(known)}")
        if not self.seconds >= 0:
            raise UsageError(f"--seconds {self.seconds:g}: it is from 0")
        chunks, schedule = self.fixed.get("chunks"), self.fixed.get("schedule")
        if chunks is not None and chunks < (2 if schedule == "interleaved" else 1):
            least = "2, with interleaved" if schedule == "interleaved" else "1"
            raise UsageError(f"--chunks {chunks}: it is from {least}")
        if self.optimizer not in OPTIMIZERS:
            raise UsageError(f"optimizer {self.optimizer!r}: choose {', '.join(OPTIMIZERS)}")

    @property
    def analyzed(self) -> dict[str, Any]:
        """Options of ``analyze``."""
        return {"dtype": self.dtype, "sequence": self.sequence, "optimizer": OPTIMIZERS[self.optimizer]()}


@dataclass(frozen=True)
class Answer:
    """What was found: the plan, looked at closely, or the conflict."""

    request: Request
    found: Found
    plan: Estimate | None = None
    foresight: Foresight | None = None  #: None if the plan is too large to be looked at in whole
    reasons: Sequence[str] = ()
    conflict: Conflict | None = None
    conflict_foresight: Foresight | None = None  #: of what comes closest
    took: float = 0.0  #: seconds
    composition: ParallelConfig | None = None  #: of a plan that was given, not found
    micro_batches: int = 1  #: of such a plan

    @property
    def why_not(self) -> str:
        """Why nothing fits, in one line."""
        conflict, constraints = self.conflict, Constraints(self.limits, self.request.fixed)
        assert conflict is not None
        looked = self.found.certificate
        said = [_said_constraint(name, constraints, self.request) for name in conflict.constraints]
        text = (
            f"nothing fits: {' and '.join(said)} cannot be kept together"
            if len(said) > 1
            else f"{said[0]} cannot be kept"
        )
        if not conflict.decided:
            text = (
                f"time ran out (--seconds {self.request.seconds:g}): of {looked.candidates:,} candidates "
                f"{looked.excluded:,} break a constraint by their bounds, {looked.estimated:,} were estimated, and "
                f"none of these keeps {' and '.join(said)}; whether another does is not known"
            )
        seen, nearest = self.conflict_foresight, conflict.nearest
        if seen is not None:
            text += (
                f"; what comes closest ({nearest.candidate}) needs {readable_bytes(seen.analysis.peak_bytes)} on rank "
                f"{seen.peak_rank} at {seen.peak_moment}"
                if nearest is not None
                else f"; rank {seen.peak_rank} needs {readable_bytes(seen.analysis.peak_bytes)} at {seen.peak_moment}"
            )
        if conflict.ways:
            text += f". It would fit with {conflict.ways[0].said}"
        return text

    @property
    def limits(self) -> Limits:
        """With the machine's own."""
        return within(self.request.limits, self.request.machine.with_ranks(max(self.request.ranks)))

    def as_json(self) -> dict[str, Any]:
        """What programs ask for."""
        if self.conflict is not None:
            return {
                "fits": False if self.conflict.decided else None,
                "conflict": list(self.conflict.constraints),
                "reason": self.why_not,
                "ways": [
                    {"gives_up": way.gives_up, "with": way.said, **_plain(way.plan)} for way in self.conflict.ways
                ],
                **({"nearest": self.conflict_foresight.as_json()} if self.conflict_foresight else {}),
            }
        seen = self.foresight
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
                "front": [_plain(each) for each in self.found.front],
                "certificate": {"gap": float(self.found.certificate.gap), **_numbers(self.found.certificate)},
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


def plan_file_of(answer: Answer, model: str, lora: LoRAOptions | None = None) -> PlanFile:
    """A plan that was found or looked at, to be run: of the model by name or path, with these adapters."""
    seen, request = answer.foresight, answer.request
    composition, micro_batches, batch_size = answer.composition, answer.micro_batches, request.batch_sizes[0]
    ranks = max(request.ranks)
    if answer.plan is not None:
        candidate = answer.plan.candidate
        composition, micro_batches = candidate.composition(request.base), candidate.micro_batches
        batch_size, ranks = candidate.batch_size, candidate.ranks
    assert composition is not None
    if model not in MODELS and not has_weights(model):
        raise UsageError(f"--output: {model} cannot be trained by name, so a plan for it is nothing to run")
    return PlanFile(
        ranks=ranks,
        model=ModelConfig(name=model, dtype=str(np.dtype(request.dtype)), lora=lora),
        batch_size=batch_size,
        micro_batches=micro_batches,
        composition=composition,
        optimizer=request.optimizer,
        machine=request.machine.name,
        goal=request.goal,
        seconds=float(seen.seconds if seen else answer.plan.seconds),
        bytes_sent=int(seen.bytes_sent if seen else answer.plan.sent),
        peak_bytes=int(seen.analysis.peak_bytes if seen else answer.plan.memory),
    )


def within(limits: Limits, machine: Machine) -> Limits:
    """The limits, and the memory that ranks have: of unlike ones, the mean of it, since what they store may be uneven;
    whether each has room is seen of a plan's whole step."""
    rooms = (
        rooms_of(limits, machine) if machine.unlike else [room_of(limits, machine, r) for r in _one_of_each(machine)]
    )
    return replace(limits, memory=fmean(rooms) if machine.unlike else min(rooms))


def rooms_of(limits: Limits, machine: Machine) -> list[float]:
    """Bytes that each rank may hold."""
    return [room_of(limits, machine, rank) for rank in range(machine.ranks)]


def room_of(limits: Limits, machine: Machine, rank: int) -> float:
    """Bytes that a rank may hold."""
    room = machine.memory_of(rank)
    return min(limits.memory or room, room)


def _one_of_each(machine: Machine) -> list[int]:
    ranks, at = [], 0
    for node in machine.nodes:
        ranks.append(at)
        at += node.count * node.ranks
    return ranks


def _plain(estimate: Estimate) -> dict[str, Any]:
    """An estimate as JSON has it."""
    return {
        "plan": str(estimate.candidate),
        "simulated": estimate.simulated,
        "seconds": float(estimate.seconds),
        "bytes_sent": int(estimate.sent),
        "peak_bytes": int(estimate.memory),
        "seconds_by_part": {name: float(value) for name, value in estimate.parts.items()},
        "bytes_by_kind": {name: int(value) for name, value in estimate.holds.items()},
    }


def _numbers(certificate: Certificate) -> dict[str, Any]:
    return {
        "best": float(certificate.best),
        "bound": float(certificate.bound),
        "candidates": certificate.candidates,
        "excluded": certificate.excluded,
        "estimated": certificate.estimated,
        "complete": certificate.complete,
    }


def _said_constraint(name: str, constraints: Constraints, request: Request) -> str:
    if name == "ranks":
        return f"{max(request.ranks)} ranks"
    if name == "batch_size":
        return f"a batch of {min(request.batch_sizes)}"
    return constraints.said(name)


# --- A plan as a file: a composition and micro-batches for one model on so many ranks, and what was predicted of it


VERSION = 1


@dataclass(frozen=True)
class PlanFile(Configuration):
    """What ``plan --output`` writes and ``train --plan`` runs."""

    ranks: int = setting(1, least=1)
    version: int = VERSION
    model: ModelConfig = ModelConfig()
    batch_size: int = setting(16, least=1)  #: samples a step
    micro_batches: int = setting(1, least=1)
    composition: ParallelConfig = ParallelConfig()
    optimizer: str = "adamw"
    machine: str = ""  #: that it was made for
    goal: str = ""
    seconds: float = 0.0  #: of a step, as predicted
    bytes_sent: int = 0  #: of a step, by all ranks
    peak_bytes: int = 0  #: of the rank that holds most

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """The plan of a file; raises UsageError, in one line, for one that cannot be read or makes no sense."""
        content = json_at(path)
        if not isinstance(content, Mapping) or content.get("version") != VERSION or "ranks" not in content:
            raise UsageError(f"{path}: no plan; 'plan --output FILE' writes one")
        return cls.from_json(content, str(path))

    def write(self, path: str | Path) -> None:
        """Write what ``read`` reads."""
        try:
            Path(path).write_text(json.dumps(self.as_json(), indent=2) + "\n")
        except OSError as error:
            raise UsageError(f"--output {path}: {error.strerror or error}") from error

    def check(self, ranks: int, model: str | None, where: str) -> None:
        """Raise UsageError if the plan was made for another number of ranks, or another model."""
        if ranks != self.ranks:
            raise UsageError(
                f"{where} was made for {self.ranks} ranks, and there are {ranks}: start as many, or plan anew"
            )
        if model is not None and model != self.model.name:
            raise UsageError(f"{where} was made for {self.model.name}, not for {model}: plan --model {model}")
