"""Why nothing fits: the smallest set of constraints that cannot be kept together, and what would help."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, takewhile

from spmd_engine.planning.search.budget import Budget
from spmd_engine.planning.search.estimate import Estimate
from spmd_engine.planning.search.search import LIMITS, Constraints, Limits, Planner
from spmd_engine.planning.search.search_space import SearchSpace

MORE = (2, 4, 8)  #: factors by which ranks are increased, or the batch is reduced, if that constraint is given up


@dataclass(frozen=True)
class Relaxation:
    """A plan that fits if one constraint is given up as far as the plan needs."""

    gives_up: str  #: the name of the constraint
    text: str  #: what the plan needs instead of the constraint
    factor: float  #: by which the constraint is relaxed
    plan: Estimate


@dataclass(frozen=True)
class Conflict:
    """Constraints that cannot be kept together, while each smaller set of them can; or, if not ``decided``, constraints
    for which no plan was found before time ran out."""

    constraints: Sequence[str]
    relaxations: Sequence[Relaxation]  #: the smallest first
    nearest: Estimate | None = None  #: the plan closest to the limits that keeps all other constraints
    decided: bool = True
    helps: str = ""  #: the option with which a given mesh would keep the limits


@dataclass(frozen=True)
class Question:
    """The input of a search."""

    space: SearchSpace
    constraints: Constraints
    goal: str
    most_ranks: int  #: the most ranks of a relaxation


def conflict_of(planner: Planner, question: Question, budget: Budget, known: Sequence[Estimate] = ()) -> Conflict:
    """Why nothing fits. Sets of constraints are tried, the smallest first, each by a search that ends with the first
    plan that keeps them; none if one of the ``known`` plans of the space does. When the budget is spent, a part of the
    set may be a conflict as well, and relaxations may lack."""
    names, share = _list_names(question), budget.left / 12
    broken = [question.constraints.broken(plan.candidate, plan) for plan in known]
    sets = (subset for size in range(1, len(names)) for subset in combinations(names, size))
    sets = (subset for subset in sets if all(names_of_plan & set(subset) for names_of_plan in broken))
    tried = takewhile(lambda _: budget.left > 0, sets)
    smallest = next((subset for subset in tried if not _is_possible(planner, question, subset, share)), names)
    relaxations = _relax(planner, question, smallest, share, budget)
    return Conflict(smallest, sorted(relaxations, key=lambda relaxation: relaxation.factor))


def closest(planner: Planner, question: Question, budget: Budget) -> Sequence[Estimate]:
    """The plans of the search space that need least memory, without limits."""
    unlimited, left = replace(question.constraints, limits=Limits()), budget.left
    return planner.search(question.space, unlimited, "memory", seconds=left / 12, most=left, front=False).best


def _list_names(question: Question) -> list[str]:
    names = list(question.constraints.names)
    return names + [name for name in ("ranks", "batch_size") if name not in names]


def _is_possible(planner: Planner, question: Question, names: Sequence[str], seconds: float) -> bool:
    """Whether any plan keeps these constraints, without the others; True also if time ran out."""
    space, constraints = _keep_only(question, names)
    goal = _easiest_goal(constraints)
    result = planner.search(space, constraints, goal, seconds=seconds, front=False, first=True)
    return bool(result.best) or not result.certificate.complete


def _easiest_goal(constraints: Constraints) -> str:
    """The goal by which a search finds a plan within the limits soonest."""
    return "memory" if constraints.limits.memory is not None else "latency"


def _keep_only(question: Question, names: Sequence[str]) -> tuple[SearchSpace, Constraints]:
    """The search space and the constraints, with only the constraints of these ``names``."""
    space, constraints = question.space, question.constraints
    given_up = [name for name in constraints.fixed if name not in names and name not in ("ranks", "batch_size")]
    space = space.without(*given_up)
    if "ranks" not in names:
        most = max(space.ranks)
        space = replace(space, ranks=[*space.ranks, *(most * n for n in MORE if most * n <= question.most_ranks)])
        if space.mesh is not None and "mesh" not in names:
            space = replace(space, mesh=None)
    if "batch_size" not in names:
        least = min(space.batch_sizes)
        smaller = [least // n for n in MORE if least // n]
        space = replace(space, batch_sizes=sorted({*space.batch_sizes, *smaller, 1}))
    limits = Limits(**{name: getattr(constraints.limits, name) for name in LIMITS if name in names})
    fixed = {name: wanted for name, wanted in constraints.fixed.items() if name in names}
    return space, Constraints(limits, fixed)


def _relax(
    planner: Planner, question: Question, conflict: Sequence[str], seconds: float, budget: Budget
) -> Iterator[Relaxation]:
    """For each constraint of the conflict, the plan that keeps all others and needs the smallest relaxation."""
    all_names = _list_names(question)
    for name in conflict:
        others = [other for other in all_names if other != name]
        space, constraints = _keep_only(question, others)
        if name == "ranks":
            changes: Sequence[Mapping] = [{"ranks": [n]} for n in space.ranks if n not in question.space.ranks]
        elif name == "batch_size":
            smaller = [n for n in space.batch_sizes if n not in question.space.batch_sizes]
            changes = [{"batch_sizes": [n]} for n in reversed(smaller)]
        else:
            changes = [{}]
        goal = name if name in ("memory", "latency") else question.goal
        for change in changes if budget.left > 0 else ():
            changed = replace(space, **change)
            options = {"seconds": seconds, "front": False, "keep": 1}
            first = planner.search(changed, constraints, _easiest_goal(constraints), first=True, **options)
            if first.best:
                best = (planner.search(changed, constraints, goal, **options).best or first.best)[0]
                yield relaxed(name, best, question)
                break


def relaxed(name: str, plan: Estimate, question: Question) -> Relaxation:
    """The relaxation of a constraint to what a plan needs that gives it up."""
    limits, space, factor = question.constraints.limits, question.space, 1.0
    if name in LIMITS:
        need = replace(limits, **{name: 1.0}).measured(plan)[name]
        text = f"{name} {limits.shown(name, need)} instead of {limits.shown(name)}"
        factor = need / getattr(limits, name)
    elif name == "ranks":
        text = f"{plan.candidate.ranks} ranks instead of {max(space.ranks)}"
        factor = plan.candidate.ranks / max(space.ranks)
    elif name == "batch_size":
        text = f"a batch of {plan.candidate.batch_size} instead of {min(space.batch_sizes)}"
        factor = min(space.batch_sizes) / plan.candidate.batch_size
    else:
        given_up = question.constraints.shown(name).removeprefix(name + " ")
        text = f"another {name.replace('_', ' ')} than {given_up}"
    return Relaxation(name, text, factor, plan)
