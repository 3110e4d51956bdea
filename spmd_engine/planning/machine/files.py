"""Machine files: TOML, read strictly. What is unknown, missing or impossible is one line that says where."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from pkgutil import get_data
from typing import Any

from spmd_engine.arrays.meta.meter import KERNELS
from spmd_engine.errors import UsageError, one_of
from spmd_engine.foreign import parse_toml, read_text, reading
from spmd_engine.planning.machine.machine import (
    FITTED,
    KINDS,
    TOPOLOGIES,
    Curve,
    Fitted,
    Link,
    Machine,
    NodeKind,
    Topology,
    check_distinct,
)
from spmd_engine.units import bytes_of

PACKAGED = ("a100", "h100", "h200", "edge", "cpu")


def read_machine(name: str | Path) -> Machine:
    """The machine of a TOML file, or one of the ``PACKAGED`` by its name.

    Raises UsageError, in one line, for a file that cannot be read or that describes no possible machine.
    """
    if str(name) in PACKAGED:
        return machine_of((get_data("spmd_engine.planning", f"machines/{name}.toml") or b"").decode(), str(name))
    with reading(f"machine {name}", f"; give a file, or the name of one: {one_of(name, PACKAGED)}"):
        text = read_text(name)
    return machine_of(text, str(name))


def machine_of(text: str, where: str = "machine") -> Machine:
    """The machine that a TOML text describes."""
    with reading(f"{where}: no TOML"):
        content = parse_toml(text)
    table = _Table(content, where)
    nodes = tuple(_node(each) for each in table.tables("nodes"))
    check_distinct([node.name for node in nodes], f"{where}: a node called")
    alone = len(nodes) == 1 and nodes[0].count == 1
    between = _link(table.table("between")) if table.has("between") or not alone else nodes[0].inside
    pairs = {}
    for pair in table.tables("pairs", optional=True):
        a, b = pair.ranks()
        pairs[min(a, b), max(a, b)] = _link(pair)
    topology = _topology(table.table("topology")) if table.has("topology") else Topology()
    fitted = _fitted(table.table("fitted")) if table.has("fitted") else Fitted()
    machine = Machine(table.text("name"), nodes, between, pairs, topology, fitted, table.text("source", ""))
    table.finish()
    _check(machine, where)
    return machine


class _Table:
    """A TOML table whose entries are taken one by one; what nobody took is unknown."""

    def __init__(self, content: Mapping[str, Any], where: str) -> None:
        self.content, self.where, self.taken = content, where, set()

    def take(self, name: str, *default: Any) -> Any:
        self.taken.add(name)
        if name not in self.content:
            if default:
                return default[0]
            raise UsageError(f"{self.where}: the field {name!r} is missing")
        return self.content[name]

    def has(self, name: str) -> bool:
        """Whether something is there that may be left out."""
        self.taken.add(name)
        return name in self.content

    def text(self, name: str, *default: str, choices: Sequence[str] = ()) -> str:
        value = self.take(name, *default)
        if not isinstance(value, str) or choices and value not in choices:
            said = f"one of {', '.join(choices)}" if choices else "a text"
            raise UsageError(f"{self.where}: {name} is {value!r}: it must be {said}")
        return value

    def number(self, name: str, *default: Any, above: float | None = 0.0, least: float | None = None) -> float:
        return _number(self.take(name, *default), f"{self.where}: {name}", above, least)

    def whole(self, name: str, *default: int, least: int = 1) -> int:
        value = self.take(name, *default)
        if type(value) is not int or value < least:
            raise UsageError(f"{self.where}: {name} is {value!r}: it must be a whole number from {least}")
        return value

    def size(self, name: str) -> float:
        """Bytes: a number, or a text such as 80GiB."""
        value = self.take(name)
        if isinstance(value, str):
            return float(bytes_of(value, f"{self.where}: {name}"))
        return _number(value, f"{self.where}: {name}", 0.0, None)

    def curve(self, name: str) -> Curve:
        return _curve(self.take(name), f"{self.where}: {name}")

    def table(self, name: str) -> _Table:
        value = self.take(name)
        if not isinstance(value, Mapping):
            raise UsageError(f"{self.where}: {name} must be a table, [{name}]")
        return _Table(value, f"{self.where}: {name}")

    def tables(self, name: str, optional: bool = False) -> list[_Table]:
        values = self.take(name, *([[]] if optional else []))
        if not isinstance(values, list) or not all(isinstance(each, Mapping) for each in values):
            raise UsageError(f"{self.where}: {name} must be tables, [[{name}]]")
        if not values and not optional:
            raise UsageError(f"{self.where}: there must be one of [[{name}]] at least")
        return [_Table(each, f"{self.where}: {name}[{number}]") for number, each in enumerate(values)]

    def ranks(self) -> tuple[int, int]:
        value = self.take("ranks")
        if not isinstance(value, list) or len(value) != 2 or any(type(r) is not int or r < 0 for r in value):
            raise UsageError(f"{self.where}: ranks is {value!r}: it must be two ranks, as in [0, 5]")
        if value[0] == value[1]:
            raise UsageError(f"{self.where}: ranks is {value!r}: a rank has no link to itself")
        return value[0], value[1]

    def finish(self) -> None:
        if unknown := sorted(set(self.content) - self.taken):
            raise UsageError(f"{self.where}: unknown field {unknown[0]!r}; {one_of(unknown[0], sorted(self.taken))}")


def _number(value: Any, where: str, above: float | None, least: float | None) -> float:
    if type(value) not in (int, float) or value != value or abs(value) == float("inf"):
        raise UsageError(f"{where} is {value!r}: it must be a number")
    if above is not None and least is None and value <= above or least is not None and value < least:
        raise UsageError(f"{where} is {value:g}: it must be {f'from {least:g}' if least is not None else 'above 0'}")
    return float(value)


def _curve(value: Any, where: str) -> Curve:
    if not isinstance(value, list):
        return Curve.flat(_number(value, where, 0.0, None))
    points = []
    for each in value:
        if not isinstance(each, list) or len(each) != 2:
            raise UsageError(f"{where}: {each!r} must be a size and a speed, as in [1e6, 2e9]")
        points.append((_number(each[0], where, 0.0, None), _number(each[1], where, 0.0, None)))
    sizes = [size for size, _ in points]
    if not points or sizes != sorted(set(sizes)):
        raise UsageError(f"{where}: sizes must ascend, and there must be one at least")
    return Curve(tuple(points))


def _node(table: _Table) -> NodeKind:
    speeds = table.table("speeds")
    curves = {dtype: speeds.curve(dtype) for dtype in speeds.content}
    if not curves:
        raise UsageError(f"{speeds.where}: there must be one at least, as in float32 = 1e12")
    known = ("float16", "bfloat16", "float32", "float64", "fused16", *KERNELS)
    for dtype in curves:
        if dtype not in known:
            raise UsageError(f"{speeds.where}: unknown field {dtype!r}; {one_of(dtype, known)}")
    cores = table.number("cores", 0, least=0.0)
    node = NodeKind(
        name=table.text("name"),
        count=table.whole("count", 1, least=0),
        ranks=table.whole("ranks"),
        speeds=curves,
        memory=table.size("memory"),
        memory_bandwidth=table.curve("memory_bandwidth"),
        inside=_link(table.table("inside")),
        cores=cores or None,
        kind=table.text("kind", "cloud", choices=KINDS),
        processors=table.whole("processors", 0, least=0),
    )
    table.finish()
    return node


def _link(table: _Table) -> Link:
    lanes = table.whole("lanes", 0, least=0)
    link = Link(
        table.number("latency", least=0.0), table.number("bandwidth"), lanes or None, bool(table.take("by_copy", False))
    )
    table.finish()
    return link


def _topology(table: _Table) -> Topology:
    kind = table.text("kind", choices=TOPOLOGIES)
    readers: Mapping[str, Callable[[], Topology]] = {
        "flat": lambda: Topology(),
        "ring": lambda: Topology("ring"),
        "fat-tree": lambda: Topology(
            kind, leaf=table.whole("leaf"), oversubscription=table.number("oversubscription", 1.0, least=1.0)
        ),
        "torus": lambda: Topology(kind, shape=tuple(_whole(n, table) for n in table.take("shape"))),
        "graph": lambda: Topology(kind, edges=tuple(_edge(pair, table) for pair in table.take("edges"))),
    }
    topology = readers[kind]()
    table.finish()
    return topology


def _whole(value: Any, table: _Table) -> int:
    if type(value) is not int or value < 1:
        raise UsageError(f"{table.where}: shape has {value!r}: its sizes are whole numbers from 1")
    return value


def _edge(pair: Any, table: _Table) -> tuple[int, int]:
    if not isinstance(pair, list) or len(pair) != 2 or any(type(node) is not int or node < 0 for node in pair):
        raise UsageError(f"{table.where}: edges has {pair!r}: an edge is two numbers of nodes, as in [0, 1]")
    return pair[0], pair[1]


def _fitted(table: _Table) -> Fitted:
    values = {name: table.number(name, least=0.0) for name in FITTED if name in table.content}
    table.taken |= set(FITTED)
    table.finish()
    for name in ("product_share", "memory_share", "link_share"):
        if values.get(name) == 0:
            raise UsageError(f"{table.where}: {name} is 0: then nothing would ever end")
    return Fitted(**values)


def _check(machine: Machine, where: str) -> None:
    """Raise UsageError for what does not fit together."""
    if any(node.count == 0 for node in machine.nodes) and len(machine.nodes) > 1:
        raise UsageError(f"{where}: count 0, any number of nodes, goes with one kind of nodes alone")
    sized = machine.nodes[0].count > 0
    for _, b in machine.pairs:
        if sized and b >= machine.ranks:
            raise UsageError(f"{where}: pairs names rank {b}, but there are {machine.ranks} ranks")
    topology, nodes = machine.topology, machine.node_count
    if topology.kind == "torus" and sized:
        there = 1
        for size in topology.shape:
            there *= size
        if there != nodes:
            raise UsageError(f"{where}: topology: a torus of {there} nodes, but there are {nodes}")
    if topology.kind == "graph" and sized:
        reached = {0}
        while more := {n for edge in topology.edges if set(edge) & reached for n in edge} - reached:
            reached |= more
        if beyond := [n for edge in topology.edges for n in edge if n >= nodes]:
            raise UsageError(f"{where}: topology: edges name node {beyond[0]}, but there are {nodes} nodes")
        if len(reached) < nodes:
            apart = min(set(range(nodes)) - reached)
            raise UsageError(f"{where}: topology: no way leads from node 0 to node {apart}")


# --- The machine that is planned for where none is named: the one that ``calibrate`` measured here


def calibrated_file() -> Path:
    """Where ``calibrate`` writes what it measured, unless told otherwise: ``SPMD_MACHINE``, or in the user's cache."""
    if named := os.environ.get("SPMD_MACHINE"):
        return Path(named)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "spmd_engine" / "machine.toml"


def default_machine(name: str | None = None) -> Machine:
    """The machine of this name or file; None: what was calibrated here, else the packaged ``cpu``."""
    if name is not None:
        return read_machine(name)
    return read_machine(calibrated_file() if calibrated_file().is_file() else "cpu")
