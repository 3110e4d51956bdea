"""Start `mpiexec`, and end it so that neither processes nor shared memory stay behind."""

import sys

from spmd_engine.runtime.mpi_job import MPIJob, clean_environment, find_mpiexec

__all__ = ["Job", "clean_environment", "mpiexec"]


def mpiexec():
    """The launcher's command: this environment's, else the first on PATH, else None."""
    return find_mpiexec()


class Job(MPIJob):
    """One `mpiexec -n RANKS python ARGUMENTS`; `stop()` it, or use `with`, however it ended.

    With 0 for RANKS it is one process, and no MPI.
    """

    def __init__(self, ranks, arguments, *, env=None, **popen):
        if ranks and mpiexec() is None:
            raise FileNotFoundError("no mpiexec: pip install -e '.[mpich,test]', or load the cluster's MPI")
        launcher = [*mpiexec(), "-n", str(ranks)] if ranks else []
        super().__init__([*launcher, sys.executable, *arguments], env=env, **popen)
