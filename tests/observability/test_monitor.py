"""`monitor`: what it shows of a folder, whatever is there, and how it ends."""

import io
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime

import numpy as np
import pytest
from rich.console import Console

from spmd_engine import Mesh, as_distributed, batch_of, run_threads
from spmd_engine.engine import SGD
from spmd_engine.models import two_layers
from spmd_engine.observability.monitor import Watched, curves
from spmd_engine.observability.run_page import page_of
from spmd_engine.observability.run_record import RunReader
from spmd_engine.training import TrainConfig, Trainer
from spmd_engine.training.observers import ActivityFile, Observer
from spmd_engine.training.run import Run
from spmd_engine.training.train_config import AdaptConfig
from support.command_line import QUIET, TEXT
from support.pairwise import in_turn

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC).timestamp()
STOP = 40


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A run of this process on two ranks that goes on: 10 of 40 steps of a second, in 15 seconds."""
    folder = tmp_path / "runs" / "live"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    job = TrainConfig().with_options(model="gpt-nano", zero=3, mesh={"data": 2})
    (folder / "config.json").write_text(json.dumps(job.as_json()))
    add(folder, *range(1, 11))
    tell(folder, "started", time=stamp(NOW - 15), step=0, stop=STOP, mesh="data=2", nodes=["a", "a"])
    lock(folder, os.getpid())
    live(folder)
    return folder


def stamp(seconds):
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def add(folder, *steps, end="\n"):
    with open(folder / "metrics.jsonl", "a") as file:
        for step in steps:
            line = {"step": step, "loss": 5.0 - 0.1 * step, "seconds": 1.0, "tokens_per_second": 2000.0}
            line |= {"shares": [[0.7, 0.0, 0.3], [0.9, 0.05, 0.05]], "private_bytes": [3 << 20, 5 << 20]}
            if step % 5 == 0:
                line["validation_loss"] = 5.5 - 0.1 * step
            file.write(json.dumps(line) + end)


def tell(folder, event, **facts):
    with open(folder / "events.jsonl", "a") as file:
        file.write(json.dumps({"event": event, **facts}) + "\n")


def lock(folder, process, host=None):
    host = host or os.uname().nodename
    (folder / ".lock").write_text(f"process {process} on {host}, 0123\n" if process else "\n")


def live(folder, phase_seconds=4.0):
    """Ten steps of a second have taken 15 seconds."""
    call = {"call": "all_reduce over data (gradients)", "call_seconds": 3.2}
    ranks = [
        {"rank": 0, "phase": "step 11", "phase_seconds": phase_seconds, **call, "condition": ""},
        {"rank": 1, "phase": "evaluating, step 10", "phase_seconds": 0.1, "call": "", "call_seconds": 0},
    ]
    content = {"time": stamp(NOW), "seconds": 15.0, "ranks": ranks}
    (folder / ActivityFile.NAME).write_text(json.dumps(content))


def frame(folder, width=100, lines=None, encoding="utf-8"):
    watched = Watched(folder)
    watched.look()
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, width=width, highlight=False)
    console.print(watched.frame(console, lines))
    file.flush()
    return watched, file.buffer.getvalue().decode(encoding).splitlines()


def test_a_frame_tells_progress_and_ranks(folder):
    watched, lines = frame(folder, 120)
    assert watched.goes_on and not watched.failed and lines[0] == "live  running"
    assert lines[1].startswith("gpt-nano, mesh data=2 on 1 node(s), started ")
    # 30 steps of a second, and half a second between them
    assert lines[2].startswith("step 10 of 40  ━") and lines[2].endswith("─  25%  0:00:45 left")
    assert lines[3] == "loss 4  validation loss 4.5 (step 10)  2,000 targets/s  1 s a step"
    rows = [" ".join(line.split()) for line in lines[-3:]]
    assert rows[0] == "rank step activity memory waiting weights mesh above threshold"
    assert rows[1] == "0 11 all_reduce over data (gradients) for 3 s 3 MiB 30% 50% data=0"
    assert rows[2] == "1 10 evaluating 5 MiB 5% 50% data=1 load imbalance 0.12"


def test_each_rank_shows_the_thresholds_that_it_crosses(folder):
    """By the run's own thresholds, and the memory that a rank may use; without steps of the present shape, none."""
    job = TrainConfig.read(folder / "config.json").changed(adapt=AdaptConfig(load_imbalance=0.2, memory_pressure=0.4))
    (folder / "config.json").write_text(json.dumps(job.as_json()))
    heads = lambda: [line for line in frame(folder)[1] if line.startswith("rank")]
    assert "above threshold" not in heads()[0]
    started = {"step": 0, "stop": STOP, "mesh": "data=2", "nodes": ["a", "a"], "memory": [4 << 20, 40 << 20]}
    tell(folder, "started", **started)
    _, lines = frame(folder, 120)
    assert lines[-2].endswith("memory pressure 0.75") and lines[-1].endswith("data=1")
    assert "In the last steps: memory pressure 0.75 above 0.4 (rank 0)." in page_of([RunReader(folder).read()])
    tell(folder, "reshaped", step=10, mesh="model=2", ranks=[0, 1])
    assert "above threshold" not in heads()[0]
    (folder / "config.json").write_text(json.dumps(job.as_json() | {"adapt": {"every": "never"}}))
    assert "above threshold" not in heads()[0]


