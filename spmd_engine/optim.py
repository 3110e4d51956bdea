"""Optimizers and learning-rate schedules, for ``spmd_engine.optim``."""

from spmd_engine.engine.optimizers import SGD, AdamW, Optimizer, WarmupCosine

__all__ = ["SGD", "AdamW", "Optimizer", "WarmupCosine"]
