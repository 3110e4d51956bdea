"""Peak memory of plans per rank, predicted and measured: NumPy arrays (tracemalloc) and the ranks' shared memory.

    python benchmarks/peak_memory.py                      # all plans, launched one after the other
    python benchmarks/peak_memory.py zero-3 tensor        # some of them
    python benchmarks/peak_memory.py --resident           # resident memory instead

The measured peak is that of the third step, when all persistent arrays exist. With --resident it is the rank's resident
memory: anonymous pages, its share of file pages, and, of the node's shared memory, its own arena. Freed memory stays
resident (see ``arrays.memory``), so this is the maximum since the start. A base is subtracted: the resident memory
after a step of a small model on the same mesh, minus the predicted bytes of that step's arrays.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np

from spmd_engine import Mesh
from spmd_engine.arrays.memory import address_of
from spmd_engine.axes import parse_axes
from spmd_engine.comm.shared_memory.arena import HEAD, Arena
from spmd_engine.engine import AdamW
from spmd_engine.engine.build import build_engine
from spmd_engine.engine.layered import LayeredEngine
from spmd_engine.engine.model_config import ModelConfig
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.planning import analyze
from spmd_engine.planning.dry_run.analyze import synthetic_batch
from spmd_engine.training import Trainer

PLANS = {  # model, mesh, composition, batch, micro-batches
    "one-rank": ("gpt-mini", "data=1", {}, 8, 1),
    "data": ("gpt-mini", "data=2", {}, 8, 1),
    "zero-1": ("gpt-mini", "data=2", {"zero": 1}, 8, 1),
    "zero-2": ("gpt-mini", "data=2", {"zero": 2}, 8, 2),
    "zero-3": ("gpt-mini", "data=4", {"zero": 3}, 8, 1),
    "zero-3-recompute": ("gpt-mini", "data=4", {"zero": 3, "recompute": "block"}, 8, 1),
    "bfloat16": ("gpt-mini", "data=2", {"compress": "bfloat16"}, 8, 1),
    "tensor": ("gpt-mini", "model=2", {}, 8, 1),
    "tensor-sequence": ("gpt-mini", "model=2,data=2", {"sequence_parallel": True, "zero": 1}, 16, 2),
    "context": ("gpt-mini", "context=2", {}, 8, 1),
    "context-gather": ("gpt-mini", "context=2", {"context_method": "gather"}, 8, 1),
    "context-ulysses": ("gpt-mini", "context=2", {"context_method": "ulysses", "zero": 3}, 8, 1),
    "pipeline": ("gpt-mini", "pipe=2", {}, 8, 4),
    "pipeline-gpipe": ("gpt-mini", "pipe=2", {"schedule": "gpipe"}, 8, 4),
    "pipeline-zero-bubble": ("gpt-mini", "pipe=2,data=2", {"schedule": "zero-bubble", "zero": 1}, 16, 4),
    "pipeline-interleaved": ("gpt-mini", "pipe=2", {"schedule": "interleaved", "recompute": "attention"}, 8, 4),
    "three-axes": ("gpt-mini", "pipe=2,context=2,model=2", {"zero": 3, "recompute": "block"}, 8, 2),
    "mixture": ("gpt-moe-mini", "expert=2", {}, 8, 1),
    "mlp": ("mlp", "data=2", {"zero": 1}, 32768, 1),
    "resnet": ("resnet-nano", "data=2", {}, 2048, 1),
    "resnet-rows": ("resnet-nano", "rows=2", {}, 1024, 1),
}


#: A small model of the same kind, for the base.
SMALL = {"gpt-mini": "gpt-nano", "gpt-moe-mini": "gpt-moe-nano"}


class Peak:
    """The largest sum of NumPy's arrays and the arena since ``begin``."""

    def __init__(self, mesh: Mesh) -> None:
        neighbours = mesh.group().connections.neighbours
        self._arena = neighbours.own if neighbours else None
        self._allocate = Arena.allocate
        self.bytes = self._used = 0

        def allocate(arena, size):
            self.look()
            start = self._allocate(arena, size)
            self.look()
            return start

        Arena.allocate = allocate

    def begin(self) -> None:
        self.bytes, self._used = 0, 0
        tracemalloc.reset_peak()
        self.look()

    def look(self) -> None:
        """Update the peak since the last call; the arena counts with its size then or now, whichever is larger."""
        now = self._arena.size - HEAD - self._arena.free if self._arena else 0
        self.bytes = max(self.bytes, tracemalloc.get_traced_memory()[1] + max(now, self._used))
        self._used = now
        tracemalloc.reset_peak()


def mapped_bytes(engine: LayeredEngine) -> int:
    """Bytes of parameters and gradients in private mappings (``fresh_zeros``), which tracemalloc does not see."""
    arrays = [array for storage in engine.storages for array in (storage.whole_parameters, storage.whole_gradients)]
    return sum(array.nbytes for array in arrays if array is not None and isinstance(array.base, memoryview | mmap))


def python_bytes() -> int:
    """Traced bytes other than NumPy's arrays."""
    snapshot = tracemalloc.take_snapshot()
    numpy_domain = tracemalloc.DomainFilter(False, np.lib.tracemalloc_domain)
    return sum(trace.size for trace in snapshot.filter_traces([numpy_domain]).traces)


