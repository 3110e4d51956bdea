"""Shares of the samples that follow the speeds of ranks: a slow rank gets less, until it is as quick as the others."""

import json
from dataclasses import replace

import numpy as np
import pytest

from random_jobs import RandomJob, losses_in
from spmd_engine import TrainConfig, run_threads, train
from spmd_engine.adaptive.adapt_config import AdaptConfig
from spmd_engine.training import Trainer


def trained(folder, axes, speeds, monkeypatch, steps=40, every="5", fixed=0.0):
    """Train on ranks with these speeds, in samples a second, by step; returns the shares after each change by step."""
    step = Trainer.step

    def timed(trainer):
        """A step whose report has the seconds that ranks of these speeds would take."""
        report, engine = step(trainer), trainer.engine
        mine = [part.size for part in [np.arange(56)[engine.batch_span(56)]]]
        counts = engine.mesh.all_gather(np.array(mine))
        seconds = fixed + counts / np.array(speeds(report.step))
        parts = [[each / seconds.max(), 0.0, 1 - each / seconds.max()] for each in seconds]
        return replace(report, seconds=float(seconds.max()), shares=parts)

    monkeypatch.setattr(Trainer, "step", timed)
    job = RandomJob(5, folder)  # an mlp
    what = {"steps": steps, "batch_size": 56, "micro_batches": 1, "eval_every": 0, "mesh": axes, "timeout": 60.0}
    config, ranks = TrainConfig.of(**job.what | what), int(np.prod(list(axes.values())))

    config = config.changed(adapt=AdaptConfig(every=every, least_stay=0, most_loss=0.9))
    run_threads(lambda: train(config, folder / "run"), ranks)
    events = map(json.loads, (folder / "run" / "events.jsonl").read_text().splitlines())
    return {each["step"]: each["after"] for each in events if each["event"] in ("reshaped", "not reshaped")}


def test_a_slow_rank_gets_less_until_it_recovers(tmp_path, monkeypatch):
    slow = lambda step: [1, 1, 0.5, 1] if 10 < step <= 25 else [1, 1, 1, 1]
    changes = trained(tmp_path, {"data": 4}, slow, monkeypatch)
    assert list(changes.values()) == ["mesh data=4 shares data=2:2:1:2", "mesh data=4"]
    first, second = changes
    assert 10 < first <= 10 + 12 and 25 < second <= 25 + 12  # two intervals: the median of the first may be the old one
    losses = losses_in(tmp_path / "run")
    monkeypatch.undo()
    job = (
        TrainConfig.read(tmp_path / "run" / "config.json")
        .with_options(mesh={"data": 1}, shares=None)
        .changed(adapt=None)
    )
    run_threads(lambda: train(job, tmp_path / "alone"), 1)
    np.testing.assert_allclose([*losses.values()], [*losses_in(tmp_path / "alone").values()], rtol=1e-9)


@pytest.mark.parametrize(
    "axes, speeds, after",
    [
        ({"data": 2}, [1, 0.5], "mesh data=2 shares data=19:9"),
        ({"data": 2, "model": 2}, [1, 1, 0.2, 1], "mesh data=2,model=2 shares data=47:9"),
        ({"data": 2}, [1, 0.95], None),
        ({"model": 2}, [1, 0.5], None),
    ],
)
def test_shares_by_the_slowest_rank_of_each_part(tmp_path, monkeypatch, axes, speeds, after):
    changes = trained(tmp_path, axes, lambda step: speeds, monkeypatch, steps=20)
    assert list(changes.values()) == ([after] if after else [])
