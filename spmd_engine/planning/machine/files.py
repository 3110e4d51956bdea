"""Reads and writes machine files (TOML). An unknown, missing or invalid field is an error of one line."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from math import prod
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
)
from spmd_engine.units import bytes_of

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
    table = _Table(content, where)
    nodes = tuple(_node(node) for node in table.tables("nodes"))
    names = [node.name for node in nodes]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"{where}: two of [[nodes]] have the name {repeated[0]!r}")
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
    """A TOML table whose entries are taken one by one; an entry that is never taken is unknown."""

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
        """Whether an optional field is present."""
        self.taken.add(name)
        return name in self.content

    def text(self, name: str, *default: str, choices: Sequence[str] = ()) -> str:
        value = self.take(name, *default)
        if not isinstance(value, str) or choices and value not in choices:
            expected = f"one of {', '.join(choices)}" if choices else "a string"
            raise UsageError(f"{self.where}: {name} is {value!r}: it must be {expected}")
        return value

    def number(self, name: str, *default: Any, above: float | None = 0.0, least: float | None = None) -> float:
        return _number(self.take(name, *default), f"{self.where}: {name}", above, least)

    def whole(self, name: str, *default: int, least: int = 1) -> int:
        value = self.take(name, *default)
        if type(value) is not int or value < least:
            raise UsageError(f"{self.where}: {name} is {value!r}: it must be an integer, at least {least}")
        return value

    def size(self, name: str) -> float:
        """Bytes: a number, or a string such as 80GiB."""
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
        if not isinstance(values, list) or not all(isinstance(value, Mapping) for value in values):
            raise UsageError(f"{self.where}: {name} must be tables, [[{name}]]")
        if not values and not optional:
            raise UsageError(f"{self.where}: at least one [[{name}]] is required")
        return [_Table(value, f"{self.where}: {name}[{number}]") for number, value in enumerate(values)]

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
        raise UsageError(
            f"{where} is {value:g}: it must be {f'at least {least:g}' if least is not None else 'above 0'}"
        )
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
        raise UsageError(f"{where}: sizes must ascend, and at least one is required")
    return Curve(tuple(points))


def _node(table: _Table) -> NodeKind:
    speeds = table.table("speeds")
    curves = {dtype: speeds.curve(dtype) for dtype in speeds.content}
    if not curves:
        raise UsageError(f"{speeds.where}: at least one is required, as in float32 = 1e12")
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
        raise UsageError(f"{table.where}: shape has {value!r}: its sizes must be integers, at least 1")
    return value


def _edge(pair: Any, table: _Table) -> tuple[int, int]:
    if not isinstance(pair, list) or len(pair) != 2 or any(type(node) is not int or node < 0 for node in pair):
        raise UsageError(f"{table.where}: edges has {pair!r}: an edge must be two node numbers, as in [0, 1]")
    return pair[0], pair[1]


def _fitted(table: _Table) -> Fitted:
    values = {name: table.number(name, least=0.0) for name in FITTED if name in table.content}
    table.taken |= set(FITTED)
    table.finish()
    for name in ("product_share", "memory_share", "link_share"):
        if values.get(name) == 0:
            raise UsageError(f"{table.where}: {name} is 0: it must be above 0")
    return Fitted(**values)


def _check(machine: Machine, where: str) -> None:
    """Raise UsageError for fields that contradict each other."""
    if any(node.count == 0 for node in machine.nodes) and len(machine.nodes) > 1:
        raise UsageError(f"{where}: count 0 (any number of nodes) requires that there is only one [[nodes]]")
    sized = machine.nodes[0].count > 0
    for _, b in machine.pairs:
        if sized and b >= machine.ranks:
            raise UsageError(f"{where}: pairs names rank {b}, but there are {machine.ranks} ranks")
    topology, nodes = machine.topology, machine.node_count
    if topology.kind == "torus" and sized and prod(topology.shape) != nodes:
        raise UsageError(f"{where}: topology: a torus of {prod(topology.shape)} nodes, but there are {nodes}")
    if topology.kind == "graph" and sized:
        reached = {0}
        while more := {n for edge in topology.edges if set(edge) & reached for n in edge} - reached:
            reached |= more
        if beyond := [n for edge in topology.edges for n in edge if n >= nodes]:
            raise UsageError(f"{where}: topology: edges name node {beyond[0]}, but there are {nodes} nodes")
        if len(reached) < nodes:
            apart = min(set(range(nodes)) - reached)
            raise UsageError(f"{where}: topology: node 0 and node {apart} are not connected")


# --- The default machine: the one that ``calibrate`` measured here


def calibrated_file() -> Path:
    """Where ``calibrate`` writes by default: ``SPMD_MACHINE``, or a file in the user's cache."""
    if named := os.environ.get("SPMD_MACHINE"):
        return Path(named)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "spmd_engine" / "machine.toml"