def test_a_change_of_shape_leaves_ranks_idle(folder):
    """The rows are those of the job's ranks; numbers are those of the ranks on the present mesh."""
    tell(folder, "started", time=stamp(NOW - 15), step=0, stop=STOP, mesh="data=3", nodes=["a", "a", "a"])
    tell(folder, "reshaped", time=stamp(NOW), step=10, mesh="model=2", ranks=[0, 2])
    _, lines = frame(folder)
    assert "mesh model=2 on" in lines[1]
    rows = [" ".join(line.split()) for line in lines[-3:]]
    assert rows[0].endswith("3 MiB 30% 50.9% model=0") and rows[2].endswith("5 MiB 5% 50.9% model=1")
    assert rows[1] == "1 10 idle, outside the mesh - - - -"


def test_ranks_that_have_joined_have_rows(folder):
    tell(folder, "started", time=stamp(NOW - 15), step=0, stop=STOP, mesh="data=2", nodes=["a", "a"])
    tell(folder, "joined", time=stamp(NOW), step=10, ranks=[2], nodes=["b"])
    _, lines = frame(folder)
    assert "mesh data=2 on 2 node(s)" in lines[1]
    assert " ".join(lines[-1].split()) == "2 10 idle, outside the mesh - - - -"


def test_the_place_of_a_rank_on_the_mesh_follows_the_rank_order(folder):
    job = TrainConfig.read(folder / "config.json").with_options(rank_order="1,0")
    (folder / "config.json").write_text(json.dumps(job.as_json()))
    _, lines = frame(folder, 120)
    assert "data=1" in lines[-2] and "data=0" in lines[-1]


def test_ranks_that_have_joined_show_the_thresholds_that_they_cross(folder):
    tell(folder, "joined", step=5, ranks=[2], nodes=["b"], memory=[40 << 20, 40 << 20, 5 << 20])
    tell(folder, "reshaped", step=5, mesh="data=2", ranks=[0, 2])
    assert "memory pressure 1.00" in frame(folder, 200)[1][-1]


@in_turn(2, width=[40, 60, 100, 200], lines=[None, 14, 24, 50])
def test_a_frame_fits(folder, width, lines):
    tell(folder, "warning", time=stamp(NOW), text="long " * 30)
    _, shown = frame(folder, width, lines)
    assert max(map(len, shown)) <= width and len(shown) <= (lines or 100)
    assert shown[0] == "live  running" and any(line.startswith("rank") for line in shown)
    assert shown[-1].startswith("   1") or shown[-1].startswith("1 more ranks")


