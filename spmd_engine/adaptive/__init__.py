"""Adaptation of a running job: what its steps show, and whether and how it changes its shape."""

from spmd_engine.adaptive.reshape import Reshaper, Shape, ShapeRequest

__all__ = ["Reshaper", "Shape", "ShapeRequest"]
