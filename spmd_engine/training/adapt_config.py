"""When a run observes its ranks, what it notices, and which changes of its shape are worth their cost."""

from __future__ import annotations

from dataclasses import dataclass

from spmd_engine.configuration import Configuration, setting
from spmd_engine.errors import UsageError
from spmd_engine.units import seconds_of

LARGEST = 1e6  #: the largest factor or threshold: more is a mistake


@dataclass(frozen=True)
class AdaptConfig(Configuration):
    """The interval and the thresholds of the monitor, and the limits of the policy."""

    every: str = setting(
        "20", metavar="STEPS|TIME", help="Interval between observations: a number of steps, or a time such as 30s."
    )
    load_imbalance: float = setting(
        0.05,
        least=0,
        most=LARGEST,
        help="Threshold of the load imbalance, the part by which the longest computation of a rank exceeds the mean.",
    )
    memory_pressure: float = setting(
        0.9, least=0, most=1, help="Threshold of the memory pressure, the part of its memory that a rank uses."
    )
    communication_overhead: float = setting(
        0.3,
        least=0,
        most=1,
        help="Threshold of the communication overhead, the part of a step in which ranks move data.",
    )
    least_gain: float = setting(
        0.05, least=0, below=1, help="Hysteresis: the least part by which a change must shorten a step."
    )
    margin: float = setting(
        2.0, least=1, most=LARGEST, help="A change must save this many times its cost over the remaining steps."
    )
    least_stay: int = setting(20, least=0, help="Steps between two changes.")
    most_loss: float = setting(
        0.0115, least=0, below=1, help="The most that all changes may lose if none of them pays, as a part of the time."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not any(self.interval):
            raise UsageError(f"every is {self.every!r}: it must be above 0, as in 20 or 30s")

    @property
    def interval(self) -> tuple[int, float]:
        """The interval between observations in steps, and in seconds; one of them is 0."""
        if self.every.isdecimal():
            return int(self.every), 0.0
        return 0, seconds_of(self.every, "every")
