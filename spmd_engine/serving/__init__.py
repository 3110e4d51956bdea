"""Serving models of text: generation and scoring, on any mesh."""

from spmd_engine.serving.generation import Completion, StoppingCriteria, generate
from spmd_engine.serving.sampling import SamplingOptions

__all__ = ["Completion", "StoppingCriteria", "SamplingOptions", "generate"]
