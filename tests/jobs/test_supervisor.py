"""The supervisor: what it starts, and that a job whose rank died goes on from its last checkpoint."""

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from spmd_engine import run_threads
from spmd_engine.checkpoints import CheckpointFolder
from spmd_engine.cli import main
from spmd_engine.cli.launch import newest_checkpoint
from spmd_engine.errors import UsageError
from spmd_engine.jobs.resolve import job_to_train
from spmd_engine.jobs.run_job import notices_of_change
from spmd_engine.runtime.launchers import RESTARTS
from spmd_engine.runtime.mpi_job import MPIJob, find_mpiexec
from spmd_engine.runtime.supervisor import Supervisor
from spmd_engine.training import TrainConfig
from support import saved

pytestmark = pytest.mark.skipif(find_mpiexec() is None, reason="no mpiexec")

JOB = ["train", "--run", "r", "--model", "two-layers", "--steps", "8", "--save-every", "2", "--batch-size", "4"]
JOB += ["--eval-every", "0", "--eval-samples", "2", "--dtype", "float64"]


def supervisor(*arguments, ranks=2, **options):
    told, options = [], {"pause": 0.0, "newest": newest_checkpoint(arguments), **options}
    return Supervisor(ranks, list(arguments), report=told.append, **options), told


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").write_text("something to learn from, again and again\n" * 300)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    return tmp_path


@pytest.mark.parametrize("restarts, mesh, zero", [("0", {"data": 2}, 1), ("1", {"model": 2}, None)])
def test_a_restarted_job_has_the_last_composition_of_its_run(restarts, mesh, zero, here, monkeypatch):
    """It may have changed since the command: by migrate, by the policy, or by a plan."""
    (here / "runs/r").mkdir(parents=True)
    TrainConfig.of(mesh={"model": 2}).write(here / "runs/r/config.json")
    monkeypatch.setenv(RESTARTS, restarts)
    command = {"mesh": {"data": 2}, "zero": 1, "steps": 9}

    def resumed():
        return job_to_train(command, permit=lambda model, named: model, run="r", resume=True)

    for job in run_threads(resumed, 2):
        assert (job.composition.mesh, job.composition.zero, job.training.steps) == (mesh, zero, 9)
    (job,) = run_threads(resumed, 1)  # of two ranks, one is left
    assert job.composition.mesh == {"data": 2}


@pytest.mark.parametrize("done, mesh, said", [(4, "data=2", 1), (5, "data=2", 0), (4, "model=2", 0)])
def test_a_change_in_whose_first_step_the_job_ended_is_named_and_not_repeated(done, mesh, said, here):
    changed = {"event": "reshaped", "step": 4, "mesh": "model=2"}
    events = [{"event": "started", "step": 0, "mesh": "data=2"}, changed, {"event": "saved", "step": 4}]
    (here / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (here / "metrics.jsonl").write_text("".join(json.dumps({"step": n + 1}) + "\n" for n in range(done)))
    notices = notices_of_change(SimpleNamespace(folder=here, engine=SimpleNamespace(device_id=0, mesh=mesh)))
    why = "the change to mesh model=2 after step 4 is not repeated: the job ended in its first step there"
    assert notices == [why] * said


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


def test_a_job_with_a_killed_rank_resumes_and_gives_the_same_results(here):
    job = [*JOB, "--data", "data"]
    run_threads(lambda: main([*job[:2], "whole", *job[3:]]), 2)
    kill_at(here, 5)
    watched, told = supervisor(*job)
    assert watched.run() == 0
    assert len(told) == 1 and "continues from step-00000004 on 2 ranks in 0 s, restart 1 of 3" in told[0]
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
    watched, told = supervisor(*JOB, "--data", "nowhere", ranks=1)
    assert watched.run() == 2 and told == []


def test_a_script_gets_its_number_of_restarts(here):
    (here / "script.py").write_text(
        "import os, sys\n"
        "again = int(os.environ['SPMD_RESTARTS'])\n"
        "open(f'seen-{again}', 'a').write(sys.argv[1])\n"
        "sys.exit(0 if again == 2 else 7)\n"
    )
    watched, told = supervisor("script.py", "x", ranks=1, max_restarts=1)
    assert watched.run() == 7 and "after 1 restart(s) without progress: no more" in told[-1]
    watched, told = supervisor("script.py", "x", ranks=1, max_restarts=2)
    assert watched.run() == 0
    assert (here / "seen-0").read_text() == "xx" and (here / "seen-2").read_text() == "x"


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self, monkeypatch, at_sleep=lambda: None):
        self.now, self.sleeps, self._at_sleep = 0.0, 0.0, at_sleep
        monkeypatch.setattr("spmd_engine.runtime.supervisor.time", self)

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now, self.sleeps = self.now + seconds, self.sleeps + seconds
        self._at_sleep()


