"""Ranks of a second mpiexec join a running one: results, exit codes, and ranks that are killed on the way."""

import os
import signal
import sys
import time
from contextlib import ExitStack

import pytest
from test_shape_changes import EXPERTS, assert_same, events, job_of

from mpi_harness.launch import Job, mpiexec
from spmd_engine import TrainConfig, run_threads, train

pytestmark = [
    pytest.mark.skipif(mpiexec() is None, reason="needs an MPI library and its mpiexec"),
    pytest.mark.skipif(len(mpiexec() or ()) > 1, reason="ranks join jobs of MPICH only"),
    pytest.mark.usefixtures("sigint_is_heard"),
]

#: Runs a command, as on the node that the environment names.
COMMAND = """
import os, sys
if "NODE" in os.environ:
    from mpi4py import MPI
    MPI.Get_processor_name = lambda: os.environ["NODE"]
from spmd_engine.cli import main
main(sys.argv[1:])
"""
#: Trains ``job.json`` in ``run``: ranks join just after these steps, however long they take to ask for it.
TRAIN = """
import os, sys, time
from pathlib import Path
if "NODE" in os.environ:
    from mpi4py import MPI
    MPI.Get_processor_name = lambda: os.environ["NODE"]
from spmd_engine.adaptive.joining import JoinRequests
from spmd_engine.cli import main

steps, is_ready = [int(step) for step in sys.argv[1].split(",")], JoinRequests.is_ready

def at_these_steps(joining, world):
    if Path("run/metrics.jsonl").read_text().count("\\n") + 1 not in steps:
        return False
    while not is_ready(joining, world):
        time.sleep(0.01)
    return True

if steps[0] >= 0:
    JoinRequests.is_ready = at_these_steps
main(["train", "--config", "job.json", "--run", "./run"])
"""


