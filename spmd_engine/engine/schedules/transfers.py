"""From what a stage computes to its program: which arrays it receives and sends meanwhile, and when."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from spmd_engine.engine.schedules.instructions import (
    Backward,
    BackwardInput,
    Compute,
    Forward,
    Program,
    StartReceiveGradient,
    StartReceiveInput,
    StartSendGradient,
    StartSendOutput,
    Transfer,
    Wait,
)


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
