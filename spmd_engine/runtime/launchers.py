"""What the launchers of MPI programs tell a process by its environment, before MPI is loaded."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

#: Set for each rank: by MPICH and Intel MPI, by PMIx, by Open MPI, by MVAPICH2. Not Slurm's own SLURM_PROCID, which
#: batch scripts have, too.
RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")

#: Set for each rank by most of these: how many there are.
SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")

#: The same on its node: by MPICH and Intel MPI, by Open MPI, by MVAPICH2.
LOCAL_RANK_VARIABLES = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK")
LOCAL_SIZE_VARIABLES = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE")

#: By these users say how many threads a BLAS shall have.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")


def is_launched() -> bool:
    """Whether a launcher of MPI programs started this process."""
    return any(name in os.environ for name in RANK_VARIABLES)


def launcher_rank() -> int:
    """The rank that the launcher gave this process, 0 without one."""
    names = (*RANK_VARIABLES, *(("SLURM_PROCID",) if "SLURM_STEP_NUM_TASKS" in os.environ else ()))
    return next((int(os.environ[name]) for name in names if os.environ.get(name, "").isdigit()), 0)


def launcher_size() -> int:
    """How many processes were started with this one: by a launcher of MPI programs, or else by Slurm's srun."""
    by_mpi = [os.environ[name] for name in SIZE_VARIABLES if os.environ.get(name, "").isdigit()]
    by_srun = os.environ.get("SLURM_STEP_NUM_TASKS", "")  # also where its step is mpiexec's own, with a task a node
    return int(next(iter(by_mpi), by_srun if by_srun.isdigit() else "1"))


def local_rank() -> int:
    """Which this process is among those that the launcher started on this node; 0 without one."""
    return next((int(os.environ[name]) for name in LOCAL_RANK_VARIABLES if os.environ.get(name, "").isdigit()), 0)


def local_size() -> int:
    """How many processes the launcher started on this node, as far as it says; at least 1."""
    return next((int(os.environ[name]) for name in LOCAL_SIZE_VARIABLES if os.environ.get(name, "").isdigit()), 1)


def let_rank_zero_speak() -> None:
    """Wait a moment on the other ranks, which are about to end with an error that all found: Open MPI's launcher ends
    the job at the first such end, and rank 0 may not have said why."""
    if launcher_rank() > 0 and "OMPI_COMM_WORLD_RANK" in os.environ:
        time.sleep(1)


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """A NumPy that is loaded meanwhile gets one thread, if this process is one of several and the user says no number.

    How many cores it has is known when the ranks have met, and more threads are made then. One that OpenBLAS makes
    looks for work for so long, before it sleeps, that with 8 ranks on 2 cores a tenth of the imports' time was that.
    """
    mine = launcher_size() > 1 and not any(name in os.environ for name in THREAD_VARIABLES)
    if mine:
        os.environ["OPENBLAS_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if mine:
            del os.environ["OPENBLAS_NUM_THREADS"]
