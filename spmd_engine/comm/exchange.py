"""Messages of a call: their tags, exchanges between all pairs of ranks, and the condition that they are complete.

Each owner sends blocks directly to each reader, all at once, so that a busy rank finds them complete when it polls.
"""

from __future__ import annotations

from collections.abc import Sequence

from spmd_engine.arrays.backend import Array, CudaBackend, backend_of
from spmd_engine.comm.communicators.communicator import Ranks
from spmd_engine.comm.pending import Condition, Steps

PHASES = 3  # tags of a call: agreement, explanation of a mismatch, data
AGREEMENT, EXPLANATION, DATA = range(PHASES)
COLLECTIVE_TAGS = 4096 * PHASES  # collectives use lower tags, send and receive higher ones


def tag(number: int, phase: int) -> int:
    """The tag of the messages of call ``number`` in ``phase``."""
    return number * PHASES % COLLECTIVE_TAGS + phase


class Requests(Condition):
    """Completion of the messages passed to ``add``."""

    __slots__ = ("_ranks", "_requests", "_peers")

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(lambda: ranks.done(self._requests), self._is_done_with, messages=True)
        self._ranks, self._requests, self._peers = ranks, [], []

    def add(self, rank: int, requests: list) -> Requests:
        """Wait also for these requests of messages to or from ``rank``."""
        self._requests += requests
        self._peers += [self._ranks.outer(rank)] * len(requests)
        return self

    def _is_done_with(self, rank: int) -> bool:
        requests = zip(self._requests, self._peers, strict=True)
        return self._ranks.done([request for request, peer in requests if peer == rank])


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
