"""What a run's folder holds about it: configuration, steps, events, and its newest checkpoint."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from spmd_engine.adaptive.monitor import Crossing, crossings, observe
from spmd_engine.checkpoints import CheckpointFolder
from spmd_engine.checkpoints.format.folder import LOCK, lock_owner
from spmd_engine.errors import UsageError
from spmd_engine.files import open_regular
from spmd_engine.foreign import parse_json, read_bytes, reading
from spmd_engine.training.numbers_by_rank import expanded
from spmd_engine.training.observers import PLACED, DataPicture, EventLog, MetricsFile
from spmd_engine.training.run import CONFIG
from spmd_engine.training.train_config import AdaptConfig

SERIES = ("loss", "validation_loss", "grad_norm", "learning_rate", "tokens_per_second", "seconds")
NO_CURVES = {"step", "tokens", "bytes_sent", "exposed_communication"}
WARM_UP = 2  #: first steps, which load code and data, that averages of times leave out
MOST_OF_PICTURE = 1 << 24  #: bytes
RECENT = 20  #: last steps whose whole lines are kept


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
    recent: tuple[Mapping[str, Any], ...]  #: the lines of the last ``RECENT`` steps, whole
    events: tuple[Mapping[str, Any], ...]
    checkpoint: Mapping[str, Any]  #: facts of the newest one; empty without one
    owner: tuple[int, str] | None = None  #: the process and the host that write the run, or were killed while they did
    is_hidden: bool = False  #: whether only the run's user can see these
    picture: bytes = b""  #: a PNG of the data; empty without one

    @classmethod
    def read(cls, folder: Path) -> RunRecord:
        """Read a folder; lines that are damaged are left out. Raises UsageError for a folder that is no run's."""
        return replace(RunReader(folder).read(), picture=_picture(folder / DataPicture.NAME))

    def last(self, *kinds: str) -> Mapping[str, Any]:
        """The last event of these kinds; empty if there is none."""
        return next((entry for entry in reversed(self.events) if entry.get("event") in kinds), {})

    @property
    def seconds(self) -> float:
        """Seconds of all starts together, each counted up to its last event."""
        times = [(entry.get("event"), _seconds_of(entry.get("time"))) for entry in self.events]
        known = [(event, now) for event, now in times if now]
        return sum(now - before for (_, before), (event, now) in pairwise(known) if event not in ("opened", "started"))

    @property
    def mesh(self) -> str:
        """The mesh of the last steps, as a text; empty if it is not known."""
        return str(self._shape.get("mesh") or self.checkpoint.get("mesh") or "")

    @property
    def ranks_on_mesh(self) -> list[int]:
        """The ranks of the job on the mesh of the last steps; the others are idle."""
        size, ranks = len(self.nodes), self._shape.get("ranks")
        if not isinstance(ranks, list):
            return [*range(len(self.last("started").get("nodes") or [0]))]
        return [rank for rank in ranks if rank in range(size)]

    @property
    def nodes(self) -> list[str]:
        """The node of each rank of the job, also of those that have joined since its start."""
        nodes: list[str] = []
        for event in self.events:
            of_event = event.get("nodes")
            if event.get("event") in ("started", "joined") and isinstance(of_event, list):
                nodes = [*(nodes if event["event"] == "joined" else []), *of_event]
        return nodes or [""]

    @property
    def experts(self) -> dict[str, tuple[int, ...]]:
        """The part of each expert, by layer, in the last steps; layers whose parts are even may be missing."""
        return {layer: tuple(parts) for layer, parts in self.last("started", PLACED).get("parts", {}).items()}

    @property
    def _shape(self) -> Mapping[str, Any]:
        """The event since which the run has its mesh: its start, or a change of its shape."""
        return self.last("started", "reshaped")

    @property
    def crossings(self) -> list[Crossing]:
        """The thresholds that the last steps cross, with the run's own thresholds, or the usual ones."""
        since, even = self._shape.get("step", 0), [1.0] * len(self.nodes)
        lines = [line for line in self.recent if line["step"] > since and "shares" in line]
        with suppress(UsageError, TypeError, ValueError, KeyError, IndexError):  # damaged lines, or other versions'
            config = AdaptConfig.from_json(self.config.get("adapt") or {}, CONFIG)
            memory = self.last("started", "joined").get("memory")
            seen = observe(lines, 0, ranks=self.ranks_on_mesh, work=even, memory=memory)
            return crossings(seen, config)
        return []

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
        """How the run stands: running, killed, finished, stopped or failed; unknown without events."""
        if self.owner is not None:
            process, host = self.owner
            here = host == os.uname().nodename
            return "killed" if here and not os.path.exists(f"/proc/{process}") else "running"
        kinds = [entry.get("event") for entry in self.events]
        if "started" not in kinds:
            return "unknown"
        since = kinds[-1 - kinds[::-1].index("started") :]
        if self.is_hidden and "closed" not in since:
            return "running"
        return next((text for kind, text in _ENDS.items() if kind in since), "ended by an error")


