"""The search for the plan of a request: branch and bound finds where to start, simulations improve on it.

A candidate is estimated in closed form, under a lower bound. The best estimated ones are simulated, from the dry run of
their whole step, and so are their neighbours, until none is better. What a plan may do where nothing else fits has
starts of its own: a space with offloading, and stages of different sizes or a helper rank, which are only simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import takewhile
from math import inf
from time import perf_counter
from typing import Any

from spmd_engine.axes import axes_text
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.errors import SpmdError, UsageError
from spmd_engine.models import Model
from spmd_engine.planning.dry_run.step_analysis import StepAnalysis
from spmd_engine.planning.machine.machine import Machine
from spmd_engine.planning.plan_result import FALLBACKS, PlanResult, Request
from spmd_engine.planning.search import neighbours
from spmd_engine.planning.search.cost_model import with_even_vocabulary
from spmd_engine.planning.search.estimate import Estimate
from spmd_engine.planning.search.improve import SIMULATION, Budget, OutOfTime, improved
from spmd_engine.planning.search.search import (
    LIMITS,
    SHOWN_PLANS,
    Conflict,
    Constraints,
    Limits,
    SearchResult,
    conflict_of,
    gains,
    objective,
    pareto,
    search,
    thinned,
)
from spmd_engine.planning.search.search_space import Candidate, SearchSpace, broken_choices
from spmd_engine.planning.simulator.step_evaluation import PlanEvaluation, evaluate_step
from spmd_engine.units import readable_bytes, readable_seconds

EVALUATIONS = 450_000  #: evaluations of a request, as ``Budget`` counts them
MOST_TO_SIMULATE = 20_000  #: layers times micro-batches that fill the pipeline; larger steps are only estimated
ORDER_SHARE = 0.25  #: share of the evaluations for trying orders of unequal ranks
FIRST_SHARE = 0.75  #: share of the budget for the search without offloading, if one with it may follow
OFFLOAD_SHARE = 0.5  #: share of what is left for a search with offloading where nothing fits without
CLOSEST_SHARE = 0.25  #: share of what is left for simulating the closest plans
MOST_CLOSEST = 16_000  #: evaluations of the search for them
MOST_SEARCHES = 4  #: searches at most; each corrects the limits by the errors of the estimates before
MOST_UNLIMITED = 500  #: evaluations of the search for the best plan without limits of memory, also when time ran out

Explain = Callable[[], Conflict]  #: why a search found no plan


def evaluate_plan(
    model: Model, machine: Machine, candidate: Candidate, base: ParallelConfig, **options: Any
) -> PlanEvaluation:
    """Analyze and simulate the step of a candidate; ``options`` go to ``evaluate_step``."""
    composition = candidate.composition(base)
    return evaluate_step(
        model, machine, candidate.mesh, composition, candidate.batch_size, candidate.micro_batches, **options
    )


class PlanSearch:
    """The search for the plan of a request, with the plans that it has simulated, each once."""

    def __init__(self, request: Request) -> None:
        self.request, self._began = request, perf_counter()
        self.budget, self.orders_left = Budget(EVALUATIONS, request.seconds), ORDER_SHARE * EVALUATIONS
        machine = request.machine.with_ranks(max(request.ranks))
        self.limits, self.heterogeneous = request.limits.with_memory_of(machine), machine.heterogeneous
        if not isinstance(request.base.storage.overlap, int):
            raise UsageError(f"--overlap-layers {request.base.overlap_layers} has ranges: give --mesh, or a number")
        sizes, base = (request.ranks, request.batch_sizes, request.machine.nodes[0].ranks), request.base
        given = {"axes": request.axes, "offload": (base.offload,), "base": base, **request.fixed}
        self.space = SearchSpace(request.model, *sizes, **given)
        self.model = request.cost_model()
        self.plans: dict[Candidate, Estimate] = {}  # simulated in the present search, with even vocabularies
        self._scores: dict[Candidate, tuple[float, ...]] = {}
        self._closed: dict[Candidate, Estimate] = {}
        self._evaluations: dict[tuple[Candidate, bool], PlanEvaluation | None] = {}
        self._analyses: dict[tuple[Candidate, bool], StepAnalysis] = {}

    # --- plans, each estimated and simulated once

    def estimate(self, candidate: Candidate) -> Estimate | None:
        """The estimate in closed form; None if the model cannot be sharded so."""
        self.budget.spend()
        estimator = self.model.estimator(candidate)
        estimate = estimator.estimate() if estimator is not None else None
        if estimate is not None:
            self._closed[estimate.candidate] = estimate
        return estimate

    def plan(self, candidate: Candidate) -> Estimate:
        """The simulated plan of a candidate that can be estimated."""
        if candidate not in self.plans:
            closed = self._closed.get(candidate) or self.estimate(candidate)
            assert closed is not None
            self.plans[candidate] = self.simulated(closed, even=True)
        return self.plans[candidate]

    def only_simulated(self, candidate: Candidate) -> Estimate | None:
        """The plan of a candidate whose estimate would say nothing; None if the layers cannot be divided so, or the
        budget is spent (but for the first)."""
        if candidate not in self.plans and (not self.plans or self.budget.left):
            with suppress(SpmdError):
                if (plan := self.simulated(Estimate(candidate))).simulated:
                    self.plans[candidate] = plan
        return self.plans.get(candidate)

    def simulated(self, estimate: Estimate, *, even: bool = False) -> Estimate:
        """The estimate with seconds, memory, bytes sent and work of the simulated step, if that is small enough.

        ``even``: with a vocabulary that the mesh shards evenly, into shards of the size of the largest. Then ranks are
        equal, and the dry run is much faster.
        """
        request, candidate = self.request, estimate.candidate
        model = request.model
        if even:
            model = with_even_vocabulary(model, candidate.mesh, candidate.composition(request.base))
        key = candidate, model.vocabulary != request.model.vocabulary
        if key not in self._evaluations:
            self._evaluations[key] = self._evaluate(model, *key)
        if (evaluation := self._evaluations[key]) is None:
            return estimate
        limits = request.limits.memory_by_rank(evaluation.machine) if self.heterogeneous else ()
        return estimate.evaluated(evaluation, limits)

    def _evaluate(self, model: Model, candidate: Candidate, even: bool) -> PlanEvaluation | None:
        """The evaluation; None if the step is too large, or time runs out. A dry run holds for all orders of ranks."""
        request, pipe = self.request, candidate.pipe
        filled = min(candidate.micro_batches, 3 * pipe)
        if len(model.layers) * filled > MOST_TO_SIMULATE // max(pipe // 4, 1):
            return None
        self.budget.spend(SIMULATION)
        key = replace(candidate, order=None), even
        options = {"cache": self.model.cache, "known": self._analyses.get(key), **request.analyze_options}
        try:
            self.budget.check_time()
            options["on_work"] = self.budget.check_time
            evaluation = evaluate_plan(model, request.machine, candidate, request.base, **options)
        except OutOfTime:
            return None
        if evaluation.whole:
            self._analyses[key] = evaluation.analysis
        return evaluation

    def price(self, plan: Estimate) -> tuple[float, float]:
        """The largest share of its memory by which a rank exceeds it, and the seconds of a step; inf if time ran out
        before it was simulated."""
        if plan.evaluation is None:
            return inf, inf
        limits = self.request.limits.memory_by_rank(plan.evaluation.machine)
        peaks = plan.evaluation.analysis.peak_bytes_by_rank()
        return max(0.0, *(peak / limit - 1 for peak, limit in zip(peaks, limits, strict=True))), plan.seconds

    def _goal_of(self, plan: Estimate) -> tuple[float, ...]:
        return objective(self.request.goal, plan)

    # --- the search

    def run(self) -> PlanResult:
        """The best plan, or why there is none.

        Offloading is considered where the plan without it would recompute, or nothing fits; uneven stages and a helper
        rank only if nothing fits. The conflict names what would help of those that are not allowed. All share the
        budget of the request.
        """
        request, budget = self.request, self.budget
        allowed = list(request.fallback or ())
        may_offload = "offload" in allowed and request.base.offload is None
        result, explain = self._find(self.space, budget.part(FIRST_SHARE if may_offload else 1))
        if result.plan is not None:
            recomputes = result.plan.candidate.recompute != "none"
            other = self._with_offload(result, budget)[0] if recomputes and may_offload and budget.left else None
            planned = [one for one in (other, result) if one is not None and one.plan is not None]
            return min(planned, key=lambda one: self._goal_of(one.search.best[0]))
        forbidden = [name for name in FALLBACKS if request.fallback is not None and name not in allowed]
        # What is left in the end is for the reason; each try gets as much as each phase that follows.
        phases = {name: n for names in (allowed, forbidden) for n, name in enumerate(reversed(names), 2)}

        def tried(name: str) -> tuple[PlanResult | None, Explain]:
            part = budget.part(OFFLOAD_SHARE if name == "offload" else 1 / phases[name])
            if name == "offload":
                return self._with_offload(result, part)
            near, what = neighbours.assigned_stages, "a helper rank"
            if name == "split":
                near, what = neighbours.uneven_stages, "uneven stages"
            return self._without_estimates(result, near(self), what, part), explain

        others = [tried(name) for name in allowed if not budget.overdue]
        if planned := [other for other, _ in others if other is not None and other.plan is not None]:
            return min(planned, key=lambda other: self._goal_of(other.search.best[0]))
        result, explain = next(((other, why) for other, why in others if other is not None), (result, explain))
        found_by = ((name, tried(name)[0]) for name in forbidden if not budget.overdue)
        helps = next((f"--fallback {name}" for name, other in found_by if other and other.plan), "")
        conflict = replace(explain(), helps=helps)
        closest = conflict.nearest.evaluation if conflict.nearest is not None else result.nearest_evaluation
        return replace(result, conflict=conflict, nearest_evaluation=closest, **self._ended)

    def _with_offload(self, without: PlanResult, budget: Budget) -> tuple[PlanResult | None, Explain]:
        """The result if a plan may offload; None if the base says what is offloaded."""
        if self.request.base.offload is not None:
            return None, Conflict
        space = replace(self.space, offload=(None, *neighbours.places_on(self.request.machine)))
        result, explain = self._find(space, budget)
        offload = result.plan.candidate.offload if result.plan is not None else None
        because = [f"offload {offload}: nothing fits without"] if offload and without.plan is None else []
        return replace(result, reasons=[*because, *result.reasons]), explain

    def _find(self, space: SearchSpace, budget: Budget) -> tuple[PlanResult, Explain]:
        """The best plan of the space; or none, with the closest plan, and a function that finds the reason."""
        request, tightened = self.request, self.limits
        for _ in range(MOST_SEARCHES):
            searched = search(self.model, space, tightened, request.goal, budget)
            if not searched.best:
                break
            if searched.best[0].candidate.recompute == "none":
                budget = self.budget  # no search with offloading follows
            if fitting := self._simulate(searched.best, budget):
                return self._choose(space, searched, fitting, budget), Conflict
            if budget.overdue:
                break
            tightened = _tighten(tightened, self.limits, list(self.plans.values()))
        if not searched.candidates:
            ranks, batches = ", ".join(map(str, space.ranks)), ", ".join(map(str, space.batch_sizes))
            raise UsageError(
                f"{space.model.name} cannot be distributed over {ranks} ranks with a batch of {batches} and the "
                "fixed options: use fewer ranks, or a larger --batch-size"
            )
        closest = list(searched.near or searched.best)
        if not budget.overdue:
            closest = [*searched.near]
            closest += search(self.model, space, Limits(), "memory", budget.part(most=MOST_CLOSEST), front=False).best
        if fitting := self._simulate(closest, budget.part(CLOSEST_SHARE)):  # although their estimates break the limits
            return self._choose(space, replace(searched, best=[]), fitting, budget), Conflict
        self.model.check_layers()
        plans = list(self.plans.values())
        nearest = min(plans, key=lambda plan: (self.limits.excess(plan), objective("memory", plan)), default=None)
        if nearest is not None:
            nearest = self.simulated(nearest.closed or nearest)
        result = PlanResult(
            request,
            searched,
            conflict=Conflict([*tightened.names, *request.fixed], decided=False),
            nearest_evaluation=nearest.evaluation if nearest is not None else None,
            **self._ended,
        )
        return result, partial(self._explain, space, tightened, searched.complete, plans, nearest)

    def _simulate(self, estimates: Iterable[Estimate], budget: Budget) -> list[Candidate]:
        """Simulate plans with their refinements in a new search, the first in any case; those that keep the limits."""
        self.plans, self._scores, best = {}, {}, []
        self._closed |= {estimate.candidate: estimate for estimate in estimates}
        for estimate in estimates:
            if not self.plans or budget.left:
                best.append(estimate.candidate)
                self._score(estimate.candidate)
        return best if any(not self.limits.broken(plan) for plan in self.plans.values()) else []

    def _score(self, candidate: Candidate) -> tuple[float, ...]:
        """The goal of the best of a candidate and what other orders and shares make of it; inf if none fits."""
        if candidate not in self._scores:
            tried = [candidate, *neighbours.with_order(self, candidate)]
            tried += [other for ordered in tried for other in neighbours.with_shares(self, ordered)]
            plans = [plan for plan in map(self.plan, tried) if self._keeps_all(plan)]
            self._scores[candidate] = min(map(self._goal_of, plans), default=(inf,))
        return self._scores[candidate]

    def _keeps_all(self, plan: Estimate) -> bool:
        return not self.limits.broken(plan) and not broken_choices(plan.candidate, self.request.fixed)

    @property
    def _ended(self) -> dict[str, Any]:
        """How the search has ended, for its result."""
        return {"took": perf_counter() - self._began, "late": self.budget.stopped}

    def _choose(
        self, space: SearchSpace, searched: SearchResult, starts: Sequence[Candidate], budget: Budget
    ) -> PlanResult:
        """The best simulated plan that keeps the limits, of the starts and their neighbours."""
        others: dict[Candidate, list[tuple[str, Estimate | None]]] = {}

        def choices(candidate: Candidate) -> list[tuple[str, Estimate | None]]:
            even = replace(candidate.plain, stages=None)
            if even not in others:
                several = neighbours.with_other_choice(self, space, even)
                others[even] = list(takewhile(lambda _: not budget.overdue, several))
            return others[even]

        def near(candidate: Candidate) -> Iterable[Candidate]:
            return (estimate.candidate for _, estimate in choices(candidate) if estimate is not None)

        front = thinned(searched.front)
        self._closed |= {estimate.candidate: estimate for estimate in front}
        improved([*starts, *(estimate.candidate for estimate in front)], near, self._score, budget)
        plans = dict(sorted(self.plans.items(), key=lambda item: self._goal_of(item[1])))
        best, *fitting = filter(self._keeps_all, plans.values())
        chosen = self.simulated(best.closed or best)
        closed, shown = best.closed or best, [chosen, *fitting]
        if not searched.best:  # no estimate keeps the limits, so none within the limits is better
            reached = self._goal_of(closed)[0]
            searched = replace(
                searched, reached=reached, bound=reached if searched.complete else min(reached, searched.bound)
            )
        reasons = list(gains(self.request, self.limits, chosen, plans, choices(best.candidate)))
        return self._result(replace(searched, best=shown[:SHOWN_PLANS], front=pareto(shown)), closed, chosen, reasons)

    def _result(self, searched: SearchResult, plan: Estimate, chosen: Estimate, reasons: Sequence[str]) -> PlanResult:
        candidate = plan.candidate
        return PlanResult(
            self.request,
            searched,
            plan,
            chosen.evaluation,
            reasons,
            **self._ended,
            composition=candidate.composition(self.request.base),
            micro_batches=candidate.micro_batches,
            batch_size=candidate.batch_size,
        )

    def _without_estimates(
        self, without: PlanResult, several: Iterable[Sequence[Candidate]], what: str, budget: Budget
    ) -> PlanResult | None:
        """The best plan of lists of candidates, the frugal ones of each first, that are only simulated; None if none
        fits. ``without`` has the closest other plan, which lacks memory."""
        nearest, self.plans = without.nearest_evaluation, {}
        if nearest is None or not (why := self._what_lacks_memory(nearest)):
            return None

        def score(candidate: Candidate) -> tuple[float, ...]:
            plan = self.only_simulated(candidate)
            return (inf,) if plan is None or self.limits.broken(plan) else self._goal_of(plan)

        def near(candidate: Candidate) -> Iterable[Candidate]:
            possible = (option for some in lists if score(some[0]) != (inf,) for option in some)
            return (option for option in possible if neighbours.differences(option, candidate) == 1)

        lists = list(several)
        starts = [some[0] for some in lists]
        fitting = [option for option in improved(starts, near, score, budget) if score(option) != (inf,)]
        if not fitting:
            return None
        chosen, *others = (self.plans[candidate] for candidate in fitting)
        shown = [chosen, *others]
        reached, tried = self._goal_of(chosen)[0], (sum(map(len, lists)), 0, len(self.plans))
        searched = SearchResult(shown[:SHOWN_PLANS], pareto(shown), reached, 0.0, *tried, complete=False)
        parts = {"work of the busiest rank": chosen.work, "waiting": chosen.seconds - chosen.work}
        reasons = [f"{what}: {why}", *self._cost_of_memory(chosen)]
        return self._result(searched, replace(chosen, parts=parts), chosen, reasons)

    def _what_lacks_memory(self, nearest: PlanEvaluation) -> str:
        """The node of the rank that exceeds its memory most in the closest plan; empty if none does."""
        peaks = nearest.analysis.peak_bytes_by_rank()
        limits = self.request.limits.memory_by_rank(nearest.machine)
        rank = max(range(len(peaks)), key=lambda rank: peaks[rank] / limits[rank])
        if peaks[rank] <= limits[rank]:
            return ""
        number, node = nearest.machine.places[rank]
        return (
            f"nothing fits without; rank {rank}, on node {number} ({node.name}), has {readable_bytes(limits[rank])} "
            f"and would need {readable_bytes(peaks[rank])} in the closest plan ({axes_text(nearest.analysis.axes)})"
        )

    def _cost_of_memory(self, chosen: Estimate) -> Iterable[str]:
        """What the limits of memory cost: the difference to the best plan without them, if that is faster."""
        unlimited, budget = replace(self.limits, memory=None), Budget(MOST_UNLIMITED)
        searched = search(self.model, self.space, unlimited, self.request.goal, budget, front=False, keep=1)
        for other in (self.simulated(plan, even=True) for plan in searched.best):
            if other.seconds < chosen.seconds:
                yield (
                    f"without limits of memory {other.candidate} would take {readable_seconds(other.seconds)}: the "
                    f"limits cost {readable_seconds(chosen.seconds - other.seconds)} of a step "
                    f"({chosen.seconds / other.seconds - 1:+.1%})"
                )

    # --- why there is no plan

    def _explain(
        self,
        space: SearchSpace,
        tightened: Limits,
        complete: bool,
        plans: Sequence[Estimate],
        nearest: Estimate | None,
    ) -> Conflict:
        """The reason, as far as the budget lasts; ``plans`` are those that need least memory, ``nearest`` the first."""
        constraints, limits = Constraints(self.model, self.request, space, self.limits, self.budget), self.limits
        conflict = Conflict([*tightened.names, *self.request.fixed], decided=False)
        if complete:
            conflict = conflict_of(replace(constraints, limits=tightened), [plan.closed or plan for plan in plans])
        ways = dict(conflict.relaxations)
        for name in ways.keys() & LIMITS:  # to the need of the simulated step, or to a smaller one of the closest
            simulated = [self.simulated(ways[name][1], even=True), *plans]
            keep_others = [plan for plan in simulated if limits.broken(plan) <= {name}]
            best = min(keep_others or simulated[:1], key=lambda plan: limits.measured(plan)[name])
            ways[name] = constraints.relaxed(name, best)[0], best
        ways = {name: (text, self.simulated(way, even=True)) for name, (text, way) in ways.items()}
        ways = {name: way for name, way in ways.items() if name in LIMITS or not limits.broken(way[1])}
        for _, way in ways.values():  # that for a limit keeps all else, and may be closer than those of least memory
            is_closer = nearest is None or limits.excess(way) < limits.excess(nearest)
            if is_closer and way.candidate.ranks in space.ranks and way.candidate.batch_size in space.batch_sizes:
                nearest = self.simulated(way.closed or way)
        broken = limits.broken(nearest) if nearest is not None else ()
        if nearest is not None and conflict.decided and not ways and len(broken) == 1:
            (name,) = broken
            ways = {name: (constraints.relaxed(name, nearest)[0], nearest)}
        return replace(conflict, relaxations=ways, nearest=nearest)


def _tighten(tightened: Limits, limits: Limits, plans: Sequence[Estimate]) -> Limits:
    """Limits for estimates, tightened by the smallest error of an estimate: all simulated plans break limits that their
    estimates keep."""
    tighter = {}
    for name in LIMITS:
        ratios = [
            limits.measured(plan.closed or plan)[name] / limits.measured(plan)[name]
            for plan in plans
            if name in limits.broken(plan)
        ]
        if ratios:
            tighter[name] = min(getattr(tightened, name), getattr(limits, name) * max(ratios)) * 0.998
    return replace(tightened, **tighter)
