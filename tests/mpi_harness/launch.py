"""Start `mpiexec`, and end it so that neither processes nor shared memory stay behind."""

import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from functools import cache
from pathlib import Path

SHARED_MEMORY = ("mpich_shm_*", "sm_segment.*")  # what MPICH and Open MPI leave in /dev/shm when killed
LAUNCHER_VARIABLES = ("PMI_", "PMIX_", "PRTE_", "HYDI_", "MPI_LOCAL", "OMPI_COMM_WORLD_")


def environment_rank():
    """This process's rank if mpiexec or srun started it, else None. Asking MPI would initialise it."""
    for name in ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"):  # SLURM_PROCID is set in batch scripts too
        if name in os.environ:
            return int(os.environ[name])
    return None


def clean_environment():
    """This process's environment without a launcher's variables: a process that initialised MPI has some,
    and a new job would take them for its own. Settings (..._MCA_...) stay."""
    return {
        name: value
        for name, value in os.environ.items()
        if "_MCA_" in name or not name.startswith(LAUNCHER_VARIABLES)
    }


@cache
def mpiexec():
    """The launcher's command: this environment's, else the first on PATH, else None."""
    path = shutil.which("mpiexec", path=Path(sys.executable).parent) or shutil.which("mpiexec")
    if path is None:
        return None
    version = subprocess.run([path, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    is_open_mpi = any(name in version.stdout for name in ("Open MPI", "OpenRTE", "PRRTE"))
    return (path, "--oversubscribe") if is_open_mpi else (path,)


class Job:
    """One `mpiexec -n RANKS python ARGUMENTS`; `stop()` it, or use `with`, however it ended.

    With 0 for RANKS it is one process, and no MPI.
    """

    def __init__(self, ranks, arguments, *, env=None, **popen):
        if ranks and mpiexec() is None:
            raise FileNotFoundError("no mpiexec: pip install -e '.[mpich,test]', or load the cluster's MPI")
        # The launcher puts ranks into sessions of their own, out of reach of killpg: every process of the
        # job, orphan or not, is known by this variable in its environment.
        self._mark = f"SPMD_JOB_{uuid.uuid4().hex}"
        self._shared_memory = _shared_memory()
        may_be_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        launcher = [*mpiexec(), "-n", str(ranks)] if ranks else []
        self.process = subprocess.Popen(
            [*launcher, sys.executable, *arguments],
            env={**clean_environment(), **may_be_root, **(env or {}), self._mark: ""},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            **popen,
        )

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.stop()

    def stop(self):
        """End every process of the job, politely at first, and remove the shared memory it left."""
        with suppress(subprocess.TimeoutExpired):
            self.process.terminate()
            self.process.wait(2)
        deadline = time.monotonic() + 5
        while (left := _processes_with(self._mark)) and time.monotonic() < deadline:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        self.process.wait()
        for path in _shared_memory() - self._shared_memory:
            if not _in_use(path):  # another job of this user may have started meanwhile
                path.unlink(missing_ok=True)


def _processes_with(variable):
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # gone meanwhile, or another user's
            if f"{variable}=".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def _shared_memory():
    files = set()
    for pattern in SHARED_MEMORY:
        for path in Path("/dev/shm").glob(pattern):
            with suppress(OSError):
                if path.stat().st_uid == os.getuid():
                    files.add(path)
    return files


def _in_use(path):
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            if str(path).encode() in maps.read_bytes():
                return True
    return False
