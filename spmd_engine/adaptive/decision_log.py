"""The log of a run's decisions, as lines of JSON, from which the policy makes the same decisions again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from spmd_engine.adaptive.adapt_config import AdaptConfig
from spmd_engine.adaptive.monitor import Observation
from spmd_engine.adaptive.policy import Decision, Policy, PolicyState, PredictedShape

VERSION = 1


def header(config: AdaptConfig, costs: Mapping[str, float]) -> dict[str, Any]:
    """The first line: the policy's configuration, and the measured seconds of each kind of change."""
    return {"version": VERSION, "config": config.as_json(), "costs": dict(costs)}


def record(
    observation: Observation, current: PredictedShape, candidates: Sequence[PredictedShape], decision: Decision
) -> dict[str, Any]:
    """The line of a decision, with all that it depends on."""
    return {
        "observation": observation.as_json(),
        "current": current.as_json(),
        "candidates": [each.as_json() for each in candidates],
        "chosen": decision.chosen.label,
        "line": decision.line,
    }


def replay(lines: Iterable[Mapping[str, Any]]) -> Iterator[Decision]:
    """The decisions of a log again, each with the state of the policy after it; a resumed run goes on with the last."""
    lines = iter(lines)
    policy, state = Policy(AdaptConfig.from_json(next(lines)["config"], "the log's header")), PolicyState()
    for line in lines:
        observation, current = Observation.from_json(line["observation"]), PredictedShape.from_json(line["current"])
        candidates = [PredictedShape.from_json(each) for each in line["candidates"]]
        decision = policy.decide(observation, current, candidates, state)
        state = decision.state
        yield decision
