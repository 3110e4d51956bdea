"""What MPI launchers pass to a process in its environment, before MPI is loaded."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

#: Set for each rank: by MPICH and Intel MPI, by PMIx, by Open MPI, by MVAPICH2. Not Slurm's own SLURM_PROCID, which
#: batch scripts have, too.
RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")

#: Set for each rank by most of these: how many there are.
SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")

#: The same on its node: by MPICH and Intel MPI, by Open MPI, by MVAPICH2.
LOCAL_RANK_VARIABLES = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK")
LOCAL_SIZE_VARIABLES = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE")

#: Variables by which users set the number of BLAS threads.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")


def is_launched() -> bool:
    """Whether a launcher of MPI programs started this process."""
    return any(name in os.environ for name in RANK_VARIABLES)


def _number(names: Iterable[str], default: int) -> int:
    """The number in the first of these environment variables that has one."""
    return next((int(os.environ[name]) for name in names if os.environ.get(name, "").isdigit()), default)


def launcher_rank() -> int:
    """The rank that the launcher gave this process, 0 without one."""
    return _number((*RANK_VARIABLES, *(("SLURM_PROCID",) if "SLURM_STEP_NUM_TASKS" in os.environ else ())), 0)


def launcher_size() -> int:
    """How many processes were started with this one: by an MPI launcher, else by Slurm's srun; 1 without them.

    An MPI launcher comes first, because its own Slurm step may have a task for each node.
    """
    return _number((*SIZE_VARIABLES, "SLURM_STEP_NUM_TASKS"), 1)


def local_rank() -> int:
    """The number of this process among those of the job on this node; 0 without a launcher."""
    return _number(LOCAL_RANK_VARIABLES, 0)


def local_size() -> int:
    """How many processes the launcher started on this node, or 1 if it does not say."""
    return _number(LOCAL_SIZE_VARIABLES, 1)


def let_rank_zero_speak() -> None:
    """Wait a moment on ranks other than 0, before they exit with an error that all ranks have: Open MPI's launcher ends
    the job at the first exit, perhaps before rank 0 has printed the error."""
    if launcher_rank() > 0 and "OMPI_COMM_WORLD_RANK" in os.environ:
        time.sleep(1)


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Give a NumPy that is loaded meanwhile one thread, if this is one of several processes and the user set no number.

    The number of cores for each rank is known after the ranks have exchanged it; more threads are started then. Idle
    threads of OpenBLAS spin before they sleep: with 8 ranks on 2 cores that was a tenth of the time of all imports.
    """
    mine = launcher_size() > 1 and not any(name in os.environ for name in THREAD_VARIABLES)
    if mine:
        os.environ["OPENBLAS_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if mine:
            del os.environ["OPENBLAS_NUM_THREADS"]
