"""A schedule as data: its instructions, the transfers between stages that follow from them, and the time it takes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

from spmd_engine.errors import UsageError
from spmd_engine.pictures import Picture


@dataclass(frozen=True)
class Instruction:
    """One operation on micro-batch ``m`` with the layers of ``chunk``."""

    m: int
    chunk: int = 0

    def __hash__(self) -> int:
        """Instructions of different kinds hash differently: sets hold all kinds for one micro-batch and chunk."""
        return hash((type(self), self.m, self.chunk))


class Compute(Instruction):
    """Work of one stage alone."""


class Forward(Compute):
    """Run the chunk's layers forward, and the loss after the last chunk."""


class Backward(Compute):
    """Run the chunk's layers backward; each input's gradient first, since another stage may wait for it."""


class BackwardInput(Compute):
    """Compute only the gradient of the chunk's input, which the stage before waits for."""


class BackwardWeight(Compute):
    """Compute only the gradients of the chunk's weights: no stage waits for them, so they fill idle time."""


class MoveGradients(Compute):
    """Move the gradients of the weights of a chunk that a helper rank computes, after the step's last micro-batch, from
    this rank to their owner; or, on an owner, receive them."""


class Transfer(Instruction):
    """Begin to move an array between neighbouring chunks, without a wait.

    The neighbour begins the other end. Chunks on the same stage need no transfer.
    """


class StartReceiveInput(Transfer):
    """Begin to receive the chunk's input, from the stage of the chunk before."""


class StartSendOutput(Transfer):
    """Begin to send the chunk's output, to the stage of the chunk after."""


class StartReceiveGradient(Transfer):
    """Begin to receive the gradient of the chunk's output, from the stage of the chunk after."""


class StartSendGradient(Transfer):
    """Begin to send the gradient of the chunk's input, to the stage of the chunk before."""


@dataclass(frozen=True)
class Wait:
    """Wait until a transfer that this stage has started is complete: received, or its array free for reuse."""

    started: Transfer


Program = list[Instruction | Wait]


# --- From what a stage computes to its program: the arrays that it receives and sends, and when


def receive_before(compute: Instruction, last_chunk: int) -> Transfer | None:
    """The receive of the array that ``compute`` needs from another chunk, if any."""
    match compute:
        case Forward(m, chunk) if chunk > 0:
            return StartReceiveInput(m, chunk)
        case Backward(m, chunk) | BackwardInput(m, chunk) if chunk < last_chunk:
            return StartReceiveGradient(m, chunk)
    return None


def send_after(compute: Compute, last_chunk: int, first: int = 0) -> Transfer | None:
    """The send of the array that another chunk needs from ``compute``, if any; chunks before ``first`` need no
    gradient."""
    match compute:
        case Forward(m, chunk) if chunk < last_chunk:
            return StartSendOutput(m, chunk)
        case Backward(m, chunk) | BackwardInput(m, chunk) if chunk > first:
            return StartSendGradient(m, chunk)
    return None


def other_end(transfer: Transfer) -> Transfer:
    """The neighbour's end of ``transfer``: a send's receive or a receive's send.

    >>> other_end(StartSendOutput(m=5, chunk=2))
    StartReceiveInput(m=5, chunk=3)
    """
    match transfer:
        case StartSendOutput(m, chunk):
            return StartReceiveInput(m, chunk + 1)
        case StartReceiveInput(m, chunk):
            return StartSendOutput(m, chunk - 1)
        case StartSendGradient(m, chunk):
            return StartReceiveGradient(m, chunk - 1)
        case StartReceiveGradient(m, chunk):
            return StartSendGradient(m, chunk + 1)
    raise TypeError(f"{transfer} is no transfer")


