"""What rank 0 reports of a run: observers, and the files that four of them write to its folder."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, TextIO

from spmd_engine.arrays.products import in_use, unfit
from spmd_engine.checkpoints.format.folder import replace_file
from spmd_engine.errors import UsageError
from spmd_engine.files import open_regular, output_file
from spmd_engine.runtime.activity import State
from spmd_engine.runtime.watchdog import condition_of
from spmd_engine.training.hooks import Hook
from spmd_engine.training.trainer import StepReport

if TYPE_CHECKING:
    from spmd_engine.training.run import Run
    from spmd_engine.training.workload import Workload

logger = logging.getLogger(__name__)

PLACED = "experts placed"  #: the event of experts that have moved between ranks


class Observer:
    """Methods that a run calls on rank 0; a subclass overrides some. By default they do nothing.

    They must not call collectives. An OSError ends the run on all ranks, with one line.
    """

    def opened(self, workload: Workload, parameters: int, notices: Sequence[str]) -> None:
        """The job's workload, its number of parameters, and notices of options without effect. Before ``started``."""

    def loaded(self, table: Sequence[str]) -> None:
        """The sources of a job's initial weights, as lines; none if the weights are random. Before ``started``."""

    def started(self, run: Run, stop: int) -> None:
        """The run begins, or continues after ``run.trainer.steps_done`` steps, up to step ``stop``."""

    def evaluated(self, step: int, loss: float) -> None:
        """The validation loss after ``step`` steps. Called after ``stepped``, whose report also has the loss.

        The run's ``evaluation`` has the metrics.
        """

    def stepped(self, report: StepReport) -> None:
        """A step is done."""

    def restored(self, report: StepReport) -> None:
        """The step of the checkpoint that a run resumes from: the run had ended before it was reported as a whole, for
        example in its evaluation."""

    def saved(self, step: int) -> None:
        """The checkpoint after ``step`` steps is complete; before ``stepped``, if the step is evaluated, too."""

    def not_saved(self, step: int, why: str) -> None:
        """A checkpoint could not be written; the run continues after ``step`` steps."""

    def crossed(self, step: int, text: str) -> None:
        """Other thresholds of the monitor are crossed than before, as the text says, or none: see ``CrossingLog``."""

    def estimated(self, step: int, change: Mapping[str, Any]) -> None:
        """What a change of shape would move, and its time, by protocol: see ``estimate_change``. Nothing changes."""

    def migrating(self, step: int, plan: Mapping[str, Any]) -> None:
        """A live migration has begun, by this plan: see ``MigrationPlan``. It ends with one of the next two."""

    def reshaped(self, step: int, change: Mapping[str, Any]) -> None:
        """After ``step`` steps the run goes on in another shape: see ``ShapeChanges``."""

    def not_reshaped(self, step: int, change: Mapping[str, Any]) -> None:
        """A requested change of shape is refused, and the run continues as it was."""

    def joined(self, step: int, change: Mapping[str, Any]) -> None:
        """After ``step`` steps ranks of another launcher have joined the job, as idle ranks: see ``join``."""

    def stopped(self, step: int, signal: int) -> None:
        """The run has been saved and ends after ``step`` steps, because a rank received this signal."""

    def finished(self, loss: float | None, sample: str) -> None:
        """All steps are done: the last validation loss, or None, and a text that the model generates, or ""."""

    def closed(self) -> None:
        """The run has ended, perhaps by an error: close files. Called only after ``started``."""


