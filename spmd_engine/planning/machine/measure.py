"""Measures this machine for a machine file: matrix products, memory, and the links between all pairs of ranks."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, product
from math import prod
from pathlib import Path
from statistics import median
from time import perf_counter, process_time, thread_time

import numpy as np
from threadpoolctl import threadpool_limits

from spmd_engine.arrays import CPU, Backend
from spmd_engine.arrays.images import conv2d, conv2d_weight_gradient
from spmd_engine.arrays.meta.meter import CONVOLUTION, KERNELS
from spmd_engine.arrays.precision import dtype_of
from spmd_engine.arrays.products import matmul
from spmd_engine.arrays.windows import Window
from spmd_engine.comm import Mesh
from spmd_engine.comm.agreement.rank_zero import gather_json
from spmd_engine.comm.shared_memory.cores import cores_here, cores_of, quota_here
from spmd_engine.engine.offload.file import FileTarget
from spmd_engine.engine.offload.target import PIECE
from spmd_engine.errors import UsageError
from spmd_engine.planning.machine.machine import Curve, Link, Machine, NodeKind
from spmd_engine.planning.machine.products import POOL

PRODUCTS = (8, 16, 32, 64, 128, 256, 512, 1024)  #: widths of square matrices
DEVICE_PRODUCTS = (128, 512, 2048, 4096)
ARRAYS = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 23)  #: elements
IMAGES = (1, 8, 64)  #: images of a 3x3 convolution, with 16 rows, 16 columns and 32 channels
DEVICE_POOL = 1 << 28
LAUNCHES = 500  #: launches of a tiny kernel, which measure what one costs; fewer than CUDA queues
SMALL, LARGE = 8, 1 << 20  #: bytes of messages that measure latency and bandwidth
DISK = 512 << 20  #: bytes that each rank writes and reads to measure the disk: caches make it quicker for few
BLOCK = 8 << 20  #: bytes of an array that is copied to the disk and back
SECONDS = 6.0  #: about how long products, convolutions and memory are measured
REPEATS = 5
TURNS = 3  #: turns in which the disk is measured
TINY = 50  #: all_reduces that measure the latency
OVERSUBSCRIBED = 8  #: ranks per core of the machine file
PROBE = 0.3  #: seconds in which all ranks compute, to find the share of their cores that they get
IDLE = 0.85  #: least such share of an idle machine, whose services also run
OUTLIER = 1.5  #: a pair of ranks gets its own link if its bandwidth differs from the median by this factor


Act = Callable[[], object]
Clock = Callable[[], float]


def measure_machine(mesh: Mesh, seconds: float = SECONDS, folder: str = ".", backend: Backend = CPU) -> Machine | None:
    """The machine of these ranks; None on all ranks but rank 0. Collective.

    ``seconds`` is about how long products, convolutions and memory are measured, under the conditions of a step: all
    ranks compute at the same time, on operands that are not cached. Speeds are by processor time, so other programs
    have little effect; those of the devices of ``backend`` by the clock, with the cost of a launch and of a wait. The
    slowest rank of a node counts in each turn, and the median over turns. The disk is that of offloaded arrays in this
    ``folder``.
    """
    acts = {
        (dtype, 2.0 * width**3): partial(_rotating, matmul, (width, width), dtype, 3, backend)
        for dtype, width in product(
            ("float32", "bfloat16", "float64"), DEVICE_PRODUCTS if backend.on_device else PRODUCTS
        )
        if not backend.on_device or _computes(backend, dtype)
    }
    if not backend.on_device and CPU.image_kernels is not None:
        for kernel, n in product(KERNELS, IMAGES):
            acts[kernel, 2.0 * n * 16 * 16 * 32 * 9 * 32] = partial(_convolution, kernel, n)
    acts |= {
        ("memory", 12.0 * elements): partial(_rotating, backend.xp.add, (elements,), "float32", 3, backend)
        for elements in ARRAYS
    }
    with threadpool_limits(1, "blas"):
        took = np.array([_time_turns(mesh, make(), seconds / len(acts), backend) for make in acts.values()])
    costs = mesh.all_reduce(np.array(launch_and_wait(backend)), "max").tolist()
    ranks = mesh.all_gather(took[None], label="calibrate") if mesh.size > 1 else took[None]
    inside, between, pairs = _measure_links(mesh)
    disk = mesh.all_gather(np.array([_measure_disk(mesh, folder)]), label="calibrate")
    if mesh.rank:
        return None
    nodes = []
    for node in dict.fromkeys(mesh.nodes_by_rank):
        members = [r for r, other in enumerate(mesh.nodes_by_rank) if other == node]
        kind = _node_kind(node, members, ranks, list(acts), inside)
        if backend.on_device:
            memory, many = float(backend.memory), len(members)
            kind = replace(kind, cores=None, ranks=many, memory=memory, launch_seconds=costs[0], sync_seconds=costs[1])
        read, write, _ = disk[members].sum(axis=0).tolist()
        copy = float(disk[members, 2].mean())
        nodes.append(replace(kind, disk_read=read, disk_write=write, disk_copy=copy) if read and write else kind)
    return Machine("here", tuple(nodes), between or inside, pairs, source="measured by calibrate")


def share_of_cores(mesh: Mesh, clock: Clock = perf_counter, processor: Clock = thread_time) -> float:
    """The share of the time of their cores that the ranks of a node get while all of them compute, at most 1; that of
    the node with the smallest. It is below ``IDLE`` if other programs compute. Collective.

    ``clock`` and ``processor`` return seconds, and those of this thread on a processor.
    """
    mesh.barrier()
    began, worked = clock(), processor()
    while (taken := clock() - began) < PROBE:
        pass
    own = (processor() - worked) / taken
    ranks = gather_json(mesh.group(), [sorted(os.sched_getaffinity(0)), quota_here(), own], label="share of cores")
    shares = [1.0]
    for node in set(mesh.nodes_by_rank):
        members = [rank for rank, other in zip(ranks, mesh.nodes_by_rank, strict=True) if other == node]
        cores = cores_of([(cores, quota) for cores, quota, _ in members]) or cores_here()  # less than one
        shares.append(sum(share for *_, share in members) / min(len(members), cores))
    return min(shares)


def _node_kind(
    name: str, members: list[int], ranks: np.ndarray, measured: Sequence[tuple[str, float]], inside: Link
) -> NodeKind:
    points: dict[str, list[tuple[float, float]]] = {}
    took = np.median(ranks[members].max(axis=0), axis=1)
    for (kind, size), seconds in zip(measured, took.tolist(), strict=True):
        points.setdefault(kind, []).append((size, size / seconds))
    curves = {kind: Curve(tuple(curve_points)) for kind, curve_points in points.items()}
    cores = cores_here()
    return NodeKind(
        name=name,
        count=1,
        ranks=max(len(members), int(OVERSUBSCRIBED * cores)),
        memory=float(_available_bytes()),
        memory_bandwidth=curves.pop("memory"),
        speeds=curves,
        inside=inside,
        cores=cores,
    )


def _time_turns(mesh: Mesh, act: Act, seconds: float, backend: Backend) -> list[float]:
    """Processor seconds of one ``act``, or those of a device, while all ranks execute it, for each of several turns.
    Collective."""
    clock = perf_counter if backend.on_device else process_time

    def repeat(times: int) -> None:
        for _ in range(times):
            act()
        backend.synchronize()

    _, once = turns_of(lambda: repeat(1), backend.synchronize, 2, clock)
    many = max(1, min(1 << 16, round(seconds / REPEATS / max(once, 1e-6))))
    turns = turns_of(lambda: repeat(many), lambda: (mesh.barrier(), backend.synchronize()), clock=clock)
    return [max(took / many, 1e-9) for took in turns]


def turns_of(act: Act, begin: Act = lambda: None, turns: int = REPEATS, clock: Clock = perf_counter) -> list[float]:
    """Seconds of each of several turns of an act; ``begin`` is called before each, such as a barrier."""
    seconds = []
    for _ in range(turns):
        begin()
        began = clock()
        act()
        seconds.append(clock() - began)
    return seconds


def launch_and_wait(backend: Backend) -> tuple[float, float]:
    """Seconds in which the host launches a tiny kernel, and in which it reads a number of an idle device; 0 on a
    host."""
    if not backend.on_device:
        return 0.0, 0.0
    x, turns = backend.asarray(np.ones(1)), []
    for _ in range(REPEATS):
        backend.synchronize()
        marks = [perf_counter()]
        for _ in range(LAUNCHES):
            backend.xp.add(x, x, out=x)
        marks.append(perf_counter())
        backend.synchronize()
        marks.append(perf_counter())
        backend.to_host(x)
        turns.append(((marks[1] - marks[0]) / LAUNCHES, perf_counter() - marks[2]))
    launch, wait = np.median(turns, axis=0).tolist()
    return launch, wait


def _computes(backend: Backend, dtype: str) -> bool:
    """Whether the device's library multiplies matrices of this dtype."""
    try:
        matmul(*[backend.asarray(np.ones((2, 2), dtype_of(dtype)))] * 2)
    except Exception:  # errors are CuPy's or cuBLAS's
        return False
    return True


