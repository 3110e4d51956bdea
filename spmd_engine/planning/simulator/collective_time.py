"""Times of collectives, by algorithm and by the links of the group.

All groups of the same axes communicate at the same time and share the links of their nodes. With S the bytes of the
whole array and n ranks:

    ring           reduce_scatter, all_gather   (n-1) latency + S (n-1)/n / bandwidth;   all_reduce twice that
    tree           all_reduce                   2 log2(n) (latency + S / bandwidth)
    two trees      all_reduce between nodes     2 log2(n) latency + 2 S / bandwidth   (Sanders et al., 2009)
    hierarchical   inside nodes, then between the nodes by as many lanes as ranks a node, then inside again
    all_to_all     n-1 messages of S/n^2 bytes to as many ranks
    by copy        each rank copies what it reads, and adds what it reduces, with its own core

The library is assumed to choose the fastest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2

from spmd_engine.planning.dry_run.step_analysis import HashedOnce
from spmd_engine.planning.machine.machine import Link, Machine
from spmd_engine.planning.machine.network import GroupLinks, Network

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
        self._known: dict[tuple, Duration] = {}
        self._links: dict[HashedOnce, GroupLinks] = {}

    def of(self, operation: str, ranks: Sequence[int], size: float) -> Duration:
        """The duration of an operation over these ranks; ``size`` is S, or the bytes of a message."""
        ranks = ranks if isinstance(ranks, HashedOnce) else HashedOnce(ranks)
        key = operation, ranks, size
        if key not in self._known:
            self._known[key] = self._of(operation, self.links(ranks), size)
        return self._known[key]

    def links(self, ranks: HashedOnce) -> GroupLinks:
        """The links of these ranks."""
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
        times = [_all_to_all(links, size)] if operation == "all_to_all" else _algorithms(operation, links, size)
        begin, move = min(times, key=lambda time: time[0] + time[1] / fitted.link_share)
        return Duration(begin + fitted.wait_seconds, move / fitted.link_share)

    def _by_copy(self, operation: str, n: int, size: float, link: Link) -> Duration:
        """Through shared memory: a gather copies S, a reduce_scatter reads n parts of S/n, an all_reduce does both."""
        copies = {"all_reduce": 2.0, "all_to_all": 1 / n, "send": 0.5, "receive": 1.0, "barrier": 0.0}
        fitted = self.machine.fitted
        moved = copies.get(operation, 1.0) * size
        return Duration(link.latency + fitted.wait_seconds, moved / (link.bandwidth * fitted.link_share), True)


def _algorithms(operation: str, links: GroupLinks, size: float) -> list[tuple[float, float]]:
    """Seconds of (latency, moving bytes) of each algorithm."""
    n, rounds, nodes = links.size, ROUNDS[operation], links.nodes
    inside, latency = links.inside_bandwidth, links.latency
    across = inside if len(nodes) == 1 else min(inside, links.between_nodes(1))
    times = [(rounds * (n - 1) * latency, rounds * size * (n - 1) / n / across)]
    if operation == "all_reduce":
        depth = ceil(log2(n))
        times.append((2 * depth * latency, 2 * depth * size / across))
        if len(nodes) > 1:
            times.append((2 * depth * latency, 2 * size / across))
    most = max(nodes.values())
    if len(nodes) > 1 and 1 < most == min(nodes.values()):
        begin = rounds * ((most - 1) * links.inside.latency + (len(nodes) - 1) * latency)
        lanes = links.between_nodes(most)
        move = rounds * size * ((most - 1) / most / inside + (len(nodes) - 1) / len(nodes) / lanes)
        times.append((begin, move))
        if operation == "all_reduce":
            begin = 2 * ((most - 1) * links.inside.latency + ceil(log2(len(nodes))) * latency)
            times.append((begin, 2 * size * ((most - 1) / most / inside + 1 / lanes)))
    return times


def _all_to_all(links: GroupLinks, size: float) -> tuple[float, float]:
    """Seconds of (latency, moving bytes): each rank has size/n bytes and sends all but its own part."""
    n, own = links.size, size / links.size
    begin, inside = (n - 1) * links.latency, links.inside_bandwidth
    if len(links.nodes) == 1:
        return begin, own * (n - 1) / n / inside
    most = max(links.nodes.values())
    out = own * most * (n - most) / n  # bytes that leave a node
    return begin, max(own * most / n / inside, out / links.between_nodes(most) * links.all_to_all_contention)
