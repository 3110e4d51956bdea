"""How long a collective takes, by its algorithm and the links between the ranks that take part.

Times are of a group alone, while all groups like it (the same axes, other coordinates) do the same, as SPMD programs
do: they share what their nodes have. With S the bytes of the whole array and n ranks:

    ring           reduce_scatter, all_gather   (n-1) latency + S (n-1)/n / bandwidth;   all_reduce twice that
    tree           all_reduce                   2 log2(n) (latency + S / bandwidth)
    two trees      all_reduce between nodes     2 log2(n) latency + 2 S / bandwidth   (Sanders et al., 2009)
    hierarchical   inside nodes, then between the nodes by as many lanes as ranks a node, then inside again
    all_to_all     n-1 messages of S/n^2 bytes to as many ranks
    by copy        each rank copies what it reads, and adds what it reduces, with its own core

The library is taken to choose the quickest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2

from spmd_engine.planning.dry_run.step_analysis import HashedOnce
from spmd_engine.planning.machine.machine import Link, Machine
from spmd_engine.planning.machine.network import GroupLinks, Network

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
        self._links: dict[HashedOnce, GroupLinks] = {}

    def of(self, operation: str, ranks: Sequence[int], size: float) -> Duration:
        """Of an operation over these ranks; ``size`` is S, the bytes of the whole array (of a send, its bytes)."""
        ranks = ranks if isinstance(ranks, HashedOnce) else HashedOnce(ranks)
        key = operation, ranks, size
        if key not in self._known:
            self._known[key] = self._of(operation, self.links(ranks), size)
        return self._known[key]

    def links(self, ranks: HashedOnce) -> GroupLinks:
        """What connects these ranks."""
        if ranks not in self._links:
            self._links[ranks] = GroupLinks(self.machine, self.network, ranks)
        return self._links[ranks]

    def _of(self, operation: str, links: GroupLinks, size: float) -> Duration:
        fitted, n = self.machine.fitted, links.size
        if n == 1:
            return Duration(0.0, 0.0)
        if len(links.nodes) == 1 and links.inside.by_copy:
            return self._by_copy(operation, n, size, links.inside)
        if operation in ("send", "receive"):
            begin, bandwidth = links.between(*links.ranks[:2])
            return Duration(begin + fitted.wait_seconds, size / (bandwidth * fitted.link_share))
        if operation == "barrier":
            return Duration(fitted.wait_seconds + ceil(log2(n)) * links.latency, 0.0)
        ways = [_all_to_all(links, size)] if operation == "all_to_all" else _ways(operation, links, size)
        best = min(ways, key=lambda way: way[0] + way[1] / fitted.link_share)
        return Duration(best[0] + fitted.wait_seconds, best[1] / fitted.link_share)

    def _by_copy(self, operation: str, n: int, size: float, link: Link) -> Duration:
        """Through shared memory: a gather copies S, a reduce_scatter reads n parts of S/n, an all_reduce does both."""
        copies = {"all_reduce": 2.0, "all_to_all": 1 / n, "send": 0.5, "receive": 1.0, "barrier": 0.0}
        fitted = self.machine.fitted
        moved = copies.get(operation, 1.0) * size
        return Duration(link.latency + fitted.wait_seconds, moved / (link.bandwidth * fitted.link_share), True)


def _ways(operation: str, links: GroupLinks, size: float) -> list[tuple[float, float]]:
    """(latencies, seconds of bytes) of each algorithm that there is."""
    n, rounds, nodes = links.size, ROUNDS[operation], links.nodes
    inside, latency = links.inside_bandwidth, links.latency
    across = inside if len(nodes) == 1 else min(inside, links.between_nodes(1))
    ways = [(rounds * (n - 1) * latency, rounds * size * (n - 1) / n / across)]
    if operation == "all_reduce":
        depth = ceil(log2(n))
        ways.append((2 * depth * latency, 2 * depth * size / across))
        if len(nodes) > 1:
            ways.append((2 * depth * latency, 2 * size / across))
    most = max(nodes.values())
    if len(nodes) > 1 and 1 < most == min(nodes.values()):
        begin = rounds * ((most - 1) * links.inside.latency + (len(nodes) - 1) * latency)
        lanes = links.between_nodes(most)
        move = rounds * size * ((most - 1) / most / inside + (len(nodes) - 1) / len(nodes) / lanes)
        ways.append((begin, move))
        if operation == "all_reduce":
            begin = 2 * ((most - 1) * links.inside.latency + ceil(log2(len(nodes))) * latency)
            ways.append((begin, 2 * size * ((most - 1) / most / inside + 1 / lanes)))
    return ways


def _all_to_all(links: GroupLinks, size: float) -> tuple[float, float]:
    """Every rank has size/n bytes and sends all but its own part of them."""
    n, each = links.size, size / links.size
    begin, inside = (n - 1) * links.latency, links.inside_bandwidth
    if len(links.nodes) == 1:
        return begin, each * (n - 1) / n / inside
    most = max(links.nodes.values())
    out = each * most * (n - most) / n  # of a node
    return begin, max(each * most / n / inside, out / links.between_nodes(most) * links.crowd_of_all)
