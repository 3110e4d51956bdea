"""Compares predicted steps with measured ones: calls and bytes by line of the ledger, and traces."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from spmd_engine.axes import count_ranks, position_of
from spmd_engine.errors import UsageError
from spmd_engine.foreign import json_at, parse_json, read_text, reading
from spmd_engine.planning.dry_run.step_analysis import StepAnalysis
from spmd_engine.planning.machine.machine import Machine, default_machine
from spmd_engine.planning.simulator.simulation import Prediction
from spmd_engine.planning.simulator.step_evaluation import evaluate_step
from spmd_engine.training import TrainConfig
from spmd_engine.training.run import CONFIG
from spmd_engine.training.run_folder import run_folder
from spmd_engine.training.trace import COMMUNICATION, COMPUTE, TimedSpan, trace_events, trace_text
from spmd_engine.training.workload import step_of

Line = tuple[str, str, str]  # operation, axes and label
Sums = Mapping[Line, tuple[int, float]]  # calls and bytes sent


def predicted_sums(analysis: StepAnalysis) -> dict[Line, tuple[int, float]]:
    """Predicted calls and bytes of all ranks, by line of the ledger, in the order in which they begin."""
    sums = _sum(
        {line: (item.count * calls, item.count * sent) for line, (calls, _, sent) in item.step.ledger().items()}
        for item in analysis.classes
    )
    return {line: (round(calls), round(sent)) for line, (calls, sent) in sums.items()}


def _sum(ledgers: Iterable[Sums]) -> dict[Line, tuple[int, float]]:
    sums: dict[Line, tuple[int, float]] = {}
    for ledger in ledgers:
        for line, (calls, sent) in ledger.items():
            calls_before, sent_before = sums.get(line, (0, 0))
            sums[line] = calls_before + calls, sent_before + sent
    return sums


def differences(
    predicted: Sums, measured: Sequence[Sums], routed: Collection[str] = (), sizes: Mapping[str, int] | None = None
) -> list[str]:
    """The lines in which a step differs from its prediction, in order; ``measured`` are the ledgers of all ranks.

    For an all_to_all of a ``routed`` layer the calls must be equal. Its bytes must be at most those if every row leaves
    its rank: n/(n-1) times the prediction, which assumes that rows go evenly to all n ranks. ``sizes`` are those of the
    mesh's axes.
    """
    sums, texts = _sum(measured), []
    for line in dict.fromkeys((*predicted, *sums)):
        (calls, sent), (real_calls, real_sent) = predicted.get(line, (0, 0)), sums.get(line, (0, 0))
        operation, axes, label = line
        if operation == "all_to_all" and label in routed:
            most = _most_bytes(sent, axes, sizes or {})
            if calls == real_calls and real_sent <= most:
                continue
            sent_text = f"at most {most:,.0f} bytes"
        elif (calls, sent) == (real_calls, real_sent):
            continue
        else:
            sent_text = f"{sent:,.0f} bytes"
        texts.append(
            f"{operation} over {axes}{f' ({label})' if label else ''}: {calls:,} calls and {sent_text} predicted, "
            f"{real_calls:,} calls and {real_sent:,.0f} bytes measured, over all ranks"
        )
    return texts


def _most_bytes(sent: float, axes: str, sizes: Mapping[str, int]) -> float:
    """Bytes if every row leaves its rank; ``sent`` are the bytes if rows go evenly to all ranks of the axes."""
    ranks = prod(sizes.get(axis, 1) for axis in axes.split(","))
    return sent * ranks / max(1, ranks - 1)


def routed_bytes(
    predicted: Sums, measured: Sequence[Sums], routed: Collection[str], sizes: Mapping[str, int]
) -> dict[str, float]:
    """Bytes that routed layers sent, those with even routing, and the most possible; empty without routed layers. The
    least possible is 0: each row may stay on its rank."""
    lines = [line for line in predicted if line[0] == "all_to_all" and line[2] in routed]
    if not lines:
        return {}
    return {
        "sent": sum(ledger[line][1] for ledger in measured for line in lines if line in ledger),
        "balanced": sum(predicted[line][1] for line in lines),
        "most": round(sum(_most_bytes(predicted[line][1], line[1], sizes) for line in lines)),
    }


def traffic(predicted: Sums, measured: Sequence[Sums]) -> list[dict[str, Any]]:
    """Calls and bytes of all ranks by operation and axes, predicted and measured."""
    totals: dict[tuple[str, str], dict[str, Any]] = {}
    for prefix, sums in ("predicted_", predicted), ("", _sum(measured)):
        for (operation, axes, _), (calls, sent) in sums.items():
            none = dict.fromkeys(("predicted_calls", "predicted_bytes", "calls", "bytes"), 0)
            total = totals.setdefault((operation, axes), {"operation": operation, "axes": axes, **none})
            total[f"{prefix}calls"] += calls
            total[f"{prefix}bytes"] += sent
    return list(totals.values())


# --- A measured trace compared with a predicted one. In both, a rank's time in a step has four parts: *compute* is the
# --- time of layers with a core to themselves; *contention* the time lost because more ranks computed than the node has
# --- cores; *waiting* the time in communication; *rest* all else: the loss, the update, and the program between


PARTS = ("compute", "contention", "waiting", "rest")
OTHERS = ("loss", "gradient norm", "update")  #: predicted computations without spans in a trace


@dataclass(frozen=True)
class Split:
    """Seconds of a step by part, the mean over ranks."""

    seconds: float
    parts: Mapping[str, float]
    layers: Mapping[str, float]  #: seconds of compute and contention by computation, sum over ranks


@dataclass(frozen=True)
class TraceComparison:
    """A measured step with its prediction."""

    run: str
    predicted: Split
    measured: Split

    @property
    def error(self) -> float:
        """The error of the predicted seconds, relative to the measured ones."""
        return self.predicted.seconds / self.measured.seconds - 1

    def differences(self) -> dict[str, float]:
        """Predicted minus measured seconds, by part; their sum is the difference of the steps."""
        return {part: self.predicted.parts[part] - self.measured.parts[part] for part in PARTS}

    def worst_layers(self) -> list[tuple[str, float, float]]:
        """The eight computations with the largest differences: name, predicted and measured seconds, sum over ranks."""
        names = {*self.predicted.layers, *self.measured.layers}
        both = [(name, self.predicted.layers.get(name, 0.0), self.measured.layers.get(name, 0.0)) for name in names]
        return sorted(both, key=lambda entry: -abs(entry[1] - entry[2]))[:8]

    def as_json(self) -> dict[str, Any]:
        """The comparison as JSON."""
        return {
            "run": self.run,
            "error": self.error,
            "predicted": {"seconds": self.predicted.seconds, **self.predicted.parts},
            "measured": {"seconds": self.measured.seconds, **self.measured.parts},
            "differences": self.differences(),
        }


def compare_trace(
    run: str, trace: Mapping[str, Any], steps: int, seconds: float, prediction: Prediction, machine: Machine
):
    """Compare the ``trace`` of a run (JSON, of ``steps`` steps with a mean of ``seconds``) with its prediction."""
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    spans: dict[int, list[TimedSpan]] = defaultdict(list)
    for event in events:
        begin = event["ts"] * 1e-6
        spans[event["pid"]].append((event["name"], event["cat"], begin, begin + event["dur"] * 1e-6))
    predicted = _split(prediction.spans, 1, prediction.seconds, machine)
    return TraceComparison(run, predicted, _split(spans, steps, seconds, machine))


def _split(spans: Mapping[int, Sequence], steps: int, seconds: float, machine: Machine) -> Split:
    ranks = max(len(spans), 1)
    layers: dict[str, float] = defaultdict(float)
    compute = waiting = 0.0
    for rank_spans in spans.values():
        waiting += sum(end - begin for _, kind, begin, end in rank_spans if kind == COMMUNICATION)
        for name, begin, end in _list_computations(rank_spans):
            compute += end - begin
            layers[name] += (end - begin) / steps
    contention = _contention(spans, machine) / steps / ranks
    parts = {
        "compute": compute / steps / ranks - contention,
        "contention": contention,
        "waiting": waiting / steps / ranks,
    }
    parts["rest"] = seconds - sum(parts.values())
    return Split(seconds, parts, dict(layers))


def _list_computations(rank_spans: Sequence[TimedSpan]) -> Iterator[tuple[str, float, float]]:
    """The computations of a rank's layers, without the waits that lie inside their spans: (name, begin, end)."""
    waits = sorted((begin, end) for _, kind, begin, end in rank_spans if kind == COMMUNICATION)
    for name, kind, begin, end in rank_spans:
        if kind != COMPUTE or name in OTHERS:
            continue
        for since, until in waits[bisect_left(waits, (begin,)) : bisect_left(waits, (end,))]:
            yield name, begin, since
            begin = until
        if begin < end:
            yield name, begin, end


def _contention(spans: Mapping[int, Sequence], machine: Machine) -> float:
    """Seconds that computations of layers lost to others on the same node, sum over ranks."""
    by_node: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for rank, rank_spans in spans.items():
        for _, begin, end in _list_computations(rank_spans):
            by_node[machine.places[rank][0]] += [(begin, 1), (end, -1)]
    lost = 0.0
    for number, changes in by_node.items():
        cores = next(node.cores for place, node in machine.places if place == number)
        if cores is None:
            continue
        active, since = 0, 0.0
        for time, change in sorted(changes):
            if active > cores:
                lost += (time - since) * (active - cores)
            active, since = active + change, time
    return lost


# --- The trace of a prediction


def trace_json(prediction: Prediction, axes: Mapping[str, int]) -> str:
    """The trace of all simulated ranks, as ``train --trace`` writes one."""
    spans = prediction.spans.items()
    by_rank = (trace_events(rank, position_of(rank, axes).coordinates, of_rank) for rank, of_rank in spans)
    return trace_text(event for events in by_rank for event in events)


# --- The trace of a run compared with the predicted step: ``plan --compare RUN``

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
