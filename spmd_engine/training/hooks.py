"""Hooks: what acts between the parts of a job, on all of its ranks. See "Write your own hook" in docs/training.md."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from spmd_engine.comm import Group

if TYPE_CHECKING:
    from spmd_engine.training.run import Run
    from spmd_engine.training.train_config import TrainConfig
    from spmd_engine.training.trainer import StepReport


class Hook:
    """Methods that a job calls on every rank of its mesh; a subclass overrides some. By default they do nothing.

    All ranks have the same hooks in the same order, so that hooks may call collectives. ``Trainer`` calls the four of a
    step, ``before_compute`` to ``complete``; ``Run`` calls these and all others but ``prepare``, which ``train`` calls.
    """

    def prepare(self, job: TrainConfig, ranks: Group) -> Sequence[str]:
        """Before the engine is built: choose what must be equal on all ranks. Called again when ranks have joined.

        Returns notices for the user.
        """
        return ()

    def during(self, run: Run, steps: int) -> AbstractContextManager[Any]:
        """A context for all steps up to number ``steps``; what ends the run early passes through it as an exception."""
        return nullcontext()

    def before_compute(self, step: int) -> None:
        """The batch of this step, from 1, is read, and its forward begins."""

    def after_update(self, step: int) -> None:
        """The parameters are updated; not called in a step that updates nothing."""

    def has_request(self, step: int) -> bool:
        """Whether this rank asks all ranks to act after this step. They learn of it without another collective."""
        return False

    def complete(self, report: StepReport) -> StepReport:
        """The report of a step that all ranks have done, perhaps with more facts. Its time does not count."""
        return report

    def between_steps(self, step: int, requested: bool) -> None:
        """The step is reported, and the next one has not begun. ``requested``: whether any rank had a request of this
        hook. A hook that moves the engine to another mesh is the last one, as the others act on the old mesh; it calls
        ``others.wake({"hook": PLACE})`` first, so that ranks outside the mesh call this method of it, too."""

    def notified(self, name: str, *facts: Any) -> None:
        """Something has happened to the run: ``name`` is a method of ``Observer``, ``facts`` its arguments. Also called
        outside the mesh."""
