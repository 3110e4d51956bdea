"""Shares of the samples that follow the measured speeds of ranks, while a job runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from spmd_engine.adaptive.reshape import ShapeRequest
from spmd_engine.axes import MeshPosition, all_positions
from spmd_engine.engine.layered import LayeredEngine
from spmd_engine.engine.parallel_config import ParallelConfig, composed_layout
from spmd_engine.engine.state.assignment import shares_text
from spmd_engine.planning.search.placement import shares
from spmd_engine.training.run import Observer, Run
from spmd_engine.training.trainer import StepReport

LEAST_GAIN = 0.05  #: a change must make steps shorter by this part at least
MARGIN = 2.0  #: a change must save this many times its cost over the remaining steps


class SharesBySpeed(Observer):
    """Requests other shares of the samples where the ranks of an axis have unequal speeds.

    Pass it to ``train`` as an observer, and its ``propose``. Every ``every`` steps it takes the median seconds in which
    each rank computed, and divides the samples such that the last rank ends soonest. A change is made if it shortens
    the step by LEAST_GAIN at least, and if the saving over the remaining steps is MARGIN times the pause of the last
    change (of the first: a step).
    """

    def __init__(self, every: int = 20) -> None:
        self._every, self._pause = every, 0.0
        self._reports: list[StepReport] = []  # since the last decision, or change

    def started(self, run: Run, stop: int) -> None:
        self._run, self._stop = run, stop

    def stepped(self, report: StepReport) -> None:
        self._reports.append(report)

    def reshaped(self, step: int, change: Mapping[str, Any]) -> None:
        self._reports.clear()
        self._pause = change["seconds"]

    def propose(self, step: int) -> ShapeRequest | None:
        """The request after this step, if any."""
        engine, reports = self._run.engine, self._reports[1:]  # the first step in a shape fills caches
        if len(reports) < self._every or not isinstance(engine, LayeredEngine) or engine.mesh.size == 1:
            return None
        self._reports.clear()
        config = self._run.config or {}
        composition = ParallelConfig.from_json(config["composition"])
        size = config["data"]["batch_size"] // config["data"]["micro_batches"]
        computing = np.median([np.array(each.shares)[:, 0] * each.seconds for each in reports if each.shares], axis=0)
        each_sample = computing / _samples(engine, composition, size)
        wanted = composition.changed(shares=_shares_by_seconds(engine, each_sample.tolist(), size))
        seconds = float(np.median([report.seconds for report in reports]))
        saved = computing.max() - (each_sample * _samples(engine, wanted, size)).max()
        if saved < LEAST_GAIN * seconds or saved * (self._stop - step) < MARGIN * (self._pause or seconds):
            return None
        return ShapeRequest({"shares": wanted.shares})


def _samples(engine: LayeredEngine, composition: ParallelConfig, size: int) -> np.ndarray:
    """The samples of each rank in a micro-batch of ``size``: int[ranks]."""
    positions = all_positions(engine.mesh.axes)
    spec = composed_layout(engine.model, positions[0], composition).spec(engine.model.inputs)
    parts = [spec.part(0, size, position) for position in positions]
    return np.array([part.stop - part.start for part in parts])


def _shares_by_seconds(engine: LayeredEngine, seconds: Sequence[float], size: int) -> str | None:
    """The shares of ``size`` samples by the seconds that each rank takes for one, as for ``--shares``; None: even.

    Along each axis that shards samples, the slowest of the ranks on the other axes counts.
    """
    axes, found = engine.layout.axes("b"), {}
    mesh = MeshPosition(engine.mesh.axes, {})
    for axis in axes:
        longest = [0.0] * mesh.axis_size(axis)
        for position, time in zip(all_positions(mesh.axes), seconds, strict=True):
            longest[position.coordinates[axis]] = max(longest[position.coordinates[axis]], time)
        samples = size * len(longest) // mesh.axis_size(axes)
        counts = list(shares([1 / time for time in longest], samples)) if min(longest) > 0 else [1]
        while 0 in counts:  # each rank needs a sample
            counts[counts.index(0)] += 1
            counts[counts.index(max(counts))] -= 1
        if len(set(counts)) > 1:
            found[axis] = tuple(count // np.gcd.reduce(counts) for count in counts)
    return shares_text(found) or None
