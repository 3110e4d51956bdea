"""Shares of the samples that follow the speeds of ranks: a slow rank gets less, until it is as quick as the others."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from spmd_engine import TrainConfig, run_threads, train
from spmd_engine.adaptive import adapter as adapters
from spmd_engine.adaptive.adapter import Adapter, replay
from spmd_engine.adaptive.planner_process import PlannerProposals
from spmd_engine.training import Trainer
from spmd_engine.training.run_folder import read_run
from spmd_engine.training.train_config import AdaptConfig
from support.random_jobs import RandomJob, losses_in


def trained(folder, axes, speeds, monkeypatch, steps=40, every="5", fixed=0.0, stop_at=None, seed=5, batch=56, **how):
    """Train on ranks with these speeds, in work a second, by step; returns the shares after each change by step."""
    step = Trainer.step

    def timed(trainer):
        """A step whose report has the seconds that ranks of these speeds would take."""
        report, engine = step(trainer), trainer.engine
        held = sum(parameter.size for parameter in engine.parameters.values())  # whole on ranks that differ in data
        if "pipe" in axes:
            layers = [engine.model.layers[number][1] for number in engine.assignment.uses]
            held = sum(layer.cost(engine.model.context) for layer in layers) / 100
        samples = np.arange(batch)[engine.batch_span(batch)].size * 56 / batch
        counts = engine.mesh.all_gather(np.array([samples * held / 1000]))
        seconds = fixed + counts / np.array(speeds(report.step))[: len(counts)]
        parts = [[each / seconds.max(), 0.0, 1 - each / seconds.max()] for each in seconds]
        return replace(report, seconds=float(seconds.max()), shares=parts)

    monkeypatch.setattr(Trainer, "step", timed)
    monkeypatch.setattr(PlannerProposals, "_ask", lambda proposals, outlook: None)  # it has tests of its own
    job = RandomJob(seed, folder)
    what = {
        "steps": steps,
        "batch_size": batch,
        "micro_batches": 1,
        "eval_every": 0,
        "mesh": axes,
        "timeout": 60.0,
        **how,
    }
    config, ranks = TrainConfig.of(**job.what | what | how), int(np.prod(list(axes.values())))
    config = config.changed(adapt=AdaptConfig(every=every, least_stay=0, most_loss=0.9))
    run_threads(lambda: train(config, folder / "run", stop_at=stop_at), ranks)
    if stop_at:
        run_threads(lambda: train(read_run(folder / "run"), folder / "run", resume=True), ranks)
    events = map(json.loads, (folder / "run" / "events.jsonl").read_text().splitlines())
    return {each["step"]: each["after"] for each in events if each["event"] in ("reshaped", "not reshaped")}


def decided(folder):
    """The lines of the run's log, after a check that they give its decisions again."""
    lines = [*map(json.loads, (folder / "run" / Adapter.NAME).read_text().splitlines())]
    assert [each.line for each in replay(lines)] == [line["line"] for line in lines if "line" in line]
    return lines


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


def test_a_boundary_moves_within_the_overlap_while_a_stage_is_slow(tmp_path, monkeypatch):
    """The overlap follows it; neither is a new home, so that the run returns."""
    slow, changed = lambda step: [1, 0.5] if step <= 20 else [1, 1], adapters.Advisor.changed
    monkeypatch.setattr(adapters.Advisor, "changed", lambda self, shape, seconds, step: changed(self, shape, 0.1, step))
    changes = trained(tmp_path, {"pipe": 2}, slow, monkeypatch, seed=3, batch=4, overlap_layers="1", stages="0,3")
    boundaries = [(4, "2:4"), (4, 1), (5, "3:5"), (5, 1), (4, "4:6"), (4, 1)]
    assert list(changes.values()) == [f"mesh pipe=2 stages 0,{at} overlap_layers {held}" for at, held in boundaries]
    assert decided(tmp_path)[-1]["line"].endswith("no threshold is crossed")
    losses = losses_in(tmp_path / "run")
    monkeypatch.undo()
    one = {"mesh": {"data": 1}, "stages": None, "overlap_layers": None}
    job = TrainConfig.read(tmp_path / "run" / "config.json").with_options(**one)
    run_threads(lambda: train(job.changed(adapt=None), tmp_path / "alone"), 1)
    np.testing.assert_allclose([*losses.values()], [*losses_in(tmp_path / "alone").values()], rtol=1e-9)


@pytest.mark.parametrize(
    "axes, speeds, after",
    [
        pytest.param({"data": 2}, [1, 0.5], "mesh data=2 shares data=19:9", marks=pytest.mark.soak),  # as below
        ({"data": 2, "model": 2}, [1, 1, 0.2, 1], "mesh data=2,model=2 shares model=21:107"),
        pytest.param({"data": 2}, [1, 0.95], None, marks=pytest.mark.soak),  # a policy's test has it
        pytest.param({"model": 2}, [1, 0.5], "mesh model=2 shares model=43:21", marks=pytest.mark.soak),
    ],
)
def test_shares_by_the_slowest_rank_of_each_part(tmp_path, monkeypatch, axes, speeds, after):
    changes = trained(tmp_path, axes, lambda step: speeds, monkeypatch, steps=20)
    assert list(changes.values()) == ([after] if after else [])


def test_a_resumed_run_goes_on_with_its_decisions(tmp_path, monkeypatch):
    """Those after its checkpoint are forgotten, as its steps are; the others stand, and the policy remembers them."""
    slow = lambda step: [1, 0.5] if 5 < step <= 30 else [1, 1]
    changes = trained(tmp_path, {"data": 2}, slow, monkeypatch, stop_at=25)
    assert [*changes.values()] == ["mesh data=2 shares data=19:9", "mesh data=2"]
    lines = decided(tmp_path)
    homes = [line["home"]["composition"]["shares"] for line in lines if "home" in line]
    assert len(homes) == 4 and set(homes) == {None}  # of two starts and two changes: the home of the first
    with open(tmp_path / "run" / Adapter.NAME, "a") as file:
        file.write(json.dumps({**lines[-1], "step": 1000}) + "\n")
    monkeypatch.undo()
    run_threads(lambda: train(read_run(tmp_path / "run"), tmp_path / "run", resume=True), 2)
    assert decided(tmp_path) == lines


def test_a_rank_that_keeps_the_others_waiting_is_left_out_and_comes_back(tmp_path, monkeypatch):
    monkeypatch.setattr(adapters, "BELIEVED", 15)
    slow = lambda step: [1, 1, 0.001 if step <= 20 else 1]
    changes = trained(tmp_path, {"data": 3}, slow, monkeypatch, steps=60)
    assert [*changes.values()] == ["mesh data=2", "mesh data=3"]
    decided(tmp_path)


def test_a_refused_request_of_a_user_is_not_that_of_the_proposal():
    """A proposal may wait until a live migration ends, or ranks have joined."""
    adapter, refused = Adapter(AdaptConfig()), []
    adapter._advisor = SimpleNamespace(proposed="a shape", refused=lambda: refused.append(True))
    adapter.not_reshaped(5, {"request": "0123456789abcdef"})
    assert not refused
    adapter.not_reshaped(5, {"request": ""})
    assert refused
