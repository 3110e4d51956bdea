"""Trains a GPT of a billion parameters: three steps on eight ranks with ZeRO-3, compared with the prediction.

    mpiexec -n 8 python scripts/train_billion.py              # 80 blocks of width 1,024; about 20 GiB of memory in all
    mpiexec -n 2 python scripts/train_billion.py --blocks 4   # the same, smaller

Each rank's memory is its proportional set size: the kernel divides shared pages among ranks. It is compared with the
predicted bytes of the rank's arrays plus its memory before the model was built.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from spmd_engine import Mesh
from spmd_engine.cli.bench.train import held_bytes
from spmd_engine.comm.world import world
from spmd_engine.engine import AdamW, LayeredEngine
from spmd_engine.engine.build import composed_layout
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.models import GPTSize, gpt
from spmd_engine.planning import analyze
from spmd_engine.planning.dry_run.analyze import synthetic_batch
from spmd_engine.training import Trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=80)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    model = gpt(GPTSize(arguments.blocks, arguments.width, arguments.width // 64, context=128), "gpt-1b")
    composition = ParallelConfig(zero=3, recompute="block")
    with Mesh(data=world().size) as mesh:
        say = print if mesh.rank == 0 else (lambda *_, **__: None)
        axes, batch_size = dict(mesh.axes), mesh.size
        if mesh.rank == 0:
            predicted = analyze(model, axes, composition, batch_size=batch_size)
            peak = predicted.peak_bytes_by_rank()
            say(f"{model.parameter_count:,} parameters on {mesh.size} ranks")
            say(
                f"predicted: {max(peak) / 2**30:.2f} GiB of arrays per rank, {sum(peak) / 2**30:.2f} GiB in all;",
                end=" ",
            )
            say(f"{predicted.bytes_sent:,} bytes sent in a step", flush=True)
        mesh.barrier()
        base = held_bytes()
        layout = composed_layout(model, mesh, composition)
        engine = LayeredEngine(model, mesh, layout, **composition.how_on(mesh.axes))
        batch = synthetic_batch(model, engine, batch_size, 1, None, engine.dtype, real=True)
        trainer = Trainer(engine, AdamW(), lambda step: batch, lambda step: 1e-4, step_metrics=False)
        for step in range(arguments.steps):
            mesh.ledger.clear()
            began = time.perf_counter()
            trainer.step()
            seconds = time.perf_counter() - began
            sent = sum(entry.sent for entry in mesh.ledger.entries.values())
            used = mesh.all_gather(np.array([[sent, base, held_bytes()]], np.int64))
            say(f"step {step + 1}: {seconds:.1f} s, {int(used[:, 0].sum()):,} bytes sent, ", end="")
            before, now = (used[:, column].sum() / 2**30 for column in (1, 2))
            say(f"{now:.2f} GiB in all ({before:.2f} before the model)", flush=True)


if __name__ == "__main__":
    main()
