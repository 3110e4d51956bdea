"""Ctrl-C and SIGTERM to training and to other commands: a step ends, saved, or everything ends at once, in one line."""

import os
import signal
import subprocess
import sys
import time

import pytest

from mpi_harness.launch import Job, clean_environment, mpiexec
from spmd_engine.cli import main
from spmd_engine.runtime.signals import REQUEUE
from support.command_line import TEXT

needs_mpi = pytest.mark.skipif(mpiexec() is None, reason="needs an MPI library and its mpiexec")


pytestmark = pytest.mark.usefixtures("sigint_is_heard")


HEAD = """
import os, signal, sys, threading, time
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)
from spmd_engine.runtime.launchers import launcher_rank
"""


TRAIN = (
    HEAD
    + """
from spmd_engine.cli import main

def send(metrics, number):
    while not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.01)
    os.kill(os.getpid(), number)

if launcher_rank() in {ranks}:
    threading.Thread(target=send, args=(Path("runs/r/metrics.jsonl"), signal.{signal}), daemon=True).start()
main("train --model mlp --steps 1000000 --batch-size 8 --eval-samples 2 --data {data} --run r {option}".split())
"""
)


def train_program(ranks, signal_name, option=""):
    said = {"ranks": ranks, "signal": signal_name, "option": option, "data": TEXT[1]}
    program = TRAIN
    for name, value in said.items():
        program = program.replace(f"{{{name}}}", value)
    return program


def own_lines(text):
    return [line for line in text.splitlines() if "SIG" in line or "interrupt" in line or "Traceback" in line]


@needs_mpi
@pytest.mark.parametrize(
    "signal_name, ranks, option, code",
    [
        # As SIGUSR1 to one rank, and Ctrl-C to the launcher.
        pytest.param("SIGINT", "[1]", "--requeue", 130, id="SIGINT to one rank", marks=pytest.mark.soak),
        pytest.param("SIGTERM", "[0, 1, 2]", "", 143, id="SIGTERM to all", marks=pytest.mark.soak),
        pytest.param("SIGUSR1", "[1]", "--requeue", 75, id="SIGUSR1 to one rank, to be queued again"),
    ],
)
def test_training_saves_and_can_go_on(mpi_run, tmp_path, monkeypatch, signal_name, ranks, option, code):
    script = train_program(ranks, signal_name, option)
    (tmp_path / "train.py").write_text(script)
    result = mpi_run(1 + max(map(int, ranks.strip("[]").split(","))), "train.py", cwd=tmp_path, timeout=200)
    assert result.returncode == code, result.stderr
    (line,) = own_lines(result.stderr)
    assert f"{signal_name}: saved after step" in line and "--resume --run runs/r" in line
    steps = len((tmp_path / "runs" / "r" / "metrics.jsonl").read_text().splitlines())
    assert f"step {steps} " in line
    monkeypatch.chdir(tmp_path)
    main(["train", "--resume", "--run", "r", "--stop-at", str(steps + 1)])  # on one rank, this process
    assert len((tmp_path / "runs" / "r" / "metrics.jsonl").read_text().splitlines()) == steps + 1


@pytest.mark.soak
@needs_mpi
def test_ctrl_c_to_the_launcher_saves(tmp_path):
    if len(mpiexec()) > 1:
        pytest.skip("Open MPI's launcher forwards no signals")
    script = train_program("[]", "SIGINT")
    (tmp_path / "train.py").write_text(script)
    errors, metrics = (tmp_path / "errors").open("w+"), tmp_path / "runs" / "r" / "metrics.jsonl"
    with Job(2, ["train.py"], cwd=tmp_path, stderr=errors, env={"PYTHONPATH": os.getcwd()}) as job:
        while not (metrics.exists() and metrics.stat().st_size) and job.process.poll() is None:
            time.sleep(0.01)
        os.kill(job.process.pid, signal.SIGINT)
        assert job.process.wait(100) == 130
    errors.seek(0)
    (line,) = own_lines(errors.read())
    assert "SIGINT: saved after step" in line
    assert (tmp_path / "runs" / "r" / "checkpoints" / "latest" / "manifest.json").exists()


COMMAND = (
    HEAD
    + """
from spmd_engine.cli import main

def send():
    while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)

if launcher_rank() == 0:
    threading.Thread(target=send, daemon=True).start()
main("verify --steps 1000".split())
"""
)


@needs_mpi
def test_a_command_ends_at_once_in_one_line(mpi_run, tmp_path):
    (tmp_path / "command.py").write_text(COMMAND)
    result = mpi_run(2, "command.py", cwd=tmp_path, timeout=60)
    assert result.returncode == 143, result.stderr
    (line,) = own_lines(result.stderr)
    assert line == "spmd_engine: interrupted by SIGTERM"


LATE = """
import time
from spmd_engine.runtime.launchers import launcher_rank

if launcher_rank() == 1:
    sys.meta_path.insert(0, Sender())
else:
    time.sleep(15)  # its node is slow
"""


@needs_mpi
@pytest.mark.soak
def test_a_signal_to_one_rank_while_another_starts_has_its_code(mpi_run, tmp_path):
    (tmp_path / "late.py").write_text(LOADING.replace("sys.meta_path.insert(0, Sender())\n", LATE) + STARTS[0])
    result = mpi_run(2, "late.py", "SIGTERM", "numpy", "--requeue", cwd=tmp_path, timeout=100)
    assert result.returncode == REQUEUE and "interrupted by SIGTERM" in result.stderr


LOADING = """
import os, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)

number, module, sys.argv[1:] = signal.Signals[sys.argv[1]], sys.argv[2], ["train", *sys.argv[3:]]

class Sender:
    def find_spec(self, name, *others):
        if name == module:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), number)

sys.meta_path.insert(0, Sender())
"""


#: python -m, and the installed command
STARTS = [
    'runpy.run_module("spmd_engine", run_name="__main__")',
    "from spmd_engine.__main__ import main; main()",
]


MOMENTS = {  # the module that is about to be imported when a signal comes
    "handlers": ("SIGINT", "spmd_engine.runtime.signals", "", 130),
    "modules": ("SIGINT", "numpy", "--requeue", 130),
    "a job to be queued again": ("SIGTERM", "numpy", "--requeue", 75),
    "a command": ("SIGHUP", "spmd_engine.cli.train", "", 129),
    "MPI": ("SIGTERM", "mpi4py", "--requeue", 75),
}


@pytest.mark.parametrize(
    "name, module, option, code",
    [
        pytest.param(*MOMENTS[name], marks=[pytest.mark.soak] * (name in ("modules", "MPI")), id=name)
        for name in MOMENTS
    ],
)
def test_a_signal_while_something_loads_is_one_line_once_it_has(name, module, option, code, tmp_path):
    for start in STARTS if module == "numpy" else STARTS[:1]:
        environment = {**clean_environment(), "PYTHONPATH": os.getcwd()}
        command = [sys.executable, "-c", LOADING + start, name, module, *option.split()]
        ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100, cwd=tmp_path)
        assert (ended.returncode, ended.stderr) == (code, f"spmd_engine: interrupted by {name}\n")
