"""Ctrl-C and SIGTERM: work in steps ends after one, saved; everything else ends at once; always in one line."""

import ctypes
import signal
import threading
import time

import pytest

from mpi_harness.launch import mpiexec
from spmd_engine import Mesh
from spmd_engine.engine import SGD
from spmd_engine.errors import UsageError
from spmd_engine.runtime import ending
from spmd_engine.runtime.signals import REQUEUE, Interrupted, StopFlag, exit_code, raise_interrupted
from spmd_engine.training import Run, Trainer
from spmd_engine.training.trainer import StepMetrics
from support import tiny

needs_mpi = pytest.mark.skipif(mpiexec() is None, reason="needs an MPI library and its mpiexec")
pytestmark = pytest.mark.usefixtures("sigint_is_heard")


def send(number=signal.SIGINT):
    signal.raise_signal(number)


# --- the flag


def test_a_signal_is_noted_and_its_echo_too():
    with StopFlag() as flag:
        send(signal.SIGTERM)
        send(signal.SIGINT)  # a moment later: the same one, sent twice
        assert flag.received == signal.SIGTERM
        flag.take(flag.received)
    assert flag.taken == signal.SIGTERM


@pytest.mark.parametrize("first", ["received", "told by another rank"])
def test_a_second_signal_ends_at_once(monkeypatch, first):
    monkeypatch.setattr("spmd_engine.runtime.signals.AGAIN", -1.0)
    with pytest.raises(Interrupted, match="SIGTERM"), StopFlag() as flag:
        send() if first == "received" else flag.take(signal.SIGINT)
        send(signal.SIGTERM)


def test_a_signal_that_was_not_taken_is_not_lost():
    with pytest.raises(Interrupted, match="SIGINT"), StopFlag():
        send()


def test_an_ignored_signal_stays_ignored_and_handlers_come_back():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    before = signal.getsignal(signal.SIGTERM)
    with StopFlag() as flag, raise_interrupted():
        send()
    assert flag.received == 0 and signal.getsignal(signal.SIGTERM) is before


def test_on_another_thread_handlers_stay_as_they_are():
    def body():
        with StopFlag():
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            done.append(True)

    done = []
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert done


def test_a_signal_before_there_is_something_to_save_ends_at_once():
    with pytest.raises(Interrupted, match="SIGTERM"), StopFlag(to_save=False):
        send(signal.SIGTERM)
        pytest.fail("nothing was raised")


def test_a_default_action_stays_where_that_is_asked(request):
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the launcher of the MPI tests handles it
    request.addfinalizer(lambda: signal.signal(signal.SIGTERM, before))
    with StopFlag(but_defaults=True) as flag:
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        with pytest.raises(Interrupted, match="SIGINT"), StopFlag(but_defaults=True):
            send()  # Python's own handler would have raised here
    assert flag.received == 0


def test_a_signal_that_python_cannot_raise_comes_again():
    """As in the callbacks by which LLVM tells llvmlite of what it has compiled."""
    with pytest.raises(Interrupted, match="SIGTERM"), raise_interrupted():
        ctypes.CFUNCTYPE(None)(lambda: send(signal.SIGTERM))()
        time.sleep(100)


CODES = [("SIGTERM", "", 143), ("SIGTERM", "--requeue", 75), ("SIGHUP", "--requeue", 75), ("SIGINT", "--requeue", 130)]


@pytest.mark.parametrize("number, arguments, code", CODES)
def test_exit_codes(number, arguments, code):
    assert exit_code(Interrupted(signal.Signals[number]), ["train", *arguments.split()]) == code


# --- the trainer


@pytest.mark.parametrize("step_metrics", [True, False])
def test_on_one_rank_the_step_is_finished_and_no_other_begun(step_metrics):
    with Mesh() as mesh, StopFlag() as flag:
        engine = tiny.make_engine(mesh)

        def batches(step):
            if step == 1:
                send()
            return tiny.batch(engine, step)

        trainer = Trainer(engine, SGD(), batches, lambda step: 0.1, step_metrics=step_metrics, stop=flag)
        assert [report.step for report in trainer.run(5)] == [1, 2]
        assert flag.taken == signal.SIGINT


