"""Costs that candidates share, each computed once: ranks of a mesh, times of layers, slots of schedules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from spmd_engine.engine import schedules
from spmd_engine.models import Model
from spmd_engine.planning.dry_run.step_analysis import HashedOnce
from spmd_engine.planning.machine.machine import Machine
from spmd_engine.planning.search.layer_costs import ShardedLayers, ZeroCommTime
from spmd_engine.planning.search.search_space import BATCH, PIPE, Candidate
from spmd_engine.planning.simulator.collective_time import CollectiveTimes
from spmd_engine.planning.simulator.pipeline_time import Slots


@dataclass(frozen=True)
class MeshRanks:
    """The groups of the first rank of a mesh."""

    ranks: int
    pipe: int
    summed: HashedOnce  #: the ranks over which gradients are summed
    stored: HashedOnce  #: of these, the ranks over which ZeRO shards
    replicas: HashedOnce  #: the ranks that store the same shard
    next_stage: int  #: the distance to the rank of the next stage

    @property
    def shards(self) -> int:
        """The number of shards of ZeRO."""
        return len(self.stored)

    @classmethod
    def of(cls, axes: Sequence[tuple[str, int]]) -> MeshRanks:
        """The groups of a mesh with these axes, of which the last varies fastest."""
        ranks, strides = 1, {}
        for axis, size in reversed(axes):
            strides[axis] = ranks
            ranks *= size

        def along(names: Collection[str]) -> HashedOnce:
            members = np.zeros(1, int)
            for axis, size in axes:
                if axis in names:
                    members = (members[:, None] + strides[axis] * np.arange(size)).reshape(-1)
            return HashedOnce(members.tolist())

        summed = (*BATCH, "context")
        stored = [axis for axis in summed if axis != "replicate"]
        pipe = dict(axes).get(PIPE, 1)
        return cls(ranks, pipe, along(summed), along(stored), along(["replicate"]), strides.get(PIPE, 1))


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of each layer for a micro-batch, including exposed gathers and reductions of ZeRO: float64[layers]."""

    work: np.ndarray  #: forward, recomputation and backward
    before: np.ndarray  #: float64[3, layers + 1]: forward, input gradient (with recomputation), weights; cumulative
    whole: float  #: sum over all layers
    path: float  #: the least time of a micro-batch's forward and backward, without weight gradients

    @classmethod
    def of(cls, layers: ShardedLayers, comm: ZeroCommTime, zero: int) -> LayerTimes:
        """The times under this ZeRO stage. 0 also stands for machines whose ranks move the bytes themselves."""
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
    slowdowns: np.ndarray | None = None  #: of each stage on unequal nodes: see ``stage_slowdowns``


@dataclass(frozen=True)
class CostCache:
    """What is equal for all candidates, and a cache of what several candidates share."""

    model: Model
    machine: Machine
    itemsize: int
    states: int  #: arrays of optimizer state per parameter
    overlap: bool = True  #: whether the reduction of gradients overlaps with the last backward
    _known: dict[tuple, Any] = field(default_factory=dict)

    @cached_property
    def collectives(self) -> CollectiveTimes:
        return CollectiveTimes(self.machine)

    def once(self, key: tuple, compute: Callable[[], Any]) -> Any:
        """The result of ``compute``, which is called once for each key."""
        if key not in self._known:
            self._known[key] = compute()
        return self._known[key]

    def slots(self, candidate: Candidate, micro_batches: int) -> Slots:
        """The slots of the candidate's schedule."""
        name, chunks, pipe = candidate.schedule, candidate.chunks, candidate.pipe

        def compute() -> Slots:
            return Slots(schedules.named(name, chunks if chunks > 1 else None), pipe, micro_batches)

        return self.once(("slots", name, chunks, pipe, micro_batches), compute)

    def sharded_costs(
        self, axes: tuple[tuple[str, int], ...], zero: int, layers: ShardedLayers, update: float
    ) -> ShardedCosts:
        """The costs of layers on this mesh. The layers must live as long as the cache, which uses their id."""
        mesh = self.once(("mesh", axes), lambda: MeshRanks.of(axes))
        by_copy = self.once(("by copy", mesh.summed), lambda: self.collectives.of("all_reduce", mesh.summed, 1.0).works)
        inside = zero if mesh.shards > 1 and not by_copy and zero > 1 else 0  # ZeRO-1 sends nothing per micro-batch
        key = "times", id(layers), mesh.stored if inside else (), inside
        times = self.once(key, lambda: LayerTimes.of(layers, self.zero_comm(layers, mesh.stored), inside))
        return ShardedCosts(layers, update, mesh, by_copy, times)

    def zero_comm(self, layers: ShardedLayers, ranks: HashedOnce) -> ZeroCommTime:
        """The times of gathers and reductions of the layers' parameter groups over these ranks."""
        key = "zero comm", layers.groups, ranks
        return self.once(key, lambda: ZeroCommTime.of(layers, self.collectives, ranks, self.itemsize))
