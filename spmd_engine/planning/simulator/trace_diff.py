"""A measured trace laid over a predicted one: where the difference of their steps comes from.

Of both, each rank's time in a step is split alike: *compute* is what layers would take with a core for themselves,
*contention* what they took longer since more ranks computed than the node has cores, *waiting* what a rank stood in
communication, and *rest* all else: the loss, the update, and what the program does between.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spmd_engine.planning.dry_run.match_calls import place_of
from spmd_engine.planning.machine.machine import Machine
from spmd_engine.planning.simulator.simulation import COMMUNICATION, COMPUTE, Prediction

PARTS = ("compute", "contention", "waiting", "rest")
OTHERS = ("loss", "gradient norm", "update")  #: predicted computations that a trace has no spans of


@dataclass(frozen=True)
class Split:
    """Seconds of a step, the mean over ranks, by part."""

    seconds: float
    parts: Mapping[str, float]
    layers: Mapping[str, float]  #: seconds of compute and contention by what is computed, of all ranks


@dataclass(frozen=True)
class Comparison:
    """A step as predicted, and as measured."""

    run: str
    predicted: Split
    measured: Split

    @property
    def error(self) -> float:
        """Of the step's time, as a share of the measured."""
        return self.predicted.seconds / self.measured.seconds - 1

    def differences(self) -> dict[str, float]:
        """Predicted less measured seconds, by part: they add up to the difference of the steps."""
        return {part: self.predicted.parts[part] - self.measured.parts[part] for part in PARTS}

    def worst_layers(self, count: int = 8) -> list[tuple[str, float, float]]:
        """What is computed with the largest differences: predicted and measured seconds of all ranks."""
        names = {*self.predicted.layers, *self.measured.layers}
        both = [(name, self.predicted.layers.get(name, 0.0), self.measured.layers.get(name, 0.0)) for name in names]
        return sorted(both, key=lambda each: -abs(each[1] - each[2]))[:count]

    def as_json(self) -> dict[str, Any]:
        """What programs ask for."""
        return {
            "run": self.run,
            "error": self.error,
            "predicted": {"seconds": self.predicted.seconds, **self.predicted.parts},
            "measured": {"seconds": self.measured.seconds, **self.measured.parts},
            "differences": self.differences(),
        }


def compare(run: str, trace: Mapping[str, Any], steps: int, seconds: float, prediction: Prediction, machine: Machine):
    """``trace`` is the JSON of so many measured ``steps`` of so many ``seconds`` each, the mean."""
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    spans: dict[int, list[tuple[str, str, float, float]]] = defaultdict(list)
    for event in events:
        begin = event["ts"] * 1e-6
        spans[event["pid"]].append((event["name"], event["cat"], begin, begin + event["dur"] * 1e-6))
    foretold: dict[int, list[tuple[str, str, float, float]]] = defaultdict(list)
    for span in prediction.spans:
        foretold[span.rank].append((span.name, span.kind, span.start, span.end))
    return Comparison(run, _split(foretold, 1, prediction.seconds, machine), _split(spans, steps, seconds, machine))


def _split(spans: Mapping[int, Sequence], steps: int, seconds: float, machine: Machine) -> Split:
    crowd = _contention(spans, machine)
    ranks = max(len(spans), 1)
    layers: dict[str, float] = defaultdict(float)
    compute = waiting = 0.0
    for own in spans.values():
        waiting += sum(end - begin for _, kind, begin, end in own if kind == COMMUNICATION)
        for name, begin, end in _computing(own):
            compute += end - begin
            layers[name] += (end - begin) / steps
    contention = crowd / steps / ranks
    parts = {
        "compute": compute / steps / ranks - contention,
        "contention": contention,
        "waiting": waiting / steps / ranks,
    }
    parts["rest"] = seconds - sum(parts.values())
    return Split(seconds, parts, dict(layers))


def _computing(own: Sequence[tuple[str, str, float, float]]) -> Iterator[tuple[str, float, float]]:
    """What a rank computes of its layers, in pieces: a trace has a layer's waits within the layer's own span."""
    waits = sorted((begin, end) for _, kind, begin, end in own if kind == COMMUNICATION)
    for name, kind, begin, end in own:
        if kind != COMPUTE or name in OTHERS:
            continue
        for since, until in waits[bisect_left(waits, (begin,)) : bisect_left(waits, (end,))]:
            yield name, begin, since
            begin = until
        if begin < end:
            yield name, begin, end


def _contention(spans: Mapping[int, Sequence], machine: Machine) -> float:
    """Seconds, of all ranks, that computations of layers lost to others on the same node."""
    by_node: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for rank, own in spans.items():
        for _, begin, end in _computing(own):
            by_node[machine.places[rank][0]] += [(begin, 1), (end, -1)]
    lost = 0.0
    for number, changes in by_node.items():
        cores = next(node.cores for at, node in machine.places if at == number)
        if cores is None:
            continue
        active, since = 0, 0.0
        for when, change in sorted(changes):
            if active > cores:
                lost += (when - since) * (active - cores)
            active, since = active + change, when
    return lost


# --- A predicted step in the format of ``train --trace``: Chrome's and Perfetto's, a process a rank


ROWS = {COMPUTE: 0, COMMUNICATION: 1}


def trace_of(prediction: Prediction, axes: Mapping[str, int]) -> str:
    """The trace of all ranks that were simulated; times are in microseconds."""
    events: list[dict[str, Any]] = [
        {
            "name": span.name,
            "cat": span.kind,
            "ph": "X",
            "pid": span.rank,
            "tid": ROWS[span.kind],
            "ts": round(span.start * 1e6, 1),
            "dur": round((span.end - span.start) * 1e6, 1),
        }
        for span in prediction.spans
    ]
    for rank in prediction.ranks:
        where = ",".join(f"{axis}={place}" for axis, place in place_of(rank, axes).coordinates.items())
        events.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank} ({where})"}})
        events += [
            {"name": "thread_name", "ph": "M", "pid": rank, "tid": row, "args": {"name": kind}}
            for kind, row in ROWS.items()
        ]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})
