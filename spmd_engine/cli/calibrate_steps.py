"""What cannot be measured apart: numbers fitted to whole steps, of small models on one rank."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from time import process_time

import numpy as np
from threadpoolctl import threadpool_limits

from spmd_engine.comm.mesh import Mesh
from spmd_engine.comm.world import solo
from spmd_engine.engine.optimizers import AdamW
from spmd_engine.planning.analyze import analyze
from spmd_engine.planning.compute_time import ComputeTimes
from spmd_engine.planning.machine import Fitted, Machine
from spmd_engine.training.job import Job
from spmd_engine.training.workload import make_trainer, open_workload

#: Models and batches whose steps are timed: many small operations, few large ones, and what lies between.
STEPS = (("mlp", 16), ("mlp", 512), ("gpt-nano", 2), ("gpt-nano", 8), ("gpt-mini", 1), ("convnet", 16), ("convnet", 64))
WARM, TIMED = 1, 3


def step_seconds() -> np.ndarray:
    """Processor seconds of a step of each of these on this rank; NaN where one cannot be run."""
    with threadpool_limits(1, "blas"), Mesh(solo()) as mesh:
        return np.array([_measure(job, mesh) for job in _jobs()])


def fitted(machine: Machine, seconds: np.ndarray) -> Machine:
    """The machine with ``pass_seconds``, ``product_share`` and ``memory_share`` fitted to ``step_seconds``.

    Least squares of relative errors over the three numbers' effects, which add up: products / share + bytes / share +
    passes * seconds.
    """
    compute, rows = ComputeTimes(replace(machine, fitted=Fitted())), []
    for job in _jobs():
        batch_size = job.data.batch_size
        found = analyze(job.model, {"data": 1}, job.composition, batch_size=batch_size, optimizer=AdamW())
        works = [compute.of(0, each) for each in found.classes[0].step.computations]
        rows.append([sum(w.products for w in works), sum(w.rest for w in works), float(len(works))])
    known = np.isfinite(seconds)
    matrix, measured = np.array(rows)[known], seconds[known]
    product, memory, each_pass = _positive(matrix / measured[:, None], np.ones(len(measured)))
    return machine.with_fitted(
        product_share=float(1 / max(product, 0.2)),
        memory_share=float(1 / max(memory, 0.2)),
        pass_seconds=float(each_pass),
    )


def _jobs() -> list[Job]:
    return [Job.of(model=model, batch_size=batch, eval_every=0, sample=0) for model, batch in STEPS]


def _positive(matrix: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The least squares solution with no number below 0, by leaving out those that would be (of three, all subsets)."""
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


def _measure(job: Job, mesh: Mesh) -> float:
    """Processor seconds of a training step; NaN without scikit-learn, which has the images."""
    try:
        trainer = make_trainer(open_workload(job, mesh))
    except ImportError:
        return float("nan")
    for _ in range(WARM):
        trainer.step()
    turns = []
    for _ in range(TIMED):
        began = process_time()
        trainer.step()
        turns.append(process_time() - began)
    return median(turns)
