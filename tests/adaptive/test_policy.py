"""Each rule of the policy, alone; and its log."""

import json
import re
from itertools import pairwise
from math import inf

import pytest

from spmd_engine.adaptive.adapter import header, record, replay
from spmd_engine.adaptive.monitor import Observation
from spmd_engine.adaptive.policy import Policy, PolicyState, PredictedShape
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.engine.reshape import Shape
from spmd_engine.training.train_config import AdaptConfig

STEPS = 1000


def observed(step, seconds, *, imbalance=0.5, memory=(), steps=STEPS):
    computing = seconds * 0.9, seconds * 0.9 * (1 - imbalance)
    return Observation(step, steps - step, seconds, computing, (0.0, 0.0), (1.0, 1.0), memory)


def decisions(true, predicted, *, config=AdaptConfig(), cost=0.5, steps=STEPS, imbalance=0.5, log=None):  # noqa: B008
    """The decisions of a run every 20 steps: ``true(step)`` and ``predicted(step)`` are seconds of a step by label."""
    policy, state, label, made = Policy(config), PolicyState(), "even", []
    for step in range(20, steps, 20):
        shapes = {name: PredictedShape(name, seconds, cost) for name, seconds in predicted(step).items()}
        observation = observed(step, true(step)[label], steps=steps, imbalance=imbalance)
        decision = policy.decide(observation, shapes[label], list(shapes.values()), state)
        if log is not None:
            log.append(record(observation, shapes[label], list(shapes.values()), decision))
        state, label = decision.state, decision.chosen.label
        made.append(decision)
    return made


def changes(made):
    return [(20 * number, decision.chosen.label) for number, decision in enumerate(made, 1) if decision.changes]


def slower_from(step, even=1.0, slow=2.0, other=1.3):
    return lambda now: {"even": slow if now > step else even, "uneven": other}


def always(**seconds):
    return lambda step: seconds


def test_a_faster_shape_is_taken_and_left_when_it_is_slower_again():
    seconds = slower_from(100)
    made = decisions(seconds, seconds)
    assert changes(made) == [(120, "uneven")]
    assert made[5].line == (
        "step 120: changes from even to uneven: 2 s to 1.3 s a step saves 616 s in 880 steps, costs 500 ms, "
        "margin 1232.0; load imbalance 0.33 above 0.05 (rank 0)"
    )
    recovers = lambda step: {"even": 2.0 if 100 < step <= 400 else 1.0, "uneven": 1.3}  # noqa: E731
    assert changes(decisions(recovers, recovers)) == [(120, "uneven"), (420, "even")]


@pytest.mark.parametrize(
    "config, cost, other, imbalance, why",
    [
        ({}, 0.5, 1.96, 0.5, "a gain of 2.0% is below 5.0%"),
        ({}, 0.5, 2.1, 0.5, "no other shape is faster"),
        ({}, 0.5, 1.3, 0.0, "no threshold is crossed"),
        ({"load_imbalance": 0.4}, 0.5, 1.3, 0.5, "no threshold is crossed"),
        ({"margin": 1e4}, 0.5, 1.3, 0.5, "the margin is below 10000"),
        ({}, 11.0, 1.3, 0.5, "changes could lose 22 s of at most 21.6 s"),
    ],
)
def test_a_refusal_has_its_reason(config, cost, other, imbalance, why):
    seconds = slower_from(100, other=other)
    made = decisions(seconds, seconds, config=AdaptConfig(**config), cost=cost, imbalance=imbalance)
    assert not changes(made)
    assert made[6].line.startswith("step 140: keeps even") and made[6].line.endswith(f"; {why}")


def test_a_change_waits_until_its_cost_is_lost():
    """The break-even rule: 0.7 s are lost in each step, so a cost of 20 s is lost after 29."""
    seconds = slower_from(100)
    config = AdaptConfig(most_loss=0.5)
    assert changes(decisions(seconds, seconds, config=config, cost=20.0)) == [(140, "uneven")]
    short = lambda step: {"even": 2.0 if 100 < step <= 120 else 1.0, "uneven": 1.3}  # noqa: E731
    assert not changes(decisions(short, short, config=config, cost=20.0))


def test_near_the_end_no_change_is_worth_its_cost():
    seconds = slower_from(100)
    assert not changes(decisions(seconds, seconds, steps=141, cost=15.0, config=AdaptConfig(most_loss=0.5)))


