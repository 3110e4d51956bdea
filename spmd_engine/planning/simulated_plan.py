"""The search for a plan with uneven stages or a helper rank, where nothing else fits the memory of unequal nodes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from itertools import groupby, product
from math import inf
from string import digits
from typing import TYPE_CHECKING

import numpy as np

from spmd_engine.axes import PIPE, all_positions, axes_text, count_ranks
from spmd_engine.engine.state.assignment import BATCH, divide
from spmd_engine.errors import SpmdError
from spmd_engine.planning.plan_result import PlanResult
from spmd_engine.planning.search.budget import Budget
from spmd_engine.planning.search.estimate import Estimate, best_division
from spmd_engine.planning.search.plan_evaluation import PlanEvaluation
from spmd_engine.planning.search.search import (
    SHOWN_PLANS,
    Certificate,
    Constraints,
    Limits,
    SearchResult,
    objective,
    pareto,
)
from spmd_engine.planning.search.search_space import Candidate, SearchSpace, axes_that_shard, candidates
from spmd_engine.planning.simulator.simulation import MOST_RANKS
from spmd_engine.units import readable_bytes, readable_seconds

if TYPE_CHECKING:
    from spmd_engine.planning.planner import EvaluatedPlan, PlanEvaluator

SECONDS = 0.5  #: of the search for the best plan without limits of memory, also when the budget is spent
RECOMPUTED = ("none", "attention", "block")  #: the more, the less memory


def plan_with_uneven_stages(
    evaluator: PlanEvaluator, space: SearchSpace, without: PlanResult, budget: Budget
) -> PlanResult | None:
    """The best plan that is found with stages of different sizes; None if none fits.

    ``without`` has the closest plan with even ones, which lacks memory.
    """
    return _best_plan(evaluator, space, without, budget, _uneven_stages, "uneven stages")


def plan_with_helper_rank(
    evaluator: PlanEvaluator, space: SearchSpace, without: PlanResult, budget: Budget
) -> PlanResult | None:
    """The best plan that is found with one of the ranks as helper rank, for the last layers of a stage; None if none
    fits. ``without`` has the closest plan without it, which lacks memory."""
    return _best_plan(evaluator, space, without, budget, _helped_stages, "a helper rank")


FindPlan = Callable[["PlanEvaluator", SearchSpace, PlanResult, Budget], PlanResult | None]


def _best_plan(
    evaluator: PlanEvaluator,
    space: SearchSpace,
    without: PlanResult,
    budget: Budget,
    alike: Callable[..., Iterator],
    what: str,
) -> PlanResult | None:
    """The best plan that is found by simulations, since estimates assume equal ranks and stages.

    ``alike`` has lists of candidates that differ in choices of their own, those that need least memory first. The first
    of each list is simulated, then those that differ from the best in one choice, until none is better or the budget
    is spent.
    """
    request, nearest = evaluator.request, without.nearest_evaluation
    if nearest is None or not (why := _what_lacks_memory(evaluator, nearest)):
        return None
    simulated = _Simulated(evaluator, without.limits, budget)
    divided = list(alike(evaluator, space, simulated))
    left, best = [plans for plans in divided if simulated.fits(plans[0])], None
    fitting = [plans[0] for plans in left]
    while fitting and best != (best := min(fitting, key=simulated.goal_of)):
        near = [
            plan for plans in left for plan in plans if plan not in simulated.plans and _differences(plan, best) == 1
        ]
        fitting = [best, *filter(simulated.fits, near)]
    if best is None:
        return None
    chosen = simulated.plans[best]
    fitting = sorted(filter(simulated.fits, simulated.plans), key=simulated.goal_of)
    plans = [simulated.plans[candidate].refined for candidate in fitting]
    tried = sum(map(len, divided)), 0, len(simulated.plans)
    return PlanResult(
        request,
        SearchResult(plans[:SHOWN_PLANS], pareto(plans), Certificate(simulated.goal_of(best)[0], 0.0, *tried, False)),
        _with_parts(chosen.refined),
        chosen.evaluation,
        [f"{what}: {why}", *_cost_of_memory(evaluator, space, without, chosen.refined)],
        composition=best.composition(request.base),
        micro_batches=best.micro_batches,
        batch_size=best.batch_size,
    )


class _Simulated:
    """The simulated candidates, each once, while there is time left, and the first in any case."""

    def __init__(self, evaluator: PlanEvaluator, limits: Limits, budget: Budget) -> None:
        self._evaluator, self._limits, self._budget = evaluator, limits, budget
        self.plans: dict[Candidate, EvaluatedPlan] = {}

    def evaluation(self, candidate: Candidate) -> PlanEvaluation | None:
        """None if the layers cannot be divided so, or there is no time left."""
        if candidate not in self.plans and (not self.plans or self._budget.left > 0):
            with suppress(SpmdError):
                self.plans[candidate] = self._evaluator.evaluate(_unknown(candidate))
        return self.plans[candidate].evaluation if candidate in self.plans else None

    def fits(self, candidate: Candidate) -> bool:
        """Whether it keeps the limits."""
        return self.evaluation(candidate) is not None and not self._limits.broken(self.plans[candidate].refined)

    def goal_of(self, candidate: Candidate) -> tuple[float, ...]:
        """The smaller, the better."""
        return objective(self._evaluator.request.goal, self.plans[candidate].refined)


def _what_lacks_memory(evaluator: PlanEvaluator, nearest: PlanEvaluation) -> str:
    """The node of the rank that exceeds its memory most in the closest plan with even stages; empty if none does."""
    peaks = nearest.analysis.peak_bytes_by_rank()
    limits = evaluator.request.limits.memory_by_rank(nearest.machine)
    rank = max(range(len(peaks)), key=lambda rank: peaks[rank] / limits[rank])
    if peaks[rank] <= limits[rank]:
        return ""
    number, node = nearest.machine.places[rank]
    return (
        f"nothing fits without; rank {rank}, on node {number} ({node.name}), has {readable_bytes(limits[rank])} and "
        f"would need {readable_bytes(peaks[rank])} in the closest plan ({axes_text(nearest.analysis.axes)})"
    )


def _uneven_stages(evaluator: PlanEvaluator, space: SearchSpace, simulated: _Simulated) -> Iterator[list[Candidate]]:
    """The candidates of each mesh and division of layers."""
    for ranks in sorted(ranks for ranks in set(space.ranks) if ranks <= MOST_RANKS):
        machine = evaluator.request.machine.with_ranks(ranks).placed(space.order)
        nodes = [len(list(group)) for _, group in groupby(machine.node_numbers)]
        for plans in _by_mesh(evaluator, replace(space, ranks=[ranks], nodes=nodes)):
            for stages in [space.stages] if space.stages else _divisions(evaluator, plans[0]):
                yield [replace(plan, stages=stages) for plan in plans]


def _helped_stages(evaluator: PlanEvaluator, space: SearchSpace, simulated: _Simulated) -> Iterator[list[Candidate]]:
    """The candidates of each mesh of all ranks but one, which computes the last layers of a stage: the fewest with
    which no other rank lacks memory."""
    request, axes = evaluator.request, space.axes or axes_that_shard(space.model)
    space = replace(space, axes=[axis for axis in axes if axis in (*BATCH, PIPE)])
    for ranks in sorted(ranks for ranks in set(space.ranks) if 1 < ranks <= MOST_RANKS and space.order is None):
        node_numbers = request.machine.with_ranks(ranks).node_numbers[1:]  # rank 0 writes the run's files
        helpers = {number: rank for rank, number in enumerate(node_numbers, 1)}  # one of each node
        for plans, rank in product(_by_mesh(evaluator, replace(space, ranks=[ranks - 1])), helpers.values()):
            for layers in divide(space.model, plans[0].pipe, plans[0].composition(request.base).division):
                names = list(dict.fromkeys(space.model.layers[number][0].split("/")[0] for number in layers))
                helped = [_assigned(plans[0], names[-count:], rank) for count in range(1, len(names) + 1)]
                enough = partial(_owners_fit, evaluator, simulated)
                if (fewest := bisect_left(helped, True, key=enough)) < len(helped):
                    yield [replace(plan, assign=helped[fewest].assign) for plan in plans]


def _assigned(plan: Candidate, names: Sequence[str], rank: int) -> Candidate:
    """The candidate with consecutive layers and blocks, by name, on a helper rank."""
    runs = [list(run) for _, run in groupby(names, key=lambda name: name.rstrip(digits))]
    layers = [f"{run[0]}-{run[-1].removeprefix(run[0].rstrip(digits))}" if run[1:] else run[0] for run in runs]
    return replace(plan, assign=",".join(f"{each}:rank{rank}" for each in layers))


def _owners_fit(evaluator: PlanEvaluator, simulated: _Simulated, plan: Candidate) -> bool:
    """Whether no rank of the mesh lacks memory."""
    if (evaluation := simulated.evaluation(plan)) is None:
        return False
    peaks, limits = (
        evaluation.analysis.peak_bytes_by_rank(),
        evaluator.request.limits.memory_by_rank(evaluation.machine),
    )
    return all(peak <= limit for peak, limit in list(zip(peaks, limits, strict=True))[: count_ranks(plan.mesh)])


def _by_mesh(evaluator: PlanEvaluator, space: SearchSpace) -> list[list[Candidate]]:
    """The candidates of each mesh, those that need least memory first."""
    by_mesh: dict[tuple, list[Candidate]] = {}
    for candidate in candidates(replace(space, offload=(evaluator.request.base.offload,))):
        if candidate.chunks == 1:
            by_mesh.setdefault(candidate.axes, []).append(candidate)
    return [sorted(plans, key=_frugality) for plans in by_mesh.values()]


def _frugality(plan: Candidate) -> tuple[int, ...]:
    """The less memory a plan needs, the smaller."""
    return -RECOMPUTED.index(plan.recompute), -plan.sequence_parallel, -plan.micro_batches, -plan.zero


def _divisions(evaluator: PlanEvaluator, plan: Candidate) -> list[tuple[int, ...]]:
    """The first layers of stages that hold layers in proportion to their memory, and compute in equal time."""
    machine = evaluator.request.machine.with_ranks(plan.ranks).placed(plan.order)
    whole = Candidate((("data", 1),), plan.batch_size // plan.micro_batches, 1, recompute=plan.recompute)
    estimator = evaluator.planner.estimator(whole)
    if estimator is None:
        return []
    layers, limits = estimator.layers, evaluator.request.limits.memory_by_rank(machine)
    memory, speed = np.zeros(plan.pipe), np.zeros(plan.pipe)
    for rank, place in enumerate(all_positions(plan.mesh)):
        node, stage = machine.node(rank), place.coordinates[PIPE]
        memory[stage] += limits[rank]
        speed[stage] += machine.curve(node, str(evaluator.planner.dtype)).most / node.contention
    held = layers.elements * 4 * estimator.wide + layers.kept * (plan.pipe + 1) / 2  # 1F1B: 1 to p micro-batches
    found = [
        best_division(list(costs), plan.pipe, slowdowns=list(shares.sum() / shares))
        for costs, shares in ((held, memory), (layers.work, speed))
    ]
    return [stages for stages in dict.fromkeys(found) if stages is not None]


def _differences(one: Candidate, other: Candidate) -> int:
    """The number of choices in which two candidates differ."""
    return sum(getattr(one, field.name) != getattr(other, field.name) for field in fields(Candidate))


def _unknown(candidate: Candidate) -> Estimate:
    """An estimate without numbers, of a candidate that is simulated at once."""
    return Estimate(candidate, inf, inf, 0.0, 0.0, 1.0, {}, {}, 0)


def _with_parts(plan: Estimate) -> Estimate:
    return replace(plan, parts={"work of the busiest rank": plan.work, "waiting": plan.seconds - plan.work})


def _cost_of_memory(
    evaluator: PlanEvaluator, space: SearchSpace, without: PlanResult, chosen: Estimate
) -> Iterator[str]:
    """What the limits of memory cost: the difference to the best plan without them, if one is found that is faster."""
    request = evaluator.request
    unlimited = Constraints(replace(without.limits, memory=None), request.fixed)
    found = evaluator.planner.search(space, unlimited, request.goal, seconds=SECONDS, front=False, keep=1).best
    for other in (evaluator.evaluate(plan, even=True).refined for plan in found):
        if other.seconds < chosen.seconds:
            yield (
                f"without limits of memory {other.candidate} would take {readable_seconds(other.seconds)}: the limits "
                f"cost {readable_seconds(chosen.seconds - other.seconds)} of a step "
                f"({chosen.seconds / other.seconds - 1:+.1%})"
            )
