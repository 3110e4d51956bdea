"""Times of computations, by their sizes, and of collectives, by algorithm and by the links of the group.

Matrix products take time by their sizes, other work by the bytes that it moves. Ranks that share cores execute
everything one after the other. A device computes while its host launches the next work, so a pass through a layer takes
as long as the slower of the two. Where the host waits for the device, it cannot launch ahead.

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
from itertools import pairwise
from math import ceil, log2

import numpy as np

from spmd_engine.errors import UsageError
from spmd_engine.planning.dry_run.step_analysis import Computation, HashedOnce, Product
from spmd_engine.planning.machine.machine import Link, Machine

#: Rows and columns of the tiles of products on devices, the largest first.
TILES = (256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64)
#: Multiplications of a processor in the time in which it loads one element: an A100 makes 1,024 per clock, and its
#: second-level cache delivers 5,120 bytes to 108 processors ("NVIDIA A100 Tensor Core GPU Architecture", 2020).
FETCH = 1024 / (5120 / 108 / 2)

DTYPES = {2: "bfloat16", 4: "float32", 8: "float64"}  #: by the item size of a product
FUSED = "fused16"  #: the speed of products of 16-bit floats in fused kernels, if a machine has one


@dataclass(frozen=True)
class ComputeTime:
    """Seconds of work of a rank, with one core where cores are shared: in matrix products, and in other work.

    ``host``: seconds in which a device's host launches the pass that the computation belongs to, besides ``launches``,
    those in which it launches the kernels of the computation, and in which it waits.
    """

    products: float
    rest: float
    host: float = 0.0
    launches: float = 0.0

    @property
    def seconds(self) -> float:
        return self.products + self.rest


class ComputeTimes:
    """Seconds of computations on the ranks of a machine.

    A product takes the time of its FLOPs or of its bytes, whichever is longer (the roofline of Williams et al., 2009);
    on a device with ``processors`` its FLOPs take rounds of tiles. Elementwise work takes the time of its bytes. Each
    pass through a layer takes ``pass_seconds`` more, on the rank or on a device's host.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._times: dict[tuple, ComputeTime] = {}
        self._steps: dict[tuple[str, int], tuple[Sequence[Computation], tuple[list[float], list[float]]]] = {}

    def of(self, rank: int, computation: Computation) -> ComputeTime:
        """The time on a rank that has a core, or a device, to itself."""
        node = self.machine.node(rank)
        key = (
            node.name,
            computation.products,
            computation.calls,
            computation.bytes_read + computation.bytes_written,
            computation.launches,
            computation.waits,
        )
        if key not in self._times:
            self._times[key] = self._compute(rank, computation)
        return self._times[key]

    def least(self, rank: int, computation: Computation, parts: int) -> float:
        """The least seconds for one of ``parts`` shards of a computation, for any sharding."""
        node, fitted = self.machine.node(rank), self.machine.fitted

        def bandwidth(size: float) -> float:
            return max(node.memory_bandwidth(size), node.memory_bandwidth(size / parts)) * fitted.memory_share

        seconds = 0.0
        for product in computation.products:
            if product.flops:
                moved = bytes_of(product)
                least = product.flops / self._speed(rank, product) if self._is_of_matrices(rank, product) else 0.0
                seconds += max(least, moved / bandwidth(moved / product.calls))
        moved, calls = _outside_products(computation)
        seconds += moved / bandwidth(max(moved, 1) / calls)
        return seconds / parts + (0.0 if node.has_devices else fitted.pass_seconds)

    def seconds(self, rank: int, computations: Sequence[Computation]) -> tuple[list[float], list[float]]:
        """Seconds of each computation of a step, and of the host that launches it. Ranks with the same step on equal
        nodes share the result. A pass is launched before the last of its computations ends."""
        key = self.machine.node(rank).name, id(computations)
        if key not in self._steps:  # keeps the computations so that their id is not reused
            times = [self.of(rank, work) for work in computations]
            passes = ((work.layer, work.phase, work.micro_batch, work.chunk) for work in computations)
            pairs = zip(times, pairwise((*passes, None)), strict=True)
            hosts = [time.host * (before != after) + time.launches for time, (before, after) in pairs]
            self._steps[key] = computations, ([time.seconds for time in times], hosts)
        return self._steps[key][1]

    def _compute(self, rank: int, computation: Computation) -> ComputeTime:
        node, fitted = self.machine.node(rank), self.machine.fitted
        seconds = {True: 0.0, False: 0.0}  # those of products of matrices, and of products with a vector
        for product in computation.products:
            seconds[self._is_of_matrices(rank, product)] += self._product_seconds(rank, product)
        of_matrices, of_vectors = seconds.values()
        moved, calls = _outside_products(computation)
        rest = moved / (node.memory_bandwidth(max(moved, 1) / calls) * fitted.memory_share) + of_vectors
        if node.has_devices:
            launches = node.launch_seconds * computation.launches + node.sync_seconds * computation.waits
            return ComputeTime(of_matrices, rest, fitted.pass_seconds, launches)
        return ComputeTime(of_matrices, rest + fitted.pass_seconds)

    def _product_seconds(self, rank: int, product: Product) -> float:
        if not product.flops:
            return 0.0
        moved, node = bytes_of(product), self.machine.node(rank)
        seconds = moved / (node.memory_bandwidth(moved / product.calls) * self.machine.fitted.memory_share)
        if not self._is_of_matrices(rank, product):
            return seconds
        idle = rounds_of_tiles(product.m, product.n, product.batch, node.processors) if node.processors else 1.0
        return max(product.flops / self._speed(rank, product) * idle, seconds)

    def _is_of_matrices(self, rank: int, product: Product) -> bool:
        """Whether a product is limited by FLOPs; one with a vector on a host takes the time of its bytes."""
        return self.machine.node(rank).has_devices or 1 not in (product.m, product.n, product.k)

    def _speed(self, rank: int, product: Product) -> float:
        """FLOP/s of a product, or of a fused kernel by its share of the device's speed.

        A device computes a batch at once. A host is as fast as for square matrices with as many FLOPs per element; that
        width is the harmonic mean of m, n and k.
        """
        speeds, dtype = self.machine.node(rank).speeds, DTYPES[product.itemsize]
        flops = 2 * product.m * product.n * product.k * product.batch
        if product.fused:
            kernel = FUSED if FUSED in speeds and product.itemsize == 2 else dtype
            return product.fused * self.machine.peak(rank, kernel, flops)
        if product.kernel in speeds or self.machine.node(rank).has_devices:
            return self.machine.speed(rank, product.kernel if product.kernel in speeds else dtype, flops)
        return self.machine.speed(rank, dtype, 2 * (3 / (1 / product.m + 1 / product.n + 1 / product.k)) ** 3)


