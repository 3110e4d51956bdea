"""What a process runs on: versions, host, processor, cores, threads."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from spmd_engine.runtime.launchers import launcher_size

PACKAGES = ("spmd_engine", "numpy", "mpi4py", "numba", "cupy", "safetensors")
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
#: Those that change how fast a run is.
VARIABLES = (*THREADS, "SPMD_FAST", "SPMD_FLASH_ATTENTION", "SPMD_CUDA_AWARE", "SPMD_ARENA_MIB")


def environment() -> dict[str, str]:
    """The environment of this process, by name. Nothing is imported for it."""
    facts = {"command": _command(), "host": platform.node(), "processor": processor()}
    facts["cores"] = f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}"
    facts |= {name: value for name, value in sorted(os.environ.items()) if name in VARIABLES}
    facts |= {"system": platform.platform(), "python": platform.python_version()}
    facts |= installed_versions(PACKAGES)
    if mpi := sys.modules.get("mpi4py.MPI"):
        facts["MPI library"] = " ".join(mpi.Get_library_version().split("\n")[0].strip("\0").split())
    return facts


def installed_versions(packages: Sequence[str]) -> dict[str, str]:
    """The versions of those of these packages that are installed, by the names of the folders of their metadata.

    (``importlib.metadata`` parses these files by the modules of e-mails, whose import takes longer than a step.)
    """
    found: dict[str, str] = {}
    for folder in sys.path:
        with suppress(OSError):
            for entry in os.listdir(folder or "."):
                name, _, version = entry.removesuffix(".dist-info").partition("-")
                if entry.endswith(".dist-info"):
                    found.setdefault(name.lower(), version)
    return {package: found[package] for package in packages if package in found}


def _command() -> str:
    """The command that starts this job again, on as many ranks."""
    program, *arguments = sys.argv
    program = ["-m", "spmd_engine"] if Path(program).name in ("__main__.py", "spmd-engine") else [program]
    ranks = ["mpiexec", "-n", str(launcher_size())] if launcher_size() > 1 else []
    return shlex.join([*ranks, "python", *program, *arguments])


def processor() -> str:
    """The processor's name; empty where the system has none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
