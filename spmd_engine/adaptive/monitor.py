"""The monitor: what the last steps of a run show about its ranks, and the thresholds that they cross."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from spmd_engine.training import Observer
from spmd_engine.training.numbers_by_rank import expanded
from spmd_engine.training.train_config import AdaptConfig

if TYPE_CHECKING:
    from spmd_engine.training.run import Run
    from spmd_engine.training.trainer import StepReport

LISTED = 4  #: most ranks that a text lists


@dataclass(frozen=True)
class Observation:
    """Medians over some steps. Seconds are those of a step; sequences have an entry for each rank of the job."""

    step: int  #: steps that are done
    remaining: int  #: steps that are left
    step_seconds: float  #: seconds of a step in which every rank computes for its median time
    computing: tuple[float, ...]  #: seconds; 0 for a rank without work
    communicating: tuple[float, ...]  #: seconds in which a rank moves data, without waits for other ranks
    speeds: tuple[float | None, ...]  #: relative to the fastest rank; None for a rank without work
    memory: tuple[float, ...] = ()  #: the part of its memory that each rank uses; empty if it is not known

    @property
    def load_imbalance(self) -> float:
        """The part by which the longest computation of a rank exceeds the mean."""
        return max(self.excess)

    @property
    def excess(self) -> tuple[float, ...]:
        """The part by which each rank's computation exceeds the mean."""
        mean = sum(self.computing) / len(self.computing)
        return tuple(seconds / mean - 1 if mean else 0.0 for seconds in self.computing)

    @property
    def memory_pressure(self) -> float:
        """The part of its memory that the fullest rank uses; 0 if it is not known."""
        return max(self.memory, default=0.0)

    @property
    def overheads(self) -> tuple[float, ...]:
        """The part of a step in which each rank moves data."""
        return tuple(seconds / self.step_seconds for seconds in self.communicating)

    @property
    def communication_overhead(self) -> float:
        """The part of a step in which ranks move data, mean over those that compute or move any."""
        took_part = sum(map(any, zip(self.computing, self.communicating, strict=True)))
        return sum(self.overheads) / max(1, took_part)

    def as_json(self) -> dict[str, Any]:
        """The input of ``from_json``."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """The observation that ``as_json`` describes."""
        values: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in content.items()}
        return cls(**values)


def observe(
    lines: Sequence[Mapping[str, Any]],
    steps: int,
    *,
    ranks: Sequence[int] | None = None,
    work: Sequence[float] | None = None,
    memory: Sequence[float] | None = None,
) -> Observation:
    """The observation of a run of ``steps`` steps by its last lines of ``metrics.jsonl``, all of one shape.

    ``ranks`` are those on the mesh, in the order of the lines' entries; None: all. ``work`` is the part of the work
    that each rank of the job does, in any unit; None: equal parts. ``memory`` is the bytes that each rank of the job
    may use; None: not known. A rank's speed is its work over the seconds in which it computes. Medians are independent
    of single long steps. Raises ValueError without lines.
    """
    if not lines:
        raise ValueError("an observation needs at least one step")
    seconds = np.array([line["seconds"] for line in lines])
    # [step, rank of the mesh, 3]
    measured = np.array([expanded(line.get("shares", [[1.0, 0.0, 0.0]])) for line in lines])
    ranks = range(measured.shape[1]) if ranks is None else list(ranks)
    count = len(work or memory or ranks)
    shares, held = np.zeros((len(lines), count, 3)), np.zeros((len(lines), count))
    shares[:, ranks] = measured
    held[:, ranks] = [expanded(line.get("private_bytes", [0] * len(ranks))) for line in lines]
    parts = shares * seconds[:, None, None]
    computing, communicating, _ = np.median(parts, axis=0).T.tolist()
    longest = float(np.median(parts[:, :, 0].max(axis=1)))  # longer if ranks are slow in turn
    work = work if work is not None else [1.0] * len(computing)
    speeds = [w / s if w and s else None for w, s in zip(work, computing, strict=True)]
    fastest = max((speed for speed in speeds if speed), default=1.0)
    used = np.median(held, axis=0)
    return Observation(
        lines[-1]["step"],
        steps - lines[-1]["step"],
        float(np.median(seconds)) * (max(computing) / longest if longest else 1.0),
        tuple(computing),
        tuple(communicating),
        tuple(speed and speed / fastest for speed in speeds),
        tuple((used / np.array(memory)).tolist()) if memory is not None else (),
    )


@dataclass(frozen=True)
class Crossing:
    """A threshold that an observation crosses."""

    name: str  #: a field of AdaptConfig, and of Observation
    value: float
    threshold: float
    ranks: Mapping[int, float]  #: those above it, with their own values

    def __str__(self) -> str:
        more = f" and {len(self.ranks) - LISTED} more" if len(self.ranks) > LISTED else ""
        ranks = f" (rank {', '.join(map(str, [*self.ranks][:LISTED]))}{more})" if self.ranks else ""
        return f"{self.name.replace('_', ' ')} {self.value:.2f} above {self.threshold:g}{ranks}"


def crossings(observation: Observation, config: AdaptConfig) -> list[Crossing]:
    """The thresholds that an observation crosses, with the ranks that are above them."""
    values_by_rank = {
        "load_imbalance": observation.excess,
        "memory_pressure": observation.memory,
        "communication_overhead": observation.overheads,
    }
    crossings = []
    for name, values in values_by_rank.items():
        threshold = getattr(config, name)
        if (value := getattr(observation, name)) > threshold:
            ranks = {rank: of_rank for rank, of_rank in enumerate(values) if of_rank > threshold}
            crossings.append(Crossing(name, value, threshold, ranks))
    return crossings


class CrossingLog(Observer):
    """Makes it an event of the run when other thresholds are crossed than before, in each interval of the monitor."""

    def __init__(self, config: AdaptConfig) -> None:
        self._config, self._lines, self._known = config, list[dict[str, Any]](), set[str]()

    def started(self, run: Run, stop: int) -> None:
        self._run, self._ranks = run, [*run.engine.mesh.others.on_mesh]
        self._left_out = run.steps_done + 1  # the first step may fill caches

    def stepped(self, report: StepReport) -> None:
        if report.step <= self._left_out or report.shares is None:
            return
        self._lines.append(report.as_dict())
        steps, seconds = self._config.interval
        if len(self._lines) < steps or sum(line["seconds"] for line in self._lines) < seconds:
            return
        seen = observe(self._lines, 0, ranks=self._ranks, memory=self._run.memory_limits or None)
        crossed = {crossing.name: str(crossing) for crossing in crossings(seen, self._config)}
        self._lines.clear()
        if crossed.keys() != self._known:
            self._known = set(crossed)
            text = "; ".join(crossed.values()) or "no threshold is crossed any more"
            self._run.notify("crossed", report.step, text)

    def reshaped(self, step: int, change: Mapping[str, Any]) -> None:
        self._ranks, self._left_out = change["ranks"], step + 1
        self._lines.clear()
