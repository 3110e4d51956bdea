"""What people see of a run."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from pathlib import Path
from signal import Signals

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from spmd_engine.cli.job import Job
from spmd_engine.cli.terminal import console
from spmd_engine.training.trainer import StepReport


class Reporter:
    """What people see of a run, on rank 0 alone: a bar or lines, and ``metrics.jsonl``."""

    def __init__(self, options, job: Job, folder: Path, done: int, stop: int) -> None:
        self.speaks = job.engine.device_id == 0
        self.unit, self.each = (" nats per byte", "tokens") if job.writes else ("", "targets")
        count = job.parameter_count
        self.folder, self.done, self.stop, self.last = folder, done, stop, done
        self.console = console() if self.speaks else None
        self.bar: Progress | None = None
        if self.speaks:
            mesh, corpus = job.engine.mesh, job.corpus
            self._say(
                f"{options['strategy'] or options['model']}: {count:,} parameters, {options['dtype']}, mesh {mesh} "
                f"on {mesh.node_count} node(s); {len(corpus.train):,} tokens from {corpus.files} files"
            )
            if done >= stop:
                self._say(f"nothing to do: {done} steps are done, and --steps or --stop-at ends at {stop}")

    def __enter__(self) -> Reporter:
        if not self.speaks:
            return self
        self.metrics = _open_metrics(self.folder / "metrics.jsonl", self.done)
        if self.console.is_terminal:
            columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
            self.bar = Progress(*columns, console=self.console)
            self.task = self.bar.add_task("training", total=self.stop, completed=self.done)
        (self.bar or nullcontext()).__enter__()
        return self

    def __exit__(self, *error) -> None:
        if self.speaks:
            (self.bar or nullcontext()).__exit__(*error)
            self.metrics.close()

    def evaluated(self, step: int, loss: float) -> None:
        if self.speaks:
            self._say(f"step {step:>5}  validation loss {loss:.4f}{self.unit}")

    def stepped(self, report: StepReport) -> None:
        self.last = report.step
        if not self.speaks:
            return
        self.metrics.write(json.dumps(report.as_dict()) + "\n")
        self.metrics.flush()
        text = f"loss {report.loss:.4f}  {report.tokens_per_second:,.0f} {self.each}/s"
        if self.bar:
            self.bar.update(self.task, advance=1, description=text)
        elif report.step % max(1, self.stop // 20) == 0:
            self._say(f"step {report.step:>5}  {text}")
        if report.validation_loss is not None:
            self.evaluated(report.step, report.validation_loss)

    def interrupted(self, number: int) -> None:
        """The run ends for a signal, and is saved."""
        if self.speaks:
            self._say(
                f"spmd_engine: {Signals(number).name}: saved after step {self.last} in {self.folder}; go on with: "
                f"python -m spmd_engine train --resume --run {self.folder}"
            )

    def finished(self, text: str, loss: float) -> None:
        if not self.speaks:
            return
        if text:
            self._say(f"\n--- a sample of what it writes ---\n{text}\n----------------------------------\n")
        self._say(f"validation loss {loss:.4f}{self.unit}; results in {self.folder}")

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)


def _open_metrics(path: Path, done: int):
    """The file to append to, without what a run that was broken off wrote beyond its checkpoint."""
    kept = []
    if done and path.exists():
        for line in path.read_text().splitlines():
            try:
                if json.loads(line)["step"] <= done:
                    kept.append(line)
            except ValueError:  # the last line of a run that was killed
                continue
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text("".join(line + "\n" for line in kept))
    os.replace(unfinished, path)
    return path.open("a")
