"""Observations from lines of metrics.jsonl, and the thresholds that they cross."""

import json
from types import SimpleNamespace

import pytest

from spmd_engine.adaptive.monitor import CrossingLog, Observation, crossings, observe
from spmd_engine.errors import UsageError
from spmd_engine.training.train_config import AdaptConfig
from spmd_engine.training.trainer import StepReport


def line(step, seconds, *shares, memory=None):
    content = {"step": step, "seconds": seconds, "shares": [list(share) for share in shares]}
    return content | ({"private_bytes": list(memory)} if memory else {})


def test_an_observation_is_the_medians_of_the_steps():
    usual = (0.8, 0.2, 0.0), (0.4, 0.2, 0.4)
    lines = [line(8, 1.0, *usual, memory=(90, 20)), line(9, 30.0, *usual), line(10, 1.0, *usual)]
    lines[1]["private_bytes"] = lines[2]["private_bytes"] = [90, 20]
    observation = observe(lines, 100, memory=[100, 100])
    assert (observation.step, observation.remaining) == (10, 90)
    assert observation.step_seconds == pytest.approx(1.0)  # the save of a checkpoint in step 9 leaves no trace
    assert observation.computing == pytest.approx((0.8, 0.4))
    assert observation.speeds == pytest.approx((0.5, 1.0))
    assert observation.load_imbalance == pytest.approx(0.8 / 0.6 - 1)
    assert observation.communication_overhead == pytest.approx(0.2)
    assert observation.memory_pressure == pytest.approx(0.9)


def test_speeds_allow_for_uneven_work_and_for_ranks_without_any():
    lines = [line(1, 1.0, (0.9, 0.1, 0.0), (0.45, 0.1, 0.45), (0.0, 0.0, 1.0))]
    observation = observe(lines, 1, work=[2, 1, 0])
    assert observation.speeds[:2] == pytest.approx((1.0, 1.0)) and observation.speeds[2] is None
    assert observation.load_imbalance == pytest.approx(1.0)  # a rank without work counts


def test_ranks_that_are_slow_in_turn_do_not_make_a_step_longer_than_their_median_speeds_do():
    in_turn = [line(step, 2.0, *((1, 0, 0), (0.5, 0, 0.5))[:: 1 if step % 2 else -1]) for step in range(20)]
    observation = observe(in_turn, 20)
    assert observation.computing == pytest.approx((1.5, 1.5)) and observation.step_seconds == pytest.approx(1.5)


def test_one_rank_has_no_shares():
    observation = observe([{"step": 1, "seconds": 2.0}], 5)
    assert observation.computing == (2.0,) and observation.load_imbalance == 0 and observation.memory == ()


def test_an_observation_needs_a_step():
    with pytest.raises(ValueError, match="at least one step"):
        observe([], 5)


def test_json_gives_the_same_observation():
    observation = Observation(3, 4, 0.1, (0.1, 1 / 3), (0.0, 0.2), (0.3, None), (0.5, 0.6))
    assert Observation.from_json(json.loads(json.dumps(observation.as_json()))) == observation


def test_crossed_thresholds_name_the_ranks_above_them():
    observation = Observation(1, 1, 1.0, (0.9, 0.3, 0.3), (0.1, 0.7, 0.7), (1.0, 1.0, 1.0), (0.5, 0.95, 0.2))
    texts = [str(crossing) for crossing in crossings(observation, AdaptConfig())]
    assert texts == [
        "load imbalance 0.80 above 0.05 (rank 0)",
        "memory pressure 0.95 above 0.9 (rank 1)",
        "communication overhead 0.50 above 0.3 (rank 1, 2)",
    ]
    assert not crossings(observation, AdaptConfig(load_imbalance=1, memory_pressure=1, communication_overhead=1))


def test_a_crossed_threshold_is_an_event_when_it_begins_and_when_it_ends():
    told, run = [], SimpleNamespace(steps_done=0, memory_limits=[])
    run.engine = SimpleNamespace(mesh=SimpleNamespace(others=SimpleNamespace(on_mesh=[0, 1])))
    run.notify = lambda *facts: told.append(facts)
    log = CrossingLog(AdaptConfig(every="2"))
    log.started(run, 10)
    for step in range(1, 10):
        slow = 0.9 if 4 <= step <= 7 else 0.5
        log.stepped(StepReport(step, 1.0, 1.0, 0.1, 8, 1.0, 8.0, shares=[[slow, 0, 0.1], [0.5, 0, 0.5]]))
    assert told == [
        ("crossed", 5, "load imbalance 0.29 above 0.05 (rank 0)"),
        ("crossed", 9, "no threshold is crossed any more"),
    ]


@pytest.mark.parametrize(
    "every, interval", [("20", (20, 0.0)), ("30s", (0, 30.0)), ("500ms", (0, 0.5))], ids=["steps", "seconds", "ms"]
)
def test_the_interval_is_steps_or_a_time(every, interval):
    assert AdaptConfig(every=every).interval == interval


@pytest.mark.parametrize("every", ["0", "0s", "often", "-3", "1.5 steps"])
def test_another_interval_is_refused(every):
    with pytest.raises(UsageError, match="every"):
        AdaptConfig(every=every)


def test_a_slow_rank_among_many_is_seen_in_a_line_that_does_not_list_all():
    shares = [[0.5, 0.1, 0.4]] * 200
    shares[150] = [0.9, 0.1, 0.0]
    report = StepReport(1, 1.0, 1.0, 1.0, 1, 2.0, 1.0, shares=shares, private_bytes=[10] * 199 + [90])
    line = json.loads(json.dumps(report.as_line()))
    assert "of" in line["shares"]
    assert observe([line], 5, memory=[100.0] * 200) == observe([report.as_dict()], 5, memory=[100.0] * 200)
