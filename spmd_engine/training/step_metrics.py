"""Where the time of a step went, on every rank, and what was sent meanwhile."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np

from spmd_engine.comm.mesh import Mesh
from spmd_engine.comm.signature import named
from spmd_engine.errors import ReplicasDifferError


class StepMetrics:
    """Opened when a step begins; ``close`` tells what the ledger and the waits gained since, unless ``brief``."""

    def __init__(self, mesh: Mesh, brief: bool = False) -> None:
        self._mesh, self._brief, self._began = mesh, brief, perf_counter()
        self._before = _state(mesh) if mesh.size > 1 and not brief else None

    def close(self, skips: bool = False, signal: int | None = None) -> tuple[float, dict[str, Any], int]:
        """The step's seconds on this rank, facts about all ranks, and the largest ``signal`` that one of them says.

        Raises ReplicasDifferError, on all ranks, if some but not all of them say that this step ``skips`` its update.
        Collective over the world; if it is brief, only where there are signals to be told.
        A rank is *idle* where it stands in a collective with nothing to do, since others have not come or their
        messages are under way; it *communicates* for the rest of the time it stands there.
        """
        seconds = perf_counter() - self._began
        if self._brief:
            return seconds, {}, self._largest(skips, signal)
        if self._mesh.size == 1:
            return seconds, {"bytes_sent": 0}, signal or 0
        mine = np.concatenate([_state(self._mesh) - self._before, [seconds, skips, signal or 0]])
        axes = list(self._mesh.axes)
        ranks = self._mesh.all_gather(mine[None], label="metrics")
        _check_alike(ranks[:, -2])
        idle, seconds, signals = ranks[:, 0], ranks[:, -3], ranks[:, -1]
        sent, waited = ranks[:, 1 : 1 + len(axes)], ranks[:, 1 + len(axes) : -3]
        stood = waited.sum(axis=1)
        idle = np.minimum(idle, stood)
        parts = np.stack([seconds - stood, stood - idle, idle], axis=1) / seconds[:, None]
        speeds = zip(axes, sent.sum(axis=0), waited.sum(axis=0), strict=True)
        facts = {
            "bytes_sent": int(sent.sum()),
            "exposed_communication": float(stood.mean()),
            "gigabytes_per_second": {axis: round(n / t / 1e9, 3) for axis, n, t in speeds if n and t},
            "shares": parts.round(3).tolist(),
        }
        return perf_counter() - self._began, facts, int(signals.max())

    def _largest(self, skips: bool, signal: int | None) -> int:
        if signal is None or self._mesh.size == 1:
            return signal or 0
        said = self._mesh.all_gather(np.array([[skips, signal]]), label="metrics")
        _check_alike(said[:, 0])
        return int(said[:, 1].max())


def _check_alike(skips: np.ndarray) -> None:
    """Raise ReplicasDifferError unless all ranks say the same."""
    if skips.any() and not skips.all():
        ranks = np.flatnonzero(skips).tolist()
        raise ReplicasDifferError(
            f"{named(ranks)} of {len(skips)} found something in the summed gradients that is not finite; the others, "
            "whose gradients should be equal, did not. A bit was flipped there, or something else made them differ; go "
            "on from the last checkpoint (--resume)"
        )


def _state(mesh: Mesh) -> np.ndarray:
    """Idle seconds so far; then bytes sent over, and seconds stood for, each mesh axis.

    What goes over several axes at once counts for the first of them.
    """
    places = {axis: place for place, axis in enumerate(mesh.axes)}
    sent, waited = [0] * len(places), [0.0] * len(places)
    for (_, over, _), entry in mesh.ledger.entries.items():
        place = places.get(over.partition(",")[0])
        if place is not None:
            sent[place] += entry.sent
            waited[place] += entry.seconds
    return np.array([mesh.comm.progress.idle_seconds, *sent, *waited])
