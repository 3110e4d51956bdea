"""A run: a training with a folder. It evaluates, saves, resumes, stops on a signal, and reports to observers."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from spmd_engine.checkpoints import CheckpointFolder, Save
from spmd_engine.checkpoints.format.folder import RunLock, make_folder, replace_file
from spmd_engine.checkpoints.save import KEEP, mesh_name
from spmd_engine.comm.agreement.rank_zero import on_rank_zero
from spmd_engine.engine.base import ShardedEngine
from spmd_engine.engine.batch import Batch, Evaluation
from spmd_engine.errors import CheckpointError, UsageError
from spmd_engine.files import open_regular
from spmd_engine.runtime.signals import StopFlag
from spmd_engine.training.trainer import StepReport, Trainer

if TYPE_CHECKING:
    from spmd_engine.training.workload import Workload

logger = logging.getLogger(__name__)


class Observer:
    """Methods that a run calls on rank 0 as it goes; a subclass overrides some. Here they do nothing.

    Nothing here may call a collective. An OSError ends the run on all ranks, in one line.
    """

    def opened(self, workload: Workload, parameters: int, notices: Sequence[str]) -> None:
        """What a job trains, its number of parameters, and which of its options have no effect. Before ``started``."""

    def loaded(self, table: Sequence[str]) -> None:
        """Lines that say from what a job's initial weights were read; none, if they are drawn. Before ``started``."""

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
        """Whether the open file is the one of that name: lines written to a removed one are lost."""
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False


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
        self._handler = logging.Handler(logging.WARNING)
        self._handler.emit = lambda record: self._write("warning", text=record.getMessage())
        logging.getLogger("spmd_engine").addHandler(self._handler)
        where = {"mesh": str(mesh), "nodes": list(mesh.nodes_by_rank), "environment": environment()}
        self._write("started", step=run.steps_done, stop=stop, **where)

    def stepped(self, report: StepReport) -> None:
        if report.skipped:
            self._write("skipped", step=report.step, why=report.skipped)

    def saved(self, step: int) -> None:
        self._write("saved", step=step)

    def not_saved(self, step: int, why: str) -> None:
        self._write("not saved", step=step, why=why)

    def stopped(self, step: int, signal: int) -> None:
        self._write("stopped", step=step, signal=signal)

    def finished(self, loss: float | None, sample: str) -> None:
        self._write("finished", step=self._run.steps_done, validation_loss=loss, sample=sample)

    def closed(self) -> None:
        logging.getLogger("spmd_engine").removeHandler(self._handler)
        with suppress(OSError):
            self._write("closed", step=self._run.steps_done)

    def _write(self, event: str, **facts: Any) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)  # it may have been removed
        file = open_regular(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        with open(file, "a") as lines:
            lines.write(
                json.dumps({"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **facts})
                + "\n"
            )


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


# --- A run: a training with a folder, that evaluates, saves, resumes, and ends in order for a signal


if TYPE_CHECKING:
    from spmd_engine.training.workload import Workload

logger = logging.getLogger(__name__)

CONFIG = "config.json"


class Run:
    """A Trainer's steps with all that goes round them, for any ShardedEngine and any data.

    ``folder`` gets ``metrics.jsonl``, checkpoints, and, if there is a ``config`` (JSON), ``config.json``.
    ``validation`` are the batches to evaluate on, every ``eval_every`` steps and at both ends. A checkpoint is
    written every ``save_every`` steps and at the end; 0 is at the end alone. The last ``keep`` stay. ``facts`` (JSON)
    are kept in it, and a run with others cannot go on from it. In the ``background`` training goes on while it is
    written. If it cannot be written, the run ends with CheckpointError on all ranks, or, with ``go_on_unsaved``,
    it reports that to the observers and tries the next one when it is due; the last one, at the end, must be written.
    Every ``check_replicas_every`` steps (0: never) ranks compare what they hold alike, and a flipped bit ends the run.
    ``trace`` traces so many steps, from the second on, to ``trace.json``. ``sample`` is called on all ranks when all is
    done, for a text that shows what was learnt; ``after_step`` with the number of each step, when its metrics are
    reported and before anything is saved.

    SIGINT, SIGTERM, SIGUSR1 or SIGHUP to any rank ends the run after the step that is under way: saved, reported to the
    observers, and with SystemExit, whose code is 128 + the signal's number, on every rank. A second one ends the
    program at once, and so does the first one before a step has been made: there is nothing to save.
    """

    def __init__(
        self,
        folder: str | Path,
        trainer: Trainer,
        *,
        validation: Sequence[Batch] = (),
        eval_every: int = 100,
        save_every: int = 100,
        keep: int = KEEP,
        background: bool = False,
        go_on_unsaved: bool = False,
        check_replicas_every: int = 0,
        config: Mapping[str, Any] | None = None,
        facts: Mapping[str, Any] | None = None,
        observers: Sequence[Observer] = (),
        trace: int = 0,
        sample: Callable[[], str] = lambda: "",
        after_step: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.folder, self.trainer, self.validation = Path(folder), trainer, validation
        self.eval_every, self.save_every, self.trace, self.sample = eval_every, save_every, trace, sample
        self.config, self.facts, self.after_step = config, dict(facts or {}), after_step
        self._keep, self._background, self._go_on_unsaved = keep, background, go_on_unsaved
        self._check_replicas_every = check_replicas_every
        self._phase = trainer.engine.mesh.activity.phase
        self._saving: Save | None = None  # begun, and not yet known to be complete
        self._lock: RunLock | None = None  # while this run writes
        self.evaluation: Evaluation | None = None  #: the last one
        #: on rank 0; on the others none
        self.observers = (MetricsFile(), EventLog(self.folder), *observers) if self.engine.device_id == 0 else ()

    @property
    def engine(self) -> ShardedEngine:
        return self.trainer.engine

    @property
    def loss(self) -> float | None:
        """The loss of the last evaluation."""
        return self.evaluation.loss if self.evaluation else None

    @property
    def steps_done(self) -> int:
        return self.trainer.steps_done

    def train(self, steps: int) -> float | None:
        """Steps until ``steps`` have been made in all. Returns the last validation loss. Collective."""
        self.engine.mesh.activity.folder = self.folder  # where a watchdog puts the stacks of a job that hangs
        with self.locked(), self._observed(steps), StopFlag(to_save=False) as stop:
            self.trainer.stop = stop
            self._evaluate()
            self._tell_evaluated()
            for report in self._traced(steps):
                last = report.step == steps
                evaluates = last or not stop.taken and _due(self.eval_every, report.step)
                if evaluates:
                    self._evaluate()
                    if found := self.evaluation:
                        report = replace(report, validation_loss=found.loss, validation_metrics=found.metrics)
                self._tell(lambda each, report=report: each.stepped(report))
                if evaluates:
                    self._tell_evaluated()
                self.after_step(report.step)
                ends = last or bool(stop.taken)
                if _due(self._check_replicas_every, report.step):
                    self._compare_replicas(report.step)
                if self._saving and self._written_everywhere():
                    self._finish_saving(must=ends)
                if ends or _due(self.save_every, report.step):
                    self._start_saving(must=ends)
                    if ends or not self._background:
                        self._finish_saving(must=ends)
            if stop.taken:
                self._tell(lambda each: each.stopped(self.steps_done, stop.taken))
                sys.exit(128 + stop.taken)
            if steps == 0:
                self.save()
        return self.loss

    def save(self) -> None:
        """Write a checkpoint, and the folder if there is none. Collective."""
        with self.locked():
            self._start_saving(must=True)
            self._finish_saving(must=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """No other run writes here meanwhile; what a broken save left is swept. Collective.

        ``train`` and ``save`` do so themselves; round both and ``resume`` or ``write_config``, it keeps others out from
        the first file on. Raises UsageError on all ranks if another run is writing here.
        """
        if self._lock:
            yield
            return
        lock = RunLock(self.folder)

        def take() -> None:
            lock.__enter__()
            CheckpointFolder(self.folder).prepare()

        try:
            self.on_rank_zero(take)
            self._lock = lock
            yield
        finally:
            self._lock = None
            lock.__exit__()

    def check_lock(self) -> None:
        """Raise UsageError if another run has begun to write here, from a host that this one's lock does not reach.

        On rank 0, which has the lock.
        """
        if self._lock:
            self._lock.check()

    def write_config(self) -> None:
        """Make the folder, with ``config.json`` if there is a ``config``. Collective."""

        def write() -> None:
            self.check_lock()
            make_folder(self.folder)
            if self.config is not None:
                replace_file(self.folder / CONFIG, json.dumps(self.config, indent=2) + "\n")

        self.on_rank_zero(write, CheckpointError)

    def on_rank_zero(self, write: Callable[[], None], error: type[UsageError] = UsageError) -> None:
        """``write()`` into the folder, on rank 0 alone; what the system refuses is one error on all. Collective."""

        def named() -> None:
            with self._named():
                write()

        on_rank_zero(self.engine.group(), named, error)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Name the folder: the error of a full disk does not say which one it is."""
        try:
            yield
        except OSError as error:
            said = f"{self.folder} cannot be written to: {error}; the last checkpoint there, if any, is whole"
            raise UsageError(said) from error

    def resume(self) -> None:
        """Take up the folder's checkpoint where it left off. Collective.

        Raises UsageError if there is none, or if it was made with other ``facts``.
        """
        from spmd_engine.checkpoints import load_checkpoint

        with self._phase("loading a checkpoint"):
            facts = load_checkpoint(self.folder, self.engine, self.trainer.optimizer)
            if self.engine.device_id == 0:
                self._tell_of_another_mesh()
        if missing := {"step", *self.facts} - set(facts):
            raise UsageError(f"{self.folder}: its checkpoint does not say its {', '.join(sorted(missing))}")
        for name, value in self.facts.items():
            if facts[name] != value:
                raise UsageError(f"{self.folder} was trained with {name} {facts[name]!r}, and this is {value!r}")
        self.trainer.steps_done = facts["step"]

    def _tell_of_another_mesh(self) -> None:
        from spmd_engine.checkpoints.read import read_manifest

        newest = CheckpointFolder(self.folder).newest()
        saved_on, here = read_manifest(newest).mesh if newest else "", mesh_name(self.engine)
        if saved_on and saved_on != here:
            said = "%s was saved on mesh %s; on mesh %s the results agree to rounding, not to the bit"
            logger.warning(said, newest, saved_on, here)

    def _start_saving(self, must: bool) -> None:
        self._finish_saving(must)  # the one before
        with self._maybe_unsaved(must), self._phase("saving, step", self.steps_done):
            self.write_config()
            self._saving = Save(
                self.folder,
                self.engine,
                self.trainer.optimizer,
                step=self.steps_done,
                config=self.config,
                keep=self._keep,
                facts=self.facts,
                background=self._background and not must,
            )

    def _written_everywhere(self) -> bool:
        """Whether no rank is still writing. Collective."""
        assert self._saving
        mine = np.array(self._saving.is_written, np.int64)
        return bool(self.engine.group().all_reduce(mine, "min", label="save"))

    def _finish_saving(self, must: bool) -> None:
        saving, self._saving = self._saving, None
        if saving is not None:
            with self._maybe_unsaved(must), self._phase("saving, step", saving.step):
                saving.finish()
                self._tell(lambda each: each.saved(saving.step))

    @contextmanager
    def _maybe_unsaved(self, must: bool) -> Iterator[None]:
        """Report a failed save to the observers, if this run may go on without it."""
        try:
            yield
        except CheckpointError as error:
            if must or not self._go_on_unsaved:
                raise
            why = str(error)
            self._tell(lambda each: each.not_saved(self.steps_done, why))

    def _evaluate(self) -> None:
        if self.validation:
            found = self.trainer.evaluation(self.validation)
            self.evaluation = found if found.count else None  # of no targets there is no loss

    def _compare_replicas(self, step: int) -> None:
        from spmd_engine.checkpoints.digest import compare_replicas

        with self._phase("comparing replicas, step", step):
            compare_replicas(self.engine, self.trainer.optimizer)

    def _traced(self, steps: int) -> Iterator[StepReport]:
        """The training's steps; those that are traced come second, when everything is warm."""
        if self.trace:
            from spmd_engine.training.trace import Trace

            yield from self.trainer.run(min(steps, self.steps_done + 1))
            trace = Trace(self.engine.mesh)
            with trace.of(self.engine):
                yield from self.trainer.run(min(steps, self.steps_done + self.trace))
            text = trace.json()
            self.on_rank_zero(lambda: replace_file(self.folder / "trace.json", text or ""))
        yield from self.trainer.run(steps)

    # --- observers: on rank 0 alone -----------------------------------------------------------------------

    @contextmanager
    def _observed(self, steps: int) -> Iterator[None]:
        """Call ``started`` of the observers, and ``finished`` if nothing is raised."""
        started: list[Observer] = []

        def start() -> None:
            self.folder.mkdir(parents=True, exist_ok=True)
            for each in self.observers:
                each.started(self, steps)
                started.append(each)

        try:
            self.on_rank_zero(start)
            yield
            text = self.sample()
            self._tell(lambda each: each.finished(self.loss, text))
        finally:
            for each in started:
                each.closed()

    def _tell_evaluated(self) -> None:
        if (loss := self.loss) is not None:
            self._tell(lambda each: each.evaluated(self.steps_done, loss))

    def _tell(self, event: Callable[[Observer], None]) -> None:
        """Raises UsageError where an observer cannot write, for lack of space, say: on rank 0, which ends the job."""
        with self._named():
            for each in self.observers:
                event(each)


def _due(every: int, step: int) -> bool:
    return bool(every) and step % every == 0
