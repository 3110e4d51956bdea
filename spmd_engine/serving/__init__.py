"""Serving models of text: generation and scoring, on any mesh."""

from spmd_engine.serving.generation import Completion, Limits, generate
from spmd_engine.serving.options import SamplingOptions

__all__ = ["Completion", "Limits", "SamplingOptions", "generate"]
