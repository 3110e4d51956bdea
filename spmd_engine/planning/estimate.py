"""An estimate of a candidate's step: seconds and memory from the costs of its layers, in a millisecond.

The pipeline's own schedule is executed on paper with each stage's costs; what every stage holds is counted along it.
What gradients and gathered parameters travel is added where no work hides it. The estimate is what the planner
compares candidates by; of those it proposes, the whole step is analyzed and simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from spmd_engine.engine.reducer import IN_FLIGHT
from spmd_engine.planning.collective_time import Duration
from spmd_engine.planning.lattice import Candidate
from spmd_engine.planning.layer_costs import CutLayers
from spmd_engine.planning.pipeline_time import Slots
from spmd_engine.planning.setting import Setting
from spmd_engine.planning.stage_division import best_division
from spmd_engine.planning.travel import OPERATIONS

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


class Estimator:
    """Estimates a candidate, given its layers' costs."""

    def __init__(self, setting: Setting, candidate: Candidate, layers: CutLayers, update: float) -> None:
        """``update``: seconds of the optimizer for each element."""
        self.setting, self.candidate, self.layers, self.costs = setting, candidate, layers, layers.costs
        self.on, self.m, self.update = setting.on(candidate.axes), candidate.micro_batches, update
        self.pipe, self.itemsize = self.on.pipe, setting.itemsize
        zero = candidate.zero if self.on.cut > 1 and not self._works else 0
        self.busy = setting.busy(layers, self.on.stored, zero)

    @cached_property
    def _works(self) -> bool:
        """Whether ranks that sum gradients move the bytes with their own cores."""
        setting, ranks = self.setting, self.on.summed
        return setting.once(("works", ranks), lambda: setting.collectives.of("all_reduce", ranks, 1.0).works)

    # --- bounds

    def bound(self) -> Bound:
        """Seconds: of a pipeline whose stages are as uneven as is best, with nothing sent between them.

        With W the work of a micro-batch and r W that of its way forth and back (forward and input's gradient), stage
        s ends no sooner than its m micro-batches take after what came before it has passed: T >= m w_s + r W X_s / v,
        X_s the share of the stages before. The shares that are best for all s make all of these equal, and then
        T = (r W / v) / (1 - (1 - r / (v m))^p).
        """
        layers, p = self.layers, self.pipe
        work = self.m * self.busy.whole
        seconds = work / p
        if p > 1:
            way = self.busy.way / self.candidate.chunks
            share = min(way / work, 1.0) if work else 0.0
            seconds = way / (1 - (1 - share) ** p) if share > 1e-9 else seconds
        seconds = max(seconds, self._crowded(work / p))
        if p == 1:
            seconds += self._exposed([range(len(layers))], [tuple(self.busy.before[:, -1].tolist())])
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
        chunks, hops = self.pipe * self.candidate.chunks, self._hops()
        work = self.busy.work
        key = "division", id(self.busy), chunks, hops[-1], self.on.next_stage
        starts = self.setting.once(key, lambda: best_division(work.tolist(), chunks, boundary=hops))
        if starts is None or not np.isfinite(limit) or self.candidate.chunks > 1:
            return starts
        ends = (*starts[1:], len(self.costs))
        room = self._fits(limit)
        if all(room(k)[start, end] for k, (start, end) in enumerate(zip(starts, ends, strict=True))):
            return starts
        return best_division(work.tolist(), chunks, boundary=hops, fits=room)

    def _hops(self) -> list[float]:
        """Seconds that both sides of a boundary before each layer lose by it: where ranks move the bytes themselves."""
        if not self._between(1.0).works:
            return [0.0] * len(self.costs)
        return [0.0, *(2 * self._between(each.output).seconds for each in self.costs[:-1])]

    def _between(self, size: float) -> Duration:
        """Of a message between neighbouring stages."""
        return self.setting.collectives.of("send", (0, self.on.next_stage), size)

    def _fits(self, limit: float) -> Callable[[int], np.ndarray]:
        elements = np.array([0.0, *np.cumsum(self.layers.elements)])
        kept = np.array([0.0, *np.cumsum(self.layers.kept)])
        stored = self._stored_each() * (elements[None, :] - elements[:, None])
        flying = kept[None, :] - kept[:, None]

        def fits(k: int) -> np.ndarray:
            flight = self.m if self.candidate.schedule == "gpipe" else min(self.m, self.pipe - k)
            return stored + flight * flying <= limit

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

    def _held(self, stage: int, chunks: Sequence[range], slots: Slots | None, elements: float) -> dict[str, float]:
        """Bytes on a rank of a stage at its worst moment, by what they are for."""
        held, layers = self._stored(elements), self.layers
        mine = range(stage, len(chunks), self.pipe)
        parts = {chunk: slice(chunks[chunk].start, chunks[chunk].stop) for chunk in mine}
        if self.on.cut > 1 and self.candidate.zero >= 2:
            whole = [self._whole(part) for part in parts.values()]
            if self.candidate.zero >= 3:
                held["gathered groups"] = float(max(gathered for gathered, _ in whole))
            held["whole gradients"] = float(max(gradients for _, gradients in whole))
        of_chunk = {chunk: float(layers.kept[part].sum()) for chunk, part in parts.items()}
        flying = self._in_flight(stage, of_chunk, slots)
        # while a layer runs backward, what the layers behind it kept is gone
        worst = max(layers.running[p].max() - layers.kept_before[p.start] - of_chunk[c] for c, p in parts.items())
        held["activations"] = flying + min(worst, 0.0)
        held["temporaries"] = max(worst, 0.0)
        return held

    def _whole(self, part: slice) -> tuple[float, float]:
        """Bytes at the most, in a chunk, of what ZeRO-3 has gathered (a layer, and a group of the one that comes next),
        and of whole gradients under ZeRO-2 and 3 (a layer's, and those on their way of the one before it)."""
        groups = [(), *(cost.groups for cost in self.costs[part]), ()]
        first = [max(each[:1], default=0) for each in groups]
        leaving = [sum(each[-IN_FLIGHT:]) for each in groups]
        coming = np.maximum(first[:-2], first[2:])
        gathered = (self.layers.gathered[part] + coming).max() * self.itemsize
        return gathered, (self.layers.elements[part] + leaving[2:]).max() * self.itemsize

    def _in_flight(self, stage: int, of_chunk: dict[int, float], slots: Slots | None) -> float:
        """Bytes of activations that a stage keeps at most."""
        if slots is None:
            return sum(of_chunk.values())
        if self.candidate.schedule == "gpipe":
            return self.m * sum(of_chunk.values())
        return slots.most_held(stage, of_chunk)

    # --- the whole

    def estimate(self, limit: float = np.inf) -> Estimate | None:
        """Seconds and memory; None if no division into stages has room in ``limit`` bytes a rank."""
        starts = self.divide(limit)
        if starts is None:
            return None
        chunks = [range(a, b) for a, b in zip(starts, (*starts[1:], len(self.costs)), strict=True)]
        edges = [*starts, len(self.costs)]
        chunk_costs = list(zip(*np.diff(self.busy.before[:, edges], axis=1).tolist(), strict=True))
        slots, seconds = self._run(chunk_costs)
        stages = range(self.pipe)
        of_stage = [[layer for chunk in chunks[s :: self.pipe] for layer in chunk] for s in stages]
        elements = [self.layers.elements_of(layers) for layers in of_stage]
        busy = [self.m * sum(sum(costs) for costs in chunk_costs[s :: self.pipe]) for s in stages]
        mean = sum(busy) / len(busy)
        idle = max(seconds - mean, 0.0)
        seconds = max(seconds, self._crowded(mean))
        exposed = self._exposed(of_stage, chunk_costs)
        update = self._update(max(elements))
        total = seconds + exposed + update
        held = [self._held(stage, chunks, slots, elements[stage]) for stage in stages]
        stage = max(stages, key=lambda s: sum(held[s].values()))
        hops = 2 * sum(self.costs[first - 1].output for first in starts if first)
        inside_sent = self.m * (self.layers.sent + hops) * self.candidate.ranks / self.pipe
        inner = self.m * self.layers.inside / self.pipe
        travel = self.m * (self.busy.whole - self.layers.whole) / self.pipe
        parts = {
            "work": mean - inner - travel,
            "communication inside layers": inner,
            "bubbles": idle,
            "sharing cores": seconds - idle - mean,
            "gradients and gathers": exposed + travel,
            "update": update,
        }
        return Estimate(
            candidate=replace(self.candidate, stages=starts if self.pipe > 1 else None),
            seconds=total,
            memory=sum(held[stage].values()),
            sent=inside_sent + sum(map(self._sent, of_stage)),
            work=max(busy) + update,
            imbalance=max(busy) / mean if any(busy) else 1.0,
            parts={name: max(value, 0.0) for name, value in parts.items()},
            holds=held[stage],
            stage=stage,
        )

    def _run(self, chunk_costs: Sequence[tuple[float, float, float]]) -> tuple[Slots | None, float]:
        """The schedule's slots and their length; of a long one, as it goes on once it is under way."""
        if self.pipe == 1:
            return None, self.m * sum(chunk_costs[0])
        duration = self._between(float(self.layers.output[:-1].max(initial=0)))
        transfer = 0.0 if duration.works else duration.seconds
        few = 2 * self.pipe
        if self.m * len(chunk_costs) <= LONG or self.m <= few + self.pipe:
            slots = self.setting.slots(self.candidate, self.m)
            return slots, slots.seconds(chunk_costs, transfer)
        slots, more = self.setting.slots(self.candidate, few), self.setting.slots(self.candidate, few + self.pipe)
        seconds = slots.seconds(chunk_costs, transfer)
        each = (more.seconds(chunk_costs, transfer) - seconds) / self.pipe
        return slots, seconds + (self.m - few) * each

    def _exposed(self, of_stage: Sequence[Sequence[int]], chunk_costs: Sequence[tuple]) -> float:
        """Seconds that gradients and updated parameters travel, hidden by nothing, of the stage with most of them.

        What travels in every micro-batch is in ``Busy``, unless ranks' own cores move the bytes.
        """
        if len(self.on.summed) == 1:
            return 0.0
        zero, worst = self.candidate.zero, 0.0
        times = {0: (0, 0, 1), 1: (1, 1, 0), 2: (1, self.m, 0), 3: (2 * self.m, self.m, 0)}[zero]
        travel = self.setting.travel(self.layers, self.on.stored if zero else self.on.summed)
        for stage, layers in enumerate(of_stage):
            gather, scatter, reduce = (travel.of_layers(name, layers, self.layers.owners) for name in OPERATIONS)
            copies = self._copies(self.layers.elements_of(layers)) if zero else 0.0
            if self._works:
                seconds = times[0] * gather + times[1] * scatter + times[2] * reduce + copies
            elif zero < 2:
                last = sum(inputs + weights for _, inputs, weights in chunk_costs[stage :: self.pipe])
                hidden = last * (1 - 1 / max(len(layers), 1))
                seconds = max(scatter * times[1] + reduce * times[2] - hidden, 0.0) + gather * times[0] + copies
            else:
                seconds = float(travel.last[layers[0]]) + (gather if zero == 2 else 0.0) + copies
            worst = max(worst, seconds)
        return self._crowded(worst) if self._works else worst

    def _copies(self, elements: float) -> float:
        """Seconds in which those that store the same part sum it."""
        if len(self.on.copies) == 1:
            return 0.0
        part = elements * self.itemsize / self.on.cut
        return self.setting.collectives.of("all_reduce", self.on.copies, part).seconds

    def _sent(self, layers: Sequence[int]) -> float:
        """Bytes that the ranks of a stage with these layers send of its parameters and their gradients."""
        on, zero, m = self.on, self.candidate.zero, self.m
        ranks, among = self.candidate.ranks / self.pipe, set(layers)
        size = self.layers.elements_of(layers) * self.itemsize
        tied = [self.costs[layer].tied * self.itemsize for layer in self.layers.owners if layer in among]
        apart = [layer for layer, owner in self.layers.owners.items() if layer in among and owner not in among]
        shared = 2.0 * self.itemsize * sum(self.costs[layer].tied for layer in apart)  # by both stages, of each rank
        if zero == 0:
            n = len(on.summed)
            return (2 * size * (n - 1) / n + shared) * ranks
        n, copies = on.cut, len(on.copies)
        gathered = size
        if zero == 3:
            last = self.costs[-1].parameters * (len(self.costs) - 1 in among)  # still here when its backward begins
            gathered = m * (2 * size + 2 * sum(tied) - last * self.itemsize)
        reduced = size * (1 if zero == 1 else m)
        return ((gathered + reduced) * (n - 1) + 2 * size * (copies - 1) / copies + shared) * ranks / n

    def _update(self, elements: float) -> float:
        parts = self.on.cut if self.candidate.zero else 1
        return self._crowded(elements / parts * self.update)