def _rotating(
    operation: Callable[..., object], shape: tuple[int, ...], dtype: str, arrays: int, backend: Backend = CPU
) -> Act:
    """An operation on ``arrays`` arrays of a shape, which rotate through POOL bytes."""
    size = dtype_of(dtype).itemsize * arrays * prod(shape)
    pool = np.ones((max(2, (DEVICE_POOL if backend.on_device else POOL) // size), arrays, *shape), dtype_of(dtype))
    pool = backend.asarray(pool)
    operands = cycle([list(row) for row in pool])
    return lambda: operation(*next(operands))


def _convolution(kernel: str, images: int) -> Act:
    """A convolution, or its weight gradient, by the host's kernels."""
    window = Window(3, before=1, after=1)
    w = np.ones((3, 3, 32, 32), np.float32)

    def operation(x: np.ndarray, y: np.ndarray) -> object:
        if kernel == CONVOLUTION:
            return conv2d(x, w, window, window)
        return conv2d_weight_gradient(x, y, window, window, 1)

    return _rotating(operation, (images, 16, 16, 32), "float32", 2)


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# --- the disk


def _measure_disk(mesh: Mesh, folder: str) -> tuple[float, float, float]:
    """Bytes a second that this rank reads from the disk of a folder and writes to it while all ranks do, and that a
    core moves as arrays; 0 if a rank can offload nothing there. Collective."""
    try:
        file = FileTarget(folder)
        place = file.reserve(DISK)
    except UsageError:
        file, place = None, 0
    if not mesh.all_reduce(np.array(int(file is not None)), "min") or file is None:
        return 0.0, 0.0, 0.0
    speeds, buffer = [], file.take_buffer()
    for writes in (True, False):

        def move(writes: bool = writes) -> None:
            starts = range(place, place + DISK, PIECE)
            for moved in [file.submit(file.transfer, start, buffer, writes=writes) for start in starts]:
                moved.result()
            mesh.barrier()  # a rank alone is faster

        speeds.append(DISK / median(turns_of(move, mesh.barrier, TURNS)[1:]))  # the first writes also allocate
    arrays, began = deque([np.ones(BLOCK, np.uint8) for _ in range(DISK // BLOCK // 8)]), thread_time()
    for first in range(place, place + DISK, BLOCK):  # arrays that are not cached, and new memory, as in a step
        file.write_all(first, arrays.popleft())
        arrays.append(file.read_all(first, np.empty(BLOCK, np.uint8)))
    return speeds[1], speeds[0], 2 * DISK / (thread_time() - began)


# --- links


def _measure_links(mesh: Mesh) -> tuple[Link, Link | None, dict[tuple[int, int], Link]]:
    """The link inside a node, the link between nodes (None: one node), and pairs that differ. Collective."""
    if mesh.size == 1:
        return Link(1e-5, 5e9, by_copy=True), None, {}
    nodes = mesh.nodes_by_rank
    links_of_pairs: dict[tuple[int, int], Link] = {}
    for a in range(mesh.size):
        for b in range(a + 1, mesh.size):
            latency, bandwidth = measure_pair(mesh, a, b)
            links_of_pairs[a, b] = Link(latency, bandwidth, by_copy=nodes[a] == nodes[b])
    medians = {}
    for same_node in (True, False):
        links = [link for (a, b), link in links_of_pairs.items() if (nodes[a] == nodes[b]) is same_node]
        if links:
            typical = Link(
                median(link.latency for link in links), median(link.bandwidth for link in links), by_copy=same_node
            )
            medians[same_node] = _measure_copies(mesh) if same_node and mesh.node_count == 1 else typical
    pairs = {
        pair: link
        for pair, link in links_of_pairs.items()
        if not link.by_copy and not 1 / OUTLIER < link.bandwidth / medians[False].bandwidth < OUTLIER
    }
    return medians.get(True) or Link(1e-5, 5e9, by_copy=True), medians.get(False), pairs


def measure_pair(mesh: Mesh, a: int, b: int) -> tuple[float, float]:
    """Latency and bandwidth between ranks a and b, on all ranks. Collective."""
    world = mesh.group()
    times = np.zeros(2)
    for place, size in enumerate((SMALL, LARGE)):
        x = np.zeros(size, np.uint8)
        there_and_back = {
            a: lambda x=x: (world.send(b, x), world.receive(b)),
            b: lambda x=x: (world.receive(a), world.send(a, x)),
        }
        world.barrier()
        if mesh.rank in there_and_back:
            times[place] = min(turns_of(there_and_back[mesh.rank])[1:]) / 2
    small, large = world.broadcast(times if mesh.rank == a else None, a).tolist()
    return small, LARGE / max(large - small, large / 2)  # ranks that take turns: small messages may take as long


def _measure_copies(mesh: Mesh) -> Link:
    """The link with latency and bandwidth of an all_reduce, in which cores move the bytes. Collective."""
    world, x, tiny = mesh.group(), np.ones(LARGE, np.float32), np.ones(1, np.float32)
    turns = turns_of(lambda: world.all_reduce(x), world.barrier, clock=process_time)
    took = float(world.all_reduce(np.array(min(turns)), "max"))
    waits = turns_of(lambda: world.all_reduce(tiny), turns=TINY)
    latency = float(world.all_reduce(np.array(median(waits)), "max"))
    return Link(latency, 2 * x.nbytes / took, by_copy=True)
