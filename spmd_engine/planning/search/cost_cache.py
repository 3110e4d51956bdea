"""What candidates have in common: what meshes mean, what layers take on them, schedules' slots; each found once."""

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
from spmd_engine.planning.search.layer_costs import ShardedLayers
from spmd_engine.planning.search.search_space import BATCH, PIPE, Candidate
from spmd_engine.planning.search.zero_comm_time import Travel
from spmd_engine.planning.simulator.collective_time import CollectiveTimes
from spmd_engine.planning.simulator.pipeline_time import Slots


@dataclass(frozen=True)
class OnMesh:
    """What a mesh's axes mean for a step."""

    ranks: int
    pipe: int
    summed: HashedOnce  #: the ranks over which gradients are summed, with the first of them
    stored: HashedOnce  #: of these, those over which ZeRO stores in parts
    copies: HashedOnce  #: the ranks that store the same part
    next_stage: int  #: how far away the next stage's rank is

    @property
    def cut(self) -> int:
        """Into how many parts ZeRO cuts."""
        return len(self.stored)

    @classmethod
    def of(cls, axes: Sequence[tuple[str, int]]) -> OnMesh:
        """Of a mesh with these axes, the last of which varies fastest."""
        stride, strides = 1, {}
        for axis, size in reversed(axes):
            strides[axis] = stride
            stride *= size

        def along(names: Collection[str]) -> HashedOnce:
            ranks = np.zeros(1, int)
            for axis, size in axes:
                if axis in names:
                    ranks = (ranks[:, None] + strides[axis] * np.arange(size)).reshape(-1)
            return HashedOnce(ranks.tolist())

        summed = (*BATCH, "context")
        stored = [axis for axis in summed if axis != "replicate"]
        pipe = dict(axes).get(PIPE, 1)
        return cls(stride, pipe, along(summed), along(stored), along(["replicate"]), strides.get(PIPE, 1))


@dataclass(frozen=True)
class Busy:
    """Seconds of each layer for a micro-batch, with what it waits for gathers and reductions: float64[layers]."""

    work: np.ndarray  #: forward, what is repeated, and backward
    before: np.ndarray  #: float64[3, layers + 1]: forward, input's gradient (and repeats), weights of all layers before
    whole: float  #: of all layers
    way: float  #: of these, at least, a micro-batch's way forth and back

    @classmethod
    def of(cls, layers: ShardedLayers, travel: Travel, zero: int) -> Busy:
        """With this stage of ZeRO; 0 stands for all where the ranks' own cores move the bytes."""
        forward, back = layers.forward, layers.back
        if zero:
            forward = travel.forward(forward, zero)
            back = travel.backward(back + layers.weights, layers, zero) - layers.weights
        kinds = np.array([forward, back, layers.weights])
        work = kinds.sum(axis=0)
        before = np.concatenate([np.zeros((3, 1)), np.cumsum(kinds, axis=1)], axis=1)
        way = layers.way + float((forward - layers.forward).sum())
        return cls(work, before, float(work.sum()), way)


@dataclass(frozen=True)
class Cut:
    """Layers as a mesh cuts them and a stage of ZeRO stores them: what candidates have in common that differ in their
    micro-batches' number, or their schedule."""

    layers: ShardedLayers
    update: float  #: seconds of the optimizer for each element
    on: OnMesh
    works: bool  #: whether ranks that sum gradients move the bytes with their own cores
    busy: Busy
    paces: np.ndarray | None = None  #: of each stage, where nodes are unlike: see ``stage_paces``


@dataclass(frozen=True)
class Setting:
    """What is the same for all candidates, and what was found for some of them and serves others."""

    model: Model
    machine: Machine
    itemsize: int
    states: int  #: arrays of optimizer state for each parameter
    overlap: bool = True  #: whether gradients are summed over data while the last backward goes on
    _found: dict[tuple, Any] = field(default_factory=dict)

    @cached_property
    def collectives(self) -> CollectiveTimes:
        return CollectiveTimes(self.machine)

    def once(self, key: tuple, find: Callable[[], Any]) -> Any:
        """What ``find`` finds, found once for each key."""
        if key not in self._found:
            self._found[key] = find()
        return self._found[key]

    def on(self, axes: tuple[tuple[str, int], ...]) -> OnMesh:
        """What a mesh means."""
        return self.once(("mesh", axes), lambda: OnMesh.of(axes))

    def slots(self, candidate: Candidate, micro_batches: int) -> Slots:
        """Of the candidate's schedule."""
        name, chunks, pipe = candidate.schedule, candidate.chunks, candidate.pipe

        def find() -> Slots:
            return Slots(schedules.named(name, chunks if chunks > 1 else None), pipe, micro_batches)

        return self.once(("slots", name, chunks, pipe, micro_batches), find)

    def cut(self, axes: tuple[tuple[str, int], ...], zero: int, layers: ShardedLayers, update: float) -> Cut:
        """Layers on this mesh; they must outlive the setting."""
        on = self.on(axes)
        works = self.once(("works", on.summed), lambda: self.collectives.of("all_reduce", on.summed, 1.0).works)
        waits = zero if on.cut > 1 and not works and zero > 1 else 0  # below, nothing travels in a micro-batch
        key = "busy", id(layers), on.stored if waits else (), waits
        busy = self.once(key, lambda: Busy.of(layers, self.travel(layers, on.stored), waits))
        return Cut(layers, update, on, works, busy)

    def travel(self, layers: ShardedLayers, ranks: HashedOnce) -> Travel:
        """What sending parameters and gradients of layers over these ranks takes."""
        key = "travel", layers.groups, ranks
        return self.once(key, lambda: Travel.of(layers, self.collectives, ranks, self.itemsize))
