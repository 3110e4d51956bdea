"""The dry run of a step: what every rank computes, sends and holds, before a rank is started."""

from spmd_engine.planning.dry_run.analyze import Samples, analyze, analyze_engine
from spmd_engine.planning.dry_run.step_analysis import (
    Communication,
    Computation,
    ModelShard,
    Moment,
    Peak,
    Product,
    RankClass,
    RankStep,
    StepAnalysis,
)

__all__ = [
    "Communication",
    "Computation",
    "ModelShard",
    "Moment",
    "Peak",
    "Product",
    "RankClass",
    "RankStep",
    "Samples",
    "StepAnalysis",
    "analyze",
    "analyze_engine",
]
