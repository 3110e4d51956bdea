"""Times saving and loading of a model with its optimizer, against raw disk writes and against reading and hashing.

    mpiexec -n 8 python benchmarks/bench_checkpoints.py --model gpt2 --mesh pipe=2,data=2,model=2

Saves alternate with ``dd``, which writes as many bytes from one process with fsync; with all ranks writing their shares
of the bytes in the same way; and with all ranks also hashing them. Loads alternate with all ranks reading and hashing
the bytes once. Both read from the disk (the files are dropped from the page cache first), then from the page cache.
Each line has the time until all ranks are done, and the CPU seconds of all ranks.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time

import numpy as np

from spmd_engine import Mesh
from spmd_engine.axes import parse_axes
from spmd_engine.checkpoints import CheckpointFolder, load_checkpoint, save_checkpoint
from spmd_engine.comm.agreement.rank_zero import text_from_rank_zero
from spmd_engine.comm.group import Group
from spmd_engine.engine import AdamW, LayeredEngine
from spmd_engine.engine.state.assignment import ZeroConfig
from spmd_engine.models.names import build_model

AT_ONCE = 4 << 20  # bytes
NAMES = ("save", "dd", "write and fsync", "write, hash, fsync", "load", "read and hash", "load, cached")
NAMES += ("read and hash, cached",)
COMPARED = ((0, 1), (0, 2), (0, 3), (4, 5), (6, 7))


def timed(world: Group, do: Callable[[], object]) -> tuple[float, float]:
    """Seconds until all ranks are done, and CPU seconds of all ranks."""
    world.barrier()
    begun = perf_counter(), process_time()
    do()
    mine = process_time() - begun[1]
    world.barrier()
    return perf_counter() - begun[0], float(world.all_reduce(np.array(mine)))


def write(path: Path, size: int, *, hashed: bool) -> None:
    data, digest = os.urandom(AT_ONCE), hashlib.sha256()
    with path.open("wb", buffering=0) as file:
        for first in range(0, size, AT_ONCE):
            part = memoryview(data)[: min(AT_ONCE, size - first)]
            if hashed:
                digest.update(part)
            file.write(part)
        os.fsync(file.fileno())


def dd(world: Group, path: Path, size: int) -> None:
    """Write with dd on rank 0 alone; CPU seconds of other processes are not counted."""
    if world.rank == 0:
        blocks = -(-size // AT_ONCE)
        command = ["dd", "if=/dev/zero", f"of={path}", f"bs={AT_ONCE}", f"count={blocks}", "conv=fsync"]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


def drop(world: Group, paths: list[Path]) -> None:
    """Drop these files from the page cache."""
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    world.barrier()


def read_and_hash(paths: list[Path]) -> None:
    data = bytearray(AT_ONCE)
    for path in paths:
        digest = hashlib.sha256()
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(data):
                digest.update(memoryview(data)[:count])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="gpt-mini")
    parser.add_argument("--mesh", default="", help="for example pipe=2,data=2; default: all ranks on data")
    parser.add_argument("--zero", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    axes = parse_axes(options.mesh) if options.mesh else {}
    with Mesh(**axes) as mesh:
        world = mesh.group()
        engine, optimizer = LayeredEngine(build_model(options.model), mesh, storage=ZeroConfig(options.zero)), AdamW()
        optimizer.prepare(engine)
        folder = Path(text_from_rank_zero(world, lambda: tempfile.mkdtemp(dir=".", prefix="bench-checkpoints-")))
        plain, complete = folder / f"plain-{world.rank}", folder / "plain"
        rounds = []
        for step in range(options.rounds + 1):
            times = [timed(world, lambda: save_checkpoint(folder, engine, optimizer, step=step, keep=1))]  # noqa: B023
            mine = list(CheckpointFolder(folder).newest().glob(f"*-{world.rank:05d}.safetensors"))
            size = sum(path.stat().st_size for path in mine)
            total = int(world.all_reduce(np.array(size)))
            times.append(timed(world, lambda: dd(world, complete, total)))  # noqa: B023
            times += [timed(world, lambda: write(plain, size, hashed=hashed)) for hashed in (False, True)]  # noqa: B023
            for is_cached in (False, True):
                for do in (lambda: load_checkpoint(folder, engine, optimizer), lambda: read_and_hash(mine)):  # noqa: B023
                    if not is_cached:
                        drop(world, mine)
                    times.append(timed(world, do))
            rounds.append(times)
        world.barrier()
        if world.rank:
            return
        shutil.rmtree(folder)
    measured = np.array(rounds[1:])  # [round, operation, seconds or CPU seconds]
    print(f"{options.model} with AdamW, {total / 1e6:.0f} MB, {world.size} ranks, mesh {axes or 'data'}")
    for index, name in enumerate(NAMES):
        wall, cpu = (statistics.median(measured[:, index, kind]) for kind in (0, 1))
        print(f"  {name:21} {wall * 1e3:8.0f} ms, CPU {cpu * 1e3:8.0f} ms")
    for one, other in COMPARED:
        ratios = [measured[:, one, kind] / measured[:, other, kind] for kind in (0, 1)]
        texts = [f"{statistics.median(values):.2f}x ({values.min():.2f}-{values.max():.2f})" for values in ratios]
        print(f"  {NAMES[one]} / {NAMES[other]}: {', CPU '.join(texts)}")


if __name__ == "__main__":
    main()