def test_a_change_is_followed_by_a_minimal_stay():
    quick = lambda step: {"even": 1.0 + step // 20 % 2, "uneven": 2.0 - step // 20 % 2}  # noqa: E731
    config = AdaptConfig(least_stay=60, most_loss=0.9)
    steps = [step for step, _ in changes(decisions(quick, quick, config=config))]
    assert len(steps) > 5 and min(b - a for a, b in pairwise(steps)) == 60


def test_a_gain_that_was_predicted_but_does_not_come_is_taken_back():
    made = decisions(always(even=1.0, uneven=1.1), always(even=1.0, uneven=0.8))
    assert changes(made) == [(40, "uneven"), (60, "even")]
    assert made[-1].state.errors["uneven"] == pytest.approx(1.1 / 0.8)


def test_predictions_that_are_wrong_by_the_same_factor_change_nothing():
    seconds = slower_from(100)
    scaled = lambda step: {name: 0.6 * value for name, value in seconds(step).items()}  # noqa: E731
    right, wrong = decisions(seconds, seconds), decisions(seconds, scaled)
    assert [each.line for each in wrong] == [each.line for each in right]


def test_a_speed_that_changes_with_the_shape_is_no_error_of_a_prediction():
    seconds = lambda step: {"even": 2.0, "uneven": 1.3 if step < 60 else 1.7}  # noqa: E731
    assert set(decisions(seconds, seconds)[-1].state.errors.values()) == {1.0}


def test_changes_lose_at_most_the_given_part_of_the_time():
    """Whatever the run changes to is slower from then on: it returns, and in the end stays."""
    policy, state, label, time, at_home = Policy(), PolicyState(), "even", 0.0, 0.0
    for step in range(20, 2000, 20):
        seconds = {"even": 1.0, "uneven": 2.0} if label == "uneven" else {"even": 2.0, "uneven": 1.0}
        time, at_home = time + 20 * seconds[label], at_home + 20 * seconds["even"]
        shapes = {name: PredictedShape(name, each, 2.0) for name, each in seconds.items()}
        observation = observed(step, seconds[label], steps=2000)
        decision = policy.decide(observation, shapes[label], list(shapes.values()), state)
        time += 2.0 * decision.changes
        state, label = decision.state, decision.chosen.label
    assert time > at_home and time < 1.03 * at_home
    assert label == "even" and re.search(r"changes could lose .* of at most", decision.line)


def test_a_shape_that_cannot_run_is_left_at_any_cost():
    here, there = PredictedShape("data=4", inf, 0.0), PredictedShape("data=3", 2.0, 100.0)
    decision = Policy().decide(observed(50, 1.0), here, [here, there, PredictedShape("data=2", 3.0, 0.0)])
    assert decision.changes and decision.chosen is there and decision.state.home == "data=3"
    assert decision.line == "step 50: data=4: it cannot run any more; changes to data=3: 2 s a step, costs 100 s"
    decision = Policy().decide(observed(50, 1.0), here, [here])
    assert not decision.changes and decision.line.endswith("no other shape can run")


def test_memory_pressure_is_relieved_although_steps_become_longer():
    here, there = PredictedShape("zero 0", 1.0, 0.0, 0.95), PredictedShape("zero 3", 1.5, 1.0, 0.4)
    quick = PredictedShape("quick", 0.5, 0.1, 0.97)
    full = observed(50, 1.0, memory=(0.5, 0.95))
    decision = Policy().decide(full, here, [quick, there])
    assert decision.changes and decision.chosen is there and "memory pressure 0.95 above 0.9" in decision.line
    assert not Policy().decide(full, here, [PredictedShape("unknown", 1.5)]).changes
    enough = Policy().decide(observed(50, 1.0, memory=(0.5, 0.5)), here, [quick])
    assert not enough.changes  # quick would not fit


def test_a_change_that_was_refused_is_no_observation_of_the_new_shape():
    policy, shapes = (
        Policy(AdaptConfig(least_stay=40)),
        [PredictedShape("even", 2.0, 0.5), PredictedShape("uneven", 1.0, 0.5)],
    )
    first = policy.decide(observed(20, 2.0), shapes[0], shapes)
    second = policy.decide(observed(40, 2.0), shapes[0], shapes, first.state)
    third = policy.decide(observed(60, 2.0), shapes[0], shapes, second.state)
    assert second.changes and third.state.errors == {} and not third.changes


def test_a_log_gives_the_same_decisions(tmp_path):
    seconds = lambda step: {"even": 2.0 if 100 < step <= 400 else 1.0, "uneven": 1.3, "gone": inf}  # noqa: E731
    log, config = [], AdaptConfig(least_gain=0.1)
    made = decisions(seconds, seconds, config=config, log=log)
    home = Shape(ParallelConfig(), (0, 1))
    lines = [header(0, config, {"shares": 0.5}, home, home), *log]
    read = json.loads(json.dumps(lines, allow_nan=False))
    assert list(replay(read)) == made and len(changes(made)) == 2
    read[0]["config"]["least_gain"] = 0.5
    assert [each.changes for each in replay(read)] != [each.changes for each in made]