_ENDS = {"finished": "finished", "stopped": "stopped by a signal"}


class RunReader:
    """Reads a run's folder again and again; of its files with a line each step, only what is new."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._metrics, self._log = JsonLines(folder / MetricsFile.NAME), JsonLines(folder / EventLog.NAME)
        self._events: list[Mapping[str, Any]] = []
        self._forget_steps()

    def _forget_steps(self) -> None:
        self._steps: list[int] = []
        self._columns: dict[str, list[float]] = {name: [] for name in SERIES}
        self._parts: dict[int, tuple[int, np.ndarray]] = {}  # by number of ranks: of how many steps, and their sum
        self._predicted: Mapping[str, Any] = {}
        self._recent: deque[Mapping[str, Any]] = deque(maxlen=RECENT)

    def read(self) -> RunRecord:
        """What the folder holds now. Raises UsageError for a folder that is no run's."""
        folder = self._folder
        if not (folder / CONFIG).is_file() or not (folder / MetricsFile.NAME).is_file():
            raise UsageError(f"{folder}: no run is there; name a folder that 'train' wrote, as in runs/gpt-nano-1")
        with reading(f"{folder / CONFIG} cannot be read"):
            config = parse_json(read_bytes(folder / CONFIG))
            if not isinstance(config, dict):
                raise ValueError("it is no object")
        if self._metrics.open():  # a run that resumes writes the file again, up to its checkpoint
            self._forget_steps()
        for line in self._metrics:
            if isinstance(line.get("step"), int):
                self._add_step(line)
        if self._log.open():
            self._events.clear()
        self._events += self._log
        steps, parts = max(self._parts.values(), key=itemgetter(0), default=(1, np.empty((0, 4))))
        return RunRecord(
            folder.name,
            config,
            np.array(self._steps, np.int64),
            {name: np.array(column) for name, column in self._columns.items()},
            parts[:, 3] / steps,
            parts[:, :3] / steps,
            self._predicted,
            tuple(self._recent),
            tuple(self._events),
            _checkpoint_facts(folder),
            lock_owner(folder),
            os.access(folder / LOCK, os.F_OK) and not os.access(folder / LOCK, os.R_OK),
        )

    def _add_step(self, line: Mapping[str, Any]) -> None:
        self._steps.append(line["step"])
        self._recent.append(line)
        for name, column in self._columns.items():
            column.append(_number(line.get(name)))
        for name in line.keys() - self._columns.keys() - NO_CURVES:  # metrics of the model, such as accuracy
            if type(line[name]) in (int, float):
                self._columns[name] = [np.nan] * (len(self._steps) - 1) + [float(line[name])]
        if isinstance(line.get("predicted"), dict):
            self._predicted = line["predicted"]
        if len(self._steps) > WARM_UP and (part := _parts_of_step(line)) is not None:
            steps, parts = self._parts.get(len(part), (0, 0.0))
            self._parts[len(part)] = steps + 1, parts + part


class JsonLines:
    """The JSON objects of a file with one on each line: ``open``, and then the loop, give those since the last time."""

    def __init__(self, path: Path) -> None:
        self._path, self._place, self._inode = path, 0, None

    def open(self) -> bool:
        """Whether it is another file than before, or was cut: the loop then begins at its start."""
        state = os.stat(self._path) if self._path.is_file() else None
        inode, size = (state.st_ino, state.st_size) if state else (None, 0)
        again = inode != self._inode or size < self._place
        if again:
            self._place = 0
        self._inode = inode
        return again

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Without lines that are damaged, and without the end of a line that is being written."""
        if self._inode is None:
            return
        with open(open_regular(self._path, os.O_RDONLY, follow=True), "rb") as lines:
            lines.seek(self._place)
            for line in lines:
                if not line.endswith(b"\n"):
                    return
                self._place += len(line)
                try:
                    content = parse_json(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(content, dict):
                    yield content


def _seconds_of(time: Any) -> float:
    """The seconds of an event's time; 0 for one that is damaged."""
    try:
        return datetime.fromisoformat(time).timestamp()
    except (TypeError, ValueError, OverflowError):
        return 0.0


def _parts_of_step(line: Mapping[str, Any]) -> np.ndarray | None:
    """float64[rank, 4]: shares and processor seconds (NaN if they are not recorded) of a step's line."""
    try:
        shares, processor = expanded(line.get("shares")), expanded(line.get("cpu_seconds"))
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


def _picture(file: Path) -> bytes:
    with suppress(OSError, UsageError, ValueError):
        return read_bytes(file, MOST_OF_PICTURE)
    return b""


def _checkpoint_facts(folder: Path) -> dict[str, Any]:
    newest = CheckpointFolder(folder).newest()
    if newest is None:
        return {}
    with reading(f"{newest} cannot be read"):
        manifest = parse_json(read_bytes(newest / "manifest.json"))
    return {"path": str(newest), **{name: manifest.get(name) for name in ("step", "sha256", "mesh")}}
