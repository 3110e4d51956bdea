"""Why a plan is chosen; and why nothing fits: constraints that cannot be kept together, and what would help."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, takewhile
from typing import TYPE_CHECKING

from spmd_engine.errors import counted
from spmd_engine.planning.search.cost_model import CostModel
from spmd_engine.planning.search.estimate import Estimate
from spmd_engine.planning.search.improve import Budget
from spmd_engine.planning.search.search import LIMITS, SHOWN_PLANS, Limits, SearchResult, search
from spmd_engine.planning.search.search_space import Candidate, SearchSpace, broken_choices

if TYPE_CHECKING:
    from spmd_engine.planning.plan_result import Request

# --- What each choice of a plan gains over the nearest alternatives


def gains(
    request: Request,
    limits: Limits,
    chosen: Estimate,
    plans: Mapping[Candidate, Estimate],
    others: Sequence[tuple[str, Estimate | None]],
) -> Iterator[str]:
    """What a plan gains over simulated ``plans``, the best first, and over ``others``, with one other choice each; one
    that is not simulated is compared with the estimate of the chosen plan."""
    yield from _gain_of_order(chosen, plans)
    yield from _gains_of_shares(chosen, plans)
    goal, simulated = request.goal, dict[Candidate, Estimate]()  # by candidate without shares
    for plan in plans.values():
        simulated.setdefault(plan.candidate.plain, plan)
    for choice, estimate in others:
        if estimate is None:
            yield f"{choice}: the model or the batch cannot be sharded so"
            continue
        other = simulated.get(estimate.candidate.plain, estimate)
        if other.simulated:
            yield _explain_gain(choice, chosen, other, limits, goal)
        else:  # which errs alike for both plans
            yield f"{_explain_gain(choice, chosen.closed or chosen, other, limits, goal)} (by estimates of both)"


def _gain_of_order(chosen: Estimate, plans: Mapping[Candidate, Estimate]) -> Iterator[str]:
    """What the order of ranks gains over that of the machine."""
    usual = replace(chosen.candidate.plain, stages=None)
    alike = [plan for plan in plans.values() if replace(plan.candidate.plain, stages=None) == usual]
    others = [plan.seconds for plan in alike if plan.candidate.order is None]
    if chosen.candidate.order and others:
        slower, order = min(others) / chosen.seconds - 1, ",".join(map(str, chosen.candidate.order))
        yield f"rank order {order}, not as the machine lists them: that would take {slower:+.1%} time"


def _gains_of_shares(chosen: Estimate, plans: Mapping[Candidate, Estimate]) -> Iterator[str]:
    """What uneven shares gain over even ones."""
    for name in ("shares", "state_shares"):
        other = plans.get(replace(chosen.candidate, **{name: None, "state_shares": None}))
        if (shares := getattr(chosen.candidate, name)) and other is not None:
            slower, larger = other.seconds / chosen.seconds - 1, other.memory / chosen.memory - 1
            choice = f"{name.replace('_', ' ')} {shares}, not even"
            yield f"{choice}: that would take {slower:+.1%} time, and {larger:+.1%} of the memory that ranks have"


def _explain_gain(choice: str, chosen: Estimate, other: Estimate, limits: Limits, goal: str) -> str:
    if broken := limits.broken(other):
        needs = limits.measured(other)
        shown = " and ".join(f"{limits.shown(name, needs[name])} of {name}" for name in sorted(broken))
        return f"{choice}: that would need {shown}"
    slower, larger = other.seconds / chosen.seconds - 1, other.memory / chosen.memory - 1
    gains = {part: other.parts[part] - chosen.parts[part] for part in other.parts}
    largest_gain = max(gains, key=lambda part: gains[part])
    cause = f" (by estimates, most of it {largest_gain})" if slower > 0.002 and gains[largest_gain] > 0 else ""
    sent = f"send {other.sent / chosen.sent - 1:+.1%} bytes, " if goal == "communication" and chosen.sent else ""
    return f"{choice}: that would {sent}take {slower:+.1%} time{cause}, and {larger:+.1%} memory"


# --- The smallest set of constraints that cannot be kept together, and what would help


MORE = (2, 4, 8)  #: factors by which ranks are increased, or the batch is reduced, if that constraint is given up
MOST_EVALUATIONS = 4_000  #: most evaluations of each search
SIZES = ("ranks", "batch_size")  #: constraints that every request has


@dataclass(frozen=True)
class Conflict:
    """Constraints that cannot be kept together, while each smaller set of them can; or, if not ``decided``, constraints
    for which no plan was found before its budget was spent."""

    constraints: Sequence[str] = ()
    #: for a constraint that is given up, what a plan needs instead, as text, and the plan; the smallest change first
    relaxations: Mapping[str, tuple[str, Estimate]] = field(default_factory=dict)
    nearest: Estimate | None = None  #: the plan closest to the limits that keeps all other constraints
    decided: bool = True
    helps: str = ""  #: the option with which a given mesh would keep the limits


@dataclass(frozen=True)
class Constraints:
    """The limits and fixed choices of a request, on plans of a space, with the budget of searches for such plans."""

    model: CostModel
    request: Request
    space: SearchSpace
    limits: Limits
    budget: Budget

    @property
    def names(self) -> list[str]:
        fixed = self.request.fixed
        return [*self.limits.names, *fixed, *(name for name in SIZES if name not in fixed)]

    def only(self, names: Sequence[str]) -> Constraints:
        """The constraints of these ``names``."""
        space = replace(self.space, **{name: None for name in self.request.fixed if name not in names})
        if "ranks" not in names:
            most = max(space.ranks)
            more = (most * n for n in MORE if most * n <= self.request.most_ranks)
            space = replace(space, ranks=[*space.ranks, *more], mesh=space.mesh if "mesh" in names else None)
        if "batch_size" not in names:
            least = min(space.batch_sizes)
            smaller = [least // n for n in MORE if least // n]
            space = replace(space, batch_sizes=sorted({*space.batch_sizes, *smaller, 1}))
        limits = replace(self.limits, **dict.fromkeys(LIMITS.keys() - {*names}))
        return replace(self, space=space, limits=limits)

    def search(self, goal: str = "", keep: int = 1) -> SearchResult:
        """A search for the best plan; without a ``goal``, for any plan that keeps the constraints."""
        easiest = "memory" if self.limits.memory is not None else "latency"
        budget, options = self.budget.part(most=MOST_EVALUATIONS), {"keep": keep, "first": not goal, "front": False}
        return search(self.model, self.space, self.limits, goal or easiest, budget, **options)

    def relaxed(self, name: str, plan: Estimate) -> tuple[str, float]:
        """What a plan needs that gives up a constraint, as text, and the factor by which that relaxes it."""
        candidate, limits = plan.candidate, self.limits
        if name in LIMITS:
            need = replace(limits, **{name: 1.0}).measured(plan)[name]
            text = f"{name} {limits.shown(name, need)} instead of {limits.shown(name)}"
            return text, need / getattr(limits, name)
        if name == "ranks":
            most = max(self.space.ranks)
            return f"{counted(candidate.ranks, 'rank')} instead of {most}", candidate.ranks / most
        if name == "batch_size":
            least = min(self.space.batch_sizes)
            return f"a batch of {candidate.batch_size} instead of {least}", least / candidate.batch_size
        given_up = self.request.constraint_text(name, limits).removeprefix(name + " ")
        return f"another {name.replace('_', ' ')} than {given_up}", 1.0


def conflict_of(constraints: Constraints, known: Sequence[Estimate] = ()) -> Conflict:
    """Why nothing fits. Sets of constraints are tried, the smallest first, each by a search that ends with the first
    plan that keeps them; none if one of the ``known`` plans of the space does. When the budget is spent, a part of the
    set may be a conflict as well, and relaxations may lack."""
    names, limits, fixed = constraints.names, constraints.limits, constraints.request.fixed
    broken = [limits.broken(plan) | broken_choices(plan.candidate, fixed) for plan in known]
    sets = (subset for size in range(1, len(names)) for subset in combinations(names, size))
    sets = (subset for subset in sets if all(names_of_plan & set(subset) for names_of_plan in broken))
    tried = takewhile(lambda _: constraints.budget.left > 0, sets)
    smallest = next((subset for subset in tried if not _are_possible(constraints.only(subset))), names)
    relaxations = sorted(_relax(constraints, smallest), key=lambda way: way[0])
    ways = {name: (text, plan) for _, name, text, plan in relaxations}
    # A search that ends with its budget leaves in the set what may be needless: a limit that no known plan breaks, and
    # without which no plan is found either.
    needed = [name for name in smallest if name not in limits.names or name in ways or any(name in b for b in broken)]
    return Conflict(tuple(needed) or smallest, ways)


def _are_possible(constraints: Constraints) -> bool:
    """Whether any plan keeps the constraints; True also if the budget was spent."""
    result = constraints.search(keep=SHOWN_PLANS)
    return bool(result.best) or not result.complete


def _relax(constraints: Constraints, conflict: Sequence[str]) -> Iterator[tuple[float, str, str, Estimate]]:
    """For each constraint of the conflict, the plan that keeps all others and needs the smallest relaxation: the factor
    of the relaxation, the constraint, what the plan needs instead, and the plan."""
    space = constraints.space
    for name in conflict:
        others = constraints.only([other for other in constraints.names if other != name])
        wider, changes = others.space, [others.space]
        if name == "ranks":
            changes = [replace(wider, ranks=[n]) for n in wider.ranks if n not in space.ranks]
        elif name == "batch_size":
            smaller = [n for n in wider.batch_sizes if n not in space.batch_sizes]
            changes = [replace(wider, batch_sizes=[n]) for n in reversed(smaller)]
        goal = name if name in LIMITS else constraints.request.goal
        for changed in changes if constraints.budget.left > 0 else ():
            tried = replace(others, space=changed)
            if first := tried.search().best:
                best = tried.search(goal).best or first
                text, factor = constraints.relaxed(name, best[0])
                yield factor, name, text, best[0]
                break
