"""Why a plan is chosen: what each choice gains over the nearest alternatives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from spmd_engine.planning.search.estimate import Estimate
from spmd_engine.planning.search.neighbours import without_shares
from spmd_engine.planning.search.search import Limits
from spmd_engine.planning.search.search_space import Candidate


def gain_of_order(chosen: Estimate, plans: Sequence[Estimate]) -> Iterator[str]:
    """What the order of ranks gains over that of the machine."""
    usual = replace(without_shares(chosen.candidate), stages=None)
    alike = [plan for plan in plans if replace(without_shares(plan.candidate), stages=None) == usual]
    others = [plan.seconds for plan in alike if plan.candidate.order is None]
    if chosen.candidate.order and others:
        slower, order = min(others) / chosen.seconds - 1, ",".join(map(str, chosen.candidate.order))
        yield f"rank order {order}, not as the machine lists them: that would take {slower:+.1%} time"


def gains_of_shares(chosen: Estimate, plans: Mapping[Candidate, Estimate]) -> Iterator[str]:
    """What uneven shares gain over even ones."""
    for name in ("shares", "state_shares"):
        other = plans.get(replace(chosen.candidate, **{name: None, "state_shares": None}))
        if (shares := getattr(chosen.candidate, name)) and other is not None:
            slower, larger = other.seconds / chosen.seconds - 1, other.memory / chosen.memory - 1
            choice = f"{name.replace('_', ' ')} {shares}, not even"
            yield f"{choice}: that would take {slower:+.1%} time, and {larger:+.1%} of the memory that ranks have"


def gains_of_choices(
    limits: Limits,
    chosen: Estimate,
    others: Sequence[tuple[str, Estimate | None]],
    simulated: Mapping[Candidate, Estimate],
) -> Iterator[str]:
    """What the plan gains over each alternative. ``simulated`` has simulated plans, by candidate without shares."""
    for choice, estimate in others:
        if estimate is None:
            yield f"{choice}: the model or the batch cannot be sharded so"
            continue
        other = simulated.get(without_shares(estimate.candidate), estimate)
        yield _explain_gain(choice, chosen, other, limits) + ("" if other.simulated else " (an estimate)")


def _explain_gain(choice: str, chosen: Estimate, other: Estimate, limits: Limits) -> str:
    if broken := limits.broken(other):
        needs = limits.measured(other)
        shown = " and ".join(f"{limits.shown(name, needs[name])} of {name}" for name in sorted(broken))
        return f"{choice}: that would need {shown}"
    slower, larger = other.seconds / chosen.seconds - 1, other.memory / chosen.memory - 1
    gains = {part: other.parts[part] - chosen.parts[part] for part in other.parts}
    largest_gain = max(gains, key=lambda part: gains[part])
    cause = f", most of it {largest_gain}" if slower > 0.002 and gains[largest_gain] > 0 else ""
    return f"{choice}: that would take {slower:+.1%} time{cause}, and {larger:+.1%} memory"
