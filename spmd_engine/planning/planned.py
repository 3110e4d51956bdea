"""``plan``: the best way to train a model on a machine, and why; or why there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter, process_time
from typing import Any

import numpy as np

from spmd_engine.engine.composition import Composition, ModelConfig
from spmd_engine.engine.optimizers import SGD, AdamW
from spmd_engine.errors import UsageError
from spmd_engine.models import Model
from spmd_engine.models.names import MODELS
from spmd_engine.planning.conflict import MORE, Conflict, Question, WayOut, conflict_of
from spmd_engine.planning.estimate import Estimate
from spmd_engine.planning.foresight import Foresight, look, look_at
from spmd_engine.planning.goals import GOALS, Constraints, Limits, value
from spmd_engine.planning.lattice import Candidate, SearchSpace
from spmd_engine.planning.machine import Machine
from spmd_engine.planning.plan_file import PlanFile
from spmd_engine.planning.search import Certificate, Found, Planner
from spmd_engine.units import readable_bytes

MISFIT = 1  #: the exit code where nothing fits
MOST_TO_SIMULATE = 20_000  #: layers times micro-batches of a pipeline's filling, beyond which estimates must do
TIGHTENED = 4  #: searches at most, each within limits that make up for how far the estimates of the last one erred
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
    composition: Composition | None = None  #: of a plan that was given, not found
    micro_batches: int = 1  #: of such a plan

    @property
    def why_not(self) -> str:
        """Why nothing fits, in one line."""
        conflict, constraints = self.conflict, Constraints(self.limits, self.request.fixed)
        assert conflict is not None
        said = [_said_constraint(name, constraints, self.request) for name in conflict.constraints]
        text = (
            f"nothing fits: {' and '.join(said)} cannot be kept together"
            if len(said) > 1
            else f"{said[0]} cannot be kept"
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
        return _within(self.request.limits, self.request.machine.with_ranks(max(self.request.ranks)))

    def as_json(self) -> dict[str, Any]:
        """What programs ask for."""
        if self.conflict is not None:
            return {
                "fits": False,
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


def plan(request: Request) -> Answer:
    """The best plan, or why there is none."""
    began = perf_counter()
    machine = request.machine.with_ranks(max(request.ranks))
    limits = _within(request.limits, machine)
    constraints = Constraints(limits, request.fixed)
    choices = SearchSpace(
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
        base=request.base,
    )
    held = constraints
    for _ in range(TIGHTENED):
        found = planner.search(choices, held, request.goal, seconds=request.seconds)
        if not found.certificate.candidates or not found.best:
            _refuse_impossible(choices, found)
            break
        seen = _seen(request, machine, found)
        fitting = [(each, foresight) for each, foresight in seen if not limits.broken(_as_foreseen(each, foresight))]
        if fitting:
            chosen, foresight = min(fitting, key=lambda pair: value(request.goal, _as_foreseen(*pair)))
            looked_at = sorted((_as_foreseen(*pair) for pair in seen), key=lambda each: value(request.goal, each))
            found = replace(found, best=looked_at)
            reasons = list(_reasons(planner, choices, limits, chosen, request.goal))
            return Answer(request, found, chosen, foresight, reasons, took=perf_counter() - began)
        held = replace(constraints, limits=_tightened(held.limits, limits, seen))
    return _conflict(request, planner, choices, held, found, began)


def _plain(estimate: Estimate) -> dict[str, Any]:
    """An estimate as JSON has it."""
    return {
        "plan": str(estimate.candidate),
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
    }


def _said_constraint(name: str, constraints: Constraints, request: Request) -> str:
    if name == "ranks":
        return f"{max(request.ranks)} ranks"
    if name == "batch_size":
        return f"a batch of {min(request.batch_sizes)}"
    return constraints.said(name)


def fixed_plan(request: Request) -> Answer:
    """A composition that is given, looked at closely: it fits, or what it breaks is the conflict."""
    began = perf_counter()
    axes, fixed = request.fixed["mesh"], dict(request.fixed)
    ranks = max(request.ranks)
    machine = request.machine.with_ranks(ranks)
    stages = fixed.get("stages")
    composition = request.base.changed(
        mesh=dict(axes),
        zero=fixed.get("zero"),
        sequence_parallel=bool(fixed.get("sequence_parallel")),
        schedule=fixed.get("schedule"),
        chunks=fixed.get("chunks"),
        stages=stages if isinstance(stages, str | None) else ",".join(map(str, stages)),
        recompute=fixed.get("recompute", "none"),
    )
    micro_batches = fixed.get("micro_batches", 1)
    seen = look(request.model, machine, axes, composition, request.batch_sizes[0], micro_batches, **request.analyzed)
    limits = _within(request.limits, machine)
    needs = {
        "memory": seen.analysis.peak_bytes,
        "latency": seen.seconds,
        "bandwidth": seen.bytes_sent / ranks / seen.seconds,
        "compute": max(seen.prediction.working.values(), default=0.0),
    }
    broken = [name for name, need in needs.items() if (getattr(limits, name) or float("inf")) < need]
    nothing = Found([], [], Certificate(0.0, 0.0, 1, 0, 1))
    answer = Answer(
        request,
        nothing,
        foresight=seen,
        took=perf_counter() - began,
        composition=composition,
        micro_batches=micro_batches,
    )
    if broken:
        return replace(answer, conflict=Conflict([*broken, "mesh"], [], None), conflict_foresight=seen)
    return answer


def plan_file_of(answer: Answer, model: str) -> PlanFile:
    """A plan that was found or looked at, to be run."""
    seen, request = answer.foresight, answer.request
    composition, micro_batches, batch_size = answer.composition, answer.micro_batches, request.batch_sizes[0]
    ranks = max(request.ranks)
    if answer.plan is not None:
        candidate = answer.plan.candidate
        composition, micro_batches = candidate.composition(request.base), candidate.micro_batches
        batch_size, ranks = candidate.batch_size, candidate.ranks
    assert composition is not None
    if model not in MODELS:
        raise UsageError(f"--output: {model} cannot be trained by name, so a plan for it is nothing to run")
    return PlanFile(
        ranks=ranks,
        model=ModelConfig(name=model, dtype=str(np.dtype(request.dtype))),
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


def _refuse_impossible(choices: SearchSpace, found: Found) -> None:
    if not found.certificate.candidates:
        said = ", ".join(map(str, choices.ranks)), ", ".join(map(str, choices.batch_sizes))
        raise UsageError(
            f"{choices.model.name} cannot be spread over {said[0]} ranks with a batch of {said[1]} and what is fixed: "
            "fewer ranks, or a larger --batch-size"
        )


def _small_enough(model: Model, candidate: Candidate) -> bool:
    filled = min(candidate.micro_batches, 3 * candidate.pipe)
    return len(model.layers) * filled <= MOST_TO_SIMULATE // max(candidate.pipe // 4, 1)


def _seen(request: Request, machine: Machine, found: Found) -> list[tuple[Estimate, Foresight | None]]:
    """The best plans, each looked at closely if it is small enough; as many as there is time for, the first anyway."""
    deadline, seen = process_time() + request.seconds, []
    for each in found.best:
        if seen and process_time() > deadline:
            break
        small = _small_enough(request.model, each.candidate)
        foresight = look_at(request.model, machine, each.candidate, request.base, **request.analyzed) if small else None
        seen.append((each, foresight))
    return seen


def _as_foreseen(estimate: Estimate, foresight: Foresight | None) -> Estimate:
    """An estimate with the seconds and the peak of the whole step, where that was looked at."""
    if foresight is None:
        return estimate
    return replace(estimate, seconds=foresight.seconds, memory=foresight.analysis.peak_bytes, sent=foresight.bytes_sent)


def _tightened(held: Limits, limits: Limits, seen: Sequence[tuple[Estimate, Foresight | None]]) -> Limits:
    """What estimates have to keep, since all these did and yet their steps do not: the less by as much as these err."""
    tighter = {}
    for name in ("memory", "latency", "bandwidth"):
        limit = getattr(limits, name)
        shares = [
            limits.measured(estimate)[name] / limits.measured(_as_foreseen(estimate, foresight))[name]
            for estimate, foresight in seen
            if limit is not None and name in limits.broken(_as_foreseen(estimate, foresight))
        ]
        if shares:
            tighter[name] = min(getattr(held, name), limit * max(shares)) * 0.998
    return replace(held, **tighter)


def _conflict(request, planner: Planner, choices, constraints, found: Found, began: float) -> Answer:
    question = Question(choices, constraints, request.goal, _most_ranks(request.machine))
    conflict = conflict_of(planner, question, request.seconds)
    nearest, seen = conflict.nearest, None
    if nearest is not None:
        seen = _foreseen(request, nearest)
        ways = [_as_it_will_be(request, constraints, way, nearest, seen) for way in conflict.ways]
        conflict = replace(conflict, ways=ways)
    return Answer(request, found, conflict=conflict, conflict_foresight=seen, took=perf_counter() - began)


def _foreseen(request: Request, estimate: Estimate) -> Foresight | None:
    """An estimate's plan looked at closely, if it is small enough."""
    if not _small_enough(request.model, estimate.candidate):
        return None
    machine = request.machine.with_ranks(estimate.candidate.ranks)
    return look_at(request.model, machine, estimate.candidate, request.base, **request.analyzed)


def _as_it_will_be(
    request: Request, constraints: Constraints, way: WayOut, nearest: Estimate, seen: Foresight | None
) -> WayOut:
    """A way out that gives up memory or time, with what its whole step needs of that."""
    if way.gives_up not in ("memory", "latency"):
        return way
    closely = seen if way.plan.candidate == nearest.candidate else _foreseen(request, way.plan)
    plan = _as_foreseen(way.plan, closely)
    need = {"memory": plan.memory, "latency": plan.seconds}[way.gives_up]
    limits = constraints.limits
    said = f"{way.gives_up} {limits.said(way.gives_up, need)} instead of {limits.said(way.gives_up)}"
    return WayOut(way.gives_up, said, plan)


def _most_ranks(machine: Machine) -> int:
    return machine.ranks or 1 << 20


def _reasons(planner: Planner, choices: SearchSpace, limits: Limits, chosen: Estimate, goal: str):
    """What the plan's choices gain over the nearest others, one by one."""
    candidate = chosen.candidate
    for name, options in _alternatives(candidate):
        others = []
        for option in options:
            changed = {name: option, "stages": None}
            if name == "schedule":
                changed["chunks"] = 1
            estimator = planner.estimator(replace(candidate, **changed))
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
