"""``bench collectives``: the engine's collectives and the MPI library's own.

This module is also the worker: its ``argv[1]`` is a JSON object, ``operations``, ``sizes`` in bytes, and ``rounds``.
Rank 0 prints a JSON list with an object for each operation and size: seconds of a call by variant, a number a round.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import click
import numpy as np

from spmd_engine.cli.bench.measuring import count_option, measure, output_option, report
from spmd_engine.cli.values import Choice, WholeRange
from spmd_engine.comm import Mesh

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")


@click.command(short_help="Collectives, compared with the MPI library's own.")
@count_option("ranks", 2, least=2)
@count_option("rounds", 15)
@click.option("--only", type=Choice(OPERATIONS), multiple=True, help="Only this operation; may be repeated.")
@click.option("--largest", type=WholeRange(min=1), default=64, help="MiB of the largest arrays.")
@output_option
def collectives(ranks: int, rounds: int, only: tuple[str, ...], largest: int, output: Path | None) -> None:
    """Time calls of 8 bytes and more in four ways, alternating. Sizes are those of whole arrays, in float32.

    "shared" has its arrays in memory that the node's ranks share (Mesh.empty), "ordinary" in NumPy's, both with checks
    and ledger; "unchecked" is ordinary without checks; "library" is the MPI library's own blocking call on arrays made
    before. The last two columns are the median over rounds of the library's time divided by ours.
    """
    config = {
        "operations": only or OPERATIONS,
        "sizes": [8, *(1 << power for power in range(10, (largest << 20).bit_length(), 2))],
        "rounds": rounds,
    }
    results = measure(ranks, "collectives", config)
    rows = []
    for result in results:
        seconds = result["seconds"]
        times = [f"{median(values) * 1e6:,.1f}" for values in seconds.values()]
        ratios = [_times_as_fast(seconds, variant) for variant in ("shared", "ordinary")]
        rows.append((result["operation"], f"{result['size']:,}", *times, *ratios))
    columns = ("operation", "bytes", "shared us", "ordinary us", "unchecked us", "library us", "shared", "ordinary")
    report(columns, rows, {"ranks": ranks, "results": results}, output)


def _times_as_fast(seconds: dict[str, list[float]], variant: str) -> str:
    """The library's time divided by that of the variant, as text."""
    ratios = [library / ours for library, ours in zip(seconds["library"], seconds[variant], strict=True)]
    return f"{median(ratios):.2f}x"


# --- The worker, which runs on every rank


Call = Callable[[], object]
_ENOUGH = 2e-3  # seconds of repeated calls between two readings of the clock


def main() -> None:
    """Time every variant of every operation, alternating."""
    config = json.loads(sys.argv[1])
    results = []
    with Mesh() as mesh, Mesh(check=False) as trusting:
        for operation in config["operations"]:
            for size in config["sizes"]:
                variants = {
                    "shared": ours(mesh, operation, size, mesh.empty),
                    "ordinary": ours(mesh, operation, size, np.empty),
                    "unchecked": ours(trusting, operation, size, np.empty),
                    "library": library(operation, size),
                }
                seconds = {variant: [] for variant in variants}
                repeats = {variant: repetitions(mesh, call) for variant, call in variants.items()}
                for _ in range(config["rounds"]):
                    for variant, call in variants.items():
                        seconds[variant].append(timed(mesh, call, repeats[variant]))
                results.append({"operation": operation, "size": size, "seconds": seconds})
    if mesh.rank == 0:
        print(json.dumps(results))


def ours(mesh: Mesh, operation: str, size: int, empty: Callable) -> Call:
    """A call of the engine with arrays from ``empty``; ``size`` is the bytes of the largest array."""
    ranks, length = mesh.size, max(size // 4 // mesh.size, 1) * mesh.size
    full, shard = empty(length, np.float32), empty(length // ranks, np.float32)
    full[...] = shard[...] = 0
    calls: dict[str, Call] = {
        "all_reduce": lambda: mesh.all_reduce(full, out=full),
        "reduce_scatter": lambda: mesh.reduce_scatter(full, out=shard),
        "all_gather": lambda: mesh.all_gather(shard, out=full),
        "broadcast": lambda: mesh.broadcast(full),
        "all_to_all": lambda: mesh.all_to_all(full),
    }
    return calls[operation]


def library(operation: str, size: int) -> Call:
    """A call of the MPI library. Its arrays are allocated and written before, like those of the engine."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    ranks, length = comm.size, max(size // 4 // comm.size, 1) * comm.size
    full, received, shard = (np.ones(size, np.float32) for size in (length, length, length // ranks))
    calls: dict[str, Call] = {
        "all_reduce": lambda: comm.Allreduce(MPI.IN_PLACE, full),
        "reduce_scatter": lambda: comm.Reduce_scatter_block(full, shard),
        "all_gather": lambda: comm.Allgather(shard, full),
        "broadcast": lambda: comm.Bcast(full),
        "all_to_all": lambda: comm.Alltoall(full, received),
    }
    return calls[operation]


def repetitions(mesh: Mesh, call: Call) -> int:
    """The number of calls between two readings of the clock, equal on all ranks."""
    call()
    seconds = timed(mesh, call, 3)
    return int(mesh.all_reduce(np.array(max(1.0, min(_ENOUGH / seconds, 200.0))), "min"))


def timed(mesh: Mesh, call: Call, often: int) -> float:
    """Seconds of one call on the slowest rank, as the mean of ``often`` calls in a row."""
    mesh.barrier()
    began = perf_counter()
    for _ in range(often):
        call()
    return float(mesh.all_reduce(np.array((perf_counter() - began) / often), "max"))


if __name__ == "__main__":
    main()
