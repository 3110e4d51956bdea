"""Adapts a run to the speeds of its ranks, as the policy decides."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from spmd_engine.adaptive.advisor import Advisor
from spmd_engine.adaptive.candidates import BoundariesBySpeed, SharesBySpeed
from spmd_engine.adaptive.decision_log import resumed
from spmd_engine.adaptive.planner_process import PlannerProposals
from spmd_engine.checkpoints.format.folder import replace_file
from spmd_engine.engine.layered import LayeredEngine
from spmd_engine.engine.reshape import Shape, ShapeRequest
from spmd_engine.files import open_regular
from spmd_engine.foreign import reading
from spmd_engine.training.adapt_config import AdaptConfig
from spmd_engine.training.observers import Observer, lines_up_to
from spmd_engine.training.run import Run, composition_of
from spmd_engine.training.trainer import StepReport
from spmd_engine.training.workload import Workload


class Adapter(Observer):
    """Requests another shape where the policy decides so; pass its ``propose`` to ``train``, too.

    Until a change has been measured, it counts as a step. Decisions are lines of ``decisions.jsonl``: see
    ``adaptive.decision_log``. A run that resumes goes on with the policy's state.
    """

    NAME = "decisions.jsonl"

    def __init__(self, config: AdaptConfig) -> None:
        self._config, self._file = config, None
        self._advisor: Advisor | None = None
        self._planner: PlannerProposals | None = None

    def opened(self, workload: Workload, parameters: int, notices: Sequence[str]) -> None:
        model = workload.job.model
        self._code = "" if model.named_in else model.name  # if it is code, it has run here

    def started(self, run: Run, stop: int) -> None:
        self._run, path = run, run.folder / self.NAME
        self._shape = Shape(composition_of(self._run), tuple(range(run.engine.mesh.size)))
        lines = lines_up_to(path, run.steps_done)
        with reading(f"{path}: this run cannot go on with its decisions", "; move it away"):
            self._home, costs, self._state = resumed([json.loads(line) for line in lines], self._shape)
        self._costs = dict(costs)
        replace_file(path, "".join(line + "\n" for line in lines))
        self._file = open(open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "a", buffering=1)

    def stepped(self, report: StepReport) -> None:
        if self._advisor is None:  # this step may fill caches: it gives a cost, and is not observed
            self._advisor = self._new_advisor(report)
        else:
            self._advisor.add(report.as_dict())

    def propose(self, step: int) -> ShapeRequest | None:
        """The request after this step, if any."""
        proposed = self._advisor.proposed if self._advisor else None
        return proposed.request if proposed else None

    def reshaped(self, step: int, change: Mapping[str, Any]) -> None:
        self._shape = Shape(composition_of(self._run), tuple(change["ranks"]))
        if self._advisor:
            self._advisor.changed(self._shape, change["seconds"], step)
        else:
            self._home = self._shape

    def not_reshaped(self, step: int, change: Mapping[str, Any]) -> None:
        is_own = not change["request"]  # those of 'migrate' and 'join' have a number
        if self._advisor and self._advisor.proposed and is_own:
            self._advisor.refused()

    def joined(self, step: int, change: Mapping[str, Any]) -> None:
        if self._advisor:
            self._advisor.memory = self._run.memory_limits

    def closed(self) -> None:
        if self._planner:
            self._planner.close()
        if self._file:
            self._file.close()

    def _new_advisor(self, report: StepReport) -> Advisor | None:
        """An advisor, after the first step; None for an engine that shards itself."""
        engine, job = self._run.engine, self._run.config or {}
        if not isinstance(engine, LayeredEngine):
            return None
        self._planner = PlannerProposals(self._config, job, self._code)
        samples = job["data"]["batch_size"] // job["data"]["micro_batches"]
        return Advisor(
            self._config,
            self._shape,
            job["training"]["steps"],
            [BoundariesBySpeed(engine.model), SharesBySpeed(engine.model, samples), self._planner],
            {"first step": report.seconds} | self._costs,
            memory=self._run.memory_limits,
            model=engine.model,
            write=self._write,
            home=self._home,
            state=self._state,
            step=report.step,
        )

    def _write(self, line: dict[str, Any]) -> None:
        if self._file:
            self._file.write(json.dumps(line) + "\n")
