"""What cannot be measured apart: numbers fitted to whole steps, of small models on one rank."""

from __future__ import annotations

from dataclasses import replace
from time import process_time

import numpy as np
from threadpoolctl import threadpool_limits

from spmd_engine.comm.mesh import Mesh
from spmd_engine.comm.world import solo
from spmd_engine.engine.optimizers import AdamW
from spmd_engine.planning.dry_run.analyze import analyze
from spmd_engine.planning.machine.machine import Fitted, Machine
from spmd_engine.planning.simulator.compute_time import ComputeTimes
from spmd_engine.training import Trainer
from spmd_engine.training.job import Job
from spmd_engine.training.workload import make_trainer, open_workload

#: Models and batches whose steps are timed: of each kind of layers, many small operations, few large ones, and what
#: lies between.
STEPS = (
    ("mlp", 16),
    ("mlp", 512),
    ("gpt-nano", 2),
    ("gpt-nano", 8),
    ("gpt-mini", 1),
    ("gpt-moe-nano", 4),
    ("convnet", 16),
    ("convnet", 64),
)
WARM, TIMED = 1, 7


def step_seconds(ranks: Mesh) -> np.ndarray:
    """Processor seconds of a step of each of these; NaN where one cannot be run. Collective.

    All ranks make a step at the same time, each by itself, and the slowest counts, for which the others would wait; a
    step of each model is made before any a second one, so that what slows the machine for a while slows all of them.
    """
    with threadpool_limits(1, "blas"), Mesh(solo()) as mesh:
        trainers = [_trainer(job, mesh, ranks) for job in _jobs()]
        turns = [[_turn(trainer, ranks) for trainer in trainers] for _ in range(WARM + TIMED)]
    return np.median(ranks.all_reduce(np.array(turns[WARM:]), "max"), axis=0)


def fitted(machine: Machine, seconds: np.ndarray) -> Machine:
    """The machine with ``pass_seconds`` and ``memory_share`` fitted to ``step_seconds``.

    Least squares of relative errors over the two numbers' effects, which are added to the products, whose speeds were
    measured: bytes / share + passes * seconds. What is fitted to products, too, would take in what is wrong with
    everything else in these small steps, and be wrong by it in large ones.
    """
    compute, rows = ComputeTimes(replace(machine, fitted=Fitted())), []
    for job in _jobs():
        batch_size = job.data.batch_size
        found = analyze(job.model, {"data": 1}, job.composition, batch_size=batch_size, optimizer=AdamW())
        works = [compute.of(0, each) for each in found.classes[0].step.computations]
        rows.append([sum(w.products for w in works), sum(w.rest for w in works), float(len(works))])
    known = np.isfinite(seconds)
    matrix, measured = np.array(rows)[known], seconds[known]
    rest = matrix[:, 1:] / measured[:, None]
    memory, each_pass = _positive(rest, 1 - matrix[:, 0] / measured)
    return machine.with_fitted(memory_share=float(1 / max(memory, 0.2)), pass_seconds=float(each_pass))


def _jobs() -> list[Job]:
    return [Job.of(model=model, batch_size=batch, eval_every=0, sample=0) for model, batch in STEPS]


def _positive(matrix: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The least squares solution with no number below 0, by leaving out those that would be (all subsets)."""
    best, least = np.zeros(matrix.shape[1]), np.inf
    columns = matrix.shape[1]
    for subset in range(1, 1 << columns):
        chosen = [c for c in range(columns) if subset >> c & 1]
        solution = np.zeros(columns)
        solution[chosen] = np.linalg.lstsq(matrix[:, chosen], wanted, rcond=None)[0]
        error = float(((matrix @ solution - wanted) ** 2).sum())
        if (solution >= 0).all() and error < least:
            best, least = solution, error
    return best


def _trainer(job: Job, mesh: Mesh, ranks: Mesh) -> Trainer | None:
    """None where some rank has no scikit-learn, which has the images."""
    try:
        trainer = make_trainer(open_workload(job, mesh))
    except ImportError:
        trainer = None
    return trainer if ranks.all_reduce(np.array(float(trainer is not None)), "min") else None


def _turn(trainer: Trainer | None, ranks: Mesh) -> float:
    """Processor seconds of a step that all ranks begin together."""
    if trainer is None:
        return float("nan")
    ranks.barrier()
    began = process_time()
    trainer.step()
    return process_time() - began
