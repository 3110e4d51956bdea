"""Prints what the ranks of a mesh hold, and what they should: the program of ``test_measured_memory``.

After some steps with the stage of ZeRO that is given or, with ``run``, after a whole run, from the first evaluation to
the sample.
"""

import json
import sys
from resource import RUSAGE_SELF, getrusage
from tempfile import TemporaryDirectory

import numpy as np

from spmd_engine import Mesh
from spmd_engine.cli.bench.train import held_bytes
from spmd_engine.comm.agreement.rank_zero import text_from_rank_zero
from spmd_engine.engine import AdamW, LayeredEngine, ZeroConfig
from spmd_engine.engine.batch import batch_of
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.jobs.run_job import make_run
from spmd_engine.models import deep_mlp
from spmd_engine.observability.memory import bytes_per_rank
from spmd_engine.planning import analyze
from spmd_engine.training import Hook, TrainConfig, Trainer
from spmd_engine.training.workload import open_workload

WIDTH, LAYERS, SAMPLES = 1024, 16, 8  # parameters by the megabyte, and hardly any activations
SIZES, LENGTH = {"batch_size": 16, "micro_batches": 8}, 128  # of a run


def after_steps(mesh: Mesh, zero: int) -> tuple[int, list[int]]:
    """Bytes by which this rank grew, and those that each rank should hold."""
    x = np.random.default_rng(0).standard_normal((SAMPLES, WIDTH)).astype(np.float32)
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
    expected = bytes_per_rank(model, mesh.axes, ParallelConfig(zero=zero))
    return held_bytes() - before, [sum(n for _, n in rank) for rank in expected]


def most_bytes() -> int:
    """The most that this process has held, with mapped files."""
    return 1024 * getrusage(RUSAGE_SELF).ru_maxrss


def after_run(mesh: Mesh, model: str) -> tuple[int, int, np.ndarray]:
    """Return three numbers of bytes for a run of a model: what this rank holds after it; by how much the last save and
    the sample raised this rank's peak; and the predicted peak of each rank."""
    job = TrainConfig().with_options(
        model=model, **SIZES, length=LENGTH, steps=2, save_every=1, eval_every=1, eval_samples=16, sample=200
    )
    workload = open_workload(job, mesh)
    most = []
    with TemporaryDirectory() as own:
        hook = Hook()
        hook.between_steps = lambda step, requested: most.append(most_bytes())
        run = make_run(workload, text_from_rank_zero(mesh.group(), lambda: own), hooks=[hook])
        run.train(job.training.steps)
        mesh.barrier()
    predicted = np.array(analyze(job.model, mesh.all_axes, **SIZES, sequence=LENGTH).peak_bytes_by_rank())
    return held_bytes(), most_bytes() - most[-1], predicted


def main():
    at_end, square = 0, np.ones((WIDTH, WIDTH), np.float32)
    np.matmul(square, square)  # what BLAS allocates for itself
    if sys.argv[1] == "run":
        with Mesh(pipe=2, model=(1, 2)) as mesh:
            before, _, small = after_run(mesh, "gpt-nano")  # and all that a run imports
            after, at_end, large = after_run(mesh, "gpt-mini")
            held, expected = after - before, (large - small).tolist()
            held, at_end = mesh.all_gather(np.array([[held, at_end]])).T
    else:
        with Mesh() as mesh:
            held, expected = after_steps(mesh, int(sys.argv[1]))
            held = mesh.all_gather(np.array([held]))
    if mesh.rank == 0:
        print(json.dumps({"held": held.tolist(), "expected": expected, "at_end": np.max(at_end).item()}))


if __name__ == "__main__":
    main()
