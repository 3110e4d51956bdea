"""Compares the first step of a training with its dry run: calls and bytes must be equal."""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from spmd_engine.comm.agreement.rank_zero import gather_equal_json, gather_json, json_from_rank_zero
from spmd_engine.engine import LayeredEngine, ShardedEngine
from spmd_engine.errors import PlanError, UsageError
from spmd_engine.training import Hook
from spmd_engine.training.numbers_by_rank import LISTED, condensed
from spmd_engine.training.trainer import StepReport
from spmd_engine.training.workload import Workload, step_of

if TYPE_CHECKING:
    from spmd_engine.planning import StepAnalysis

Sums = dict[tuple, tuple[int, int]]  # calls and bytes of this rank, by line of the ledger

logger = logging.getLogger(__name__)

METRICS = "metrics"  #: the label of communication between steps, which is not part of a step


class FirstStepCheck(Hook):
    """Compares the calls and bytes that one step adds to the ledgers of all ranks with the dry run of the step.

    It is the first step that updates the parameters, unless the engine has moved to another mesh before. ``predict``
    returns the analysis and the names of routed layers. It is called once, on rank 0; if it fails, a warning is logged
    and nothing is compared. If ``enforced``, a difference is an error, else a warning.
    """

    def __init__(
        self, engine: ShardedEngine, predict: Callable[[], tuple[StepAnalysis, set[str]]], *, enforced: bool = True
    ) -> None:
        self._engine, self._predict, self._enforced = engine, predict, enforced
        self._is_due, self._before = True, Sums()
        self._made: list[tuple[tuple, tuple[int, int]]] | None = None

    def before_compute(self, step: int) -> None:
        if self._is_due:
            self._before = self._ledger_sums()

    def after_update(self, step: int) -> None:
        if not self._is_due:
            return
        self._is_due, self._made = False, []
        for line, (calls, sent) in self._ledger_sums().items():
            before = self._before.get(line, (0, 0))
            if calls > before[0] and line[2] != METRICS:
                self._made.append((line, (calls - before[0], sent - before[1])))

    def complete(self, report: StepReport) -> StepReport:
        """The report with the prediction and the measurement. Collective.

        Raises PlanError on every rank if the step differs from its dry run, naming the first such call.
        """
        if self._made is None:
            return report
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        cores = sorted(os.sched_getaffinity(0))
        group, made, self._made = self._engine.group(), self._made, None
        calls = gather_equal_json(group, made, METRICS)
        measured = gather_json(group, [resident, cores], METRICS)
        # The seconds of the step include loading.
        verdict = json_from_rank_zero(group, lambda: self._judge(calls, measured, report.seconds))
        if verdict["differs"] and self._enforced:
            raise PlanError(f"step 1 differs from its analysis: {verdict['differs']}. --no-enforce continues")
        return replace(report, predicted=verdict["facts"]) if verdict["facts"] else report

    def notified(self, name: str, *facts: Any) -> None:
        if name == "reshaped":  # the analysis is of the first mesh
            self._is_due = False

    def _judge(self, made: list, measured: list, seconds: float) -> dict[str, Any]:
        """The first difference, if any, and the facts for ``metrics.jsonl``. Only rank 0 imports the planner."""
        from spmd_engine.planning.machine.machine import default_machine
        from spmd_engine.planning.simulator import check_prediction as check
        from spmd_engine.planning.simulator.simulation import simulate

        try:
            analysis, routed = self._predict()
        except Exception as error:
            reason = str(error) if isinstance(error, UsageError) else f"its analysis failed with {error!r}"
            logger.warning("step 1 was not compared with its analysis: %s", reason)
            return {"differs": "", "facts": {}}
        ledgers = [{tuple(line): tuple(sums) for line, sums in calls} for calls in made]
        sums = check.predicted_sums(analysis)
        differing = check.differences(sums, ledgers, routed, analysis.axes)
        if differing and not self._enforced:
            logger.warning("step 1 differs from its analysis: %s", differing[0])
        resident = [bytes for bytes, _ in measured]
        facts = {
            "bytes_sent": analysis.bytes_sent,
            "calls": analysis.calls,
            "peak_bytes": analysis.peak_bytes,
            "peak_bytes_by_rank": condensed(analysis.peak_bytes_by_rank()),
            "resident_bytes": max(resident),
            "resident_bytes_by_rank": condensed(resident),
            "cores_by_rank": [cores for _, cores in measured[:LISTED]],
            "traffic": check.traffic(sums, ledgers),
            "measured_seconds": seconds,
            "differences": len(differing),
        }
        with suppress(UsageError):  # a machine with too few ranks
            machine = default_machine()
            facts |= {"seconds": simulate(analysis, machine).seconds, "machine": machine.name}
        if routing := check.routed_bytes(sums, ledgers, routed, analysis.axes):
            facts["routed_bytes"] = routing
        return {"differs": differing[0] if differing else "", "facts": facts}

    def _ledger_sums(self) -> Sums:
        return {line: (entry.calls, entry.sent) for line, entry in self._engine.mesh.ledger.entries.items()}


def first_step_check(workload: Workload, enforced: bool) -> FirstStepCheck | None:
    """The check of a job's first step; None for an engine without a dry run."""
    engine, job = workload.engine, workload.job
    if not isinstance(engine, LayeredEngine):
        return None

    def predict() -> tuple[StepAnalysis, set[str]]:
        from spmd_engine.planning import analyze

        shape = engine.model, engine.mesh.all_axes, job.composition
        options = {"layout": engine.layout, "nodes": engine.mesh.nodes_by_rank, "documents": workload.data.documents}
        routed = {name for name, layer in engine.model.layers if "E" in layer.sizes}  # to experts, by values
        return analyze(*shape, **options, **step_of(job)), routed

    return FirstStepCheck(engine, predict, enforced=enforced)
