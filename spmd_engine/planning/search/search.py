"""The planner's search: branch and bound over the lattice, with a certificate.

Every candidate has two bounds: no way to cut its layers into as many parts is quicker or needs less memory than the
first, no way to divide them into stages than the second. Each costs microseconds; but for the second one must look at
layers that are cut as the candidate cuts them, for the first only at whole ones. The candidate of the least bound comes
next: it gets its second bound, or is estimated. The search ends when the next bound is no better than what was found:
then nothing that was left out is better. If time runs out before, the certificate says by how much the best could still
be beaten.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from time import process_time
from typing import Any, NamedTuple

import numpy as np

from spmd_engine.engine.optimizers import AdamW, Optimizer
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.engine.state.split_weights import WORK, parse_shares
from spmd_engine.errors import SpmdError
from spmd_engine.models import Model
from spmd_engine.planning.machine.machine import Machine
from spmd_engine.planning.search.cost_cache import Cut, Setting
from spmd_engine.planning.search.estimate import Bound, Estimate, Estimator
from spmd_engine.planning.search.goals import Constraints, Limits, least, value
from spmd_engine.planning.search.layer_costs import ShardedLayers, repeated_layers
from spmd_engine.planning.search.node_slowdown import stage_paces
from spmd_engine.planning.search.profile import Profiles
from spmd_engine.planning.search.search_space import Candidate, SearchSpace, candidates

KEPT = 5  #: plans that are shown
PATIENCE = 3  #: times as long is searched on while nothing was found
OF_FRONT = 0.2  #: seconds for what belongs to the front and was not looked at before


@dataclass(frozen=True)
class Certificate:
    """What is known of how good the best plan is, by the planner's own estimates."""

    best: float  #: of the goal, as it is minimized
    bound: float  #: nothing is better than this
    candidates: int  #: in the lattice
    excluded: int  #: whose bounds break a limit already
    estimated: int
    complete: bool = True  #: whether nothing was left out for lack of time

    @property
    def gap(self) -> float:
        """How much better, as a share, something else might be: 0 if the best is proven."""
        return max(0.0, (self.best - self.bound) / abs(self.best)) if self.best else 0.0


@dataclass(frozen=True)
class Found:
    """What a search found."""

    best: Sequence[Estimate]  #: the best first; none if nothing keeps to the constraints
    front: Sequence[Estimate]  #: of all that keep to them, those that no other beats in both seconds and memory
    certificate: Certificate
    broken: Mapping[frozenset[str], Estimate] = field(default_factory=dict)  #: limits that are not kept -> by whom


class _Entry(NamedTuple):
    """A candidate that was not estimated yet; the first is the one that comes next."""

    least: tuple[float, ...]  #: of the goal
    number: int  #: in the lattice
    candidate: Candidate
    bound: Bound
    first: bool  #: whether that is its first bound


