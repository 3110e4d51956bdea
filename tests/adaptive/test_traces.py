"""Replays on traces: the goals, the optimum, and determinism."""

from itertools import product

import numpy as np
import pytest
import replay_traces
from policy_traces import SimulatedShapes, replay_trace, steps_of_optimum

from spmd_engine.adaptive.policy import Policy
from spmd_engine.training.train_config import AdaptConfig
from support.pairwise import in_turn

FOUR = replay_traces.shapes_of_four()
DRIFTS = [name for name, _ in replay_traces.drifts(FOUR)]


def follow(shapes, speeds, seconds, **options):
    run = replay_trace(shapes, speeds, seconds, Policy(AdaptConfig()), **{"first": 0, "cost": 1} | options)
    return run, np.array([1 / shapes.step_seconds(each) for each in run.speeds])


def every_sequence(rates, first, cost):
    """The most steps, by trying all shapes in all seconds."""
    most = 0.0
    for sequence in product(range(rates.shape[1]), repeat=len(rates)):
        steps, shape, free = 0.0, first, 0
        for second, wanted in enumerate(sequence):
            if wanted != shape and second >= free:
                shape, free = wanted, second + cost
            steps += rates[second, shape] * (second >= free)
        most = max(most, steps)
    return most


@pytest.mark.parametrize("cost", [1, 2, 3])
def test_the_optimum_is_that_of_all_sequences(cost):
    rates = np.random.default_rng(cost).exponential(size=(7, 3))
    assert steps_of_optimum(rates, 1, cost) == pytest.approx(every_sequence(rates, 1, cost))


@in_turn(4, name=DRIFTS, cost=[1, 10])
def test_drifts(name, cost):
    speeds = dict(replay_traces.drifts(FOUR))[name]
    run, rates = follow(FOUR, speeds, replay_traces.SECONDS, noise=0.02, cost=cost)
    assert run.speeds.shape == (replay_traces.SECONDS, 4)
    if name.split(",")[0] in replay_traces.GOALS:
        assert run.steps >= 0.9 * steps_of_optimum(rates, 0, cost)
    else:
        assert run.steps >= 0.97 * rates[:, 0].sum()


def test_ranks_that_come_and_go(tmp_path):
    """Ranks of a file: the first has one rank, and between times there are fewer than before."""
    random, rows = np.random.default_rng(3), ["# a comment", "trace,time_s,added,removed,alive", "a,100,1,0,1"]
    rows += [f"a,{time},0,0,{random.integers(4, 17)}" for time in range(200, 6000, 200)]
    (tmp_path / "spot.csv").write_text("\n".join(rows))
    ((name, shapes, speeds),) = replay_traces.spot_traces(tmp_path / "spot.csv")
    assert name == "spot, a" and speeds[0].sum() == 1 and len(speeds) == 5700
    run, rates = follow(shapes, lambda second, shape: speeds[second], len(speeds), noise=0.02)
    assert run.steps >= 0.9 * steps_of_optimum(rates, 0, 1) and run.changes > 10
    again, _ = follow(shapes, lambda second, shape: speeds[second], len(speeds), noise=0.02)
    assert (again.steps, again.changes) == (run.steps, run.changes)


def test_a_run_without_ranks_waits():
    shapes = SimulatedShapes(("data=1",), np.ones((1, 1)))
    run, _ = follow(shapes, lambda second, shape: np.full(1, float(not 10 <= second < 30)), 60)
    assert (run.steps, run.changes) == (40, 0)
