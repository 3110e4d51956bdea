"""What connects nodes, as a graph, and how much of a link is left to each message of a pattern of messages."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property

import numpy as np

from spmd_engine.errors import UsageError
from spmd_engine.planning.machine.machine import Link, Machine

Vertex = int | str  #: a node by its number, or a switch by its name
Edge = tuple[Vertex, Vertex]


class Network:
    """The graph of a machine's nodes and switches. A message takes a shortest way; ways of equal length are shared
    by choosing the first, so a pattern's load on a link is an upper bound of what clever routing would have."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._ways: dict[Vertex, dict[Vertex, Vertex]] = {}

    @cached_property
    def neighbours(self) -> dict[Vertex, dict[Vertex, float]]:
        """Vertex -> neighbour -> capacity of the link between, in links of a node."""
        topology, nodes = self.machine.topology, self.machine.node_count
        graph: dict[Vertex, dict[Vertex, float]] = {}

        def connect(a: Vertex, b: Vertex, capacity: float = 1.0) -> None:
            graph.setdefault(a, {})[b] = capacity
            graph.setdefault(b, {})[a] = capacity

        if topology.kind == "flat":
            for node in range(nodes):
                connect(node, self._through(node))
        elif topology.kind == "fat-tree":
            for node in range(nodes):
                connect(node, self._through(node))
                connect(self._through(node), "core", topology.leaf / topology.oversubscription)
        elif topology.kind == "ring":
            for node in range(nodes if nodes > 2 else nodes - 1):
                connect(node, (node + 1) % nodes)
        elif topology.kind == "torus":
            for node in range(nodes):
                stride = nodes
                for size in topology.shape:
                    stride //= size
                    place = node // stride % size
                    if size > 1:
                        connect(node, node + ((place + 1) % size - place) * stride)
        else:
            for a, b in topology.edges:
                connect(a, b)
        return graph

    @cached_property
    def _through(self) -> Callable[[int], str] | None:
        """The switch that a node is at, where there are switches."""
        topology = self.machine.topology
        return {"flat": lambda node: "switch", "fat-tree": lambda node: f"leaf {node // topology.leaf}"}.get(
            topology.kind
        )

    def way(self, a: int, b: int) -> list[Edge]:
        """The links from node a to node b, in their direction."""
        if a == b:
            return []
        if self._through is not None:
            here, there = self._through(a), self._through(b)
            return [(a, here), (here, b)] if here == there else [(a, here), (here, "core"), ("core", there), (there, b)]
        if a not in self._ways:
            self._ways[a] = self._tree(a)
        before = self._ways[a]
        if b not in before:
            raise UsageError(f"machine {self.machine.name}: no way leads from node {a} to node {b}")
        edges, at = [], b
        while at != a:
            edges.append((before[at], at))
            at = before[at]
        return edges[::-1]

    def _tree(self, root: Vertex) -> dict[Vertex, Vertex]:
        """Vertex -> the one before it on the way from ``root``, breadth first."""
        before, left = {root: root}, deque([root])
        while left:
            here = left.popleft()
            for neighbour in self.neighbours.get(here, {}):
                if neighbour not in before:
                    before[neighbour] = here
                    left.append(neighbour)
        return before

    def hops(self, a: int, b: int) -> int:
        """Links from node a to node b; through one switch, which the latency of ``between`` is of, 1."""
        length = len(self.way(a, b))
        return max(length - 1, 1) if self.machine.topology.kind in ("flat", "fat-tree") else max(length, 1)

    def crowd(self, pairs: Iterable[tuple[int, int]]) -> float:
        """How many times slower than alone the slowest of these messages is, all between nodes at once.

        Each of the pairs is a flow of one node's full bandwidth.
        """
        load: Counter[Edge] = Counter()
        for a, b in pairs:
            load.update(self.way(a, b))
        return max((count / self.neighbours[a][b] for (a, b), count in load.items()), default=1.0)

    def ring(self, nodes: Sequence[int]) -> list[tuple[int, int]]:
        """The messages of one round of a ring over these nodes, in this order."""
        return [(a, b) for a, b in zip(nodes, (*nodes[1:], nodes[0]), strict=True) if a != b]


# --- What connects the ranks of a group: latency and bandwidth of the links that its collectives go through


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
