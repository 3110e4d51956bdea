"""What tests of memory share: bytes that virtual ranks have taken at most, as Python's allocators tell."""

import tracemalloc

from spmd_engine import run_threads


def peak_of(program, ranks):
    """Of all ranks together: ``program`` is a context manager, which gives each its mesh and what it is to do then."""

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
