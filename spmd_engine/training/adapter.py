"""Adapts a run to the speeds of its ranks, as the policy decides."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from spmd_engine.adaptive.adapt_config import AdaptConfig
from spmd_engine.adaptive.reshape import ShapeRequest
from spmd_engine.adaptive.sample_balancer import SampleBalancer, SampleSharing
from spmd_engine.engine.layered import LayeredEngine
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.files import open_regular
from spmd_engine.training.run import Observer, Run
from spmd_engine.training.trainer import StepReport


class Adapter(Observer):
    """Requests other shares of the samples where the policy decides so; pass its ``propose`` to ``train``, too.

    Until the first change has been measured, a change counts as a step. Decisions are lines of ``decisions.jsonl``:
    see ``adaptive.decision_log``. A resumed run, and one whose mesh has changed, begins a new log in the same file.
    """

    NAME = "decisions.jsonl"

    def __init__(self, config: AdaptConfig) -> None:
        self._config, self._file, self._cost = config, None, 0.0
        self._balancer: SampleBalancer | None = None
        self._wanted: ParallelConfig | None = None

    def started(self, run: Run, stop: int) -> None:
        self._run, self._stop = run, stop
        file = open_regular(run.folder / self.NAME, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._file = open(file, "a", buffering=1)

    def stepped(self, report: StepReport) -> None:
        if self._balancer is None:  # this step may fill caches: it gives a cost, and is not observed
            self._cost = self._cost or report.seconds
            self._balancer = self._new_balancer()
        elif self._wanted is None:
            self._wanted = self._balancer.add(report.as_dict())

    def propose(self, step: int) -> ShapeRequest | None:
        """The request after this step, if any."""
        return ShapeRequest({"shares": self._wanted.shares}) if self._wanted else None

    def reshaped(self, step: int, change: Mapping[str, Any]) -> None:
        composition, self._cost = self._composition(), change["seconds"]
        if self._balancer and dict(self._run.engine.mesh.axes) == self._balancer.sharing.axes:
            self._balancer.changed(composition, self._cost)
        else:
            self._balancer = None
        self._wanted = None

    def not_reshaped(self, step: int, change: Mapping[str, Any]) -> None:
        self._wanted = None

    def closed(self) -> None:
        if self._file:
            self._file.close()

    def _composition(self) -> ParallelConfig:
        return ParallelConfig.from_json((self._run.config or {})["composition"])

    def _new_balancer(self) -> SampleBalancer | None:
        """A balancer for the present mesh; None if it does not shard samples."""
        engine, data = self._run.engine, (self._run.config or {}).get("data", {})
        if not isinstance(engine, LayeredEngine):
            return None
        sharing = SampleSharing(dict(engine.mesh.axes), data["batch_size"] // data["micro_batches"])
        if not sharing.batch_axes:
            return None
        return SampleBalancer(self._config, self._composition(), sharing, self._stop, self._cost, self._write)

    def _write(self, line: dict[str, Any]) -> None:
        if self._file:
            self._file.write(json.dumps(line) + "\n")
