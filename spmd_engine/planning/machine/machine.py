"""Machines as data: nodes, their ranks with their speeds, and the links between them; and their files.

All predicted times follow from a ``Machine`` and the records of a step. Numbers that can be looked up or measured one
by one belong to nodes and links. The at most six numbers that are fitted to whole steps are in ``Fitted``; their
defaults have no effect.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cached_property
from math import exp, isfinite, log, prod
from pathlib import Path
from pkgutil import get_data
from typing import Any

import numpy as np

from spmd_engine.arrays.meta.meter import KERNELS
from spmd_engine.arrays.precision import HALVES
from spmd_engine.configuration import Configuration, setting
from spmd_engine.errors import UsageError, one_of
from spmd_engine.foreign import parse_toml, read_text, reading
from spmd_engine.units import BYTES

KINDS = ("cloud", "edge", "browser")
TOPOLOGIES = ("flat", "fat-tree", "ring", "torus", "graph")
LARGEST = 1 << 20  #: most ranks of a machine with any number of nodes


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
    #: the ranks, if they are numbered in another order than node by node
    order: tuple[int, ...] = field(default=(), metadata={"in_json": False})

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
        if ranks > (most := LARGEST if unlimited else self.ranks):
            raise UsageError(f"machine {self.name} has {most} ranks, fewer than {ranks}: use fewer ranks")
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


# --- Machine files (TOML). An unknown, missing or invalid field is an error of one line


PACKAGED = ("a100", "h100", "h200", "edge", "cpu")


def read_machine(name: str | Path) -> Machine:
    """The machine of a TOML file, or one of the ``PACKAGED`` by name.

    Raises UsageError for a file that cannot be read or that is invalid.
    """
    if str(name) in PACKAGED:
        return parse_machine((get_data("spmd_engine.planning", f"machines/{name}.toml") or b"").decode(), str(name))
    with reading(f"machine {name}", f"; give a file, or the name of a packaged machine: {one_of(name, PACKAGED)}"):
        text = read_text(name)
    return parse_machine(text, str(name))


def parse_machine(text: str, where: str = "machine") -> Machine:
    """The machine that a TOML text describes; ``where`` names the text in errors."""
    with reading(f"{where}: invalid TOML"):
        content = parse_toml(text)
    match content:  # the link between nodes may be missing if there is one node
        case {"nodes": [{**node}]} if node.get("count", 1) == 1:
            content = {"between": node.get("inside", _UNUSED), **content}
    readers = {"nodes": _list(_node_kind), "pairs": _links_of_pairs, "topology": _topology}
    machine = Machine.from_json(_with(content, where, **readers), where)
    _check(machine, where)
    return machine


def _with(table: Any, where: str, **readers: Callable[[Any, str], Any]) -> Any:
    """The table; values of these names are replaced by what the readers make of them."""
    if not isinstance(table, Mapping):
        raise UsageError(f"{where} is {table!r}: it must be a table")
    read = {name: reader(table[name], f"{where}: {name}") for name, reader in readers.items() if name in table}
    return {**table, **read}


def _list(read: Callable[[Any, str], Any]) -> Callable[[Any, str], tuple]:
    """Reads a list of values, each by ``read``."""

    def read_all(values: Any, where: str) -> tuple:
        if not isinstance(values, list) or not values:
            raise UsageError(f"{where} is {values!r}: it must be a list with at least one entry")
        return tuple(read(value, f"{where}[{number}]") for number, value in enumerate(values))

    return read_all


_UNUSED = {"latency": 0.0, "bandwidth": 1e12}  #: a link that is not written: that between the ranks of one rank's node


def _positive(value: Any, where: str) -> float:
    if type(value) not in (int, float) or not isfinite(value):
        raise UsageError(f"{where} is {value!r}: it must be a number")
    if value <= 0:
        raise UsageError(f"{where} is {value:g}: it must be above 0")
    return float(value)


def _number_of(value: Any, where: str) -> int:
    """The number of a rank or a node."""
    if type(value) is not int or value < 0:
        raise UsageError(f"{where} is {value!r}: it must be a whole number from 0")
    return value


def _pair(value: Any, where: str) -> tuple[int, int]:
    """The numbers of two ranks or nodes."""
    if not isinstance(value, list) or len(value) != 2:
        raise UsageError(f"{where} is {value!r}: it must be two numbers from 0, as in [0, 5]")
    return _number_of(value[0], where), _number_of(value[1], where)


def _curve(value: Any, where: str) -> Curve:
    """A speed, or a list of [size, speed]."""
    if not isinstance(value, list):
        return Curve.flat(_positive(value, where))
    points = tuple(_list(_positive)(point, where) for point in value)
    sizes = [point[0] for point in points]
    if not points or sizes != sorted(set(sizes)) or any(len(point) != 2 for point in points):
        raise UsageError(f"{where}: it must be sizes and speeds, as in [[1e6, 2e9]], with ascending sizes")
    return Curve(points)


def _speeds(table: Any, where: str) -> dict[str, Curve]:
    names = ("float16", "bfloat16", "float32", "float64", "fused16", *KERNELS)
    if not isinstance(table, Mapping) or not table:
        raise UsageError(f"{where}: at least one speed is required, as in float32 = 1e12")
    for dtype in table:
        if dtype not in names:
            raise UsageError(f"{where}: unknown field {dtype!r}; {one_of(dtype, names)}")
    return {dtype: _curve(speed, f"{where}: {dtype}") for dtype, speed in table.items()}


def _node_kind(table: Any, where: str) -> NodeKind:
    content = _with(table, where, speeds=_speeds, memory_bandwidth=_curve)
    alone = {"inside": _UNUSED} if content.get("ranks") == 1 else {}
    return NodeKind.from_json({"count": 1, **alone, **content, "cores": content.get("cores") or None}, where)


def _links_of_pairs(tables: Any, where: str) -> dict[tuple[int, int], Link]:
    """The links of [[pairs]], by their ranks."""

    def read(table: Any, where: str) -> tuple[tuple[int, int], Link]:
        link = dict(table) if isinstance(table, Mapping) else {}
        a, b = _pair(link.pop("ranks", None), f"{where}: ranks")
        if a == b:
            raise UsageError(f"{where}: ranks is [{a}, {b}]: a rank has no link to itself")
        return (min(a, b), max(a, b)), Link.from_json(link, where)

    return dict(_list(read)(tables, where))


def _topology(table: Any, where: str) -> Mapping[str, Any]:
    return _with(table, where, shape=_list(_number_of), edges=_list(_pair))


def _check(machine: Machine, where: str) -> None:
    """Raise UsageError for fields that contradict each other."""
    names = [node.name for node in machine.nodes]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"{where}: two of [[nodes]] have the name {repeated[0]!r}")
    counts = [node.count for node in machine.nodes]
    if 0 in counts and len(counts) > 1:
        raise UsageError(f"{where}: count 0 (any number of nodes) requires that there is only one [[nodes]]")
    sized = counts[0] > 0
    for _, b in machine.pairs:
        if sized and b >= machine.ranks:
            raise UsageError(f"{where}: pairs names rank {b}, but there are {machine.ranks} ranks")
    topology, nodes = machine.topology, machine.node_count
    needed = {"fat-tree": "leaf", "torus": "shape", "graph": "edges"}.get(topology.kind)
    if needed and not getattr(topology, needed):
        raise UsageError(f"{where}: topology: the field {needed!r} is missing")
    if topology.kind == "torus" and sized and prod(topology.shape) != nodes:
        raise UsageError(f"{where}: topology: a torus of {prod(topology.shape)} nodes, but there are {nodes}")
    if topology.kind == "graph" and sized:
        reached = {0}
        while more := {n for edge in topology.edges if set(edge) & reached for n in edge} - reached:
            reached |= more
        if beyond := [n for edge in topology.edges for n in edge if n >= nodes]:
            raise UsageError(f"{where}: topology: edges name node {beyond[0]}, but there are {nodes} nodes")
        if len(reached) < nodes:
            unreached = min(set(range(nodes)) - reached)
            raise UsageError(f"{where}: topology: node 0 and node {unreached} are not connected")


def calibrated_file() -> Path | None:
    """Where ``calibrate`` writes by default: ``SPMD_MACHINE``, or a file in the user's cache; None for a user without a
    home, as in some containers."""
    if named := os.environ.get("SPMD_MACHINE"):
        return Path(named)
    with suppress(RuntimeError):
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(cache) / "spmd_engine" / "machine.toml"
    return None


def default_machine(name: str | Path | None = None) -> Machine:
    """The machine of this name or file; None: the calibrated one, else the packaged ``cpu``."""
    if name is not None:
        return read_machine(name)
    file = calibrated_file()
    if file and file.is_file():
        return read_machine(file)
    if os.environ.get("SPMD_MACHINE"):
        raise UsageError(f"SPMD_MACHINE is {file}, where no file is: run 'calibrate', which writes it, or unset it")
    return read_machine("cpu")


def toml_of(machine: Machine) -> str:
    """The TOML text of a machine, which ``read_machine`` reads."""
    lines = [f"name = {_toml(machine.name)}", f"source = {_toml(machine.source)}"]
    repeated = len({node.name for node in machine.nodes}) < len(machine.nodes)
    for number, node in enumerate(machine.nodes):
        named = replace(node, name=f"{node.name}-{number}") if repeated else node
        speeds = [f"{dtype} = {_toml(curve)}" for dtype, curve in node.speeds.items()]
        lines += ["", "[[nodes]]", *_entries(named), "", "[nodes.speeds]", *speeds]
        lines += ["", "[nodes.inside]", *_entries(node.inside)]
    if machine.node_count != 1:  # 0: any number
        lines += ["", "[between]", *_entries(machine.between)]
    for pair, link in machine.pairs.items():
        lines += ["", "[[pairs]]", f"ranks = {_toml(pair)}", *_entries(link)]
    for name, record in (("topology", machine.topology), ("fitted", machine.fitted)):
        if entries := _entries(record):
            lines += ["", f"[{name}]", *entries]
    return "\n".join(lines) + "\n"


def _entries(record: Any) -> list[str]:
    """The fields of a record as lines, without those that have their default, and without tables."""
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    defaults = {field.name: field.default for field in fields(record)}
    tables = (Link, Mapping)
    return [
        f"{name} = {_toml(value)}"
        for name, value in values.items()
        if value != defaults[name] and not isinstance(value, tables)
    ]


def _toml(value: Any) -> str:
    match value:
        case str():
            return json.dumps(value, ensure_ascii=False)
        case bool():
            return str(value).lower()
        case float():
            return f"{value:.6g}"
        case Curve(points=((_, speed),)):
            return f"{speed:.6g}"
        case Curve():
            return _toml(value.points)
        case tuple():
            return f"[{', '.join(map(_toml, value))}]"
    return str(value)
