"""Runs with helper ranks: their results, resumes with and without them, and what ends them."""

import json
import os
import signal
import time

import pytest
from test_shape_changes import EXPERTS, IMAGES, assert_same, events, job_of

from mpi_harness.launch import Job, mpiexec
from spmd_engine import TrainConfig, run_threads, train
from spmd_engine.adaptive import ShapeRequest
from spmd_engine.checkpoints.format.folder import find_checkpoint
from spmd_engine.errors import UsageError
from spmd_engine.jobs import run_job
from spmd_engine.runtime.signals import StopFlag
from support.command_line import QUIET, TEXT


def config_of(seed, folder, **options):
    job = job_of(seed, folder)
    return TrainConfig.of(**job.what | {"steps": 6, "save_every": 2, "mesh": {"data": 2}, **options})


def last_layer(config):
    return config.model.build(config.composition).layers[-2][0].split("/")[0]


@pytest.mark.parametrize("seed", [EXPERTS, pytest.param(IMAGES, marks=pytest.mark.soak)])
def test_a_run_resumes_with_other_helper_ranks_and_without(tmp_path, seed):
    config = config_of(seed, tmp_path, steps=3, save_every=0)
    helped = config.with_options(assign=f"{last_layer(config)}:rank2")
    results = run_threads(lambda: train(helped, tmp_path / "run", stop_at=1), 3)
    assert results[0].steps_done == 1
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["predicted"]["differences"] == 0 and first["predicted"]["bytes_sent"] == first["bytes_sent"]
    other = config.with_options(assign=f"{last_layer(config)}:rank1")
    run_threads(lambda: train(other, tmp_path / "run", resume=True, given=["assign"], stop_at=2), 3)
    run_threads(lambda: train(other, tmp_path / "run", resume=True), 2)  # by the ranks of the mesh alone
    run_threads(lambda: train(config.with_options(mesh={"data": 1}), tmp_path / "alone"), 1)
    assert_same(tmp_path / "run", tmp_path / "alone")
    assert "continues without --assign" in events(tmp_path / "run", "opened")[-1]["notices"][0]


def test_a_run_with_helper_ranks_changes_its_shape(tmp_path):
    """A helper rank becomes idle, is taken onto the mesh, and another one helps; then it is the first one's turn."""
    config = config_of(EXPERTS, tmp_path)
    layer = last_layer(config)
    helped = config.with_options(assign=f"{layer}:rank2")
    requests = {
        1: ShapeRequest({"mesh": {"data": 2}, "assign": None}),
        2: ShapeRequest({"mesh": {"data": 3}}),
        3: ShapeRequest({"mesh": {"data": 1}, "assign": f"{layer}:rank1"}),
        4: ShapeRequest({"mesh": {"data": 2}}),  # rank 1 is on the mesh
        5: ShapeRequest({"assign": f"{layer}:rank1"}),
    }
    run_threads(lambda: train(helped, tmp_path / "run", propose=requests.get), 3)
    changes = events(tmp_path / "run", "reshaped", "not reshaped")
    assert [each.get("ranks") for each in changes] == [[0, 1], [0, 1, 2], [0], [0, 1], None]
    assert changes[3]["notices"] == [f"continues without --assign {layer}:rank1 (rank 1 is on the mesh)"]
    assert "rank 1 is on the mesh; name one outside" in changes[4]["why"]
    run_threads(lambda: train(config.with_options(mesh={"data": 1}), tmp_path / "alone"), 1)
    assert_same(tmp_path / "run", tmp_path / "alone")
    with pytest.raises(UsageError, match="--assign with --adapt"):
        run_threads(lambda: train(TrainConfig.from_json({**helped.as_json(), "adapt": {}}), tmp_path / "other"), 3)


def test_a_signal_to_a_helper_rank_ends_the_run_after_a_save(tmp_path, monkeypatch):
    class Told(StopFlag):
        """Python gives signals to the main thread alone."""

        def __enter__(self):
            self.receive(signal.SIGTERM)
            return super().__enter__()

    monkeypatch.setattr(run_job, "StopFlag", Told)
    config = config_of(EXPERTS, tmp_path)
    helped = config.with_options(assign=f"{last_layer(config)}:rank2")
    with pytest.raises(SystemExit, match="143"):
        run_threads(lambda: train(helped, tmp_path / "run"), 3)
    (stopped,) = events(tmp_path / "run", "stopped")
    assert stopped["signal"] == signal.SIGTERM and stopped["step"] <= 2
    assert find_checkpoint(tmp_path / "run").name == f"step-{stopped['step']:08d}"


@pytest.mark.soak  # comm/test_failure_mpi.py kills a rank of a mesh
@pytest.mark.skipif(mpiexec() is None, reason="needs an MPI library and its mpiexec")
def test_a_killed_helper_rank_ends_the_job(tmp_path):
    options = ["--mesh", "data=2", "--assign", "layer_1:rank2", "--steps", "100000", "--run", "./run"]
    arguments = ["-m", "spmd_engine", "train", "--model", "mlp", *options, *TEXT, *QUIET, "--batch-size", "2"]
    with (tmp_path / "said").open("w") as said, Job(3, arguments, cwd=tmp_path, stderr=said, stdout=said) as job:
        metrics, ends = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 100
        while not (metrics.exists() and metrics.read_text().count("\n") > 1):
            assert time.monotonic() < ends and job.process.poll() is None, (tmp_path / "said").read_text()
            time.sleep(0.05)
        os.kill(max(job.ranks()), signal.SIGKILL)  # the last one started
        assert job.process.wait(100) != 0
    assert "Traceback" not in (tmp_path / "said").read_text()