FULL = """
import os, subprocess, sys
from spmd_engine.runtime.relay import relayed_output
os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
os.close(2)
with relayed_output() as output:
    sys.exit(subprocess.run(sys.argv[1:], **output).returncode)
"""
KILLED = """
import os, subprocess, sys
from spmd_engine.runtime.relay import relayed_output
with relayed_output() as output:
    subprocess.Popen([*sys.argv[1:], str(os.getpid())], **output)
    os.kill(os.getpid(), 9)
"""
WRITES = "import os\nfor number in 1, 2:\n    os.write(number, b'x' * 100_000)"
WRITES_AFTER = """
import os, sys, time
while os.getppid() == int(sys.argv[1]):
    time.sleep(0.01)
os.write(1, b"x" * 100_000)
"""


def relaying(launch, job, **options):
    """The exit code of a program that starts a job with relays."""
    return subprocess.run([sys.executable, "-c", launch, sys.executable, "-IS", "-c", job], **options).returncode


def test_a_job_goes_on_when_its_output_cannot_be_written():
    """Its standard output is a full disk, and its standard error is closed."""
    assert relaying(FULL, WRITES) == 0


def test_a_relay_outlives_the_process_that_started_it(tmp_path):
    """`launch` may be killed; its job writes on."""
    with open(tmp_path / "log", "wb") as log:
        assert relaying(KILLED, WRITES_AFTER, stdout=log) == -signal.SIGKILL
    deadline = time.monotonic() + 60
    while (tmp_path / "log").stat().st_size < 100_000 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (tmp_path / "log").read_bytes() == b"x" * 100_000


def starts(monkeypatch, clock, codes, at_start=lambda number: None):
    """Make jobs end with these codes; what was slept before each start."""
    before = []

    def once(self, ranks, restarts, asked):
        before.append(round(clock.sleeps))
        clock.sleeps = 0.0
        at_start(restarts)
        return codes[restarts]

    monkeypatch.setattr(Supervisor, "_once", once)
    return before


def test_each_restart_waits_twice_as_long_as_the_one_before(monkeypatch):
    before = starts(monkeypatch, Clock(monkeypatch), [7] * 9)
    watched, told = supervisor("script.py", max_restarts=8, pause=1.0)
    assert watched.run() == 7
    assert before == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    assert "begins again on 2 ranks in 4 s, restart 3 of 8" in told[2]
    assert "after 8 restart(s) without progress: no more" in told[-1]


def test_restarts_are_forgiven_after_progress(here, monkeypatch):
    def save(number):
        if number in (2, 3):
            folder = here / "runs" / "r" / "checkpoints" / f"step-0000000{number}"
            folder.mkdir(parents=True)
            (folder / "manifest.json").touch()

    before = starts(monkeypatch, Clock(monkeypatch), [9] * 6, save)
    watched, told = supervisor(*JOB, max_restarts=2, pause=1.0)
    assert watched.run() == 9
    assert before == [0, 1, 2, 1, 1, 2]
    assert "continues from step-00000003" in told[3] and "restart 1 of 2" in told[3]


def test_a_script_that_ran_for_long_is_forgiven(monkeypatch):
    clock = Clock(monkeypatch)

    def run(number):
        clock.now += 601 if number == 1 else 1

    before = starts(monkeypatch, clock, [9] * 3 + [0], run)
    watched, _ = supervisor("script.py", max_restarts=2, pause=1.0)
    assert watched.run() == 0 and before == [0, 1, 1, 2]


@pytest.mark.parametrize("option, code", [([], 143), (["--requeue"], 75)])
def test_a_signal_in_a_pause_ends_it(option, code, monkeypatch):
    starts(monkeypatch, Clock(monkeypatch, lambda: signal.raise_signal(signal.SIGTERM)), [9, 0])
    watched, _ = supervisor("train", "--run", "r", *option, pause=1.0)
    assert watched.run() == code


def test_a_signal_is_kept_back_until_a_rank_handles_it(tmp_path):
    program = """
import os, signal, time
while not os.path.exists("go"):
    time.sleep(0.01)
signal.signal(15, lambda *_: exit(3))
time.sleep(100)
"""
    with MPIJob([sys.executable, "-c", program], env={"PMI_RANK": "0"}, cwd=tmp_path) as job:
        assert not job.signal(signal.SIGTERM, anyhow=False)
        (tmp_path / "go").touch()
        while not job.signal(signal.SIGTERM, anyhow=False):
            pass
        assert job.process.wait(100) == 3


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
def test_impossible_arguments_are_errors(arguments, options, message):
    with pytest.raises(UsageError, match=message):
        supervisor(*arguments, **options)
