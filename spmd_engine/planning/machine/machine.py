"""Machines as data: nodes, their ranks with their speeds, and the links between them.

All predicted times follow from a ``Machine`` and the records of a step. Numbers that can be looked up or measured one
by one belong to nodes and links. The at most six numbers that are fitted to whole steps are in ``Fitted``; their
defaults have no effect.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, replace
from functools import cached_property
from math import exp, log

import numpy as np

from spmd_engine.arrays.precision import HALVES
from spmd_engine.configuration import Configuration, not_in_json, setting
from spmd_engine.errors import UsageError
from spmd_engine.units import BYTES

KINDS = ("cloud", "edge", "browser")
TOPOLOGIES = ("flat", "fat-tree", "ring", "torus", "graph")


@dataclass(frozen=True)
class Curve:
    """A speed as a function of size: linear in logarithms between the given points, constant beyond.

    >>> Curve(((1e6, 1e9), (1e8, 3e9)))(1e9)
    3000000000.0
    """

    points: tuple[tuple[float, float], ...]  #: (size, speed), sizes ascending

    @classmethod
    def flat(cls, speed: float) -> Curve:
        """A constant speed."""
        return cls(((1.0, speed),))

    @property
    def most(self) -> float:
        """The largest speed."""
        return max(speed for _, speed in self.points)

    def __call__(self, size: float) -> float:
        index = bisect_left(self.points, (size,))
        if index == 0 or index == len(self.points):
            return self.points[min(index, len(self.points) - 1)][1]
        (left, slow), (right, fast) = self.points[index - 1], self.points[index]
        share = log(size / left) / log(right / left)
        return exp(log(slow) * (1 - share) + log(fast) * share)


@dataclass(frozen=True)
class Link(Configuration):
    """A link, on which a message takes ``latency`` + bytes / ``bandwidth`` seconds.

    ``lanes`` is the number of ranks of a node that send at full bandwidth at once; more ranks share it. 0 or None: any
    number. ``by_copy``: ranks move the bytes themselves, through memory, which occupies their cores.
    """

    latency: float = setting(MISSING, least=0)  #: seconds
    bandwidth: float = setting(MISSING, least=1)  #: bytes a second, in one direction
    lanes: int | None = setting(None, least=0)
    by_copy: bool = False


@dataclass(frozen=True)
class NodeKind(Configuration):
    """Nodes of one kind. Speeds are those of one rank that has a core, or a device, to itself."""

    name: str
    count: int = setting(MISSING, least=0)  #: number of such nodes
    ranks: int = setting(MISSING, least=1)  #: ranks per node
    #: dtype -> FLOP/s by the FLOPs of a product of square matrices; one of a host's KERNELS -> by the FLOPs of a call
    speeds: Mapping[str, Curve] = setting(MISSING)
    #: bytes per rank; where ranks share cores, bytes of the node
    memory: float = setting(MISSING, unit=BYTES, least=1)
    memory_bandwidth: Curve = setting(MISSING)  #: bytes/s (read plus written) by the bytes of an operation
    inside: Link = setting(MISSING)  #: the link between ranks of a node
    #: cores that the ranks of a node share; None: each rank has its own device
    cores: float | None = setting(None, least=0)
    kind: str = setting("cloud", choices=KINDS)
    #: processors of a device; each computes one tile of a product at a time; 0: any number
    processors: int = setting(0, least=0)
    #: seconds in which the host launches a kernel, and in which it waits for an idle device; 0: no device, or unknown
    launch_seconds: float = setting(0.0, least=0)
    sync_seconds: float = setting(0.0, least=0)
    disk_read: float = setting(5e8, least=1)  #: bytes a second that the node reads from the disk of offloaded arrays
    disk_write: float = setting(2.5e8, least=1)  #: bytes a second that the node writes to it
    #: bytes a second that a core moves between the disk and memory: the work of reading and writing, copies included
    disk_copy: float = setting(8e9, least=1)

    def disk_seconds(self, loaded: float, stored: float) -> float:
        """Seconds in which the node's disk reads and writes these bytes."""
        return loaded / self.disk_read + stored / self.disk_write

    def copy_seconds(self, ranks: int, size: float) -> float:
        """Seconds by which a rank computes longer while threads of its own move these bytes, on a node where as many
        ranks compute: 0 if cores are left for the threads."""
        return size / self.disk_copy if self.cores is not None and ranks >= self.cores else 0.0

    @property
    def memory_of_rank(self) -> float:
        """Bytes of memory of one rank."""
        return self.memory / self.ranks if self.cores is not None else self.memory

    @property
    def contention(self) -> float:
        """The factor by which a rank is slower while all ranks of the node compute on its cores."""
        return max(1.0, self.ranks / self.cores) if self.cores is not None else 1.0

    @property
    def has_devices(self) -> bool:
        """Whether each rank has its own device, on which a host launches work."""
        return self.cores is None


