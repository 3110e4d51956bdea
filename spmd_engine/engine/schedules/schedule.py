"""A schedule as data: its instructions, and the transfers between stages that follow from them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

from spmd_engine.errors import UsageError


@dataclass(frozen=True)
class Instruction:
    """One thing to do with micro-batch ``m`` and the layers of ``chunk``."""

    m: int
    chunk: int = 0

    def __hash__(self) -> int:
        """Instructions of different kinds hash differently: sets hold all kinds for one micro-batch and chunk."""
        return hash((type(self), self.m, self.chunk))


class Compute(Instruction):
    """Work of this stage alone."""


class Forward(Compute):
    """Run the chunk's layers forward, and the loss after the last chunk."""


class Backward(Compute):
    """Run them backward, layer by layer: the input's gradient first: another stage may wait for it."""


class BackwardInput(Compute):
    """Only the gradient of the chunk's input: what the stage before needs to go on."""


class BackwardWeight(Compute):
    """Only the gradients of the chunk's weights: no stage waits for them, so they fill idle time."""


class Transfer(Instruction):
    """Begins to move an array between neighbouring chunks, and does not wait for it.

    The neighbour begins the other end of it. There are none where both chunks are on the same stage.
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
    """Wait until a transfer that this stage has started is over: received, or its array free to be used again."""

    started: Transfer


Program = list[Instruction | Wait]


# --- From what a stage computes to its program: which arrays it receives and sends meanwhile, and when


def receive_before(compute: Compute, last_chunk: int) -> Transfer | None:
    """The receive of what ``compute`` needs from another chunk, if it needs anything."""
    match compute:
        case Forward(m, chunk) if chunk > 0:
            return StartReceiveInput(m, chunk)
        case Backward(m, chunk) | BackwardInput(m, chunk) if chunk < last_chunk:
            return StartReceiveGradient(m, chunk)
    return None


def send_after(compute: Compute, last_chunk: int) -> Transfer | None:
    """The send of what another chunk needs from ``compute``, if it needs anything."""
    match compute:
        case Forward(m, chunk) if chunk < last_chunk:
            return StartSendOutput(m, chunk)
        case Backward(m, chunk) | BackwardInput(m, chunk) if chunk > 0:
            return StartSendGradient(m, chunk)
    return None


def other_end(transfer: Transfer) -> Transfer:
    """What the neighbour starts to take part in ``transfer``: a send's receive and a receive's send.

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
    order: Sequence[Compute], last_chunk: int, *, sends_unfinished: int, receive_ahead: int = 1
) -> Program:
    """A stage's program: ``order`` with the transfers it needs among several stages, and the waits for them.

    Each receive is begun before the compute instruction ``receive_ahead`` places earlier, so that it overlaps
    with that, and waited for just before the one that uses it. Each send is begun just after its compute
    instruction. It may end only when its receive has begun, so to wait for it at once would stop two stages that
    send to each other. But each holds an array: it is waited for when ``sends_unfinished`` later ones of its kind
    (outputs, gradients) have begun, when the neighbour should have asked for it.
    """
    program: Program = []
    unfinished: dict[type[Transfer], deque[Transfer]] = {StartSendOutput: deque(), StartSendGradient: deque()}
    receives = [receive_before(compute, last_chunk) for compute in order]
    begun = 0  # receives of so many compute instructions
    for i, compute in enumerate(order):
        program += [receive for receive in receives[begun : i + receive_ahead + 1] if receive]
        begun = i + receive_ahead + 1
        if received := receives[i]:
            program.append(Wait(received))
        program.append(compute)
        if send := send_after(compute, last_chunk):
            program.append(send)
            sends = unfinished[type(send)]
            sends.append(send)
            if len(sends) > sends_unfinished:
                program.append(Wait(sends.popleft()))
    return program + [Wait(send) for sends in unfinished.values() for send in sends]


# --- A schedule: pure data, which stage does what with which micro-batch, and in which order


@dataclass(frozen=True)
class Schedule(ABC):
    """What each stage of a pipeline computes, in order. An engine, or a timeline, executes its ``program``.

    A schedule of one's own gives ``name`` and ``order``. Each chunk must run its backwards in the order of the
    micro-batches, as all of these do: gradients are then summed in one order, and have the same bits in all.
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
        """How many outputs, and how many gradients, may be on their way from a stage while it goes on.

        Each holds an array. With fewer than the turns that a stage may be ahead of its neighbour, it would wait.
        """
        return 2

    def expected_bubble(self, stages: int, micro_batches: int) -> float | None:
        """Idle time / all stages' time, where a formula is known: see each schedule. None where none is.

        It holds if all stages have the same costs and transfers take no time.
        """
        return None


def staggered(*parts: tuple[Sequence[Compute], int]) -> list[Compute]:
    """Sequences of work side by side, one of each a round; each begins so many rounds late.

    Forwards, and backwards two rounds late: F0, F1, F2 B0, F3 B1, B2, B3.
    """
    rounds = range(max(late + len(work) for work, late in parts))
    turns = ((work, r - late) for r in rounds for work, late in parts)
    return list(chain.from_iterable(work[i : i + 1] for work, i in turns if i >= 0))