def default_machine(name: str | None = None) -> Machine:
    """The machine of this name or file; None: the calibrated one, else the packaged ``cpu``."""
    if name is not None:
        return read_machine(name)
    return read_machine(calibrated_file() if calibrated_file().is_file() else "cpu")


# --- Writing a machine file


def toml_of(machine: Machine) -> str:
    """The TOML text of a machine, which ``read_machine`` reads."""
    return "\n".join(_lines(machine)) + "\n"


def _lines(machine: Machine) -> Iterator[str]:
    yield f'name = "{machine.name}"'
    yield f'source = "{machine.source}"'
    for number, node in enumerate(machine.nodes):
        yield from _node_lines(node, number if len({n.name for n in machine.nodes}) < len(machine.nodes) else None)
    if machine.node_count != 1:  # 0: any number
        yield from ("", "[between]", *_link_lines(machine.between))
    for (a, b), link in machine.pairs.items():
        yield from ("", "[[pairs]]", f"ranks = [{a}, {b}]", *_link_lines(link))
    topology = machine.topology
    if topology.kind != "flat":
        yield from ("", "[topology]", f'kind = "{topology.kind}"')
        if topology.kind == "fat-tree":
            yield from (f"leaf = {topology.leaf}", f"oversubscription = {topology.oversubscription!r}")
        if topology.kind == "torus":
            yield f"shape = {list(topology.shape)}"
        if topology.kind == "graph":
            yield f"edges = {[list(edge) for edge in topology.edges]}"
    changed = {f.name: getattr(machine.fitted, f.name) for f in fields(Fitted)}
    usual = Fitted()
    if changed := {name: value for name, value in changed.items() if value != getattr(usual, name)}:
        yield from ("", "[fitted]", *(f"{name} = {value:.6g}" for name, value in changed.items()))


def _node_lines(node: NodeKind, number: int | None) -> Iterator[str]:
    name = node.name if number is None else f"{node.name}-{number}"
    yield from ("", "[[nodes]]", f'name = "{name}"', f"count = {node.count}", f"ranks = {node.ranks}")
    yield f"memory = {node.memory:.6g}"
    yield f"memory_bandwidth = {_curve_text(node.memory_bandwidth)}"
    if node.cores is not None:
        yield f"cores = {node.cores!r}"
    if node.processors:
        yield f"processors = {node.processors}"
    yield f'kind = "{node.kind}"'
    yield from ("", "[nodes.speeds]", *(f"{dtype} = {_curve_text(curve)}" for dtype, curve in node.speeds.items()))
    yield from ("", "[nodes.inside]", *_link_lines(node.inside))


def _link_lines(link: Link) -> Iterator[str]:
    yield f"latency = {link.latency:.6g}"
    yield f"bandwidth = {link.bandwidth:.6g}"
    if link.lanes:
        yield f"lanes = {link.lanes}"
    if link.by_copy:
        yield "by_copy = true"


def _curve_text(curve: Curve) -> str:
    if len(curve.points) == 1:
        return f"{curve.points[0][1]:.6g}"
    return "[" + ", ".join(f"[{size:.6g}, {speed:.6g}]" for size, speed in curve.points) + "]"
