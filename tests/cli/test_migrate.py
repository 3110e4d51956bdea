"""``migrate``: a running job of MPI ranks changes its shape, and refuses what it cannot do; an idle rank obeys."""

import importlib
import json
import os
import signal
import time

import pytest

from mpi_harness.launch import Job, mpiexec
from spmd_engine.adaptive import ShapeRequest
from spmd_engine.adaptive.joining import LockedFile
from spmd_engine.axes import parse_axes
from spmd_engine.checkpoints.format.folder import RunLock
from spmd_engine.cli import main
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.planning.plan_result import PlanFile
from support.command_line import TEXT, metrics

migrate_module = importlib.import_module("spmd_engine.cli.migrate")

WAITS = "another 'migrate' waits for its answer; end it to withdraw its request"
PROGRAM = """
import os, time
from pathlib import Path
from spmd_engine.cli import main
from spmd_engine.runtime.launchers import launcher_rank
from spmd_engine.training import Trainer

step = Trainer.step
Trainer.step = lambda trainer: time.sleep(0.05) or step(trainer)  # nobody waits for its steps

Path(f"process-{launcher_rank()}").write_text(str(os.getpid()))
main("train --model mlp --steps 1000000 --batch-size 8 --eval-samples 2 --eval-every 0 --data DATA --run r".split())
"""


def migrate(capsys, *arguments):
    """The exit code of the command, and what it prints."""
    code = 0
    try:
        main(["migrate", *arguments])
    except SystemExit as left:
        code = left.code
    printed = capsys.readouterr()
    return code, (printed.out + printed.err).strip()


@pytest.mark.skipif(mpiexec() is None, reason="needs an MPI library and its mpiexec")
def test_a_running_job_changes_its_shape(tmp_path, monkeypatch, capsys):
    (tmp_path / "program.py").write_text(PROGRAM.replace("DATA", TEXT[1]))
    PlanFile(ranks=3).write(tmp_path / "other.plan")
    errors, folder = (tmp_path / "errors").open("w+"), tmp_path / "runs" / "r"
    source = {"PYTHONPATH": os.getcwd()}
    monkeypatch.chdir(tmp_path)
    with Job(3, ["program.py"], cwd=tmp_path, stderr=errors, env=source) as job:
        while not ((folder / "metrics.jsonl").exists() and metrics(folder)) and job.process.poll() is None:
            time.sleep(0.05)
        code, text = migrate(capsys, "r", "--mesh", "model=3")
        assert (code, "mesh model=3 (before: mesh data=3)" in text) == (0, True), text
        code, text = migrate(capsys, "r", "--mesh", "pipe=3", "--protocol", "live")
        assert (code, "a live migration to mesh pipe=3 begins: it copies" in text) == (0, True), text
        assert "mesh pipe=3 (before: mesh model=3" in text
        code, text = migrate(capsys, "r", "--mesh", "data=4")
        assert code == 2 and "refused after step" in text and "mesh data=4 needs 4 ranks; the job has 3" in text
        code, text = migrate(capsys, "r", "--plan", "other.plan")
        assert code == 2 and "this is a shape for gpt-nano, and the run trains mlp" in text
        code, text = migrate(capsys, "r", "--mesh", "data=2", "--ranks", "0,2", "--zero", "1")
        assert (code, "mesh data=2 zero 1 on ranks 0,2" in text) == (0, True), text
        os.kill(int((tmp_path / "process-1").read_text()), signal.SIGTERM)  # the idle one
        assert job.process.wait(100) == 143
    errors.seek(0)
    (line,) = [line for line in errors if "SIGTERM" in line]
    steps = len(metrics(folder))
    assert f"SIGTERM: saved after step {steps} " in line and not (folder / ShapeRequest.FILE).exists()
    composition = json.loads((folder / "config.json").read_text())["composition"]
    assert composition["mesh"] == {"data": 2} and composition["zero"] == 1
    code, text = migrate(capsys, "r", "--zero", "0")
    assert code == 2 and "has no running job; 'train --resume" in text
    main(["train", "--resume", "--run", "r", "--stop-at", str(steps + 1)])  # on one rank, this process
    assert len(metrics(folder)) == steps + 1


