"""The activity of all ranks over time: a trace in the format of Chrome and Perfetto, on one clock."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from spmd_engine.comm import Mesh
from spmd_engine.comm.agreement.rank_zero import gather_json
from spmd_engine.engine import LayeredEngine, ShardedEngine
from spmd_engine.layers import Layer

_PINGS = 5
TimedSpan = tuple[str, str, float, float]  # name, kind, and seconds of its beginning and end
COMPUTE, COMMUNICATION = "compute", "communication"  #: kinds of spans
ROWS = {COMPUTE: 0, COMMUNICATION: 1}


def trace_events(rank: int, coordinates: Mapping[str, int], spans: Iterable[TimedSpan]) -> list[dict[str, Any]]:
    """The events of a rank: its spans of a ``kind``, and the names of its process and rows; times in microseconds."""
    events: list[dict[str, Any]] = [
        {
            "name": name,
            "cat": kind,
            "ph": "X",
            "pid": rank,
            "tid": ROWS[kind],
            "ts": round(start * 1e6, 1),
            "dur": round((end - start) * 1e6, 1),
        }
        for name, kind, start, end in spans
    ]
    where = ",".join(f"{axis}={place}" for axis, place in coordinates.items())
    process = {"ph": "M", "pid": rank}
    events.append(process | {"name": "process_name", "args": {"name": f"rank {rank} ({where})"}})
    return events + [
        process | {"name": "thread_name", "tid": row, "args": {"name": kind}} for kind, row in ROWS.items()
    ]


def trace_text(events: Iterable[Mapping[str, Any]]) -> str:
    """The file of all ranks' events."""
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": list(events)})


class Trace:
    """Spans of time on this rank; ``json`` gives those of all ranks.

    ``with trace.of(engine): ...`` records each layer's forward and backward, and the time that this rank waits in each
    collective, by operation, axes and label. The rest of the time is data, the optimizer, and other code of the engine.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._events: list[TimedSpan] = []
        self._to_rank_zero = _clock_difference(mesh)

    @contextmanager
    def of(self, engine: ShardedEngine) -> Iterator[None]:
        """Record layers and waits of an engine."""
        self._mesh.ledger.observer = self._record_wait
        try:
            if isinstance(engine, LayeredEngine):
                with engine.wrapped(partial(_TracedLayer, self)):
                    yield
            else:
                yield
        finally:
            self._mesh.ledger.observer = None

    @contextmanager
    def span(self, name: str, kind: str = COMPUTE) -> Iterator[None]:
        """Record the body of the with statement as a span."""
        began = perf_counter()
        try:
            yield
        finally:
            self._events.append((name, kind, began, perf_counter()))

    def _record_wait(self, operation: str, axes: str, label: str, seconds: float) -> None:
        now = perf_counter()
        name = f"{operation} over {axes}" + (f" ({label})" if label else "")
        self._events.append((name, COMMUNICATION, now - seconds, now))

    def json(self) -> str | None:
        """All ranks' events, on rank 0; None on the others. Collective.

        Each rank is a process with a row of compute and a row of communication; times are in microseconds.
        """
        began = min((event[2] for event in self._events), default=0.0) + self._to_rank_zero
        first = float(self._mesh.all_reduce(np.array(began), "min", label="trace"))
        later = self._to_rank_zero - first
        spans = [(name, kind, start + later, end + later) for name, kind, start, end in self._events]
        events = trace_events(self._mesh.rank, self._mesh.coordinates, spans)
        by_rank = gather_json(self._mesh.group(), events, "trace")
        return None if self._mesh.rank else trace_text(event for rank_events in by_rank for event in rank_events)


class _TracedLayer(Layer):
    """A layer whose work is recorded."""

    def __init__(self, trace: Trace, name: str, layer: Layer) -> None:
        self._trace, self._name, self._layer = trace, name, layer

    def forward(self, sh, p, x, at):
        with self._trace.span(f"{self._name} forward"):
            return self._layer.forward(sh, p, x, at)

    def backward_input(self, sh, p, saved, dy, *side):
        with self._trace.span(f"{self._name} backward (input)"):
            return self._layer.backward_input(sh, p, saved, dy, *side)

    def backward_weight(self, sh, rest, g):
        with self._trace.span(f"{self._name} backward (weights)"):
            self._layer.backward_weight(sh, rest, g)


def _clock_difference(mesh: Mesh) -> float:
    """Seconds to add to this rank's clock for rank 0's. Ranks of a node have one clock; others ask rank 0, and use the
    quickest answer. Collective."""
    world, difference, quickest = mesh.group(), 0.0, float("inf")
    nodes = mesh.nodes_by_rank
    remote_ranks = [rank for rank, node in enumerate(nodes) if node != nodes[0]]
    for rank in remote_ranks:
        for _ in range(_PINGS):
            if world.rank == 0:
                world.receive(rank, label="trace")
                world.send(rank, np.array(perf_counter()), label="trace")
            elif world.rank == rank:
                began = perf_counter()
                world.send(0, np.zeros(1), label="trace")
                answer = float(world.receive(0, label="trace"))
                ended = perf_counter()
                if ended - began < quickest:
                    quickest, difference = ended - began, answer - (began + ended) / 2
    return difference
