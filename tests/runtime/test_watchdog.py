"""Who waits too long is told for whom, by one list for all ranks, and the job ends."""

import logging
import os
import re
import threading
import time

import numpy as np
import pytest

from mpi_harness.launch import mpiexec
from spmd_engine import Mesh, run_threads
from spmd_engine.comm import pending as pending_module
from spmd_engine.errors import CommunicationTimeout, MeshError
from spmd_engine.runtime import activity as activity_module
from spmd_engine.runtime import ending
from spmd_engine.runtime import watchdog as watchdog_module
from spmd_engine.runtime.activity import SIZE, Activity, CallRecord, Record, State, WaitRecord, stack_of
from spmd_engine.runtime.hang_report import look_at
from spmd_engine.runtime.watchdog import Watchdog, report_hang

ALL = (0, 1, 2, 3)


def state(rank, begun=(), wait=None, **options):
    """What a rank does: the numbers of the last all_reduces that it began, by members, and what it waits for."""
    calls = tuple(CallRecord(members, 1, number, "all_reduce", "data", "gradients") for members, number in begun)
    facts = {"process": 1, "phase": "", "phase_seconds": 0.0, "stack": "", "stack_seconds": 0.0} | options
    return State(rank=rank, begun=calls, wait=wait, **facts)


def waiting(members, number, operation="all_reduce", seconds=30.0, overdue=True, missing=()):
    call = CallRecord(members, 1, number, operation, "data", "gradients")
    return WaitRecord(call, seconds, overdue, "something", missing, "mine.py:7")


def test_no_hang_without_overdue_waits():
    states = [state(0, [(ALL, 4)], waiting(ALL, 4, overdue=False)), state(1, [(ALL, 3)])]
    assert look_at(states, 4) is None


def test_a_wait_for_ranks_that_wait_for_something_outside_the_job_is_no_hang():
    waiters = [state(rank, [(ALL, 8)], waiting(ALL, 8)) for rank in (1, 2)]
    idle = state(0, [(ALL, 7)], idle=True, phase="waiting for an input")
    assert look_at([idle, *waiters, state(3, [(ALL, 8)], waiting(ALL, 8))], 4) is None
    assert look_at([idle, *waiters, state(3, [(ALL, 7)])], 4).stuck == (0, 3)
    assert look_at([idle, *waiters], 4).stuck == (0, 3), "a rank of another node that does not answer"
    stopped = idle._replace(condition="its process is stopped")
    assert look_at([stopped, *waiters, state(3, [(ALL, 8)], waiting(ALL, 8))], 4).stuck == (0,)


def test_ranks_that_do_the_same_are_one_line_and_missing_ranks_are_first():
    states = [state(rank, [(ALL, 183)], waiting(ALL, 183)) for rank in (0, 1, 2)]
    states.append(state(3, [(ALL, 182)], condition="its process is stopped"))
    assert str(look_at(states, 4)).splitlines() == [
        "ranks 0-2 of 4 have waited for 30 s, for rank 3:",
        "  rank 3 came to all_reduce #182 (gradients) over 'data' and not to #183, its process is stopped",
        "  ranks 0-2 in all_reduce #183 (gradients) over 'data', for rank 3, since 30 s, at mine.py:7",
    ]


def test_the_last_rank_of_a_chain_of_waits_is_reported():
    """0 waits for 1, which waits for 2 in another group, which computes."""
    states = [
        state(0, [((0, 1), 5)], waiting((0, 1), 5)),
        state(1, [((0, 1), 4), ((1, 2), 8)], waiting((1, 2), 8)),
        state(2, [((1, 2), 7)], phase="saving, step 40", phase_seconds=33.0, stack="  /a/b.py:3 in x"),
    ]
    hang = look_at(states, 3)
    assert hang.stuck == (2,)
    assert hang.lines[0].startswith("rank 2 came to all_reduce #7")
    assert hang.lines[0].endswith("not to #8, saving, step 40 (since 33 s), at b.py:3 in x")