@pytest.mark.parametrize(
    "arguments, reason",
    [
        (["none", "--zero", "1"], "no such run"),
        (["r"], "migrate needs the new shape"),
        (["r", "--zero", "5"], "zero is 5: it must be from 0 to 3"),
        (["r", "--mesh", "data=2", "--ranks", "0;1"], "write the numbers of ranks, as in 0,1,3"),
        (["r", "--zero", "1", "--dry-run", "--protocol", "live"], "--dry-run, which prints all protocols: omit one"),
        (["r", "--experts", "block0/moe=0:a"], "write the part of each expert, as in block0/moe=0:1:1:0"),
        (["r", "--zero", "1", "--wait", "10ms"], "no answer in 0.01 s, and the request is withdrawn"),
        (["r", "--mesh", "data=" + "9" * 15], "the product of the sizes is above 65536"),
        (["r", "--mesh", "data=" + "9" * 5000], "write axes as in data=4,model=2"),
        (["r", "--mesh", "data=²"], "write axes as in data=4,model=2"),
        (["r", "--mesh", "pipe=2,model=0|3", "--protocol", "live"], "has size 0|3; sizes are whole numbers from 1"),
    ],
)
def test_mistakes_are_one_line(run, capsys, arguments, reason):
    with RunLock(run):
        code, text = migrate(capsys, *arguments)
    assert code == 2 and reason in text and "\n" not in text and not (run / ShapeRequest.FILE).exists()


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The folder of a run that has started."""
    folder = tmp_path / "runs" / "r"
    folder.mkdir(parents=True)
    tell(folder, event="started", step=0)
    monkeypatch.chdir(tmp_path)
    return folder


def tell(folder, **event):
    with open(folder / "events.jsonl", "a") as file:
        file.write(json.dumps(event) + "\n")


@pytest.mark.parametrize(
    "lock", ["process 1 on here, 0\n", "\n", None], ids=["was killed", "has ended", "has not begun"]
)
def test_a_job_that_does_not_run_is_asked_nothing(run, capsys, lock):
    if lock is not None:
        (run / ".lock").write_text(lock)
    code, text = migrate(capsys, "r", "--zero", "1")
    assert code == 2 and "has no running job; 'train --resume" in text and not (run / ShapeRequest.FILE).exists()


PLAN = {"what": [], "to": "mesh model=3", "bytes": 0, "seconds": 1.0}


@pytest.mark.parametrize("events, text", [
    ([], "the job has ended without an answer; 'train --resume' continues its run"),
    ([{"event": "migrating", "step": 3, **PLAN}], "the job has ended without an answer"),
    ([{"event": "closed", "step": 3, "request": ""}], "the job has ended, after step 3, without the change"),
    ([{"event": "not reshaped", "step": 3, "why": "no"}], "refused after step 3: no"),
    ([{"step": 3}, {"event": "not reshaped"}], "its answer cannot be read: KeyError: 'step'"),
    ([{"event": "migrating", "step": 3}], "its answer cannot be read: KeyError: 'what'"),
])  # fmt: skip
def test_a_job_that_ends_while_it_is_asked_is_one_line(run, capsys, monkeypatch, events, text):
    """It writes these events after the request, and ends: after a kill without a last one."""
    lock, ask = RunLock(run), migrate_module._ask

    def asked(path, request):
        file = ask(path, request)
        for event in events:
            tell(run, **{"request": request.id, **event})
        lock.__exit__()
        return file

    monkeypatch.setattr(migrate_module, "_ask", asked)
    lock.__enter__()
    code, said = migrate(capsys, "r", "--zero", "1", "--protocol", "live")
    assert code == 2 and text in said.splitlines()[-1] and not (run / ShapeRequest.FILE).exists()


TOLD = """\
r: a change after step 3 from mesh data=3 to mesh model=3 would take:
  stop-and-copy     about 200 ms, while steps stop; 1.00 KiB between ranks (0->1 512 B, 0->2 512 B)
  checkpoint-based  about 2 s, while steps stop; 4.00 KiB to the disk, 12.00 KiB back
  live              not possible: it is offloaded
nothing has changed; without --dry-run, --protocol chooses one"""


def test_a_dry_run_prints_a_line_for_each_protocol(run, capsys, monkeypatch):
    ask, none = migrate_module._ask, {"bytes": 0, "moves": {}}
    protocols = {
        "stop-and-copy": {"bytes": 1024, "moves": {"0->1": 512, "0->2": 512}, "seconds": 0.2, "stops": 0.2},
        "checkpoint-based": {**none, "seconds": 2.0, "stops": 2.0, "saved": 4096, "loaded": 12288},
        "live": {"refused": "it is offloaded"},
    }

    def answered(path, request):
        assert request.dry_run
        facts = {"from": "mesh data=3", "to": "mesh model=3", "protocols": protocols, "notices": []}
        tell(run, event="estimated", step=3, request=request.id, **facts)
        return ask(path, request)

    monkeypatch.setattr(migrate_module, "_ask", answered)
    with RunLock(run):
        code, said = migrate(capsys, "r", "--mesh", "model=3", "--dry-run")
    assert (code, said.replace("runs/r:", "r:")) == (0, TOLD)


def test_a_refused_migrate_leaves_the_request_of_the_next_one(run, capsys, monkeypatch):
    """The job has removed the refused one; meanwhile another 'migrate' may ask."""
    path, ask = run / ShapeRequest.FILE, migrate_module._ask

    def answered(path, request):
        file = ask(path, request)
        path.unlink()
        tell(run, event="not reshaped", step=3, why="no", request=request.id)
        path.write_text("of another")
        return file

    monkeypatch.setattr(migrate_module, "_ask", answered)
    with RunLock(run):
        code, said = migrate(capsys, "r", "--zero", "1")
    assert code == 2 and said.endswith("refused after step 3: no") and path.read_text() == "of another"


def test_a_request_that_waits_is_not_replaced(run, capsys):
    path = run / ShapeRequest.FILE
    waits = LockedFile.create(path, {"of": "another"})
    with RunLock(run):
        code, said = migrate(capsys, "r", "--zero", "1")
        assert (code, said.splitlines()) == (2, [f"spmd_engine: {path.relative_to(run.parents[1])}: {WAITS}"])
        assert json.loads(path.read_text()) == {"of": "another"}
        os.close(waits._handle)  # its writer was killed
        code, said = migrate(capsys, "r", "--zero", "1", "--wait", "10ms")
    assert "no answer in 0.01 s" in said and not path.exists()


def test_an_interrupted_migrate_withdraws_its_request(run, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(migrate_module, "_answer", interrupted)
    with RunLock(run), pytest.raises(BaseException) as raised:
        main(["migrate", "r", "--zero", "1"])
    assert isinstance(raised.value, (KeyboardInterrupt, SystemExit)) and not (run / ShapeRequest.FILE).exists()


def test_a_request_keeps_uneven_stages():
    request = ShapeRequest({"mesh": parse_axes("pipe=2,model=1|2"), "zero": 1})
    read = ShapeRequest.from_json(json.loads(json.dumps(request.as_json())), "the file")
    assert ParallelConfig.from_json(read.composition).mesh == request.composition["mesh"]
