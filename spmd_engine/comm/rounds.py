"""The schedule by which ranks exchange parts of an array in log2(n) rounds of messages.

In each round a rank sends to the rank at some distance after it, and receives from the one as far before it. Distances
are powers of two, so it works for any number of ranks, and each rank receives each part once:

    reduce_scatter  largest distance first: a rank sends the sums, so far, of the parts of the ranks that follow
    all_gather      its adjoint: the same messages in the reverse order and direction, copied instead of added
    broadcast       largest distance first: each rank that has the whole array sends it on

(Bruck et al.: Efficient algorithms for all-to-all communications, 1997; Träff: Optimal, non-pipelined reduce-scatter
and allreduce algorithms, 2024.) If the number of ranks is a power of two, a part is summed in the same order at any
rank: first the ranks that are n/2 apart, then their sums that are n/4 apart, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from spmd_engine.comm.blocks import Reducer, joined, merged, spans
from spmd_engine.comm.communicators.communicator import Ranks
from spmd_engine.comm.exchange import Requests
from spmd_engine.comm.pending import Steps


class Round(NamedTuple):
    """Messages of one rank: the parts that it sends to the rank at ``distance``, and those that it receives."""

    distance: int
    sent: Sequence[int]
    received: Sequence[int]


def distances(ranks: int) -> list[int]:
    """Of the rounds, the largest first."""
    return [1 << i for i in reversed(range((ranks - 1).bit_length()))]


def reduce_rounds(rank: int, ranks: int) -> list[Round]:
    """After these rounds a rank has the sum of its own part; parts are numbered by rank."""

    def following(distance: int, first: int) -> list[int]:
        return [(rank + first + i) % ranks for i in range(min(distance, ranks - distance))]

    return [Round(distance, following(distance, distance), following(distance, 0)) for distance in distances(ranks)]


def gather_rounds(rank: int, ranks: int) -> list[Round]:
    """After these rounds a rank has all parts; before them, its own."""
    return [Round(-distance, received, sent) for distance, sent, received in reversed(reduce_rounds(rank, ranks))]


def broadcast_rounds(rank: int, ranks: int, root: int) -> list[Round]:
    """After these rounds all ranks have part 0, which is the whole array; before them, the root."""
    offset = (rank - root) % ranks

    def part(distance: int, after: int) -> range:
        return range(offset % (2 * distance) == after and offset - after + distance < ranks)

    return [Round(distance, part(distance, 0), part(distance, distance)) for distance in distances(ranks)]


class Payload:
    """Parts of flat ``x`` that ranks exchange in ``rounds``; what arrives replaces them, or is combined with them."""

    def __init__(
        self,
        x: np.ndarray,
        parts: Sequence[slice],
        rounds: Sequence[Round],
        combine: Reducer | None = None,
    ) -> None:
        self.x, self.parts, self.rounds, self._combine = x, parts, rounds, combine

    def outgoing(self, index: int) -> np.ndarray:
        """The message of a round."""
        slices = merged([self.parts[i] for i in self.rounds[index].sent]) or [slice(0, 0)]
        return self.x[slices[0]] if len(slices) == 1 else joined([self.x[each] for each in slices], 0, self.x.dtype)

    def room(self, index: int) -> np.ndarray:
        """Memory for the message that arrives in a round."""
        parts = [self.parts[i] for i in self.rounds[index].received]
        return np.empty(sum(part.stop - part.start for part in parts), self.x.dtype)

    def take(self, index: int, message: np.ndarray) -> None:
        """Put what has arrived in its place."""
        slices = merged([self.parts[i] for i in self.rounds[index].received])
        for part, place in zip(slices, spans([part.stop - part.start for part in slices]), strict=True):
            if self._combine is None:
                self.x[part] = message[place]
            else:
                self._combine(self.x[part], [self.x[part], message[place]])


def shift(ranks: Ranks, message: np.ndarray, incoming: np.ndarray, distance: int, tag: int) -> Requests:
    """Send ``message`` to the rank at ``distance``, and fill ``incoming`` from the rank as far before; empty: none."""
    to, source = (ranks.rank + distance) % ranks.size, (ranks.rank - distance) % ranks.size
    requests = Requests(ranks).add(source, ranks.start_receive(incoming, source, tag) if incoming.size else [])
    return requests.add(to, ranks.start_send(message, to, tag) if message.size else [])


def carry(ranks: Ranks, payload: Payload, tag: int) -> Steps:
    """Exchange the parts of ``payload``."""
    for index, (distance, _, _) in enumerate(payload.rounds):
        message, incoming = payload.outgoing(index), payload.room(index)
        yield shift(ranks, message, incoming, distance, tag)
        payload.take(index, incoming)