def test_ranks_that_wait_for_each_other():
    ring = [state(rank, wait=waiting(ALL, 0, "receive", missing=((rank + 1) % 3,))) for rank in range(3)]
    assert look_at(ring, 3).summary.endswith("each other: rank 0 for rank 1, rank 1 for rank 2, rank 2 for rank 0")
    crossed = [
        state(0, [((0, 1), 1)], waiting((0, 1), 1)),
        state(1, [((1, 2), 1)], waiting((1, 2), 1)),
        state(2, [((0, 2), 1)], waiting((0, 2), 1)),
    ]
    assert look_at(crossed, 3).why == (
        "ranks wait for each other: rank 0 for rank 1, rank 1 for rank 2, rank 2 for rank 0"
    )


def test_a_rank_that_was_stopped_while_waiting_is_reported():
    """All have begun the call; what each of them does for it, one does no more."""
    states = [state(rank, [(ALL, 74)], waiting(ALL, 74)) for rank in (0, 1, 3)]
    states.insert(2, state(2, [(ALL, 74)], waiting(ALL, 72), condition="its process is stopped"))
    hang = look_at(states, 4)
    assert hang.summary == "ranks 0-1,3 of 4 have waited for 30 s, for rank 2:"
    assert hang.lines[0].startswith("rank 2 in all_reduce #72") and hang.lines[0].endswith("its process is stopped")
    assert look_at([states[2]], 4) is None  # nobody waits for it yet


def test_a_rank_that_began_a_call_and_left_it_is_reported():
    states = [state(rank, [(ALL, 74)], waiting(ALL, 74)) for rank in (0, 1, 3)]
    states.insert(2, state(2, [(ALL, 75)], stack="  /a/b.py:3 in x"))
    assert look_at(states, 4).lines[0] == "rank 2 waiting for no rank, at b.py:3 in x"


@pytest.mark.parametrize("make", [os.symlink, os.mkfifo])
def test_stacks_are_not_written_through_what_is_put_in_their_place(make, tmp_path, caplog):
    states = [state(0, [(ALL, 4)], waiting(ALL, 4)), state(1, [(ALL, 3)])]
    (tmp_path / "victim").write_text("theirs")
    make(*((tmp_path / "victim",) if make is os.symlink else ()), tmp_path / "hang.txt")
    report_hang(look_at(states, 4), states, tmp_path)
    assert (tmp_path / "victim").read_text() == "theirs"
    assert "rank" in caplog.text and "hang.txt" not in caplog.text


def test_a_rank_without_a_record_is_reported():
    hang = look_at([state(0, [(ALL, 2)], waiting(ALL, 2)), state(1, [(ALL, 2)], waiting(ALL, 2))], 4)
    assert hang.stuck == (2, 3) and "ranks 2-3 not heard from" in hang.lines[0]


def test_a_rank_without_a_sign_of_life_is_in_a_call():
    states = [state(0, [(ALL, 2)], waiting(ALL, 2, missing=(1,))), state(1, [(ALL, 1)], stack_seconds=9.0)]
    assert "no sign of life since 9 s" in look_at(states, 2).lines[0]


def test_a_record_has_the_state_of_its_rank():
    memory = bytearray(SIZE)
    activity, record = Activity(memory), Record(3, memory)
    line, text = activity.line((0, 1, 2, 9)), activity.called("all_reduce", "data", "loss")
    line.words[0], line.words[1] = 7, text
    assert record.state().begun == (CallRecord((0, 1, 2, 9), 1, 7, "all_reduce", "data", "loss"),)
    with activity.phase("evaluating, step", 0):
        assert record.state().phase == "evaluating, step 0"
    with activity.phase("step", 12):
        activity.waits(line, 7, text, timeout=1e-6)
        activity.waits_long("a sum", [1, 9], "mine.py:7")
        said = record.state()
        assert said.phase == "step 12" and record.is_overdue
        assert (said.wait.what, said.wait.missing, said.wait.call.number) == ("a sum", (1, 9), 7)
        assert said.wait.at == "mine.py:7"
    activity.goes_on()
    activity.waits(line, 8, text, timeout=None)
    said = record.state()
    assert said.phase == "" and not said.wait.overdue and said.wait.what == ""  # nothing of the wait before
    activity.close(line)
    assert record.state().begun == ()
    assert activity.line((0, 1, 2, 9)).words[3] == 2  # another communicator of the same ranks


