"""A run changes its shape between steps, on all or some of its ranks, and computes what one rank computes."""

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest

import saved
from on_ranks import numbers_of_ranks, on_ranks
from random_jobs import RandomJob, losses_in
from spmd_engine import TrainConfig, run_threads, train
from spmd_engine.adaptive import ShapeRequest
from spmd_engine.comm.agreement.rank_zero import text_from_rank_zero
from spmd_engine.comm.mesh import Mesh

CHANGES = 10  #: of a run, one after each step but the last two
TEXT_MODEL, EXPERTS, IMAGES, ADAPTERS = 3, 8, 1, 2  #: seeds that draw jobs of these kinds


def job_of(seed, folder, **more):
    job = RandomJob(seed, folder)
    job.steps = CHANGES + 2
    job.what |= {"steps": job.steps, "batch_size": 12, "micro_batches": 2, "eval_every": 3, "timeout": 60.0, **more}
    return job


def drawn_requests(job, ranks):
    """A request after each of ``CHANGES`` steps: a mesh of some of the ranks, and options on it."""
    requests = {}
    for step in range(1, CHANGES + 1):
        count = int(job.rng.choice([n for n in (1, 2, 3, 4, 4) if n <= ranks]))
        axes, how = job._place(count)
        others = job.rng.choice(np.arange(1, ranks), count - 1, replace=False)
        requests[step] = ShapeRequest({"mesh": axes, **how}, ranks=[0, *sorted(others.tolist())])
    return requests


def events(folder, *kinds):
    lines = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] in kinds]


def trained(job, run, ranks, requests, **options):
    """Train a job on ranks, which change their shape by requests at steps."""
    axes, how = job._place(ranks)
    config = TrainConfig.of(**job.what | how | {"mesh": axes})
    return run_threads(lambda: train(config, run, propose=requests.get, **options), ranks)


def assert_same(run, alone):
    ours, theirs = losses_in(run), losses_in(alone)
    assert ours.keys() == theirs.keys()
    np.testing.assert_allclose([*ours.values()], [*theirs.values()], rtol=1e-9)
    for what in saved.parameters, saved.state:
        found, expected = what(run), what(alone)
        assert found.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_allclose(found[name], array, rtol=1e-8, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("seed", [TEXT_MODEL, EXPERTS, IMAGES, ADAPTERS])
def test_ten_changes_change_no_result(tmp_path, seed):
    job = job_of(seed, tmp_path, save_every=4, check_replicas_every=1, save_in_background=True)
    trained(job, tmp_path / "run", 4, drawn_requests(job, 4))
    trained(job, tmp_path / "alone", 1, {})
    assert len(events(tmp_path / "run", "reshaped")) >= 5, events(tmp_path / "run", "not reshaped")
    assert_same(tmp_path / "run", tmp_path / "alone")


@pytest.mark.parametrize("ranks", numbers_of_ranks(mpi=(2, 3, 4)))
def test_ten_changes_on_mpi_ranks(ranks):
    def program():
        with Mesh() as mesh, tempfile.TemporaryDirectory() as mine:
            job = job_of(EXPERTS, mine)
            size, folder = mesh.size, Path(text_from_rank_zero(mesh.group(), lambda: mine))
            requests, (axes, how) = drawn_requests(job, size), job._place(size)
            train(TrainConfig.of(**job.what | how | {"mesh": axes}), folder / "run", propose=requests.get)
            if mesh.rank == 0:
                assert len(events(folder / "run", "reshaped")) >= 5
                trained(job, folder / "alone", 1, {})
                assert_same(folder / "run", folder / "alone")
            mesh.barrier()

    on_ranks(program, ranks)


def test_a_killed_run_continues_exactly(tmp_path):
    """The run ends between two changes, as if killed: what it has not saved is done again, on another mesh."""
    job = job_of(EXPERTS, tmp_path, save_every=5)
    requests = drawn_requests(job, 4)

    def die(step):
        if step == 8:
            raise KeyboardInterrupt
        return requests[step]

    with pytest.raises(KeyboardInterrupt):
        trained(job, tmp_path / "run", 4, type("Requests", (), {"get": staticmethod(die)}))
    before = losses_in(tmp_path / "run")
    trained(job, tmp_path / "run", 3, {6: ShapeRequest({"mesh": {"data": 2}})}, resume=True)
    trained(job, tmp_path / "alone", 1, {})
    assert [each["step"] for each in events(tmp_path / "run", "started")] == [0, 5]
    assert before.keys() == set(range(1, 8))
    assert_same(tmp_path / "run", tmp_path / "alone")
