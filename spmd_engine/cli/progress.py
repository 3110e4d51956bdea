"""The progress of a run, printed on standard error."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, Any

from spmd_engine.models.names import IMAGES
from spmd_engine.training.data.corpus import Corpus
from spmd_engine.training.run import Observer, Run
from spmd_engine.training.trainer import StepReport
from spmd_engine.training.workload import Workload

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from spmd_engine.training.expert_load import ExpertLoad


class Reporter(Observer):
    """Prints the progress of a run on standard error: a bar on a terminal, else a line every twentieth of the steps.

    The modules that print are imported on rank 0 only, when there is something to print.
    """

    def __init__(self) -> None:
        self.bar: Progress | None = None
        self.unit, self.each = "", "targets"
        self.experts: ExpertLoad | None = None  # in the last step
        self.warned = False

    def opened(self, workload: Workload, parameters: int, notices: Sequence[str]) -> None:
        self.console = console()
        job, mesh = workload.job, workload.engine.mesh
        if workload.writes:
            self.unit = f" nats per {'token' if workload.token_file else 'byte'}"
            self.each = "tokens"
        elif not isinstance(workload.corpus, Corpus):
            self.each = "images" if job.model.name in IMAGES else "samples"
        for notice in notices:
            self._print(f"spmd_engine: note: {notice}")
        self._print(
            f"{job.strategy or job.model.name}: {parameters:,} parameters, {job.model.dtype}, mesh {mesh} "
            f"on {mesh.node_count} node(s); {workload.corpus}"
        )

    def loaded(self, table: Sequence[str]) -> None:
        for line in table:
            self._print(line)

    def started(self, run: Run, stop: int) -> None:
        self.run, self.folder, self.stop, done = run, run.folder, stop, run.steps_done
        if done >= stop:
            self._print(f"nothing to do: {done} steps are done, and --steps or --stop-at ends at {stop}")
        if not isinstance(self.console, Pipe):
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
            self.bar = Progress(*columns, console=self.console)
            self.task = self.bar.add_task("training", total=stop, completed=done)
            self.bar.start()

    def evaluated(self, step: int, loss: float) -> None:
        self._print(f"step {step:>5}  validation loss {loss:.4f}{self.unit}{self._metrics()}")

    def stepped(self, report: StepReport) -> None:
        if report.skipped:
            self._print(f"spmd_engine: step {report.step} updated nothing: {report.skipped}")
        self._note_experts(report)
        metrics = "".join(f"  {name} {100 * value:.1f}%" for name, value in (report.metrics or {}).items())
        text = f"loss {report.loss:.4f}{metrics}  {report.tokens_per_second:,.0f} {self.each}/s"
        if self.bar:
            self.bar.update(self.task, advance=1, description=text)
        elif report.step % max(1, self.stop // 20) == 0:
            self._print(f"step {report.step:>5}  {text}")

    def not_saved(self, step: int, why: str) -> None:
        self._print(f"spmd_engine: {why}; training continues after step {step}")

    def reshaped(self, step: int, change: Mapping[str, Any]) -> None:
        for notice in change["notices"]:
            self._print(f"spmd_engine: note: {notice}")
        self._print(f"spmd_engine: after step {step} {change['after']} (before: {change['before']})")

    def not_reshaped(self, step: int, change: Mapping[str, Any]) -> None:
        self._print(f"spmd_engine: after step {step} a change of shape is refused: {change['why']}")

    def _note_experts(self, report: StepReport) -> None:
        from spmd_engine.training.expert_load import ExpertLoad

        self.experts = ExpertLoad.of(report.side_outputs)
        if self.experts and self.experts.drops_most and not self.warned:
            self.warned = True
            self._print(
                f"spmd_engine: warning: step {report.step}: {self.experts.dropped:,} of {self.experts.pairs:,} choices "
                "of experts were dropped, more than half; raise --capacity-factor, or omit it"
            )

    def stopped(self, step: int, signal: int) -> None:
        self._print(
            f"spmd_engine: {Signals(signal).name}: saved after step {step} in {self.folder}; continue with: "
            f"python -m spmd_engine train --resume --run {self.folder}"
        )

    def finished(self, loss: float | None, sample: str) -> None:
        if sample:
            self._print(f"\n--- a sample of what it writes ---\n{sample}\n----------------------------------\n")
        if self.experts:
            self._print(str(self.experts))
        self._print(f"validation loss {loss:.4f}{self.unit}{self._metrics()}; results in {self.folder}")

    def closed(self) -> None:
        if self.bar:
            self.bar.stop()

    def _metrics(self) -> str:
        """``, accuracy 97.8% (352 of 360 held out)``, if the model has such metrics."""
        if (evaluation := self.run.evaluation) is None:
            return ""
        count = evaluation.count
        return "".join(
            f", {name} {100 * value:.1f}% ({round(value * count)} of {round(count)} held out)"
            for name, value in evaluation.metrics.items()
        )

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)


# --- The terminal: under mpiexec a rank's own output is always a pipe


def launcher_has_terminal(levels: int = 4) -> bool:
    """Whether standard error of this process, or of the mpiexec that started it on this host, is a terminal."""
    if sys.stderr.isatty():
        return True
    process = os.getpid()
    for _ in range(levels):
        try:
            status = Path(f"/proc/{process}/stat").read_text()
            process = int(status.rpartition(")")[2].split()[1])  # the parent
            name = Path(f"/proc/{process}/comm").read_text().strip()
            if name.startswith(("mpiexec", "mpirun", "orterun", "prterun")):
                return os.readlink(f"/proc/{process}/fd/2").startswith(("/dev/pts/", "/dev/tty"))
        except (OSError, ValueError, IndexError):
            return False
    return False


class Pipe:
    """A console without a terminal: lines on standard error."""

    def print(self, text: str, **_: object) -> None:
        """Print a line unchanged."""
        print(text, file=sys.stderr)


def console() -> Console | Pipe:
    """Rank 0's console on standard error, with colours and live bars only on a terminal."""
    if not launcher_has_terminal():
        return Pipe()
    from rich.console import Console  # its import takes longer than a small step

    return Console(stderr=True, force_terminal=True, highlight=False)
