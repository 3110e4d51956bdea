"""Times of collectives, by algorithm and by the links of the group.

All groups of the same axes communicate at the same time and share the links of their nodes. With S the bytes of the
whole array and n ranks:

    ring           reduce_scatter, all_gather   (n-1) latency + S (n-1)/n / bandwidth;   all_reduce twice that
    rounds         the same, of hosts           log2(n) latency + S (n-1)/n / bandwidth;   all_reduce, broadcast twice
    whole          all_reduce, broadcast        log2(n) (latency + S / bandwidth)
    tree           all_reduce                   2 log2(n) (latency + S / bandwidth)
    two trees      all_reduce between nodes     2 log2(n) latency + 2 S / bandwidth   (Sanders et al., 2009)
    hierarchical   inside nodes, then between the nodes by as many lanes as ranks a node, then inside again
    all_to_all     n-1 messages of S/n^2 bytes to as many ranks
    by copy        each rank copies what it reads, and adds what it reduces, with its own core

Hosts exchange messages in rounds, or of whole small arrays, as ``comm.rounds`` says; between devices the library has
the other algorithms. The fastest is taken. Bandwidths between nodes follow from the network's graph.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from math import ceil, log2

import numpy as np

from spmd_engine.errors import UsageError
from spmd_engine.planning.dry_run.step_analysis import HashedOnce
from spmd_engine.planning.machine.machine import Link, Machine

Vertex = int | str  #: a node by its number, or a switch by its name
Edge = tuple[Vertex, Vertex]


class Network:
    """The graph of a machine's nodes and switches.

    A message takes the first of the shortest paths. So the load of a link is an upper bound of its load under better
    routing.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._tree = cache(self._find_tree)

    @cached_property
    def neighbours(self) -> dict[Vertex, dict[Vertex, float]]:
        """Vertex -> neighbour -> capacity of the link between them, relative to the link of a node."""
        topology, nodes = self.machine.topology, self.machine.node_count
        graph: dict[Vertex, dict[Vertex, float]] = {}

        def connect(a: Vertex, b: Vertex, capacity: float = 1.0) -> None:
            graph.setdefault(a, {})[b] = capacity
            graph.setdefault(b, {})[a] = capacity

        if self._switch is not None:
            for node in range(nodes):
                connect(node, self._switch(node))
                if topology.kind == "fat-tree":
                    connect(self._switch(node), "core", topology.leaf / topology.oversubscription)
        elif topology.kind in ("ring", "torus"):
            for node in range(nodes):
                stride = nodes
                for size in topology.shape if topology.kind == "torus" else (nodes,):
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
            leaf, other = self._switch(a), self._switch(b)
            return [(a, leaf), (leaf, b)] if leaf == other else [(a, leaf), (leaf, "core"), ("core", other), (other, b)]
        before = self._tree(a)
        if b not in before:
            raise UsageError(f"machine {self.machine.name}: topology: node {a} and node {b} are not connected")
        edges, node = [], b
        while node != a:
            edges.append((before[node], node))
            node = before[node]
        return edges[::-1]

    def _find_tree(self, root: Vertex) -> dict[Vertex, Vertex]:
        """Vertex -> the vertex before it on the path from ``root``, breadth first."""
        before, left = {root: root}, deque([root])
        while left:
            vertex = left.popleft()
            for neighbour in self.neighbours.get(vertex, {}):
                if neighbour not in before:
                    before[neighbour] = vertex
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
        self.node = machine.node(ranks[0])  #: the node of the first rank
        self.between_nodes = cache(self._bandwidth_between_nodes)

    @cached_property
    def nodes(self) -> Counter[int]:
        """The number of ranks on each node."""
        numbers, counts = np.unique(self._node_numbers, return_counts=True)
        return Counter(dict(zip(numbers.tolist(), counts.tolist(), strict=True)))

    @cached_property
    def _node_numbers(self) -> np.ndarray:
        return self.machine.node_numbers[np.asarray(self.ranks)]

    def _neighbours(self) -> Iterator[tuple[int, int]]:
        """Neighbours in the ring of ranks; one of several pairs with equal links."""
        if self.machine.pairs:
            yield from self.network.ring(self.ranks)
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
        """Bandwidth of the link ``inside`` while all ranks of the node send."""
        return self.inside.bandwidth * min(1.0, (self.inside.lanes or self.node.ranks) / self.node.ranks)

    @cached_property
    def latency(self) -> float:
        """The largest latency between neighbours in the ring."""
        return max((self.between(a, b)[0] for a, b in self._neighbours()), default=0.0)

    def between(self, a: int, b: int) -> tuple[float, float]:
        """Latency and bandwidth of messages from rank a to rank b while all ranks of the node send."""
        link = self.machine.link(a, b)
        (node_of_a, node), (node_of_b, _) = self.machine.places[a], self.machine.places[b]
        lanes = min(1.0, (link.lanes or node.ranks) / node.ranks)
        hops = self.network.hops(node_of_a, node_of_b) if node_of_a != node_of_b else 1
        return link.latency * hops, link.bandwidth * lanes

    def _bandwidth_between_nodes(self, streams: int) -> float:
        """Bandwidth between the nodes of the group if ``streams`` of its ranks send from each node."""
        link, node = self.machine.between, self.node
        groups = max(1, node.ranks // max(self.nodes.values()))  # groups like this one on each node
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


# --- Times


#: How many times S (n-1)/n bytes go through each link.
ROUNDS = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "broadcast": 1, "reduce": 1, "gather": 1, "scatter": 1}