def test_many_ranks_show_those_for_which_others_wait(folder):
    shares = [[0.5, 0.0, 0.5]] * 30
    shares[23] = [0.9, 0.0, 0.1]
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 1.0, "seconds": 1.0, "shares": shares}) + "\n")
    tell(folder, "started", step=0, stop=STOP, mesh="data=30", nodes=["a"] * 15 + ["b"] * 15)
    _, lines = frame(folder)
    (first,) = [lines[place + 1] for place, line in enumerate(lines) if line.startswith("rank")]
    assert first.split()[:4] == ["23", "1", "on", "b"] and "10%" in first
    assert lines[-1] == "14 more ranks, which wait longer"


def test_what_has_gone_wrong_is_one_line(folder, here):
    ended = subprocess.Popen(["true"])
    ended.wait()
    lock(folder, ended.pid)
    watched, lines = frame(folder, 200)
    assert watched.failed and lines[0] == "live  killed"
    assert f"rank 0 (process {ended.pid}) is gone; its last step is 10; it has saved no checkpoint" in lines
    code, output, errors = here("monitor", "live")
    assert code == 1 and output.startswith("live  killed\n") and not errors

    lock(folder, os.getpid())
    live(folder, phase_seconds=100)
    (folder / "hang.txt").write_text("ranks wait")
    watched, lines = frame(folder, 200)
    assert watched.state == "running"
    wrong = "no step for 0:01:40, and recent ones took 1 s; runs/live/hang.txt says which ranks wait for which"
    assert [line.replace(str(folder), "runs/live") for line in lines].count(wrong) == 1


