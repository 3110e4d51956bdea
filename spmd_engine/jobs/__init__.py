"""Jobs: what joins training with the tools above it. ``train`` registers their hooks."""

from typing import TYPE_CHECKING

from spmd_engine.importing import imported_when_asked

if TYPE_CHECKING:
    from spmd_engine.jobs.run_job import join, train

__all__ = ["join", "train"]

__getattr__ = imported_when_asked(__name__)
