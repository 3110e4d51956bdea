"""What the launchers of MPI programs tell a process by its environment, before MPI is loaded."""

from __future__ import annotations

import os

#: Set for each rank: by MPICH and Intel MPI, by PMIx, by Open MPI, by MVAPICH2. Not Slurm's own SLURM_PROCID, which
#: batch scripts have, too.
RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")


def is_launched() -> bool:
    """Whether a launcher of MPI programs started this process."""
    return any(name in os.environ for name in RANK_VARIABLES)


def launcher_rank() -> int:
    """The rank that the launcher gave this process, 0 without one."""
    return next((int(os.environ[name]) for name in RANK_VARIABLES if os.environ.get(name, "").isdigit()), 0)
