"""The search for a plan with uneven stages, where nothing else fits the memory of unequal nodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, replace
from itertools import groupby
from math import inf
from time import process_time
from typing import TYPE_CHECKING

import numpy as np

from spmd_engine.axes import PIPE, all_positions, axes_text
from spmd_engine.errors import SpmdError
from spmd_engine.planning.plan_result import PlanResult
from spmd_engine.planning.search.estimate import Estimate, best_division
from spmd_engine.planning.search.plan_evaluation import PlanEvaluation
from spmd_engine.planning.search.search import SHOWN_PLANS, Certificate, Constraints, SearchResult, objective, pareto
from spmd_engine.planning.search.search_space import Candidate, SearchSpace, candidates
from spmd_engine.planning.simulator.simulation import MOST_RANKS
from spmd_engine.units import readable_bytes, readable_seconds

if TYPE_CHECKING:
    from spmd_engine.planning.planner import EvaluatedPlan, PlanEvaluator

SECONDS = 2.0  #: of the search for the best plan without limits of memory
RECOMPUTED = ("none", "attention", "block")  #: the more, the less memory


def plan_with_uneven_stages(evaluator: PlanEvaluator, space: SearchSpace, without: PlanResult) -> PlanResult | None:
    """The best plan that is found with stages of different sizes; None if none fits.

    ``without`` has the closest plan with even ones, which lacks memory. Estimates assume equal stages, so steps are
    simulated: for each mesh and division of layers the one that needs least memory, then those that differ from the
    best in one choice, until none is better or time runs out.
    """
    request, limits, nearest = evaluator.request, without.limits, without.nearest_evaluation
    if nearest is None or not (why := _what_lacks_memory(evaluator, nearest)):
        return None
    ends, tried = process_time() + request.seconds, dict[Candidate, "EvaluatedPlan"]()

    def fits(candidate: Candidate) -> bool:
        if candidate not in tried and (not tried or process_time() < ends):
            with suppress(SpmdError):  # the layers cannot be divided so
                tried[candidate] = evaluator.evaluate(_unknown(candidate))
        plan = tried.get(candidate)
        return plan is not None and plan.evaluation is not None and not limits.broken(plan.refined)

    def goal_of(candidate: Candidate) -> tuple[float, ...]:
        return objective(request.goal, tried[candidate].refined)

    divided = list(_candidates(evaluator, space))
    left, best = [plans for plans in divided if fits(plans[0])], None
    fitting = [plans[0] for plans in left]
    while fitting and best != (best := min(fitting, key=goal_of)):
        near = [plan for plans in left for plan in plans if plan not in tried and _differences(plan, best) == 1]
        fitting = [best, *filter(fits, near)]
    if best is None:
        return None
    chosen = tried[best]
    plans = [tried[candidate].refined for candidate in sorted(filter(fits, tried), key=goal_of)]
    unproven = Certificate(goal_of(best)[0], 0.0, sum(map(len, divided)), 0, len(tried), complete=False)
    return PlanResult(
        request,
        SearchResult(plans[:SHOWN_PLANS], pareto(plans), unproven),
        _with_parts(chosen.refined),
        chosen.evaluation,
        [f"uneven stages: {why}", *_cost_of_memory(evaluator, space, without, chosen.refined)],
        composition=best.composition(request.base),
        micro_batches=best.micro_batches,
        batch_size=best.batch_size,
    )


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


def _candidates(evaluator: PlanEvaluator, space: SearchSpace) -> Iterator[list[Candidate]]:
    """The candidates of each mesh and division of layers, those that need least memory first."""
    base = evaluator.request.base
    for ranks in sorted(ranks for ranks in set(space.ranks) if ranks <= MOST_RANKS):
        machine = evaluator.request.machine.with_ranks(ranks).placed(space.order)
        nodes = [len(list(group)) for _, group in groupby(machine.node_numbers)]
        uneven = replace(space, ranks=[ranks], nodes=nodes, offload=(base.offload,))
        by_mesh: dict[tuple, list[Candidate]] = {}
        for candidate in candidates(uneven):
            if candidate.chunks == 1:
                by_mesh.setdefault(candidate.axes, []).append(candidate)
        for plans in by_mesh.values():
            plans.sort(key=_frugality)
            for stages in [space.stages] if space.stages else _divisions(evaluator, plans[0]):
                yield [replace(plan, stages=stages) for plan in plans]


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
    """What the limits of memory cost: the difference to the best plan without them."""
    request = evaluator.request
    unlimited = Constraints(replace(without.limits, memory=None), request.fixed)
    found = evaluator.planner.search(space, unlimited, request.goal, seconds=SECONDS, front=False, keep=1).best
    for other in (evaluator.evaluate(plan, even=True).refined for plan in found):
        more = chosen.seconds - other.seconds
        yield (
            f"without limits of memory {other.candidate} would take {readable_seconds(other.seconds)}: the split costs "
            f"{readable_seconds(max(more, 0.0))} of a step ({chosen.seconds / other.seconds - 1:+.1%})"
        )