@dataclass(frozen=True)
class Duration:
    """Seconds of a communication: ``begin`` before bytes move, ``move`` while they do.

    ``works``: whether the ranks' own cores move the bytes.
    """

    begin: float
    move: float
    works: bool = False

    @property
    def seconds(self) -> float:
        return self.begin + self.move


class CollectiveTimes:
    """Durations of collectives on a machine."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.network = machine, Network(machine)
        self._duration, self._links = cache(self._compute), cache(partial(GroupLinks, machine, self.network))

    def of(self, operation: str, ranks: Sequence[int], size: float) -> Duration:
        """The duration of an operation over these ranks; ``size`` is S, or the bytes of a message."""
        return self._duration(operation, ranks if isinstance(ranks, HashedOnce) else HashedOnce(ranks), size)

    def _compute(self, operation: str, ranks: HashedOnce, size: float) -> Duration:
        fitted, links, n = self.machine.fitted, self._links(ranks), len(ranks)
        if n == 1:
            return Duration(0.0, 0.0)
        if len(links.nodes) == 1 and links.inside.by_copy:
            return self._compute_by_copy(operation, n, size, links.inside)
        if operation in ("send", "receive"):
            begin, bandwidth = links.between(*links.ranks[:2])
            return Duration(begin + fitted.wait_seconds, size / (bandwidth * fitted.link_share))
        if operation == "barrier":
            return Duration(fitted.wait_seconds + ceil(log2(n)) * links.latency, 0.0)
        times = [_time_all_to_all(links, size)] if operation == "all_to_all" else _list_times(operation, links, size)
        begin, move = min(times, key=lambda time: time[0] + time[1] / fitted.link_share)
        return Duration(begin + fitted.wait_seconds, move / fitted.link_share)

    def _compute_by_copy(self, operation: str, n: int, size: float, link: Link) -> Duration:
        """The time of copies: a gather copies S, a reduce_scatter reads n parts of S/n, an all_reduce does both."""
        copies = {"all_reduce": 2.0, "all_to_all": 1 / n, "send": 0.5, "receive": 1.0, "barrier": 0.0}
        fitted = self.machine.fitted
        moved = copies.get(operation, 1.0) * size
        return Duration(link.latency + fitted.wait_seconds, moved / (link.bandwidth * fitted.link_share), True)


def _list_times(operation: str, links: GroupLinks, size: float) -> list[tuple[float, float]]:
    """Seconds of (latency, moving bytes) of each algorithm."""
    n, rounds, nodes = links.size, ROUNDS[operation], links.nodes
    inside, latency, depth = links.inside_bandwidth, links.latency, ceil(log2(links.size))
    across = inside if len(nodes) == 1 else min(inside, links.between_nodes(1))
    in_rounds = len(nodes) > 1 and not links.node.has_devices
    if in_rounds and operation == "broadcast":
        rounds = 2
    steps = {count: ceil(log2(count)) if in_rounds else count - 1 for count in (n, len(nodes))}
    times = [(rounds * steps[n] * latency, rounds * size * (n - 1) / n / across)]
    if in_rounds and rounds == 2:
        times.append((depth * latency, depth * size / across))
    elif operation == "all_reduce":
        times.append((2 * depth * latency, 2 * depth * size / across))
        if len(nodes) > 1:
            times.append((2 * depth * latency, 2 * size / across))
    most = max(nodes.values())
    if len(nodes) > 1 and 1 < most == min(nodes.values()):
        begin = rounds * ((most - 1) * links.inside.latency + steps[len(nodes)] * latency)
        lanes = links.between_nodes(most)
        move = rounds * size * ((most - 1) / most / inside + (len(nodes) - 1) / len(nodes) / lanes)
        times.append((begin, move))
        if operation == "all_reduce" and not in_rounds:
            begin = 2 * ((most - 1) * links.inside.latency + ceil(log2(len(nodes))) * latency)
            times.append((begin, 2 * size * ((most - 1) / most / inside + 1 / lanes)))
    return times


def _time_all_to_all(links: GroupLinks, size: float) -> tuple[float, float]:
    """Seconds of (latency, moving bytes): each rank has size/n bytes and sends all but its own part."""
    n, rank_bytes = links.size, size / links.size
    begin, inside = (n - 1) * links.latency, links.inside_bandwidth
    if len(links.nodes) == 1:
        return begin, rank_bytes * (n - 1) / n / inside
    most = max(links.nodes.values())
    leaving = rank_bytes * most * (n - most) / n  # bytes that leave a node
    return begin, max(rank_bytes * most / n / inside, leaving / links.between_nodes(most) * links.all_to_all_contention)
