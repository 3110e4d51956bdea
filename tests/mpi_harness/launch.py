"""Starts `mpiexec`, and ends it without leaving processes or shared memory behind."""

import sys

from spmd_engine.runtime.mpi_job import MPIJob, clean_environment, find_mpiexec

__all__ = ["Job", "clean_environment", "mpiexec"]


def mpiexec():
    """The command of the launcher: that of this environment, else the first on PATH, else None."""
    return find_mpiexec()


class Job(MPIJob):
    """One `mpiexec -n RANKS python ARGUMENTS`. Always call `stop()`, or use `with`.

    With 0 for RANKS, it is one process without MPI.
    """

    def __init__(self, ranks, arguments, *, env=None, **popen):
        if ranks and mpiexec() is None:
            raise FileNotFoundError("no mpiexec: pip install -e '.[mpich,test]', or load the cluster's MPI")
        launcher = [*mpiexec(), "-n", str(ranks)] if ranks else []
        super().__init__([*launcher, sys.executable, *arguments], env=env, **popen)
