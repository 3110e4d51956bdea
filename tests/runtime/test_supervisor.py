"""The supervisor: what it starts, and that a job whose rank died goes on from its last checkpoint."""

import json
import os
import sys

import pytest

import saved
from spmd_engine.checkpoints import CheckpointFolder
from spmd_engine.errors import UsageError
from spmd_engine.runtime.mpi_job import find_mpiexec
from spmd_engine.runtime.supervisor import Supervisor

pytestmark = pytest.mark.skipif(find_mpiexec() is None, reason="no mpiexec")

JOB = ["train", "--run", "r", "--model", "two-layers", "--steps", "8", "--save-every", "2", "--batch-size", "4"]
JOB += ["--eval-every", "0", "--eval-samples", "2", "--dtype", "float64"]


def supervisor(*arguments, ranks=2, **options):
    told = []
    return Supervisor(ranks, list(arguments), say=told.append, **options), told


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").write_text("something to learn from, again and again\n" * 300)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    return tmp_path


KILLER = '''
"""Kills a rank in the middle of a step, the first time that the job is started."""
import os, signal
rank = os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK"))
if os.environ.get("SPMD_RESTARTS") in {restarts!r} and rank == "1":
    from spmd_engine.training.trainer import Trainer
    real = Trainer.step
    def step(self):
        if self.steps_done == {step}:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self)
    Trainer.step = step
'''


def kill_at(folder, step, restarts=("0",)):
    (folder / "sitecustomize.py").write_text(KILLER.format(step=step, restarts=list(restarts)))


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_job_whose_rank_was_killed_goes_on_and_ends_as_if_nothing_had_been(here):
    job = [*JOB, "--data", "data"]
    assert Supervisor(2, [*job[:2], "whole", *job[3:]]).run() == 0
    kill_at(here, 5)
    watched, told = supervisor(*job)
    assert watched.run() == 0
    assert len(told) == 1 and "goes on from step-00000004 on 2 ranks, restart 1 of 3" in told[0]
    assert saved.everything("runs/r") == saved.everything("runs/whole")
    assert losses(here / "runs" / "r") == losses(here / "runs" / "whole")


@pytest.mark.soak
def test_a_job_that_keeps_dying_goes_on_with_fewer_ranks_and_then_ends(here):
    kill_at(here, 3, restarts=("0", "1", "2"))
    watched, told = supervisor(*JOB, "--data", "data", "--mesh", "data=3", ranks=3, min_ranks=2, max_restarts=5)
    assert watched.run() == 0
    assert [("2 ranks" in each) for each in told] == [False, False, True]
    assert CheckpointFolder(here / "runs" / "r").newest().name == "step-00000008"


def test_a_mistake_is_not_tried_again(here):
    watched, told = supervisor(*JOB, "--data", "nowhere")
    assert watched.run() == 2 and told == []


def test_a_script_is_told_how_often_it_was_started(here):
    (here / "script.py").write_text(
        "import os, sys\n"
        "again = int(os.environ['SPMD_RESTARTS'])\n"
        "open(f'seen-{again}', 'a').write(sys.argv[1])\n"
        "sys.exit(0 if again == 2 else 7)\n"
    )
    watched, told = supervisor("script.py", "x", max_restarts=1)
    assert watched.run() == 7 and "after 1 restart(s): no more" in told[-1]
    watched, told = supervisor("script.py", "x", max_restarts=2)
    assert watched.run() == 0
    assert (here / "seen-0").read_text() == "xxxx" and (here / "seen-2").read_text() == "xx"


def test_what_goes_on_takes_its_own_job_and_fewer_ranks_another_mesh(here):
    watched, _ = supervisor("train", "--config", "c.json", "--run=r", "--mesh", "data=2,model=2", ranks=4, min_ranks=2)
    begins = watched.command(4)[len(find_mpiexec()) :]
    assert begins == ["-n", "4", sys.executable, "-m", "spmd_engine", *watched.arguments]
    (here / "runs" / "r" / "checkpoints" / "step-00000002").mkdir(parents=True)
    (here / "runs" / "r" / "checkpoints" / "step-00000002" / "manifest.json").touch()
    assert watched.command(4)[-5:] == ["train", "--run=r", "--mesh", "data=2,model=2", "--resume"]
    assert watched.command(3)[-3:] == ["train", "--run=r", "--resume"]


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ([], {}, "nothing to launch"),
        (["train"], {}, "give 'train' a --run NAME"),
        (["x.py"], {"ranks": 2, "min_ranks": 3}, "at least one, at most -n"),
    ],
)
def test_what_cannot_be_supervised_is_said(arguments, options, message):
    with pytest.raises(UsageError, match=message):
        supervisor(*arguments, **options)