class Observers(Hook):
    """Passes what happens to a run to its observers; on ranks other than 0 there are none."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.observers = tuple(observers)

    def notified(self, name: str, *facts: Any) -> None:
        for observer in self.observers:
            getattr(observer, name)(*facts)


class MetricsFile(Observer):
    """``metrics.jsonl``: a line for each step. A resumed run continues the file after the step of its checkpoint."""

    NAME = "metrics.jsonl"

    def started(self, run: Run, stop: int) -> None:
        self._run, self._path, self._steps = run, run.folder / self.NAME, run.trainer.steps_done
        self._rewrite(self._steps)
        self._of_start: dict[str, Any] = {"products": in_use()}  # for the first line of a start

    def restored(self, report: StepReport) -> None:
        self._file.close()
        self._rewrite(report.step - 1)
        self.stepped(report)

    def stepped(self, report: StepReport) -> None:
        if not self._is_current():
            self._run.check_lock()  # the file may belong to another run
            logger.warning("%s is gone, and what it said up to step %d; made again", self._path, self._steps)
            self._file.close()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._open()
        self._steps = report.step
        self._file.write(json.dumps(report.as_line() | self._of_start) + "\n")
        self._of_start = {}
        self._file.flush()

    def closed(self) -> None:
        with suppress(OSError):  # for a line that could not be written, which is already reported
            self._file.close()

    def _rewrite(self, steps: int) -> None:
        """Keep the lines of the first ``steps`` steps, and open the file to continue it."""
        replace_file(self._path, "".join(line + "\n" for line in lines_up_to(self._path, steps)))
        self._file: TextIO = self._open()

    def _open(self) -> TextIO:
        return open(open_regular(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "a")

    def _is_current(self) -> bool:
        """Whether the path still names the open file: lines written to a removed file are lost."""
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False


class DataPicture(Observer):
    """``data.png``: a picture of the data that a run learns from, if there is one and Pillow is installed."""

    NAME = "data.png"

    def __init__(self, folder: Path) -> None:
        self._path = folder / self.NAME

    def opened(self, workload: Workload, parameters: int, notices: Sequence[str]) -> None:
        if workload.picture is not None:
            with suppress(UsageError), output_file(self._path, "the run", follow=False) as file:
                file.write(workload.picture())


class EventLog(Observer):
    """``events.jsonl``: a line for each start, warning, checkpoint and end of a run, with its time in UTC.

    A run that continues appends to the file, so that it tells of restarts.
    """

    NAME = "events.jsonl"

    def __init__(self, folder: Path) -> None:
        self._path = folder / self.NAME

    def opened(self, workload: Workload, parameters: int, notices: Sequence[str]) -> None:
        self._write("opened", parameters=parameters, data=str(workload.corpus), notices=list(notices))

    def loaded(self, table: Sequence[str]) -> None:
        if table:
            self._write("loaded", table=list(table))

    def started(self, run: Run, stop: int) -> None:
        from spmd_engine.runtime.environment import environment  # which imports much, on rank 0 alone

        self._run, mesh = run, run.engine.mesh
        self._experts: Mapping[str, Sequence[int]] = {}
        where = {"mesh": str(mesh), "nodes": mesh.nodes, "environment": environment()}
        where |= {"products": in_use(), "memory": run.memory_limits}
        self._write("started", step=run.steps_done, stop=stop, **where)
        self._handler = logging.Handler(logging.WARNING)  # last: an observer that could not start is not closed
        self._handler.emit = self._warned
        logging.getLogger("spmd_engine").addHandler(self._handler)

    def _warned(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # the disk may be full: a warning must not end the run
            self._write("warning", text=record.getMessage())
        if logging.lastResort and not logging.getLogger().handlers:  # which this handler would replace
            logging.lastResort.handle(record)

    def evaluated(self, step: int, loss: float) -> None:
        if step == 0:  # later ones are in the metrics
            metrics = self._run.evaluation.metrics if self._run.evaluation is not None else {}
            metrics = {f"validation_{name}": value for name, value in metrics.items()}
            self._write("evaluated", step=step, validation_loss=loss, **metrics)

    def stepped(self, report: StepReport) -> None:
        if report.skipped:
            self._write("skipped", step=report.step, why=report.skipped)
        layout = getattr(self._run.engine, "layout", None)
        if layout and layout.experts != self._experts:  # moved by their load, or by a change of shape
            self._experts = dict(layout.experts)
            self._write(PLACED, step=report.step, parts=self._experts)

    def restored(self, report: StepReport) -> None:
        self.stepped(report)

    def saved(self, step: int) -> None:
        self._write("saved", step=step)

    def not_saved(self, step: int, why: str) -> None:
        self._write("not saved", step=step, why=why)

    def crossed(self, step: int, text: str) -> None:
        self._write("crossed", step=step, text=text)

    def estimated(self, step: int, change: Mapping[str, Any]) -> None:
        self._write("estimated", step=step, **change)

    def migrating(self, step: int, plan: Mapping[str, Any]) -> None:
        self._write("migrating", step=step, **plan)

    def reshaped(self, step: int, change: Mapping[str, Any]) -> None:
        self._write("reshaped", step=step, **change)

    def not_reshaped(self, step: int, change: Mapping[str, Any]) -> None:
        self._write("not reshaped", step=step, **change)

    def joined(self, step: int, change: Mapping[str, Any]) -> None:
        self._write("joined", step=step, **change)

    def stopped(self, step: int, signal: int) -> None:
        self._write("stopped", step=step, signal=signal)

    def finished(self, loss: float | None, sample: str) -> None:
        self._write("finished", step=self._run.steps_done, validation_loss=loss, sample=sample)

    def closed(self) -> None:
        logging.getLogger("spmd_engine").removeHandler(self._handler)
        with suppress(OSError):
            self._write("closed", step=self._run.steps_done, unfit=dict(unfit))

    def _write(self, event: str, **facts: Any) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)  # it may have been removed
        file = open_regular(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        with open(file, "a") as lines:
            lines.write(
                json.dumps({"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **facts})
                + "\n"
            )


class ActivityFile(Observer):
    """``activity.json``: what the ranks of rank 0's node do now, written again every ``PERIOD`` while the run goes on.

    A thread of rank 0 reads the records of the other ranks, which do nothing for it. Only a run that was killed leaves
    the file behind.
    """

    NAME, PERIOD = "activity.json", 2.0  # seconds

    def started(self, run: Run, stop: int) -> None:
        self._path, self._activity = run.folder / self.NAME, run.engine.mesh.activity
        self._began, self._ends = monotonic(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="spmd_engine activity", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ends.is_set():
            with suppress(OSError, UsageError):  # a folder that is gone, a full disk: the run itself reports it
                self._write()
            self._ends.wait(self.PERIOD)

    def _write(self) -> None:
        content = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "seconds": round(monotonic() - self._began, 1),  # since the start
            "ranks": [
                self._now(record.state(condition_of(record.process), stack="")) for record in self._activity.records
            ],
        }
        unfinished = self._path.with_name(f".{self.NAME}")
        unfinished.unlink(missing_ok=True)  # left by a run that was killed
        with open(open_regular(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w") as file:
            json.dump(content, file)
        os.replace(unfinished, self._path)

    @staticmethod
    def _now(state: State) -> dict[str, Any]:
        call = ""
        if wait := state.wait:
            label = f" ({wait.call.label})" if wait.call.label else ""
            call = f"{wait.call.operation} over {wait.call.axes}{label}" if wait.call.operation else wait.what
        return {
            "rank": state.rank,
            "process": state.process,
            "phase": state.phase,
            "phase_seconds": round(state.phase_seconds, 1),
            "call": call or ("a message" if wait else ""),
            "call_seconds": round(wait.seconds, 1) if wait else 0.0,
            "condition": state.condition,
        }

    def closed(self) -> None:
        self._ends.set()
        self._thread.join(self.PERIOD)  # no longer, if its file system hangs
        for left in (self._path, self._path.with_name(f".{self.NAME}")):  # the second after a disk was full
            with suppress(OSError):
                left.unlink(missing_ok=True)


def lines_up_to(path: Path, step: int) -> list[str]:
    """The lines of the first ``step`` steps, without damaged lines and those that a run wrote after its checkpoint.

    Raises UsageError for a folder or a pipe, since reading a pipe might never end.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise UsageError(f"{path} is no file: move it away; the run writes its metrics to this path")
    lines = []
    for line in path.read_text(errors="replace").split("\n") if step and path.exists() else ():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # the last line of a run that was killed
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int) and record["step"] <= step:
            lines.append(line)
    return lines