def test_a_run_on_another_host_is_silent_when_nothing_changes(folder, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    lock(folder, 7, "another-host")
    watched, lines = frame(folder)
    assert watched.state == "running" and ", last heard from another-host at " in lines[1]
    for change, seconds, state in (None, 80, "running"), (None, 30, "silent"), (lambda: add(folder, 11), 0, "running"):
        if change:
            change()
        clock[0] += seconds
        watched.look()
        assert watched.state == state and watched.goes_on
        assert not watched.trouble or watched.trouble.startswith(
            "no sign of life for 0:01:50 from process 7 on another-host: it was killed, its node is down"
        )


@pytest.mark.parametrize(
    ("last", "state", "expected"),
    [
        ({"event": "finished"}, "finished", 0),
        ({"event": "stopped", "signal": 15}, "stopped by a signal", 0),
        ({"event": "closed"}, "ended by an error", 1),
        ({"event": "warning", "text": "x"}, "ended by an error", 1),  # its lock is free, and it said nothing
    ],
)
def test_a_run_that_has_ended_is_printed_once(folder, here, last, state, expected):
    tell(folder, **last)
    lock(folder, 0)
    code, output, _ = here("monitor", "runs/live")
    assert code == expected and output.splitlines()[0] == f"live  {state}" and output.count("rank  step") == 1
    assert " left" not in output and "ended" in output.splitlines()[-1]


def test_without_a_terminal_a_frame_is_printed_when_something_is_new(folder, here, monkeypatch):
    def finish():
        tell(folder, "finished")
        lock(folder, 0)

    turns = [lambda: None, lambda: add(folder, 11), lambda: None, lambda: live(folder, phase_seconds=99), finish]
    mine, sleep = threading.get_ident(), time.sleep  # a thread that another test has left may sleep, too
    turn = lambda seconds: turns.pop(0)() if threading.get_ident() == mine else sleep(seconds)
    monkeypatch.setattr("time.sleep", turn)
    code, output, _ = here("monitor", "live")
    assert code == 0 and "\x1b" not in output
    steps = [line.split()[1] for line in output.splitlines() if line.startswith("step ") and " of " in line]
    states = [line for line in output.splitlines() if line.startswith("live  ")]
    assert steps == ["10", "11", "11", "11"] and states == [*["live  running"] * 3, "live  finished"]
    assert output.count("no step for 0:01:39") == 1
    assert here("monitor", "live", "--once")[1].count("rank  step") == 1


def test_a_reader_reads_what_is_new(folder):
    reader = RunReader(folder)
    assert len(reader.read().steps) == 10
    add(folder, 11, 12)
    add(folder, 13, end="")  # a line that is being written
    run = reader.read()
    assert run.steps.tolist() == [*range(1, 13)] and len(run.recent) == 12
    with open(folder / "metrics.jsonl", "a") as file:
        file.write("\n\x00damaged\n")
    tell(folder, "saved", step=13)
    run = reader.read()
    assert run.steps.tolist() == [*range(1, 14)] and run.last("saved")["step"] == 13
    np.testing.assert_allclose(run.shares, [[0.7, 0, 0.3], [0.9, 0.05, 0.05]])
    (folder / "new").write_text("".join((folder / "metrics.jsonl").read_text().splitlines(True)[:4]))
    os.replace(folder / "new", folder / "metrics.jsonl")  # a run that resumes after step 4
    assert reader.read().steps.tolist() == [1, 2, 3, 4]


def test_damage_and_hostile_texts_are_no_traceback(folder, here):
    (folder / ActivityFile.NAME).write_text('{"ranks": [{"ra')
    tell(folder, "warning", text="\x1b[2J[red]evil[/red]\nsecond", time="\x1b]0;x")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 11, "loss": "nan", "seconds": null, "shares": "x", "private_bytes": {}}\n{"step": 12, "lo')
    code, output, errors = here("monitor", "live", "--once")
    assert (code, errors) == (0, "") and "\x1b" not in output
    assert "[2J[red]evil[/red]" in output and "second" not in output
    (folder / "metrics.jsonl").write_text("")
    code, output, errors = here("monitor", "live", "--once")
    assert (code, errors) == (0, "") and "no step is done yet" in output
    tell(folder, "started", step=[], nodes="abc", mesh="data=2", stop="x")
    assert here("monitor", "live", "--once")[0] in (0, 2)
    tell(folder, "started", nodes=7)
    code, _, errors = here("monitor", "live", "--once")
    assert code == 2 and "runs/live: what is there cannot be shown: " in errors and len(errors.splitlines()) == 1
    (folder / "config.json").write_text("{")
    code, _, errors = here("monitor", "live")
    assert code == 2 and "config.json cannot be read" in errors and len(errors.splitlines()) == 1
    code, _, errors = here("monitor", "nothing")
    assert code == 2 and errors.startswith("spmd_engine: runs/nothing: no run is there; name a folder that 'train' wro")


FILES = [
    "config.json",
    "metrics.jsonl",
    "events.jsonl",
    ActivityFile.NAME,
    ".lock",
    "hang.txt",
    "checkpoints/step-00000010/manifest.json",
]


def test_no_command_waits_for_a_pipe_in_the_folder(folder, here):
    """It shows the rest, or one line says what is wrong; a link to a pipe is one, too."""
    hangs = []

    def hang(*_):
        hangs.append((command, name))
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, hang)
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        content = (folder / name).read_bytes() if (folder / name).exists() else None
        for make in (os.mkfifo, lambda path: path.symlink_to("pipe")):
            (folder / name).unlink(missing_ok=True)
            make(folder / name)
            for command in (["monitor", "live", "--once"], ["report", "live"], ["migrate", "live", "--zero", "1"]):
                signal.alarm(30)
                code, _, errors = here(*command)
                signal.alarm(0)
                assert not hangs and code in (0, 1, 2) and len(errors.splitlines()) <= 1, (command, name, errors)
            os.path.lexists(folder / "pipe") or os.mkfifo(folder / "pipe")
        (folder / name).unlink()
        if content is not None:
            (folder / name).write_bytes(content)
    signal.signal(signal.SIGALRM, before)
    assert here("monitor", "live", "--once")[0] == 0


def test_curves_go_through_their_points(folder):
    add(folder, *range(11, 21))
    run = RunReader(folder).read()
    *rows, axis = [line.plain for line in curves(run, 40, 8)]
    assert rows[0].startswith("5 ") and rows[-1].startswith("3 ") and axis.split()[0] == "1"
    heights = [next(row for row in range(8) if rows[row][column : column + 1].strip(" ●")) for column in range(5, 35)]
    assert heights == sorted(heights) and heights[0] <= 1 and heights[-1] >= 6  # it falls, without gaps
    points = [(row, line.index("●")) for row, line in enumerate(rows) if "●" in line]
    assert len(points) == 4 and points[-1][1] == 38  # at steps 5, 10, 15 and 20, the last at the right end
    assert [line.plain.isascii() for line in curves(run, 40, 8, "latin-1")] == [True] * 9


