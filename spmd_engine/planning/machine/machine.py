"""Machines: nodes, their ranks, how fast these compute and move memory, and the links between them, as data.

Every time that is predicted follows from a ``Machine`` and from what a step does. Of its numbers, those that can be
looked up or measured one by one stand with the nodes and links; those that were fitted to whole steps are in
``Fitted``, at most six, and all of them have a neutral value.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from math import exp, log

import numpy as np

from spmd_engine.errors import UsageError

KINDS = ("cloud", "edge", "browser")
TOPOLOGIES = ("flat", "fat-tree", "ring", "torus", "graph")


@dataclass(frozen=True)
class Curve:
    """A speed that depends on the size of what is done: straight between the given points in logarithms, flat beyond.

    >>> Curve(((1e6, 1e9), (1e8, 3e9)))(1e9)
    3000000000.0
    """

    points: tuple[tuple[float, float], ...]  #: (size, speed), sizes ascending

    @classmethod
    def flat(cls, speed: float) -> Curve:
        """The same speed at every size."""
        return cls(((1.0, speed),))

    @property
    def most(self) -> float:
        """The largest speed."""
        return max(speed for _, speed in self.points)

    def __call__(self, size: float) -> float:
        at = bisect_left(self.points, (size,))
        if at == 0 or at == len(self.points):
            return self.points[min(at, len(self.points) - 1)][1]
        (left, slow), (right, fast) = self.points[at - 1], self.points[at]
        share = log(size / left) / log(right / left)
        return exp(log(slow) * (1 - share) + log(fast) * share)


@dataclass(frozen=True)
class Link:
    """What a message takes: ``latency`` + bytes / ``bandwidth`` seconds.

    ``lanes`` is how many ranks of a node send at full bandwidth at once; more share it. None: any number.
    ``by_copy`` says that ranks move the bytes themselves, through memory, and so need a core for it.
    """

    latency: float  #: seconds
    bandwidth: float  #: bytes a second, in one direction
    lanes: int | None = None
    by_copy: bool = False


@dataclass(frozen=True)
class NodeKind:
    """Nodes of one kind. Speeds are those of one rank that has the cores, or the device, it asks for."""

    name: str
    count: int  #: of such nodes
    ranks: int  #: on each
    #: dtype -> FLOP/s by the FLOPs of a product of square matrices; of a host's KERNELS, by the FLOPs of a call
    speeds: Mapping[str, Curve]
    memory: float  #: bytes a rank may have; where ranks share cores, all of a node's together
    memory_bandwidth: Curve  #: bytes/s read and written, by the bytes of an operation
    inside: Link  #: between ranks of a node
    cores: float | None = None  #: that the ranks of a node share, one each at full speed; None: each has its own
    kind: str = "cloud"  #: one of KINDS
    processors: int = 0  #: of a device, of which each makes one tile of a product at a time; 0: any number

    @property
    def has_devices(self) -> bool:
        """Whether each rank has a device of its own, and its host's cores only hand over the work."""
        return self.cores is None


@dataclass(frozen=True)
class Topology:
    """How nodes are connected: ``flat`` (one switch), ``fat-tree`` (leaves of ``leaf`` nodes, whose way up has
    1/``oversubscription`` of their bandwidth), ``ring``, ``torus`` (of the ``shape``) or ``graph`` (these ``edges``).
    """

    kind: str = "flat"
    leaf: int = 0
    oversubscription: float = 1.0
    shape: tuple[int, ...] = ()
    edges: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Fitted:
    """Numbers fitted to measured steps, of which a machine has at most these six. The defaults change nothing."""

    product_share: float = 1.0  #: of the speed of products that is reached within a step
    product_half: float = 0.0  #: FLOPs of a product at which half of that is reached
    memory_share: float = 1.0  #: of the memory's bandwidth that is reached
    #: for every pass of a micro-batch through a layer, beside its work; of a device's host, while the device works
    pass_seconds: float = 0.0
    link_share: float = 1.0  #: of the links' bandwidth that is reached
    wait_seconds: float = 0.0  #: for every collective, beside its latency


