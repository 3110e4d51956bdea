"""The slots of a pipeline's schedule, timed in less than a millisecond."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

from spmd_engine.engine.schedules.schedule import Backward, BackwardInput, BackwardWeight, Compute, Forward, Schedule

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
