"""A job whose shares follow the speeds of its ranks."""

import json
from math import prod

import numpy as np
import pytest

from spmd_engine.adaptive.adapter import BELIEVED, Advisor, replay, resumed
from spmd_engine.adaptive.candidates import BoundariesBySpeed, Outlook, Proposal, SharesBySpeed, kind_of_change, parts
from spmd_engine.adaptive.monitor import Observation
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.engine.reshape import Shape
from spmd_engine.models import GPT_SIZES, gpt
from spmd_engine.training.train_config import AdaptConfig
from support.pairwise import in_turn

MODEL = gpt(GPT_SIZES["gpt-nano"], "gpt-nano")  # with 6 heads


def shape_on(axes, ranks=None, **options):
    ranks = range(prod(axes.values())) if ranks is None else ranks
    return Shape(ParallelConfig(mesh=axes, **options), tuple(ranks))


class Job:
    """Steps of ranks with given speeds, each of which computes its part and then communicates for ``moving`` s."""

    def __init__(self, axes, samples, steps=600, noise=0.02, moving=0.02, advisor=None, memory=None, **settings):
        self.shape, self.samples, self.log, self.moving = shape_on(axes), samples, [], moving
        self.noise, self.random, self.memory = noise, np.random.default_rng(0), memory
        proposers, config = [SharesBySpeed(MODEL, samples)], AdaptConfig(**settings)
        limits = [100] * len(self.shape.ranks) if memory else None
        given = {"memory": limits, "write": self.log.append, **(advisor or {})}
        self.advisor = Advisor(config, self.shape, steps, proposers, {"first step": 0.1}, **given)
        self.step, self.changes = 0, []

    def run(self, steps, speeds):
        """Make steps; returns the seconds of the last one, without noise."""
        seconds = 0.0
        for _ in range(steps):
            self.step += 1
            shape = self.advisor.shape
            computing = np.array(parts(shape)) * self.samples / np.array(speeds)[list(shape.ranks)] / 50
            seconds = computing.max() + self.moving
            measured = computing * np.exp(self.noise * self.random.standard_normal(len(computing)))
            line_seconds = measured.max() + self.moving
            divided = np.stack([measured, np.full(len(measured), self.moving), measured.max() - measured], axis=1)
            line = {"step": self.step, "seconds": line_seconds, "shares": (divided / line_seconds).round(3).tolist()}
            if self.memory:
                line["private_bytes"] = [self.memory(shape)] * len(shape.ranks)
            self.advisor.add(line)
            if shape := self.advisor.proposed:
                self.changes.append((self.step, str(shape)))
                self.advisor.changed(shape, 0.5, self.step)
        return seconds

    def efficiency(self, seconds, speeds):
        """Samples a second while computing, as a part of those of all ranks together."""
        return self.samples / 50 / sum(speeds) / (seconds - self.moving)


@in_turn(
    2,
    **{
        "axes, slow": [
            pytest.param({"data": 2}, (1, 0.5), id="two"),
            pytest.param({"data": 4}, (1, 1, 0.5, 1), id="four"),
        ],
        "begin": range(100, 120, 5),
    },
)
def test_shares_follow_a_rank_that_becomes_slower_and_recovers(axes, slow, begin):
    job, even = Job(axes, 56), (1,) * len(slow)
    job.run(begin, even)
    assert not job.changes
    before = job.run(1, slow)
    assert job.efficiency(job.run(49, slow), slow) >= 0.9 > job.efficiency(before, slow)
    job.run(150, slow)
    assert job.efficiency(job.run(50, even), even) >= 0.9
    assert 2 <= len(job.changes) <= 4  # two where an observation has steps of both kinds


def test_speeds_are_those_of_the_ranks_at_each_position():
    proposer, shape, speeds = SharesBySpeed(MODEL, 12), shape_on({"data": 3}, rank_order="0,2,1"), (1.0, 1.0, 0.5)
    assert proposer.by_speed(shape, "data", speeds).composition.work_shares == {"data": (5, 2, 5)}
    fewer = proposer._without_slowest(shape, "data", speeds)
    assert fewer.ranks == (0, 1) and fewer.composition.order is None


def test_ranks_of_equal_speed_keep_even_shares():
    job = Job({"data": 4}, 16, noise=0.05)
    job.run(500, (1, 1, 1, 1))
    assert not job.changes and len(job.log) == 1 + 25


def test_a_log_gives_the_decisions_again():
    job = Job({"data": 2}, 56)
    job.run(60, (1, 1))
    job.run(100, (1, 0.5))
    lines = json.loads(json.dumps(job.log, allow_nan=False))
    assert [each.line for each in replay(lines)] == [line["line"] for line in lines if "line" in line]
    assert job.changes and lines[0]["costs"] == {"first step": 0.1}
    assert [line["costs"] for line in lines if "costs" in line][-1] == {"first step": 0.1, "samples": 0.5}


