"""Adapts the shares of samples of a running job to the speeds that its ranks show."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

from spmd_engine.adaptive.adapt_config import AdaptConfig
from spmd_engine.adaptive.decision_log import header, record
from spmd_engine.adaptive.monitor import Observation, observe
from spmd_engine.adaptive.policy import Policy, PolicyState, PredictedShape
from spmd_engine.axes import all_positions
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.engine.state.assignment import BATCH, Shares, shares_text
from spmd_engine.planning.search.placement import shares

MOST_LINES = 100  #: of an observation; older steps tell less of the present


@dataclass(frozen=True)
class SampleSharing:
    """The ways to share the samples of a micro-batch among the ranks of a mesh."""

    axes: Mapping[str, int]
    samples: int  #: of a micro-batch

    @property
    def batch_axes(self) -> list[str]:
        """The axes of more than one rank that shard samples."""
        return [axis for axis, size in self.axes.items() if axis in BATCH and size > 1]

    def parts(self, composition: ParallelConfig) -> list[float]:
        """The part of the samples that each rank computes."""
        given = composition.work_shares
        counts = {axis: given.get(axis, (1,) * self.axes[axis]) for axis in self.batch_axes}
        places = (position.coordinates for position in all_positions(self.axes))
        return [prod(each[place[axis]] / sum(each) for axis, each in counts.items()) for place in places]

    def by_speed(self, composition: ParallelConfig, speeds: Sequence[float | None]) -> ParallelConfig:
        """The composition with the shares by which the last rank is done soonest; each rank has at least one sample.

        Along an axis, the slowest rank at each index counts.
        """
        uneven = {}
        for axis in self.batch_axes:
            slowest = [1.0] * self.axes[axis]
            for position, speed in zip(all_positions(self.axes), speeds, strict=True):
                index = position.coordinates[axis]
                slowest[index] = min(slowest[index], speed or 1.0)
            samples = self.samples // prod(self.axes[other] for other in self.batch_axes if other != axis)
            numbers = shares(slowest, samples)
            if 0 in numbers and samples >= len(numbers):
                numbers = tuple(1 + number for number in shares(slowest, samples - len(numbers)))
            if len(set(numbers)) > 1 and 0 not in numbers:
                uneven[axis] = tuple(number // gcd(*numbers) for number in numbers)
        return self.shared(composition, uneven)

    def shared(self, composition: ParallelConfig, shares: Shares) -> ParallelConfig:
        """The composition with these shares of samples; shares along other axes, such as ``model``, stay."""
        kept = {axis: numbers for axis, numbers in composition.work_shares.items() if axis not in self.batch_axes}
        return composition.changed(shares=shares_text({**kept, **shares}) or None)

    def step_seconds(self, observation: Observation, now: ParallelConfig, then: ParallelConfig) -> float:
        """Seconds of a step with other shares: all but the communication of the busiest rank grows with its samples."""
        parts = zip(self.parts(then), self.parts(now), observation.computing, strict=True)
        longest = max(observation.computing)
        growth = max(new / old * seconds for new, old, seconds in parts) / longest
        moving = observation.communicating[observation.computing.index(longest)]
        return moving + (observation.step_seconds - moving) * growth


class SampleBalancer:
    """Collects the lines of steps, and proposes compositions with other shares of samples. For rank 0.

    Candidates are the shares by the observed speeds, even shares, and those that the run began with. ``cost`` is
    the measured seconds of a change. ``write`` gets the lines of the log, its header first.
    """

    def __init__(
        self,
        config: AdaptConfig,
        composition: ParallelConfig,
        sharing: SampleSharing,
        steps: int,
        cost: float,
        write: Callable[[dict[str, Any]], None] = lambda line: None,
    ) -> None:
        self.composition, self.sharing, self.steps = composition, sharing, steps
        self._policy, self._state, self._first = Policy(config), PolicyState(), composition
        self._lines: deque[Mapping[str, Any]] = deque(maxlen=MOST_LINES)
        self._cost, self._write, self._since, self._seconds = cost, write, 0, 0.0
        write(header(config, {"shares": cost}))

    def add(self, line: Mapping[str, Any]) -> ParallelConfig | None:
        """Take the line of a step, as in ``metrics.jsonl``; returns the composition to change to, or None.

        Call ``changed`` once the run has it; until then the run is taken to keep its composition.
        """
        self._lines.append(line)
        self._since, self._seconds = self._since + 1, self._seconds + line["seconds"]
        steps, seconds = self._policy.config.interval
        if self._since < steps or self._seconds < seconds:
            return None
        window = list(self._lines)[-self._since :]
        self._since, self._seconds = 0, 0.0
        observation = observe(window, self.steps, work=self.sharing.parts(self.composition))
        fastest = self.sharing.by_speed(self.composition, observation.speeds)
        compositions = {_label(each): each for each in (self.composition, self._even(), self._first, fastest)}
        shapes = [
            PredictedShape(
                label, self.sharing.step_seconds(observation, self.composition, each), self._cost * (index > 0)
            )
            for index, (label, each) in enumerate(compositions.items())
        ]
        decision = self._policy.decide(observation, shapes[0], shapes, self._state)
        self._state = decision.state
        self._write(record(observation, shapes[0], shapes, decision))
        return compositions[decision.chosen.label] if decision.changes else None

    def changed(self, composition: ParallelConfig, cost: float) -> None:
        """The run has this composition from the next step on; the change took ``cost`` seconds."""
        self.composition, self._cost = composition, cost
        self._lines.clear()
        self._since, self._seconds = 0, 0.0

    def _even(self) -> ParallelConfig:
        return self.sharing.shared(self.composition, {})


def _label(composition: ParallelConfig) -> str:
    return f"shares {composition.shares}" if composition.shares else "even shares"
