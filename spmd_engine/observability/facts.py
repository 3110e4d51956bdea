"""What ``doctor`` observes: of each rank by itself, and of all ranks together by small collectives."""

from __future__ import annotations

import fcntl
import os
import resource
import secrets
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Any

import numpy as np
from threadpoolctl import threadpool_info, threadpool_limits

from spmd_engine.arrays.backend import Array, Backend, get_backend
from spmd_engine.arrays.numba.functions import compiled_loops, loops_are_there
from spmd_engine.comm import Mesh
from spmd_engine.comm.agreement.rank_zero import gather_json, text_from_rank_zero
from spmd_engine.comm.device_transport import choose_transport
from spmd_engine.comm.shared_memory.arena import memory_here
from spmd_engine.comm.shared_memory.cores import quota_here
from spmd_engine.foreign import reason
from spmd_engine.planning.machine.measure import LARGE, measure_pair, turns_of
from spmd_engine.runtime import launchers
from spmd_engine.runtime.environment import environment
from spmd_engine.runtime.mpi_job import find_mpiexec

#: Optional packages, with the extra that installs them and what they are for.
EXTRAS = {
    "numba": ("fast", "compiled loops, which speed up most steps"),
    "cupy": ("cuda13", "training on GPUs"),
    "scipy": ("planning", "the exact search of 'plan'"),
    "tokenizers": ("hf", "tokenizers of published models"),
    "jinja2": ("hf", "chat templates"),
    "pyarrow": ("data", "Parquet tables, and files compressed by zstd"),
    "PIL": ("images", "folders of images, and pictures as PNG"),
}
SHARED_MEMORY = Path("/dev/shm")
FABRICS = Path("/sys/class/infiniband"), Path("/sys/class/cxi")  #: devices of networks that move data without TCP
WIDTH, PRODUCTS = 384, 24  #: width and number of the matrix products that compare the speeds of ranks
DTYPES = ("float16", "float32", "float64", "uint8", "int64")
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
SIZES = (1, 1 << 12)  #: elements of a rank's part of the arrays in collectives
TIMED = (8, 1 << 20)  #: bytes of the arrays of timed collectives
MOST_PAIRS = 28  #: pairs whose links are measured: all pairs of 8 ranks
FILE = 1 << 22  #: bytes of the file that is written
LIMITS = {
    "files": resource.RLIMIT_NOFILE,
    "address space": resource.RLIMIT_AS,
    "locked memory": resource.RLIMIT_MEMLOCK,
}


