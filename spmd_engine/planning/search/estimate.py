"""An estimate of a candidate's step: seconds and memory from the costs of its layers, in a millisecond.

The pipeline's own schedule is executed on paper with each stage's costs; what every stage holds is counted along it.
What gradients and gathered parameters travel is added where no work hides it. The estimate is what the planner
compares candidates by; of those it proposes, the whole step is analyzed and simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from spmd_engine.planning.search.cost_cache import Cut, Setting
from spmd_engine.planning.search.search_space import Candidate
from spmd_engine.planning.search.zero_comm_time import StageSums
from spmd_engine.planning.simulator.collective_time import Duration
from spmd_engine.planning.simulator.pipeline_time import Slots

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
    simulated: bool = False  #: whether seconds, memory and sent are of the whole step, analyzed and simulated

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

    def __init__(self, setting: Setting, candidate: Candidate, cut: Cut) -> None:
        self.setting, self.candidate, self.m = setting, candidate, candidate.micro_batches
        self.layers, self.costs, self.on, self.busy = cut.layers, cut.layers.costs, cut.on, cut.busy
        self.works, self.update, self.paces = cut.works, cut.update, cut.paces
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
        work = self.m * self.busy.whole
        seconds = work / p if self.paces is None else work / float((1 / self.paces).sum())
        if p > 1 and self.paces is None:
            way = self.busy.way / self.candidate.chunks
            share = min(way / work, 1.0) if work else 0.0
            seconds = way / (1 - (1 - share) ** p) if share > 1e-9 else seconds
        quickest = 1.0 if self.paces is None else float(self.paces.min())
        seconds = max(seconds, self._crowded(quickest * work / p))
        if p == 1:
            seconds += self._exposed(self._undivided, quickest * self.busy.before[:, -1:])
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

    @property
    def _undivided(self) -> StageSums:
        """All layers on every rank."""
        return self.setting.once(("undivided", id(self.layers)), lambda: StageSums(self.layers, (0,), 1))

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
        paces = () if self.paces is None else tuple(self.paces.tolist()) * self.candidate.chunks
        key = "division", id(self.busy), chunks, hops[-1], self.on.next_stage, paces
        starts = self.setting.once(key, lambda: best_division(work.tolist(), chunks, boundary=hops, paces=paces))
        if starts is None or not np.isfinite(limit) or self.candidate.chunks > 1:
            return starts
        ends = (*starts[1:], len(self.costs))
        room = self._fits(limit)
        if all(room(k)[start, end] for k, (start, end) in enumerate(zip(starts, ends, strict=True))):
            return starts
        return best_division(work.tolist(), chunks, boundary=hops, fits=room, paces=paces)

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

    def _stored(self, elements: np.ndarray) -> dict[str, np.ndarray]:
        """Bytes between steps of so many parameters on each stage."""
        zero, n = self.candidate.zero, self.on.cut
        size, part = elements * self.itemsize, elements * self.itemsize / n
        return {
            "parameters": part if zero >= 3 else size,
            "gradients": part if zero >= 2 else size,
            "optimizer state": self.setting.states * (part if zero >= 1 else size),
        }

    def _held(self, division: StageSums, slots: Slots | None) -> dict[str, np.ndarray]:
        """Bytes on a rank of each stage at its worst moment, by what they are for."""
        held = self._stored(division.elements)
        if self.on.cut > 1 and self.candidate.zero >= 2:
            if self.candidate.zero >= 3:
                held["gathered groups"] = division.gathered * self.itemsize
            held["whole gradients"] = division.whole_gradients(self.m) * self.itemsize
        # while a layer runs backward, what the layers behind it kept is gone
        held["activations"] = self._in_flight(division, slots) + np.minimum(division.running, 0.0)
        held["temporaries"] = np.maximum(division.running, 0.0)
        return held

    def _in_flight(self, division: StageSums, slots: Slots | None) -> np.ndarray:
        """Bytes of activations that each stage keeps at most."""
        if slots is None:
            return division.kept
        if self.candidate.schedule == "gpipe":
            return self.m * division.by_stage(division.kept)
        of_chunk = division.kept.tolist()
        return np.array([slots.most_held(stage, of_chunk) for stage in range(self.pipe)])

    # --- the whole

    def estimate(self, limit: float = np.inf) -> Estimate | None:
        """Seconds and memory; None if no division into stages has room in ``limit`` bytes a rank."""
        starts = self.divide(limit)
        if starts is None:
            return None
        division = StageSums(self.layers, starts, self.pipe)
        costs = np.diff(self.busy.before[:, division.edges], axis=1)
        if self.paces is not None:
            costs = costs * np.tile(self.paces, self.candidate.chunks)
        slots, seconds = self._run(costs)
        busy = self.m * division.by_stage(costs.sum(axis=0))
        mean, most = float(busy.mean()), float(busy.max())
        idle = max(seconds - mean, 0.0)
        seconds = max(seconds, self._crowded(mean))
        exposed = self._exposed(division, costs) + self._shared(division)
        update = self._update(float(division.elements.max()))
        total = seconds + exposed + update
        held = self._held(division, slots)
        stage = int(np.argmax(sum(held.values())))
        holds = {name: float(each[stage]) for name, each in held.items()}
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
            memory=sum(holds.values()),
            sent=inside_sent + self._sent(division),
            work=most + update,
            imbalance=most / mean if most else 1.0,
            parts={name: max(value, 0.0) for name, value in parts.items()},
            holds=holds,
            stage=stage,
        )

    def _run(self, costs: np.ndarray) -> tuple[Slots | None, float]:
        """The schedule's slots and their length with these costs, seconds[3, chunks]; of a long one, as it goes on
        once it is under way."""
        if self.pipe == 1:
            return None, self.m * float(costs.sum())
        duration = self._between(float(self.layers.output[:-1].max(initial=0)))
        transfer = 0.0 if duration.works else duration.seconds
        few, of_chunks = 2 * self.pipe, costs.T.tolist()
        if self.m * len(of_chunks) <= LONG or self.m <= few + self.pipe:
            slots = self.setting.slots(self.candidate, self.m)
            return slots, slots.seconds(of_chunks, transfer)
        slots, more = self.setting.slots(self.candidate, few), self.setting.slots(self.candidate, few + self.pipe)
        seconds = slots.seconds(of_chunks, transfer)
        each = (more.seconds(of_chunks, transfer) - seconds) / self.pipe
        return slots, seconds + (self.m - few) * each

    def _exposed(self, division: StageSums, costs: np.ndarray) -> float:
        """Seconds that gradients and updated parameters travel, hidden by nothing, of the stage with most of them.

        What travels in every micro-batch is in ``Busy``, unless ranks' own cores move the bytes.
        """
        if len(self.on.summed) == 1:
            return 0.0
        zero = self.candidate.zero
        times = {0: (0, 0, 1), 1: (1, 1, 0), 2: (1, self.m, 0), 3: (2 * self.m, self.m, 0)}[zero]
        travel = self.setting.travel(self.layers, self.on.stored if zero else self.on.summed)
        gather, scatter, reduce = division.travel(travel)
        if self.works:
            seconds = times[0] * gather + times[1] * scatter + times[2] * reduce
        elif zero < 2:
            last = division.by_stage(costs[1] + costs[2])
            hidden = last * (1 - 1 / division.counts) * self.setting.overlap
            seconds = np.maximum(scatter * times[1] + reduce * times[2] - hidden, 0.0) + gather * times[0]
        else:
            seconds = travel.last[division.starts[: self.pipe]] + (gather if zero == 2 else 0.0)
        worst = float((seconds + self._copies(division.elements)).max())
        return self._crowded(worst) if self.works else worst

    def _shared(self, division: StageSums) -> float:
        """Seconds in which the stages that have the same parameters sum their gradients."""
        size = float(division.apart.max()) * self.itemsize
        if not size:
            return 0.0
        ranks = 0, self.on.next_stage * (self.pipe - 1)
        return self.setting.collectives.of("all_reduce", ranks, size).seconds

    def _copies(self, elements: np.ndarray) -> np.ndarray | float:
        """Seconds in which those that store the same part sum it."""
        if len(self.on.copies) == 1 or not self.candidate.zero:
            return 0.0
        parts = elements * self.itemsize / self.on.cut
        collectives, copies = self.setting.collectives, self.on.copies
        return np.array([collectives.of("all_reduce", copies, part).seconds for part in parts.tolist()])

    def _sent(self, division: StageSums) -> float:
        """Bytes that all ranks send of parameters and their gradients."""
        on, zero, m = self.on, self.candidate.zero, self.m
        ranks = self.candidate.ranks / self.pipe
        size = division.elements * self.itemsize
        shared = 2.0 * self.itemsize * division.apart  # by both stages, of each rank
        if zero == 0:
            n = len(on.summed)
            return float((2 * size * (n - 1) / n + shared).sum()) * ranks
        n, copies = on.cut, len(on.copies)
        gathered = size
        if zero == 3:
            gathered = m * 2 * (size + division.tied * self.itemsize)
            last = (len(division.starts) - 1) % self.pipe  # whose last layer is still here when its backward begins
            gathered[last] -= m * self.costs[-1].parameters * self.itemsize
        reduced = size * (1 if zero == 1 else m)
        sent = (gathered + reduced) * (n - 1) + 2 * size * (copies - 1) / copies + shared
        return float(sent.sum()) * ranks / n

    def _update(self, elements: float) -> float:
        parts = self.on.cut if self.candidate.zero else 1
        return self._crowded(elements / parts * self.update)


# --- Which layers each stage of a pipeline should have: the division whose slowest stage is quickest, and fits


#: Whether chunk k has room for layers i to j - 1, for all i and j at once: fits(k)[i, j].
Fits = Callable[[int], np.ndarray]


def best_division(
    work: Sequence[float],
    chunks: int,
    *,
    boundary: Sequence[float] = (),
    fits: Fits | None = None,
    paces: Sequence[float] = (),
) -> tuple[int, ...] | None:
    """The first layer of each of ``chunks`` consecutive parts, such that the part that takes longest takes least.

    ``work`` are seconds of each layer for a micro-batch; ``boundary[i]`` seconds that the transfer between layers
    i - 1 and i costs the parts on both sides; ``paces[k]`` how many times as long part k takes as others, on a slower
    rank. By dynamic programming over (chunks, layers): exact, in
    O(chunks layers^2). None if nothing fits.
    """
    layers = len(work)
    if chunks > layers:
        return None
    before = np.array([0.0, *accumulate(work)])
    cost = np.array([*boundary, *[0.0] * (layers + 1 - len(boundary))])
    cost[0] = cost[layers] = 0.0
    part = (before + cost)[None, :] - (before - cost)[:, None]  # [i, j]: of layers i to j - 1
    part[np.tril_indices(layers + 1)] = np.inf  # every part has a layer
    best = np.full(layers + 1, np.inf)  # [j]: of the first k chunks with the first j layers
    best[0] = 0.0
    choices = []
    for k in range(chunks):
        worst = np.maximum(best[:, None], part * paces[k] if len(paces) else part)
        if fits is not None:
            worst = np.where(fits(k), worst, np.inf)
        chosen = layers - np.argmin(worst[::-1], axis=0)  # of equal ones the latest start
        best = worst[chosen, np.arange(layers + 1)]
        choices.append(chosen)
    if not np.isfinite(best[layers]):
        return None
    starts, end = [], layers
    for chosen in reversed(choices):
        end = int(chosen[end])
        starts.append(end)
    return tuple(starts[::-1])


def slowest(work: Sequence[float], starts: Sequence[int]) -> float:
    """Seconds of the part that takes longest."""
    ends = [*starts[1:], len(work)]
    return max(sum(work[first:end]) for first, end in zip(starts, ends, strict=True))
