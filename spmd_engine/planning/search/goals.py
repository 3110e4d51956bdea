"""Goals of a search, and constraints on plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from spmd_engine.errors import UsageError
from spmd_engine.planning.search.estimate import Bound, Estimate
from spmd_engine.planning.search.search_space import FIXABLE, Candidate
from spmd_engine.units import readable_bytes, readable_seconds

GOALS = ("latency", "throughput", "memory", "balance")


def objective(goal: str, estimate: Estimate) -> tuple[float, ...]:
    """What a search minimizes; the second number decides between equals."""
    return {
        "latency": (estimate.seconds, estimate.memory),
        "throughput": (-estimate.throughput, estimate.memory),
        "memory": (estimate.memory, estimate.seconds),
        "balance": (round(estimate.imbalance, 2), estimate.seconds),
    }[goal]


def objective_bound(goal: str, candidate: Candidate, bound: Bound) -> tuple[float, ...]:
    """A lower bound of the objective over all divisions of a candidate into stages."""
    return {
        "latency": (bound.seconds, bound.memory),
        "throughput": (-candidate.batch_size / bound.seconds if bound.seconds else -float("inf"), bound.memory),
        "memory": (bound.memory, bound.seconds),
        "balance": (1.0, bound.seconds),
    }[goal]


@dataclass(frozen=True)
class Limits:
    """Upper limits; None: no limit. Raises UsageError for a limit that is not above 0."""

    memory: float | None = None  #: bytes per rank
    latency: float | None = None  #: seconds per step
    bandwidth: float | None = None  #: bytes per second that a rank sends
    compute: float | None = None  #: seconds of work of a rank per step

    def __post_init__(self) -> None:
        for name, limit in vars(self).items():
            if limit is not None and not limit > 0:
                raise UsageError(f"--{name} {limit:g}: it must be above 0")

    def measured(self, estimate: Estimate) -> dict[str, float]:
        """What a candidate needs, for each limit that is set."""
        needs = {
            "memory": estimate.memory,
            "latency": estimate.seconds,
            "bandwidth": estimate.sent / estimate.candidate.ranks / estimate.seconds,
            "compute": estimate.work,
        }
        return {name: need for name, need in needs.items() if getattr(self, name) is not None}

    def broken(self, estimate: Estimate) -> frozenset[str]:
        """The names of the limits that a candidate breaks."""
        needs = self.measured(estimate)
        return frozenset(name for name, need in needs.items() if need > getattr(self, name) * (1 + 1e-9))

    def surely_broken(self, bound: Bound) -> frozenset[str]:
        """The names of the limits that every division of a candidate breaks."""
        broken = set()
        if self.memory is not None and bound.memory > self.memory:
            broken.add("memory")
        if self.latency is not None and bound.seconds > self.latency:
            broken.add("latency")
        return frozenset(broken)

    def shown(self, name: str, number: float | None = None) -> str:
        """A limit, or a need in its unit, as text."""
        shown = getattr(self, name) if number is None else number
        if name == "memory":
            return readable_bytes(shown)
        return f"{readable_bytes(shown)}/s" if name == "bandwidth" else readable_seconds(shown)


LIMITS = tuple(limit.name for limit in fields(Limits))


@dataclass(frozen=True)
class Constraints:
    """Limits, and fixed choices."""

    limits: Limits = Limits()
    fixed: Mapping[str, Any] = field(default_factory=dict)  #: by name, of FIXABLE and "ranks", "batch_size"

    def broken(self, candidate: Candidate, estimate: Estimate | None = None) -> frozenset[str]:
        """The names of the constraints that a candidate breaks."""
        wrong = {name for name, wanted in self.fixed.items() if not _keeps(candidate, name, wanted)}
        return frozenset(wrong) | (self.limits.broken(estimate) if estimate else frozenset())

    @property
    def names(self) -> Sequence[str]:
        """The names of all constraints that are set."""
        return [name for name in LIMITS if getattr(self.limits, name) is not None] + list(self.fixed)

    def shown(self, name: str) -> str:
        """A constraint as text."""
        if name in self.fixed:
            wanted = self.fixed[name]
            if isinstance(wanted, Mapping):
                wanted = ",".join(f"{axis}={size}" for axis, size in wanted.items())
            if isinstance(wanted, tuple | list):
                wanted = " or ".join(map(str, wanted))
            return f"{name.replace('_', ' ')} {wanted}"
        return f"{name} at most {self.limits.shown(name)}"


def _keeps(candidate: Candidate, name: str, wanted: Any) -> bool:
    if name in ("ranks", "batch_size"):
        return getattr(candidate, name) in wanted
    if name in ("schedule", "chunks") and candidate.pipe == 1:
        return True
    assert name in FIXABLE, name
    return getattr(candidate, name) == (dict(wanted) if name == "mesh" else wanted)
