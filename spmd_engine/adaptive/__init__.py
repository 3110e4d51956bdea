"""Adaptation of a running job: its shape, and how it changes between steps."""

from spmd_engine.adaptive.reshape import Reshaper, Shape, ShapeRequest

__all__ = ["Reshaper", "Shape", "ShapeRequest"]