class Jobs(ExitStack):
    """Jobs in a folder; each ends with it."""

    def __init__(self, folder):
        super().__init__()
        self.folder, self.env = folder, {"PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}

    def train(self, ranks, steps, config, **env):
        (self.folder / "command.py").write_text(COMMAND)
        config.write(self.folder / "job.json")
        (self.folder / "program.py").write_text(TRAIN)
        job = self.start("trains", ranks, ["program.py", steps], env)
        self.until(lambda: (self.folder / "run" / "events.jsonl").exists())
        return job

    def join(self, ranks, *options, name="joins", **env):
        return self.start(name, ranks, ["command.py", "join", "./run", *options], env)

    def start(self, name, ranks, arguments, env):
        errors = self.enter_context((self.folder / name).open("w+"))
        return self.enter_context(Job(ranks, arguments, cwd=self.folder, env=self.env | env, stderr=errors))

    def until(self, holds, seconds=100):
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, [self.said(name) for name in ("trains", "joins")]
            time.sleep(0.02)

    def said(self, name):
        return (self.folder / name).read_text()


@pytest.fixture
def jobs(tmp_path):
    with Jobs(tmp_path) as jobs:
        yield jobs


def experts(folder, **options):
    return TrainConfig.of(**job_of(EXPERTS, folder, **options).what)


@pytest.mark.parametrize("nodes", [None, pytest.param("aab", marks=pytest.mark.soak, id="of two nodes")])
def test_two_joins_change_no_result_and_all_jobs_end_with_0(jobs, tmp_path, nodes):
    env = [{"NODE": node} for node in nodes] if nodes else [{}, {}, {}]
    config = experts(tmp_path, steps=8, save_every=4, check_replicas_every=1)
    running = jobs.train(1, "2,5", config.with_options(mesh={"data": 1}), **env[0])
    first = jobs.join(2, "--mesh", "data=3", "--zero", "3", **env[1])
    jobs.until(lambda: events(tmp_path / "run", "joined"))
    second = jobs.join(1, "--mesh", "data=2,model=2", name="joins too", **env[2])
    assert [job.process.wait(100) for job in (running, first, second)] == [0, 0, 0], jobs.said("trains")
    assert [each["ranks"] for each in events(tmp_path / "run", "joined")] == [[1, 2], [3]]
    assert [each["mesh"] for each in events(tmp_path / "run", "reshaped")] == ["data=3", "data=2,model=2"]
    assert "after step 2, as rank(s) 1-2" in jobs.said("joins")
    run_threads(lambda: train(config.with_options(mesh={"data": 1}), tmp_path / "alone"), 1)
    assert_same(tmp_path / "run", tmp_path / "alone")
    assert not list((tmp_path / "run").glob("join*"))


def long(folder):
    return experts(folder, steps=1_000_000, save_every=50, eval_every=0, sample=0, mesh={"data": 2})


@pytest.mark.soak
@pytest.mark.parametrize("placed", [True, False], ids=["on the mesh", "idle"])
def test_a_signal_to_ranks_that_joined_stops_and_saves_all(jobs, tmp_path, placed):
    running = jobs.train(2, "-1", long(tmp_path))
    joined = jobs.join(1, *(["--mesh", "data=3"] if placed else []))
    jobs.until(lambda: events(tmp_path / "run", "reshaped" if placed else "joined"))
    os.kill(joined.ranks()[0], signal.SIGTERM)
    assert [job.process.wait(100) for job in (running, joined)] == [143, 143], jobs.said("trains")
    (stopped,) = events(tmp_path / "run", "stopped")
    assert events(tmp_path / "run", "saved")[-1]["step"] == stopped["step"]
    assert "SIGTERM: saved after step" in jobs.said("trains") and "Traceback" not in jobs.said("joins")


@pytest.mark.soak
@pytest.mark.parametrize("which", ["the joined", "the others"])
def test_a_killed_rank_ends_both_jobs(jobs, tmp_path, which):
    running = jobs.train(2, "-1", long(tmp_path))
    joined = jobs.join(1, "--mesh", "data=3")
    jobs.until(lambda: events(tmp_path / "run", "reshaped"))
    killed, other, name = (joined, running, "trains") if which == "the joined" else (running, joined, "joins")
    os.kill(killed.ranks()[0], signal.SIGKILL)
    assert killed.process.wait(100) != 0 and other.process.wait(100) == 1, jobs.said(name)
    said = "have ended before the run" if which == "the joined" else "has ended without them"
    assert said in jobs.said(name) and "Traceback" not in jobs.said(name)


@pytest.mark.soak
@pytest.mark.parametrize("moment", ["asks", "is connected"])
def test_ranks_killed_before_the_merge_leave_the_job_as_it_was(jobs, tmp_path, moment):
    running = jobs.train(2, "-1", long(tmp_path))
    program = "import os, signal, sys, time\nfrom spmd_engine.adaptive.joining import Entrance\n"
    if moment == "asks":
        program += "Entrance._ask = lambda self, ask=Entrance._ask: (ask(self), os.kill(os.getpid(), signal.SIGKILL))\n"
    else:
        program += "from spmd_engine.comm.communicators.mpi import MPIPort\n"
        program += "MPIPort.receive = lambda self: os.kill(os.getpid(), signal.SIGKILL)\n"
    (tmp_path / "dies.py").write_text(program + "from spmd_engine.jobs import join\njoin('./run')\n")
    killed = jobs.start("dies", 2, ["dies.py"], {})
    assert killed.process.wait(100) != 0
    step = len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    jobs.until(lambda: len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) > step + 20)
    joined = jobs.join(1, "--mesh", "data=3")  # others can still join
    jobs.until(lambda: events(tmp_path / "run", "reshaped"))
    os.kill(running.ranks()[0], signal.SIGTERM)
    assert [job.process.wait(100) for job in (running, joined)] == [143, 143], jobs.said("trains")


@pytest.mark.soak
def test_an_error_of_all_ranks_is_one_line_of_each_job(jobs, tmp_path):
    how = {"optimizer": "sgd", "grad_clip": 0.0, "max_skipped": 5, "warmup": 0, "learning_rate": 1e30}
    running = jobs.train(2, "3", experts(tmp_path, steps=1000, sample=0, eval_every=0, mesh={"data": 2}, **how))
    joined = jobs.join(1, "--mesh", "data=3")
    assert [job.process.wait(100) for job in (running, joined)] == [2, 2]
    for name in "trains", "joins":
        assert jobs.said(name).count("step 7: the gradient's norm is") == 1 and "Traceback" not in jobs.said(name)
