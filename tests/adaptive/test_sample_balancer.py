"""A job whose shares follow the speeds of its ranks."""

import json
from math import prod

import numpy as np
import pytest

from spmd_engine.adaptive.adapt_config import AdaptConfig
from spmd_engine.adaptive.decision_log import replay
from spmd_engine.adaptive.sample_balancer import SampleBalancer, SampleSharing
from spmd_engine.engine.parallel_config import ParallelConfig


class Job:
    """Steps of ranks with given speeds, each of which computes its samples and then communicates for 0.02 s."""

    def __init__(self, axes, samples, steps=600, noise=0.02, micro_batches=1, **settings):
        self.axes, self.sharing, self.log = axes, SampleSharing(axes, samples), []
        self.micro_batches, self.noise, self.random = micro_batches, noise, np.random.default_rng(0)
        config = AdaptConfig(**settings)
        self.balancer = SampleBalancer(config, ParallelConfig(), self.sharing, steps, 0.1, self.log.append)
        self.step, self.changes = 0, []

    def run(self, steps, speeds):
        """Make steps; returns the seconds of the last one, without noise."""
        seconds = 0.0
        for _ in range(steps):
            self.step += 1
            samples = np.array(self.sharing.parts(self.balancer.composition)) * self.sharing.samples
            computing = self.micro_batches * samples / np.array(speeds) / 50
            seconds = computing.max() + 0.02
            measured = computing * np.exp(self.noise * self.random.standard_normal(len(computing)))
            line_seconds = measured.max() + 0.02
            parts = np.stack([measured, np.full(len(measured), 0.02), measured.max() - measured], axis=1)
            line = {"step": self.step, "seconds": line_seconds, "shares": (parts / line_seconds).round(3).tolist()}
            if composition := self.balancer.add(line):
                self.changes.append((self.step, composition.shares))
                self.balancer.changed(composition, 0.5)
        return seconds

    def efficiency(self, seconds, speeds):
        """Samples a second while computing, as a part of those of all ranks together."""
        return self.sharing.samples / 50 / sum(speeds) / (seconds - 0.02)


@pytest.mark.parametrize("axes, slow", [({"data": 2}, (1, 0.5)), ({"data": 4}, (1, 1, 0.5, 1))], ids=["two", "four"])
@pytest.mark.parametrize("begin", range(100, 120, 5))
def test_shares_follow_a_rank_that_becomes_slower_and_recovers(axes, slow, begin):
    job, even = Job(axes, 56), (1,) * len(slow)
    job.run(begin, even)
    assert not job.changes
    before = job.run(1, slow)
    assert job.efficiency(job.run(49, slow), slow) >= 0.9 > job.efficiency(before, slow)
    job.run(150, slow)
    assert job.efficiency(job.run(50, even), even) >= 0.9
    assert 2 <= len(job.changes) <= 4  # two where an observation has steps of both kinds


def test_ranks_of_equal_speed_keep_even_shares():
    job = Job({"data": 4}, 16, noise=0.05)
    job.run(500, (1, 1, 1, 1))
    assert not job.changes and len(job.log) == 1 + 25


def test_a_log_gives_the_decisions_again():
    job = Job({"data": 2}, 56)
    job.run(60, (1, 1))
    job.run(100, (1, 0.5))
    lines = json.loads(json.dumps(job.log, allow_nan=False))
    assert [each.line for each in replay(lines)] == [line["line"] for line in lines[1:]]
    assert job.changes and lines[0]["costs"] == {"shares": 0.1}


def test_decisions_may_follow_time_instead_of_steps():
    job = Job({"data": 2}, 50, every="5s")  # steps of 0.52 s
    job.run(100, (1, 1))
    assert len(job.log) == 1 + 10


@pytest.mark.parametrize(
    "axes, samples, speeds, expected",
    [
        ({"data": 2}, 12, (1, 0.5), "data=2:1"),
        ({"data": 2, "model": 2}, 12, (1, 1, 1, 0.5), "data=2:1"),  # all ranks of an index wait for the slowest
        ({"pipe": 2, "data": 2}, 12, (1, 1, 1, 1), None),
        ({"data": 2, "expert": 2}, 24, (1, 1, 0.5, 0.5), "data=2:1"),
        ({"data": 4}, 5, (1, 1, 1, 0.1), "data=2:1:1:1"),  # each has one sample
        ({"model": 2}, 12, (1, 0.5), None),  # no axis shards samples
        ({"data": 4}, 3, (1, 1, 1, 0.5), None),
    ],
    ids=str,
)
def test_shares_by_speed(axes, samples, speeds, expected):
    sharing = SampleSharing(axes, samples)
    composition = sharing.by_speed(ParallelConfig(), speeds)
    assert composition.shares == expected
    copies = prod(size for axis, size in axes.items() if axis in ("model", "pipe"))
    assert sum(sharing.parts(composition)) == pytest.approx(copies)
