"""A predicted step in the format of ``train --trace``: Chrome's and Perfetto's, a process a rank."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from spmd_engine.planning.meetings import place_of
from spmd_engine.planning.simulation import COMMUNICATION, COMPUTE, Prediction

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