def facts_of_rank(folder: Path) -> dict[str, Any]:
    """Facts about this process, by name; what cannot be observed is a text that begins with "error: "."""
    observers: dict[str, Callable[[], Any]] = {
        "environment": environment,
        "launcher": launchers.launcher_name,
        "launcher_rank": launchers.launcher_rank,
        "launcher_size": launchers.launcher_size,
        "allocation": launchers.allocation,
        "mpiexec": find_mpiexec,
        "mpi": _mpi,
        "fabrics": lambda: sorted(device.name for folder in FABRICS if folder.is_dir() for device in folder.iterdir()),
        "cores": lambda: sorted(os.sched_getaffinity(0)),
        "launcher_cores": lambda: sorted(os.sched_getaffinity(os.getppid())),
        "quota": lambda: min(quota_here()[1], float(os.cpu_count() or 1)),
        "threads": lambda: max((pool["num_threads"] for pool in _blas_pools()), default=1),
        "thread_variables": lambda: {n: os.environ[n] for n in launchers.THREAD_VARIABLES if n in os.environ},
        "blas": lambda: sorted({f"{pool['internal_api']} {pool['version']}" for pool in _blas_pools()}),
        "simd": _simd,
        "shared_memory": lambda: _room(SHARED_MEMORY),
        "limits": lambda: {name: resource.getrlimit(number)[0] for name, number in LIMITS.items()},
        "package": package_digest,
        "compiled_loops": _compiled_loops,
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

    facts: dict[str, Any] = {"library": " ".join(MPI.Get_library_version().split("\n")[0].strip("\0").split())}
    if MPI.Is_initialized():  # else MPICH ends the process
        levels = {MPI.THREAD_SINGLE: "single", MPI.THREAD_FUNNELED: "funneled", MPI.THREAD_SERIALIZED: "serialized"}
        facts |= {"size": MPI.COMM_WORLD.size, "threads": levels.get(MPI.Query_thread(), "multiple")}
    return facts


def _simd() -> list[str]:
    """The widest vector instructions of the processor."""
    flags = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), "")
    return [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_tile") if f" {name} " in f"{flags} "]


def _compiled_loops() -> dict[str, bool]:
    """Whether compiled loops can be loaded, which compiles them if this machine has not yet, and cached on disk."""
    if not loops_are_there():
        return {"loaded": False, "cached": True}
    from spmd_engine.arrays.numba.object_code import cache_folder

    return {"loaded": compiled_loops("kernels") is not None, "cached": cache_folder() is not None}


def _room(folder: Path) -> dict[str, int]:
    state = os.statvfs(folder)
    return {"bytes": state.f_blocks * state.f_frsize, "free": state.f_bavail * state.f_frsize}


def package_digest() -> str:
    """The SHA-256 of all files of this package."""
    root, digest = Path(__file__).parents[1], sha256()
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


def _write_speed(folder: Path) -> dict[str, Any]:
    """Seconds to write, sync and rename a file in this folder; whether it can be locked; free bytes."""
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
            renamed = perf_counter()
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                locks = True
            except OSError:
                locks = False
        if second.stat().st_size != FILE or first.exists():
            raise OSError("a rename did not replace the file")
        return {"write": written - began, "rename": renamed - written, "locks": locks, "free": _room(folder)["free"]}


# --- of all ranks together


def facts_of_ranks(mesh: Mesh, folder: Path, gpus: bool) -> dict[str, Any]:
    """Facts that take communication. ``folder``: of runs; ``gpus``: all have one. Collective; equal on all ranks."""
    group = mesh.group()
    neighbours = group.connections.neighbours
    right, seconds = {}, {}
    for operation in OPERATIONS:
        for dtype in DTYPES:
            for size in SIZES:
                call, expected = _collective(mesh, operation, dtype, size)
                right[f"{operation} {dtype} {size}"] = np.array_equal(np.asarray(call()), expected)
        for size in TIMED:
            call, _ = _collective(mesh, operation, "float32", max(1, size // 4 // mesh.size))
            seconds[f"{operation} {size}"] = min(turns_of(call, group.barrier))
    group.barrier()
    clock = datetime.now(UTC).timestamp()
    facts = {
        "clock": clock,
        "speed": _product_speed(group.barrier),
        "right": right,
        "seconds": seconds,
        "memory": neighbours is not None,
        "reads": neighbours is not None and neighbours.cross_memory is not None,
        "crowded": mesh.comm.spin_tests == 0,
        "sees_folder": _sees(mesh, folder),
        "gpu": _gpu_sum(mesh, get_backend("cuda", *mesh.process_on_node)) if gpus else {},
    }
    before = _sent_bytes()
    links = {f"{a} {b}": measure_pair(mesh, a, b) for a, b in _pairs(mesh.size)}
    sent = {device: count - before.get(device, 0) for device, count in _sent_bytes().items()}
    device = max(sent, key=lambda name: sent[name], default="")
    facts["network"] = device if sent.get(device, 0) > LARGE else ""
    return {"nodes": list(mesh.nodes_by_rank), "links": links, "ranks": gather_json(group, facts, "doctor")}


def _gpu_sum(mesh: Mesh, backend: Backend) -> dict[str, Any]:
    """An all_reduce of arrays on the ranks' GPUs: whether it is right, its seconds, and how they travel. Collective."""
    group, x = mesh.group(), backend.asarray(np.ones(TIMED[-1] // 4, np.float32))
    notices = choose_transport(group, backend)

    def call() -> Array:
        total = group.all_reduce(x)
        backend.synchronize()
        return total

    right = bool((backend.to_host(call()) == mesh.size).all())
    return {"right": right, "seconds": min(turns_of(call, group.barrier)), "path": "; ".join(notices)}


def _sees(mesh: Mesh, folder: Path) -> bool:
    """Whether a file that rank 0 makes in the folder exists on this rank. Collective."""
    path = folder / f".doctor-{text_from_rank_zero(mesh.group(), partial(secrets.token_hex, 8))}"
    with suppress(OSError):  # rank 0 cannot write there, which is another finding
        if mesh.rank == 0:
            path.touch()
    mesh.barrier()
    sees = os.path.exists(path)
    mesh.barrier()
    if mesh.rank == 0:
        path.unlink(missing_ok=True)
    return sees


def _sent_bytes() -> dict[str, int]:
    """The bytes that each network device of the system has sent; the fabrics' own transfers are not among them."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:] if Path("/proc/net/dev").exists() else []
    return {name.strip(): int(counts.split()[8]) for name, _, counts in (line.partition(":") for line in lines)}


def _pairs(ranks: int) -> Iterable[tuple[int, int]]:
    """All pairs of a few ranks; of many, each rank with its neighbour and with the one halfway around."""
    if ranks * (ranks - 1) // 2 <= MOST_PAIRS:
        return combinations(range(ranks), 2)
    return sorted({(min(a, b), max(a, b)) for a in range(ranks) for b in ((a + 1) % ranks, (a + ranks // 2) % ranks)})


def _product_speed(barrier: Callable[[], None]) -> tuple[float, float]:
    """FLOP/s of matrix products on one thread while all ranks compute: by the clock, and by processor time."""
    a = np.ones((WIDTH, WIDTH), np.float32)
    out = np.empty_like(a)
    turns = []
    with threadpool_limits(1, "blas"):
        np.matmul(a, a, out=out)
        for _ in range(5):
            barrier()
            began = perf_counter(), process_time()
            for _ in range(PRODUCTS):
                np.matmul(a, a, out=out)
            turns.append((perf_counter() - began[0], process_time() - began[1]))
    operations = 2 * WIDTH**3 * PRODUCTS
    elapsed, processor = (median(times) for times in zip(*turns, strict=True))
    return operations / elapsed, operations / processor


def _collective(mesh: Mesh, operation: str, dtype: str, size: int) -> tuple[Callable[[], Any], np.ndarray]:
    """A call of a collective, and its right result. ``size``: elements of a rank's part."""
    group, ranks, rank = mesh.group(), mesh.size, mesh.rank
    x = np.arange(size * ranks) % 7  # small, so that sums of all dtypes are exact
    own = slice(rank * size, (rank + 1) * size)
    offsets = np.repeat(np.arange(ranks) % 7, size)  # what rank r adds to x
    total = x * ranks + sum(r % 7 for r in range(ranks))
    data = (x + rank % 7).astype(dtype)
    calls: dict[str, tuple[Callable[[], Any], Any]] = {
        "all_reduce": (lambda: group.all_reduce(data), total),
        "all_gather": (lambda: group.all_gather(data[:size]), np.tile(x[:size], ranks) + offsets),
        "reduce_scatter": (lambda: group.reduce_scatter(data), total[own]),
        "all_to_all": (lambda: group.all_to_all(data), np.tile(x[own], ranks) + offsets),
        "broadcast": (lambda: group.broadcast(data if rank == 0 else None), x),
    }
    call, expected = calls[operation]
    return call, expected.astype(dtype)
