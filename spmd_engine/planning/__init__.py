"""The dry run of a step: what every rank computes, sends and holds; and the search for the best plan."""

from typing import TYPE_CHECKING

from spmd_engine.importing import imported_when_asked

if TYPE_CHECKING:
    from spmd_engine.planning.dry_run.analyze import Samples, analyze, analyze_engine
    from spmd_engine.planning.dry_run.step_analysis import (
        Communication,
        Computation,
        Moment,
        ParameterShard,
        Peak,
        Product,
        RankClass,
        RankStep,
        StepAnalysis,
    )
    from spmd_engine.planning.plan_result import PlanResult
    from spmd_engine.planning.planner import plan

__all__ = [
    "Communication",
    "Computation",
    "Moment",
    "ParameterShard",
    "Peak",
    "PlanResult",
    "Product",
    "RankClass",
    "RankStep",
    "Samples",
    "StepAnalysis",
    "analyze",
    "analyze_engine",
    "plan",
]

#: Each is imported when it is first used: of a job's ranks, only rank 0 analyzes the first step.
__getattr__ = imported_when_asked(__name__)
