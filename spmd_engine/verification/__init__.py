"""Verification: compares a sharded engine with one on a single device in lockstep, and explains differences."""

from spmd_engine.verification.lockstep import verify
from spmd_engine.verification.reference import engine_and_reference, engine_of_model, fill_zeros, mesh_of_one
from spmd_engine.verification.report import (
    Cause,
    Disagreement,
    Distances,
    Element,
    Finding,
    GradientCheck,
    Report,
    Slope,
)

__all__ = [
    "Cause",
    "Disagreement",
    "Distances",
    "Element",
    "Finding",
    "GradientCheck",
    "Report",
    "Slope",
    "engine_and_reference",
    "engine_of_model",
    "fill_zeros",
    "mesh_of_one",
    "verify",
]
