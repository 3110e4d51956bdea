"""What connects nodes, as a graph, and how much of a link is left to each message of a pattern of messages."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

from spmd_engine.errors import UsageError
from spmd_engine.planning.machine import Machine

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
