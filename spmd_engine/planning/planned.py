"""``plan``: the best way to train a model on a machine, and why; or why there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import numpy as np

from spmd_engine.engine.composition import Composition
from spmd_engine.engine.optimizers import SGD, AdamW
from spmd_engine.errors import UsageError
from spmd_engine.models import Model
from spmd_engine.planning.conflict import MORE, Conflict, Question, conflict_of
from spmd_engine.planning.estimate import Estimate
from spmd_engine.planning.foresight import Foresight, look_at
from spmd_engine.planning.goals import GOALS, Constraints, Limits, value
from spmd_engine.planning.lattice import Candidate, Choices
from spmd_engine.planning.machine import Machine
from spmd_engine.planning.search import Found, Planner

MOST_TO_SIMULATE = 20_000  #: layers times micro-batches of a pipeline's filling, beyond which estimates must do
STATES = {"adamw": 2, "sgd": 1}


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
    base: Composition = Composition()  #: what of a composition is not searched
    seconds: float = 20.0

    def __post_init__(self) -> None:
        if self.goal not in GOALS:
            raise UsageError(f"goal {self.goal!r}: choose {', '.join(GOALS)}")
        if self.optimizer not in STATES:
            raise UsageError(f"optimizer {self.optimizer!r}: choose {', '.join(STATES)}")

    @property
    def analyzed(self) -> dict[str, Any]:
        """Options of ``analyze``."""
        optimizer = AdamW() if self.optimizer == "adamw" else SGD()
        return {"dtype": self.dtype, "sequence": self.sequence, "optimizer": optimizer}


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


def plan(request: Request) -> Answer:
    """The best plan, or why there is none."""
    began = perf_counter()
    machine = request.machine.with_ranks(max(request.ranks))
    limits = _within(request.limits, machine)
    constraints = Constraints(limits, request.fixed)
    choices = Choices(
        request.model,
        request.ranks,
        request.batch_sizes,
        request.machine.nodes[0].ranks,
        axes=request.axes,
        **request.fixed,
    )
    planner = Planner(
        request.model,
        request.machine.with_ranks(min(max(request.ranks) * MORE[-1], _most_ranks(request.machine))),
        dtype=request.dtype,
        states=STATES[request.optimizer],
        sequence=request.sequence,
        optimizer=request.analyzed["optimizer"],
    )
    found = planner.search(choices, constraints, request.goal, seconds=request.seconds)
    if not found.certificate.candidates or not found.best:
        _refuse_impossible(choices, found)
        return _conflict(request, planner, choices, constraints, found, began)
    chosen, foresight = _verified(request, machine, limits, found)
    reasons = list(_reasons(planner, choices, limits, chosen, request.goal))
    return Answer(request, found, chosen, foresight, reasons, took=perf_counter() - began)


def _within(limits: Limits, machine: Machine) -> Limits:
    """The limits, and the memory that ranks have."""
    least = min(machine.memory_of(rank) for rank in _one_of_each(machine))
    return replace(limits, memory=min(limits.memory or least, least))


def _one_of_each(machine: Machine) -> list[int]:
    ranks, at = [], 0
    for node in machine.nodes:
        ranks.append(at)
        at += node.count * node.ranks
    return ranks


def _refuse_impossible(choices: Choices, found: Found) -> None:
    if not found.certificate.candidates:
        said = ", ".join(map(str, choices.ranks)), ", ".join(map(str, choices.batch_sizes))
        raise UsageError(
            f"{choices.model.name} cannot be spread over {said[0]} ranks with a batch of {said[1]} and what is fixed: "
            "fewer ranks, or a larger --batch-size"
        )


def _small_enough(model: Model, candidate: Candidate) -> bool:
    filled = min(candidate.micro_batches, 3 * candidate.pipe)
    return len(model.layers) * filled <= MOST_TO_SIMULATE // max(candidate.pipe // 4, 1)


def _verified(
    request: Request, machine: Machine, limits: Limits, found: Found
) -> tuple[Estimate, Foresight | None]:
    """The first of the best plans whose analyzed peak keeps the limit of memory; if none does, the least one."""
    least: tuple[Estimate, Foresight] | None = None
    for each in found.best:
        if not _small_enough(request.model, each.candidate):
            return each, None
        seen = look_at(request.model, machine, each.candidate, request.base, **request.analyzed)
        if limits.memory is None or seen.analysis.peak_bytes <= limits.memory:
            return each, seen
        if least is None or seen.analysis.peak_bytes < least[1].analysis.peak_bytes:
            least = each, seen
    assert least is not None
    return least


def _conflict(request, planner: Planner, choices, constraints, found: Found, began: float) -> Answer:
    question = Question(choices, constraints, request.goal, _most_ranks(request.machine))
    conflict = conflict_of(planner, question, request.seconds)
    seen = None
    if conflict.nearest is not None and _small_enough(request.model, conflict.nearest.candidate):
        machine = request.machine.with_ranks(conflict.nearest.candidate.ranks)
        seen = look_at(request.model, machine, conflict.nearest.candidate, request.base, **request.analyzed)
    return Answer(request, found, conflict=conflict, conflict_foresight=seen, took=perf_counter() - began)


def _most_ranks(machine: Machine) -> int:
    return machine.ranks or 1 << 20


def _reasons(planner: Planner, choices: Choices, limits: Limits, chosen: Estimate, goal: str):
    """What the plan's choices gain over the nearest others, one by one."""
    candidate = chosen.candidate
    for name, options in _alternatives(candidate):
        others = []
        for option in options:
            estimator = planner.estimator(replace(candidate, **{name: option}, stages=None))
            other = estimator.estimate() if estimator is not None else None
            if other is not None:
                others.append((option, other))
        if others:
            option, other = min(others, key=lambda pair: value(goal, pair[1]))
            yield _said(name, option, getattr(candidate, name), chosen, other, limits)


def _alternatives(candidate: Candidate):
    stored = candidate.batch_ranks * candidate.mesh.get("context", 1)
    if stored > 1:
        yield "zero", [zero for zero in range(4) if zero != candidate.zero]
    cut, m = candidate.batch_ranks, candidate.micro_batches
    sizes = [n for n in (m // 2, 2 * m) if n >= 1 and candidate.batch_size // max(n, 1) >= cut]
    if candidate.schedule == "interleaved":
        sizes = [n for n in sizes if n % candidate.pipe == 0]
    if sizes:
        yield "micro_batches", sizes
    yield "recompute", [again for again in ("none", "attention", "block") if again != candidate.recompute][:2]
    if candidate.mesh.get("model", 1) > 1:
        yield "sequence_parallel", [not candidate.sequence_parallel]
    if candidate.pipe > 1:
        yield "schedule", [name for name in ("1f1b", "zero-bubble", "gpipe") if name != candidate.schedule]


def _said(name: str, option: Any, mine: Any, chosen: Estimate, other: Estimate, limits: Limits) -> str:
    what = f"{name.replace('_', ' ')} {mine}, not {option}"
    broken = limits.broken(other)
    if broken:
        needs = limits.measured(other)
        return f"{what}: that would need " + " and ".join(
            f"{limits.said(each, needs[each])} of {each}" for each in sorted(broken)
        )
    slower, larger = other.seconds / chosen.seconds - 1, other.memory / chosen.memory - 1
    gains = {part: other.parts[part] - chosen.parts[part] for part in other.parts}
    why = max(gains, key=lambda part: gains[part])
    because = f", most of it {why}" if slower > 0.002 and gains[why] > 0 else ""
    return f"{what}: that would take {slower:+.1%} time{because}, and {larger:+.1%} memory"