def test_decisions_may_follow_time_instead_of_steps():
    job = Job({"data": 2}, 50, every="5s")  # steps of 0.52 s
    job.run(100, (1, 1))
    assert len(job.log) == 1 + 10


@pytest.mark.parametrize(
    "axes, samples, speeds, expected",
    [
        ({"data": 2}, 12, (1, 0.5), ["data=2:1"]),
        ({"data": 2, "model": 2}, 12, (1, 1, 1, 0.5), ["data=2:1", "model=2:1"]),  # the slowest of an index counts
        ({"pipe": 2, "data": 2}, 12, (1, 1, 1, 1), []),
        ({"data": 2, "expert": 2}, 24, (1, 1, 0.5, 0.5), ["data=2:1"]),
        ({"data": 4}, 5, (0.1, 1, 1, 1), ["data=1:2:1:1"]),  # each has one sample
        ({"model": 2}, 12, (1, 0.5), ["model=2:1"]),
        ({"model": 3}, 12, (1, 1, 0.01), ["model=3:2:1"]),  # each has one head
        ({"context": 2}, 12, (1, 0.5), []),
        ({"data": 4}, 3, (1, 1, 1, 0.5), []),
    ],
    ids=str,
)
def test_shares_by_speed(axes, samples, speeds, expected):
    outlook = Outlook(
        Observation(1, 1, 1.0, (1.0,) * len(speeds), (0.0,) * len(speeds), speeds), shape_on(axes), speeds
    )
    shapes = [each.shape for each in SharesBySpeed(MODEL, samples)(outlook) if len(each.shape.ranks) == len(speeds)]
    assert sorted({each.composition.shares for each in shapes} - {None}) == expected
    assert all(sum(parts(each)) == pytest.approx(1) for each in shapes)


def test_a_change_has_the_cost_of_its_kind():
    even = shape_on({"data": 2, "model": 2})
    kinds = {
        "samples": shape_on({"data": 2, "model": 2}, shares="data=2:1"),
        "tensors": shape_on({"data": 2, "model": 2}, shares="data=2:1,model=2:1"),
        "mesh": shape_on({"data": 4}),
        "ranks": shape_on({"data": 2}, [0, 3]),
    }
    assert {kind: kind_of_change(even, shape) for kind, shape in kinds.items()} == {kind: kind for kind in kinds}


@pytest.mark.parametrize(
    ("axes", "options", "speeds", "expected"),
    [
        ({"pipe": 2}, {"overlap_layers": "3"}, (1, 1), None),
        ({"pipe": 2}, {"overlap_layers": "3"}, (1, 0.7), "0,12"),
        ({"pipe": 2}, {"overlap_layers": "3"}, (1, 0.1), "0,13"),  # the end of the overlap
        ({"pipe": 2, "data": 2}, {"overlap_layers": "3"}, (0.7, 1, 1, 1), "0,9"),
        ({"pipe": 3}, {"overlap_layers": "2", "stages": "0,7,14"}, (1, 0.5, 1), "0,9,12"),
        ({"pipe": 2}, {"overlap_layers": "8:12"}, (1, 0.5), None),  # it is being moved
        ({"pipe": 2}, {}, (1, 0.5), None),
        ({"data": 2}, {"overlap_layers": "3"}, (1, 0.5), None),
    ],
    ids=str,
)
def test_boundaries_by_speed(axes, options, speeds, expected):
    shape = shape_on(axes, **options)
    seen = Observation(1, 1, 1.0, (1.0,) * len(speeds), (0.0,) * len(speeds), speeds)
    found = [
        each.shape.composition.stages for each in BoundariesBySpeed(MODEL)(Outlook(seen, shape, speeds, None, MODEL))
    ]
    assert found == ([expected] if expected else [])


def test_a_boundary_follows_speed_at_the_cost_of_its_kind():
    """Where one stage becomes half as fast, the boundary moves; the overlap that follows it is no change of its own."""
    axes = {"pipe": 2}
    outlook = Outlook(Observation(1, 1, 1.0, (1.0, 1.0), (0.0, 0.0), (1, 0.5)), shape_on(axes), (1, 0.5), None, MODEL)
    even, moved = (shape_on(axes, overlap_layers="4", stages=stages) for stages in ("0,10", "0,13"))
    assert kind_of_change(even, moved) == "stages" and kind_of_change(shape_on(axes), moved) == "mesh"
    assert outlook.step_seconds(moved) < 0.85 * outlook.step_seconds(even)
    advisor = Advisor(AdaptConfig(), even, 100, [], {"first step": 0.1}, model=MODEL)
    advisor.proposed = moved
    advisor.changed(shape_on(axes, overlap_layers="6:14", stages="0,13"), 0.02, 5)
    assert (advisor._home, advisor._costs["stages"]) == (even, 0.02)
    advisor.changed(moved, 3.0, 8)  # the overlap is around the new boundary
    assert (advisor.shape, advisor._home, advisor._costs) == (moved, even, {"first step": 0.1, "stages": 0.02})


