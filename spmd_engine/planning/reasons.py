"""Why a plan is what it is: what each of its choices gains over the nearest others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from spmd_engine.planning.estimate import Estimate
from spmd_engine.planning.goals import Limits, value
from spmd_engine.planning.lattice import Candidate
from spmd_engine.planning.search import Planner


def reasons(planner: Planner, limits: Limits, chosen: Estimate, goal: str) -> Iterator[str]:
    """What the plan's choices gain over the nearest others, one by one."""
    candidate = chosen.candidate
    for name, options in _alternatives(candidate):
        others = []
        for option in options:
            changed = {name: option, "stages": None}
            if name == "schedule":
                changed["chunks"] = 1
            estimator = planner.estimator(replace(candidate, **changed))
            other = estimator.estimate() if estimator is not None else None
            if other is not None:
                others.append((option, other))
        if others:
            option, other = min(others, key=lambda pair: value(goal, pair[1]))
            yield _said(name, option, getattr(candidate, name), chosen, other, limits)


def _alternatives(candidate: Candidate) -> Iterator[tuple[str, Sequence[Any]]]:
    stored = candidate.batch_ranks * candidate.mesh.get("context", 1)
    if stored > 1:
        yield "zero", [zero for zero in range(4) if zero != candidate.zero]
    cut, m = candidate.batch_ranks, candidate.micro_batches
    sizes = [n for n in (m // 2, 2 * m) if n >= 1 and candidate.batch_size // max(n, 1) >= cut]
    if candidate.schedule == "interleaved":
        sizes = [n for n in sizes if n % candidate.pipe == 0]
    if sizes:
        yield "micro_batches", sizes
    yield "recompute", [again for again in ("none", "attention", "block") if again != candidate.recompute][:2]
    if candidate.mesh.get("model", 1) > 1:
        yield "sequence_parallel", [not candidate.sequence_parallel]
    if candidate.pipe > 1:
        yield "schedule", [name for name in ("1f1b", "zero-bubble", "gpipe") if name != candidate.schedule]


def _said(name: str, option: Any, mine: Any, chosen: Estimate, other: Estimate, limits: Limits) -> str:
    what = f"{name.replace('_', ' ')} {mine}, not {option}"
    broken = limits.broken(other)
    if broken:
        needs = limits.measured(other)
        return f"{what}: that would need " + " and ".join(
            f"{limits.said(each, needs[each])} of {each}" for each in sorted(broken)
        )
    slower, larger = other.seconds / chosen.seconds - 1, other.memory / chosen.memory - 1
    gains = {part: other.parts[part] - chosen.parts[part] for part in other.parts}
    why = max(gains, key=lambda part: gains[part])
    because = f", most of it {why}" if slower > 0.002 and gains[why] > 0 else ""
    return f"{what}: that would take {slower:+.1%} time{because}, and {larger:+.1%} memory"
