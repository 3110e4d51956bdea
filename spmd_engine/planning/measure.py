"""Measures what a machine file says of this machine: products, memory, and the links between ranks, pair by pair."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

import numpy as np
from threadpoolctl import threadpool_limits

from spmd_engine.comm.mesh import Mesh
from spmd_engine.node.cores import cores_here
from spmd_engine.planning.machine import Curve, Link, Machine, NodeKind

PRODUCTS = (8, 16, 32, 64, 128, 256, 512, 1024)  #: widths of square matrices
ARRAYS = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 23)  #: elements
SMALL, LARGE = 8, 1 << 20  #: bytes of messages that tell latency and bandwidth
REPEATS = 5
OVERSUBSCRIBED = 8  #: ranks a core that a machine file lets one plan
UNLIKE = 1.5  #: how many times slower or faster a pair's link is than the others' to be listed by itself


def measure_machine(mesh: Mesh, seconds: float = 20.0) -> Machine | None:
    """The machine that these ranks are on; None on all ranks but the first. Collective.

    ``seconds`` is about how long a rank measures products and memory. Speeds are by processor time, so that what else
    runs meanwhile changes little; those of a node are its slowest rank's.
    """
    dtypes = ("float32", "float64")
    budget = seconds / 3 / len(PRODUCTS)
    with threadpool_limits(1, "blas"):
        speeds = {dtype: _products(dtype, budget / len(dtypes)) for dtype in dtypes}
        memory = _memory(seconds / 3 / len(ARRAYS))
    flat = np.array([speed for curve in (*speeds.values(), memory) for _, speed in curve.points])
    ranks = mesh.all_gather(flat[None], label="calibrate") if mesh.size > 1 else flat[None]
    inside, between, pairs = _links(mesh)
    if mesh.rank:
        return None
    nodes = tuple(
        _node(node, [r for r, other in enumerate(mesh.nodes_by_rank) if other == node], ranks, speeds, memory, inside)
        for node in dict.fromkeys(mesh.nodes_by_rank)
    )
    return Machine("here", nodes, between or inside, pairs, source="measured by calibrate")


def _node(name, members, ranks, speeds, memory, inside) -> NodeKind:
    slowest = ranks[members].min(axis=0)
    curves, at = [], 0
    for curve in (*speeds.values(), memory):
        sizes = [size for size, _ in curve.points]
        curves.append(Curve(tuple(zip(sizes, map(float, slowest[at : at + len(sizes)]), strict=True))))
        at += len(sizes)
    cores = cores_here()
    return NodeKind(
        name=name,
        count=1,
        ranks=max(len(members), int(OVERSUBSCRIBED * cores)),
        speeds=dict(zip(speeds, curves, strict=False)),
        memory=float(_available_bytes()),
        memory_bandwidth=curves[-1],
        inside=inside,
        cores=cores,
    )


def _products(dtype: str, seconds: float) -> Curve:
    """FLOP/s of square products, one core."""
    points = []
    for width in PRODUCTS:
        a, b = np.ones((width, width), dtype), np.ones((width, width), dtype)
        out = np.empty((width, width), dtype)
        took = quickest(lambda a=a, b=b, out=out: np.matmul(a, b, out=out), seconds)
        points.append((2.0 * width**3, 2.0 * width**3 / took))
    return Curve(tuple(points))


def _memory(seconds: float) -> Curve:
    """Bytes read and written a second by additions, one core."""
    points = []
    for elements in ARRAYS:
        a, b, out = (np.ones(elements, np.float32) for _ in range(3))
        took = quickest(lambda a=a, b=b, out=out: np.add(a, b, out=out), seconds)
        points.append((12.0 * elements, 12.0 * elements / took))
    return Curve(tuple(points))


def quickest(act: Callable[[], object], seconds: float, clock: Callable[[], float] = process_time) -> float:
    """Seconds of one ``act``, the least of several turns of many, in about so many seconds."""
    act()
    began = clock()
    act()
    many = max(1, min(1 << 16, round(seconds / REPEATS / max(clock() - began, 1e-6))))
    turns = []
    for _ in range(REPEATS):
        began = clock()
        for _ in range(many):
            act()
        turns.append((clock() - began) / many)
    return max(min(turns), 1e-9)


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# --- links


def _links(mesh: Mesh) -> tuple[Link, Link | None, dict[tuple[int, int], Link]]:
    """Inside a node, between nodes if there are several, and pairs unlike those. Collective."""
    if mesh.size == 1:
        return Link(1e-5, 5e9, by_copy=True), None, {}
    nodes = mesh.nodes_by_rank
    found: dict[tuple[int, int], Link] = {}
    for a in range(mesh.size):
        for b in range(a + 1, mesh.size):
            latency, bandwidth = _pair(mesh, a, b)
            found[a, b] = Link(latency, bandwidth, by_copy=nodes[a] == nodes[b])
    usual = {}
    for together in (True, False):
        alike = [link for (a, b), link in found.items() if (nodes[a] == nodes[b]) is together]
        if alike:
            middle = Link(
                median(link.latency for link in alike), median(link.bandwidth for link in alike), by_copy=together
            )
            usual[together] = _by_copy(mesh, middle) if together and mesh.node_count == 1 else middle
    pairs = {
        pair: link
        for pair, link in found.items()
        if not link.by_copy and not 1 / UNLIKE < link.bandwidth / usual[False].bandwidth < UNLIKE
    }
    return usual.get(True) or Link(1e-5, 5e9, by_copy=True), usual.get(False), pairs


def _pair(mesh: Mesh, a: int, b: int) -> tuple[float, float]:
    """Latency and bandwidth of messages from a to b and back, as all ranks are told. Collective."""
    world = mesh.group()
    times = np.zeros(2)
    for place, size in enumerate((SMALL, LARGE)):
        x = np.zeros(size, np.uint8)
        world.barrier()
        if mesh.rank in (a, b):
            turns = []
            for _ in range(REPEATS):
                began = perf_counter()
                if mesh.rank == a:
                    world.send(b, x)
                    world.receive(b)
                else:
                    world.receive(a)
                    world.send(a, x)
                turns.append((perf_counter() - began) / 2)
            times[place] = min(turns[1:])
    small, large = world.broadcast(times if mesh.rank == a else None, a).tolist()
    return small, LARGE / max(large - small, 1e-9)


def _by_copy(mesh: Mesh, link: Link) -> Link:
    """The link with the bandwidth at which a rank's core moves bytes in an all_reduce of all ranks. Collective."""
    x = np.ones(LARGE, np.float32)
    world = mesh.group()
    turns = []
    for _ in range(REPEATS):
        world.barrier()
        began = process_time()
        world.all_reduce(x)
        turns.append(process_time() - began)
    took = float(world.all_reduce(np.array(min(turns)), "max"))
    tiny = np.ones(1, np.float32)
    began = perf_counter()
    for _ in range(20):
        world.all_reduce(tiny)
    latency = float(world.all_reduce(np.array((perf_counter() - began) / 20), "max"))
    return Link(latency, 2 * x.nbytes / took, by_copy=True)
