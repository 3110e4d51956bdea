"""What a run's folder holds about it: configuration, steps, events, and its newest checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spmd_engine.checkpoints import CheckpointFolder
from spmd_engine.errors import UsageError
from spmd_engine.foreign import reading
from spmd_engine.training.run import CONFIG, EventLog, MetricsFile

SERIES = ("loss", "validation_loss", "grad_norm", "learning_rate", "tokens_per_second", "seconds")
NO_CURVES = {"step", "tokens", "bytes_sent", "exposed_communication"}
WARM_UP = 2  #: first steps, which load code and data, that averages of times leave out


@dataclass(frozen=True)
class RunRecord:
    """A run, as its folder has it."""

    name: str
    config: Mapping[str, Any]
    steps: np.ndarray  #: int64[n]: the numbers of the steps
    series: Mapping[str, np.ndarray]  #: float64[n] by name; NaN where a step has no such number
    cpu_seconds: np.ndarray  #: float64[rank]: processor seconds of a step, mean over steps
    shares: np.ndarray  #: float64[rank, 3]: the parts of a step computing, communicating and idle, mean over steps
    predicted: Mapping[str, Any]  #: the prediction of the first step, beside its measurement
    events: tuple[Mapping[str, Any], ...]
    checkpoint: Mapping[str, Any]  #: facts of the newest one; empty without one

    @classmethod
    def read(cls, folder: Path) -> RunRecord:
        """Read a folder; lines that are damaged are left out. Raises UsageError for a folder that is no run's."""
        if not (folder / CONFIG).is_file() or not (folder / MetricsFile.NAME).is_file():
            raise UsageError(f"{folder}: no run is there; name a folder that 'train' wrote, as in runs/gpt-nano-1")
        with reading(f"{folder / CONFIG} cannot be read"):
            config = json.loads((folder / CONFIG).read_bytes())
            if not isinstance(config, dict):
                raise ValueError("it is no object")
        steps: list[int] = []
        columns: dict[str, list[float]] = {name: [] for name in SERIES}
        parts: dict[int, list[np.ndarray]] = {}  # by number of ranks: of each step shares, then processor seconds
        predicted: Mapping[str, Any] = {}
        for line in _lines(folder / MetricsFile.NAME):
            if not isinstance(line.get("step"), int):
                continue
            steps.append(line["step"])
            for name, column in columns.items():
                column.append(_number(line.get(name)))
            for name in line.keys() - columns.keys() - NO_CURVES:  # metrics of the model, such as accuracy
                if type(line[name]) in (int, float):
                    columns[name] = [np.nan] * (len(steps) - 1) + [float(line[name])]
            predicted = line["predicted"] if isinstance(line.get("predicted"), dict) else predicted
            if len(steps) > WARM_UP and (part := _parts_of_step(line)) is not None:
                parts.setdefault(len(part), []).append(part)
        split = np.mean(max(parts.values(), key=len), axis=0) if parts else np.empty((0, 4))
        return cls(
            folder.name,
            config,
            np.array(steps, np.int64),
            {name: np.array(column) for name, column in columns.items()},
            split[:, 3],
            split[:, :3],
            predicted,
            tuple(_lines(folder / EventLog.NAME)),
            _checkpoint_facts(folder),
        )

    def last(self, event: str) -> Mapping[str, Any]:
        """The last event of this kind; empty if there is none."""
        return next((each for each in reversed(self.events) if each.get("event") == event), {})

    def final(self, name: str) -> float:
        """The last number of a series; NaN if it has none."""
        numbers = self.series[name][np.isfinite(self.series[name])]
        return float(numbers[-1]) if len(numbers) else np.nan

    def quartiles(self, name: str) -> np.ndarray:
        """float64[5]: the least, the quartiles and the largest number of a series after ``WARM_UP`` steps."""
        numbers = self.series[name][WARM_UP if len(self.steps) > WARM_UP else 0 :]
        numbers = numbers[np.isfinite(numbers)]
        return np.percentile(numbers, [0, 25, 50, 75, 100]) if len(numbers) else np.full(5, np.nan)

    def median(self, name: str) -> float:
        """The median of a series after ``WARM_UP`` steps."""
        return float(self.quartiles(name)[2])

    @property
    def split_seconds(self) -> np.ndarray:
        """float64[rank, 3]: seconds of a median step computing, communicating and idle; one rank computes alone."""
        shares = self.shares if len(self.shares) else np.array([[1.0, 0.0, 0.0]])
        return shares * self.median("seconds")

    @property
    def state(self) -> str:
        """How the run stands: running, finished, stopped or failed."""
        kinds = [each.get("event") for each in self.events if each.get("event") in _STATES]
        kinds = kinds[len(kinds) - kinds[::-1].index("started") - 1 :] if "started" in kinds else []
        if not kinds:
            return "unknown"
        return next((_STATES[kind] for kind in ("finished", "stopped", "closed") if kind in kinds), "running")


_STATES = {
    "started": "running",
    "finished": "finished",
    "stopped": "stopped by a signal",
    "closed": "ended by an error",
}


def _parts_of_step(line: Mapping[str, Any]) -> np.ndarray | None:
    """float64[rank, 4]: shares and processor seconds (NaN if they are not recorded) of a step's line."""
    shares, processor = line.get("shares"), line.get("cpu_seconds")
    try:
        part = np.array(shares, float)
        seconds = np.array(processor if processor is not None else [np.nan] * len(part), float)
    except (TypeError, ValueError):
        return None
    return np.column_stack([part, seconds]) if part.shape == (len(seconds), 3) else None


def _number(value: Any) -> float:
    """A number of metrics.jsonl, which writes what is not finite as a text."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return np.nan


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file with one a line; none if there is no such file."""
    if not path.is_file():
        return
    with open(path, errors="replace") as lines:
        for line in lines:
            try:
                content = json.loads(line)
            except (ValueError, RecursionError):  # the last line of a run that was killed
                continue
            if isinstance(content, dict):
                yield content


def _checkpoint_facts(folder: Path) -> dict[str, Any]:
    newest = CheckpointFolder(folder).newest()
    if newest is None:
        return {}
    with reading(f"{newest} cannot be read"):
        manifest = json.loads((newest / "manifest.json").read_bytes())
    return {
        "path": str(newest),
        "step": manifest.get("step"),
        "sha256": manifest.get("sha256"),
        "mesh": manifest.get("mesh"),
    }
