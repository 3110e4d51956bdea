"""The policy: whether a run changes its shape, by an observation and predictions. All functions are pure.

The choice among shapes whose speeds vary, where each change has a cost, is a metrical task system (Borodin, Linial and
Saks, "An optimal on-line algorithm for metrical task system", J. ACM 39(4), 1992). Algorithms for it leave a state when
the time lost there has reached the cost of leaving; for one change this is the break-even rule of ski rental (Karlin,
Manasse, Rudolph and Sleator, "Competitive snoopy caching", Algorithmica 3, 1988). Speeds that vary against such a rule
still make a run slower than one that never changes. Therefore the policy also keeps an account of its lead over that
run: it changes only if all changes together, with the way back, can lose at most ``most_loss`` of the steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, inf, isfinite, log
from typing import Any, Self

from spmd_engine.adaptive.monitor import Observation, crossings
from spmd_engine.training.train_config import AdaptConfig
from spmd_engine.units import readable_seconds


@dataclass(frozen=True)
class PredictedShape:
    """A shape, a composition on some ranks, that a run has or may change to."""

    label: str  #: equal for equal shapes
    step_seconds: float  #: predicted by the speeds that the ranks have now; infinite if the shape cannot run now
    cost: float = 0.0  #: predicted seconds for which a change to it stops the run
    memory_pressure: float | None = None  #: predicted part of its memory that the fullest rank uses; None: not known

    def as_json(self) -> list[Any]:
        """The fields in order; None for infinite seconds."""
        seconds = self.step_seconds if isfinite(self.step_seconds) else None
        return [self.label, seconds, self.cost, self.memory_pressure]

    @classmethod
    def from_json(cls, content: Sequence[Any]) -> Self:
        """The shape that ``as_json`` describes."""
        label, seconds, cost, memory_pressure = content
        return cls(label, inf if seconds is None else seconds, cost, memory_pressure)


@dataclass(frozen=True)
class Change:
    """A change of shape, what was expected of it, and what observations have shown since."""

    step: int
    label: str
    expected: float  #: seconds of a step
    scale: float  #: observed over predicted seconds of a step before the change, without the error of the prediction
    error: float  #: that of the prediction for the new shape, as it was known then
    least: float = inf  #: the least logarithm of observed over expected seconds of a step since then
    most: float = -inf  #: the largest


@dataclass(frozen=True)
class PolicyState:
    """What the policy remembers of earlier observations."""

    step: int | None = None  #: step of the last one
    change: Change | None = None  #: the last one
    home: str | None = None  #: the shape of a run that changes only where it must
    spent: float = 0.0  #: seconds that that run has taken for the steps until now
    lead: float = 0.0  #: seconds by which this run is ahead of that one
    lost: float = 0.0  #: seconds that the best other shapes would have saved since the present one has been too slow
    #: by label: observed over predicted seconds of a step, relative to those at home
    errors: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Decision:
    """Whether a run changes its shape, and why."""

    changes: bool
    chosen: PredictedShape  #: the current shape if nothing changes
    line: str  #: the reasons with their numbers, as one line
    state: PolicyState  #: for the next decision


@dataclass(frozen=True)
class Policy:
    """Decides by thresholds, savings, costs, and the account of earlier changes."""

    config: AdaptConfig = AdaptConfig()

    def decide(
        self,
        observation: Observation,
        current: PredictedShape,
        candidates: Sequence[PredictedShape],
        state: PolicyState = PolicyState(),  # noqa: B008 (immutable)
    ) -> Decision:
        """Whether to change from the ``current`` shape, which the observed steps had, to one of ``candidates``.

        Predictions are only compared with each other: a step in another shape is expected to take the observed seconds
        times the quotient of both predictions, corrected by the errors that earlier observations have shown.
        ``candidates`` may include the current shape, and should include the run's first one, to which it returns if
        changes have lost too much. A shape that cannot run any more, or that needs too much memory where another shape
        is known to need less, is left without regard to costs.
        """
        config, step, remaining = self.config, observation.step, observation.remaining
        now = observation.step_seconds
        others = [shape for shape in candidates if shape.label != current.label and isfinite(shape.step_seconds)]
        fitting = [shape for shape in others if (shape.memory_pressure or 0.0) <= config.memory_pressure]
        relieving = [shape for shape in fitting if shape.memory_pressure is not None]
        if not isfinite(current.step_seconds):
            return _leave("it cannot run any more", observation, current, fitting, state)
        if observation.memory_pressure > config.memory_pressure and relieving:
            why = f"memory pressure {observation.memory_pressure:.2f} above {config.memory_pressure:g}"
            return _leave(why, observation, current, relieving, state)

        state = _learn(state, now, current)
        scale = now / (current.step_seconds * state.errors.get(current.label, 1.0))
        seconds = {shape.label: shape.step_seconds * state.errors.get(shape.label, 1.0) * scale for shape in others}
        seconds[current.label] = now
        home = next((shape for shape in others if shape.label == state.home), current)
        best = min(fitting, key=lambda shape: shape.cost + remaining * seconds[shape.label], default=current)
        at_home, gain = seconds[home.label], now - seconds[best.label]
        steps = step - state.step if state.step is not None else 0
        behind = steps * (now - at_home)  # seconds that a run at home would have been quicker by, since then
        lead, spent = state.lead - behind, state.spent + steps * at_home
        lost = state.lost + steps * gain if gain > config.least_gain * now else 0.0
        state = replace(state, step=step, spent=spent, lead=lead, lost=lost)

        def offer(to: PredictedShape) -> str:
            then, saved = seconds[to.label], (now - seconds[to.label]) * remaining
            times = f"{readable_seconds(now)} to {readable_seconds(then)} a step saves {readable_seconds(saved)}"
            margin = f", margin {saved / to.cost:.1f}" if to.cost else ""
            return f"{to.label}: {times} in {remaining} steps, costs {readable_seconds(to.cost)}{margin}"

        def change(to: PredictedShape, why: str) -> Decision:
            begun = Change(step, to.label, seconds[to.label], scale, state.errors.get(to.label, 1.0))
            after = replace(state, change=begun, lead=lead - to.cost, lost=0.0)
            return Decision(True, to, f"step {step}: changes from {current.label} to {offer(to)}; {why}", after)

        most = config.most_loss * (spent + remaining * at_home)
        if lead - home.cost - behind < -most and (now - at_home) * remaining > home.cost:
            return change(home, f"changes have lost {readable_seconds(-lead)} of at most {readable_seconds(most)}")
        crossed = crossings(observation, config)
        stayed = step - state.change.step if state.change else inf
        risk = 2 * best.cost - lead if best.label != state.home else 0.0  # with the way back
        refusals = {
            "no threshold is crossed": not crossed,
            "no other shape is faster": gain <= 0,
            f"a gain of {gain / now:.1%} is below {config.least_gain:.1%}": gain <= config.least_gain * now,
            f"the margin is below {config.margin:g}": gain * remaining < config.margin * best.cost,
            f"the last change is only {stayed} of {config.least_stay} steps ago": stayed < config.least_stay,
            f"{readable_seconds(lost)} lost so far are less than the cost": lost < best.cost,
            f"changes could lose {readable_seconds(max(risk, 0.0))} of at most {readable_seconds(most)}": risk > most,
        }
        why = next((why for why, holds in refusals.items() if holds), None)
        if why is None:
            return change(best, ", ".join(map(str, crossed)))
        offered = f"; {offer(best)}" if gain > 0 else ""
        return Decision(False, current, f"step {step}: keeps {current.label}{offered}; {why}", state)


def _leave(
    why: str,
    observation: Observation,
    current: PredictedShape,
    candidates: Sequence[PredictedShape],
    state: PolicyState,
) -> Decision:
    """The change of a run that cannot keep its shape. The new one becomes its home, since it had to change."""
    step, begin = observation.step, f"step {observation.step}: {current.label}: {why}"
    if not candidates:
        return Decision(False, current, f"{begin}; no other shape can run", replace(state, step=step))
    best = min(candidates, key=lambda shape: shape.cost + observation.remaining * shape.step_seconds)
    times = f"{readable_seconds(best.step_seconds)} a step, costs {readable_seconds(best.cost)}"
    after = PolicyState(step, Change(step, best.label, inf, 1.0, 1.0), best.label, lead=state.lead)
    return Decision(True, best, f"{begin}; changes to {best.label}: {times}", after)


def _learn(state: PolicyState, now: float, current: PredictedShape) -> PolicyState:
    """The state with the error of the prediction for the current shape, as far as observations show it.

    The seconds of a step are compared with those that were expected before the change, and with those that are
    predicted now. Speeds may vary at any time, so an error counts only as far as both comparisons of all observations
    since the change show it.
    """
    if state.home is None:
        return replace(state, home=current.label)
    change = state.change
    if change is None or change.label != current.label or not isfinite(change.expected):
        return state
    seen = log(now / change.expected), log(now / (current.step_seconds * change.error * change.scale))
    change = replace(change, least=min(change.least, *seen), most=max(change.most, *seen))
    error = change.error * exp(max(change.least, 0.0) + min(change.most, 0.0))
    return replace(state, change=change, errors={**state.errors, current.label: error})