def with_transfers(
    order: Sequence[Compute], last_chunk: int, *, sends_unfinished: int, receive_ahead: int = 1, first: int = 0
) -> Program:
    """A stage's program: ``order`` with the transfers it needs among several stages, and the waits for them.

    Each receive is begun before the compute instruction ``receive_ahead`` places earlier, so that it overlaps
    with that, and waited for just before the one that uses it. Each send is begun just after its compute
    instruction. It may complete only after its receive has begun, so an immediate wait would block two stages that
    send to each other. But each send holds an array: its wait comes when ``sends_unfinished`` later ones of its kind
    (outputs, gradients) have begun, when the neighbour should have begun the receive.
    """
    program: Program = []
    unfinished: dict[type[Transfer], deque[Transfer]] = {StartSendOutput: deque(), StartSendGradient: deque()}
    receives = [receive_before(compute, last_chunk) for compute in order]
    begun = 0  # the number of compute instructions whose receives have begun
    for i, compute in enumerate(order):
        program += [receive for receive in receives[begun : i + receive_ahead + 1] if receive]
        begun = i + receive_ahead + 1
        if received := receives[i]:
            program.append(Wait(received))
        program.append(compute)
        if send := send_after(compute, last_chunk, first):
            program.append(send)
            sends = unfinished[type(send)]
            sends.append(send)
            if len(sends) > sends_unfinished:
                program.append(Wait(sends.popleft()))
    return program + [Wait(send) for sends in unfinished.values() for send in sends]


# --- A schedule: which stage computes what with which micro-batch, in which order


@dataclass(frozen=True)
class Schedule(ABC):
    """What each stage of a pipeline computes, in order. An engine, or a timeline, executes its ``program``.

    A user's schedule defines ``name`` and ``order``. Each chunk must run its backwards in the order of the
    micro-batches, as all schedules here do: gradients are then summed in one order, with the same bits in all.
    """

    name: ClassVar[str]
    chunks: int = 1  #: chunks of layers on each stage

    def __post_init__(self) -> None:
        if self.chunks != 1:
            raise UsageError(f"{self.name}: one chunk of layers a stage, not {self.chunks}; interleaved has several")

    @abstractmethod
    def order(self, stages: int, micro_batches: int, stage: int) -> list[Compute]:
        """What ``stage`` of ``stages`` computes, in order."""

    def program(self, stages: int, micro_batches: int, stage: int) -> Program:
        """``order``, and the transfers between stages. Raises UsageError if there is no such stage."""
        if not 0 <= stage < stages or micro_batches < 1:
            raise UsageError(f"{self.name}: no stage {stage} of {stages} with {micro_batches} micro-batches")
        order = self.order(stages, micro_batches, stage)
        if stages == 1:
            return list(order)
        unfinished = self.sends_unfinished(stages, micro_batches)
        return with_transfers(order, stages * self.chunks - 1, sends_unfinished=unfinished)

    def sends_unfinished(self, stages: int, micro_batches: int) -> int:
        """The number of outputs, and of gradients, whose sends may be unfinished while a stage continues.

        Each holds an array. A stage waits if the number is below the turns that it may be ahead of its neighbour.
        """
        return 2

    def expected_bubble(self, stages: int, micro_batches: int) -> float | None:
        """Idle time / all stages' time, where a formula is known (see each schedule); else None.

        It holds if all stages have the same costs and transfers take no time.
        """
        return None

    #: ``schedule.picture(stages=4, micro_batches=8)`` draws it; set by the package: it needs the timeline.
    picture: ClassVar[Callable[..., Picture]]

    def _repr_html_(self) -> str:
        return self.picture()._repr_html_()


def staggered(*parts: tuple[Sequence[Compute], int]) -> list[Compute]:
    """Interleave sequences of work, one item of each per round; each begins ``late`` rounds late.

    Forwards, and backwards two rounds late: F0, F1, F2 B0, F3 B1, B2, B3.
    """
    rounds = range(max(late + len(work) for work, late in parts))
    turns = ((work, r - late) for r in rounds for work, late in parts)
    return list(chain.from_iterable(work[i : i + 1] for work, i in turns if i >= 0))


# --- A schedule executed without ranks or arrays: what each stage does when, and which stage waits for which


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
