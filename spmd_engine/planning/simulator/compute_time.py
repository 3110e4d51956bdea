"""Times of computations: matrix products by their sizes, other work by the bytes that it moves.

Ranks that share cores execute everything one after the other. A device computes while its host launches the next work,
so a pass through a layer takes as long as the slower of the two. Where the host waits for the device, it cannot launch
ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

from spmd_engine.planning.dry_run.step_analysis import Computation, Product
from spmd_engine.planning.machine.machine import Machine

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