@dataclass(frozen=True)
class Machine:
    """Nodes and what connects them. Ranks are numbered node by node, in the order of ``nodes``."""

    name: str
    nodes: tuple[NodeKind, ...]
    between: Link  #: between nodes
    pairs: Mapping[tuple[int, int], Link] = field(default_factory=dict)  #: of ranks whose link is another, both ways
    topology: Topology = Topology()
    fitted: Fitted = Fitted()
    source: str = ""  #: where its numbers are from

    @cached_property
    def places(self) -> tuple[tuple[int, NodeKind], ...]:
        """For every rank: the number of its node, and that node."""
        return tuple(self._places())

    def _places(self) -> Iterator[tuple[int, NodeKind]]:
        number = 0
        for node in self.nodes:
            for _ in range(node.count):
                yield from [(number, node)] * node.ranks
                number += 1

    @cached_property
    def node_numbers(self) -> np.ndarray:
        """For every rank: the number of its node."""
        return np.array([number for number, _ in self.places])

    @cached_property
    def ranks(self) -> int:
        return sum(node.count * node.ranks for node in self.nodes)

    @property
    def node_count(self) -> int:
        return sum(node.count for node in self.nodes)

    def node(self, rank: int) -> NodeKind:
        """The node of a rank; raises UsageError if there is no such rank."""
        if not 0 <= rank < self.ranks:
            raise UsageError(f"machine {self.name}: it has {self.ranks} ranks, and so no rank {rank}")
        return self.places[rank][1]

    def memory_of(self, rank: int) -> float:
        """Bytes that a rank may have."""
        node = self.node(rank)
        return node.memory / node.ranks if node.cores is not None else node.memory

    def crowd(self, rank: int) -> float:
        """By how much a rank is slowed while all ranks of its node compute, and share its cores."""
        node = self.node(rank)
        return max(1.0, node.ranks / node.cores) if node.cores is not None else 1.0

    @cached_property
    def unlike(self) -> bool:
        """Whether nodes of several kinds differ in how fast a rank is, or in what it may hold."""
        numbers = {node.name: number for number, node in enumerate(self.nodes)}
        firsts = [sum(node.count * node.ranks for node in self.nodes[:number]) for number in numbers.values()]
        kinds = ((self.node(rank), self.memory_of(rank), self.crowd(rank)) for rank in firsts)
        return len({(str(node.speeds), node.memory_bandwidth, room, crowd) for node, room, crowd in kinds}) > 1

    def with_ranks(self, ranks: int) -> Machine:
        """This machine with as many nodes, the last one perhaps not full, as ``ranks`` need.

        Of a machine whose nodes are all of one kind, any number is to be had if its file says ``count`` is 0;
        raises UsageError for more ranks than there are.
        """
        if len(self.nodes) == 1 and self.nodes[0].count == 0:
            node = self.nodes[0]
            full, rest = divmod(ranks, node.ranks)
            kinds = [replace(node, count=full)] if full else []
            kinds += [replace(node, count=1, ranks=rest)] if rest else []
            return replace(self, nodes=tuple(kinds))
        if ranks > self.ranks:
            raise UsageError(f"machine {self.name} has {self.ranks} ranks, fewer than {ranks}: ask for fewer")
        kinds, left = [], ranks
        for node in self.nodes:
            full, rest = divmod(min(left, node.count * node.ranks), node.ranks)
            kinds += [replace(node, count=full)] if full else []
            kinds += [replace(node, count=1, ranks=rest)] if rest else []
            left -= full * node.ranks + rest
        return replace(self, nodes=tuple(kinds))

    def with_fitted(self, **values: float) -> Machine:
        """The same with other fitted numbers."""
        return replace(self, fitted=replace(self.fitted, **values))

    def link(self, a: int, b: int) -> Link:
        """Between two ranks."""
        if other := self.pairs.get((min(a, b), max(a, b))):
            return other
        (here, node), (there, _) = self.places[a], self.places[b]
        return node.inside if here == there else self.between

    def peak(self, rank: int, dtype: str, flops: float) -> float:
        """FLOP/s that are said of a rank in a matrix product of so many FLOPs."""
        speeds = self.node(rank).speeds
        if dtype not in speeds:
            raise UsageError(f"machine {self.name} says no speed for {dtype}; it has: {', '.join(speeds)}")
        return speeds[dtype](flops)

    def speed(self, rank: int, dtype: str, flops: float) -> float:
        """FLOP/s of a rank in a matrix product of so many FLOPs, within a step."""
        fitted = self.fitted
        reached = fitted.product_share * (flops / (flops + fitted.product_half) if fitted.product_half else 1.0)
        return self.peak(rank, dtype, flops) * reached


def check_distinct(names: Sequence[str], what: str) -> None:
    """Raise UsageError if two of them are the same."""
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"{what} {name!r} comes twice")


FITTED = tuple(each.name for each in fields(Fitted))
