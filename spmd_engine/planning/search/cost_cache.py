"""Costs that candidates share, each computed once: slots of schedules, ranks of a mesh, times of layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np

from spmd_engine.engine import schedules
from spmd_engine.engine.schedules.schedule import Backward, BackwardInput, BackwardWeight, Compute, Forward, Schedule
from spmd_engine.models import Model
from spmd_engine.planning.dry_run.step_analysis import HashedOnce
from spmd_engine.planning.machine.machine import Machine
from spmd_engine.planning.search.layer_costs import ShardedLayers, ZeroCommTime
from spmd_engine.planning.search.search_space import BATCH, PIPE, Candidate, first_group
from spmd_engine.planning.simulator.collective_time import CollectiveTimes

FORWARD, INPUT, WEIGHT, BOTH = range(4)
_KINDS = {Forward: FORWARD, BackwardInput: INPUT, BackwardWeight: WEIGHT, Backward: BOTH}


class Slots:
    """All slots of a schedule, in an order in which each follows the slots that it waits for.

    Times equal those of ``engine.schedules.timeline``, but thousands of calls are fast: the dependencies between slots
    are computed once for each schedule, number of stages and number of micro-batches. Sends do not delay their stage.
    """

    def __init__(self, schedule: Schedule, stages: int, micro_batches: int) -> None:
        self.stages, self.chunks = stages, stages * schedule.chunks
        orders = [schedule.order(stages, micro_batches, stage) for stage in range(stages)]
        self.held = [_list_changes(order) for order in orders]
        numbers: dict[tuple[int, int, int], int] = {}  # (whether forward, micro-batch, chunk) -> slot
        #: stage, chunk, kind, the slot whose result is needed (or -1), and whether that is on another stage
        self.slots: list[tuple[int, int, int, int, bool]] = []
        at = [0] * stages
        moved = True
        while moved:
            moved = False
            for stage, order in enumerate(orders):
                while at[stage] < len(order):
                    work = order[at[stage]]
                    need = self._find_source(work)
                    if need is not None and need not in numbers:
                        break
                    kind = _KINDS[type(work)]
                    source = numbers[need] if need is not None else -1
                    far = need is not None and need[2] % stages != stage
                    if kind != WEIGHT:
                        numbers[int(kind == FORWARD), work.m, work.chunk] = len(self.slots)
                    self.slots.append((stage, work.chunk, kind, source, far))
                    at[stage] += 1
                    moved = True

    def _find_source(self, work: Compute) -> tuple[int, int, int] | None:
        """The slot whose result a slot needs: (whether forward, micro-batch, chunk)."""
        if isinstance(work, Forward):
            return (1, work.m, work.chunk - 1) if work.chunk else None
        if isinstance(work, Backward | BackwardInput) and work.chunk + 1 < self.chunks:
            return 0, work.m, work.chunk + 1
        return None

    def seconds(self, costs: Sequence[tuple[float, float, float]], transfer: float) -> float:
        """Seconds from the first start to the last end. ``costs`` are seconds of each chunk's forward, input gradient
        and weight gradients; ``transfer`` is the time of a message between stages."""
        of_kind = [(f, i, w, i + w) for f, i, w in costs]
        clock, ends = [0.0] * self.stages, []
        for stage, chunk, kind, source, far in self.slots:
            begin = clock[stage]
            if source >= 0:
                arrival = ends[source] + transfer if far else ends[source]
                begin = arrival if arrival > begin else begin
            end = begin + of_kind[chunk][kind]
            clock[stage] = end
            ends.append(end)
        return max(clock)

    @cached_property
    def most(self) -> list[int]:
        """The most micro-batches that each stage holds from forward to backward, for stages of one chunk."""
        return [max(accumulate(sign for _, sign in held)) for held in self.held]

    def most_held(self, stage: int, of_chunk: Sequence[float]) -> float:
        """The most bytes that a stage holds; ``of_chunk`` are bytes that a micro-batch keeps in each chunk."""
        if self.chunks == self.stages:
            return self.most[stage] * of_chunk[stage]
        return max(accumulate(sign * of_chunk[chunk] for chunk, sign in self.held[stage]))


def _list_changes(order: Sequence[Compute]) -> list[tuple[int, int]]:
    """(chunk, 1 or -1) where activations are saved and freed."""
    kinds = [(work, _KINDS[type(work)]) for work in order]
    return [(work.chunk, 1 if kind == FORWARD else -1) for work, kind in kinds if kind != INPUT]


# --- Costs on a mesh


@dataclass(frozen=True)
class MeshRanks:
    """The groups of the first rank of a mesh."""

    ranks: int
    pipe: int
    summed: HashedOnce  #: the ranks over which gradients are summed
    stored: HashedOnce  #: the ranks of ``summed`` over which ZeRO shards
    replicas: HashedOnce  #: the ranks that store the same shard
    next_stage: int  #: the distance to the rank of the next stage

    @property
    def shards(self) -> int:
        """The number of shards of ZeRO."""
        return len(self.stored)

    @classmethod
    def of(cls, axes: Sequence[tuple[str, int]]) -> MeshRanks:
        """The groups of a mesh with these axes; the last axis varies fastest."""
        summed = (*BATCH, "context")
        stored = [axis for axis in summed if axis != "replicate"]
        stages = first_group(axes, [PIPE])
        return cls(
            ranks=prod(size for _, size in axes),
            pipe=len(stages),
            summed=first_group(axes, summed),
            stored=first_group(axes, stored),
            replicas=first_group(axes, ["replicate"]),
            next_stage=stages[1] if len(stages) > 1 else 1,
        )


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of each layer for a micro-batch, including exposed gathers and reductions of ZeRO: float64[layers]."""

    work: np.ndarray  #: forward, recomputation and backward
    before: np.ndarray  #: float64[3, layers + 1]: forward, input gradient (with recomputation), weights; cumulative
    whole: float  #: sum over all layers
    path: float  #: the least time of a micro-batch's forward and backward, without weight gradients

    @classmethod
    def of(cls, layers: ShardedLayers, comm: ZeroCommTime, zero: int) -> LayerTimes:
        """The times under this ZeRO stage; 0 also for machines on which ranks move the bytes themselves."""
        forward, back = layers.forward, layers.back
        if zero:
            forward = comm.forward(forward, zero)
            back = comm.backward(back + layers.weights, layers, zero) - layers.weights
        kinds = np.array([forward, back, layers.weights])
        work = kinds.sum(axis=0)
        before = np.concatenate([np.zeros((3, 1)), np.cumsum(kinds, axis=1)], axis=1)
        path = layers.path + float((forward - layers.forward).sum())
        return cls(work, before, float(work.sum()), path)