def test_a_run_without_a_finished_step_ends_at_once_and_saves_nothing(tmp_path):
    """While loops are compiled for the first time, or in a long first step."""
    with Mesh() as mesh:
        engine = tiny.make_engine(mesh)

        def batches(step):
            send(signal.SIGTERM)
            pytest.fail("the step goes on")

        with pytest.raises(Interrupted, match="SIGTERM"):
            Run(tmp_path / "r", Trainer(engine, SGD(), batches, lambda step: 0.1)).train(3)
    assert not (tmp_path / "r" / "checkpoints" / "latest").exists()


def test_a_signal_while_ranks_agree_on_the_first_step_saves_it(tmp_path, monkeypatch):
    """Another rank may have reported the step already, and whoever reads that report sends the signal."""
    close = StepMetrics.close

    def interrupted(*arguments):
        send(signal.SIGTERM)
        return close(*arguments)

    monkeypatch.setattr(StepMetrics, "close", interrupted)
    with Mesh() as mesh:
        engine = tiny.make_engine(mesh)
        trainer = Trainer(engine, SGD(), lambda step: tiny.batch(engine, step), lambda step: 0.1)
        with pytest.raises(SystemExit) as left:
            Run(tmp_path / "r", trainer).train(3)
    assert left.value.code == 143 and trainer.steps_done == 2  # the flag of the first step had been read
    assert (tmp_path / "r" / "checkpoints" / "latest" / "manifest.json").exists()


@pytest.mark.mpi(ranks=3)
@pytest.mark.parametrize("step_metrics", [True, False])
def test_all_ranks_end_after_the_same_step(step_metrics):
    with Mesh() as mesh, StopFlag() as flag:
        engine = tiny.make_engine(mesh)

        def batches(step):
            if step == 1 and mesh.rank == 2:
                send(signal.SIGTERM)
            return tiny.batch(engine, step)

        trainer = Trainer(engine, SGD(), batches, lambda step: 0.1, step_metrics=step_metrics, stop=flag)
        assert [report.step for report in trainer.run(5)] == [1, 2]
        assert flag.taken == signal.SIGTERM


# --- programs

HEAD = """
import os, signal, sys, threading, time
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)
from spmd_engine.runtime.launchers import launcher_rank
"""


def own_lines(text):
    return [line for line in text.splitlines() if "SIG" in line or "interrupt" in line or "Traceback" in line]


WAITING = (
    HEAD
    + """
import numpy as np
from spmd_engine import Mesh
mesh = Mesh()
mesh.barrier()
processes = mesh.all_gather(np.array([os.getpid()])).tolist()
if mesh.rank == 2:
    for rank in {ranks}:
        os.kill(processes[rank], signal.SIGINT)
    time.sleep(200)
mesh.all_gather(np.ones(3))
"""
)


@needs_mpi
@pytest.mark.parametrize(
    "ranks",
    [pytest.param("[1]", id="one rank", marks=pytest.mark.soak), pytest.param("[0, 1, 2]", id="all ranks")],
)
def test_any_program_ends_at_once_in_one_line(mpi_run, tmp_path, ranks):
    (tmp_path / "program.py").write_text(WAITING.replace("{ranks}", ranks))
    result = mpi_run(3, "program.py", cwd=tmp_path, timeout=60)
    assert result.returncode == 130, result.stderr
    (line,) = own_lines(result.stderr)
    assert "interrupted; it ends the job" in line


def test_a_rank_that_ends_before_it_has_joined_waits_for_the_others(monkeypatch):
    """However late they are: an alarm would end the job with its own code instead of that of the signal."""

    def join():
        raise UsageError("there is no MPI here")

    alarms = []
    monkeypatch.setattr(ending, "is_launched", lambda: True)
    monkeypatch.setattr(ending, "join_mpi", join)
    monkeypatch.setattr(ending.signal, "alarm", alarms.append)
    with pytest.raises(SystemExit, match="75"):
        ending.end_at_once("", REQUEUE)
    assert not alarms
