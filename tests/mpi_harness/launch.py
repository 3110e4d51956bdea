"""Start `mpiexec`, and end it so that neither processes nor shared memory stay behind."""

import os
import sys

from spmd_engine.runtime.mpi_job import MPIJob, clean_environment, find_mpiexec

__all__ = ["Job", "clean_environment", "environment_rank", "mpiexec"]


def environment_rank():
    """This process's rank if mpiexec or srun started it, else None. Asking MPI would initialise it."""
    for name in ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"):  # SLURM_PROCID is set in batch scripts too
        if name in os.environ:
            return int(os.environ[name])
    return None


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
