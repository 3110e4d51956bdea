"""Estimates a candidate's step in about a millisecond: seconds and memory from the costs of its layers.

The pipeline's schedule is timed with the costs of each stage, and the memory of each stage follows from the same order.
Exposed communication of gradients and parameters is added. The planner compares candidates by these estimates; the
whole step of the plans that it proposes is analyzed and simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd_engine.arrays.precision import accumulated_in
from spmd_engine.engine.offload.target import PIECE
from spmd_engine.engine.schedules.schedule import Backward, BackwardInput, BackwardWeight, Compute, Forward, Schedule
from spmd_engine.engine.state.array_table import GRADIENT, USED, array_table
from spmd_engine.planning.search.layer_costs import ShardedLayers, StageSums
from spmd_engine.planning.search.search_space import STORED, Candidate
from spmd_engine.planning.simulator.step_evaluation import PlanEvaluation, peak_memory
from spmd_engine.planning.simulator.times import Duration

if TYPE_CHECKING:
    from spmd_engine.planning.search.cost_model import CostModel

LONG = 2048  #: forwards of all stages beyond which a schedule is timed for fewer micro-batches, and extrapolated


@dataclass(frozen=True)
class Estimate:
    """A candidate with its costs; without others, they are not known."""

    candidate: Candidate
    seconds: float = inf
    memory: float = inf  #: peak bytes of the rank that holds most
    sent: float = 0.0  #: bytes that all ranks send in a step
    work: float = 0.0  #: seconds of work of the rank that works most
    imbalance: float = 1.0  #: the most work of a rank over the mean
    parts: Mapping[str, float] = field(default_factory=dict)  #: seconds by cause
    holds: Mapping[str, float] = field(default_factory=dict)  #: bytes by kind, on the rank that holds most
    stage: int = 0  #: the stage of the rank that holds most
    evaluation: PlanEvaluation | None = None  #: after it, seconds, memory, sent and work are those of the whole step
    closed: Estimate | None = None  #: the estimate before that

    @property
    def simulated(self) -> bool:
        return self.evaluation is not None

    @property
    def bandwidth(self) -> float:
        """Bytes a second that a rank sends."""
        return self.sent / self.candidate.ranks / self.seconds

    def evaluated(self, evaluation: PlanEvaluation, memory: Sequence[float] = ()) -> Estimate:
        """The estimate with the seconds, memory, bytes sent and work of its simulated step. ``memory``: the bytes that
        each rank may hold, if ranks are unequal."""
        return replace(
            self,
            seconds=evaluation.seconds,
            memory=peak_memory(evaluation.analysis, memory),
            sent=evaluation.bytes_sent,
            work=max(evaluation.prediction.working.values(), default=0.0)
            if evaluation.whole or not self.work
            else self.work,
            evaluation=evaluation,
            closed=self,
        )

    def as_json(self) -> dict[str, Any]:
        """The estimate as JSON."""
        return {
            "plan": str(self.candidate),
            "simulated": self.simulated,
            "seconds": float(self.seconds),
            "bytes_sent": int(self.sent),
            "peak_bytes": int(self.memory),
            "seconds_by_part": {name: float(value) for name, value in self.parts.items()},
            "bytes_by_kind": {name: int(value) for name, value in self.holds.items()},
        }


Bound = tuple[float, float]  #: the least seconds and bytes of a candidate, over all divisions into stages


class Estimator:
    """Estimates a candidate, given the costs of its layers."""

    def __init__(
        self,
        model: CostModel,
        candidate: Candidate,
        layers: ShardedLayers,
        update: float,
        slowdowns: np.ndarray | None,
    ) -> None:
        """``update``: seconds of the optimizer per element; ``slowdowns``: of each stage on unequal nodes."""
        self.model, self.candidate, self.m, self.pipe = model, candidate, candidate.micro_batches, candidate.pipe
        self.layers, self.update, self.slowdowns = layers, update, slowdowns
        self.summed, self.stored, self.replicas, stages = model.groups(candidate.axes)
        self.shards = len(self.stored)  #: the number of ZeRO's shards
        self.next_stage = stages[1] if self.pipe > 1 else 1  #: the distance to the rank of the next stage
        sharded_axes = STORED if self.shards > 1 else ()
        self.table = array_table(candidate.zero, sharded_axes, model.dtype, places=candidate.places)
        self.itemsize = model.dtype.itemsize
        self.wide = accumulated_in(model.dtype).itemsize  #: bytes of an element that is summed or updated
        self.node = model.machine.nodes[0]
        self.neighbours = min(candidate.ranks, self.node.ranks)  #: ranks on a node

    # --- bounds

    def bound(self) -> Bound:
        """The least seconds and bytes with any division into stages, without communication between them.

        W is the work of a micro-batch, r W that of its forward and input gradient. Stage s ends no sooner than its m
        micro-batches take after the first has passed the stages before: T >= m w_s + r W X_s / v, where X_s is the
        share of the stages before and v the chunks of a stage. T is least if all of these are equal:
        T = (r W / v) / (1 - (1 - r / (v m))^p).
        """
        layers, p = self.layers, self.pipe
        work = self.m * layers.whole
        seconds = work / p if self.slowdowns is None else work / float((1 / self.slowdowns).sum())
        if p > 1 and self.slowdowns is None:
            path = layers.path / self.candidate.chunks
            share = min(path / work, 1.0) if work else 0.0
            seconds = path / (1 - (1 - share) ** p) if share > 1e-9 else seconds
        quickest = 1.0 if self.slowdowns is None else float(self.slowdowns.min())
        seconds = max(seconds, self._contended_seconds(quickest * work / p))
        if p == 1:
            undivided = self.model.once(("undivided", id(layers)), lambda: StageSums(layers, (0,), 1))
            seconds += self._exposed_seconds(undivided, quickest * layers.before[:, -1:])
        elements = layers.own_elements / p
        kept = 0.0 if "activations" in self.candidate.places else layers.all_kept / p
        return seconds + self._update_seconds(elements), sum(self._stored_bytes(elements).values()) + kept

    def _disk_seconds(self, size: float, loaded: float = 0.0) -> float:
        """Seconds in which the ranks of a node each write ``size`` bytes and read them again, and read ``loaded``."""
        return self.neighbours * self.node.disk_seconds(size + loaded, size)

    def _contended_seconds(self, work: float) -> float:
        """The least seconds if each rank works for ``work`` seconds, where ranks share cores."""
        return work if self.node.cores is None else work * max(1.0, self.neighbours / self.node.cores)

    # --- stages

    def divide(self, limit: float = np.inf) -> tuple[int, ...] | None:
        """The first layer of each chunk, in the division into stages of at most ``limit`` bytes whose slowest stage is
        fastest; None if there is none.

        The limit is not checked for interleaved schedules, whose stages have several chunks.
        """
        if self.pipe == 1:
            return (0,)
        if self.candidate.stages is not None:
            return self.candidate.stages
        chunks, hops = self.pipe * self.candidate.chunks, [0.0] * len(self.layers)
        if self._message_time(1.0).works:  # a boundary before a layer costs the ranks on both sides
            hops[1:] = [2 * self._message_time(layer.output).seconds for layer in self.layers.costs[:-1]]
        work = self.layers.work
        slowdowns = () if self.slowdowns is None else tuple(self.slowdowns.tolist()) * self.candidate.chunks
        key = "division", id(self.layers), chunks, hops[-1], self.next_stage, slowdowns
        starts = self.model.once(key, lambda: best_division(work.tolist(), chunks, boundary=hops, slowdowns=slowdowns))
        if starts is None or not np.isfinite(limit) or self.candidate.chunks > 1:
            return starts
        ends = (*starts[1:], len(self.layers))
        room = self._fits(limit)
        if all(room(k)[start, end] for k, (start, end) in enumerate(zip(starts, ends, strict=True))):
            return starts
        return best_division(work.tolist(), chunks, boundary=hops, fits=room, slowdowns=slowdowns)

    def _message_time(self, size: float) -> Duration:
        """The duration of a message between neighbouring stages."""
        return self.model.collectives.of("send", (0, self.next_stage), size)

    def _fits(self, limit: float) -> Callable[[int], np.ndarray]:
        elements = np.array([0.0, *np.cumsum(self.layers.elements)])
        kept_before = np.array([0.0, *np.cumsum(self.layers.kept)])
        first = np.maximum(np.arange(len(elements)) - self.candidate.overlap, 0)
        end = np.minimum(np.arange(len(elements)) + self.candidate.overlap, len(elements) - 1)
        stored = sum(self._stored_bytes(elements[end][None, :] - elements[first][:, None]).values())
        in_flight = (kept_before[None, :] - kept_before[:, None]) * ("activations" not in self.candidate.places)

        def fits(k: int) -> np.ndarray:
            flight = self.m if self.candidate.schedule == "gpipe" else min(self.m, self.pipe - k)
            return stored + flight * in_flight <= limit

        return fits

    # --- memory

    def _stored_bytes(self, elements: Any) -> dict[str, Any]:
        """Bytes that a rank stores between steps, by kind, for ``elements`` parameters: a number, or one a stage."""
        return self.table.bytes_by_class(elements, elements / self.shards, self.model.states)

    def _held_bytes(self, division: StageSums, slots: Slots | None) -> dict[str, np.ndarray]:
        """Peak bytes of a rank of each stage, by kind."""
        held = self._stored_bytes(division.elements + division.only_held)
        if not self.table[USED].lasts:
            held["gathered groups"] = division.gathered * self.itemsize
        if not self.table[GRADIENT].lasts:
            held["whole gradients"] = division.whole_gradients(self.m) * self.wide
        # while a layer runs backward, the activations of later layers are already freed
        held["activations"] = self._in_flight(division, slots) + np.minimum(division.running, 0.0)
        held["temporaries"] = np.maximum(division.running, 0.0)
        if "activations" in self.candidate.places:  # those of two layers stay, and of the one that runs
            largest, running = self.layers.kept.max(), self.layers.running - self.layers.kept_before
            held["activations"] = np.full(self.pipe, 2.0 * largest)
            held["temporaries"] = np.full(self.pipe, running.max())
        if self.candidate.places:
            held["temporaries"] = held["temporaries"] + 3 * self.model.states * PIECE
        return held

    def _in_flight(self, division: StageSums, slots: Slots | None) -> np.ndarray:
        """The most bytes of activations that each stage keeps."""
        if slots is None:
            return division.kept
        if self.candidate.schedule == "gpipe":
            return self.m * division.by_stage(division.kept)
        of_chunk = division.kept.tolist()
        return np.array([slots.most_held(stage, of_chunk) for stage in range(self.pipe)])

    # --- the whole step

    def estimate(self, limit: float = np.inf) -> Estimate | None:
        """Seconds and memory; None if no division into stages fits in ``limit`` bytes per rank."""
        starts = self.divide(limit)
        if starts is None:
            return None
        division = StageSums(self.layers, starts, self.pipe, self.candidate.overlap)
        costs = np.diff(self.layers.before[:, division.edges], axis=1)
        if self.slowdowns is not None:
            costs = costs * np.tile(self.slowdowns, self.candidate.chunks)
        slots, seconds = self._time_schedule(costs)
        work_of_stage = self.m * division.by_stage(costs.sum(axis=0))
        mean, most = float(work_of_stage.mean()), float(work_of_stage.max())
        idle = max(seconds - mean, 0.0)
        seconds = max(seconds, self._contended_seconds(mean))
        own = float(division.elements.max()) / (self.shards if self.candidate.zero >= 3 else 1)
        if "activations" in self.candidate.places:
            moved = self.m * float(division.kept.sum()) / self.pipe
            seconds = max(seconds + self.node.copy_seconds(self.neighbours, 2 * moved), self._disk_seconds(moved))
        if "parameters" in self.candidate.places:  # they are read twice
            moved = 2 * self.m * own * self.wide
            seconds = max(seconds + self.node.copy_seconds(self.neighbours, moved), self._disk_seconds(0.0, moved))
        exposed = self._exposed_seconds(division, costs) + self._tied_seconds(division)
        exposed += self._overlap_seconds(division)
        update = self._update_seconds(float((division.elements + division.only_held).max()))
        total = seconds + exposed + update
        held = self._held_bytes(division, slots)
        stage = int(np.argmax(sum(held.values())))
        holds = {name: float(sizes[stage]) for name, sizes in held.items()}
        hops = 2 * sum(self.layers.costs[first - 1].output for first in starts if first)
        inside_sent = self.m * (self.layers.sent + hops) * self.candidate.ranks / self.pipe
        inner = self.m * self.layers.inside / self.pipe
        inside_zero = self.m * (self.layers.exposed) / self.pipe
        parts = {
            "work": mean - inner - inside_zero,
            "communication inside layers": inner,
            "bubbles": idle,
            "sharing cores": seconds - idle - mean,
            "gradients and gathers": exposed + inside_zero,
            "update": update,
        }
        return Estimate(
            candidate=replace(self.candidate, stages=starts if self.pipe > 1 else None),
            seconds=total,
            memory=sum(holds.values()),
            sent=inside_sent + self._sent_bytes(division),
            work=most + update,
            imbalance=most / mean if most else 1.0,
            parts={name: max(value, 0.0) for name, value in parts.items()},
            holds=holds,
            stage=stage,
        )

    def _time_schedule(self, costs: np.ndarray) -> tuple[Slots | None, float]:
        """The slots of the schedule, and their seconds with these costs, float64[3, chunks]; a long schedule is
        extrapolated from its first micro-batches."""
        if self.pipe == 1:
            return None, self.m * float(costs.sum())
        duration = self._message_time(float(self.layers.output[:-1].max(initial=0)))
        transfer = 0.0 if duration.works else duration.seconds
        few, chunk_costs = 2 * self.pipe, costs.T.tolist()
        if self.m * len(chunk_costs) <= LONG or self.m <= few + self.pipe:
            slots = self.model.slots(self.candidate, self.m)
            return slots, slots.seconds(chunk_costs, transfer)
        slots, more = self.model.slots(self.candidate, few), self.model.slots(self.candidate, few + self.pipe)
        seconds = slots.seconds(chunk_costs, transfer)
        added = (more.seconds(chunk_costs, transfer) - seconds) / self.pipe
        return slots, seconds + (self.m - few) * added

    def _exposed_seconds(self, division: StageSums, costs: np.ndarray) -> float:
        """Exposed seconds of communication of gradients and updated parameters, in the stage that has most.

        Communication inside micro-batches is part of ``LayerTimes``, unless ranks move the bytes themselves.
        """
        if len(self.summed) == 1:
            return 0.0
        zero = self.candidate.zero
        counts = {0: (0, 0, 1), 1: (1, 1, 0), 2: (1, self.m, 0), 3: (2 * self.m, self.m, 0)}[zero]
        comm = self.model.zero_comm(self.layers, self.stored if zero else self.summed)
        by_copy = self.model.is_by_copy(self.candidate)
        gather, scatter, reduce = division.zero_seconds(comm)
        if by_copy:
            seconds = counts[0] * gather + counts[1] * scatter + counts[2] * reduce
        elif zero < 2:
            last = division.by_stage(costs[1] + costs[2])
            hidden = last * (1 - 1 / division.by_stage(np.diff(division.edges))) * self.model.hides_sums
            seconds = np.maximum(scatter * counts[1] + reduce * counts[2] - hidden, 0.0) + gather * counts[0]
        else:
            seconds = comm["last reduce_scatter"][0, division.starts[: self.pipe]] + (gather if zero == 2 else 0.0)
        worst = float((seconds + self._replica_seconds(division.elements)).max())
        return self._contended_seconds(worst) if by_copy else worst

    def _tied_seconds(self, division: StageSums) -> float:
        """Seconds in which stages that share parameters sum their gradients."""
        size = float(division.apart.max()) * self.wide
        if not size:
            return 0.0
        ranks = 0, self.next_stage * (self.pipe - 1)
        return self.model.collectives.of("all_reduce", ranks, size).seconds

    def _overlap_seconds(self, division: StageSums) -> float:
        """Seconds in which stages send gradients of layers that others only hold."""
        elements = float(division.sent_gradients.max()) / (self.shards if self.candidate.zero else 1)
        return self._message_time(elements * self.wide).seconds if elements else 0.0

    def _replica_seconds(self, elements: np.ndarray) -> np.ndarray | float:
        """Seconds in which the replicas of a ZeRO shard sum it."""
        if len(self.replicas) == 1 or not self.candidate.zero:
            return 0.0
        parts = elements * self.wide / self.shards
        collectives, replicas = self.model.collectives, self.replicas
        return np.array([collectives.of("all_reduce", replicas, part).seconds for part in parts.tolist()])

    def _sent_bytes(self, division: StageSums) -> float:
        """Bytes of parameters and gradients that all ranks send."""
        zero, m = self.candidate.zero, self.m
        ranks = self.candidate.ranks / self.pipe
        size, gradients = division.elements * self.itemsize, division.elements * self.wide
        shared = self.wide * (2.0 * division.apart + division.sent_gradients)  # tied ones are sent by both stages
        if zero == 0:
            n = len(self.summed)
            return float((2 * gradients * (n - 1) / n + shared).sum()) * ranks
        n, replicas = self.shards, len(self.replicas)
        gathered = size + division.only_held * self.itemsize
        if zero == 3:
            gathered = m * 2 * (size + division.tied * self.itemsize)
            last = (len(division.starts) - 1) % self.pipe  # the last layer is still gathered when its backward begins
            gathered[last] -= m * self.layers.costs[-1].parameters * self.itemsize
        reduced = gradients * (1 if zero == 1 else m)
        sent = (gathered + reduced) * (n - 1) + 2 * gradients * (replicas - 1) / replicas + shared
        return float(sent.sum()) * ranks / n

    def _update_seconds(self, elements: float) -> float:
        parts = self.shards if self.candidate.zero else 1
        seconds = self._contended_seconds(elements / parts * self.update)
        arrays = self.model.states * ("optimizer" in self.candidate.places) + ("parameters" in self.candidate.places)
        return max(seconds, self._disk_seconds(elements / parts * arrays * self.wide))


# --- The division of layers into pipeline stages whose slowest stage is fastest


#: Whether layers i to j - 1 fit into chunk k, for all i and j: fits(k)[i, j].
Fits = Callable[[int], np.ndarray]


def best_division(
    work: Sequence[float],
    chunks: int,
    *,
    boundary: Sequence[float] = (),
    fits: Fits | None = None,
    slowdowns: Sequence[float] = (),
) -> tuple[int, ...] | None:
    """The first layer of each of ``chunks`` consecutive parts, such that the slowest part is as fast as possible.

    ``work`` are seconds of each layer for a micro-batch. ``boundary[i]`` are seconds that the transfer between layers
    i - 1 and i costs the parts on both sides. ``slowdowns[k]`` is the factor by which part k is slower than others.
    Exact, by dynamic programming over (chunks, layers), in O(chunks layers^2). None if nothing fits.
    """
    layers = len(work)
    if chunks > layers:
        return None
    before = np.array([0.0, *accumulate(work)])
    cost = np.array([*boundary, *[0.0] * (layers + 1 - len(boundary))])
    cost[0] = cost[layers] = 0.0
    part = (before + cost)[None, :] - (before - cost)[:, None]  # [i, j]: seconds of layers i to j - 1
    part[np.tril_indices(layers + 1)] = np.inf  # every part has a layer
    best = np.full(layers + 1, np.inf)  # [j]: seconds of the slowest of k chunks with the first j layers
    best[0] = 0.0
    choices = []
    for k in range(chunks):
        worst = np.maximum(best[:, None], part * slowdowns[k] if len(slowdowns) else part)
        if fits is not None:
            worst = np.where(fits(k), worst, np.inf)
        chosen = layers - np.argmin(worst[::-1], axis=0)  # the latest of equal starts
        best = worst[chosen, np.arange(layers + 1)]
        choices.append(chosen)
    if not np.isfinite(best[layers]):
        return None
    starts, end = [], layers
    for chosen in reversed(choices):
        end = int(chosen[end])
        starts.append(end)
    return tuple(starts[::-1])


# --- The slots of a pipeline's schedule, timed in less than a millisecond


FORWARD, INPUT, WEIGHT, BOTH = range(4)
_KINDS = {Forward: FORWARD, BackwardInput: INPUT, BackwardWeight: WEIGHT, Backward: BOTH}


class Slots:
    """All slots of a schedule, in an order in which each follows the slots that it waits for.

    Times equal those of ``engine.schedules.schedule.timeline``, but thousands of calls are fast: the dependencies
    between slots are computed once for each schedule, number of stages and number of micro-batches. Sends do not delay
    their stage.
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
