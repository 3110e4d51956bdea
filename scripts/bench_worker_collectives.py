"""Times collectives on the ranks it is started on: ours and the MPI library's own, alternating."""

import sys
from statistics import median
from time import perf_counter

import numpy as np
from mpi4py import MPI

from spmd_engine import Mesh, world

SIZES = (8, 1 << 10, 1 << 16, 1 << 20, 1 << 23)


def main(rounds: int) -> None:
    comm = MPI.COMM_WORLD
    with Mesh(check=True) as checked, Mesh(check=False) as unchecked:
        for operation in ("all_reduce", "all_gather", "reduce_scatter"):
            for size in SIZES:
                x = np.ones(max(size // 4, comm.size), np.float32)
                ways = {
                    "checked": lambda x=x, o=operation: getattr(checked, o)(x),
                    "unchecked": lambda x=x, o=operation: getattr(unchecked, o)(x),
                    "MPI": library_call(comm, operation, x),
                }
                times: dict[str, list[float]] = {name: [] for name in ways}
                for _ in range(rounds):
                    for name, call in ways.items():
                        checked.barrier()
                        began = perf_counter()
                        call()
                        times[name].append(perf_counter() - began)
                if comm.rank == 0:
                    medians = {name: median(values) * 1e6 for name, values in times.items()}
                    row = "  ".join(f"{name} {value:10,.0f} us" for name, value in medians.items())
                    print(f"{operation:<15} {x.nbytes:>10,} bytes  {row}", flush=True)


def library_call(comm, operation: str, x: np.ndarray):
    """The library's nonblocking collective, waited for as we wait, so that only the algorithms differ."""
    if operation == "all_reduce":
        out = np.empty_like(x)
        return lambda: wait_for(comm.Iallreduce(x, out))
    if operation == "all_gather":
        out = np.empty((comm.size, *x.shape), x.dtype)
        return lambda: wait_for(comm.Iallgather(x, out))
    counts = [len(part) for part in np.array_split(x, comm.size)]
    out = np.empty(counts[comm.rank], x.dtype)
    return lambda: wait_for(comm.Ireduce_scatter(x, out, counts))


def wait_for(request: MPI.Request) -> None:
    idle = 0
    while not request.Test():
        idle += 1
        world().pause(idle, 0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