class Frame:
    """A frame of a thread that goes on: some versions of Python give another object as a caller's, or fail."""

    def __init__(self, **faults):
        self._faults = faults

    def __getattr__(self, name):
        if name in self._faults:
            fault = self._faults[name]
            if isinstance(fault, Exception):
                raise fault
            return fault
        return {"f_code": stuck_at.__code__, "f_lineno": 7, "f_back": None}[name]


ODD = {
    "another-object": {"f_back": 3},
    "no-code": {"f_back": Frame(f_code=AttributeError("'TransferPlan' object has no attribute 'f_code'"))},
    "another-code": {"f_back": Frame(f_code=3)},
    "no-line": {"f_back": Frame(f_lineno=ValueError("a line"))},
    "no-caller": {"f_back": RuntimeError("a caller")},
}


@pytest.mark.parametrize("odd", ODD)
def test_a_stack_that_changes_while_it_is_read_is_reported_as_far_as_it_was_seen(odd, monkeypatch, caplog):
    """The watchdog's first look meets the odd frame, too; it lives, and reports the hang."""
    caller, *seen = stack_of(Frame(f_back=Frame(**ODD[odd]))).splitlines()
    assert caller.startswith("  (its callers cannot be read: ") and len(seen) == 2
    assert all(line.endswith("test_watchdog.py:7 in stuck_at") for line in seen)
    monkeypatch.setattr(
        activity_module.sys, "_current_frames", lambda: {threading.get_ident(): None, 1: Frame(**ODD[odd])}
    )
    assert reports_a_hang(monkeypatch, caplog) == 1


@pytest.mark.parametrize("step", ["stacks_here", "condition_of", "look_at", "report_hang"])
def test_a_watchdog_that_fails_at_any_step_once_reports_the_hang_afterwards(step, monkeypatch, caplog):
    real, failures = getattr(watchdog_module, step), [RuntimeError(step)]

    def fail_once(*args):
        if failures:
            raise failures.pop()
        return real(*args)

    monkeypatch.setattr(watchdog_module, step, fail_once)
    assert reports_a_hang(monkeypatch, caplog) == 1
    assert not failures and "could not look" in caplog.text


def reports_a_hang(monkeypatch, caplog):
    """How often a watchdog reports that its rank waits for another."""
    monkeypatch.setattr(watchdog_module, "PERIOD", 0.01)
    monkeypatch.setattr(watchdog_module, "AGAIN", 1e6)  # the test may notice the report late
    activity = Activity()
    activity.waits(activity.line((0, 1)), 1, activity.called("all_reduce", "data", ""), timeout=1e-6)
    watchdog = Watchdog(activity, 0, 2)
    while watchdog._thread.is_alive() and not activity.records[0].reported:
        time.sleep(0.01)
    watchdog.stop()
    return sum("waited for" in each.getMessage() for each in caplog.records)


def test_a_full_record_has_no_new_texts():
    activity = Activity()
    lines = [activity.line((0, rank)) for rank in range(300)]
    assert lines[0].place >= 0 > lines[-1].place
    texts = [activity.called("all_reduce", "data", f"{number}{80 * 'x'}") for number in range(999)]
    assert texts[0] > 0 == texts[-1]
    assert len(Record(0, activity.memory).state().begun) == 0
    assert activity.line(range(0, 2000, 2)).place == -1  # too many to name


class Wire:
    """The other node as one node's watchdog hears of it, without MPI."""

    def __init__(self):
        self.sent, self.reported, self.begun = [], 0.0, []

    def send_states(self, states):
        self.sent.append(states)

    def heard(self):
        return []


