"""Why nothing fits: the smallest set of constraints that cannot be kept together, and what would help."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from spmd_engine.planning.search.estimate import Estimate
from spmd_engine.planning.search.search import LIMITS, Constraints, Limits, Planner
from spmd_engine.planning.search.search_space import SearchSpace

MORE = (2, 4, 8)  #: factors by which ranks are increased, or the batch reduced, where those are given up


@dataclass(frozen=True)
class Relaxation:
    """A plan that fits if one constraint is given up as far as the plan needs."""

    gives_up: str  #: the name of the constraint
    text: str  #: what the plan needs instead of it
    plan: Estimate


@dataclass(frozen=True)
class Conflict:
    """Constraints that cannot all be kept together, while each smaller set of them can; or, if it is not ``decided``,
    constraints that no plan was found to keep before time ran out."""

    constraints: Sequence[str]
    relaxations: Sequence[Relaxation]  #: the smallest first
    nearest: Estimate | None = None  #: the plan closest to the limits that keeps all else
    decided: bool = True


@dataclass(frozen=True)
class Question:
    """The input of a search."""

    space: SearchSpace
    constraints: Constraints
    goal: str
    most_ranks: int  #: of the machine


def conflict_of(planner: Planner, question: Question, seconds: float = 20.0) -> Conflict:
    """Why nothing fits. Sets of constraints are tried, the smallest first, each by a search that ends with the first
    plan that keeps them."""
    names, share = _all_names(question), seconds / 12
    sets = (kept for size in range(1, len(names)) for kept in combinations(names, size))
    smallest = next((kept for kept in sets if not _possible(planner, question, kept, share)), names)
    relaxations = _relaxations(planner, question, smallest, share)
    return Conflict(smallest, sorted(relaxations, key=lambda relaxation: _distance(relaxation, question)))


def closest(planner: Planner, question: Question, seconds: float = 20.0) -> Sequence[Estimate]:
    """The plans that need least memory of those that keep the fixed space, without limits."""
    unlimited = replace(question.constraints, limits=Limits())
    return planner.search(question.space, unlimited, "memory", seconds=seconds / 12, front=False).best


def _all_names(question: Question) -> list[str]:
    names = list(question.constraints.names)
    return names + [name for name in ("ranks", "batch_size") if name not in names]


def _possible(planner: Planner, question: Question, kept: Sequence[str], seconds: float) -> bool:
    """Whether any plan keeps these constraints, without all others; True also if time ran out."""
    space, constraints = _with(question, kept)
    goal = _easiest(constraints)
    result = planner.search(space, constraints, goal, seconds=seconds, front=False, first=True)
    return bool(result.best) or not result.certificate.complete


def _easiest(constraints: Constraints) -> str:
    """The goal by which a search finds a plan within the limits soonest."""
    return "memory" if constraints.limits.memory is not None else "latency"


def _with(question: Question, kept: Sequence[str]) -> tuple[SearchSpace, Constraints]:
    """The search space and the constraints, with only these constraints kept."""
    space, constraints = question.space, question.constraints
    given_up = [name for name in constraints.fixed if name not in kept and name not in ("ranks", "batch_size")]
    space = space.without(*given_up)
    if "ranks" not in kept:
        most = max(space.ranks)
        space = replace(space, ranks=[*space.ranks, *(most * n for n in MORE if most * n <= question.most_ranks)])
        if space.mesh is not None and "mesh" not in kept:
            space = replace(space, mesh=None)
    if "batch_size" not in kept:
        least = min(space.batch_sizes)
        smaller = [least // n for n in MORE if least // n]
        space = replace(space, batch_sizes=sorted({*space.batch_sizes, *smaller, 1}))
    limits = Limits(**{name: getattr(constraints.limits, name) for name in LIMITS if name in kept})
    fixed = {name: wanted for name, wanted in constraints.fixed.items() if name in kept}
    return space, Constraints(limits, fixed)


def _relaxations(planner: Planner, question: Question, conflict: Sequence[str], seconds: float) -> Iterator[Relaxation]:
    """For each constraint of the conflict, the plan that needs the smallest relaxation of it and keeps all others."""
    everything = _all_names(question)
    for name in conflict:
        kept = [other for other in everything if other != name]
        space, constraints = _with(question, kept)
        if name == "ranks":
            tried: Sequence[Mapping] = [{"ranks": [n]} for n in space.ranks if n not in question.space.ranks]
        elif name == "batch_size":
            smaller = [n for n in space.batch_sizes if n not in question.space.batch_sizes]
            tried = [{"batch_sizes": [n]} for n in reversed(smaller)]
        else:
            tried = [{}]
        goal = name if name in ("memory", "latency") else question.goal
        for change in tried:
            changed = replace(space, **change)
            options = {"seconds": seconds, "front": False, "keep": 1}
            first = planner.search(changed, constraints, _easiest(constraints), first=True, **options)
            if first.best:
                best = (planner.search(changed, constraints, goal, **options).best or first.best)[0]
                yield Relaxation(name, instead(name, best, question), best)
                break


def instead(name: str, plan: Estimate, question: Question) -> str:
    """What a plan that gives up a constraint needs instead of it, as text."""
    limits = question.constraints.limits
    if name in LIMITS:
        need = replace(limits, **{name: 1.0}).measured(plan)[name]
        return f"{name} {limits.shown(name, need)} instead of {limits.shown(name)}"
    if name == "ranks":
        return f"{plan.candidate.ranks} ranks instead of {max(question.space.ranks)}"
    if name == "batch_size":
        return f"a batch of {plan.candidate.batch_size} instead of {min(question.space.batch_sizes)}"
    return f"another {name.replace('_', ' ')} than {question.constraints.shown(name).removeprefix(name + ' ')}"


def _distance(relaxation: Relaxation, question: Question) -> float:
    """The factor by which the constraint is relaxed."""
    limits, plan, name = question.constraints.limits, relaxation.plan, relaxation.gives_up
    if name in LIMITS:
        need = replace(limits, **{name: 1.0}).measured(plan)[name]
        return need / getattr(limits, name)
    if name == "ranks":
        return plan.candidate.ranks / max(question.space.ranks)
    if name == "batch_size":
        return min(question.space.batch_sizes) / plan.candidate.batch_size
    return 1.0