def resident_bytes(mesh: Mesh) -> int:
    """Resident bytes of this rank. Shared pages count once: its own arena, and its share of files."""
    fields = dict(line.split()[:2] for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    neighbours = mesh.group().connections.neighbours
    arena = address_of(np.frombuffer(neighbours.own.memory, np.uint8)) if neighbours else None
    arena_kib = next((kib for start, kib in mapped_kib() if start == arena), 0)
    return 1024 * (int(fields["Pss_Anon:"]) + int(fields["Pss_File:"]) + arena_kib)


def mapped_kib() -> Iterator[tuple[int, int]]:
    """The address of each mapping, and its resident KiB."""
    start = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            start = int(first.split("-")[0], 16)
        elif first == "Rss:":
            yield start, int(rest[0])


def use_blas_buffers(side: int = 2048) -> None:
    """Make BLAS touch all of its packing buffers by a large product, whose arrays are freed."""
    a, b, c = (np.frombuffer(mmap(-1, 4 * side**2), np.float32).reshape(side, side) for _ in range(3))
    np.matmul(a, b, out=c)


def steps_of(
    config: ModelConfig, mesh: Mesh, composition: ParallelConfig, batch_size: int, micro_batches: int
) -> Trainer:
    """A trainer that has executed two steps."""
    engine = build_engine(config, mesh, composition)
    batch = synthetic_batch(engine.model, engine, batch_size, micro_batches, None, dtype=engine.dtype, real=True)
    trainer = Trainer(engine, AdamW(), lambda step: batch, lambda step: 1e-3, step_metrics=False)
    trainer.step()
    trainer.step()
    mesh.barrier()
    return trainer


def measure(name: str, resident: bool) -> list[dict]:
    """The predicted and measured peak of each rank."""
    model, axes, options, batch_size, micro_batches = PLANS[name]
    composition, config = ParallelConfig(**options), ModelConfig(model)
    with Mesh(**parse_axes(axes)) as mesh:
        if resident:
            small, few = ModelConfig(SMALL.get(model, model)), micro_batches * mesh.size
            steps_of(small, mesh, composition, few, micro_batches).step()
            use_blas_buffers()
            base = resident_bytes(mesh) - predicted(small, axes, composition, few, micro_batches)[mesh.rank]
            steps_of(config, mesh, composition, batch_size, micro_batches).step()
            measured = resident_bytes(mesh) - base
        else:
            tracemalloc.start()
            peak = Peak(mesh)
            trainer = steps_of(config, mesh, composition, batch_size, micro_batches)
            peak.begin()
            trainer.step()
            peak.look()
            measured, base = peak.bytes - python_bytes() + mapped_bytes(trainer.engine), 0
        by_rank = mesh.all_gather(np.array([[measured, base]])).tolist()
    if mesh.rank:
        return []
    peaks = predicted(config, axes, composition, batch_size, micro_batches)
    return [
        {"rank": rank, "predicted": peak, "measured": measured_bytes, "base": base}
        for rank, (peak, (measured_bytes, base)) in enumerate(zip(peaks, by_rank, strict=True))
    ]


def predicted(
    config: ModelConfig, axes: str, composition: ParallelConfig, batch_size: int, micro_batches: int
) -> Sequence[int]:
    """The predicted peak of each rank."""
    sizes = {"batch_size": batch_size, "micro_batches": micro_batches}
    return analyze(config, parse_axes(axes), composition, every=True, **sizes).peak_bytes_by_rank()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("plans", nargs="*", metavar="PLAN", help=f"some of {', '.join(PLANS)}; default: all")
    parser.add_argument("--resident", action="store_true", help="resident memory above a base")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)  # runs as one of the ranks
    options = parser.parse_args()
    if unknown := {*options.plans} - {*PLANS}:
        parser.error(f"no such plan: {', '.join(unknown)}; choose of {', '.join(PLANS)}")
    if options.rank:
        results = measure(options.plans[0], options.resident)
        if results:
            print(json.dumps(results))
        return
    errors: list[tuple[float, float]] = []
    print(
        f"{'plan':<22} {'ranks':>5} {'predicted MB':>12} {'measured MB':>12} {'error':>7} {'base MB':>9} {'with it':>7}"
    )
    for name in options.plans or PLANS:
        ranks = prod(parse_axes(PLANS[name][1]).values())
        start = ["mpiexec", "-n", str(ranks)] if ranks > 1 else []
        command = [*start, sys.executable, __file__, name, "--rank", *["--resident"] * options.resident]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(f"{name:<22} failed: {done.stderr.strip().splitlines()[-1]}")
            continue
        errors += [told(name, row) for row in json.loads(done.stdout.splitlines()[-1])]
    errors_alone, errors_with_base = np.abs(errors).T
    print(f"largest error {errors_alone.max():.1%}, median {np.median(errors_alone):.1%}", end="")
    print(
        f"; with the base {errors_with_base.max():.1%}, {np.median(errors_with_base):.1%}" if options.resident else ""
    )


def told(name: str, row: Mapping[str, Any]) -> tuple[float, float]:
    """Print a rank; returns its errors, without the base and with it."""
    error = row["predicted"] / row["measured"] - 1
    error_with_base = (row["predicted"] + row["base"]) / (row["measured"] + row["base"]) - 1
    predicted_mb, measured_mb, base_mb = (row[key] / 1e6 for key in ("predicted", "measured", "base"))
    print(
        f"{name:<22} {row['rank']:>5} {predicted_mb:>12.2f} {measured_mb:>12.2f} {error:>+7.1%} {base_mb:>9.2f} "
        f"{error_with_base:>+7.1%}",
        flush=True,
    )
    return error, error_with_base


if __name__ == "__main__":
    main()