def test_heads_and_widths_follow_speed():
    job = Job({"model": 2}, 12)
    job.run(60, (1, 0.5))
    assert [shape for _, shape in job.changes] == ["mesh model=2 shares model=2:1"]
    job.run(100, (1, 1))
    assert job.changes[-1][1] == "mesh model=2"


def test_a_rank_that_costs_more_than_it_gives_is_left_out_and_comes_back():
    """With one sample, which it must have, it would keep the others waiting. It has no work that shows its speed, so
    after a while the job tries it again."""
    job = Job({"data": 4}, 56, steps=2000)
    job.run(60, (1, 1, 0.01, 1))
    assert job.changes[-1][1] == "mesh data=3 on ranks 0,1,3"
    job.run(BELIEVED - 60, (1, 1, 1, 1))
    assert job.advisor.shape.ranks == (0, 1, 3)
    job.run(140, (1, 1, 1, 1))
    assert job.changes[-1][1] == "mesh data=4" and job.efficiency(job.run(1, (1,) * 4), (1,) * 4) > 0.99


def test_rank_zero_is_never_left_out():
    job = Job({"data": 4}, 56, steps=2000)
    job.run(100, (0.01, 1, 1, 1))
    assert 0 in job.advisor.shape.ranks and len(job.advisor.shape.ranks) == 4


def test_a_refused_shape_is_not_proposed_again():
    job = Job({"data": 2}, 56)
    job.advisor.changed = lambda shape, seconds, step: job.advisor.refused()
    job.run(300, (1, 0.5))
    assert job.changes and len(job.changes) == len({shape for _, shape in job.changes})
    del job.advisor.changed
    job.advisor.changed(shape_on({"data": 2}, shares="data=2:1"), 0.5, job.step)  # a user asks for it later
    job.run(40, (1, 0.5))


def test_a_resumed_job_goes_on_as_if_it_had_not_stopped():
    """With its account, its stay and the costs that it knows."""
    limits = {"least_stay": 100, "most_loss": 0.5}
    whole, first = (Job({"data": 2}, 56, noise=0, **limits) for _ in range(2))
    for job in (whole, first):
        job.run(60, (1, 1))
        job.run(40, (1, 0.5))
    lines = json.loads(json.dumps(first.log))
    home, costs, state = resumed(lines, first.advisor.shape)
    given = {"home": home, "state": state, "step": first.step, "write": first.log.append}
    second = Job({"data": 2}, 56, noise=0, **limits)
    second.advisor = Advisor(
        AdaptConfig(**limits), first.advisor.shape, 600, [SharesBySpeed(MODEL, 56)], costs, **given
    )
    second.step = first.step
    for job in (whole, second):
        job.run(400, (1, 1))
    assert whole.changes[1:] == second.changes and whole.changes[1][0] >= whole.changes[0][0] + 100
    decided = lambda log: [line["line"] for line in log if "line" in line]
    assert decided(first.log) == decided(whole.log)
    assert [each.line for each in replay(json.loads(json.dumps(first.log)))] == decided(first.log)  # over the restart
    assert resumed(lines, shape_on({"data": 2}, shares="data=5:1"))[2].home is None  # another shape begins anew


def test_a_shape_that_was_asked_for_is_the_new_home():
    job, asked = Job({"data": 4}, 56), shape_on({"data": 2, "model": 2})
    job.run(40, (1, 1, 1, 1))
    job.advisor.changed(asked, 0.5, job.step)
    job.run(200, (1, 1, 1, 1))
    assert not job.changes and job.advisor.shape == asked
    lines = json.loads(json.dumps(job.log))
    assert [each.line for each in replay(lines)] == [line["line"] for line in lines if "line" in line]
    assert resumed(lines, asked)[0] == asked


@pytest.mark.parametrize(
    "factor, pressure, used, taken",
    [
        (0.97, 0.5, 50, False),
        (0.5, 0.5, 50, True),
        (1.5, 0.5, 95, True),
        (1.5, 0.95, 95, False),
        (0.5, 0.95, 50, False),
    ],
)
def test_a_less_sure_prediction_must_be_better_unless_memory_is_short(factor, pressure, used, taken):
    other = shape_on({"model": 2})
    job = Job({"data": 2}, 56, memory=lambda shape: used)
    job.advisor.proposers = [lambda outlook: [Proposal(other, factor, pressure)]]
    job.run(40, (1, 0.8))  # the imbalance is above its threshold
    assert job.log[1]["observation"]["memory"] == (used / 100,) * 2
    assert [shape for _, shape in job.changes] == ["mesh model=2"] * taken
