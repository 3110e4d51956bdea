"""What ``doctor`` observes: of each rank by itself, and of all ranks together by small collectives."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Iterable
from functools import partial
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
from threadpoolctl import threadpool_info, threadpool_limits

from spmd_engine.arrays.numba.functions import loops_are_there
from spmd_engine.comm.mesh import Mesh
from spmd_engine.comm.shared_memory.arena import memory_here
from spmd_engine.comm.shared_memory.cores import quota_here
from spmd_engine.foreign import reason
from spmd_engine.planning.machine.measure import measure_pair
from spmd_engine.runtime.environment import environment
from spmd_engine.runtime.launchers import RANK_VARIABLES, THREAD_VARIABLES, launcher_rank, launcher_size

#: Optional packages, with the extra that installs them and what they are for.
EXTRAS = {
    "numba": ("fast", "compiled loops, which speed up most steps"),
    "cupy": ("cuda", "training on GPUs"),
    "scipy": ("planning", "the exact search of 'plan'"),
    "tokenizers": ("hf", "tokenizers of published models"),
    "jinja2": ("hf", "chat templates"),
    "PIL": ("images", "folders of images, and pictures as PNG"),
}
SHARED_MEMORY = Path("/dev/shm")
WIDTH, PRODUCTS = 384, 24  #: of the matrix products that compare the speeds of ranks
DTYPES = ("float32", "float64", "int64")
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
SIZES = (1, 1 << 12)  #: elements of a rank's part of the arrays in collectives
MOST_PAIRS = 28  #: pairs whose links are measured: all pairs of 8 ranks
FILE = 1 << 22  #: bytes of the file that is written


def facts_of_rank(folder: Path) -> dict[str, Any]:
    """Facts about this process, by name; what cannot be observed is a text that begins with "error: "."""
    observers: dict[str, Callable[[], Any]] = {
        "environment": environment,
        "launched": lambda: [name for name in RANK_VARIABLES if name in os.environ],
        "launcher_rank": launcher_rank,
        "launcher_size": launcher_size,
        "allocation": lambda: int(os.environ.get("SLURM_NTASKS", "1")) if "SLURM_STEP_ID" not in os.environ else 1,
        "mpi": _mpi,
        "cores": lambda: sorted(os.sched_getaffinity(0)),
        "quota": lambda: min(quota_here()[1], float(os.cpu_count() or 1)),
        "threads": lambda: max((pool["num_threads"] for pool in _blas_pools()), default=1),
        "thread_variables": lambda: {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ},
        "blas": lambda: sorted({f"{pool['internal_api']} {pool['version']}" for pool in _blas_pools()}),
        "simd": _simd,
        "shared_memory": lambda: _room(SHARED_MEMORY),
        "files": lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "package": package_digest,
        "compiled_loops": _can_cache_loops,
        "memory": lambda: {
            "limit": memory_here(),
            "installed": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        },
        "extras": lambda: [name for name in EXTRAS if find_spec(name)],
        "gpus": _gpus,
        "folder": partial(_write_speed, folder),
    }
    return {name: _observe(observer) for name, observer in observers.items()}


def _observe(observer: Callable[[], Any]) -> Any:
    try:
        return observer()
    except Exception as error:
        return f"error: {reason(error)}"


def _blas_pools() -> list[dict[str, Any]]:
    return [pool for pool in threadpool_info() if pool["user_api"] == "blas"]


def _mpi() -> dict[str, Any]:
    """The MPI library in this process, if there is one."""
    if "mpi4py.MPI" not in sys.modules:
        return {}
    from mpi4py import MPI

    levels = {MPI.THREAD_SINGLE: "single", MPI.THREAD_FUNNELED: "funneled", MPI.THREAD_SERIALIZED: "serialized"}
    return {
        "library": " ".join(MPI.Get_library_version().split("\n")[0].strip("\0").split()),
        "size": MPI.COMM_WORLD.size,
        "threads": levels.get(MPI.Query_thread(), "multiple"),
    }


def _simd() -> list[str]:
    """The widest vector instructions of the processor."""
    flags = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), "")
    return [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_tile") if f" {name} " in f"{flags} "]


def _can_cache_loops() -> bool:
    """Whether compiled loops, if Numba is there to compile them, can be cached on disk."""
    if not loops_are_there():
        return True
    from spmd_engine.arrays.numba.object_code import cache_folder

    return cache_folder() is not None


def _room(folder: Path) -> dict[str, int]:
    found = os.statvfs(folder)
    return {"bytes": found.f_blocks * found.f_frsize, "free": found.f_bavail * found.f_frsize}


def package_digest() -> str:
    """The SHA-256 of all files of this package."""
    root, digest = Path(__file__).parents[2], sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()


def _gpus() -> list[str]:
    """The names of the GPUs that CuPy can use; empty without CuPy."""
    if find_spec("cupy") is None:
        return []
    cupy = import_module("cupy")
    return [
        cupy.cuda.runtime.getDeviceProperties(number)["name"].decode()
        for number in range(cupy.cuda.runtime.getDeviceCount())
    ]


def _write_speed(folder: Path) -> dict[str, float]:
    """Seconds to write, sync and rename a file in this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder, prefix=".doctor-") as temporary:
        first, second = Path(temporary, "first"), Path(temporary, "second")
        second.write_bytes(b"before")
        began = perf_counter()
        with open(first, "wb") as file:
            file.write(bytes(FILE))
            file.flush()
            os.fsync(file.fileno())
        written = perf_counter()
        os.replace(first, second)
        if second.stat().st_size != FILE or first.exists():
            raise OSError("a rename did not replace the file")
        return {"bytes": FILE, "write": written - began, "rename": perf_counter() - written}


