"""What the launchers of MPI programs tell a process by its environment, before MPI is loaded."""

from __future__ import annotations

import os

#: Set for each rank: by MPICH and Intel MPI, by PMIx, by Open MPI, by MVAPICH2. Not Slurm's own SLURM_PROCID, which
#: batch scripts have, too.
RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")

#: Set for each rank by most of these: how many there are.
SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


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
