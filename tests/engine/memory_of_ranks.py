"""Prints what the ranks of a mesh hold after some steps, and what they should: the program of ``test_memory``."""

import json
import sys

import numpy as np

from spmd_engine import Mesh
from spmd_engine.cli.bench.train import held_bytes
from spmd_engine.cli.show.memory import bytes_per_rank
from spmd_engine.engine import AdamW, LayeredEngine, ZeroConfig
from spmd_engine.engine.batch import batch_of
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.models import deep_mlp
from spmd_engine.training import Trainer

WIDTH, LAYERS, SAMPLES = 1024, 16, 8  # parameters by the megabyte, and hardly any activations


def main():
    zero = int(sys.argv[1])
    x = np.random.default_rng(0).standard_normal((SAMPLES, WIDTH)).astype(np.float32)
    np.matmul(x, np.ones((WIDTH, WIDTH), np.float32))  # what BLAS allocates for itself
    with Mesh() as mesh:
        model = deep_mlp(LAYERS, WIDTH)
        mesh.barrier()
        before = held_bytes()
        mesh.barrier()
        engine = LayeredEngine(model, mesh, storage=ZeroConfig(zero))
        batch = batch_of(x, x, engine)
        trainer = Trainer(engine, AdamW(), lambda step: batch, lambda step: 1e-3)
        for _ in range(2):
            trainer.step()
        mesh.barrier()
        held = mesh.all_gather(np.array([held_bytes() - before]))
        expected = bytes_per_rank(model, mesh.axes, ParallelConfig(zero=zero))
    if mesh.rank == 0:
        print(json.dumps({"held": held.tolist(), "expected": [sum(n for _, n in rank) for rank in expected]}))


if __name__ == "__main__":
    main()
