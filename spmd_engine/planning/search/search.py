"""The planner's search: branch and bound over the search space, with a certificate.

Each candidate has two lower bounds. The first holds for every sharding of its layers into as many parts, and needs dry
runs of unsharded layers only. The second holds for every division into stages, and needs dry runs of layers that are
sharded as in the candidate. The candidate with the least bound comes next: its second bound is computed, or it is
estimated. The search ends when the next bound is no better than the best plans found; then no other candidate is
better. If time runs out before, the certificate says by how much another candidate could still be better.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from heapq import heapify, heappop, heappush
from statistics import fmean
from time import process_time
from typing import Any, NamedTuple

import numpy as np

from spmd_engine.arrays.precision import dtype_of
from spmd_engine.axes import axes_text
from spmd_engine.configuration import Configuration, setting
from spmd_engine.engine.optimizers import AdamW, Optimizer
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.errors import SpmdError, UsageError
from spmd_engine.models import Model
from spmd_engine.planning.machine.machine import Machine
from spmd_engine.planning.search.cost_cache import CostCache, ShardedCosts
from spmd_engine.planning.search.estimate import Bound, Estimate, Estimator
from spmd_engine.planning.search.layer_costs import ShardedLayers, repeated_layers
from spmd_engine.planning.search.plan_evaluation import stage_slowdowns
from spmd_engine.planning.search.profile import Profiles
from spmd_engine.planning.search.search_space import FIXABLE, Candidate, SearchSpace, candidates
from spmd_engine.units import BYTES, SECONDS, readable_bytes, readable_seconds

# --- Goals of a search, and constraints on plans


GOALS = ("latency", "throughput", "memory", "balance", "communication")


def objective(goal: str, estimate: Estimate) -> tuple[float, ...]:
    """What a search minimizes; the second number decides between equals."""
    return {
        "latency": (estimate.seconds, estimate.memory),
        "throughput": (-estimate.throughput, estimate.memory),
        "memory": (estimate.memory, estimate.seconds),
        "balance": (round(estimate.imbalance, 2), estimate.seconds),
        "communication": (estimate.sent, estimate.seconds),
    }[goal]


def objective_bound(goal: str, candidate: Candidate, bound: Bound) -> tuple[float, ...]:
    """A lower bound of the objective over all divisions of a candidate into stages."""
    return {
        "latency": (bound.seconds, bound.memory),
        "throughput": (-candidate.batch_size / bound.seconds if bound.seconds else -float("inf"), bound.memory),
        "memory": (bound.memory, bound.seconds),
        "balance": (1.0, bound.seconds),
        "communication": (0.0, bound.seconds),
    }[goal]


@dataclass(frozen=True)
class Limits(Configuration):
    """Upper limits; None: no limit. Texts with units are values as well: "24GiB", "100ms".

    Raises UsageError for a limit that is not above 0.
    """

    memory: float | None = setting(None, unit=BYTES)  #: bytes per rank
    latency: float | None = setting(None, unit=SECONDS)  #: seconds per step
    bandwidth: float | None = setting(None, unit=BYTES)  #: bytes per second that a rank sends
    compute: float | None = setting(None, unit=SECONDS)  #: seconds of work of a rank per step

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, limit in vars(self).items():
            if limit is not None and not limit > 0:
                raise UsageError(f"--{name} {limit:g}: it must be above 0")

    def memory_by_rank(self, machine: Machine) -> list[float]:
        """Bytes that each rank of the machine may hold."""
        sizes = [machine.memory_of(rank) for rank in range(machine.ranks)]
        return [min(self.memory or size, size) for size in sizes]

    def with_memory_of(self, machine: Machine) -> Limits:
        """The limits with the memory of the machine's ranks. For unequal ranks it is the mean, since they may store
        state unevenly; the evaluation of a plan checks whether each rank has room."""
        sizes = self.memory_by_rank(machine)
        return replace(self, memory=fmean(sizes) if machine.heterogeneous else min(sizes))

    def measured(self, estimate: Estimate) -> dict[str, float]:
        """What a candidate needs, for each limit that is set."""
        needs = {
            "memory": estimate.memory,
            "latency": estimate.seconds,
            "bandwidth": estimate.sent / estimate.candidate.ranks / estimate.seconds,
            "compute": estimate.work,
        }
        return {name: need for name, need in needs.items() if getattr(self, name) is not None}

    def broken(self, estimate: Estimate) -> frozenset[str]:
        """The names of the limits that a candidate breaks."""
        needs = self.measured(estimate)
        return frozenset(name for name, need in needs.items() if need > getattr(self, name) * (1 + 1e-9))

    def surely_broken(self, bound: Bound) -> bool:
        """Whether every division of a candidate breaks a limit."""
        if self.memory is not None and bound.memory > self.memory:
            return True
        return self.latency is not None and bound.seconds > self.latency

    def shown(self, name: str, number: float | None = None) -> str:
        """A limit, or a need in its unit, as text."""
        shown = getattr(self, name) if number is None else number
        if name == "memory":
            return readable_bytes(shown)
        return f"{readable_bytes(shown)}/s" if name == "bandwidth" else readable_seconds(shown)


LIMITS = tuple(limit.name for limit in fields(Limits))


@dataclass(frozen=True)
class Constraints:
    """Limits, and fixed choices."""

    limits: Limits = Limits()
    fixed: Mapping[str, Any] = field(default_factory=dict)  #: by name, of FIXABLE and "ranks", "batch_size"

    def broken(self, candidate: Candidate, estimate: Estimate | None = None) -> frozenset[str]:
        """The names of the constraints that a candidate breaks."""
        wrong = {name for name, wanted in self.fixed.items() if not _keeps(candidate, name, wanted)}
        return frozenset(wrong) | (self.limits.broken(estimate) if estimate else frozenset())

    @property
    def names(self) -> Sequence[str]:
        """The names of all constraints that are set."""
        return [name for name in LIMITS if getattr(self.limits, name) is not None] + list(self.fixed)

    def shown(self, name: str) -> str:
        """A constraint as text."""
        if name in self.fixed:
            wanted = self.fixed[name]
            if isinstance(wanted, Mapping):
                wanted = axes_text(wanted)
            if isinstance(wanted, tuple | list):
                wanted = " or ".join(map(str, wanted))
            return f"{name.replace('_', ' ')} {wanted}"
        return f"{name} at most {self.limits.shown(name)}"


def _keeps(candidate: Candidate, name: str, wanted: Any) -> bool:
    if name in ("ranks", "batch_size"):
        return getattr(candidate, name) in wanted
    if name in ("schedule", "chunks") and candidate.pipe == 1:
        return True
    assert name in FIXABLE, name
    return getattr(candidate, name) == (dict(wanted) if name == "mesh" else wanted)


# --- The search


SHOWN_PLANS = 5  #: the best plans that a search keeps
PATIENCE = 3  #: additional time limits for which a search that has found no plan continues
FRONT_SECONDS = 0.2  #: for estimates of further plans on the Pareto front


@dataclass(frozen=True)
class Certificate:
    """How far the best plan is from the best possible, by the planner's estimates."""

    best: float  #: the objective of the best plan
    bound: float  #: no candidate has a smaller objective
    candidates: int  #: in the search space
    excluded: int  #: candidates whose bounds break a limit
    estimated: int
    complete: bool = True  #: whether the time limit was not reached

    @property
    def gap(self) -> float:
        """The share by which another candidate might be better: 0 if the best is proven."""
        return max(0.0, (self.best - self.bound) / abs(self.best)) if self.best else 0.0

    def as_json(self) -> dict[str, Any]:
        """The certificate as JSON."""
        numbers = {"gap": float(self.gap), "best": float(self.best), "bound": float(self.bound)}
        counts = ("candidates", "excluded", "estimated", "complete")
        return numbers | {name: getattr(self, name) for name in counts}


