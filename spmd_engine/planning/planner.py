"""``plan``: the best way to train a model on a machine, with reasons; or the reason why nothing fits."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from spmd_engine.axes import MeshPosition, axes_text, checked_axes, count_ranks
from spmd_engine.engine.batch import check_batch
from spmd_engine.engine.build import composed_layout
from spmd_engine.engine.helpers import helper_ranks
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.errors import UsageError
from spmd_engine.importing import uncollected
from spmd_engine.models import Model
from spmd_engine.planning.dry_run.engine import PassCache
from spmd_engine.planning.dry_run.step_analysis import StepAnalysis
from spmd_engine.planning.machine.files import default_machine
from spmd_engine.planning.machine.machine import Machine
from spmd_engine.planning.model_file import planned_model
from spmd_engine.planning.plan_result import FALLBACKS, PlanResult, Request
from spmd_engine.planning.search.budget import Budget
from spmd_engine.planning.search.estimate import Estimate
from spmd_engine.planning.search.plan_evaluation import (
    PlanEvaluation,
    evaluate_plan,
    evaluate_step,
    peak_memory,
    state_shares,
    work_shares,
)
from spmd_engine.planning.search.profile import with_even_vocabulary
from spmd_engine.planning.search.rank_order import Order, RankOrders, best_orders, proposed_orders
from spmd_engine.planning.search.relaxation import Conflict, Question, Relaxation, closest, conflict_of, relaxed
from spmd_engine.planning.search.search import (
    LIMITS,
    SHOWN_PLANS,
    Certificate,
    Constraints,
    Limits,
    Planner,
    SearchResult,
    objective,
    pareto,
    thinned,
)
from spmd_engine.planning.search.search_space import (
    FIXABLE,
    Candidate,
    SearchSpace,
    axes_that_shard,
    can_offload,
    candidates,
)
from spmd_engine.planning.simulated_plan import FindPlan, plan_with_helper_rank, plan_with_uneven_stages
from spmd_engine.planning.simulator.simulation import MOST_RANKS, simulate

#: What may be offloaded.
OFFLOADS = ("optimizer", "activations", "optimizer,activations", "optimizer,parameters,activations")
NOTHING_FITS = 1  #: the exit code
MOST_TO_SIMULATE = 20_000  #: layers times micro-batches that fill the pipeline; larger steps are only estimated
SEARCH_SHARE = 0.75  #: share of a budget for comparing estimates; the rest is for simulating more than one plan
ORDER_SHARE = 0.25  #: share of the request's seconds for trying orders of unequal ranks
OFFLOAD_SHARE = 0.5  #: share of the request's seconds that is kept for a second search, with offloading
LEAST_GAIN = 0.002  #: share of a step that another order of ranks must save
MOST_ROUNDS = 4  #: rounds at most in which a plan is chosen and its alternatives are simulated
MOST_SEARCHES = 4  #: searches at most; each corrects the limits by the errors of the estimates before


def plan(
    model: str | Model,
    *,
    ranks: int | Sequence[int] | None = None,
    machine: str | Path | Machine | None = None,
    goal: str = "latency",
    batch_size: int | Sequence[int] = 16,
    memory: float | str | None = None,
    latency: float | str | None = None,
    bandwidth: float | str | None = None,
    compute: float | str | None = None,
    mesh: Mapping[str, int] | None = None,
    fixed: Mapping[str, Any] | None = None,
    axes: Sequence[str] | None = None,
    sequence: int | None = None,
    dtype: Any = np.float32,
    optimizer: str = "adamw",
    base: ParallelConfig = ParallelConfig(),  # noqa: B008 (immutable)
    seconds: float = 20.0,
    placement: str = "auto",
    fallback: Collection[str] = FALLBACKS,
) -> PlanResult:
    """The best way to train a model on a machine, as the command ``plan`` finds it; or why nothing fits.

    ``model`` is a model, the name of one, or a file that describes one. ``machine`` is a machine, a packaged name such
    as "a100", or a machine file; None: the calibrated one. With several ``ranks`` or batch sizes the best is chosen.
    ``goal`` is "latency", "throughput", "memory", "balance" or "communication". Limits: ``memory`` of a rank in bytes
    ("24GiB"), ``latency`` of a step and ``compute`` of a rank in seconds ("100ms"), ``bandwidth`` in bytes a second of
    a rank.

    ``mesh`` evaluates this mesh only; ``fixed`` has other choices that are not searched: micro_batches, zero,
    sequence_parallel, schedule, chunks, recompute, stages. ``axes`` are the mesh axes to consider, ``sequence`` the
    tokens of a sample (None: the model's context), ``base`` the options that are not searched, and ``seconds`` the
    processor time of all searches and simulations. ``placement`` says how ranks of unequal nodes are placed on the
    mesh: "order" as the machine lists them, "greedy", "assign", "anneal" or "genetic" by the costs of single ranks,
    "auto" by simulations.
    ``fallback`` has what a plan may do where nothing else fits: "split", stages of different sizes, "offload", and
    "assign", a helper rank for a rank that lacks memory.
    In the result ``plan`` is None if nothing fits; then ``why_not`` gives the reason.

    Raises UsageError for an unknown model or machine, and for options that contradict each other.
    """
    mesh = checked_axes(mesh) if mesh else None
    if ranks is None:
        if mesh is None:
            raise UsageError("plan needs ranks, or a mesh")
        ranks = count_ranks(mesh)
    request = Request(
        planned_model(model, base=base) if isinstance(model, str) else model,
        machine if isinstance(machine, Machine) else default_machine(machine),
        [ranks] if isinstance(ranks, int) else ranks,
        [batch_size] if isinstance(batch_size, int) else batch_size,
        goal,
        Limits.from_json({"memory": memory, "latency": latency, "bandwidth": bandwidth, "compute": compute}, "plan"),
        {**(fixed or {}), **({"mesh": dict(mesh)} if mesh else {})},
        axes,
        sequence,
        dtype,
        optimizer,
        base,
        seconds,
        placement,
        fallback,
    )
    return fixed_plan(request) if mesh else find_plan(request)


@uncollected()  # costs of layers live as long as the search; garbage collection took a third of its time
def find_plan(request: Request) -> PlanResult:
    """The best plan, or why there is none. Raises UsageError for given helper ranks, which need a mesh."""
    if request.base.assigned:
        raise UsageError(
            f"--assign {request.base.assign} needs --mesh, the mesh of the other ranks: helper ranks are not searched"
        )
    return _PlanSearch(request).run()


@dataclass(frozen=True)
class EvaluatedPlan:
    """A plan with its estimate and its evaluation."""

    estimate: Estimate
    evaluation: PlanEvaluation | None  #: None if its step is too large to be simulated
    memory_limits: Sequence[float] = ()  #: bytes that the rank at each position may hold, if ranks are unequal

    @property
    def refined(self) -> Estimate:
        """The estimate with seconds, memory, bytes sent and work of the simulated step, if there is one."""
        evaluation = self.evaluation
        if evaluation is None:
            return self.estimate
        return replace(
            self.estimate,
            seconds=evaluation.seconds,
            memory=peak_memory(evaluation.analysis, self.memory_limits),
            sent=evaluation.bytes_sent,
            work=max(evaluation.prediction.working.values(), default=0.0) if evaluation.whole else self.estimate.work,
            simulated=True,
        )


class PlanEvaluator:
    """Evaluates estimated plans, each once."""

    def __init__(self, request: Request, planner: Planner) -> None:
        self.request, self.planner = request, planner
        self._steps: dict[tuple[Candidate, bool], PlanEvaluation | None] = {}
        self._order_seconds_left = ORDER_SHARE * request.seconds
        self._cache: PassCache = planner.profiles.cache  # similar plans have the same layers
        self._heterogeneous = request.machine.with_ranks(max(request.ranks)).heterogeneous

    def _machine(self, candidate: Candidate) -> Machine:
        return self.request.machine.with_ranks(candidate.ranks).placed(candidate.order)

    def evaluate(self, estimate: Estimate, *, even: bool = False) -> EvaluatedPlan:
        """Evaluate a plan, if its step is small enough.

        ``even``: with a vocabulary that the mesh shards evenly, into shards of the size of the largest. Then ranks are
        equal, and the dry run is much faster.
        """
        request, candidate = self.request, estimate.candidate
        model = request.model
        if even:
            model = with_even_vocabulary(model, candidate.mesh, candidate.composition(request.base))
        key = candidate, model.vocabulary != request.model.vocabulary
        if key not in self._steps:
            self._steps[key] = None
            if self._is_small_enough(candidate):
                options = {"cache": self._cache, **request.analyze_options}
                self._steps[key] = evaluate_plan(model, request.machine, candidate, request.base, **options)
        evaluation, limits = self._steps[key], self.request.limits
        by_rank = limits.memory_by_rank(evaluation.machine) if evaluation and self._heterogeneous else ()
        return EvaluatedPlan(estimate, evaluation, by_rank)

    def evaluate_all(self, estimates: Sequence[Estimate], budget: Budget) -> list[EvaluatedPlan]:
        """Evaluate plans until the budget is spent, and the first in any case."""
        plans = []
        for estimate in {estimate.candidate: estimate for estimate in estimates}.values():
            if plans and not budget.left:
                break
            plan = self.evaluate(estimate, even=True)
            placed = self._placed(plan, budget)
            for each in [plan] if placed is plan else [plan, placed]:
                plans += self._evaluate_with_shares(each)
        return plans

    def _placed(self, plan: EvaluatedPlan, budget: Budget) -> EvaluatedPlan:
        """The plan with ranks in the order that is fastest by simulation, and with stages for that order; the plan as
        it is, unless one is faster by more than LEAST_GAIN."""
        request, candidate, evaluation = self.request, plan.estimate.candidate, plan.evaluation
        machine = request.machine.with_ranks(candidate.ranks)
        orders = RankOrders(machine, candidate.mesh)
        given = request.placement == "order" or request.base.rank_order is not None
        if evaluation is None or given or not orders.matter or not 1 < candidate.ranks <= MOST_RANKS:
            return plan
        before = budget.left
        kept = before - self._order_seconds_left if request.placement == "auto" else before
        has_time = lambda: budget.left > max(0.0, kept)
        limits = request.limits.memory_by_rank(machine)
        found = proposed_orders(request.placement, evaluation.analysis, orders, limits)
        if candidate.pipe > 1 and "stages" not in request.fixed:

            def estimated(order: Order) -> tuple[float]:
                estimate = self._in_order(plan.estimate, order)
                return (estimate.seconds if estimate else float("inf"),)

            found = [found[0], *best_orders(orders, estimated, found, has_time, keep=SHOWN_PLANS)]
        tried = [plan, *(self._evaluate_in_order(plan, order) for order in dict.fromkeys(found[1:]))]
        best = min(tried, key=self._price)
        analysis = best.evaluation.analysis if best.evaluation else evaluation.analysis
        order = best_orders(orders, lambda order: self._simulated(analysis, machine, order), found, has_time)[0]
        best = min([best, self._evaluate_in_order(plan, order)], key=self._price)
        self._order_seconds_left -= before - budget.left
        gains = (
            self._price(best)[0] < self._price(plan)[0]
            or best.refined.seconds * (1 + LEAST_GAIN) < plan.refined.seconds
        )
        return best if gains else plan

    def _simulated(self, analysis: StepAnalysis, machine: Machine, order: Order) -> tuple[float, float]:
        """By how much a rank exceeds its memory, and the seconds of a step, with ranks in this order."""
        placed = machine.placed(order)
        limits = self.request.limits.memory_by_rank(placed)
        return _excess(analysis.peak_bytes_by_rank(), limits), simulate(analysis, placed).seconds

    def _price(self, plan: EvaluatedPlan) -> tuple[float, float]:
        """As ``_simulated``, of an evaluated plan."""
        assert plan.evaluation is not None
        limits = self.request.limits.memory_by_rank(self._machine(plan.estimate.candidate))
        return _excess(plan.evaluation.analysis.peak_bytes_by_rank(), limits), plan.refined.seconds

    def _in_order(self, estimate: Estimate, order: Order) -> Estimate | None:
        """The estimate with ranks in this order, and stages that suit it unless they are fixed."""
        candidate = replace(estimate.candidate, order=order, stages=self.request.fixed.get("stages"))
        estimator = self.planner.estimator(candidate)
        return estimator.estimate() if estimator else None

    def _evaluate_in_order(self, plan: EvaluatedPlan, order: Order) -> EvaluatedPlan:
        estimate = self._in_order(plan.estimate, order)
        return self.evaluate(estimate, even=True) if estimate else plan

    def _evaluate_with_shares(self, plan: EvaluatedPlan) -> list[EvaluatedPlan]:
        """A plan and, if ranks are unequal, the plan with uneven shares of work, and then also of state."""
        plans = [plan]
        if not self._heterogeneous:
            return plans
        request, candidate = self.request, plan.estimate.candidate
        machine, limits = self._machine(candidate), plan.memory_limits
        for name, find_shares in (("shares", work_shares), ("state_shares", state_shares)):
            estimate, evaluation = plans[-1].estimate, plans[-1].evaluation
            if evaluation is None or getattr(request.base, name):
                continue
            if shares := find_shares(request.model, estimate.candidate, evaluation, machine, limits):
                candidate = replace(estimate.candidate, **{name: shares})
                plans.append(self.evaluate(replace(estimate, candidate=candidate), even=True))
        return plans

    def _is_small_enough(self, candidate: Candidate) -> bool:
        filled = min(candidate.micro_batches, 3 * candidate.pipe)
        return len(self.request.model.layers) * filled <= MOST_TO_SIMULATE // max(candidate.pipe // 4, 1)


def _excess(peaks: Sequence[float], limits: Sequence[float]) -> float:
    """The largest share of its memory by which a rank exceeds it."""
    return max(0.0, *(peak / limit - 1 for peak, limit in zip(peaks, limits, strict=True)))


def offloads_on(machine: Machine, zero: int = 0) -> list[str]:
    """What may be offloaded on a machine."""
    devices = machine.nodes[0].has_devices
    return [offload for offload in OFFLOADS if can_offload(offload, zero, of_devices=devices)]


class _PlanSearch:
    """The search for the plan of a request, and the simulation of the plans that it finds."""

    def __init__(self, request: Request) -> None:
        self.request, self.began, self.budget = request, perf_counter(), Budget(request.seconds)
        self.limits = request.limits.with_memory_of(request.machine.with_ranks(max(request.ranks)))
        if not isinstance(overlap := request.base.storage.overlap, int):
            raise UsageError(f"--overlap-layers {request.base.overlap_layers} has ranges: give --mesh, or a number")
        self.space = SearchSpace(
            request.model,
            request.ranks,
            request.batch_sizes,
            request.machine.nodes[0].ranks,
            axes=request.axes,
            shares={**request.base.work_shares, **request.base.storage.shares},
            order=request.base.order,
            offload=(request.base.offload,),
            overlap=overlap,
            **request.fixed,
        )
        self.planner = request.planner()
        self.evaluator = PlanEvaluator(request, self.planner)

    def run(self) -> PlanResult:
        """The best plan, or why there is none.

        Offloading is considered where the plan without it would recompute, or nothing fits; uneven stages and a helper
        rank only if nothing fits. The conflict names what would help of those that are not allowed. All share the
        seconds of the request.
        """
        request, budget = self.request, self.budget
        allowed = list(request.fallback or ())
        may_offload = "offload" in allowed and request.base.offload is None
        result = self._run(budget.part(1 - OFFLOAD_SHARE * may_offload))
        tries = {
            "split": partial(self._simulated, plan_with_uneven_stages),
            "offload": self._with_offload,
            "assign": partial(self._simulated, plan_with_helper_rank),
        }
        if result.plan is not None:
            recomputes = result.plan.candidate.recompute != "none"
            other = self._with_offload(result, budget) if recomputes and may_offload else None
            return other if other is not None and other.plan is not None else result
        forbidden = [name for name in FALLBACKS if request.fallback is not None and name not in allowed]
        # What is left in the end is for the reason; each try gets as much as each phase that follows.
        phases = {name: n for names in (allowed, forbidden) for n, name in enumerate(reversed(names), 2)}
        part = lambda name: budget.part(OFFLOAD_SHARE if name == "offload" else 1 / phases[name])
        others = [tries[name](result, part(name)) for name in allowed]
        if found := [other for other in others if other is not None and other.plan is not None]:
            return min(found, key=lambda plan: objective(request.goal, plan.search.best[0]))
        result = next((other for other in others if other is not None), result)
        explain = self._explain  # of the last search
        tried = ((name, tries[name](result, part(name))) for name in forbidden)
        helping = (name for name, other in tried if other is not None and other.plan is not None)
        helps = next((f"--fallback {name}" for name in helping), "")
        return replace(result, conflict=replace(explain(), helps=helps), took=perf_counter() - self.began)

    def _with_offload(self, without: PlanResult, budget: Budget) -> PlanResult | None:
        """The result if a plan may offload; None if the base says what is offloaded."""
        if self.request.base.offload is not None:
            return None
        space = self.space
        self.space = replace(space, offload=(None, *offloads_on(self.request.machine)))
        offloaded, self.space = self._run(budget), space
        offload = offloaded.plan.candidate.offload if offloaded.plan is not None else None
        because = [f"offload {offload}: nothing fits without"] if offload and without.plan is None else []
        return replace(offloaded, reasons=[*because, *offloaded.reasons])

    def _simulated(self, find: FindPlan, without: PlanResult, budget: Budget) -> PlanResult | None:
        plan = find(self.evaluator, self.space, without, budget)
        return replace(plan, took=perf_counter() - self.began) if plan else None

    def _run(self, budget: Budget) -> PlanResult:
        """The best plan of the space; or none, with the closest plan, and without a reason: see ``_explain``."""
        request, tightened = self.request, self.limits
        for _ in range(MOST_SEARCHES):
            constraints, left = Constraints(tightened, request.fixed), budget.left
            search = self.planner.search(self.space, constraints, request.goal, seconds=SEARCH_SHARE * left, most=left)
            if not search.best:
                self._check_space(search)
                break
            if search.best[0].candidate.recompute == "none":
                budget = self.budget  # no search with offloading follows
            plans = self.evaluator.evaluate_all(search.best, budget)
            if self._keeps_limits(plans):
                return self._choose(search, plans, budget)
            tightened = _tighten(tightened, self.limits, plans)
        question = Question(self.space, Constraints(tightened, request.fixed), request.goal, request.most_ranks)
        estimates = closest(self.planner, question, budget)
        plans = self.evaluator.evaluate_all(estimates, budget.part(1 - SEARCH_SHARE))
        if self._keeps_limits(plans):  # although their estimates break them
            return self._choose(replace(search, best=[]), plans, budget)
        self.planner.check_layers()
        nearest = min(plans, key=lambda plan: objective("memory", plan.refined), default=None)
        if nearest is not None:
            nearest = self.evaluator.evaluate(nearest.estimate)
        self._explain = partial(self._explain_conflict, search, question, plans, nearest)
        return PlanResult(
            request,
            search,
            conflict=Conflict(question.constraints.names, [], decided=False),
            nearest_evaluation=nearest.evaluation if nearest is not None else None,
            took=perf_counter() - self.began,
        )

    def _keeps_limits(self, plans: Sequence[EvaluatedPlan]) -> bool:
        return any(not self.limits.broken(plan.refined) for plan in plans)

    def _check_space(self, search: SearchResult) -> None:
        if not search.certificate.candidates:
            ranks, batches = ", ".join(map(str, self.space.ranks)), ", ".join(map(str, self.space.batch_sizes))
            raise UsageError(
                f"{self.space.model.name} cannot be distributed over {ranks} ranks with a batch of {batches} and the "
                "fixed options: use fewer ranks, or a larger --batch-size"
            )

    def _explain_conflict(
        self,
        search: SearchResult,
        question: Question,
        plans: Sequence[EvaluatedPlan],
        nearest: EvaluatedPlan | None,
    ) -> Conflict:
        """Why there is no plan, as far as the budget lasts; ``plans`` are the evaluated ones that need least memory,
        ``nearest`` the first of them."""
        if search.certificate.complete:
            conflict = conflict_of(self.planner, question, self.budget, [plan.estimate for plan in plans])
        else:
            conflict = Conflict(question.constraints.names, [], decided=False)
        question = replace(question, constraints=Constraints(self.limits, self.request.fixed))
        relaxations = [self._relax_by_simulation(relaxation, question, plans) for relaxation in conflict.relaxations]
        if nearest is None:
            return replace(conflict, relaxations=relaxations)
        broken = self.limits.broken(nearest.refined)
        if conflict.decided and not relaxations and len(broken) == 1:
            relaxations = [relaxed(next(iter(broken)), nearest.refined, question)]
        return replace(conflict, relaxations=relaxations, nearest=nearest.refined)

    def _relax_by_simulation(
        self, relaxation: Relaxation, question: Question, plans: Sequence[EvaluatedPlan]
    ) -> Relaxation:
        """The relaxation of a limit to the need of the simulated step, or to a smaller need of one of ``plans``."""
        name, limits = relaxation.gives_up, self.limits
        if name not in LIMITS:
            return relaxation
        refined = [self.evaluator.evaluate(relaxation.plan, even=True).refined, *(plan.refined for plan in plans)]
        keep_others = [plan for plan in refined if limits.broken(plan) <= {name}]
        best = min(keep_others or refined[:1], key=lambda plan: limits.measured(plan)[name])
        return relaxed(name, best, question)

    def _choose(self, search: SearchResult, plans: Sequence[EvaluatedPlan], budget: Budget) -> PlanResult:
        """The best evaluated plan that keeps the limits; plans that differ from it in one choice are evaluated too."""
        request, certificate = self.request, search.certificate
        constraints = Constraints(self.limits, request.fixed)

        def goal_of(plan: EvaluatedPlan) -> tuple[float, ...]:
            return objective(request.goal, plan.refined)

        def fitting() -> list[EvaluatedPlan]:
            fitting_plans = (plan for plan in plans if not constraints.broken(plan.estimate.candidate, plan.refined))
            return sorted(fitting_plans, key=goal_of)

        def alternatives_to(plan: EvaluatedPlan) -> list[Alternative]:
            return list(alternatives(self.planner, self.space, self.limits, plan.estimate, request.goal, budget))

        best = fitting()[0]
        others = alternatives_to(best)
        for _ in range(MOST_ROUNDS):
            tried = {plan.estimate.candidate for plan in plans}
            proposed = [*(other.estimate for other in others if other.estimate), *thinned(search.front)]
            proposed = [plan for plan in proposed if plan.candidate not in tried]
            plans = [*plans, *(self.evaluator.evaluate_all(proposed, budget) if budget.left else ())]
            if fitting()[0] is best:
                break
            best = fitting()[0]
            others = alternatives_to(best)
        chosen = self.evaluator.evaluate(best.estimate)
        if not search.best:  # no estimate keeps the limits, so none within the limits is better
            reached = objective(request.goal, chosen.estimate)[0]
            bound = reached if certificate.complete else min(reached, certificate.bound)
            certificate = replace(certificate, best=reached, bound=bound)
        shown = [chosen.refined, *(plan.refined for plan in fitting() if plan is not best)]
        simulated: dict[Candidate, Estimate] = {}
        for plan in sorted(plans, key=goal_of):
            simulated.setdefault(without_shares(plan.estimate.candidate), plan.refined)
        candidate = chosen.estimate.candidate
        return PlanResult(
            request,
            replace(search, best=shown[:SHOWN_PLANS], front=pareto(shown), certificate=certificate),
            chosen.estimate,
            chosen.evaluation,
            [
                *_gain_of_order(chosen, plans),
                *_gains_of_shares(chosen, plans),
                *reasons(self.limits, chosen.refined, others, simulated),
            ],
            took=perf_counter() - self.began,
            composition=candidate.composition(request.base),
            micro_batches=candidate.micro_batches,
            batch_size=candidate.batch_size,
        )


def _gain_of_order(chosen: EvaluatedPlan, plans: Sequence[EvaluatedPlan]) -> Iterator[str]:
    """What the order of ranks gains over that of the machine."""
    candidate = chosen.estimate.candidate
    usual = replace(without_shares(candidate), stages=None)
    alike = [plan for plan in plans if replace(without_shares(plan.estimate.candidate), stages=None) == usual]
    others = [plan.refined for plan in alike if plan.estimate.candidate.order is None]
    if candidate.order and others:
        other = min(others, key=lambda plan: plan.seconds)
        slower = other.seconds / chosen.refined.seconds - 1
        order = ",".join(map(str, candidate.order))
        yield f"rank order {order}, not as the machine lists them: that would take {slower:+.1%} time"


def _gains_of_shares(chosen: EvaluatedPlan, plans: Sequence[EvaluatedPlan]) -> Iterator[str]:
    """What uneven shares gain over even ones."""
    candidate, refined = chosen.estimate.candidate, chosen.refined
    for name in ("shares", "state_shares"):
        even = replace(candidate, **{name: None, "state_shares": None})
        other = next((plan.refined for plan in plans if plan.estimate.candidate == even), None)
        if getattr(candidate, name) and other is not None:
            slower, larger = other.seconds / refined.seconds - 1, other.memory / refined.memory - 1
            choice = f"{name.replace('_', ' ')} {getattr(candidate, name)}, not even"
            yield f"{choice}: that would take {slower:+.1%} time, and {larger:+.1%} of the memory that ranks have"


def _tighten(tightened: Limits, limits: Limits, plans: Sequence[EvaluatedPlan]) -> Limits:
    """Limits for estimates, tightened by the smallest error of an estimate: all evaluated plans break limits that their
    estimates keep."""
    tighter = {}
    for name in LIMITS:
        ratios = [
            limits.measured(plan.estimate)[name] / limits.measured(plan.refined)[name]
            for plan in plans
            if name in limits.broken(plan.refined)
        ]
        if ratios:
            tighter[name] = min(getattr(tightened, name), getattr(limits, name) * max(ratios)) * 0.998
    return replace(tightened, **tighter)


def fixed_plan(request: Request) -> PlanResult:
    """The evaluation of a given composition; the constraints that it breaks are the conflict."""
    began = perf_counter()
    fixed = {"zero": None, "schedule": None, "chunks": None, "recompute": "none", **request.fixed}
    axes, micro_batches = dict(fixed.pop("mesh")), fixed.pop("micro_batches", 1)
    stages, parallel = fixed.pop("stages", None), bool(fixed.pop("sequence_parallel", False))
    stages = stages if isinstance(stages, str | None) else ",".join(map(str, stages))
    composition = request.base.changed(mesh=axes, sequence_parallel=parallel, stages=stages, **fixed)
    ranks, batch_size = max(request.ranks) + len(helper_ranks(composition.assigned)), request.batch_sizes[0]
    machine = request.machine.with_ranks(ranks)
    position = MeshPosition(axes, dict.fromkeys(axes, 0))
    layout = composed_layout(request.model, position, composition)
    check_batch(batch_size, micro_batches, layout.spec("b"), position)
    options = request.analyze_options

    def evaluated(composition: ParallelConfig) -> PlanEvaluation:
        return evaluate_step(request.model, machine, axes, composition, batch_size, micro_batches, **options)

    evaluation = evaluated(composition)
    memory_limits = request.limits.memory_by_rank(evaluation.machine) if machine.heterogeneous else ()
    needs = {
        "memory": peak_memory(evaluation.analysis, memory_limits),
        "latency": evaluation.seconds,
        "bandwidth": evaluation.bytes_sent / ranks / evaluation.seconds,
        "compute": max(evaluation.prediction.working.values(), default=0.0),
    }
    limits = request.limits.with_memory_of(machine)
    broken = [name for name, need in needs.items() if (getattr(limits, name) or float("inf")) < need]
    is_tried = "memory" in broken and not composition.offload
    tried = offloads_on(machine, composition.storage.stage(axes)) if is_tried else []
    steps = ((f"--offload {offload}", evaluated(composition.changed(offload=offload))) for offload in tried)
    helping = (what for what, step in steps if peak_memory(step.analysis, memory_limits) <= (limits.memory or 0))
    helps = next(helping, "")
    return PlanResult(
        request,
        SearchResult([], [], Certificate(0.0, 0.0, 1, 0, 1)),
        evaluation=evaluation,
        conflict=Conflict([*broken, "mesh"], [], helps=helps) if broken else None,
        nearest_evaluation=evaluation if broken else None,
        took=perf_counter() - began,
        composition=composition,
        micro_batches=micro_batches,
        batch_size=batch_size,
    )


# --- Reasons: what each choice of a plan gains over the nearest alternatives


#: Strategies of a single kind: name, mesh axis, and ZeRO stages (None: any).
SINGLE_STRATEGIES = (
    ("data parallelism", "data", (0,)),
    ("ZeRO", "data", (1, 2, 3)),
    ("tensor parallelism", "model", None),
    ("a pipeline", "pipe", None),
)
SEARCH_SECONDS = 0.5  #: at most, of the search for the best plan of each


@dataclass(frozen=True)
class Alternative:
    """A plan that differs in one choice."""

    what: str  #: the choice of the plan, and that of the alternative
    estimate: Estimate | None  #: None: the alternative is impossible


def alternatives(
    planner: Planner, space: SearchSpace, limits: Limits, chosen: Estimate, goal: str, budget: Budget
) -> Iterator[Alternative]:
    """The best plans, by their estimates, that differ in one choice, as far as the budget lasts."""
    candidate = chosen.candidate
    mesh_text = axes_text(candidate.mesh)
    for name, axis, zeros in SINGLE_STRATEGIES:
        mesh = {axis: candidate.ranks}
        usable = axis in axes_that_shard(planner.model) and axis in (space.axes or [axis])
        if space.zero is not None:
            zeros = [space.zero] if zeros is None or space.zero in zeros else []
        if candidate.ranks == 1 or mesh == candidate.mesh or not usable or zeros == []:
            continue
        space_of_one = replace(space, mesh=mesh, ranks=[candidate.ranks])
        best = _search_on(planner, space_of_one, zeros or [None], limits, goal, min(SEARCH_SECONDS, budget.left))
        alternative = best.candidate if best is not None else f"{axis}={candidate.ranks}"
        yield Alternative(f"mesh {mesh_text}, not {alternative} ({name})", best)
    free = {name: None for name in FIXABLE} | {"mesh": candidate.mesh, "batch_sizes": [candidate.batch_size]}
    possible = set(candidates(replace(space, **free)))
    for name, options in _list_options(candidate):
        others = []
        for option in options:
            changed = {name: option, "stages": None} | ({"chunks": 1} if name == "schedule" else {})
            other = replace(without_shares(candidate), **changed)
            estimator = planner.estimator(other) if other in possible else None
            estimate = estimator.estimate() if estimator is not None else None
            if estimate is not None:
                others.append((option, estimate))
        if others:
            option, other = min(others, key=lambda pair: objective(goal, pair[1]))
            not_chosen = "nothing" if option is None else option
            yield Alternative(f"{name.replace('_', ' ')} {getattr(candidate, name)}, not {not_chosen}", other)


def _search_on(
    planner: Planner, space: SearchSpace, zeros: Sequence[int | None], limits: Limits, goal: str, seconds: float
) -> Estimate | None:
    """The best plan on a mesh with one of these ZeRO stages; if none keeps the limits, the one with least memory."""
    plans = []
    for zero in zeros:
        for tried_limits, tried_goal in ((limits, goal), (Limits(), "memory")):
            options = {"seconds": seconds / len(zeros), "front": False, "keep": 1}
            search = planner.search(replace(space, zero=zero), Constraints(tried_limits), tried_goal, **options)
            if search.best:
                plans.append(search.best[0])
                break
    fitting = [plan for plan in plans if not limits.broken(plan)]
    return min(fitting or plans, key=lambda plan: objective(goal if fitting else "memory", plan), default=None)


def without_shares(candidate: Candidate) -> Candidate:
    """The candidate with even shares of samples and state, and ranks as the machine lists them."""
    return replace(candidate, shares=None, state_shares=None, order=None)


def reasons(
    limits: Limits, chosen: Estimate, others: Sequence[Alternative], simulated: Mapping[Candidate, Estimate]
) -> Iterator[str]:
    """What the plan gains over each alternative. ``simulated`` has simulated plans, by candidate without shares."""
    for alternative in others:
        if alternative.estimate is None:
            yield f"{alternative.what}: the model or the batch cannot be sharded so"
            continue
        other = simulated.get(without_shares(alternative.estimate.candidate), alternative.estimate)
        yield _explain_gain(alternative.what, chosen, other, limits) + ("" if other.simulated else " (an estimate)")


def _list_options(candidate: Candidate) -> Iterator[tuple[str, Sequence[Any]]]:
    zero_ranks = candidate.batch_ranks * candidate.mesh.get("context", 1)
    if zero_ranks > 1:
        yield "zero", [zero for zero in range(4) if zero != candidate.zero]
    batch_ranks, m = candidate.batch_ranks, candidate.micro_batches
    sizes = [n for n in (m // 2, 2 * m) if n >= 1 and candidate.batch_size // max(n, 1) >= batch_ranks]
    if candidate.schedule == "interleaved":
        sizes = [n for n in sizes if n % candidate.pipe == 0]
    if sizes:
        yield "micro_batches", sizes
    yield "recompute", [option for option in ("none", "attention", "block") if option != candidate.recompute][:2]
    if candidate.offload:
        yield "offload", [option for option in (None, *OFFLOADS) if option != candidate.offload]
    if candidate.mesh.get("model", 1) > 1:
        yield "sequence_parallel", [not candidate.sequence_parallel]
    if candidate.pipe > 1:
        yield "schedule", [name for name in ("1f1b", "zero-bubble", "gpipe") if name != candidate.schedule]


def _explain_gain(choice: str, chosen: Estimate, other: Estimate, limits: Limits) -> str:
    if broken := limits.broken(other):
        needs = limits.measured(other)
        shown = " and ".join(f"{limits.shown(name, needs[name])} of {name}" for name in sorted(broken))
        return f"{choice}: that would need {shown}"
    slower, larger = other.seconds / chosen.seconds - 1, other.memory / chosen.memory - 1
    gains = {part: other.parts[part] - chosen.parts[part] for part in other.parts}
    largest_gain = max(gains, key=lambda part: gains[part])
    cause = f", most of it {largest_gain}" if slower > 0.002 and gains[largest_gain] > 0 else ""
    return f"{choice}: that would take {slower:+.1%} time{cause}, and {larger:+.1%} memory"
