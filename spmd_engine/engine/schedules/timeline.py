"""A schedule executed without ranks or arrays: what each stage does when, and which stage waits for which."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spmd_engine.engine.schedules.schedule import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    Instruction,
    Program,
    Schedule,
    StartSendGradient,
    StartSendOutput,
    Transfer,
    Wait,
    other_end,
    receive_before,
)
from spmd_engine.errors import UsageError

#: Time that a stage needs for all its layers and one micro-batch; a whole backward is the sum of its parts.
COSTS: Mapping[type[Compute], float] = {Forward: 1.0, BackwardInput: 1.0, BackwardWeight: 1.0}


@dataclass(frozen=True)
class Slot:
    """A stage computes ``instruction`` from ``start`` to ``end``, in the units of the costs."""

    stage: int
    start: float
    end: float
    instruction: Compute


def timeline(
    schedule: Schedule, stages: int, micro_batches: int, costs: Mapping[type[Compute], float] = COSTS
) -> list[Slot]:
    """Execute the programs of all stages; returns what each computes and when, by stage and time.

    ``costs`` are those of a stage for one micro-batch; its chunks share them evenly. Other instructions cost as
    in ``COSTS``, a Backward as much as its two parts. Transfers take no time, but synchronize: neither end is complete
    before both have begun, as with a synchronous send. Raises UsageError if an instruction comes before one that it
    needs, or if stages wait for each other, and names them.
    """
    costs = {**COSTS, **costs}
    costs = {Backward: costs[BackwardInput] + costs[BackwardWeight], **costs}
    costs = {kind: cost / schedule.chunks for kind, cost in costs.items()}
    programs = [schedule.program(stages, micro_batches, stage) for stage in range(stages)]
    return _Execution(programs, [*range(stages)] * schedule.chunks, costs).run()


def check_programs(programs: Sequence[Program], places: Sequence[int], names: Sequence[str]) -> None:
    """Raise UsageError, as ``timeline`` does, unless these programs can be executed together: one of each place, by
    ``names``; ``places`` are those of all chunks."""
    _Execution(programs, places, COSTS, names).run()


class _Execution:
    """Stages that advance one after the other, each until it must wait for a transfer not yet begun.

    In which order they advance does not matter: a stage's clock depends on the others only through the times
    at which transfers begin.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        places: Sequence[int],
        costs: Mapping[type[Compute], float],
        names: Sequence[str] = (),
    ) -> None:
        self.programs, self.places, self.last_chunk, self.costs = programs, places, len(places) - 1, costs
        self.names = names or [f"stage {stage}" for stage in range(len(programs))]
        self.next = [0] * len(programs)  # place in each stage's program
        self.clock = [0.0] * len(programs)
        self.done: list[set[Instruction | Wait]] = [set() for _ in programs]
        self.began: dict[Transfer, float] = {}
        self.slots: list[Slot] = []

    def run(self) -> list[Slot]:
        stages = range(len(self.programs))
        while any([self._advance(stage) for stage in stages]):
            pass
        blocked = [stage for stage in stages if self.next[stage] < len(self.programs[stage])]
        if blocked:
            raise UsageError("deadlock: " + "; ".join(map(self._why_blocked, blocked)))
        return sorted(self.slots, key=lambda slot: (slot.stage, slot.start))

    def _advance(self, stage: int) -> bool:
        """Execute as far as possible; returns whether any instruction was executed."""
        program, before = self.programs[stage], self.next[stage]
        while self.next[stage] < len(program):
            instruction = program[self.next[stage]]
            if instruction in self.done[stage]:
                raise UsageError(f"{self.names[stage]}: {instruction} comes twice")
            for need in self._needs(instruction):
                if need not in self.done[stage]:
                    raise UsageError(f"{self.names[stage]}: {instruction} comes before {need}, which it needs")
            if isinstance(instruction, Wait) and other_end(instruction.started) not in self.began:
                break
            self._execute(stage, instruction)
            self.next[stage] += 1
        return self.next[stage] > before

    def _execute(self, stage: int, instruction: Instruction | Wait) -> None:
        now = self.clock[stage]
        self.done[stage].add(instruction)
        if isinstance(instruction, Wait):
            self.clock[stage] = max(now, self.began[other_end(instruction.started)])
        elif isinstance(instruction, Transfer):
            self.began[instruction] = now
        elif isinstance(instruction, Compute):
            self.clock[stage] = now + self.costs.get(type(instruction), 0.0)
            self.slots.append(Slot(stage, now, self.clock[stage], instruction))
            if isinstance(instruction, Backward):  # both parts
                self.done[stage].add(BackwardInput(instruction.m, instruction.chunk))

    def _needs(self, instruction: Instruction | Wait) -> Iterator[Instruction | Wait]:
        """The instructions that the same stage must have executed before."""
        match instruction:
            case Wait(started):
                yield started
            case StartSendOutput(m, chunk):
                yield Forward(m, chunk)
            case StartSendGradient(m, chunk) | BackwardWeight(m, chunk):
                yield BackwardInput(m, chunk)
            case Backward(m, chunk) | BackwardInput(m, chunk):
                yield Forward(m, chunk)
        if isinstance(instruction, Compute) and (receive := receive_before(instruction, self.last_chunk)):
            if len(self.programs) > 1:
                yield Wait(receive)
            else:  # on the same stage, without a transfer
                yield from self._needs(other_end(receive))

    def _why_blocked(self, stage: int) -> str:
        """The stage and the transfer for which this stage waits, as text."""
        waiting: Any = self.programs[stage][self.next[stage]]  # a Wait: nothing else blocks
        awaited = other_end(waiting.started)
        other = self.places[awaited.chunk]
        never = "" if awaited in self.programs[other] else ", which it never does"
        return f"{self.names[stage]} stands at {waiting}, until {self.names[other]} begins {awaited}{never}"


def makespan(slots: Iterable[Slot]) -> float:
    """The time from the first start to the last end."""
    slots = list(slots)
    return max(slot.end for slot in slots) - min(slot.start for slot in slots)


def idle_fraction(slots: Iterable[Slot]) -> float:
    """The bubble: idle time / (stages x makespan)."""
    by_stage = _by_stage(slots)
    busy = sum(slot.end - slot.start for work in by_stage.values() for slot in work)
    total = makespan(slot for work in by_stage.values() for slot in work)
    return 1 - busy / (len(by_stage) * total)


def idle_inside(slots: Iterable[Slot]) -> list[float]:
    """Per stage: idle time between its first start and its last end."""
    return [makespan(work) - sum(slot.end - slot.start for slot in work) for work in _by_stage(slots).values()]


def peak_activations(slots: Iterable[Slot]) -> list[float]:
    """Per stage: the most micro-batches whose activations it holds at once, in units of all its layers'.

    Those of a micro-batch and a chunk are held from the start of its forward to the end of its whole backward,
    or of its weight part, and count 1/chunks.
    """
    peaks = []
    for work in _by_stage(slots).values():
        held = peak = 0
        for slot in work:
            held += isinstance(slot.instruction, Forward)
            peak = max(peak, held)
            held -= isinstance(slot.instruction, (Backward, BackwardWeight))
        peaks.append(peak / len({slot.instruction.chunk for slot in work}))
    return peaks


def _by_stage(slots: Iterable[Slot]) -> dict[int, list[Slot]]:
    stages: dict[int, list[Slot]] = {}
    for slot in sorted(slots, key=lambda slot: (slot.stage, slot.start)):
        stages.setdefault(slot.stage, []).append(slot)
    return stages
