"""``plan --compare RUN``: a run's own trace beside what is predicted of its step."""

from __future__ import annotations

import json
from math import prod

import numpy as np

from spmd_engine.engine.optimizers import SGD, AdamW
from spmd_engine.errors import UsageError
from spmd_engine.planning.compare import Comparison, compare
from spmd_engine.planning.foresight import look
from spmd_engine.planning.machines_here import default_machine
from spmd_engine.training.job import Job
from spmd_engine.training.run import CONFIG
from spmd_engine.training.start import run_folder


def compare_run(run: str, machine_name: str | None = None) -> Comparison:
    """The step of a run that was traced (``train --trace STEPS``), beside its prediction.

    Raises UsageError for a run that has no trace.
    """
    folder = run_folder(run)
    trace_file, metrics_file = folder / "trace.json", folder / "metrics.jsonl"
    if not (folder / CONFIG).is_file():
        raise UsageError(f"{folder}: no such run; --compare wants the folder that 'train' wrote, as in runs/gpt-nano-1")
    if not trace_file.is_file() or not metrics_file.is_file():
        raise UsageError(f"{folder} has no trace.json: run it with 'train --trace 5'")
    job = Job.read(folder / CONFIG)
    if job.strategy:
        raise UsageError(f"{folder} is a run of --strategy {job.strategy}, which has no composition to predict")
    trace = json.loads(trace_file.read_text())
    ranks = 1 + max(event["pid"] for event in trace["traceEvents"])
    axes = dict(job.composition.mesh or {"data": ranks})
    if prod(axes.values()) != ranks:
        raise UsageError(f"{trace_file} has {ranks} ranks, and the run's mesh {axes} has {prod(axes.values())}")
    seconds = _seconds(metrics_file, trace)
    machine = default_machine(machine_name).with_ranks(ranks)
    optimizer = AdamW() if job.training.optimizer == "adamw" else SGD()
    seen = look(
        job.model.build(job.composition),
        machine,
        axes,
        job.composition,
        job.data.batch_size,
        job.data.micro_batches,
        dtype=np.dtype(job.model.dtype),
        optimizer=optimizer,
    )
    return compare(str(folder), trace, len(seconds), sum(seconds) / len(seconds), seen.prediction, machine)


def _seconds(metrics_file, trace) -> list[float]:
    """Of the steps that were traced: from the second on, as many as repeat what is computed."""
    steps = [json.loads(line) for line in metrics_file.read_text().splitlines()]
    first = next(event["name"] for event in trace["traceEvents"] if event.get("cat") == "compute")
    of_one = [e for e in trace["traceEvents"] if e.get("name") == first and e["pid"] == 0]
    traced = sum(event["dur"] for event in trace["traceEvents"] if event.get("ph") == "X" and event["pid"] == 0) * 1e-6
    found: list[float] = []
    for step in steps[1:]:
        if found and (sum(found) > traced or len(found) >= len(of_one)):
            break
        found.append(step["seconds"])
    return found or [step["seconds"] for step in steps]
