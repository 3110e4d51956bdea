"""How long a collective takes, by its algorithm and the links between the ranks that take part.

Times are of a group alone, while all groups like it (the same axes, other coordinates) do the same, as SPMD programs
do: they share what their nodes have. With S the bytes of the whole array and n ranks:

    ring           reduce_scatter, all_gather   (n-1) latency + S (n-1)/n / bandwidth;   all_reduce twice that
    tree           all_reduce                   2 log2(n) (latency + S / bandwidth)      (Rabenseifner, 2004)
    hierarchical   inside nodes, then between the nodes by as many lanes as ranks a node, then inside again
    all_to_all     n-1 messages of S/n^2 bytes to as many ranks
    by copy        each rank copies what it reads, and adds what it reduces, with its own core

The library is taken to choose the quickest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2

from spmd_engine.planning.machine import Link, Machine
from spmd_engine.planning.network import Network

#: How often the bytes that each rank must get go through a link, of S (n-1)/n.
ROUNDS = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "broadcast": 1, "reduce": 1, "gather": 1, "scatter": 1}


@dataclass(frozen=True)
class Duration:
    """Seconds of a communication: ``begin`` before any byte moves, ``move`` while they do.

    ``works`` says whether the ranks' own cores move them.
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
        self._known: dict[tuple, Duration] = {}

    def of(self, operation: str, ranks: Sequence[int], size: float) -> Duration:
        """Of an operation over these ranks; ``size`` is S, the bytes of the whole array (of a send, its bytes)."""
        key = operation, tuple(ranks), size
        if key not in self._known:
            self._known[key] = self._of(operation, ranks, size)
        return self._known[key]

    def _of(self, operation: str, ranks: Sequence[int], size: float) -> Duration:
        fitted, n = self.machine.fitted, len(ranks)
        if n == 1:
            return Duration(0.0, 0.0)
        nodes = Counter(self.machine.places[rank][0] for rank in ranks)
        if len(nodes) == 1 and (link := self._inside(ranks)).by_copy:
            return self._by_copy(operation, n, size, link)
        if operation in ("send", "receive"):
            begin, bandwidth = self._between(ranks[0], ranks[1])
            return Duration(begin + fitted.wait_seconds, size / (bandwidth * fitted.link_share))
        if operation == "barrier":
            return Duration(fitted.wait_seconds + ceil(log2(n)) * self._latency(ranks), 0.0)
        ways = self._all_to_all(ranks, size) if operation == "all_to_all" else self._ways(operation, ranks, nodes, size)
        best = min(ways, key=lambda way: way[0] + way[1] / fitted.link_share)
        return Duration(best[0] + fitted.wait_seconds, best[1] / fitted.link_share)

    def _ways(self, operation, ranks, nodes: Counter, size: float) -> list[tuple[float, float]]:
        """(latencies, seconds of bytes) of each algorithm that there is."""
        n, rounds = len(ranks), ROUNDS[operation]
        inside = self._inside_bandwidth(ranks)
        if len(nodes) == 1:
            latency, across = self._latency(ranks), inside
        else:
            latency, across = self._latency(ranks), min(inside, self._node_bandwidth(ranks, nodes, 1))
        ways = [(rounds * (n - 1) * latency, rounds * size * (n - 1) / n / across)]
        if operation == "all_reduce":
            depth = ceil(log2(n))
            ways.append((2 * depth * latency, 2 * depth * size / across))
        most = max(nodes.values())
        if len(nodes) > 1 and 1 < most == min(nodes.values()):
            here = self._inside(ranks).latency
            lanes = self._node_bandwidth(ranks, nodes, most)
            begin = rounds * ((most - 1) * here + (len(nodes) - 1) * latency)
            move = rounds * size * ((most - 1) / most / inside + (len(nodes) - 1) / len(nodes) / lanes)
            ways.append((begin, move))
        return ways

    def _all_to_all(self, ranks: Sequence[int], size: float) -> list[tuple[float, float]]:
        """Every rank has size/n bytes and sends all but its own part of them."""
        n = len(ranks)
        nodes = Counter(self.machine.places[rank][0] for rank in ranks)
        each = size / n
        latency = self._latency(ranks)
        inside = self._inside_bandwidth(ranks)
        if len(nodes) == 1:
            return [((n - 1) * latency, each * (n - 1) / n / inside)]
        most = max(nodes.values())
        out = each * most * (n - most) / n  # of a node
        numbers = sorted(nodes)
        pairs = [(a, b) for a in numbers for b in numbers if a != b] if len(numbers) <= 64 else []
        crowd = self.network.crowd(pairs) / (len(numbers) - 1) if pairs else 1.0
        seconds = max(each * most / n / inside, out / self._node_bandwidth(ranks, nodes, most) * max(crowd, 1.0))
        return [((n - 1) * latency, seconds)]

    def _by_copy(self, operation: str, n: int, size: float, link: Link) -> Duration:
        """Through shared memory: a gather copies S, a reduce_scatter reads n parts of S/n, an all_reduce does both."""
        copies = {"all_reduce": 2.0, "all_to_all": 1 / n, "send": 0.5, "receive": 1.0, "barrier": 0.0}
        fitted = self.machine.fitted
        moved = copies.get(operation, 1.0) * size
        return Duration(link.latency + fitted.wait_seconds, moved / (link.bandwidth * fitted.link_share), True)

    # --- links

    def _inside(self, ranks: Sequence[int]) -> Link:
        """The slowest link between neighbours of these ranks on one node."""
        links = [
            self.machine.link(a, b)
            for a, b in zip(ranks, (*ranks[1:], ranks[0]), strict=True)
            if self.machine.places[a][0] == self.machine.places[b][0] and a != b
        ]
        return min(links, key=lambda link: link.bandwidth) if links else self.machine.node(ranks[0]).inside

    def _inside_bandwidth(self, ranks: Sequence[int]) -> float:
        link, node = self._inside(ranks), self.machine.node(ranks[0])
        return link.bandwidth * min(1.0, (link.lanes or node.ranks) / node.ranks)

    def _latency(self, ranks: Sequence[int]) -> float:
        """The largest between neighbours in rank order."""
        worst = 0.0
        for a, b in zip(ranks, (*ranks[1:], ranks[0]), strict=True):
            if a != b:
                worst = max(worst, self._between(a, b)[0])
        return worst

    def _between(self, a: int, b: int) -> tuple[float, float]:
        """Latency and bandwidth of messages from rank a to rank b, while its node's other ranks send alike."""
        link = self.machine.link(a, b)
        (here, node), (there, _) = self.machine.places[a], self.machine.places[b]
        lanes = min(1.0, (link.lanes or node.ranks) / node.ranks)
        hops = self.network.hops(here, there) if here != there else 1
        return link.latency * hops, link.bandwidth * lanes

    def _node_bandwidth(self, ranks: Sequence[int], nodes: Counter, streams: int) -> float:
        """What a group with so many ranks sending from each node gets of the links between its nodes."""
        link, node = self.machine.between, self.machine.node(ranks[0])
        groups = max(1, node.ranks // max(nodes.values()))  # like this one, on each node
        lanes = link.lanes or node.ranks
        share = min(float(streams), lanes / groups)
        crowd = self.network.crowd(self.network.ring(sorted(nodes)))
        return link.bandwidth * share / max(crowd, 1.0)