def test_a_node_that_answers_late_does_not_report_the_hang_again(caplog, monkeypatch):
    """Node 1 hears nothing of node 0 and reports; node 0, whose watchdog was held up, has heard of the report."""
    for name, value in {"PERIOD": 0.02, "ANSWERS": 0.06, "FRESH": 1e6, "AGAIN": 1e6}.items():
        monkeypatch.setattr(watchdog_module, name, value)
    looks = []
    should_report = Watchdog._should_report
    monkeypatch.setattr(Watchdog, "_should_report", lambda *args: looks.append(args[0]) or should_report(*args))
    wires, watchdogs = [Wire(), Wire()], []
    ranks = [Activity(bytearray(SIZE)) for _ in range(2)]
    with caplog.at_level(logging.WARNING):
        for activity in ranks:
            activity.waits(activity.line((0, 1)), 1, activity.called("all_reduce", "data", ""), timeout=1e-6)
        for rank in (1, 0):
            record = Record(rank, ranks[rank].memory)
            ranks[rank].records = [record]
            watchdogs.append(Watchdog(ranks[rank], rank, 2, wires[rank]))
            while len(wires[rank].sent) < (2 if rank else 1):
                time.sleep(0.01)
            wires[0].reported = time.monotonic() - wires[1].sent[-1][0].reported_seconds
        while looks.count(watchdogs[1]) < 3:
            time.sleep(0.01)
        for watchdog in watchdogs:
            watchdog.stop()
    assert len(caplog.records) == 1 and "rank 0" in caplog.text
    assert [len(wire.sent) for wire in wires] == [1, 2]  # both what they see, and node 1 that it has reported


def test_a_node_whose_waits_have_ended_does_not_report_the_hang_of_others_again():
    activity, wire = Activity(bytearray(SIZE)), Wire()
    watchdog = Watchdog(activity, 0, 2, wire)
    watchdog.stop()
    wire.begun = [time.monotonic() - 100]
    assert watchdog._should_report([])
    activity.reported()
    assert not watchdog._should_report([])
    wire.begun = [time.monotonic() + 100]  # another hang, after this report
    assert watchdog._should_report([])


@pytest.mark.parametrize("members", [range(0, 512, 8), [0, 1, 2, 7, 9, 10], [5]], ids=str)
def test_members_come_back_as_they_were(members):
    activity = Activity()
    activity.line(members).words[0] = 1
    assert Record(0, activity.memory).state().begun[0].members == tuple(members)


def stuck_at(how, hangs):
    mesh = Mesh(rows=2, columns=2, timeout=1000)
    mesh.barrier(over="rows")
    mesh.barrier(over="columns")
    hangs.add(mesh.comm.progress.activity)
    if how == "computes":
        while mesh.rank == 3 and mesh.comm._fabric.failure is None:
            time.sleep(0.01)
        mesh.all_reduce(np.ones(3), over="columns", label="loss")
    elif how == "everyone receives":
        mesh.receive((mesh.rank + 1) % 4)
    else:  # two groups that each wait for a rank of the other
        mesh.all_reduce(np.ones(3), over="rows" if mesh.rank in (0, 3) else "columns")


HOW = {
    "computes": "came to barrier #1 over 'columns' and not to #2, at test_watchdog.py",
    "everyone receives": "rank 0 for rank 1, rank 1 for rank 2, rank 2 for rank 3, rank 3 for rank 0",
    "crossed groups": "rank 0 for rank 2, rank 1 for rank 0, rank 2 for rank 3, rank 3 for rank 1",
}


@pytest.mark.parametrize("how", HOW)
def test_virtual_ranks_that_hang_are_reported(how, caplog, monkeypatch):
    """Overdue when all ranks that wait have said for which; the timeout is over when that is reported."""
    hangs, notes, waiting = set(), set(), 3 if how == "computes" else 4

    def waits_long(activity, *args, real=Activity.waits_long):
        real(activity, *args)
        notes.update({activity} & hangs)

    def now(real=pending_module.perf_counter):
        return real() + (1000 if any("waited for" in each.getMessage() for each in caplog.records) else 0)

    monkeypatch.setattr(Activity, "waits_long", waits_long)
    monkeypatch.setattr(activity_module, "WARN_AFTER", 0.0)
    monkeypatch.setattr(Record, "is_overdue", property(lambda record: len(notes) == waiting))
    monkeypatch.setattr(pending_module, "perf_counter", now)
    monkeypatch.setattr(pending_module, "PUBLISH_AFTER", 0.05)
    monkeypatch.setattr(watchdog_module, "PERIOD", 0.05)
    with caplog.at_level(logging.WARNING), pytest.raises(CommunicationTimeout) as caught:
        run_threads(stuck_at, 4, args=(how, hangs))
    told = [each.getMessage() for each in caplog.records if "waited for" in each.getMessage()]
    assert len(told) == 1 and HOW[how] in told[0]
    assert re.search(r"since \d+ s, at test_watchdog\.py:\d+", told[0])  # the line that called, none of comm's own
    assert HOW[how] in str(caught.value)


