"""The log of a run's decisions, as lines of JSON, from which the policy makes the same decisions again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from spmd_engine.adaptive.monitor import Observation
from spmd_engine.adaptive.policy import Decision, Policy, PolicyState, PredictedShape
from spmd_engine.engine.reshape import Shape, ShapeRequest
from spmd_engine.training.adapt_config import AdaptConfig

VERSION = 2


def header(step: int, config: AdaptConfig, costs: Mapping[str, float], home: Shape, shape: Shape) -> dict[str, Any]:
    """The first line, and one after each start and change: the policy's configuration, the measured seconds of each
    kind of change, the shape with which the policy compares others, and the present one."""
    shapes = {"home": home.request.as_json(), "shape": str(shape)}
    return {"version": VERSION, "step": step, "config": config.as_json(), "costs": dict(costs), **shapes}


def record(
    observation: Observation, current: PredictedShape, candidates: Sequence[PredictedShape], decision: Decision
) -> dict[str, Any]:
    """The line of a decision, with all that it depends on."""
    return {
        "step": observation.step,
        "observation": observation.as_json(),
        "current": current.as_json(),
        "candidates": [candidate.as_json() for candidate in candidates],
        "chosen": decision.chosen.label,
        "line": decision.line,
    }


def replay(lines: Iterable[Mapping[str, Any]]) -> Iterator[Decision]:
    """The decisions of a log again, each with the state of the policy after it."""
    return (decision for decision, _ in _replayed(lines) if decision)


def _replayed(lines: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Decision | None, PolicyState]]:
    """The decision of each line, None for a header, and the state after it: with another home it begins anew."""
    policy, state, home = Policy(), PolicyState(), None
    for line in lines:
        if "config" in line:
            policy = Policy(AdaptConfig.from_json(line["config"], "the log's header"))
            state, home = state if line["home"] == home else PolicyState(), line["home"]
            yield None, state
            continue
        observation, current = Observation.from_json(line["observation"]), PredictedShape.from_json(line["current"])
        candidates = [PredictedShape.from_json(candidate) for candidate in line["candidates"]]
        decision = policy.decide(observation, current, candidates, state)
        state = decision.state
        yield decision, state


def resumed(lines: Sequence[Mapping[str, Any]], shape: Shape) -> tuple[Shape, Mapping[str, float], PolicyState]:
    """What a run in this shape knows by its log: its home, the costs of changes, and the state of the policy.

    A run that resumes in another shape than its last one has this shape as its home, and the policy begins anew.
    """
    last, state = {}, PolicyState()
    for line, (decision, after) in zip(lines, _replayed(lines), strict=True):
        last, state = last if decision else line, after
    if last.get("shape") != str(shape):
        return shape, last.get("costs", {}), PolicyState()
    return ShapeRequest.from_json(last["home"], "the log's header").shape, last["costs"], state
