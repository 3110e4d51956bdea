"""What connects the ranks of a group: latency and bandwidth of the links that its collectives go through."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np

from spmd_engine.planning.machine import Link, Machine
from spmd_engine.planning.network import Network


class GroupLinks:
    """The links of one group, while all groups like it (the same axes, other coordinates) do the same."""

    def __init__(self, machine: Machine, network: Network, ranks: Sequence[int]) -> None:
        self.machine, self.network, self.ranks = machine, network, ranks
        self.size = len(ranks)
        self.node = machine.node(ranks[0])  #: of the first rank
        self._between_nodes: dict[int, float] = {}

    @cached_property
    def nodes(self) -> Counter[int]:
        """How many of the ranks each node has."""
        numbers, counts = np.unique(self._node_numbers, return_counts=True)
        return Counter(dict(zip(numbers.tolist(), counts.tolist(), strict=True)))

    @cached_property
    def _node_numbers(self) -> np.ndarray:
        return self.machine.node_numbers[np.asarray(self.ranks)]

    def _neighbours(self) -> Iterator[tuple[int, int]]:
        """HashedOnce that follow each other in the ring; of pairs that only differ in where they are, one."""
        ring = zip(self.ranks, (*self.ranks[1:], self.ranks[0]), strict=True)
        if self.machine.pairs:
            yield from ((a, b) for a, b in ring if a != b)
            return
        numbers = self._node_numbers
        first = np.unique(np.stack([numbers, np.roll(numbers, -1)]), axis=1, return_index=True)[1]
        for at in first.tolist():
            a, b = self.ranks[at], self.ranks[(at + 1) % self.size]
            if a != b:
                yield a, b

    @cached_property
    def inside(self) -> Link:
        """The slowest link between neighbours of these ranks on one node."""
        places = self.machine.places
        links = [self.machine.link(a, b) for a, b in self._neighbours() if places[a][0] == places[b][0]]
        return min(links, key=lambda link: link.bandwidth) if links else self.node.inside

    @cached_property
    def inside_bandwidth(self) -> float:
        """Of that link, while as many of the node send as it has ranks."""
        return self.inside.bandwidth * min(1.0, (self.inside.lanes or self.node.ranks) / self.node.ranks)

    @cached_property
    def latency(self) -> float:
        """The largest between neighbours in rank order."""
        return max((self.between(a, b)[0] for a, b in self._neighbours()), default=0.0)

    def between(self, a: int, b: int) -> tuple[float, float]:
        """Latency and bandwidth of messages from rank a to rank b, while its node's other ranks send alike."""
        link = self.machine.link(a, b)
        (here, node), (there, _) = self.machine.places[a], self.machine.places[b]
        lanes = min(1.0, (link.lanes or node.ranks) / node.ranks)
        hops = self.network.hops(here, there) if here != there else 1
        return link.latency * hops, link.bandwidth * lanes

    def between_nodes(self, streams: int) -> float:
        """What a group with so many ranks sending from each node gets of the links between its nodes."""
        if streams not in self._between_nodes:
            self._between_nodes[streams] = self._found_between_nodes(streams)
        return self._between_nodes[streams]

    def _found_between_nodes(self, streams: int) -> float:
        link, node = self.machine.between, self.node
        groups = max(1, node.ranks // max(self.nodes.values()))  # like this one, on each node
        share = min(float(streams), (link.lanes or node.ranks) / groups)
        crowd = self.network.crowd(self.network.ring(sorted(self.nodes)))
        return link.bandwidth * share / max(crowd, 1.0)

    @cached_property
    def crowd_of_all(self) -> float:
        """How much slower than alone messages are where every node sends to every other."""
        numbers = sorted(self.nodes)
        if len(numbers) > 64 or len(numbers) < 2:
            return 1.0
        pairs = [(a, b) for a in numbers for b in numbers if a != b]
        return max(self.network.crowd(pairs) / (len(numbers) - 1), 1.0)
