"""Transport by messages between two ranks: between nodes, for device memory, and for calls that the library cannot do.

Each owner sends blocks directly to each reader, all at once, so that a busy rank finds them complete when it polls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Union

from spmd_engine.arrays.backend import Array, CudaBackend, backend_of
from spmd_engine.comm.pending import Condition, Requests, Steps
from spmd_engine.comm.transports.transport import Parts, Transport

if TYPE_CHECKING:
    from spmd_engine.comm.communicators.communicator import Communicator

PHASES = 3  # tags of a call: agreement, explanation of a mismatch, data
AGREEMENT, EXPLANATION, DATA = range(PHASES)
COLLECTIVE_TAGS = 4096 * PHASES  # collectives use lower tags, send and receive higher ones


def tag(number: int, phase: int) -> int:
    """The tag of the messages of call ``number`` in ``phase``."""
    return number * PHASES % COLLECTIVE_TAGS + phase


class MessagePart:
    """Some ranks of a communicator, including this one, in any order, to exchange messages."""

    def __init__(self, communicator: Communicator, members: Sequence[int]) -> None:
        self.members = list(members)  #: ranks of the communicator
        self.rank, self.size = self.members.index(communicator.rank), len(self.members)
        self.tuning, self._communicator = communicator.tuning, communicator

    def outer(self, rank: int) -> int:
        return self.members[rank]

    def start_send(self, data: Array, to: int, tag: int) -> list:
        return self._communicator.start_send(data, self.members[to], tag)

    def start_receive(self, data: Array, source: int, tag: int) -> list:
        return self._communicator.start_receive(data, self.members[source], tag)

    def done(self, requests: list) -> bool:
        return self._communicator.done(requests)


Ranks = Union["Communicator", MessagePart]  #: ranks that can exchange messages


def exchange(ranks: Ranks, outgoing: Sequence[Array | None], incoming: Sequence[Array | None], tag: int) -> Steps:
    """Send ``outgoing[r]`` to each other rank r and fill ``incoming[r]`` from it; None or empty: no message."""
    yield from settled(*outgoing, *incoming)
    requests = Requests(ranks)
    for step in range(1, ranks.size):  # rank r begins with rank r + 1, so that first targets differ
        source = (ranks.rank - step) % ranks.size
        if (x := incoming[source]) is not None and x.size:
            requests.add(source, ranks.start_receive(x, source, tag))
    for step in range(1, ranks.size):
        to = (ranks.rank + step) % ranks.size
        if (x := outgoing[to]) is not None and x.size:
            requests.add(to, ranks.start_send(x, to, tag))
    yield requests


def settled(*arrays: Array | None) -> Steps:
    """Wait for what devices compute of these arrays: MPI accesses device memory without waiting for its stream."""
    backends = [backend_of(x) for x in arrays if x is not None]
    for event in [backend.record() for backend in dict.fromkeys(backends) if isinstance(backend, CudaBackend)]:
        yield Condition(lambda event=event: event.done, lambda rank: True, messages=True)


class Messages(Transport):
    """See ``Transport``. Sums are always in rank order."""

    def __init__(self, ranks: Ranks, number: int) -> None:
        self.rank, self.size, self.tuning = ranks.rank, ranks.size, ranks.tuning
        self._ranks, self._tag = ranks, tag(number, DATA)

    def all_gather(self, x: Array, parts: Parts, *, last: bool = True) -> Steps:
        block = x[parts[self.rank]]
        yield from exchange(self._ranks, [block] * self.size, [x[part] for part in parts], self._tag)

    def all_to_all(self, x: Array, parts: Parts, out: Array, out_parts: Parts, *, last: bool = True) -> Steps:
        outgoing, incoming = [x[part] for part in parts], [out[part] for part in out_parts]
        yield from exchange(self._ranks, outgoing, incoming, self._tag)

    def _elements_a_round(self, itemsize: int) -> int:
        return max(1, self.tuning.piece // itemsize)  # messages have no largest count, as they are sent in pieces