@dataclass(frozen=True)
class SearchResult:
    """The result of a search."""

    best: Sequence[Estimate]  #: the best first; empty if no candidate keeps the constraints
    front: Sequence[Estimate]  #: the Pareto front of seconds and memory
    certificate: Certificate


class _Entry(NamedTuple):
    """A candidate that is not estimated yet; the smallest entry comes next."""

    least: tuple[float, ...]  #: the bound of the objective
    number: int  #: in the order of the search space
    candidate: Candidate
    bound: Bound
    first: bool  #: whether this is its first bound


class Planner:
    """Searches for plans; searches share the costs of layers."""

    def __init__(
        self,
        model: Model,
        machine: Machine,
        *,
        dtype: Any = np.float32,
        sequence: int | None = None,
        optimizer: Optimizer | None = None,
        base: ParallelConfig = ParallelConfig(),  # noqa: B008 (immutable)
        overlap: bool = True,
    ) -> None:
        """``overlap``: whether the reduction of gradients overlaps with the last backward, as in the engine."""
        self.model, self.machine = model, machine
        optimizer = optimizer or AdamW()
        self.dtype = dtype_of(dtype)
        self.itemsize = self.dtype.itemsize
        self.profiles = Profiles(model, machine, dtype, sequence, optimizer, base)
        self._layers: dict[tuple[int, str], ShardedLayers] = {}
        self._cache = CostCache(model, machine, self.dtype, len(optimizer.kinds), overlap)
        self._fixed_shares = base.work_shares
        self._costs: dict[tuple, ShardedCosts | None] = {}  # None: the model cannot be sharded by the candidate
        self._refusal: SpmdError | None = None  # why one of them cannot

    def estimator(self, candidate: Candidate, first: bool = False) -> Estimator | None:
        """The estimator of a candidate, or of its ``first`` bound; None if the model cannot be sharded by it."""
        samples = candidate.batch_size // candidate.micro_batches
        key = candidate.axes, samples, candidate.sequence_parallel, candidate.recompute, candidate.zero, first
        if key not in self._costs:
            self._costs[key] = self._sharded_costs(candidate, first)
        costs = self._costs[key]
        if costs is not None and candidate.order is not None:
            costs = replace(costs, slowdowns=self._slowdowns(candidate))
        return Estimator(self._cache, candidate, costs) if costs is not None else None

    def check_layers(self) -> None:
        """Raise the error of a candidate if no candidate could be analyzed: the layers themselves are wrong."""
        if self._refusal is not None and not any(self._costs.values()):
            raise self._refusal

    def _sharded_costs(self, candidate: Candidate, first: bool) -> ShardedCosts | None:
        try:
            costs, update = (self.profiles.bounds if first else self.profiles.costs)(candidate)
        except SpmdError as error:
            self._refusal = error
            return None
        key = id(costs), candidate.recompute
        if key not in self._layers:
            self._layers[key] = ShardedLayers(self.model, costs, self._repeated_layers(candidate.recompute))
        zero = 0 if first else candidate.zero  # a bound on work does not bound what hides ZeRO's gathers
        sharded = self._cache.sharded_costs(candidate.axes, zero, self._layers[key], update)
        return replace(sharded, slowdowns=self._slowdowns(replace(candidate, order=None)))

    def _slowdowns(self, candidate: Candidate) -> np.ndarray | None:
        return stage_slowdowns(self.machine, self.profiles.seconds_by_node, candidate, self._fixed_shares)

    def _repeated_layers(self, recompute: str) -> list[range]:
        return self._cache.once(("repeated", recompute), lambda: repeated_layers(self.model, recompute))

    def search(
        self,
        space: SearchSpace,
        constraints: Constraints,
        goal: str = "latency",
        *,
        seconds: float = 30.0,
        most: float | None = None,
        front: bool = True,
        keep: int = SHOWN_PLANS,
        first: bool = False,
    ) -> SearchResult:
        """The best ``keep`` plans for a goal, within about ``seconds`` of processor time, or, while no plan is found,
        within ``most`` (None: PATIENCE times as long after that).

        If none was found by then, up to ``keep`` candidates are estimated nevertheless. ``front``: also complete the
        Pareto front. ``first``: end with the first plan that keeps the constraints, and with none when time runs out
        before all candidates have a bound.
        """
        began = process_time()
        deadline = began + seconds
        limits = constraints.limits
        entries: list[_Entry] = []
        total = excluded = 0
        for candidate in candidates(space):
            if first and process_time() > deadline + PATIENCE * seconds:
                return SearchResult([], [], Certificate(np.inf, -np.inf, total, excluded, 0, False))
            total += 1
            entry = self._bound(goal, candidate, total, limits, first=self.profiles.shards_layers(candidate))
            if entry is None:
                excluded += 1
            else:
                entries.append(entry)
        heapify(entries)
        second_bounds = sum(not entry.first for entry in entries)
        best: list[Estimate] = []
        estimates: dict[Candidate, Estimate | None] = {}
        left: list[tuple[float, ...]] = []  # bounds of candidates that were not estimated
        complete = True
        patience = max(deadline, process_time()) + PATIENCE * seconds if most is None else began + most
        while entries:
            entry = heappop(entries)
            candidate, late = entry.candidate, process_time() > deadline
            done = first and best or len(best) == keep and entry.least >= objective(goal, best[-1])
            given_up = late and len(estimates) >= keep and (best or process_time() > patience)
            if done or given_up:
                left.append(entry.least)
                complete = complete and bool(done)
                break
            if entry.first and late and second_bounds > len(estimates):
                left.append(
                    entry.least
                )  # estimate candidates that have their second bound, rather than compute more bounds
                complete = False
                continue
            if entry.first:
                second = self._bound(goal, candidate, entry.number, limits, first=False)
                if second is None:
                    excluded += 1
                else:
                    heappush(entries, second)
                    second_bounds += 1
                continue
            estimate = estimates[candidate] = self._estimate(candidate, limits.memory)
            if estimate is not None and not limits.broken(estimate):
                best = sorted([*best, estimate], key=lambda plan: objective(goal, plan))[:keep]
        reached = objective(goal, best[0])[0] if best else float("inf")
        bound = min([reached, *(values[0] for values in left)])
        certificate = Certificate(reached, bound, total, excluded, len(estimates), complete)
        points = [plan for plan in estimates.values() if plan is not None and not limits.broken(plan)]
        if front and best:
            points += self._extend_front(entries, points, limits, min(deadline, process_time() + FRONT_SECONDS))
        return SearchResult(best, pareto(points), certificate)

    def _bound(self, goal: str, candidate: Candidate, number: int, limits: Limits, *, first: bool) -> _Entry | None:
        """A candidate with its first bound, or its second; None if it is impossible or breaks a limit."""
        estimator = self.estimator(candidate, first)
        if estimator is None or limits.surely_broken(bound := estimator.bound()):
            return None
        return _Entry(objective_bound(goal, candidate, bound), number, candidate, bound, first)

    def _estimate(self, candidate: Candidate, memory: float | None) -> Estimate | None:
        estimator = self.estimator(candidate)
        assert estimator is not None
        return estimator.estimate(memory if memory is not None else np.inf) or estimator.estimate()

    def _extend_front(
        self, entries: Sequence[_Entry], points: Sequence[Estimate], limits: Limits, deadline: float
    ) -> Iterator[Estimate]:
        """Estimates of candidates that may belong to the front: no plan beats both of their bounds."""
        front = pareto(points)
        for _, _, candidate, bound, _ in sorted(entries, key=lambda entry: entry.bound.memory):
            if process_time() > deadline:
                return
            if any(plan.seconds <= bound.seconds and plan.memory <= bound.memory for plan in front):
                continue
            estimate = self._estimate(candidate, limits.memory)
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
