"""Adaptation of a running job: what its steps show, and whether and how it changes its shape."""

from typing import TYPE_CHECKING

from spmd_engine.engine.reshape import Reshaper, Shape, ShapeRequest
from spmd_engine.importing import imported_when_asked

if TYPE_CHECKING:
    from spmd_engine.adaptive.migration import LiveMigration, MigrationPlan

__all__ = ["LiveMigration", "MigrationPlan", "Reshaper", "Shape", "ShapeRequest"]

#: Live migration is imported when it is first used: it plans by a dry run.
__getattr__ = imported_when_asked(__name__)
