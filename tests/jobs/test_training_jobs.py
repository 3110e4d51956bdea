"""Jobs from a configuration: also from a lost or damaged file; what they refuse, and their notices."""

import json

import numpy as np
import pytest

from spmd_engine import TrainConfig, run_threads, train
from spmd_engine.checkpoints.format.folder import RunLock
from spmd_engine.errors import UsageError
from spmd_engine.jobs.run_job import notices_of_rates
from spmd_engine.training import Observer
from spmd_engine.training.run_folder import read_run


def test_a_run_whose_config_is_lost_has_it_in_its_checkpoint(tmp_path):
    job = TrainConfig.of(model="mlp", steps=2, batch_size=4, eval_samples=2)
    train(job, tmp_path / "run", stop_at=1)
    whole = (tmp_path / "run" / "config.json").read_text()
    (tmp_path / "run" / "config.json").unlink()
    train(read_run(tmp_path / "run"), tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "config.json").read_text() == whole
    with RunLock(tmp_path / "run"), pytest.raises(UsageError, match="is being written by another run"):
        train(read_run(tmp_path / "run"), tmp_path / "run", resume=True)


def test_a_second_run_is_refused_before_it_writes_anything(tmp_path):
    """Also where the first one has not saved yet, and the second begins anew, as another job."""
    jobs = [
        TrainConfig.of(model="mlp", steps=2, batch_size=4, eval_samples=2, learning_rate=rate) for rate in (0.1, 0.2)
    ]
    refused = []

    class Second(Observer):
        def stepped(self, report):
            if report.step == 2:  # saved
                return
            before = files_in(tmp_path)
            with pytest.raises(UsageError, match="is being written by another run"):
                train(jobs[1], tmp_path)
            refused.append(files_in(tmp_path) == before)

    run_threads(lambda: train(jobs[0], tmp_path, observers=[Second()]), 1)
    assert refused == [True] and read_run(tmp_path).training.learning_rate == 0.1
    with pytest.raises(UsageError, match="no such checkpoint"):
        train(jobs[0], tmp_path / "mistyped", resume=True)
    assert not (tmp_path / "mistyped").exists()


def files_in(folder):
    """The bytes of each file, and when it was last written."""
    return {each: (each.read_bytes(), each.stat().st_mtime_ns) for each in folder.rglob("*") if each.is_file()}


def test_a_configuration_that_is_damaged_says_where_the_same_is(tmp_path):
    job = TrainConfig.of(model="mlp", steps=1, batch_size=4, eval_samples=2)
    train(job, tmp_path)
    (tmp_path / "config.json").write_text("")
    with pytest.raises(UsageError, match=r"as JSON: .*\. Move it away, and the job is taken from .*step-0"):
        read_run(tmp_path)
    (tmp_path / "config.json").unlink()
    assert read_run(tmp_path).model == job.model


def test_a_job_trains_in_a_notebook_s_ranks_too(tmp_path):
    job = TrainConfig.of(model="mlp", steps=2, batch_size=4, eval_samples=2, dtype="float64", zero=2)
    runs = run_threads(lambda: train(job, tmp_path / "two", stop_at=1).loss, 2)
    runs = run_threads(lambda: train(tmp_path / "two" / "config.json", tmp_path / "two", resume=True).loss, 2)
    assert runs[0] == runs[1]
    whole = train(job.as_json(), tmp_path / "one")
    np.testing.assert_allclose(runs[0], whole.loss, rtol=1e-11)
    assert TrainConfig.read(tmp_path / "one" / "config.json").changed(corpus=None) == job


def test_a_job_made_for_other_data_is_refused(tmp_path):
    (tmp_path / "text").write_text("something to read\n" * 200)
    job = TrainConfig.of(model="mlp", steps=1, batch_size=2, eval_samples=1, data=str(tmp_path / "text"))
    train(job, tmp_path / "run")
    (tmp_path / "text").write_text("something else to read\n" * 200)
    with pytest.raises(UsageError, match=r"text: other files than the job was made for \(SHA-256 differs\)"):
        train(tmp_path / "run" / "config.json", tmp_path / "again")


def test_a_notice_gives_both_rates_where_the_curve_changes():
    begun = TrainConfig.of(steps=10, warmup=2, learning_rate=1.0)
    assert notices_of_rates(begun.training, begun.resumed(eval_every=3).training, 10) == []
    assert notices_of_rates(begun.training, begun.resumed(warmup=3).training, 10) == []  # the rest is the same
    (kept,) = notices_of_rates(begun.training, begun.resumed(steps=20).training, 10)
    rate = "the learning rate of step 11 is"
    assert kept == f"{rate} 0.1, as before, on its curve of 10 steps; with --decay-steps 20 it would be 0.628"
    (warming,) = notices_of_rates(begun.training, begun.resumed(steps=20).training, 1)
    assert warming == "the learning rate of step 2 is 1, as before, on its curve of 10 steps"  # so it is on both
    (stretched,) = notices_of_rates(begun.training, begun.resumed(steps=20, decay_steps=20).training, 10)
    assert stretched.startswith(f"{rate} 0.628; with the options of the checkpoint it would be 0.1; --decay-steps 10")
    (warmer,) = notices_of_rates(begun.training, begun.resumed(warmup=8).training, 4)
    assert warmer == "the learning rate of step 5 is 0.625; with the options of the checkpoint it would be 0.868"


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_a_page_is_trained_by_the_command(precision, tmp_path):
    how = {
        "strategy": "tensor-parallel",
        "model": "mlp",
        "steps": 3,
        "eval_samples": 4,
        "batch_size": 4,
        "mesh": "model=2",
    }

    def losses(dtype):
        run_threads(lambda: train(TrainConfig.of(dtype=dtype, **how), tmp_path / dtype), 2)
        lines = map(json.loads, (tmp_path / dtype / "metrics.jsonl").read_text().splitlines())
        return [line["loss"] for line in lines if "loss" in line]

    np.testing.assert_allclose(losses(precision), losses("float32"), rtol=0.02)
