"""Foresight: what every rank computes, sends and holds in a step, before a rank is started."""

from spmd_engine.planning.dry_run.analyze import analyze
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
from spmd_engine.planning.dry_run.user_engine import Samples, analyze_engine

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
