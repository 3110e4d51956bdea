"""The first step of a training equals its analysis."""

import json

import pytest

from spmd_engine import run_threads
from spmd_engine.engine.zero.storage import GroupStorage
from spmd_engine.errors import PlanError
from spmd_engine.jobs import resolve
from spmd_engine.jobs.run_job import train
from spmd_engine.planning.simulator.check_prediction import differences, routed_bytes
from spmd_engine.training import TrainConfig

LINE = ("all_reduce", "data", "gradients")


def trained(folder, **options):
    """The first line of the metrics of two steps on two virtual ranks."""
    enforce = options.pop("enforce", True)
    job = TrainConfig.of(model="mlp", steps=1, batch_size=32, eval_samples=32, **options)
    run_threads(lambda: train(job, run=folder, enforce=enforce), 2)
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])


@pytest.mark.parametrize("options", [{"zero": 3}, {"mesh": {"pipe": 2}, "micro_batches": 2}], ids=["zero", "pipe"])
def test_a_step_equals_its_analysis(tmp_path, options):
    facts = trained(tmp_path / "run", **options)
    assert facts["predicted"]["bytes_sent"] == facts["bytes_sent"] > 0
    assert facts["predicted"]["differences"] == 0
    assert facts["predicted"]["peak_bytes"] < facts["predicted"]["resident_bytes"]
    assert facts["predicted"]["seconds"] > 0 and facts["predicted"]["measured_seconds"] == facts["seconds"]


def test_the_state_of_the_jobs_optimizer_is_predicted(tmp_path):
    numbers = {"adamw": {}, "sgd": {"optimizer": "sgd"}, "plain": {"optimizer": "sgd", "momentum": 0.0}}
    facts = {name: trained(tmp_path / name, **options)["predicted"]["peak_bytes"] for name, options in numbers.items()}
    assert facts["adamw"] - facts["sgd"] == facts["sgd"] - facts["plain"] > 0  # an array of state each


def test_a_step_that_sends_more_is_an_error_that_names_the_call(tmp_path, monkeypatch):
    real = GroupStorage.start_reduce

    def twice(storage):
        over = storage.rest
        if type(storage.own_gradients).__name__ == "ndarray" and over:  # not in the dry run
            over.all_reduce(storage.own_gradients[:5], label="gradients")
        return real(storage)

    monkeypatch.setattr(GroupStorage, "start_reduce", twice)
    with pytest.raises(PlanError, match=r"all_reduce over data \(gradients\): 2 calls .* predicted, 4 calls"):
        trained(tmp_path / "run")
    assert trained(tmp_path / "again", enforce=False)["predicted"]["differences"] == 1


def test_a_step_without_an_analysis_is_trained(tmp_path, monkeypatch, caplog):
    def fails(*_, **__):
        raise ValueError("no such shape")

    monkeypatch.setattr("spmd_engine.planning.analyze", fails)
    assert "predicted" not in trained(tmp_path / "run")
    assert "not compared with its analysis: its analysis failed with ValueError('no such shape')" in caplog.text


def test_a_job_s_mesh_sums_in_rank_order_if_it_says_so(monkeypatch):
    asked = {}
    monkeypatch.setattr(resolve, "mesh_beside", lambda helpers, axes, **options: asked.update(axes, **options))
    resolve.resolve(TrainConfig.of(model="mlp", deterministic=True, mesh={"data": 2})).open_mesh()
    assert asked["deterministic"] is True and asked["data"] == 2


def test_the_first_difference_comes_first():
    predicted = {LINE: (2, 100), ("all_gather", "data", "x"): (1, 8)}
    assert not differences(predicted, [{LINE: (1, 50), ("all_gather", "data", "x"): (1, 8)}, {LINE: (1, 50)}])
    found = differences(predicted, [{LINE: (2, 99), ("barrier", "data", ""): (1, 0)}])
    assert [each.split(":")[0] for each in found] == [
        "all_reduce over data (gradients)",
        "all_gather over data (x)",
        "barrier over data",
    ]


def test_routed_layers_have_equal_calls_and_bounded_bytes():
    line = ("all_to_all", "expert", "block0/moe")
    predicted, axes = {line: (4, 60)}, {"expert": 4}
    assert not differences(predicted, [{line: (4, 80)}], {"block0/moe"}, axes)  # every row leaves its rank
    assert differences(predicted, [{line: (4, 81)}], {"block0/moe"}, axes)
    assert differences(predicted, [{line: (5, 60)}], {"block0/moe"}, axes)


def test_routed_bytes_have_balanced_and_largest_values():
    line = ("all_to_all", "expert", "block0/mlp")
    found = routed_bytes({line: (4, 300)}, [{line: (2, 100)}, {line: (2, 50)}], {"block0/mlp"}, {"expert": 4})
    assert found == {"sent": 150, "balanced": 300, "most": 400}
    assert routed_bytes({line: (4, 300)}, [], set(), {}) == {}
