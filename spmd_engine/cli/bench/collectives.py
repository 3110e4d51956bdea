"""``bench collectives``: the engine's collectives and the MPI library's own.

This module is also the worker: its ``argv[1]`` is a JSON object, ``operations``, ``sizes`` in bytes, and ``rounds``.
Rank 0 prints a JSON list with an object for each operation and size: seconds of a call by way, one number a round.
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
from spmd_engine.comm.mesh import Mesh

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")


@click.command(short_help="Collectives, compared with the MPI library's own.")
@count_option("ranks", 2, least=2)
@count_option("rounds", 15)
@click.option("--only", type=click.Choice(OPERATIONS), multiple=True, help="Only this operation; may be repeated.")
@click.option("--largest", type=click.IntRange(min=1), default=64, show_default=True, help="MiB of the largest arrays.")
@output_option()
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
    for each in results:
        seconds = each["seconds"]
        times = [f"{median(values) * 1e6:,.1f}" for values in seconds.values()]
        ratios = [_times_as_fast(seconds, way) for way in ("shared", "ordinary")]
        rows.append((each["operation"], f"{each['size']:,}", *times, *ratios))
    columns = ("operation", "bytes", "shared us", "ordinary us", "unchecked us", "library us", "shared", "ordinary")
    report(columns, rows, {"ranks": ranks, "results": results}, output)


def _times_as_fast(seconds: dict[str, list[float]], way: str) -> str:
    """How many times as fast as the library this way is."""
    ratios = [library / ours for library, ours in zip(seconds["library"], seconds[way], strict=True)]
    return f"{median(ratios):.2f}x"


# --- The worker, on the ranks it is started on


Call = Callable[[], object]
_ENOUGH = 2e-3  # seconds that calls are repeated for, between two looks at the clock


def main() -> None:
    """Time every way of every operation, alternating."""
    config = json.loads(sys.argv[1])
    results = []
    with Mesh() as mesh, Mesh(check=False) as trusting:
        for operation in config["operations"]:
            for size in config["sizes"]:
                ways = {
                    "shared": ours(mesh, operation, size, mesh.empty),
                    "ordinary": ours(mesh, operation, size, np.empty),
                    "unchecked": ours(trusting, operation, size, np.empty),
                    "library": library(operation, size),
                }
                seconds = {way: [] for way in ways}
                often = {way: repetitions(mesh, call) for way, call in ways.items()}
                for _ in range(config["rounds"]):
                    for way, call in ways.items():
                        seconds[way].append(timed(mesh, call, often[way]))
                results.append({"operation": operation, "size": size, "seconds": seconds})
    if mesh.rank == 0:
        print(json.dumps(results))


def ours(mesh: Mesh, operation: str, size: int, empty: Callable) -> Call:
    """A call of the engine's, with all its arrays from ``empty``; ``size`` counts the largest of them."""
    ranks, length = mesh.size, max(size // 4 // mesh.size, 1) * mesh.size
    whole, part = empty(length, np.float32), empty(length // ranks, np.float32)
    whole[...] = part[...] = 0
    calls: dict[str, Call] = {
        "all_reduce": lambda: mesh.all_reduce(whole, out=whole),
        "reduce_scatter": lambda: mesh.reduce_scatter(whole, out=part),
        "all_gather": lambda: mesh.all_gather(part, out=whole),
        "broadcast": lambda: mesh.broadcast(whole),
        "all_to_all": lambda: mesh.all_to_all(whole),
    }
    return calls[operation]


def library(operation: str, size: int) -> Call:
    """The MPI library's own, with arrays made before, and written to, as the engine's are."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    ranks, length = comm.size, max(size // 4 // comm.size, 1) * comm.size
    whole, other, part = (np.ones(size, np.float32) for size in (length, length, length // ranks))
    calls: dict[str, Call] = {
        "all_reduce": lambda: comm.Allreduce(MPI.IN_PLACE, whole),
        "reduce_scatter": lambda: comm.Reduce_scatter_block(whole, part),
        "all_gather": lambda: comm.Allgather(part, whole),
        "broadcast": lambda: comm.Bcast(whole),
        "all_to_all": lambda: comm.Alltoall(whole, other),
    }
    return calls[operation]


def repetitions(mesh: Mesh, call: Call) -> int:
    """How often to call between two looks at the clock: as often on all ranks."""
    call()
    seconds = timed(mesh, call, 3)
    return int(mesh.all_reduce(np.array(max(1.0, min(_ENOUGH / seconds, 200.0))), "min"))


def timed(mesh: Mesh, call: Call, often: int) -> float:
    """Seconds of one call, among so many in a row, on the rank that took longest."""
    mesh.barrier()
    began = perf_counter()
    for _ in range(often):
        call()
    return float(mesh.all_reduce(np.array((perf_counter() - began) / often), "max"))


if __name__ == "__main__":
    main()