# --- of all ranks together


def facts_of_ranks(mesh: Mesh) -> dict[str, Any]:
    """Facts that take communication. Collective; equal on all ranks."""
    group = mesh.group()
    speeds = mesh.all_gather(np.array([_product_speed(group.barrier)]), label="doctor").tolist()
    collectives = {
        f"{operation} {dtype} {size}": _is_right(mesh, operation, dtype, size)
        for operation in OPERATIONS
        for dtype in DTYPES
        for size in SIZES
    }
    seconds = {str(size): _all_reduce_seconds(mesh, size) for size in (8, 1 << 20)}
    links = {f"{a} {b}": measure_pair(mesh, a, b) for a, b in _pairs(mesh.size)}
    comm = mesh.comm
    return {
        "nodes": list(mesh.nodes_by_rank),
        "speeds": speeds,
        "collectives": collectives,
        "all_reduce": seconds,
        "links": links,
        "shares_memory": bool(group.all_reduce(np.array(int(comm.neighbours is not None)), "min")),
        "crowded": bool(group.all_reduce(np.array(int(comm.spin_tests == 0)), "max")),
    }


def _pairs(ranks: int) -> Iterable[tuple[int, int]]:
    """All pairs of a few ranks; of many, each rank with its neighbour and with the one halfway around."""
    if ranks * (ranks - 1) // 2 <= MOST_PAIRS:
        return combinations(range(ranks), 2)
    return sorted({(min(a, b), max(a, b)) for a in range(ranks) for b in ((a + 1) % ranks, (a + ranks // 2) % ranks)})


def _product_speed(barrier: Callable[[], None]) -> float:
    """FLOP/s of matrix products on one thread, while all ranks compute."""
    a = np.ones((WIDTH, WIDTH), np.float32)
    out = np.empty_like(a)
    turns = []
    with threadpool_limits(1, "blas"):
        np.matmul(a, a, out=out)
        for _ in range(5):
            barrier()
            began = perf_counter()
            for _ in range(PRODUCTS):
                np.matmul(a, a, out=out)
            turns.append(perf_counter() - began)
    return 2 * WIDTH**3 * PRODUCTS / median(turns)


def _is_right(mesh: Mesh, operation: str, dtype: str, size: int) -> bool:
    """Whether all ranks get the right result of a collective. Collective."""
    group, ranks, rank = mesh.group(), mesh.size, mesh.rank
    x = np.arange(size * ranks) % 97
    own = slice(rank * size, (rank + 1) * size)
    offsets = np.repeat(np.arange(ranks), size)  # what rank r adds to x
    total = x * ranks + sum(range(ranks))
    data = (x + rank).astype(dtype)
    calls: dict[str, tuple[Callable[[], Any], Any]] = {
        "all_reduce": (lambda: group.all_reduce(data), total),
        "all_gather": (lambda: group.all_gather(data[:size]), np.tile(x[:size], ranks) + offsets),
        "reduce_scatter": (lambda: group.reduce_scatter(data), total[own]),
        "all_to_all": (lambda: group.all_to_all(data), np.tile(x[own], ranks) + offsets),
        "broadcast": (lambda: group.broadcast(data if rank == 0 else None), x),
    }
    call, expected = calls[operation]
    return bool(group.all_reduce(np.array(int(np.array_equal(np.asarray(call()), expected))), "min"))


def _all_reduce_seconds(mesh: Mesh, size: int) -> float:
    """Seconds of an all_reduce of ``size`` bytes, on the slowest rank, the quickest of several. Collective."""
    group, x, turns = mesh.group(), np.ones(size // 4, np.float32), []
    for _ in range(5):
        group.barrier()
        began = perf_counter()
        group.all_reduce(x)
        turns.append(perf_counter() - began)
    return float(group.all_reduce(np.array(min(turns)), "max"))