@dataclass(frozen=True)
class NodeCapabilities:
    """What all ranks of a node have together."""

    node: int  #: its number
    name: str  #: name of its kind
    kind: str  #: one of KINDS
    ranks: int
    compute: float  #: FLOP/s in the largest products, while all ranks compute
    memory: float  #: bytes
    bandwidth: float  #: bytes a second to other nodes, in one direction


@dataclass(frozen=True)
class Topology(Configuration):
    """How nodes are connected: ``flat`` (one switch), ``fat-tree`` (leaves of ``leaf`` nodes, whose uplinks have
    1/``oversubscription`` of their bandwidth), ``ring``, ``torus`` (of the ``shape``) or ``graph`` (these ``edges``).
    """

    kind: str = setting("flat", choices=TOPOLOGIES)
    leaf: int = setting(0, least=0)
    oversubscription: float = setting(1.0, least=1)
    shape: tuple[int, ...] = ()
    edges: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Fitted(Configuration):
    """The numbers that are fitted to measured steps. The defaults have no effect."""

    product_share: float = setting(1.0, least=1e-9)  #: share of the speed of products that is reached within a step
    product_half: float = setting(0.0, least=0)  #: FLOPs of a product at which half of that share is reached
    memory_share: float = setting(1.0, least=1e-9)  #: share of the memory's bandwidth that is reached
    #: seconds added for each pass of a micro-batch through a layer; on a device's host, while the device works
    pass_seconds: float = setting(0.0, least=0)
    link_share: float = setting(1.0, least=1e-9)  #: share of the links' bandwidth that is reached
    wait_seconds: float = setting(0.0, least=0)  #: seconds added to the latency of each collective


