"""The network between nodes as a graph, and the links of a group of ranks."""

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
    """The graph of a machine's nodes and switches.

    A message takes a shortest path; of several the first. So the load of a link is an upper bound of that under better
    routing.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._trees: dict[Vertex, dict[Vertex, Vertex]] = {}

    @cached_property
    def neighbours(self) -> dict[Vertex, dict[Vertex, float]]:
        """Vertex -> neighbour -> capacity of the link between them, relative to the link of a node."""
        topology, nodes = self.machine.topology, self.machine.node_count
        graph: dict[Vertex, dict[Vertex, float]] = {}

        def connect(a: Vertex, b: Vertex, capacity: float = 1.0) -> None:
            graph.setdefault(a, {})[b] = capacity
            graph.setdefault(b, {})[a] = capacity

        if topology.kind == "flat":
            for node in range(nodes):
                connect(node, self._switch(node))
        elif topology.kind == "fat-tree":
            for node in range(nodes):
                connect(node, self._switch(node))
                connect(self._switch(node), "core", topology.leaf / topology.oversubscription)
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
    def _switch(self) -> Callable[[int], str] | None:
        """The switch of a node; None without switches."""
        topology = self.machine.topology
        return {"flat": lambda node: "switch", "fat-tree": lambda node: f"leaf {node // topology.leaf}"}.get(
            topology.kind
        )

    def path(self, a: int, b: int) -> list[Edge]:
        """The links from node a to node b, in order; raises UsageError if they are not connected."""
        if a == b:
            return []
        if self._switch is not None:
            here, there = self._switch(a), self._switch(b)
            return [(a, here), (here, b)] if here == there else [(a, here), (here, "core"), ("core", there), (there, b)]
        if a not in self._trees:
            self._trees[a] = self._tree(a)
        before = self._trees[a]
        if b not in before:
            raise UsageError(f"machine {self.machine.name}: topology: node {a} and node {b} are not connected")
        edges, node = [], b
        while node != a:
            edges.append((before[node], node))
            node = before[node]
        return edges[::-1]

    def _tree(self, root: Vertex) -> dict[Vertex, Vertex]:
        """Vertex -> the vertex before it on the path from ``root``, breadth first."""
        before, left = {root: root}, deque([root])
        while left:
            here = left.popleft()
            for neighbour in self.neighbours.get(here, {}):
                if neighbour not in before:
                    before[neighbour] = here
                    left.append(neighbour)
        return before

    def hops(self, a: int, b: int) -> int:
        """Links from node a to node b, at least 1. One switch, whose latency is that of ``between``, counts as 1."""
        length = len(self.path(a, b))
        return max(length - 1, 1) if self.machine.topology.kind in ("flat", "fat-tree") else max(length, 1)

    def contention(self, pairs: Iterable[tuple[int, int]]) -> float:
        """The factor by which the slowest of concurrent messages between these pairs of nodes is slower than alone.

        Each message uses the full bandwidth of a node.
        """
        load: Counter[Edge] = Counter()
        for a, b in pairs:
            load.update(self.path(a, b))
        return max((count / self.neighbours[a][b] for (a, b), count in load.items()), default=1.0)

    def ring(self, nodes: Sequence[int]) -> list[tuple[int, int]]:
        """The messages of one round of a ring over these nodes, in this order."""
        return [(a, b) for a, b in zip(nodes, (*nodes[1:], nodes[0]), strict=True) if a != b]


# --- The links of a group: latency and bandwidth for its collectives


class GroupLinks:
    """The links of one group, while all groups of the same axes communicate at the same time."""

    def __init__(self, machine: Machine, network: Network, ranks: Sequence[int]) -> None:
        self.machine, self.network, self.ranks = machine, network, ranks
        self.size = len(ranks)
        self.node = machine.node(ranks[0])  #: of the first rank
        self._between_nodes: dict[int, float] = {}

    @cached_property
    def nodes(self) -> Counter[int]:
        """The number of ranks on each node."""
        numbers, counts = np.unique(self._node_numbers, return_counts=True)
        return Counter(dict(zip(numbers.tolist(), counts.tolist(), strict=True)))

    @cached_property
    def _node_numbers(self) -> np.ndarray:
        return self.machine.node_numbers[np.asarray(self.ranks)]

    def _neighbours(self) -> Iterator[tuple[int, int]]:
        """Neighbours in the ring of ranks; of equal pairs one."""
        ring = zip(self.ranks, (*self.ranks[1:], self.ranks[0]), strict=True)
        if self.machine.pairs:
            yield from ((a, b) for a, b in ring if a != b)
            return
        numbers = self._node_numbers
        first = np.unique(np.stack([numbers, np.roll(numbers, -1)]), axis=1, return_index=True)[1]
        for index in first.tolist():
            a, b = self.ranks[index], self.ranks[(index + 1) % self.size]
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
        """Bandwidth of that link while all ranks of the node send."""
        return self.inside.bandwidth * min(1.0, (self.inside.lanes or self.node.ranks) / self.node.ranks)

    @cached_property
    def latency(self) -> float:
        """The largest latency between neighbours in the ring."""
        return max((self.between(a, b)[0] for a, b in self._neighbours()), default=0.0)

    def between(self, a: int, b: int) -> tuple[float, float]:
        """Latency and bandwidth of messages from rank a to rank b while all ranks of the node send."""
        link = self.machine.link(a, b)
        (here, node), (there, _) = self.machine.places[a], self.machine.places[b]
        lanes = min(1.0, (link.lanes or node.ranks) / node.ranks)
        hops = self.network.hops(here, there) if here != there else 1
        return link.latency * hops, link.bandwidth * lanes

    def between_nodes(self, streams: int) -> float:
        """Bandwidth between the nodes of the group if ``streams`` of its ranks send from each node."""
        if streams not in self._between_nodes:
            self._between_nodes[streams] = self._bandwidth_between_nodes(streams)
        return self._between_nodes[streams]

    def _bandwidth_between_nodes(self, streams: int) -> float:
        link, node = self.machine.between, self.node
        groups = max(1, node.ranks // max(self.nodes.values()))  # like this one, on each node
        share = min(float(streams), (link.lanes or node.ranks) / groups)
        contention = self.network.contention(self.network.ring(sorted(self.nodes)))
        return link.bandwidth * share / max(contention, 1.0)

    @cached_property
    def all_to_all_contention(self) -> float:
        """The factor by which messages are slower than alone if each node sends to each other node."""
        numbers = sorted(self.nodes)
        if len(numbers) > 64 or len(numbers) < 2:
            return 1.0
        pairs = [(a, b) for a in numbers for b in numbers if a != b]
        return max(self.network.contention(pairs) / (len(numbers) - 1), 1.0)
