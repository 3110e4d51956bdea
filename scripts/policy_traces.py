"""Replays of the policy on traces of the ranks' speeds, and the optimum of a run that knows the whole trace."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np

from spmd_engine.adaptive.monitor import Observation, observe
from spmd_engine.adaptive.policy import Policy, PolicyState, PredictedShape


@dataclass(frozen=True)
class SimulatedShapes:
    """The shapes of a replay: a step of shape c takes ``overhead`` and the longest ``work[c, r]`` over r's speed."""

    labels: tuple[str, ...]
    work: np.ndarray  #: float64[c, r]: seconds at speed 1
    overhead: float = 0.0  #: seconds in which all ranks communicate

    def step_seconds(self, speeds: np.ndarray) -> np.ndarray:
        """Seconds of a step of each shape, infinite if it has work for a rank of speed 0: float64[c]."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.work > 0, self.work / speeds, 0.0).max(axis=1) + self.overhead

    def measured_step(self, shape: int, speeds: np.ndarray, errors: np.ndarray) -> dict[str, Any]:
        """The seconds and shares of a step, as ``metrics.jsonl`` has them; ``errors`` are factors, float64[r]."""
        work = self.work[shape]
        computing = np.divide(work * errors, speeds, out=np.zeros(len(work)), where=work > 0)
        seconds = computing.max() + self.overhead
        parts = [computing, np.full(len(work), self.overhead), computing.max() - computing]
        return {"seconds": seconds, "shares": np.stack(parts, axis=1) / seconds}


@dataclass(frozen=True)
class Replay:
    """What a run has done on a trace."""

    steps: int
    changes: int
    speeds: np.ndarray  #: float64[seconds, r]: the trace


def replay_trace(
    shapes: SimulatedShapes,
    speeds: Callable[[int, int], np.ndarray],
    seconds: int,
    policy: Policy,
    *,
    first: int,
    cost: float,
    noise: float = 0.0,
    seed: int = 0,
) -> Replay:
    """Run the policy for ``seconds`` of a trace, beginning with shape ``first``.

    ``speeds(second, shape)`` are the ranks' speeds in a second, float64[r], 0 for a rank that is not there. They may
    depend on the present shape, as those of an adversary. A step has the speeds of the second in which it begins, and a
    change stops the run for ``cost`` seconds. Measured seconds of ranks differ from true ones by factors whose
    logarithms have the standard deviation ``noise``. The policy decides after every interval of its configuration, in
    steps, and when ranks come or go.
    """
    random, (every, _) = np.random.default_rng(seed), policy.config.interval
    trace: list[np.ndarray] = []

    def speeds_at(time: float, shape: int) -> np.ndarray:
        second = min(int(time), seconds - 1)
        while len(trace) <= second:
            trace.append(speeds(len(trace), shape))
        return trace[second]

    now, steps, changes, shape, state = 0.0, 0, 0, first, PolicyState()
    window: deque[dict[str, Any]] = deque(maxlen=every)
    present, due = speeds_at(now, shape) > 0, False
    while now < seconds:
        true = speeds_at(now, shape)
        took = float(shapes.step_seconds(true)[shape])
        runs = isfinite(took)
        if true.any() and (not runs or window and (due or ((true > 0) != present).any())):
            present, due = true > 0, False
            remaining = int((seconds - now) / took) if runs else seconds
            observation, measured = _observe(shapes.work[shape], window, present, steps, remaining)
            predicted = shapes.step_seconds(np.where(measured > 0, measured, true) * present)
            candidates = [PredictedShape(label, s, cost) for label, s in zip(shapes.labels, predicted, strict=True)]
            decision = policy.decide(observation, candidates[shape], candidates, state)
            state = decision.state
            if decision.changes:
                shape, changes, now = candidates.index(decision.chosen), changes + 1, now + cost
                window.clear()
                continue
        if not runs:  # and no other shape can
            now += 1.0
            continue
        now += took
        steps += now <= seconds
        errors = np.exp(noise * random.standard_normal(len(true)))
        window.append({"step": steps, **shapes.measured_step(shape, true, errors)})
        due = steps % every == 0
    speeds_at(seconds, shape)
    return Replay(steps, changes, np.array(trace))


def _observe(
    work: np.ndarray, window: Sequence[Mapping[str, Any]], present: np.ndarray, steps: int, remaining: int
) -> tuple[Observation, np.ndarray]:
    """The observation of the ranks that are there, and the measured speed of each rank, or 0: float64[r]."""
    no_step = {"step": steps, "seconds": 1.0, "shares": np.zeros((len(work), 3))}
    lines = [{**line, "shares": line["shares"][present]} for line in window or [no_step]]
    observation = observe(lines, steps + remaining, work=work[present].tolist())
    computing, measured = np.array(observation.computing), np.zeros(len(work))
    measured[present] = np.divide(work[present], computing, out=np.zeros(len(computing)), where=computing > 0)
    return observation, measured


def steps_of_optimum(rates: np.ndarray, first: int, cost: int) -> float:
    """The most steps that any sequence of changes makes on a trace, by dynamic programming over its seconds.

    ``rates`` are the steps a second of each shape, float64[seconds, c]. A change stops the run for ``cost`` whole
    seconds, at least 1.
    """
    most = np.full((len(rates) + 1, rates.shape[1]), -np.inf)  # after each second, by the shape then
    most[0, first] = 0.0
    for second, rate in enumerate(rates, start=1):
        most[second] = most[second - 1] + rate
        if second >= cost:
            most[second] = np.maximum(most[second], most[second - cost].max())
    return float(most[-1].max())
