"""The planner's search: branch and bound over the search space, with a certificate, and the reasons for what it finds.

Each candidate has two lower bounds. The first holds for every sharding of its layers into as many parts, and needs dry
runs of unsharded layers only. The second holds for every division into stages, and needs dry runs of layers that are
sharded as in the candidate. The candidate with the least bound comes next: its second bound is computed, or it is
estimated. The search ends when the next bound is no better than the best plans found; then no other candidate is
better. If time runs out before, the certificate says by how much another candidate could still be better.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import combinations, takewhile
from math import inf, isfinite
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from spmd_engine.configuration import Configuration, not_in_json, setting
from spmd_engine.errors import UsageError, counted
from spmd_engine.planning.machine.machine import Machine
from spmd_engine.planning.search.cost_model import CostModel
from spmd_engine.planning.search.estimate import Bound, Estimate
from spmd_engine.planning.search.improve import Budget
from spmd_engine.planning.search.search_space import Candidate, SearchSpace, broken_choices, candidates
from spmd_engine.units import BYTES, SECONDS, readable_bytes, readable_rate, readable_seconds

if TYPE_CHECKING:
    from spmd_engine.planning.plan_result import Request

# --- Goals of a search, and constraints on plans


GOALS = ("latency", "throughput", "memory", "balance", "communication")


def objective(goal: str, estimate: Estimate) -> tuple[float, ...]:
    """What a search minimizes for a goal, or for a limit, of LIMITS; the second number decides between equals."""
    return {
        "latency": (estimate.seconds, estimate.memory),
        "throughput": (-estimate.candidate.batch_size / estimate.seconds, estimate.memory),
        "memory": (estimate.memory, estimate.seconds),
        "balance": (round(estimate.imbalance, 2), estimate.seconds),
        "communication": (estimate.sent, estimate.seconds),
        "bandwidth": (estimate.bandwidth, estimate.seconds),
        "compute": (estimate.work, estimate.seconds),
    }[goal]


def objective_bound(goal: str, candidate: Candidate, bound: Bound) -> tuple[float, ...]:
    """A lower bound of the objective over all divisions of a candidate into stages."""
    seconds, memory = bound
    return {
        "latency": (seconds, memory),
        "throughput": (-candidate.batch_size / seconds if seconds else -inf, memory),
        "memory": (memory, seconds),
        "balance": (1.0, seconds),
    }.get(goal, (0.0, seconds))


@dataclass(frozen=True)
class Limits(Configuration):
    """Upper limits; None: no limit. Texts with units are values as well: "24GiB", "100ms".

    Raises UsageError for a limit that is not above 0.
    """

    memory: float | None = setting(None, unit=BYTES)  #: bytes per rank
    latency: float | None = setting(None, unit=SECONDS)  #: seconds per step
    bandwidth: float | None = setting(None, unit=BYTES)  #: bytes per second that a rank sends
    compute: float | None = setting(None, unit=SECONDS)  #: seconds of work of a rank per step
    #: the memory of unequal ranks as text; then memory is shown as the largest share of its own that a rank needs
    of_each_rank: str = not_in_json("")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.names:
            if not (limit := getattr(self, name)) > 0:
                raise UsageError(f"--{name} {limit:g}: it must be above 0")

    @property
    def names(self) -> list[str]:
        """The names of the limits that are set."""
        return [name for name in LIMITS if getattr(self, name) is not None]

    def memory_by_rank(self, machine: Machine) -> list[float]:
        """Bytes that each rank of the machine may hold."""
        sizes = [machine.memory_of(rank) for rank in range(machine.ranks)]
        return [min(self.memory or size, size) for size in sizes]

    def with_memory_of(self, machine: Machine) -> Limits:
        """The limits with the memory of the machine's ranks. For unequal ranks it is the mean, since they may store
        state unevenly; the evaluation of a plan checks whether each rank has room."""
        sizes = self.memory_by_rank(machine)
        if not machine.heterogeneous:
            return replace(self, memory=min(sizes))
        of_each = f"100% of each rank's ({readable_bytes(min(sizes))} to {readable_bytes(max(sizes))})"
        return replace(self, memory=fmean(sizes), of_each_rank=of_each)

    def measured(self, estimate: Estimate) -> dict[str, float]:
        """What a candidate needs, for each limit that is set."""
        return {name: getattr(estimate, LIMITS[name]) for name in self.names}

    def broken(self, estimate: Estimate) -> frozenset[str]:
        """The names of the limits that a candidate breaks."""
        needs = self.measured(estimate)
        return frozenset(name for name, need in needs.items() if need > getattr(self, name) * (1 + 1e-9))

    def excess(self, estimate: Estimate) -> float:
        """The largest need of a candidate as a part of its limit."""
        return max((need / getattr(self, name) for name, need in self.measured(estimate).items()), default=0.0)

    def surely_broken(self, bound: Bound) -> bool:
        """Whether every division of a candidate breaks a limit."""
        seconds, memory = bound
        return memory > (self.memory or inf) or seconds > (self.latency or inf)

    def shown(self, name: str, number: float | None = None) -> str:
        """A limit, or a need in its unit, as text."""
        limit = getattr(self, name)
        if name == "memory" and self.of_each_rank:
            return self.of_each_rank if number is None else f"{number / limit:.0%}"
        readable = {"memory": readable_bytes, "bandwidth": readable_rate}.get(name, readable_seconds)
        return readable(limit if number is None else number)


#: The limits, with the field of an estimate that each bounds.
LIMITS = {"memory": "memory", "latency": "seconds", "bandwidth": "bandwidth", "compute": "work"}


# --- The search


SHOWN_PLANS = 5  #: the best plans that a search keeps
SEARCH_SHARE = 0.75  #: share of its budget after which a search ends that has found a plan
FRONT_ESTIMATES = 100  #: most estimates of further plans on the Pareto front


@dataclass(frozen=True)
class SearchResult:
    """The result of a search, with a certificate: how far the best plan is from the best possible, by estimates."""

    best: Sequence[Estimate] = ()  #: the best first; empty if no candidate keeps the limits
    front: Sequence[Estimate] = ()  #: the Pareto front of seconds and memory
    reached: float = 0.0  #: the objective of the best plan
    bound: float = 0.0  #: no candidate has a smaller objective
    candidates: int = 1  #: in the search space
    excluded: int = 0  #: candidates whose bounds break a limit
    estimated: int = 1
    complete: bool = True  #: whether it ended before its budget was spent
    near: Sequence[Estimate] = ()  #: if none is found: the estimated one that exceeds the limits least

    @property
    def gap(self) -> float:
        """The share by which another candidate might be better: 0 if the best is proven."""
        return max(0.0, (self.reached - self.bound) / abs(self.reached)) if self.reached else 0.0

    @property
    def certificate(self) -> dict[str, Any]:
        """The certificate as JSON; null for what is not known."""
        known = {"gap": self.gap, "best": self.reached, "bound": self.bound}
        numbers = {name: float(number) if isfinite(number) else None for name, number in known.items()}
        counts = ("candidates", "excluded", "estimated", "complete")
        return numbers | {name: getattr(self, name) for name in counts}


class _Entry(NamedTuple):
    """A candidate that is not estimated yet; the smallest entry comes next."""

    least: tuple[float, ...]  #: the bound of the objective
    number: int  #: in the order of the search space
    candidate: Candidate
    bound: Bound
    first: bool  #: whether this is its first bound


def search(
    model: CostModel,
    space: SearchSpace,
    limits: Limits,
    goal: str,
    budget: Budget,
    *,
    front: bool = True,
    keep: int = SHOWN_PLANS,
    first: bool = False,
) -> SearchResult:
    """The best ``keep`` plans for a goal, within a share of the budget, or, while no plan is found, within all of it.

    If none was found by then, up to ``keep`` candidates are estimated nevertheless, or one if the budget is overdue,
    when not all have a bound. ``front``: also complete the Pareto front. ``first``: end with the first plan that keeps
    the limits, and with none when the budget is spent before all candidates have a bound.
    """
    soon = budget.part(SEARCH_SHARE)
    entries: list[_Entry] = []
    total = excluded = 0
    complete = True
    left: list[tuple[float, ...]] = []  # bounds of candidates that were not estimated
    for candidate in candidates(space):
        if first and not budget.left:
            return SearchResult([], [], inf, -inf, total, excluded, 0, False)
        total += 1
        entry = _bound(model, goal, candidate, total, limits, budget, first=model.shards_layers(candidate))
        if entry is None:
            excluded += 1
        else:
            entries.append(entry)
        if budget.overdue:
            left.append((-inf,))  # the rest has none
            complete = False
            break
    heapify(entries)
    second_bounds = sum(not entry.first for entry in entries)
    best: list[Estimate] = []
    estimates: dict[Candidate, Estimate | None] = {}
    while entries:
        entry = heappop(entries)
        candidate, late = entry.candidate, not soon.left
        done = first and best or len(best) == keep and entry.least >= objective(goal, best[-1])
        enough = len(estimates) >= (1 if budget.overdue else keep)
        given_up = late and enough and (best or not budget.left)
        if done or given_up:
            left.append(entry.least)
            complete = complete and bool(done)
            break
        if entry.first and late and second_bounds > len(estimates):
            left.append(entry.least)  # estimate candidates with a second bound, rather than compute more bounds
            complete = False
            continue
        if entry.first:
            second = _bound(model, goal, candidate, entry.number, limits, budget, first=False)
            if second is None:
                excluded += 1
            else:
                heappush(entries, second)
                second_bounds += 1
            continue
        estimate = estimates[candidate] = _estimate(model, candidate, limits, budget)
        if estimate is not None and not limits.broken(estimate):
            best = sorted([*best, estimate], key=lambda plan: objective(goal, plan))[:keep]
    reached = objective(goal, best[0])[0] if best else inf
    bound = min([reached, *(values[0] for values in left)])
    count = len(estimates)
    points = [plan for plan in estimates.values() if plan is not None and not limits.broken(plan)]
    if front and best:
        points += _extend_front(model, entries, points, limits, soon.part(most=FRONT_ESTIMATES))
    known = [plan for plan in estimates.values() if plan is not None]
    near = [] if best else sorted(known, key=limits.excess)[:1]
    return SearchResult(best, pareto(points), reached, bound, total, excluded, count, complete, near)


def _bound(
    model: CostModel, goal: str, candidate: Candidate, number: int, limits: Limits, budget: Budget, *, first: bool
) -> _Entry | None:
    """A candidate with its first bound, or its second; None if it is impossible or breaks a limit."""
    budget.spend()
    estimator = model.estimator(candidate, first)
    if estimator is None or limits.surely_broken(bound := estimator.bound()):
        return None
    return _Entry(objective_bound(goal, candidate, bound), number, candidate, bound, first)


def _estimate(model: CostModel, candidate: Candidate, limits: Limits, budget: Budget) -> Estimate | None:
    """The estimate with stages that fit, or with any if none do."""
    budget.spend()
    estimator = model.estimator(candidate)
    assert estimator is not None
    return estimator.estimate(limits.memory or inf) or estimator.estimate()


def _extend_front(
    model: CostModel, entries: Sequence[_Entry], points: Sequence[Estimate], limits: Limits, budget: Budget
) -> Iterator[Estimate]:
    """Estimates of candidates that may belong to the front: no plan beats both of their bounds."""
    front = pareto(points)
    for _, _, candidate, (seconds, memory), _ in sorted(entries, key=lambda entry: entry.bound[1]):
        if not budget.left:
            return
        if any(plan.seconds <= seconds and plan.memory <= memory for plan in front):
            continue
        estimate = _estimate(model, candidate, limits, budget)
        if estimate is not None and not limits.broken(estimate):
            front = pareto([*front, estimate])
            yield estimate


def thinned(front: Sequence[Estimate], most: int = 8) -> Sequence[Estimate]:
    """At most ``most`` plans of a front, including its ends."""
    if len(front) <= most:
        return front
    return [front[round(k * (len(front) - 1) / (most - 1))] for k in range(most)]


def pareto(estimates: Sequence[Estimate]) -> list[Estimate]:
    """The estimates that no other estimate beats in both seconds and memory, by seconds."""
    front: list[Estimate] = []
    for estimate in sorted(estimates, key=lambda estimate: (estimate.seconds, estimate.memory)):
        if not front or estimate.memory < front[-1].memory:
            front.append(estimate)
    return front


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
