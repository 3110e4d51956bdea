"""The trace of a run compared with the predicted step: ``plan --compare RUN``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spmd_engine.axes import count_ranks
from spmd_engine.errors import UsageError
from spmd_engine.foreign import json_at, parse_json, read_text, reading
from spmd_engine.planning.machine.files import default_machine
from spmd_engine.planning.simulator.check_prediction import TraceComparison, compare_trace
from spmd_engine.planning.simulator.step_evaluation import evaluate_step
from spmd_engine.training.run import CONFIG
from spmd_engine.training.run_folder import run_folder
from spmd_engine.training.train_config import TrainConfig
from spmd_engine.training.workload import step_of

#: The labels of communications after the last step of a trace.
AFTER_STEPS = ("(metrics)", "(placement)", "(save)", "(agreement)")


def compare_run(run: str, machine_name: str | None = None, code: str | None = None) -> TraceComparison:
    """The traced step of a run (``train --trace STEPS``) compared with its prediction.

    ``code`` names the run's model if it is code. Raises UsageError for a run without a trace, and for code that is not
    named.
    """
    folder = run_folder(run)
    trace_file, metrics_file = folder / "trace.json", folder / "metrics.jsonl"
    if not (folder / CONFIG).is_file():
        raise UsageError(f"{folder}: no such run; --compare wants the folder that 'train' wrote, as in runs/gpt-nano-1")
    if not trace_file.is_file() or not metrics_file.is_file():
        raise UsageError(f"{folder} has no trace.json: run it with 'train --trace 5'")
    job = TrainConfig.read(folder / CONFIG)
    if code == job.model.name:
        job = job.with_options(model=code)
    if job.strategy:
        raise UsageError(f"{folder} is a run of --strategy {job.strategy}, which has no composition to predict")
    trace = json_at(trace_file)
    with reading(f"{trace_file} is no trace of a run"):
        ranks = 1 + max(event["pid"] for event in trace["traceEvents"])
    axes = dict(job.composition.mesh or {"data": ranks})
    if count_ranks(axes) != ranks:
        raise UsageError(f"{trace_file} has {ranks} ranks, and the run's mesh {axes} has {count_ranks(axes)}")
    trace = steps_of(trace)
    seconds = _seconds(metrics_file, trace, job.data.micro_batches)
    machine = default_machine(machine_name).with_ranks(ranks)
    model = job.model.build(job.composition)
    evaluation = evaluate_step(model, machine, axes, job.composition, **step_of(job))
    return compare_trace(str(folder), trace, len(seconds), sum(seconds) / len(seconds), evaluation.prediction, machine)


def steps_of(trace: Mapping[str, Any]) -> dict[str, Any]:
    """The trace without the events after the last step: evaluations, and the end of the run."""
    last: dict[int, float] = {}
    for event in trace["traceEvents"]:
        if "backward" in event.get("name", ""):
            last[event["pid"]] = max(last.get(event["pid"], 0.0), event["ts"])
    end: dict[int, float] = {}
    for event in trace["traceEvents"]:
        after = event.get("ph") == "X" and event["ts"] > last.get(event["pid"], 0.0)
        if after and (event["name"].endswith(" forward") or event["name"].endswith(AFTER_STEPS)):
            end[event["pid"]] = min(end.get(event["pid"], event["ts"]), event["ts"])
    events = [e for e in trace["traceEvents"] if e.get("ph") != "X" or e["ts"] < end.get(e["pid"], float("inf"))]
    return {**trace, "traceEvents": events}


def _seconds(metrics_file: Path, trace: Mapping[str, Any], micro_batches: int) -> list[float]:
    """Seconds of the traced steps: from the second step on, as many as the trace has backward passes of a layer."""
    with reading(f"{metrics_file} cannot be read"):
        steps = [parse_json(line) for line in read_text(metrics_file).splitlines()]
    gradients = Counter(
        event["name"] for event in trace["traceEvents"] if event["pid"] == 0 and "backward (weights)" in event["name"]
    )
    traced = max(gradients.values(), default=micro_batches) // micro_batches
    return [step["seconds"] for step in steps[1 : 1 + max(traced, 1)]] or [step["seconds"] for step in steps]
