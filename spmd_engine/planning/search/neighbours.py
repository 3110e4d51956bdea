"""What differs from a plan in one way, and may be better: neighbourhoods of the local search ``improved``."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from itertools import groupby, product
from string import digits
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd_engine.axes import PIPE, all_positions, axes_text, count_ranks
from spmd_engine.engine import ParallelConfig
from spmd_engine.engine.state.assignment import BATCH, divide
from spmd_engine.planning.machine.machine import Machine
from spmd_engine.planning.search.estimate import Estimate, best_division
from spmd_engine.planning.search.improve import improved
from spmd_engine.planning.search.placement import Order, RankOrders, best_orders, proposed_orders
from spmd_engine.planning.search.search import SHOWN_PLANS, Limits, objective, search
from spmd_engine.planning.search.search_space import (
    FIXABLE,
    Candidate,
    SearchSpace,
    axes_that_shard,
    can_offload,
    candidates,
)
from spmd_engine.planning.search.shares import state_shares, work_shares
from spmd_engine.planning.simulator.simulation import MOST_RANKS

if TYPE_CHECKING:
    from spmd_engine.planning.search.plan_search import PlanSearch

OFFLOADS = ("optimizer", "activations", "optimizer,activations", "optimizer,parameters,activations")
RECOMPUTED = ("none", "attention", "block")  #: the more, the less memory
LEAST_GAIN = 0.002  #: share of a step that another order of ranks must save
MOST_EVALUATIONS = 1_000  #: most evaluations of the search for the best plan of each single strategy


def places_on(machine: Machine, zero: int = 0, choices: Sequence[str | None] = OFFLOADS) -> list[str | None]:
    """The ``choices`` of what is offloaded that are possible on a machine."""
    devices = machine.nodes[0].has_devices
    return [choice for choice in choices if can_offload(choice, zero, of_devices=devices)]


def with_less_memory(composition: ParallelConfig, stage: int, machine: Machine) -> Iterator[tuple[str, ParallelConfig]]:
    """The composition with more offloaded, as text and as it is; none if it offloads something."""
    for choice in () if composition.offload else places_on(machine, stage):
        yield f"--offload {choice}", composition.changed(offload=choice)


# --- Unequal ranks: uneven shares, and which rank is where


def with_shares(plans: PlanSearch, candidate: Candidate) -> Iterator[Candidate]:
    """The candidate with uneven shares of work, and then also of state, if ranks are unequal."""
    request = plans.request
    for name, find_shares in (("shares", work_shares), ("state_shares", state_shares)):
        plan = plans.plan(candidate)
        if plan.evaluation is None or not plans.heterogeneous or getattr(request.base, name):
            continue
        limits = request.limits.memory_by_rank(plan.evaluation.machine)
        if shares := find_shares(request.model, candidate, plan.evaluation, limits):
            candidate = replace(candidate, **{name: shares})
            yield candidate


def with_order(plans: PlanSearch, candidate: Candidate) -> Iterator[Candidate]:
    """The candidate with ranks in the order that is fastest by simulation, and with stages for that order; none unless
    it is faster by more than LEAST_GAIN."""
    request, plan = plans.request, plans.plan(candidate)
    orders = RankOrders(request.machine.with_ranks(candidate.ranks), candidate.mesh)
    given = request.placement == "order" or request.base.rank_order is not None
    if plan.evaluation is None or given or not orders.matter or not 1 < candidate.ranks <= MOST_RANKS:
        return
    listed, few, stages = tuple(range(candidate.ranks)), orders.few(), request.fixed.get("stages")
    searched, left = request.placement == "auto", plans.budget.left
    budget = plans.budget.part(most=plans.orders_left) if searched else plans.budget

    def in_order(order: Order, **changes: Any) -> Candidate:
        return replace(candidate, order=None if order == listed else order, **changes)

    def divided(order: Order) -> Estimate | None:
        return plans.estimate(in_order(order, stages=stages))

    def near(other: Candidate) -> Iterator[Candidate]:
        if not searched:
            return
        order = other.order or listed
        if (estimate := divided(order)) is not None:
            yield estimate.candidate
        yield from (in_order(neighbour, stages=other.stages) for neighbour in few or orders.near(order))

    proposed = proposed_orders(
        request.placement, plan.evaluation.analysis, orders, request.limits.memory_by_rank(orders.machine)
    )
    if searched and candidate.pipe > 1 and stages is None:
        estimated = lambda order: (estimate.seconds if (estimate := divided(order)) else float("inf"),)
        proposed = [proposed[0], *best_orders(orders, estimated, proposed, budget)[:SHOWN_PLANS]]
    estimates = [estimate for order in dict.fromkeys(proposed[1:]) if (estimate := divided(order)) is not None]
    starts = [candidate, *(estimate.candidate for estimate in estimates)]
    starts += [] if few or not searched else [in_order(order, stages=candidate.stages) for order in orders.drawn()]
    price = lambda other: plans.price(plans.plan(other))
    best = improved(starts, near, price, budget, descents=1 if few else len(starts))[0]
    plans.orders_left -= left - plans.budget.left
    before, after = price(candidate), price(best)
    if after[0] < before[0] or after[1] * (1 + LEAST_GAIN) < before[1]:
        yield best


# --- One other choice, with words for the reasons

#: Strategies of a single kind: name, mesh axis, and ZeRO stages (None: any).
SINGLE_STRATEGIES = (
    ("data parallelism", "data", (0,)),
    ("ZeRO", "data", (1, 2, 3)),
    ("tensor parallelism", "model", None),
    ("a pipeline", "pipe", None),
)


def with_other_choice(
    plans: PlanSearch, space: SearchSpace, candidate: Candidate
) -> Iterator[tuple[str, Estimate | None]]:
    """The best plans, by their estimates, that differ in one choice: the choice with that of the alternative, and its
    estimate (None: it is impossible)."""
    goal, mesh_text = plans.request.goal, axes_text(candidate.mesh)
    for name, axis, zeros in SINGLE_STRATEGIES:
        mesh = {axis: candidate.ranks}
        usable = axis in axes_that_shard(space.model) and axis in (space.axes or [axis])
        if space.zero is not None:
            zeros = [space.zero] if zeros is None or space.zero in zeros else []
        if candidate.ranks == 1 or mesh == candidate.mesh or not usable or zeros == []:
            continue
        best = _best_of_strategy(plans, replace(space, mesh=mesh, ranks=[candidate.ranks]), zeros or [None])
        alternative = best.candidate if best is not None else f"{axis}={candidate.ranks}"
        yield f"mesh {mesh_text}, not {alternative} ({name})", best
    free = {name: None for name in FIXABLE} | {"mesh": candidate.mesh, "batch_sizes": [candidate.batch_size]}
    possible = set(candidates(replace(space, **free)))
    for name, options in _list_options(candidate):
        others = []
        for option in options:
            changed = {name: option, "stages": None} | ({"chunks": 1} if name == "schedule" else {})
            other = replace(candidate.plain, **changed)
            if other in possible and (estimate := plans.estimate(other)) is not None:
                others.append((option, estimate))
        if others:
            option, best = min(others, key=lambda pair: objective(goal, pair[1]))
            not_chosen = "nothing" if option is None else option
            yield f"{name.replace('_', ' ')} {getattr(candidate, name)}, not {not_chosen}", best


def _best_of_strategy(plans: PlanSearch, space: SearchSpace, zeros: Sequence[int | None]) -> Estimate | None:
    """The best plan on a mesh with one of these ZeRO stages; if none keeps the limits, the one with least memory."""
    best_plans, limits = [], plans.limits
    for zero in zeros:
        for tried_limits, goal in ((limits, plans.request.goal), (Limits(), "memory")):
            budget = plans.budget.part(most=MOST_EVALUATIONS)
            on_mesh = replace(space, zero=zero)
            if best := search(plans.model, on_mesh, tried_limits, goal, budget, front=False, keep=1).best:
                best_plans.append(best[0])
                break
    fitting = [plan for plan in best_plans if not limits.broken(plan)]
    goal = plans.request.goal if fitting else "memory"
    return min(fitting or best_plans, key=lambda plan: objective(goal, plan), default=None)


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
    yield "recompute", [option for option in RECOMPUTED if option != candidate.recompute][:2]
    if candidate.offload:
        yield "offload", [option for option in (None, *OFFLOADS) if option != candidate.offload]
    if candidate.mesh.get("model", 1) > 1:
        yield "sequence_parallel", [not candidate.sequence_parallel]
    if candidate.pipe > 1:
        yield "schedule", [name for name in ("1f1b", "zero-bubble", "gpipe") if name != candidate.schedule]


# --- Stages of different sizes, and helper ranks, for nodes that lack memory. These are simulated, since estimates
# --- assume equal ranks and stages: lists of candidates that differ in choices of their own, the frugal ones first


def uneven_stages(plans: PlanSearch) -> Iterator[list[Candidate]]:
    """The candidates of each mesh and division of layers."""
    space = plans.space
    for ranks in sorted(ranks for ranks in set(space.ranks) if ranks <= MOST_RANKS):
        machine = plans.request.machine.with_ranks(ranks).placed(space.base.order)
        nodes = [len(list(group)) for _, group in groupby(machine.node_numbers)]
        for several in _by_mesh(replace(space, ranks=[ranks], nodes=nodes)):
            for stages in [space.stages] if space.stages else _divisions(plans, several[0]):
                yield [replace(candidate, stages=stages) for candidate in several]


def assigned_stages(plans: PlanSearch) -> Iterator[list[Candidate]]:
    """The candidates of each mesh of all ranks but one, which computes the last layers of a stage: the fewest with
    which no other rank lacks memory."""
    request, axes = plans.request, plans.space.axes or axes_that_shard(plans.space.model)
    space = replace(plans.space, axes=[axis for axis in axes if axis in (*BATCH, PIPE)])
    for ranks in sorted(ranks for ranks in set(space.ranks) if 1 < ranks <= MOST_RANKS and space.base.order is None):
        node_numbers = request.machine.with_ranks(ranks).node_numbers[1:]  # rank 0 writes the run's files
        taken = {number: rank for rank, number in enumerate(node_numbers, 1)}  # one of each node
        for several, rank in product(_by_mesh(replace(space, ranks=[ranks - 1])), taken.values()):
            frugal = several[0]
            for layers in divide(space.model, frugal.pipe, frugal.composition(request.base).division):
                names = list(dict.fromkeys(space.model.layers[number][0].split("/")[0] for number in layers))
                reduced = [_assigned(frugal, names[-count:], rank) for count in range(1, len(names) + 1)]
                fewest = bisect_left(reduced, True, key=lambda other: _owners_fit(plans, other))
                yield from [[replace(other, assign=few.assign) for other in several] for few in reduced[fewest:][:1]]


def differences(one: Candidate, other: Candidate) -> int:
    """The number of choices in which two candidates differ."""
    return sum(getattr(one, field.name) != getattr(other, field.name) for field in fields(Candidate))


def _assigned(plan: Candidate, names: Sequence[str], rank: int) -> Candidate:
    """The candidate with consecutive layers and blocks, by name, on a helper rank."""
    runs = [list(run) for _, run in groupby(names, key=lambda name: name.rstrip(digits))]
    layers = [f"{run[0]}-{run[-1].removeprefix(run[0].rstrip(digits))}" if run[1:] else run[0] for run in runs]
    return replace(plan, assign=",".join(f"{span}:rank{rank}" for span in layers))


def _owners_fit(plans: PlanSearch, candidate: Candidate) -> bool:
    """Whether no rank of the mesh lacks memory."""
    plan = plans.only_simulated(candidate)
    if plan is None or plan.evaluation is None:
        return False
    limits = plans.request.limits.memory_by_rank(plan.evaluation.machine)
    peaks = plan.evaluation.analysis.peak_bytes_by_rank()[: count_ranks(candidate.mesh)]
    return all(peak <= limit for peak, limit in zip(peaks, limits, strict=False))


def _by_mesh(space: SearchSpace) -> list[list[Candidate]]:
    """The candidates of each mesh, those that need least memory first."""
    by_mesh: dict[tuple, list[Candidate]] = {}
    for candidate in candidates(space):
        if candidate.chunks == 1:
            by_mesh.setdefault(candidate.axes, []).append(candidate)
    return [sorted(several, key=_frugality) for several in by_mesh.values()]


def _frugality(plan: Candidate) -> tuple[int, ...]:
    """The less memory a plan needs, the smaller."""
    return -RECOMPUTED.index(plan.recompute), -plan.sequence_parallel, -plan.micro_batches, -plan.zero


def _divisions(plans: PlanSearch, plan: Candidate) -> list[tuple[int, ...]]:
    """The first layers of stages that hold layers in proportion to their memory, and compute in equal time."""
    machine = plans.request.machine.with_ranks(plan.ranks).placed(plan.order)
    whole = Candidate((("data", 1),), plan.batch_size // plan.micro_batches, 1, recompute=plan.recompute)
    estimator = plans.model.estimator(whole)
    if estimator is None:
        return []
    layers, limits = estimator.layers, plans.request.limits.memory_by_rank(machine)
    memory, speed = np.zeros(plan.pipe), np.zeros(plan.pipe)
    for rank, place in enumerate(all_positions(plan.mesh)):
        node, stage = machine.node(rank), place.coordinates[PIPE]
        memory[stage] += limits[rank]
        speed[stage] += machine.curve(node, str(plans.model.dtype)).most / node.contention
    held = layers.elements * 4 * estimator.wide + layers.kept * (plan.pipe + 1) / 2  # 1F1B: 1 to p micro-batches
    divisions = [
        best_division(list(costs), plan.pipe, slowdowns=list(shares.sum() / shares))
        for costs, shares in ((held, memory), (layers.work, speed))
    ]
    return [stages for stages in dict.fromkeys(divisions) if stages is not None]