PROGRAM = """
import os, signal, time
import numpy as np
from spmd_engine import Mesh
from spmd_engine.runtime import activity, watchdog
activity.WARN_AFTER, watchdog.AGAIN = min(activity.WARN_AFTER, {warn}), 1e6
mesh = Mesh(data=2, model=2, timeout={timeout})
for _ in range(3):
    mesh.all_reduce(np.ones(3), over="data", label="gradients")
    mesh.all_reduce(np.ones(3), over="model")
if mesh.rank == 3:
    {fault}
mesh.all_reduce(np.ones(3), over="data", label="gradients")
mesh.all_reduce(np.ones(3), over="model")
"""
FAULTS = {
    "stopped": ("os.kill(os.getpid(), signal.SIGSTOP)", "its process is stopped (SIGSTOP)"),
    "computes": ("while True: pass", "at program.py:12 in <module>"),
    "in a call": ("import ctypes; ctypes.PyDLL(None).sleep(100)", "no sign of life since"),
}


@pytest.mark.skipif(mpiexec() is None, reason="needs an MPI library and its mpiexec")
@pytest.mark.parametrize("how", ["stopped", *(pytest.param(n, marks=pytest.mark.soak) for n in list(FAULTS)[1:])])
def test_a_rank_that_never_comes_is_named_and_the_job_ends(how, mpi_run, tmp_path):
    fault, said = FAULTS[how]
    limits = {"timeout": 20, "warn": 6} if how == "in a call" else {"timeout": 6, "warn": 1}
    (tmp_path / "program.py").write_text(PROGRAM.format(fault=fault, **limits))
    ended = mpi_run(4, tmp_path / "program.py", timeout=200, cwd=tmp_path)
    assert ended.returncode != 0
    assert ended.stderr.count("have waited") == 1 and "for rank 3:" in ended.stderr
    assert "rank 3 came to all_reduce #3" in ended.stderr and said in ended.stderr
    assert "CommunicationTimeout: waited" in ended.stderr


def test_an_error_that_tells_all_has_the_frames_of_the_user_alone():
    try:
        Mesh(data=0)
    except MeshError as error:
        (header, *frames, last) = ending._without_own_frames(error)
        assert header.startswith("Traceback") and last == f"spmd_engine.errors.MeshError: {error}\n"
        assert len(frames) == 1 and "test_watchdog.py" in frames[0]
        error.__traceback__ = error.__traceback__.tb_next  # as of the command line
        assert ending._without_own_frames(error) == [last]


NODES = """
from mpi4py import MPI
MPI.Get_processor_name = lambda: f"host{MPI.COMM_WORLD.rank // 2}"
from spmd_engine.runtime import watchdog
watchdog.ANSWERS = 3.0
"""


@pytest.mark.soak
@pytest.mark.skipif(mpiexec() is None, reason="needs an MPI library and its mpiexec")
@pytest.mark.parametrize("victims", [pytest.param("(3,)", marks=pytest.mark.soak), "(2, 3)"])
def test_nodes_tell_each_other_and_one_list_tells_it(victims, mpi_run, tmp_path):
    fault = f"0\nif mesh.rank in {victims}:\n    os.kill(os.getpid(), signal.SIGSTOP)"
    (tmp_path / "program.py").write_text(NODES + PROGRAM.format(fault=fault, timeout=20, warn=4))
    ended = mpi_run(4, tmp_path / "program.py", timeout=200, cwd=tmp_path)
    assert ended.returncode != 0 and ended.stderr.count("waited for") == 1
    assert "rank 3 came to" in ended.stderr or "ranks 2-3 not heard from" in ended.stderr