class Planner:
    """Searches; what it learns of layers is kept from one search to the next."""

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
        """``overlap``: whether gradients are summed over data while the last backward goes on, as the engine does."""
        self.model, self.machine = model, machine
        optimizer = optimizer or AdamW()
        self.itemsize = np.dtype(dtype).itemsize
        self.profiles = Profiles(model, machine, dtype, sequence, optimizer, base)
        self._layers: dict[tuple[int, str], ShardedLayers] = {}
        self._setting = Setting(model, machine, self.itemsize, len(optimizer.kinds), overlap)
        self._given = parse_shares(base.shares, "--shares", WORK, least=1)
        self._cut: dict[tuple, Cut | None] = {}  # None where the model cannot be cut so

    def estimator(self, candidate: Candidate, first: bool = False) -> Estimator | None:
        """What estimates a candidate, or finds its ``first`` bound; None if the model cannot be cut so."""
        each = candidate.batch_size // candidate.micro_batches
        key = candidate.axes, each, candidate.sequence_parallel, candidate.recompute, candidate.zero, first
        if key not in self._cut:
            self._cut[key] = self._find_cut(candidate, first)
        cut = self._cut[key]
        return Estimator(self._setting, candidate, cut) if cut is not None else None

    def _find_cut(self, candidate: Candidate, first: bool) -> Cut | None:
        try:
            costs, update = (self.profiles.least if first else self.profiles.of)(candidate)
        except SpmdError:
            return None
        key = id(costs), candidate.recompute
        if key not in self._layers:
            self._layers[key] = ShardedLayers(self.model, costs, self._repeated(candidate.recompute))
        waits = 0 if first else candidate.zero  # for what ZeRO gathers: less work would hide less of it
        cut = self._setting.cut(candidate.axes, waits, self._layers[key], update)
        paces = stage_paces(self.machine, self.profiles.of_nodes, candidate, self._given)
        return cut if paces is None else replace(cut, paces=paces)

    def _repeated(self, recompute: str) -> list[range]:
        return self._setting.once(("repeated", recompute), lambda: repeated_layers(self.model, recompute))

    def search(
        self,
        choices: SearchSpace,
        constraints: Constraints,
        goal: str = "latency",
        *,
        seconds: float = 30.0,
        front: bool = True,
        keep: int = KEPT,
        first: bool = False,
    ) -> Found:
        """The best plans for a goal, ``keep`` of them, within about so many seconds of processor time; where that is
        gone before anything was found, as many as ``keep`` are estimated all the same.

        ``first``: any will do.
        """
        deadline = process_time() + seconds
        limits = constraints.limits
        entries: list[_Entry] = []
        total = excluded = 0
        for candidate in candidates(choices):
            total += 1
            entry = self._entry(goal, candidate, total, limits, first=self.profiles.cuts(candidate))
            if entry is None:
                excluded += 1
            else:
                entries.append(entry)
        heapify(entries)
        second_bounds = sum(not entry.first for entry in entries)
        best: list[Estimate] = []
        known: dict[Candidate, Estimate | None] = {}
        broken: dict[frozenset[str], Estimate] = {}
        left: list[tuple[float, ...]] = []  # bounds of what was not looked at
        complete = True
        patience = max(deadline, process_time()) + PATIENCE * seconds
        while entries:
            entry = heappop(entries)
            candidate, late = entry.candidate, process_time() > deadline
            done = first and best or len(best) == keep and entry.least >= value(goal, best[-1])
            given_up = late and len(known) >= keep and (best or process_time() > patience)
            if done or given_up:
                left.append(entry.least)
                complete = complete and bool(done)
                break
            if entry.first and late and second_bounds > len(known):
                left.append(entry.least)  # rather than look at more, estimate what was looked at
                complete = False
                continue
            if entry.first:
                second = self._entry(goal, candidate, entry.number, limits, first=False)
                if second is None:
                    excluded += 1
                else:
                    heappush(entries, second)
                    second_bounds += 1
                continue
            estimate = known[candidate] = self._estimate(candidate, limits.memory)
            if estimate is None:
                continue
            if wrong := limits.broken(estimate):
                if wrong not in broken or value(goal, estimate) < value(goal, broken[wrong]):
                    broken[wrong] = estimate
                continue
            best = sorted([*best, estimate], key=lambda each: value(goal, each))[:keep]
        reached = value(goal, best[0])[0] if best else float("inf")
        certificate = Certificate(
            reached, min([reached, *(each[0] for each in left)]), total, excluded, len(known), complete
        )
        points = [each for each in known.values() if each is not None and not limits.broken(each)]
        if front and best:
            points += self._more(entries, points, limits, min(deadline, process_time() + OF_FRONT))
        return Found(best, pareto(points), certificate, broken)

    def _entry(self, goal: str, candidate: Candidate, number: int, limits: Limits, *, first: bool) -> _Entry | None:
        """A candidate with its first bound, or its second; None if it cannot be, or breaks a limit."""
        estimator = self.estimator(candidate, first)
        if estimator is None or limits.surely_broken(bound := estimator.bound()):
            return None
        return _Entry(least(goal, candidate, bound), number, candidate, bound, first)

    def _estimate(self, candidate: Candidate, memory: float | None) -> Estimate | None:
        estimator = self.estimator(candidate)
        assert estimator is not None
        return estimator.estimate(memory if memory is not None else np.inf) or estimator.estimate()

    def _more(
        self, entries: Sequence[_Entry], points: Sequence[Estimate], limits: Limits, deadline: float
    ) -> Iterator[Estimate]:
        """Estimates of what may belong to the front: its bounds are not beaten in both."""
        front = pareto(points)
        for _, _, candidate, bound, _ in sorted(entries, key=lambda entry: entry.bound.memory):
            if process_time() > deadline:
                return
            if any(each.seconds <= bound.seconds and each.memory <= bound.memory for each in front):
                continue
            estimate = self._estimate(candidate, limits.memory)
            if estimate is not None and not limits.broken(estimate):
                front = pareto([*front, estimate])
                yield estimate


def thinned(front: Sequence[Estimate], most: int = 8) -> Sequence[Estimate]:
    """At most so many of a front, its ends among them: those that are shown."""
    if len(front) <= most:
        return front
    return [front[round(k * (len(front) - 1) / (most - 1))] for k in range(most)]


def pareto(estimates: Sequence[Estimate]) -> list[Estimate]:
    """Those that no other beats in both seconds and memory, by seconds."""
    front: list[Estimate] = []
    for each in sorted(estimates, key=lambda each: (each.seconds, each.memory)):
        if not front or each.memory < front[-1].memory:
            front.append(each)
    return front