@pytest.mark.parametrize("losses", [[2.0], [2.0, 2.0], [np.nan, np.inf], [1e300, -1e300, 0.0]])
def test_curves_of_odd_numbers(folder, losses):
    lines = [json.dumps({"step": step, "loss": loss}) for step, loss in enumerate(losses, 1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    rows = list(curves(RunReader(folder).read(), 40, 8))
    assert len(rows) == (9 if np.isfinite(losses).any() else 0)


class Looking(Observer):
    """Reads the file of activities while the run goes on."""

    def stepped(self, report):
        self.path = self.folder / ActivityFile.NAME
        while not self.path.exists():
            time.sleep(0.01)
        self.content = json.loads(self.path.read_text())

    def started(self, run, stop):
        self.folder = run.folder


def test_a_run_tells_what_its_ranks_do(tmp_path):
    looking = Looking()
    x = np.ones((2, 4), np.float32)

    def program():
        engine = as_distributed(two_layers(4, 6), Mesh(data=2))
        batches = lambda step: batch_of(x[:1], x[:1], engine, step=step)
        Run(tmp_path, Trainer(engine, SGD(), batches, lambda step: 0.1), config={}, observers=[looking]).train(2)

    run_threads(program, 2)
    assert [rank["rank"] for rank in looking.content["ranks"]] == [0, 1]
    assert set(looking.content["ranks"][1]) == {
        "rank",
        "process",
        "phase",
        "phase_seconds",
        "call",
        "call_seconds",
        "condition",
    }
    assert not looking.path.exists()  # a run that has ended says nothing more


@pytest.mark.mpi(ranks=2)
def test_ranks_of_a_node_are_told_by_rank_0(tmp_path):
    from mpi4py import MPI

    folder = MPI.COMM_WORLD.bcast(str(tmp_path))
    looking, x = Looking(), np.ones((2, 4), np.float32)
    engine = as_distributed(two_layers(4, 6), Mesh(data=2))
    batches = lambda step: batch_of(x[:1], x[:1], engine, step=step)
    Run(folder, Trainer(engine, SGD(), batches, lambda step: 0.1), config={}, observers=[looking]).train(2)
    if engine.device_id == 0:
        assert [rank["rank"] for rank in looking.content["ranks"]] == [0, 1]


def test_on_a_terminal_it_ends_by_ctrl_c_without_a_trace(folder):
    command = [sys.executable, "-m", "spmd_engine", "monitor", str(folder)]
    process, terminal = pty.fork()
    if process == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a background job ignores it
        os.environ.update(TERM="xterm", COLUMNS="80", LINES="24")
        os.execv(sys.executable, command)
    output = b""
    while b"rank  step" not in output:
        output += os.read(terminal, 1 << 16)
    os.write(terminal, b"\x03")
    try:
        while data := os.read(terminal, 1 << 16):
            output += data
    except OSError:  # its end
        pass
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 128 + signal.SIGINT
    assert output.count(b"\x1b[?1049h") == output.count(b"\x1b[?1049l") == 1  # another screen, and back
    assert output.endswith(b"spmd_engine: interrupted by SIGINT\r\n") and b"Traceback" not in output


def test_a_run_of_train_is_shown(virtual, here):
    job = ["train", "--model", "gpt-nano", *TEXT, *QUIET, "--length", "16", "--batch-size", "4", "--steps", "3"]
    virtual(2, *job, "--mesh", "pipe=2", "--micro-batches", "2", "--run", "runs/one")
    code, output, _ = here("monitor", "one")
    rows = [line.split() for line in output.splitlines()[-2:]]
    assert code == 0 and output.startswith("one  finished\n")
    assert [row[:3] for row in rows] == [["0", "3", "ended"], ["1", "3", "ended"]]
    assert [row[-1] for row in rows] == ["pipe=0", "pipe=1"] and sum(float(row[-2][:-1]) for row in rows) >= 100
