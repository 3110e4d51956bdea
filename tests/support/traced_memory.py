"""Peak memory of virtual ranks, by tracemalloc, for the tests of memory."""

import tracemalloc

from spmd_engine import run_threads


def peak_of(program, ranks):
    """Peak bytes of all ranks together. ``program`` is a context manager that yields a mesh and a function to call."""

    def traced():
        with program() as (mesh, do):
            mesh.barrier()
            if mesh.rank == 0:
                tracemalloc.start()
            mesh.barrier()
            do()
            mesh.barrier()
            return tracemalloc.get_traced_memory()[1]

    try:
        return max(run_threads(traced, ranks))
    finally:
        tracemalloc.stop()
