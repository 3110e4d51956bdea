"""Reads and writes machine files (TOML). An unknown, missing or invalid field is an error of one line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from math import isfinite, prod
from pathlib import Path
from pkgutil import get_data
from typing import Any

from spmd_engine.arrays.meta.meter import KERNELS
from spmd_engine.errors import UsageError, one_of
from spmd_engine.foreign import parse_toml, read_text, reading
from spmd_engine.planning.machine.machine import Curve, Link, Machine, NodeKind

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
