"""Loggers: a run's metrics for other programs, by the six methods that Lightning's loggers have, too."""

from __future__ import annotations

import csv
import logging
import os
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

from spmd_engine.checkpoints.format.folder import replace_file
from spmd_engine.errors import UsageError, one_of
from spmd_engine.files import open_regular
from spmd_engine.models.user_code import call, code_named, is_code
from spmd_engine.training.observers import Observer
from spmd_engine.training.run import Run
from spmd_engine.training.trainer import StepReport

logger = logging.getLogger(__name__)


class Logger(Protocol):
    """What a run calls on rank 0. Each of the loggers of ``lightning.pytorch.loggers`` is one."""

    @property
    def name(self) -> str | None: ...

    @property
    def version(self) -> int | str | None: ...

    def log_hyperparams(self, params: Any) -> Any:
        """The run's ``config.json``, once at each start."""

    def log_metrics(self, metrics: Any, step: int | None = None) -> Any:
        """The numbers of a step, by name: those of ``metrics.jsonl`` that are numbers."""

    def save(self) -> Any:
        """A checkpoint is complete."""

    def finalize(self, status: str) -> Any:
        """The run is over: "success", or "failed"."""


class LoggerObserver(Observer):
    """Calls the Logger that ``make`` returns for the run's folder. A logger that fails is not called again: a warning
    says so, and the run continues."""

    def __init__(self, make: Callable[[Path], Logger]) -> None:
        self._make, self._logger, self._status = make, None, "failed"

    def started(self, run: Run, stop: int) -> None:
        def open_logger(_: Any) -> None:
            self._logger = self._make(run.folder)
            self._logger.log_hyperparams(dict(run.config or {}))

        self._call("start", open_logger)

    def stepped(self, report: StepReport) -> None:
        metrics = {name: value for name, value in report.as_dict().items() if type(value) in (int, float)}
        self._call("log_metrics", lambda logger: logger.log_metrics(metrics, report.step))

    def restored(self, report: StepReport) -> None:
        self.stepped(report)

    def saved(self, step: int) -> None:
        self._call("save", lambda logger: logger.save())

    def stopped(self, step: int, signal: int) -> None:
        self._status = "success"

    def finished(self, loss: float | None, sample: str) -> None:
        self._status = "success"

    def closed(self) -> None:
        self._call("finalize", lambda logger: logger.finalize(self._status))

    def _call(self, method: str, act: Callable[[Any], Any]) -> None:
        if self._logger is None and method != "start":
            return
        try:
            act(self._logger)
        except Exception as error:
            name = type(self._logger).__name__ if self._logger is not None else "a logger"
            logger.warning(
                "%s failed in %s (%s: %s); the run continues without it", name, method, type(error).__name__, error
            )
            self._logger = None


class FileLogger(Logger):
    """A Logger that writes into a run's folder; it inherits the methods that do nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def version(self) -> None:
        return None


class CSVLogger(FileLogger):
    """``metrics.csv``: a row a step. A column that first appears later is empty in earlier rows.

    A run that resumes takes up the rows up to its step.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._path, self._columns, self._first = folder / "metrics.csv", ["step"], True

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        row = {**metrics, "step": step}
        if self._first or not row.keys() <= set(self._columns):
            self._rewrite(row, int(step or 0))
        text = StringIO()
        csv.DictWriter(text, self._columns, lineterminator="\n").writerow(row)
        with open(open_regular(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "a") as file:
            file.write(text.getvalue())

    def _rewrite(self, row: Mapping[str, Any], step: int) -> None:
        """Write the earlier rows again, with the columns of this one, too."""
        rows: list[dict[str, str]] = []
        if self._path.is_file():
            with open(self._path, newline="") as file:
                rows = [
                    old for old in csv.DictReader(file) if old.get("step", "").isdecimal() and int(old["step"]) < step
                ]
        self._columns = list(dict.fromkeys([*self._columns, *(rows[0] if rows else ()), *row]))
        text = StringIO()
        writer = csv.DictWriter(text, self._columns, lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
        replace_file(self._path, text.getvalue())
        self._first = False


class PrometheusLogger(FileLogger):
    """``metrics.prom`` for the textfile collector of Prometheus' node exporter, written at most every ``PERIOD``."""

    PERIOD = 5.0  #: seconds

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._lines, self._written = "", -self.PERIOD

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        labels = f'{{run="{_escaped(self.name)}"}}'
        values = {"step": step, **metrics}
        self._lines = "".join(f"spmd_engine_{name}{labels} {value}\n" for name, value in values.items())
        if monotonic() - self._written >= self.PERIOD:
            self.save()

    def save(self) -> None:
        if self._lines:  # else those of an earlier start stay
            replace_file(self.folder / "metrics.prom", self._lines)
            self._written = monotonic()

    def finalize(self, status: str) -> None:
        self.save()


def _escaped(label: str) -> str:
    """The value of a label in the text format of Prometheus, which knows three escapes and UTF-8 only."""
    for plain, escape in ("\\", r"\\"), ("\n", r"\n"), ('"', r"\""):
        label = label.replace(plain, escape)
    return label.encode(errors="replace").decode()


class TensorBoardLogger(FileLogger):
    """Event files in ``tensorboard/``, by tensorboardX. A run that resumes hides the steps that it makes again."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._writer: Any = None

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if self._writer is None:
            open_writer = import_module("tensorboardX").SummaryWriter
            self._writer = open_writer(str(self.folder / "tensorboard"), purge_step=step)
        for name, value in metrics.items():
            if name != "step":
                self._writer.add_scalar(name, value, step)

    def save(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def finalize(self, status: str) -> None:
        if self._writer is not None:
            self._writer.close()


LOGGERS: Mapping[str, Callable[[Path], Logger]] = {
    "csv": CSVLogger,
    "prometheus": PrometheusLogger,
    "tensorboard": TensorBoardLogger,
}


def logger_named(name: str) -> LoggerObserver:
    """The observer that calls a logger of ``LOGGERS``, or of the user's own code, which may take the run's ``folder``.

    Raises UsageError for another name, and if the logger's package is not installed.
    """
    if is_code(name):
        make = code_named(name, "--logger", named_in="")
        return LoggerObserver(lambda folder: call(make, "the logger", folder=folder))
    if name not in LOGGERS:
        raise UsageError(f"--logger {name}: {one_of(name, LOGGERS)}, or FILE.py:NAME for a logger of your own")
    if name == "tensorboard" and find_spec("tensorboardX") is None:
        raise UsageError("--logger tensorboard needs tensorboardX: pip install 'spmd_engine[loggers]'")
    return LoggerObserver(LOGGERS[name])
