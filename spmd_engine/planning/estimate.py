"""An estimate of a candidate's step: seconds and memory from the costs of its layers, in a millisecond.

The pipeline's own schedule is executed on paper with each stage's costs; what every stage holds is counted along it.
What gradients and gathered parameters travel is added where no work hides it. The estimate is what the planner
compares candidates by; of those it proposes, the whole step is analyzed and simulated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np

from spmd_engine.engine import schedules
from spmd_engine.models import Model
from spmd_engine.planning.collective_time import CollectiveTimes
from spmd_engine.planning.lattice import BATCH, PIPE, Candidate
from spmd_engine.planning.layer_costs import CutLayers, LayerCosts
from spmd_engine.planning.machine import Machine
from spmd_engine.planning.pipeline_time import Slots
from spmd_engine.planning.stage_division import best_division

LONG = 2048  #: forwards of all stages beyond which a schedule is executed for fewer micro-batches, and continued


@dataclass(frozen=True)
class Estimate:
    """A candidate with what it costs."""

    candidate: Candidate
    seconds: float
    memory: float  #: bytes of the rank that holds most
    sent: float  #: bytes that all ranks send in a step
    work: float  #: seconds of the rank that works most
    imbalance: float  #: that over the mean
    parts: Mapping[str, float]  #: seconds by what they are for
    holds: Mapping[str, float]  #: bytes by what they are for, on the rank that holds most
    stage: int  #: of that rank

    @property
    def throughput(self) -> float:
        """Samples a second."""
        return self.candidate.batch_size / self.seconds


@dataclass(frozen=True)
class Bound:
    """What no way to fill in the rest of a candidate can go below."""

    seconds: float
    memory: float


@dataclass(frozen=True)
class Setting:
    """What is the same for all candidates with the same layers, cut alike: the costs of these."""

    model: Model
    machine: Machine
    itemsize: int
    states: int  #: arrays of optimizer state for each parameter

    @cached_property
    def collectives(self) -> CollectiveTimes:
        return CollectiveTimes(self.machine)

    @cached_property
    def _slots(self) -> dict[tuple, Slots]:
        return {}

    @cached_property
    def _meshes(self) -> dict[tuple, OnMesh]:
        return {}

    def on(self, axes: tuple[tuple[str, int], ...]) -> OnMesh:
        """What a mesh means, found once."""
        if axes not in self._meshes:
            self._meshes[axes] = OnMesh.of(axes)
        return self._meshes[axes]

    def slots(self, candidate: Candidate, micro_batches: int) -> Slots:
        """Of the candidate's schedule, found once."""
        key = candidate.schedule, candidate.chunks, candidate.pipe, micro_batches
        if key not in self._slots:
            schedule = schedules.named(candidate.schedule, candidate.chunks if candidate.chunks > 1 else None)
            self._slots[key] = Slots(schedule, candidate.pipe, micro_batches)
        return self._slots[key]


@dataclass(frozen=True)
class OnMesh:
    """What a mesh's axes mean for a step."""

    ranks: int
    pipe: int
    cut: int  #: ranks over which ZeRO stores in parts
    summed: tuple[int, ...]  #: the ranks over which gradients are summed, with the first of them
    next_stage: int  #: how far away the next stage's rank is

    @classmethod
    def of(cls, axes: Sequence[tuple[str, int]]) -> OnMesh:
        """Of a mesh with these axes, the last of which varies fastest."""
        stride, strides = 1, {}
        for axis, size in reversed(axes):
            strides[axis] = stride
            stride *= size
        summed = [0]
        for axis, size in axes:
            if axis in (*BATCH, "context"):
                summed = [rank + strides[axis] * k for rank in summed for k in range(size)]
        sizes = dict(axes)
        cut = prod(sizes.get(axis, 1) for axis in (*BATCH, "context") if axis != "replicate")
        return cls(stride, sizes.get(PIPE, 1), cut, tuple(summed), strides.get(PIPE, 1))


