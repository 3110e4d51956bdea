"""Peak memory of plans, foretold and measured, rank by rank: arrays of NumPy (tracemalloc) and of the ranks' arena.

    python scripts/peak_memory.py                      # all plans, launched one after the other
    mpiexec -n 4 python scripts/peak_memory.py PLAN    # one plan, measured; PLAN is one of those listed below

The measured peak is that of the third step, when everything that stays is there.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from math import prod
from mmap import mmap

import numpy as np

from spmd_engine import Mesh
from spmd_engine.axes import parse_axes
from spmd_engine.engine import AdamW
from spmd_engine.engine.composition import Composition, ModelConfig, build_engine
from spmd_engine.engine.layered import LayeredEngine
from spmd_engine.node.arena import HEAD, Arena
from spmd_engine.planning import analyze
from spmd_engine.planning.samples import foretold_batch
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


class Peak:
    """The most that NumPy's arrays and the arena have held together since ``begin``."""

    def __init__(self, mesh: Mesh) -> None:
        neighbours = mesh.comm.neighbours
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
        """What was held at the most since the last look, beside what the arena then had."""
        now = self._arena.size - HEAD - self._arena.free if self._arena else 0
        self.bytes = max(self.bytes, tracemalloc.get_traced_memory()[1] + max(now, self._used))
        self._used = now
        tracemalloc.reset_peak()


def mapped_bytes(engine: LayeredEngine) -> int:
    """Of parameters and gradients that a rank alone maps from the system (``fresh_zeros``), which nobody traces."""
    arrays = [each for storage in engine.storages for each in (storage.whole_parameters, storage.whole_gradients)]
    return sum(each.nbytes for each in arrays if each is not None and isinstance(each.base, memoryview | mmap))


def python_bytes() -> int:
    """What is traced beside NumPy's arrays."""
    snapshot = tracemalloc.take_snapshot()
    numpy_domain = tracemalloc.DomainFilter(False, np.lib.tracemalloc_domain)
    return sum(each.size for each in snapshot.filter_traces([numpy_domain]).traces)


def measure(name: str) -> list[dict]:
    """Each rank's peak, foretold and measured."""
    model, axes, options, batch_size, micro_batches = PLANS[name]
    composition, config = Composition(**options), ModelConfig(model)
    with Mesh(**parse_axes(axes)) as mesh:
        tracemalloc.start()
        peak = Peak(mesh)
        engine = build_engine(config, mesh, composition)
        batch = foretold_batch(engine.model, engine, batch_size, micro_batches, None, engine.dtype, real=True)
        trainer = Trainer(engine, AdamW(), lambda step: batch, lambda step: 1e-3, step_metrics=False)
        trainer.step()
        trainer.step()
        mesh.barrier()
        peak.begin()
        trainer.step()
        peak.look()
        measured = peak.bytes - python_bytes() + mapped_bytes(engine)
        everyone = mesh.all_gather(np.array([measured])).tolist()
    if mesh.rank:
        return []
    sizes = {"batch_size": batch_size, "micro_batches": micro_batches}
    foretold = analyze(config, parse_axes(axes), composition, every=True, **sizes)
    return [
        {"rank": rank, "foretold": foretold.peak_bytes_by_rank()[rank], "measured": each}
        for rank, each in enumerate(everyone)
    ]


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] != "--only":
        found = measure(sys.argv[1])
        if Mesh().rank == 0:
            print(json.dumps(found))
        return
    names = sys.argv[2:] or list(PLANS)
    errors = []
    print(f"{'plan':<22} {'ranks':>5} {'foretold MB':>12} {'measured MB':>12} {'error':>7}")
    for name in names:
        ranks = prod(parse_axes(PLANS[name][1]).values())
        start = ["mpiexec", "-n", str(ranks)] if ranks > 1 else []
        done = subprocess.run([*start, sys.executable, __file__, name], capture_output=True, text=True)
        if done.returncode:
            print(f"{name:<22} failed: {done.stderr.strip().splitlines()[-1]}")
            continue
        for each in json.loads(done.stdout.splitlines()[-1]):
            error = each["foretold"] / each["measured"] - 1
            errors.append(abs(error))
            print(
                f"{name:<22} {each['rank']:>5} {each['foretold'] / 1e6:>12.2f} {each['measured'] / 1e6:>12.2f} "
                f"{error:>+7.1%}",
                flush=True,
            )
    print(f"largest error {max(errors):.1%}, median {np.median(errors):.1%}")


if __name__ == "__main__":
    main()
