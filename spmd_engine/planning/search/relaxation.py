"""Where nothing fits: the smallest set of constraints that cannot be kept together, and what would help."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from spmd_engine.planning.search.estimate import Estimate
from spmd_engine.planning.search.goals import LIMITS, Constraints, Limits
from spmd_engine.planning.search.search import Planner
from spmd_engine.planning.search.search_space import SearchSpace

MORE = (2, 4, 8)  #: times as many ranks, and parts of a batch, that are looked at where those are given up


@dataclass(frozen=True)
class Relaxation:
    """What would help: a plan that fits once one constraint is given up as far as it needs."""

    gives_up: str  #: which
    said: str  #: what instead
    plan: Estimate


@dataclass(frozen=True)
class Conflict:
    """Constraints of which any can be kept without the others, but not all together; or, if it is not ``decided``,
    those that nothing was found to keep before the time ran out."""

    constraints: Sequence[str]
    ways: Sequence[Relaxation]  #: the nearest first
    nearest: Estimate | None = None  #: what comes closest to all limits, keeping all else
    decided: bool = True


@dataclass(frozen=True)
class Question:
    """What is asked of a planner."""

    choices: SearchSpace
    constraints: Constraints
    goal: str
    most_ranks: int  #: of the machine


def conflict_of(planner: Planner, question: Question, seconds: float = 20.0) -> Conflict:
    """Why nothing fits. Sets of constraints are tried from the smallest on, each by a search that ends with the first
    plan that keeps them."""
    names = _all_names(question)
    each = seconds / 12
    smallest: Sequence[str] = names
    for size in range(1, len(names)):
        found = next((kept for kept in combinations(names, size) if not _possible(planner, question, kept, each)), None)
        if found is not None:
            smallest = found
            break
    ways = sorted(_ways(planner, question, smallest, each), key=lambda way: _far(way, question))
    return Conflict(smallest, ways)


def closest(planner: Planner, question: Question, seconds: float = 20.0) -> Sequence[Estimate]:
    """What needs least memory of all that keeps to what is fixed, whatever the limits."""
    unlimited = replace(question.constraints, limits=Limits())
    return planner.search(question.choices, unlimited, "memory", seconds=seconds / 12, front=False).best


def _all_names(question: Question) -> list[str]:
    names = list(question.constraints.names)
    return names + [name for name in ("ranks", "batch_size") if name not in names]


def _possible(planner: Planner, question: Question, kept: Sequence[str], seconds: float) -> bool:
    """Whether anything keeps these constraints, all others given up; yes, too, if there was no time to tell."""
    choices, constraints = _with(question, kept)
    goal = _easiest(constraints)
    found = planner.search(choices, constraints, goal, seconds=seconds, front=False, first=True)
    return bool(found.best) or not found.certificate.complete


def _easiest(constraints: Constraints) -> str:
    """The goal that finds a plan within the limits soonest."""
    return "memory" if constraints.limits.memory is not None else "latency"


def _with(question: Question, kept: Sequence[str]) -> tuple[SearchSpace, Constraints]:
    """The question with only these constraints."""
    choices, constraints = question.choices, question.constraints
    given_up = [name for name in constraints.fixed if name not in kept and name not in ("ranks", "batch_size")]
    choices = choices.without(*given_up)
    if "ranks" not in kept:
        most = max(choices.ranks)
        choices = replace(choices, ranks=[*choices.ranks, *(most * n for n in MORE if most * n <= question.most_ranks)])
        if choices.mesh is not None and "mesh" not in kept:
            choices = replace(choices, mesh=None)
    if "batch_size" not in kept:
        least = min(choices.batch_sizes)
        smaller = [least // n for n in MORE if least // n]
        choices = replace(choices, batch_sizes=sorted({*choices.batch_sizes, *smaller, 1}))
    limits = Limits(**{name: getattr(constraints.limits, name) for name in LIMITS if name in kept})
    fixed = {name: wanted for name, wanted in constraints.fixed.items() if name in kept}
    return choices, Constraints(limits, fixed)


def _ways(planner: Planner, question: Question, conflict: Sequence[str], seconds: float) -> Iterator[Relaxation]:
    """For each constraint of the conflict, the plan that gives up least of it and keeps all others."""
    everything = _all_names(question)
    for name in conflict:
        kept = [other for other in everything if other != name]
        choices, constraints = _with(question, kept)
        if name == "ranks":
            tried: Sequence[Mapping] = [{"ranks": [n]} for n in choices.ranks if n not in question.choices.ranks]
        elif name == "batch_size":
            smaller = [n for n in choices.batch_sizes if n not in question.choices.batch_sizes]
            tried = [{"batch_sizes": [n]} for n in reversed(smaller)]
        else:
            tried = [{}]
        goal = name if name in ("memory", "latency") else question.goal
        for change in tried:
            changed = replace(choices, **change)
            any_way = planner.search(
                changed, constraints, _easiest(constraints), seconds=seconds, front=False, keep=1, first=True
            )
            if any_way.best:
                found = planner.search(changed, constraints, goal, seconds=seconds, front=False, keep=1)
                best = found.best[0] if found.best else any_way.best[0]
                yield Relaxation(name, instead(name, best, question), best)
                break


def instead(name: str, plan: Estimate, question: Question) -> str:
    """What a plan that gives up a constraint needs of it, in the place of what was asked for, as people read it."""
    limits = question.constraints.limits
    if name in LIMITS:
        need = replace(limits, **{name: 1.0}).measured(plan)[name]
        return f"{name} {limits.said(name, need)} instead of {limits.said(name)}"
    if name == "ranks":
        return f"{plan.candidate.ranks} ranks instead of {max(question.choices.ranks)}"
    if name == "batch_size":
        return f"a batch of {plan.candidate.batch_size} instead of {min(question.choices.batch_sizes)}"
    return f"another {name.replace('_', ' ')} than {question.constraints.said(name).removeprefix(name + ' ')}"


def _far(way: Relaxation, question: Question) -> float:
    """How much is given up: the nearest way first."""
    limits, plan = question.constraints.limits, way.plan
    if way.gives_up in LIMITS:
        need = replace(limits, **{way.gives_up: 1.0}).measured(plan)[way.gives_up]
        return need / getattr(limits, way.gives_up)
    if way.gives_up == "ranks":
        return plan.candidate.ranks / max(question.choices.ranks)
    if way.gives_up == "batch_size":
        return min(question.choices.batch_sizes) / plan.candidate.batch_size
    return 1.0
