"""The variables that MPI launchers set in the environment of a process, which are read before MPI is loaded."""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from spmd_engine.errors import UsageError

#: Set for each rank: by MPICH and Intel MPI, by PMIx, by Open MPI, by MVAPICH2. Not Slurm's own SLURM_PROCID, which
#: batch scripts have, too.
RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")

#: Set for each rank by most of these: the number of ranks.
SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")

#: The rank on its node: by MPICH and Intel MPI, by Open MPI, by MVAPICH2.
LOCAL_RANK_VARIABLES = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK")
LOCAL_SIZE_VARIABLES = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE")

#: Variables of launchers by which ``launcher_name`` tells them apart, the innermost first: a launcher may itself run in
#: a step of srun.
_NAMES = {
    "OMPI_COMM_WORLD_RANK": "Open MPI's mpiexec",
    "MPI_LOCALRANKID": "MPICH's mpiexec",
    "MV2_COMM_WORLD_RANK": "MVAPICH2's mpiexec",
    "SLURM_STEP_NUM_TASKS": "srun",
    "PMIX_RANK": "a PMIx launcher",
    "PMI_RANK": "a PMI launcher",
}

#: Where batch systems tell a job the number of processes it was given. PBS has a file with a line for each.
_ALLOCATIONS = {"Slurm": "SLURM_NTASKS", "PBS": "PBS_NP", "LSF": "LSB_DJOB_NUMPROC", "Grid Engine": "NSLOTS"}

RESTARTS = "SPMD_RESTARTS"  #: environment variable of ``launch``: how often it has restarted the job

MPI_MIXED = "the launcher belongs to another MPI library"
#: What to do about it, and the command that says more.
NOT_MIXED = (
    ". Use the mpiexec of this environment, or srun: 'srun --mpi=pmi2' with MPICH, or an MPI library built for srun; "
    "'doctor' says more"
)

#: Variables by which users set the number of BLAS threads.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")


def is_launched() -> bool:
    """Whether a launcher of MPI programs started this process."""
    return any(name in os.environ for name in RANK_VARIABLES)


def _read_number(names: Iterable[str], default: int) -> int:
    """The number in the first of these environment variables that has one."""
    return next((int(os.environ[name]) for name in names if os.environ.get(name, "").isdecimal()), default)


def launcher_rank() -> int:
    """The rank that the launcher gave this process, 0 without one."""
    return _read_number((*RANK_VARIABLES, *(("SLURM_PROCID",) if "SLURM_STEP_NUM_TASKS" in os.environ else ())), 0)


def launcher_size() -> int:
    """The number of processes started with this one: by an MPI launcher, else by Slurm's srun; 1 without them.

    An MPI launcher comes first, because its own Slurm step may have a task for each node.
    """
    return _read_number((*SIZE_VARIABLES, "SLURM_STEP_NUM_TASKS"), 1)


def launcher_name() -> str:
    """The launcher that started this process; empty without one."""
    return next((name for variable, name in _NAMES.items() if variable in os.environ), "")


def allocation() -> tuple[str, int, int]:
    """The batch system of this job, and the tasks and nodes that it was given; ("", 1, 1) without one."""
    if file := os.environ.get("PBS_NODEFILE"):
        lines = Path(file).read_text().split()
        return "PBS", len(lines), len(set(lines))
    for system, variable in _ALLOCATIONS.items():
        if variable in os.environ:
            return system, _read_number([variable], 1), _read_number(["SLURM_JOB_NUM_NODES", "NHOSTS"], 1)
    return "", 1, 1


def check_started_by_launcher() -> None:
    """Raise UsageError in the one process of a Slurm allocation of several tasks, as a batch script starts it without
    srun or mpiexec: it would do all the work alone. What ``srun -n 1`` or ``mpiexec -n 1`` starts is meant to."""
    tasks = _read_number(["SLURM_NTASKS"], 1)
    if tasks > 1 and "SLURM_JOB_ID" in os.environ and "SLURM_STEP_NUM_TASKS" not in os.environ and not is_launched():
        raise UsageError(
            f"Slurm has allocated {tasks} tasks, but this is one process, started by neither srun nor mpiexec. Start "
            f"it with 'mpiexec -n {tasks} python ...', or 'srun --mpi=pmi2' if MPI is MPICH; or 'mpiexec -n 1' for one"
        )


def local_rank() -> int:
    """The number of this process among those of the job on this node; 0 without a launcher."""
    return _read_number(LOCAL_RANK_VARIABLES, 0)


def local_size() -> int:
    """The number of processes that the launcher started on this node; 1 if it is unknown."""
    return _read_number(LOCAL_SIZE_VARIABLES, 1)


def let_rank_zero_speak() -> None:
    """Wait a moment on ranks other than 0, before they exit with an error that all ranks have: Open MPI's launcher ends
    the job at the first exit, perhaps before rank 0 has printed the error."""
    if launcher_rank() > 0 and "OMPI_COMM_WORLD_RANK" in os.environ:
        time.sleep(1)


def terminal(levels: int = 4) -> str | None:
    """The terminal on which this process's standard error appears: its own, or that of the mpiexec that started it on
    this host, which forwards it. None if there is none, or one that cannot move the cursor."""
    if os.environ.get("TERM", "dumb") == "dumb":
        return None
    if sys.stderr.isatty():
        return "/proc/self/fd/2"
    with suppress(OSError):
        if stat.S_ISREG(os.fstat(2).st_mode):
            return None
    process = os.getpid()
    for _ in range(levels):
        try:
            status = Path(f"/proc/{process}/stat").read_text()
            process = int(status.rpartition(")")[2].split()[1])  # the parent
            name = Path(f"/proc/{process}/comm").read_text().strip()
            if name.startswith(("mpiexec", "mpirun", "orterun", "prterun")):
                path = f"/proc/{process}/fd/2"
                return path if os.readlink(path).startswith(("/dev/pts/", "/dev/tty")) else None
        except (OSError, ValueError, IndexError):
            return None
    return None


#: Written to a terminal before an error: it removes what is below the cursor, such as a bar of progress.
CLEAR_BELOW = "\x1b[J"


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Limit NumPy, if it is loaded in this context, to one thread, unless this is the only process or the user set a
    number.

    The number of cores for each rank is known after the ranks have exchanged it; more threads are started then. Idle
    threads of OpenBLAS spin before they sleep: with 8 ranks on 2 cores that was a tenth of the time of all imports.
    """
    sets_variable = launcher_size() > 1 and not any(name in os.environ for name in THREAD_VARIABLES)
    if sets_variable:
        os.environ["OPENBLAS_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if sets_variable:
            del os.environ["OPENBLAS_NUM_THREADS"]
