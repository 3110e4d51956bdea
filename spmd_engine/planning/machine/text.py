"""A machine as the TOML that ``read_machine`` reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from spmd_engine.planning.machine.machine import Curve, Fitted, Link, Machine, NodeKind


def text_of(machine: Machine) -> str:
    """The machine file of a machine."""
    return "\n".join(_lines(machine)) + "\n"


def _lines(machine: Machine) -> Iterator[str]:
    yield f'name = "{machine.name}"'
    yield f'source = "{machine.source}"'
    for number, node in enumerate(machine.nodes):
        yield from _node(node, number if len({n.name for n in machine.nodes}) < len(machine.nodes) else None)
    if machine.node_count != 1:  # 0: as many as are asked for
        yield from ("", "[between]", *_link(machine.between))
    for (a, b), link in machine.pairs.items():
        yield from ("", "[[pairs]]", f"ranks = [{a}, {b}]", *_link(link))
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


def _node(node: NodeKind, number: int | None) -> Iterator[str]:
    name = node.name if number is None else f"{node.name}-{number}"
    yield from ("", "[[nodes]]", f'name = "{name}"', f"count = {node.count}", f"ranks = {node.ranks}")
    yield f"memory = {node.memory:.6g}"
    yield f"memory_bandwidth = {_curve(node.memory_bandwidth)}"
    if node.cores is not None:
        yield f"cores = {node.cores!r}"
    if node.processors:
        yield f"processors = {node.processors}"
    yield f'kind = "{node.kind}"'
    yield from ("", "[nodes.speeds]", *(f"{dtype} = {_curve(curve)}" for dtype, curve in node.speeds.items()))
    yield from ("", "[nodes.inside]", *_link(node.inside))


def _link(link: Link) -> Iterator[str]:
    yield f"latency = {link.latency:.6g}"
    yield f"bandwidth = {link.bandwidth:.6g}"
    if link.lanes:
        yield f"lanes = {link.lanes}"
    if link.by_copy:
        yield "by_copy = true"


def _curve(curve: Curve) -> str:
    if len(curve.points) == 1:
        return f"{curve.points[0][1]:.6g}"
    return "[" + ", ".join(f"[{size:.6g}, {speed:.6g}]" for size, speed in curve.points) + "]"