@dataclass(frozen=True)
class ShardedCosts:
    """Costs of layers on a mesh under a ZeRO stage: shared by candidates with other schedules or micro-batch counts."""

    layers: ShardedLayers
    update: float  #: seconds of the optimizer per element
    mesh: MeshRanks
    by_copy: bool  #: whether ranks that sum gradients move the bytes themselves
    times: LayerTimes
    slowdowns: np.ndarray | None = None  #: the slowdown of each stage on unequal nodes: ``stage_slowdowns``


@dataclass(frozen=True)
class CostCache:
    """The data that all candidates share, and a cache of costs that several of them share."""

    model: Model
    machine: Machine
    dtype: np.dtype
    states: int  #: arrays of optimizer state per parameter
    overlap: bool = True  #: whether the reduction of gradients overlaps with the last backward
    _results: dict[tuple, Any] = field(default_factory=dict)

    @cached_property
    def collectives(self) -> CollectiveTimes:
        return CollectiveTimes(self.machine)

    def once(self, key: tuple, compute: Callable[[], Any]) -> Any:
        """The result of ``compute``, which is called once for each key."""
        if key not in self._results:
            self._results[key] = compute()
        return self._results[key]

    def slots(self, candidate: Candidate, micro_batches: int) -> Slots:
        """The slots of the candidate's schedule."""
        name, chunks, pipe = candidate.schedule, candidate.chunks, candidate.pipe

        def compute() -> Slots:
            assert name is not None
            return Slots(schedules.named(name, chunks if chunks > 1 else None), pipe, micro_batches)

        return self.once(("slots", name, chunks, pipe, micro_batches), compute)

    def sharded_costs(
        self, axes: tuple[tuple[str, int], ...], zero: int, layers: ShardedLayers, update: float
    ) -> ShardedCosts:
        """The costs of layers on this mesh. The layers must live as long as the cache, which uses their id."""
        mesh = self.once(("mesh", axes), lambda: MeshRanks.of(axes))
        by_copy = self.once(("by copy", mesh.summed), lambda: self.collectives.of("all_reduce", mesh.summed, 1.0).works)
        inner_zero = zero if mesh.shards > 1 and not by_copy and zero > 1 else 0  # ZeRO-1 sends nothing per micro-batch
        key = "times", id(layers), mesh.stored if inner_zero else (), inner_zero
        times = self.once(key, lambda: LayerTimes.of(layers, self.zero_comm(layers, mesh.stored), inner_zero))
        return ShardedCosts(layers, update, mesh, by_copy, times)

    def zero_comm(self, layers: ShardedLayers, ranks: HashedOnce) -> ZeroCommTime:
        """The times of gathers and reductions of the layers' parameter groups over these ranks."""
        key = "zero comm", layers.groups, ranks
        return self.once(key, lambda: ZeroCommTime.of(layers, self.collectives, ranks, self.dtype))