class Estimator:
    """Estimates a candidate, given its layers' costs."""

    def __init__(self, setting: Setting, candidate: Candidate, layers: CutLayers, update: float) -> None:
        """``update``: seconds of the optimizer for each element."""
        self.setting, self.candidate, self.layers, self.costs = setting, candidate, layers, layers.costs
        self.on, self.m, self.update = setting.on(candidate.axes), candidate.micro_batches, update
        self.pipe, self.itemsize = self.on.pipe, setting.itemsize

    # --- bounds

    def bound(self) -> Bound:
        """Seconds: of a pipeline whose stages are as uneven as is best, with nothing sent between them.

        With W the work of a micro-batch and r W that of its way forth and back (forward and input's gradient), stage
        s ends no sooner than its m micro-batches take after what came before it has passed: T >= m w_s + r W X_s / v,
        X_s the share of the stages before. The shares that are best for all s make all of these equal, and then
        T = (r W / v) / (1 - (1 - r / (v m))^p).
        """
        layers, p = self.layers, self.pipe
        work = self.m * layers.whole
        seconds = work / p
        if p > 1:
            way = layers.way / self.candidate.chunks
            share = min(way / work, 1.0) if work else 0.0
            seconds = way / (1 - (1 - share) ** p) if share > 1e-9 else seconds
        seconds = max(seconds, self._crowded(work / p))
        elements = layers.own_elements / p
        return Bound(seconds + self._update(elements), elements * self._stored_each() + layers.all_kept / p)

    def _crowded(self, work: float) -> float:
        """The least time if each rank works so long, where ranks share cores."""
        node = self.setting.machine.nodes[0]
        if node.cores is None:
            return work
        return work * max(1.0, min(self.on.ranks, node.ranks) / node.cores)

    def _stored_each(self) -> float:
        """Bytes between steps of a parameter on a rank."""
        zero, part = self.candidate.zero, 1 / self.on.cut
        whole = [
            1.0 if zero < 3 else part,
            1.0 if zero < 2 else part,
            self.setting.states * (1.0 if zero < 1 else part),
        ]
        return self.itemsize * sum(whole)

    # --- stages

    def divide(self, limit: float = np.inf) -> tuple[int, ...] | None:
        """The first layer of each chunk, such that the slowest stage is quickest and each has room; None if none has.

        Of an interleaved schedule, room is not looked at here: chunks of several stages lie between.
        """
        if self.pipe == 1:
            return (0,)
        if self.candidate.stages is not None:
            return self.candidate.stages
        chunks = self.pipe * self.candidate.chunks
        hop = self._hops()
        fits = self._fits(limit) if np.isfinite(limit) and self.candidate.chunks == 1 else None
        return best_division(self.layers.work.tolist(), chunks, boundary=hop, fits=fits)

    def _hops(self) -> list[float]:
        """Seconds that both sides of a boundary before each layer lose by it: where ranks move the bytes themselves."""
        if not self._between(1.0).works:
            return [0.0] * len(self.costs)
        return [0.0, *(2 * self._between(each.output).seconds for each in self.costs[:-1])]

    def _between(self, size: float):
        """Of a message between neighbouring stages."""
        return self.setting.collectives.of("send", (0, self.on.next_stage), size)

    def _fits(self, limit: float):
        elements = np.array([0.0, *np.cumsum(self.layers.elements)])
        kept = np.array([0.0, *np.cumsum(self.layers.kept)])
        one = self._stored_each()

        def fits(k: int) -> np.ndarray:
            flight = self.m if self.candidate.schedule == "gpipe" else min(self.m, self.pipe - k)
            held = one * (elements[None, :] - elements[:, None]) + flight * (kept[None, :] - kept[:, None])
            return held <= limit

        return fits

    # --- memory

    def _stored(self, elements: float) -> dict[str, float]:
        """Bytes between steps of so many parameters on a stage."""
        zero, n = self.candidate.zero, self.on.cut
        size, part = elements * self.itemsize, elements * self.itemsize / n
        return {
            "parameters": part if zero >= 3 else size,
            "gradients": part if zero >= 2 else size,
            "optimizer state": self.setting.states * (part if zero >= 1 else size),
        }

    # --- the whole

    def estimate(self, limit: float = np.inf) -> Estimate | None:
        """Seconds and memory; None if no division into stages has room in ``limit`` bytes a rank."""
        starts = self.divide(limit)
        if starts is None:
            return None
        chunks = [range(a, b) for a, b in zip(starts, (*starts[1:], len(self.costs)), strict=True)]
        chunk_costs = [self._chunk(layers) for layers in chunks]
        slots, seconds = self._run(chunk_costs)
        works = self._works()
        of_stage = [[layer for chunk in chunks[s :: self.pipe] for layer in chunk] for s in range(self.pipe)]
        stage_elements = [self.layers.elements_of(layers) for layers in of_stage]
        exposed, sent = self._gradients(stage_elements, chunk_costs, works)
        update = self._update(max(stage_elements))
        busy = [
            self.m * sum(sum(chunk_costs[c][:3]) for c in range(s, len(chunks), self.pipe)) for s in range(self.pipe)
        ]
        crowd = self._crowded(sum(busy) / len(busy))
        inner = self.m * self.layers.inside / self.pipe
        idle = max(seconds - sum(busy) / len(busy), 0.0)
        seconds = max(seconds, crowd)
        total = seconds + exposed + update
        held = [self._held(stage, chunks, slots, stage_elements[stage]) for stage in range(self.pipe)]
        stage = max(range(self.pipe), key=lambda s: sum(held[s].values()))
        hops = 2 * sum(self.costs[first - 1].output for first in starts if first)
        inside_sent = self.m * (self.layers.sent + hops) * self.candidate.ranks / self.pipe
        parts = {
            "work": (sum(busy) / len(busy)) - inner,
            "communication inside layers": inner,
            "bubbles": idle,
            "sharing cores": seconds - idle - (sum(busy) / len(busy)),
            "gradients and gathers": exposed,
            "update": update,
        }
        return Estimate(
            candidate=replace(self.candidate, stages=starts if self.pipe > 1 else None),
            seconds=total,
            memory=sum(held[stage].values()),
            sent=inside_sent + sent,
            work=max(busy) + update,
            imbalance=max(busy) / (sum(busy) / len(busy)) if any(busy) else 1.0,
            parts={name: max(value, 0.0) for name, value in parts.items()},
            holds=held[stage],
            stage=stage,
        )

    def _chunk(self, layers: range) -> tuple[float, float, float]:
        """Seconds of a chunk's forward, and of its backward's two parts."""
        forward = inputs = weights = 0.0
        gather = self.candidate.zero >= 3 and self.on.cut > 1
        for layer in layers:
            each, twice = self.costs[layer], self.layers.again[layer]
            forward += max(each.all_forward, self._gather(each)) if gather else each.all_forward
            back = each.backward_input + each.inside_backward + twice * each.all_forward
            inputs += max(back, self._gather(each)) if gather else back
            weights += each.backward_weights
        return forward, inputs, weights

    def _gather(self, each: LayerCosts) -> float:
        duration = self.setting.collectives.of("all_gather", self.on.summed, each.parameters * self.itemsize)
        return 0.0 if duration.works else duration.seconds

    def _run(self, chunk_costs: Sequence[tuple[float, float, float]]) -> tuple[Slots | None, float]:
        """The schedule's slots and their length; of a long one, as it goes on once it is under way."""
        if self.pipe == 1:
            return None, self.m * sum(chunk_costs[0])
        size = max((self.costs[layer].output for layer in range(len(self.costs) - 1)), default=0)
        duration = self._between(size)
        transfer = 0.0 if duration.works else duration.seconds
        few = 2 * self.pipe
        if self.m * len(chunk_costs) <= LONG or self.m <= few + self.pipe:
            slots = self.setting.slots(self.candidate, self.m)
            return slots, slots.seconds(chunk_costs, transfer)
        slots, more = self.setting.slots(self.candidate, few), self.setting.slots(self.candidate, few + self.pipe)
        seconds = slots.seconds(chunk_costs, transfer)
        each = (more.seconds(chunk_costs, transfer) - seconds) / self.pipe
        return slots, seconds + (self.m - few) * each

    def _works(self) -> bool:
        """Whether ranks that sum gradients move the bytes with their own cores."""
        return len(self.on.summed) > 1 and self.setting.collectives.of("all_reduce", self.on.summed, 1.0).works

    def _gradients(self, elements: Sequence[float], chunk_costs: Sequence, works: bool) -> tuple[float, float]:
        """Seconds that nothing hides, of the stage that has most of them, and bytes that all ranks send."""
        n = len(self.on.summed)
        if n == 1:
            return 0.0, 0.0
        zero, of = self.candidate.zero, self.setting.collectives.of
        exposed = sent = 0.0
        for stage, count in enumerate(elements):
            size = count * self.itemsize
            gather, reduce = of("all_gather", self.on.summed, size), of("reduce_scatter", self.on.summed, size)
            whole = of("all_reduce", self.on.summed, size)
            reduces = self.m if zero >= 2 else 1
            gathers = {0: 0, 1: 1, 2: 1, 3: 2 * self.m}[zero]
            each = size * (n - 1)
            sent += each * (2 if zero == 0 else gathers + reduces) * self.candidate.ranks / n / self.pipe
            seconds = whole.seconds if zero == 0 else reduces * reduce.seconds
            if zero in (1, 2):
                seconds += gather.seconds
            if works and zero >= 3:
                seconds += gathers * gather.seconds
            if not works:
                last = [chunk_costs[c] for c in range(stage, len(chunk_costs), self.pipe)]
                hidden = sum(inputs + weights for _, inputs, weights in last) * (reduces if zero >= 2 else 1)
                hidden *= 1 - 1 / max(len(self.costs) / self.pipe, 1)
                refresh = gather.seconds if zero in (1, 2) else 0.0
                seconds = max(seconds - refresh - hidden, 0.0) + refresh
            exposed = max(exposed, seconds)
        return (self._crowded(exposed) if works else exposed), sent

    def _update(self, elements: float) -> float:
        parts = self.on.cut if self.candidate.zero else 1
        return self._crowded(elements / parts * self.update)

    def _held(self, stage: int, chunks: Sequence[range], slots: Slots | None, elements: float) -> dict[str, float]:
        """Bytes on a rank of a stage at its worst moment, by what they are for."""
        held = self._stored(elements)
        mine = range(stage, len(chunks), self.pipe)
        layers = [layer for chunk in mine for layer in chunks[chunk]]
        largest = max(self.costs[layer].parameters for layer in layers) * self.itemsize
        if self.candidate.zero >= 3 and self.on.cut > 1:
            held["gathered groups"] = 2.0 * largest
        if self.candidate.zero >= 2 and self.on.cut > 1:
            held["whole gradients"] = float(largest)
        of_chunk = {chunk: float(self.layers.kept[list(chunks[chunk])].sum()) for chunk in mine}
        held["activations"] = self._in_flight(stage, of_chunk, slots)
        above = [max(self.costs[layer].above_forward, self.costs[layer].above_backward) for layer in layers]
        here = set(layers)
        repeated = [size for part, size in self.layers.largest_repeated if part.start in here]
        held["temporaries"] = max(above, default=0.0) + max(repeated, default=0.0)
        return held

    def _in_flight(self, stage: int, of_chunk: dict[int, float], slots: Slots | None) -> float:
        """Bytes of activations that a stage keeps at most."""
        if slots is None:
            return sum(of_chunk.values())
        if self.candidate.schedule == "gpipe":
            return self.m * sum(of_chunk.values())
        return slots.most_held(stage, of_chunk)
