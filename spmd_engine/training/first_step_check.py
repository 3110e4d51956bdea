"""The first step of a training beside what was foretold of it: calls and bytes must be equal."""

from __future__ import annotations

import json
import logging
import resource
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from spmd_engine.comm.agreement.rank_zero import gather_json, text_from_rank_zero
from spmd_engine.comm.mesh import Mesh
from spmd_engine.engine.layered import LayeredEngine
from spmd_engine.errors import PlanError, UsageError
from spmd_engine.training.workload import Workload, optimizer_of

if TYPE_CHECKING:
    from spmd_engine.planning import StepAnalysis

logger = logging.getLogger(__name__)

AFTERWARDS = "metrics"  #: the label of what is sent between steps, to tell how they went


class FirstStepCheck:
    """Watches one step of a trainer: what the ledger gains meanwhile, on every rank.

    ``foretell`` is called on rank 0, once; if it fails, nothing is compared, since the training matters more.
    ``enforced``: whether a step that differs is an error, or is told and no more.
    """

    def __init__(
        self, mesh: Mesh, foretell: Callable[[], tuple[StepAnalysis, set[str]]], *, enforced: bool = True
    ) -> None:
        self._mesh, self._foretell, self._enforced = mesh, foretell, enforced
        self._before: dict[tuple, tuple[int, int]] = {}

    def begin(self) -> None:
        """The step begins."""
        self._before = self._account()

    def made(self) -> list[tuple[tuple, tuple[int, int]]]:
        """What this rank has sent since: calls and bytes by line."""
        gained = []
        for line, (calls, sent) in self._account().items():
            calls_before, sent_before = self._before.get(line, (0, 0))
            if calls > calls_before and line[2] != AFTERWARDS:
                gained.append((line, (calls - calls_before, sent - sent_before)))
        return gained

    def compare(self, made: list[tuple[tuple, tuple[int, int]]], seconds: float) -> dict[str, Any]:
        """What was foretold, and what was measured beside it, for ``metrics.jsonl``. Collective.

        ``seconds`` are those of the step that was made; being the first, it also loads what later ones have at hand.
        Raises PlanError on every rank if the step did other than was foretold; it names the first call that differs.
        """
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        everyone = gather_json(self._mesh.group(), [made, resident], AFTERWARDS)
        said = json.loads(text_from_rank_zero(self._mesh.group(), lambda: json.dumps(self._judge(everyone, seconds))))
        if said["differs"] and self._enforced:
            raise PlanError(f"step 1 did other than was foretold: {said['differs']}. --no-enforce trains on")
        return {"foretold": said["facts"]} if said["facts"] else {}

    def _judge(self, everyone: list, seconds: float) -> dict[str, Any]:
        """On rank 0, which alone imports the analyzer: what the step differs in, if it does, and facts."""
        from spmd_engine.planning.machine.files import default_machine
        from spmd_engine.planning.simulator.check_prediction import differences, facts_of, foretold_sums, routed_bytes

        try:
            analysis, routed = self._foretell()
        except Exception as error:
            what = str(error) if isinstance(error, UsageError) else f"the analysis of it failed with {error!r}"
            logger.warning("this step was not compared with a plan: %s", what)
            return {"differs": "", "facts": {}}
        ledgers = [{tuple(line): tuple(sums) for line, sums in made} for made, _ in everyone]
        sums = foretold_sums(analysis)
        found = differences(sums, ledgers, routed, analysis.axes)
        if found and not self._enforced:
            logger.warning("step 1 did other than was foretold: %s", found[0])
        resident = max(bytes for _, bytes in everyone)
        measured = {"resident_bytes": resident, "measured_seconds": seconds, "differences": len(found)}
        facts = facts_of(analysis, default_machine) | measured
        if of_routing := routed_bytes(sums, ledgers, routed, analysis.axes):
            facts["routed_bytes"] = of_routing
        return {"differs": found[0] if found else "", "facts": facts}

    def _account(self) -> dict[tuple, tuple[int, int]]:
        return {line: (entry.calls, entry.sent) for line, entry in self._mesh.ledger.entries.items()}


def first_step_check(workload: Workload, enforced: bool) -> FirstStepCheck | None:
    """For the first step of a job; None for an engine of which no step can be foretold."""
    engine, job = workload.engine, workload.job
    if not isinstance(engine, LayeredEngine):
        return None

    def foretell() -> tuple[StepAnalysis, set[str]]:
        from spmd_engine.planning import analyze
        from spmd_engine.planning.simulator.check_prediction import routed_labels

        analysis = analyze(
            engine.model,
            engine.mesh.axes,
            job.composition,
            batch_size=job.data.batch_size,
            micro_batches=job.data.micro_batches,
            sequence=job.data.length,
            dtype=engine.dtype,
            optimizer=optimizer_of(job.training),
            layout=engine.layout,
            nodes=engine.mesh.nodes_by_rank,
        )
        return analysis, routed_labels(engine.model)

    return FirstStepCheck(engine.mesh, foretell, enforced=enforced)
