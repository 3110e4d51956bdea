"""Why a plan is what it is: what each of its choices gains over the nearest others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from spmd_engine.planning.estimate import Estimate
from spmd_engine.planning.goals import Constraints, Limits, value
from spmd_engine.planning.lattice import FIXABLE, Candidate, SearchSpace, axes_that_cut, candidates
from spmd_engine.planning.search import Planner

#: Strategies of one kind alone: their name, mesh axis and stages of ZeRO (None: any).
PLAIN = (
    ("data parallelism", "data", (0,)),
    ("ZeRO", "data", (1, 2, 3)),
    ("tensor parallelism", "model", None),
    ("a pipeline", "pipe", None),
)
SEARCH_SECONDS = 0.5  #: for the best plan of each of these


@dataclass(frozen=True)
class Alternative:
    """A plan that differs in one choice: ``what`` the plan has, and has not; None: it cannot be."""

    what: str
    estimate: Estimate | None


def alternatives(
    planner: Planner, choices: SearchSpace, limits: Limits, chosen: Estimate, goal: str
) -> Iterator[Alternative]:
    """The nearest plans that differ in one choice, by their estimates."""
    candidate = chosen.candidate
    mine = ",".join(f"{axis}={size}" for axis, size in candidate.axes)
    for name, axis, zeros in PLAIN:
        mesh = {axis: candidate.ranks}
        known = axis in axes_that_cut(planner.model) and axis in (choices.axes or [axis])
        if choices.zero is not None:
            zeros = [choices.zero] if zeros is None or choices.zero in zeros else []
        if candidate.ranks == 1 or mesh == candidate.mesh or not known or zeros == []:
            continue
        best = _best_on(planner, replace(choices, mesh=mesh, ranks=[candidate.ranks]), zeros or [None], limits, goal)
        shown = best.candidate if best is not None else f"{axis}={candidate.ranks}"
        yield Alternative(f"mesh {mine}, not {shown} ({name})", best)
    free = {name: None for name in FIXABLE} | {"mesh": candidate.mesh, "batch_sizes": [candidate.batch_size]}
    possible = set(candidates(replace(choices, **free)))
    for name, options in _options(candidate):
        others = []
        for option in options:
            changed = {name: option, "stages": None} | ({"chunks": 1} if name == "schedule" else {})
            other = replace(even(candidate), **changed)
            estimator = planner.estimator(other) if other in possible else None
            estimate = estimator.estimate() if estimator is not None else None
            if estimate is not None:
                others.append((option, estimate))
        if others:
            option, other = min(others, key=lambda pair: value(goal, pair[1]))
            yield Alternative(f"{name.replace('_', ' ')} {getattr(candidate, name)}, not {option}", other)


def _best_on(
    planner: Planner, choices: SearchSpace, zeros: Sequence[int | None], limits: Limits, goal: str
) -> Estimate | None:
    """The best plan on a mesh with one of these stages of ZeRO; if none keeps the limits, what needs least memory."""
    found = []
    for zero in zeros:
        for kept, wanted in ((limits, goal), (Limits(), "memory")):
            space, asked = replace(choices, zero=zero), Constraints(kept)
            seconds = SEARCH_SECONDS / len(zeros)
            best = planner.search(space, asked, wanted, seconds=seconds, front=False, keep=1).best
            if best:
                found.append(best[0])
                break
    fitting = [each for each in found if not limits.broken(each)]
    return min(fitting or found, key=lambda each: value(goal if fitting else "memory", each), default=None)


def even(candidate: Candidate) -> Candidate:
    """The same with as many samples, and as much state, on each rank."""
    return replace(candidate, shares=None, state_shares=None)


def reasons(
    limits: Limits, chosen: Estimate, others: Sequence[Alternative], simulated: Mapping[Candidate, Estimate]
) -> Iterator[str]:
    """What the plan gains over others, as they were ``simulated``, by candidates that are ``even``; an estimate is
    marked."""
    for each in others:
        if each.estimate is None:
            yield f"{each.what}: the model or the batch cannot be cut so"
            continue
        other = simulated.get(even(each.estimate.candidate), each.estimate)
        yield _said(each.what, chosen, other, limits) + ("" if other.simulated else " (an estimate)")


def _options(candidate: Candidate) -> Iterator[tuple[str, Sequence[Any]]]:
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


def _said(what: str, chosen: Estimate, other: Estimate, limits: Limits) -> str:
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
