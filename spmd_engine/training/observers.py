"""Who watches a run: observers, and the one that writes ``metrics.jsonl``."""

from __future__ import annotations

import json
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from spmd_engine.checkpoints.format.folder import replace_file
from spmd_engine.errors import UsageError
from spmd_engine.files import open_regular
from spmd_engine.training.trainer import StepReport

if TYPE_CHECKING:
    from spmd_engine.training.run import Run

logger = logging.getLogger(__name__)


class Observer:
    """Told of a run's course on rank 0 alone; a subclass says what it makes of it, here nothing.

    Nothing here may call a collective. An OSError ends the run on all ranks, in one line.
    """

    def started(self, run: Run, stop: int) -> None:
        """The run begins, or goes on after ``run.trainer.steps_done`` steps, up to step ``stop``."""

    def evaluated(self, step: int, loss: float) -> None:
        """The validation loss after ``step`` steps; comes after that step's ``stepped``, whose report has it, too.

        The metrics beside it are in the run's ``evaluation``.
        """

    def stepped(self, report: StepReport) -> None:
        """A step was made."""

    def saved(self, step: int) -> None:
        """The checkpoint after ``step`` steps is complete."""

    def not_saved(self, step: int, why: str) -> None:
        """A checkpoint could not be written; the run goes on after ``step`` steps."""

    def stopped(self, step: int, signal: int) -> None:
        """The run ends after ``step`` steps, saved, since a rank was sent this signal."""

    def finished(self, loss: float | None, sample: str) -> None:
        """All steps are made; the last validation loss, if there is one, and what the model writes, if it does."""

    def closed(self) -> None:
        """The run is over, in whatever way: give back what is open. Not called where ``started`` was not."""


class MetricsFile(Observer):
    """``metrics.jsonl``: a line a step. A run that goes on from a checkpoint takes up the file at its step."""

    NAME = "metrics.jsonl"

    def started(self, run: Run, stop: int) -> None:
        self._run, self._path, self._steps = run, run.folder / self.NAME, run.trainer.steps_done
        kept = "".join(line + "\n" for line in _lines_up_to(self._path, self._steps))
        replace_file(self._path, kept)
        self._file: TextIO = self._opened()

    def stepped(self, report: StepReport) -> None:
        if not self._is_there():
            self._run.check_lock()  # another one's file is not this one's
            logger.warning("%s is gone, and what it said up to step %d; made again", self._path, self._steps)
            self._file.close()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._opened()
        self._steps = report.step
        self._file.write(json.dumps(report.as_dict()) + "\n")
        self._file.flush()

    def closed(self) -> None:
        with suppress(OSError):  # of a line that could not be written: that was said
            self._file.close()

    def _opened(self) -> TextIO:
        return open(open_regular(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "a")

    def _is_there(self) -> bool:
        """Whether the open file is the one of that name: a removed one would take lines that nobody can read."""
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False


def _lines_up_to(path: Path, step: int) -> list[str]:
    """The lines of the first steps: without what a run that was broken off wrote beyond its checkpoint, and rubbish.

    Raises UsageError for a pipe, a folder and the like, of which the first might be read for ever.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise UsageError(f"{path} is no file: move it away; what a run says of its steps is written there")
    kept = []
    for line in path.read_text(errors="replace").split("\n") if step and path.exists() else ():
        try:
            said = json.loads(line)
        except (ValueError, RecursionError):  # the last line of a run that was killed
            continue
        if isinstance(said, dict) and isinstance(said.get("step"), int) and said["step"] <= step:
            kept.append(line)
    return kept
