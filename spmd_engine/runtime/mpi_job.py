"""Start a job of MPI ranks, and end it so that neither processes nor shared memory stay behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Self

from spmd_engine.runtime.join import files_in_shared_memory, remove_unused
from spmd_engine.runtime.launchers import RANK_VARIABLES

LAUNCHER_VARIABLES = ("PMI_", "PMIX_", "PRTE_", "HYDI_", "MPI_LOCAL", "OMPI_COMM_WORLD_")


@cache
def find_mpiexec() -> tuple[str, ...] | None:
    """The launcher's command: this environment's, else the first on PATH, else None."""
    path = shutil.which("mpiexec", path=Path(sys.executable).parent) or shutil.which("mpiexec")
    if path is None:
        return None
    return (path, "--oversubscribe") if is_open_mpi(path) else (path,)


@cache
def is_open_mpi(path: str) -> bool:
    """Whether this mpiexec is Open MPI's, which takes other options than MPICH's."""
    version = subprocess.run([path, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return any(name in version.stdout for name in ("Open MPI", "OpenRTE", "PRRTE"))


def clean_environment() -> dict[str, str]:
    """This process's environment without a launcher's variables: a process that initialised MPI has some,
    and a new job would take them for its own. Settings (..._MCA_...) stay."""
    return {
        name: value for name, value in os.environ.items() if "_MCA_" in name or not name.startswith(LAUNCHER_VARIABLES)
    }


class MPIJob:
    """A command with its launcher, as in ``mpiexec -n 4 python x.py``; always call ``stop()``, or use ``with``.

    ``popen`` are further arguments of ``subprocess.Popen``. Processes and shared memory are those of this host: the
    launcher ends ranks on other hosts.
    """

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str] | None = None, **popen: Any) -> None:
        # The launcher puts ranks into sessions of their own, out of reach of killpg: every process of the
        # job, orphan or not, is known by this variable in its environment.
        self._mark = f"SPMD_JOB_{uuid.uuid4().hex}"
        self._shared_memory = files_in_shared_memory()
        may_be_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        self.process = subprocess.Popen(
            list(command),
            env={**clean_environment(), **may_be_root, **(env or {}), self._mark: ""},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            **popen,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def processes(self) -> list[int]:
        """Process numbers of the job on this host, including the launcher and orphans."""
        return [pid for pid, _ in _find_processes(self._mark)]

    def ranks(self) -> list[int]:
        """Process numbers of the ranks on this host, in no order."""
        marked, variables = _find_processes(self._mark), [f"{name}=".encode() for name in RANK_VARIABLES]
        return [pid for pid, environment in marked if any(variable in environment for variable in variables)]

    def signal(self, number: int, anyhow: bool = True) -> bool:
        """Send a signal to a rank on this host that has a handler for it, since Open MPI's launcher forwards none.

        While Python starts, no rank has one; then ``anyhow`` sends it to the launcher. Returns whether it was sent.
        """
        receivers = [rank for rank in self.ranks() if _handles(rank, number)] + [self.process.pid] * anyhow
        with suppress(ProcessLookupError):
            for pid in receivers[:1]:
                os.kill(pid, number)
        return bool(receivers)

    def stop(self, patience: float = 5.0) -> list[int]:
        """End every process of the job, by SIGTERM first, and remove the shared memory that it left.

        Returns the processes that are alive after ``patience`` seconds.
        """
        with suppress(subprocess.TimeoutExpired):
            self.process.terminate()
            self.process.wait(2)
        deadline = time.monotonic() + patience
        while (alive := self.processes()) and time.monotonic() < deadline:
            for pid in alive:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        self.process.wait()
        remove_unused(files_in_shared_memory() - self._shared_memory)  # another job may have started meanwhile
        return alive


def _find_processes(variable: str) -> list[tuple[int, bytes]]:
    """Processes with this variable in their environment, and that environment."""
    processes = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # gone meanwhile, or another user's
            environment = (folder / "environ").read_bytes()
            if f"{variable}=".encode() in environment:
                processes.append((int(folder.name), environment))
    return processes


def _handles(process: int, number: int) -> bool:
    with suppress(OSError, StopIteration):
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
        caught = int(next(line for line in lines if line.startswith("SigCgt:")).split()[1], 16)
        return bool(caught >> (number - 1) & 1)
    return False