def rounds_of_tiles(m: int, n: int, batch: int, processors: int) -> float:
    """The factor by which ``batch`` products of [m k] by [k n] are slower than if all processors always had a full tile
    of the largest size.

    Processors are idle in the last round, and border tiles are not full. Smaller tiles leave less idle but load more
    per multiplication: the best size is taken. 1 for products that do not fill one round: libraries split these along
    k, and ``product_half`` accounts for them.
    """
    (rows, columns), *_ = TILES
    if batch * m * n < processors * rows * columns:
        return 1.0

    def taken(rows: int, columns: int) -> float:
        tiles = batch * ceil(m / rows) * ceil(n / columns)
        return ceil(tiles / processors) * processors * (rows * columns + FETCH * (rows + columns))

    full = batch * m * n * (1 + FETCH * (rows + columns) / (rows * columns))
    return min(taken(*tile) for tile in TILES) / full


def _outside_products(computation: Computation) -> tuple[int, int]:
    """Bytes that a computation moves in other operations than products, and their calls, at least 1."""
    moved = computation.bytes_read + computation.bytes_written - sum(map(bytes_of, computation.products))
    return max(moved, 0), max(computation.calls - sum(product.calls for product in computation.products), 1)


def bytes_of(product: Product) -> int:
    """Bytes read and written by all calls of a product."""
    elements = product.m * product.k + product.k * product.n + product.m * product.n * (not product.fused)
    return product.itemsize * product.batch * product.calls * elements


# --- Collectives: the network


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
        return Counter(self._node_numbers.tolist())

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
