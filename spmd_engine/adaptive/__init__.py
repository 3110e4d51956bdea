"""Adaptation of a running job: what its steps show, and whether and how it changes its shape."""

from spmd_engine.adaptive.migration import LiveMigration, MigrationPlan
from spmd_engine.adaptive.reshape import Reshaper, Shape, ShapeRequest

__all__ = ["LiveMigration", "MigrationPlan", "Reshaper", "Shape", "ShapeRequest"]
