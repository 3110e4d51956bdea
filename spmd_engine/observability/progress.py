"""The progress of a run, printed on standard error."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from signal import Signals
from time import monotonic
from typing import Any

from spmd_engine.models.names import IMAGES
from spmd_engine.runtime.activity import ranges
from spmd_engine.runtime.launchers import CLEAR_BELOW, terminal
from spmd_engine.training import Corpus, Observer, Run
from spmd_engine.training.expert_load import ExpertLoad
from spmd_engine.training.trainer import StepReport
from spmd_engine.training.workload import Workload
from spmd_engine.units import clock_time, readable_bytes, readable_loss


class Reporter(Observer):
    """Prints the progress of a run on standard error: a bar on a terminal, else a line every twentieth of the steps."""

    def __init__(self) -> None:
        self.bar: Bar | None = None
        self.unit, self.noun = "", "targets"
        self.experts: ExpertLoad | None = None  # in the last step
        self.warned = False

    def opened(self, workload: Workload, parameters: int, notices: Sequence[str]) -> None:
        job, mesh = workload.job, workload.engine.mesh
        if workload.writes:
            self.unit = f" nats per {'token' if workload.token_file else 'byte'}"
            self.noun = "tokens"
        elif not isinstance(workload.corpus, Corpus):
            self.noun = "images" if job.model.name in IMAGES else "samples"
        self._tell(*(f"note: {notice}" for notice in notices))
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
        elif path := terminal():
            self.bar = Bar(path, done, stop)

    def evaluated(self, step: int, loss: float) -> None:
        self._print(f"step {step:>5}  validation loss {readable_loss(loss)}{self.unit}{self._metrics()}")

    def stepped(self, report: StepReport) -> None:
        if report.skipped:
            self._tell(f"step {report.step} updated nothing: {report.skipped}")
        self._note_experts(report)
        metrics = "".join(f"  {name} {100 * value:.1f}%" for name, value in (report.metrics or {}).items())
        text = f"loss {readable_loss(report.loss)}{metrics}  {report.tokens_per_second:,.0f} {self.noun}/s"
        if self.bar:
            self.bar.show(report.step, text)
        elif report.step % max(1, self.stop // 20) == 0:
            self._print(f"step {report.step:>5}  {text}")

    def not_saved(self, step: int, why: str) -> None:
        self._tell(f"{why}; training continues after step {step}")

    def migrating(self, step: int, plan: Mapping[str, Any]) -> None:
        self._tell(live_migration_text(step, plan))

    def reshaped(self, step: int, change: Mapping[str, Any]) -> None:
        notices = (f"note: {notice}" for notice in change["notices"])
        self._tell(*notices, f"after step {step} {change['after']} (before: {change['before']})")

    def not_reshaped(self, step: int, change: Mapping[str, Any]) -> None:
        self._tell(f"after step {step} a change of shape is refused: {change['why']}")

    def joined(self, step: int, change: Mapping[str, Any]) -> None:
        notices = (f"note: {notice}" for notice in change["notices"])
        self._tell(*notices, f"after step {step} ranks {ranges(change['ranks'])} have joined")

    def _note_experts(self, report: StepReport) -> None:
        self.experts = ExpertLoad.of(report.side_outputs)
        if self.experts and self.experts.drops_most and not self.warned:
            self.warned = True
            self._tell(
                f"warning: step {report.step}: {self.experts.dropped:,} of {self.experts.pairs:,} choices "
                "of experts were dropped, more than half; raise --capacity-factor, or omit it"
            )

    def stopped(self, step: int, signal: int) -> None:
        self._tell(
            f"{Signals(signal).name}: saved after step {step} in {self.folder}; continue with: "
            f"python -m spmd_engine train --resume --run {self.folder}"
        )

    def finished(self, loss: float | None, sample: str) -> None:
        if sample:
            self._print(f"\n--- a sample of what it writes ---\n{sample}\n----------------------------------\n")
        if self.experts:
            self._print(str(self.experts))
        final = f"validation loss {readable_loss(loss)}{self.unit}{self._metrics()}; " if loss is not None else ""
        self._print(f"{final}results in {self.folder}")

    def closed(self) -> None:
        if self.bar:
            self.bar.close()

    def _metrics(self) -> str:
        """``, accuracy 97.8% (352 of 360 held out)``, if the model has such metrics."""
        if (evaluation := self.run.evaluation) is None:
            return ""
        count = evaluation.count
        return "".join(
            f", {name} {100 * value:.1f}% ({round(value * count)} of {round(count)} held out)"
            for name, value in evaluation.metrics.items()
        )

    def _tell(self, *texts: str) -> None:
        for text in texts:
            self._print(f"spmd_engine: {text}")

    def _print(self, text: str) -> None:
        print(text, file=sys.stderr)


# --- A bar on a terminal


def live_migration_text(step: int, plan: Mapping[str, Any]) -> str:
    """A live migration that begins after ``step``, by its plan: see ``MigrationPlan``."""
    what = plan["what"] if len(plan["what"]) < 4 else [*plan["what"][:2], "...", plan["what"][-1]]
    return (
        f"after step {step} a live migration to {plan['to']} begins: it copies {readable_bytes(plan['bytes'])}"
        f"{' of ' * bool(what)}{', '.join(what)}, in about {plan['seconds']:.3g} s"
    )


class Bar:
    """Standard error, with a bar below the cursor; ``close`` removes it.

    The cursor rests at the start of an empty line, ``ABOVE`` lines over the bar. So other ranks, whose output mpiexec
    forwards to the same terminal, mpiexec itself, and libraries in C print whole lines, which the next bar follows;
    what this process prints comes through ``write``. A process that is killed leaves no hidden cursor. The bar of rich
    ends with the cursor in its line, hides the cursor, and takes fifty times as long.
    """

    ABOVE = 2  #: mpiexec answers Ctrl-C with two lines
    PERIOD = 0.1  #: seconds between two bars

    def __init__(self, path: str, done: int, stop: int) -> None:
        self._path, self._done, self._stop = path, done, stop
        self._began, self._shown, self._bar, self._drawn, self._in_line = monotonic(), 0.0, "", False, False
        self._lock = threading.RLock()  # the watchdog may print, too
        self._stream, sys.stderr = sys.stderr, self
        self.show(done, "training")

    def show(self, step: int, text: str) -> None:
        """Draw the bar after this step, with a text, unless it was drawn a moment ago."""
        now = monotonic()
        if now - self._shown < self.PERIOD and step < self._stop:
            return
        self._shown, after = now, f"{step}/{self._stop}"
        if step > self._done:
            left = (now - self._began) / (step - self._done) * (self._stop - step)
            after += f"  {clock_time(left)} left"
        room = columns(self._path) - 1
        length = max(0, min(40, room - len(text) - len(after) - 4))
        self._bar = f"{text}  {bar(step / self._stop, length, self._stream.encoding)}  {after}"[:room]
        self.write("")

    def write(self, text: str) -> int:
        """Write a text above the bar, which disappears until the line is complete."""
        with self._lock:
            clear = "\r" + CLEAR_BELOW if self._drawn else ""
            if text:
                self._in_line = not text.endswith("\n")
            self._drawn = bool(self._bar) and not self._in_line
            below = "\n" * self.ABOVE + f"{self._bar}\x1b[{self.ABOVE}A\r" if self._drawn else ""
            self._stream.write(clear + text + below)
            self._stream.flush()
        return len(text)

    def close(self) -> None:
        """Remove the bar; standard error is again what it was."""
        self._bar = ""
        self.write("")
        if sys.stderr is self:
            sys.stderr = self._stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def bar(part: float, length: int, encoding: str | None) -> str:
    """A bar of ``length`` characters, of which ``part`` is done."""
    done, rest = "━─" if (encoding or "").lower().startswith("utf") else "#-"
    full = round(min(1.0, part) * length)
    return done * full + rest * (length - full)


def columns(path: str) -> int:
    """The columns of a terminal; 80 if they are unknown."""
    with suppress(OSError):
        handle = os.open(path, os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK)
        try:
            return os.get_terminal_size(handle).columns or 80
        finally:
            os.close(handle)
    return 80