@dataclass(frozen=True)
class Machine(Configuration):
    """Nodes and the links between them. Ranks are numbered node by node, in the order of ``nodes``."""

    name: str
    nodes: tuple[NodeKind, ...]
    between: Link  #: the link between nodes
    #: links of single pairs of ranks, in both directions
    pairs: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    topology: Topology = Topology()
    fitted: Fitted = Fitted()
    source: str = ""  #: the source of the numbers
    order: tuple[int, ...] = not_in_json(())  #: the ranks, if they are numbered in another order than node by node

    @cached_property
    def places(self) -> tuple[tuple[int, NodeKind], ...]:
        """For each rank: the number of its node, and that node."""
        nodes = enumerate(node for node in self.nodes for _ in range(node.count))
        node_by_node = [(number, node) for number, node in nodes for _ in range(node.ranks)]
        return tuple(node_by_node[rank] for rank in self.order or range(len(node_by_node)))

    @cached_property
    def node_numbers(self) -> np.ndarray:
        """For each rank, the number of its node: int[ranks]."""
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
            raise UsageError(f"machine {self.name} has {self.ranks} ranks: there is no rank {rank}")
        return self.places[rank][1]

    def memory_of(self, rank: int) -> float:
        """Bytes of memory of a rank."""
        return self.node(rank).memory_of_rank

    def capabilities(self, dtype: str = "float32") -> list[NodeCapabilities]:
        """What each node has; raises UsageError for a dtype without a speed."""
        listed = []
        for number, node in self.places:
            if number == len(listed):
                compute = node.ranks / node.contention * self.curve(node, dtype).most
                lanes = min(self.between.lanes or node.ranks, node.ranks)
                memory = node.ranks * node.memory_of_rank
                bandwidth = lanes * self.between.bandwidth
                listed.append(NodeCapabilities(number, node.name, node.kind, node.ranks, compute, memory, bandwidth))
        return listed

    @property
    def device(self) -> str:
        """The device whose code dry runs record: "cuda" if its launches have a cost. Fitted passes include theirs."""
        launches = all(node.has_devices and node.launch_seconds for node in self.nodes)
        return "cuda" if launches and not self.fitted.pass_seconds else "cpu"

    @cached_property
    def heterogeneous(self) -> bool:
        """Whether ranks on different nodes differ in speed or memory."""
        nodes = {node.name: node for node in self.nodes}.values()  # one may be partly filled
        kinds = {(str(node.speeds), node.memory_bandwidth, node.memory_of_rank, node.contention) for node in nodes}
        return len(kinds) > 1

    def with_ranks(self, ranks: int) -> Machine:
        """This machine with the nodes that ``ranks`` need; the last may be partly filled.

        A machine of one kind of nodes with ``count`` 0 has any number of nodes. Raises UsageError if the machine has
        fewer ranks, or other ones in an order of its own.
        """
        if self.order:
            if ranks != self.ranks:
                raise UsageError(f"machine {self.name} is in an order of {self.ranks} ranks, not of {ranks}")
            return self
        unlimited = len(self.nodes) == 1 and self.nodes[0].count == 0
        if ranks > self.ranks and not unlimited:
            raise UsageError(f"machine {self.name} has {self.ranks} ranks, fewer than {ranks}: use fewer ranks")
        kinds, left = [], ranks
        for node in self.nodes:
            full, rest = divmod(left if unlimited else min(left, node.count * node.ranks), node.ranks)
            kinds += [replace(node, count=full)] if full else []
            kinds += [replace(node, count=1, ranks=rest)] if rest else []
            left -= full * node.ranks + rest
        return replace(self, nodes=tuple(kinds))

    def placed(self, order: Sequence[int] | None) -> Machine:
        """This machine with its ranks in another order: rank r of the result is rank ``order[r]`` of this one."""
        if order is None:
            return self
        positions = {rank: position for position, rank in enumerate(order)}
        pairs = {(positions[a], positions[b]): link for (a, b), link in self.pairs.items()}
        pairs = {(min(pair), max(pair)): link for pair, link in pairs.items()}
        return replace(self, pairs=pairs, order=tuple(order))

    def with_fitted(self, **values: float) -> Machine:
        """This machine with other fitted numbers."""
        return replace(self, fitted=replace(self.fitted, **values))

    def link(self, a: int, b: int) -> Link:
        """The link between two ranks."""
        if other := self.pairs.get((min(a, b), max(a, b))):
            return other
        (node_of_a, node), (node_of_b, _) = self.places[a], self.places[b]
        return node.inside if node_of_a == node_of_b else self.between

    def peak(self, rank: int, dtype: str, flops: float) -> float:
        """A rank's FLOP/s in a matrix product of ``flops`` FLOPs, by the machine file."""
        return self.curve(self.node(rank), dtype)(flops)

    def curve(self, node: NodeKind, dtype: str) -> Curve:
        """FLOP/s of a node's products by their FLOPs; raises UsageError for a dtype without a speed.

        16-bit floats are as fast as those of the other kind; a host without either multiplies float32 copies.
        """
        if dtype in HALVES:
            others = (*HALVES, *(() if node.has_devices else ("float32",)))
            dtype = next((name for name in (dtype, *others) if name in node.speeds), dtype)
        if dtype not in node.speeds:
            raise UsageError(f"machine {self.name} has no speed for {dtype}; it has: {', '.join(node.speeds)}")
        return node.speeds[dtype]

    def speed(self, rank: int, dtype: str, flops: float) -> float:
        """A rank's FLOP/s in a matrix product of ``flops`` FLOPs within a step."""
        fitted = self.fitted
        reached = fitted.product_share * (flops / (flops + fitted.product_half) if fitted.product_half else 1.0)
        return self.peak(rank, dtype, flops) * reached
