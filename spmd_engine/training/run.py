"""A run: a training with a folder. It evaluates, saves, resumes, stops on a signal, and reports to observers."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from spmd_engine.arguments import checked
from spmd_engine.checkpoints import CheckpointFolder, Save
from spmd_engine.checkpoints.format.folder import RunLock, make_folder, replace_file, step_in_name
from spmd_engine.checkpoints.save import KEEP, mesh_name
from spmd_engine.comm.agreement.rank_zero import gather_json, on_rank_zero
from spmd_engine.comm.group import Group
from spmd_engine.comm.shared_memory.arena import memory_here
from spmd_engine.engine.base import ShardedEngine
from spmd_engine.engine.batch import Batch, Evaluation
from spmd_engine.engine.helpers import follow_orders
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.errors import CheckpointError, UsageError
from spmd_engine.pictures import html_table
from spmd_engine.runtime.signals import StopFlag
from spmd_engine.training.hooks import Hook
from spmd_engine.training.observers import (
    ActivityFile,
    DataPicture,
    EventLog,
    MetricsFile,
    Observer,
    Observers,
    lines_up_to,
)
from spmd_engine.training.trainer import StepReport, Trainer, by_rank

logger = logging.getLogger(__name__)

CONFIG = "config.json"


class Run:
    """The steps of a Trainer with evaluations, checkpoints and reports, for any ShardedEngine and any data.

    ``folder`` gets ``metrics.jsonl``, checkpoints, and, if there is a ``config`` (JSON), ``config.json``.
    ``validation`` are the batches to evaluate, at the start, every ``eval_every`` steps and at the end. A checkpoint is
    written every ``save_every`` steps and at the end; 0: only at the end; if both are due, it comes first. The last
    ``keep`` stay. Checkpoints contain ``facts`` (JSON), and a run with other facts cannot resume from them. With
    ``background``, training continues during a save. If a save fails, the run ends with CheckpointError on all ranks,
    or, with ``go_on_unsaved``, reports the failure to the observers and tries the next save when it is due; the last
    one must succeed. Every ``check_replicas_every`` steps (0: never) ranks compare their replicas, and a flipped bit
    ends the run. ``trace`` is the number of steps, from the second on, to trace in ``trace.json``. ``sample`` is called
    on all ranks at the end, for a text that shows what the model learnt. ``hooks`` act in and between the steps, after
    those of the trainer; they may replace the engine's mesh, and call ``continue_as`` then.

    SIGINT, SIGTERM, SIGUSR1 or SIGHUP to any rank ends the run after the current step, or the current batch of an
    evaluation, which then has no result: it is saved, reported to the observers, and raises SystemExit on every rank,
    whose code is 128 + the signal's number. A second signal, or one before the first step is done, ends the program at
    once.
    """

    @checked(
        {"eval_every": 0, "save_every": 0, "keep": 1, "check_replicas_every": 0, "trace": 0},
        folder="the path of a folder, before the trainer",
        trainer="a Trainer, after the folder",
    )
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
        hooks: Sequence[Hook] = (),
    ) -> None:
        self.folder, self.trainer, self.validation = Path(folder), trainer, validation
        self.eval_every, self.save_every, self.trace, self.sample = eval_every, save_every, trace, sample
        self.config, self.facts = config, dict(facts or {})
        self._tried = config  # that of the last step: a job may not survive its first step in another shape
        self._keep, self._background, self._go_on_unsaved = keep, background, go_on_unsaved
        self._check_replicas_every = check_replicas_every
        self._phase = trainer.engine.mesh.activity.phase
        self.tracing = False  #: whether steps are being traced
        self._saving: Save | None = None  # a save that is perhaps not complete
        self._unsaved = False  # whether the last save has failed
        self._report: StepReport | None = None  # the report of a step, until the observers get it with its evaluation
        self.saved_report: dict[str, Any] | None = None  #: the line of ``metrics.jsonl`` in the checkpoint resumed from
        self._lock: RunLock | None = None  # while this run writes
        self.evaluation: Evaluation | None = None  #: the last one
        self.memory_limits: list[int] = []  #: bytes that each rank of the world may use: its part of its node's
        self.hooks = trainer.hooks = (*trainer.hooks, *hooks)
        files = MetricsFile(), EventLog(self.folder), ActivityFile(), DataPicture(self.folder)
        self._observers = Observers((*files, *observers) if self.engine.device_id == 0 else ())

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

    def _repr_html_(self) -> str:
        page = self.folder / "report.html"
        rows = [("folder", self.folder), ("mesh", self.engine.mesh), ("steps", self.steps_done)]
        rows += [("validation loss", f"{self.loss:.6g}")] if self.loss is not None else []
        link = f'<p><a href="{escape(page.as_posix())}">report</a></p>' if page.is_file() else ""
        return html_table("Run", ["", ""], rows, numbers=False) + link

    def continue_as(self, composition: ParallelConfig, validation: Sequence[Batch]) -> None:
        """The engine is on another mesh now: with this composition, and with these validation batches."""
        self.config = {**(self.config or {}), "composition": composition.as_json()}
        self.validation = validation

    def gather_memory_limits(self, all_ranks: Group) -> None:
        """Learn how much memory each rank may use. Collective."""
        nodes = list(all_ranks.comm.hosts)
        self.memory_limits = gather_json(all_ranks, memory_here() // nodes.count(nodes[all_ranks.rank]), "metrics")

    def train(self, steps: int) -> float | None:
        """Make steps until ``steps`` are done in all. Return the last validation loss. Collective."""
        self.engine.mesh.activity.folder = self.folder  # a watchdog writes the stacks of a hanging job to it
        self.gather_memory_limits(self.engine.group())
        self.memory_limits = by_rank(self.engine.mesh, self.memory_limits)
        with self.locked(), self._hooked(steps), self._observed(steps), StopFlag(to_save=False) as stop:
            self.trainer.stop = stop
            evaluates = self._evaluate()
            self._report_restored()
            if evaluates:
                self._notify_evaluated()
            self._go_on(steps, stop)
            if steps == 0:
                self.save()
        return self.loss

    def train_from_between(self, steps: int, stop: StopFlag, enter: Callable[[], None] = lambda: None) -> None:
        """As ``train``, on a rank that is not on the mesh at first, such as one that joins the run after one of its
        steps. ``enter`` is called at the beginning; ``stop`` is open."""
        self.engine.mesh.activity.folder = self.folder
        self._lock = RunLock(self.folder)  # which rank 0 has taken
        self.trainer.stop = stop
        with self._hooked(steps):
            enter()
            if self._is_on_mesh(stop):
                self._save_after_step(steps, stop)
                self._go_on(steps, stop)
                self.sample()

    def _go_on(self, steps: int, stop: StopFlag) -> None:
        """The steps up to ``steps``, with what follows each of them.

        A step that is both saved and evaluated is saved first, as an evaluation may take long, or fail.
        """
        for report in self._traced(steps):
            stopped = bool(stop.taken)
            self._report, self._tried = report, self.config
            if not stopped and self._saves_first(steps):
                self._compare_and_save(ends=report.step == steps)
            is_due = self._evaluates(steps)
            evaluates = is_due and not stopped and self._evaluate()
            if evaluates and (evaluation := self.evaluation):
                report = replace(report, validation_loss=evaluation.loss, validation_metrics=evaluation.metrics)
            self.notify("stepped", report)
            if evaluates or not is_due:
                self._report = None
            if evaluates:
                self._notify_evaluated()
            for place, hook in enumerate(self.hooks):
                hook.between_steps(report.step, bool(self.trainer.requested >> place & 1))
            if not self._is_on_mesh(stop):
                return
            self._save_after_step(steps, stop, stopped)
        if stop.taken:
            self.notify("stopped", self.steps_done, stop.taken)
            sys.exit(128 + stop.taken)

    def _is_on_mesh(self, stop: StopFlag) -> bool:
        """Return True when this rank has the next step to do; until then it does what rank 0 orders. False: the run has
        ended meanwhile. Raises UsageError or SystemExit if it has ended so."""
        while (order := follow_orders(self.engine, lambda: stop.received)) is not None:
            if not order:
                stop.take(stop.received)
                return False
            self.hooks[order["hook"]].between_steps(self.steps_done, requested=True)
        return True

    def _evaluates(self, steps: int) -> bool:
        return self.steps_done == steps or _due(self.eval_every, self.steps_done)

    def _saves_first(self, steps: int) -> bool:
        """Whether the last step is saved before its evaluation. All ranks know, also those that took no part in it."""
        return self._evaluates(steps) and (self.steps_done == steps or _due(self.save_every, self.steps_done))

    def _save_after_step(self, steps: int, stop: StopFlag, stopped: bool = False) -> None:
        """Compare replicas and save, where this is due and has not been done before the evaluation.

        ``stopped``: whether a signal was taken in the step itself.
        """
        if stopped or not self._saves_first(steps) or stop.taken and self._unsaved:
            self._compare_and_save(ends=self.steps_done == steps or bool(stop.taken))
        elif stop.taken:
            self.finish_saving(must=True)

    def _compare_and_save(self, ends: bool) -> None:
        """Compare replicas and save, where this is due."""
        done = self.steps_done  # a rank may have been idle in between
        if _due(self._check_replicas_every, done):
            from spmd_engine.checkpoints.digest import compare_replicas

            with self._phase("comparing replicas, step", done):
                compare_replicas(self.engine, self.trainer.optimizer)
        if self._saving:
            is_written = np.array(self._saving.is_written, np.int64)
            if self.engine.group().all_reduce(is_written, "min", label="save"):  # nowhere a rank is still writing
                self.finish_saving(must=False)
        if ends or _due(self.save_every, done):
            self._start_saving(must=ends)
            if ends or not self._background:
                self.finish_saving(must=ends)

    def save(self) -> None:
        """Write a checkpoint, and make the folder if it is missing. Collective."""
        with self.locked():
            self._start_saving(must=True)
            self.finish_saving(must=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder against other runs, and remove the files of an interrupted save. Collective.

        ``train`` and ``save`` lock it themselves; a lock around them and ``resume`` or ``write_config`` begins before
        the first file is written. Raises UsageError on all ranks if another run is writing to the folder.
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
        """Raise UsageError if another run has begun to write to the folder, from a host that the lock does not reach.

        Call this on rank 0, which has the lock.
        """
        if self._lock:
            self._lock.check()

    def write_config(self) -> None:
        """Make the folder, with ``config.json`` if there is a ``config``. Collective."""

        def write() -> None:
            self.check_lock()
            make_folder(self.folder)
            if self._tried is not None:
                replace_file(self.folder / CONFIG, json.dumps(self._tried, indent=2) + "\n")

        self.on_rank_zero(write, CheckpointError)

    def on_rank_zero(self, write: Callable[[], None], error: type[UsageError] = UsageError) -> None:
        """Call ``write``, which writes to the folder, on rank 0; a failure is one error on all ranks. Collective."""

        def named() -> None:
            with self._add_folder_to_errors():
                write()

        on_rank_zero(self.engine.group(), named, error)

    @contextmanager
    def _add_folder_to_errors(self) -> Iterator[None]:
        """Name the folder in an OSError: the error of a full disk does not name it."""
        try:
            yield
        except OSError as error:
            message = f"{self.folder} cannot be written to: {error}; the last checkpoint there, if any, is whole"
            raise UsageError(message) from error

    def resume(self) -> None:
        """Load the folder's newest checkpoint and continue after its step. Collective.

        Raises UsageError if there is none, or if it has other ``facts``.
        """
        from spmd_engine.checkpoints import load_checkpoint

        with self._phase("loading a checkpoint"):
            facts = load_checkpoint(self.folder, self.engine, self.trainer.optimizer)
            if self.engine.device_id == 0:
                self._warn_of_other_mesh()
        if missing := {"step", *self.facts} - set(facts):
            raise UsageError(f"{self.folder}: its checkpoint lacks {', '.join(sorted(missing))}")
        for name, value in self.facts.items():
            if facts[name] != value:
                raise UsageError(f"{self.folder} was trained with {name} {facts[name]!r}, but this run has {value!r}")
        self.trainer.steps_done, self.saved_report = facts["step"], facts.get("report")
        if self.trainer.loss_scale and "loss_scale" in facts:
            self.trainer.loss_scale.restore(facts["loss_scale"])

    def _warn_of_other_mesh(self) -> None:
        from spmd_engine.checkpoints.read import read_manifest

        newest = CheckpointFolder(self.folder).newest()
        saved_on, this_mesh = read_manifest(newest).mesh if newest else "", mesh_name(self.engine)
        if saved_on and saved_on != this_mesh:
            message = "%s was saved on mesh %s; on mesh %s the results agree to rounding, not to the bit"
            logger.warning(message, newest, saved_on, this_mesh)

    def _start_saving(self, must: bool) -> None:
        self.finish_saving(must=False)  # the previous save; of two, the last must succeed
        self._unsaved = False
        with self._maybe_unsaved(must), self._phase("saving, step", self.steps_done):
            self.write_config()
            facts = dict(self.facts)
            if self.trainer.loss_scale:
                facts["loss_scale"] = self.trainer.loss_scale.as_json()
            if self._report:  # incomplete, if the run ends before the step is evaluated
                facts["report"] = self._report.as_line()
            self._saving = Save(
                self.folder,
                self.engine,
                self.trainer.optimizer,
                step=self.steps_done,
                config=self._tried,
                keep=self._keep,
                facts=facts,
                background=self._background and not must,
            )

    def finish_saving(self, must: bool) -> None:
        """Finish the save in progress, if there is one; a failure is an error if it ``must`` succeed. Collective."""
        saving, self._saving = self._saving, None
        if saving is not None:
            with self._maybe_unsaved(must), self._phase("saving, step", saving.step):
                saving.finish()
                self.notify("saved", saving.step)

    @contextmanager
    def _maybe_unsaved(self, must: bool) -> Iterator[None]:
        """Report a failed save to the observers, if this run may continue without it."""
        try:
            yield
        except CheckpointError as error:
            if must or not self._go_on_unsaved:
                raise
            self._unsaved = True
            self.notify("not_saved", self.steps_done, str(error))

    def _evaluate(self) -> bool:
        """Evaluate; returns False if a signal has ended that: there is no result then."""
        if not self.validation:
            return True
        evaluation = self.trainer.evaluation(self.validation)
        if self.trainer.stop and self.trainer.stop.taken:
            return False
        self.evaluation = evaluation if evaluation.count else None  # without targets there is no loss
        return True

    def _traced(self, steps: int) -> Iterator[StepReport]:
        """Make the steps; the traced ones begin with the second, after the first has warmed up."""
        if self.trace:
            from spmd_engine.training.trace import Trace

            self.tracing = True
            yield from self.trainer.run(min(steps, self.steps_done + 1))
            trace = Trace(self.engine.mesh)
            with trace.of(self.engine):
                yield from self.trainer.run(min(steps, self.steps_done + self.trace))
            self.tracing = False
            text = trace.json()
            self.on_rank_zero(lambda: replace_file(self.folder / "trace.json", text or ""))
        yield from self.trainer.run(steps)

    # --- Hooks and observers

    @contextmanager
    def _hooked(self, steps: int) -> Iterator[None]:
        with ExitStack() as stack:
            for hook in self.hooks:
                stack.enter_context(hook.during(self, steps))
            yield

    @contextmanager
    def _observed(self, steps: int) -> Iterator[None]:
        """Call ``started`` of the observers, and ``finished`` if nothing is raised."""

        def start() -> None:
            self.folder.mkdir(parents=True, exist_ok=True)
            newest = CheckpointFolder(self.folder).newest()
            if newest and (saved := step_in_name(newest) or 0) > self.steps_done:
                raise UsageError(
                    f"{self.folder} holds a run of {saved} steps, and this one has done {self.steps_done}: call its "
                    "resume() first, or give another folder"
                )
            for observer in self._observers.observers:
                observer.started(self, steps)
                started.callback(observer.closed)

        with ExitStack() as started:
            self.on_rank_zero(start)
            yield
            self.notify("finished", self.loss, self.sample())

    def _report_restored(self) -> None:
        """Report the step of the checkpoint to the observers, if ``metrics.jsonl`` lacks it, or its evaluation."""
        if self._observers.observers and self.saved_report and self.saved_report["step"] == self.steps_done:
            lines = lines_up_to(self.folder / MetricsFile.NAME, self.steps_done)
            last = json.loads(lines[-1]) if lines else {}
            if last.get("step") == self.steps_done and ("validation_loss" in last or self.evaluation is None):
                return
            report = StepReport.from_dict(self.saved_report)
            if evaluation := self.evaluation:
                report = replace(report, validation_loss=evaluation.loss, validation_metrics=evaluation.metrics)
            self.notify("restored", report)

    def _notify_evaluated(self) -> None:
        if (loss := self.loss) is not None:
            self.notify("evaluated", self.steps_done, loss)

    def notify(self, name: str, *facts: Any) -> None:
        """Pass an event, a method of ``Observer``, to the hooks, and on rank 0 to the observers. Raises UsageError,
        which ends the job, if one cannot write."""
        with self._add_folder_to_errors():
            for hook in (*self.hooks, self._observers):
                hook.notified(name, *facts)


def composition_of(run: Run) -> ParallelConfig:
    """The composition of a job's run at present, with the axes of its mesh."""
    composition = ParallelConfig.from_json((run.config or {})["composition"])
    return composition.changed(mesh=dict(run.engine.mesh.all_axes))


def _due(every: int, step: int) -> bool:
    return bool(every) and step % every == 0
