"""A run of one's own engine and data: its folder, its observers, and that it goes on exactly."""

import csv
import json
import os
import shutil
import signal
from types import SimpleNamespace

import numpy as np
import pytest

from spmd_engine import ArrayData, Mesh, Run, run_threads, world
from spmd_engine.checkpoints import Checkpoint, CheckpointFolder
from spmd_engine.checkpoints.format.folder import RunLock, replace_file
from spmd_engine.checkpoints.format.write import write_files
from spmd_engine.engine import AdamW, ParallelConfig
from spmd_engine.errors import UsageError
from spmd_engine.strategies import DataParallel
from spmd_engine.training import Hook, Observer, Trainer
from spmd_engine.training.loggers import CSVLogger, LoggerObserver
from spmd_engine.training.observers import MetricsFile
from spmd_engine.training.run_folder import read_run
from spmd_engine.training.trainer import StepReport
from support import saved, tiny
from support.command_line import limited

X = np.random.default_rng(0).standard_normal((40, 4))
Y = np.sin(X)


def make_run(folder, mesh, data=None, trainer=None, **options):
    engine = DataParallel(4, 6, mesh, np.float64)
    engine.initialize(1)
    data = data or ArrayData(X, Y, validation=0.2, seed=2)
    steps = Trainer(engine, AdamW(), lambda step: data.batch(engine, step, size=6), rate=lambda step: 0.01)
    validation = data.validation_batches(engine, size=4)
    return Run(folder, steps, validation=validation, facts={"data": data.sha256}, **options)


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def trained(folder, axes, steps, resume=False, **options):
    """What ``train`` returns on each rank."""

    def program():
        with Mesh(**axes) as mesh:
            made = make_run(folder, mesh, **options)
            if resume:
                made.resume()
            return made.train(steps)

    return run_threads(program, tiny.ranks_of(axes))


# --- the run


def test_a_run_goes_on_exactly_in_the_middle_of_an_epoch(tmp_path):
    trained(tmp_path / "whole", {"data": 2}, 9)
    trained(tmp_path / "parts", {"data": 2}, 4)
    trained(tmp_path / "parts", {"data": 2}, 9, resume=True)
    assert saved.everything(tmp_path / "parts") == saved.everything(tmp_path / "whole")
    ours, theirs = metrics(tmp_path / "parts"), metrics(tmp_path / "whole")
    assert [each["loss"] for each in ours] == [each["loss"] for each in theirs] and len(ours) == 9
    trained(tmp_path / "other", {"data": 3}, 9)
    np.testing.assert_allclose([m["loss"] for m in metrics(tmp_path / "other")], [m["loss"] for m in ours], rtol=1e-11)


def test_a_second_run_in_the_folder_of_one_is_refused_until_it_resumes(tmp_path):
    trained(tmp_path / "run", {"data": 1}, 4)
    before = saved.everything(tmp_path / "run")
    with pytest.raises(UsageError, match="holds a run of 4 steps, and this one has done 0: call its resume"):
        trained(tmp_path / "run", {"data": 1}, 6)
    assert saved.everything(tmp_path / "run") == before
    trained(tmp_path / "run", {"data": 1}, 5, resume=True)


def test_a_shape_in_which_no_step_was_done_is_in_no_checkpoint(tmp_path):
    """Its first step may end the job, which is then restarted in the shape before."""
    read = []

    class Changes(Hook):
        def during(self, run, steps):
            self.run = run
            return super().during(run, steps)

        def between_steps(self, step, requested):
            if step == 1:
                self.run.continue_as(ParallelConfig(mesh={"data": 1}, zero=2), self.run.validation)

    class Reads(Observer):
        def saved(self, step):
            newest = CheckpointFolder(tmp_path / "run").newest()
            texts = (tmp_path / "run" / "config.json", newest / "manifest.json")
            read.append([json.loads(text.read_text()) for text in texts])

    config = {"composition": ParallelConfig(mesh={"data": 1}).as_json()}
    options = {"hooks": [Changes()], "observers": [Reads()], "config": config, "save_every": 1}
    trained(tmp_path / "run", {"data": 1}, 3, **options)
    stages = [(job["composition"]["zero"], manifest["config"]["composition"]["zero"]) for job, manifest in read]
    assert stages == [(None, None), (2, 2), (2, 2)]


def test_it_evaluates_and_saves_when_due_and_at_the_end(tmp_path):
    class Events(Observer):
        def __init__(self):
            self.seen = []

        def evaluated(self, step, loss):
            self.seen.append(f"evaluated {step}")

        def stepped(self, report):
            self.seen.append(f"step {report.step}")

        def saved(self, step):
            self.seen.append(f"saved {step}")

        def finished(self, loss, sample):
            self.seen.append(f"finished {sample}")

        def closed(self):
            self.seen.append("closed")

    events = Events()
    (loss,) = trained(tmp_path, {"data": 1}, 5, eval_every=2, save_every=3, observers=[events], sample=lambda: "so")
    assert events.seen == [
        *("evaluated 0", "step 1", "step 2", "evaluated 2", "step 3", "saved 3", "step 4", "evaluated 4"),
        *("saved 5", "step 5", "evaluated 5", "finished so", "closed"),  # saved first: an evaluation may fail
    ]
    assert metrics(tmp_path)[-1]["validation_loss"] == loss


class Interrupting:
    """Batches of validation; their evaluation number ``evaluation`` (from 0) is interrupted by ``act`` on one rank."""

    def __init__(self, run, evaluation, act):
        self.batches, self.run, self.evaluation, self.act, self.begun = run.validation, run, evaluation, act, []

    def __iter__(self):
        self.begun.append(0)
        for batch in self.batches:
            self.begun[-1] += 1
            if len(self.begun) == self.evaluation + 1 and self.run.engine.device_id == self.run.engine.mesh.size - 1:
                self.act(self.run)
            yield batch


def interrupted(folder, axes, evaluation, act, **options):
    """What leaves the run on each rank, and the numbers of batches that its evaluations have begun."""

    def program():
        with Mesh(**axes) as mesh:
            run = make_run(folder, mesh, eval_every=2, **options)
            run.validation = validation = Interrupting(run, evaluation, act)
            with pytest.raises((SystemExit, ZeroDivisionError)) as left:
                run.train(5)
            return left.value, validation.begun, run.loss

    return run_threads(program, tiny.ranks_of(axes))


@pytest.mark.parametrize("save_every", [0, 2])
def test_a_signal_ends_an_evaluation_and_the_run_goes_on_exactly(tmp_path, save_every):
    """It is saved at once, without another step and without the result."""

    def receive(run):
        run.trainer.stop.receive(signal.SIGTERM)  # as its handler does

    trained(tmp_path / "whole", {"data": 2}, 5, eval_every=2)
    ends = interrupted(tmp_path / "parts", {"data": 2}, 1, receive, save_every=save_every)
    for left, begun, loss in ends:
        assert left.code == 128 + signal.SIGTERM and begun == [2, 1]
        assert loss == ends[0][2]  # of the evaluation at the start
    first, second = metrics(tmp_path / "parts")
    assert "validation_loss" not in second and first["step"] == 1
    trained(tmp_path / "parts", {"data": 2}, 5, eval_every=2, resume=True)
    assert saved.everything(tmp_path / "parts") == saved.everything(tmp_path / "whole")
    ours, theirs = (
        [(line["step"], line["loss"], line.get("validation_loss")) for line in metrics(tmp_path / name)]
        for name in ("parts", "whole")
    )
    assert ours == theirs and ours[1][2] is not None


def test_a_step_is_saved_before_its_evaluation_with_its_line_of_the_metrics(tmp_path):
    """A run that is killed in an evaluation, or whose evaluation fails, continues after that step."""

    def kill(run):
        raise ZeroDivisionError

    interrupted(tmp_path, {"data": 1}, 1, kill, save_every=2)
    assert [line["step"] for line in metrics(tmp_path)] == [1]
    observers = Restored(), LoggerObserver(CSVLogger)
    for steps in 5, 6:
        trained(tmp_path, {"data": 1}, steps, eval_every=2, resume=True, observers=observers)
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in metrics(tmp_path) if "validation_loss" in line] == [2, 4, 5, 6]
    with open(tmp_path / "metrics.csv", newline="") as file:
        rows = [(row["step"], bool(row["validation_loss"])) for row in csv.DictReader(file)]
    assert rows == [("2", True), ("3", False), ("4", True), ("5", True), ("6", True)]
    assert observers[0].steps == [2]  # once; the others had been reported


class Restored(Observer):
    def __init__(self):
        self.steps = []

    def restored(self, report):
        self.steps.append(report.step)


def test_a_report_is_read_again_from_its_line():
    known = {"step": 3, "grad_norm": 1.5, "learning_rate": 0.1, "tokens": 4, "seconds": 0.5, "tokens_per_second": 8.0}
    line = known | {
        "loss": "nan",
        "skipped": "loss",
        "accuracy": 0.5,
        "validation_loss": 2.0,
        "validation_accuracy": 1.0,
    }
    report = StepReport.from_dict(line)
    assert report.as_dict() == line and report.metrics == {"accuracy": 0.5}
    assert StepReport.from_dict(known | {"loss": 1.0}).metrics is None


def test_observers_are_told_on_rank_zero_alone_and_closed_after_an_error(tmp_path):
    closed = []

    class Failing(Observer):
        def stepped(self, report):
            raise ZeroDivisionError

        def closed(self):
            closed.append(True)

    with pytest.raises(ZeroDivisionError):
        trained(tmp_path, {"data": 2}, 3, observers=[Failing()])
    assert closed == [True]


def test_other_data_cannot_go_on_with_a_run(tmp_path):
    trained(tmp_path, {"data": 1}, 1)
    with pytest.raises(UsageError, match=f"{tmp_path} was trained with data '"):
        trained(tmp_path, {"data": 2}, 2, resume=True, data=ArrayData(X, Y + 1, validation=0.2, seed=2))


@pytest.mark.usefixtures("sigint_is_heard")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_saved_with_the_code_of_shells_and_it_goes_on_exactly(tmp_path, number):
    class Sender(Observer):
        def stepped(self, report):
            if report.step == 2:
                signal.raise_signal(number)

        def stopped(self, step, number):
            self.stopped = step, number

    observer = Sender()
    with Mesh() as mesh, pytest.raises(SystemExit) as ended:
        make_run(tmp_path / "parts", mesh, observers=[observer]).train(9)
    assert ended.value.code == 128 + number and observer.stopped == (3, number)
    with Mesh() as mesh:
        again = make_run(tmp_path / "parts", mesh)
        again.resume()
        assert again.steps_done == 3
        again.train(9)
    trained(tmp_path / "whole", {"data": 1}, 9)
    assert saved.everything(tmp_path / "parts") == saved.everything(tmp_path / "whole")
    ours, theirs = metrics(tmp_path / "parts"), metrics(tmp_path / "whole")
    assert [(m["step"], m["loss"]) for m in ours] == [(m["step"], m["loss"]) for m in theirs]


# --- its files


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_folder_that_cannot_be_written_to_is_one_line_on_every_rank(tmp_path, ranks):
    (tmp_path / "checkpoints").write_text("")  # as root, nothing else is refused
    with pytest.raises(UsageError, match=rf"{tmp_path} cannot be written to: .*checkpoints"):
        trained(tmp_path, {"data": ranks}, 2)


def test_a_full_disk_is_one_line_and_leaves_the_checkpoint_whole(tmp_path):
    trained(tmp_path, {"data": 1}, 2)
    before, most = saved.everything(tmp_path), (tmp_path / "metrics.jsonl").stat().st_size + 20
    with pytest.raises(UsageError, match="File too large; the last checkpoint there, if any, is whole"):
        limited(most, lambda: trained(tmp_path, {"data": 1}, 3, resume=True))
    assert saved.everything(tmp_path) == before


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_background_save_is_complete_before_the_next_and_at_the_end(tmp_path, ranks):
    class Saves(Observer):
        def saved(self, step):
            steps.append(step)

    steps: list[int] = []
    options = {"save_every": 2, "keep": 9}
    trained(tmp_path / "behind", {"data": ranks}, 7, background=True, observers=[Saves()], **options)
    assert steps == [2, 4, 6, 7]
    trained(tmp_path / "before", {"data": ranks}, 7, **options)
    behind, before = (CheckpointFolder(tmp_path / each).complete() for each in ("behind", "before"))
    for one, other in zip(behind, before, strict=True):
        assert saved.everything(one) == saved.everything(other)


@pytest.mark.parametrize("background", [False, True])
def test_a_run_may_go_on_unsaved_but_not_end_so(tmp_path, monkeypatch, background):
    class Told(Observer):
        def saved(self, step):
            told.append(step)
            disk.full = True

        def not_saved(self, step, why):
            told.append(f"{step}: {why}")
            disk.full = False

    def write(*args):
        if disk.full:
            raise OSError(28, "No space left on device")
        return write_files(*args)

    told, disk = [], SimpleNamespace(full=False)
    monkeypatch.setattr("spmd_engine.checkpoints.save.write_files", write)
    options = {"save_every": 2, "background": background, "observers": [Told()]}
    trained(tmp_path / "goes on", {"data": 2}, 6, go_on_unsaved=True, **options)
    assert told[0] == 2 and "step 4 could not be saved (rank 0: " in told[1] and told[2] == 6
    disk.full = False
    with pytest.raises(UsageError, match=r"step 4 could not be saved \(rank 0: .*No space left on device"):
        trained(tmp_path / "stops", {"data": 2}, 6, **options)
    assert Checkpoint(tmp_path / "stops").metadata["step"] == 2
    with pytest.raises(UsageError, match="step 2 could not be saved"):
        trained(tmp_path / "ends", {"data": 2}, 2, go_on_unsaved=True, **options)
    told.clear()  # the save of step 1 also fails; in the background, that is found only when the run ends
    trained(tmp_path / "ends saved", {"data": 2}, 2, go_on_unsaved=True, **options | {"save_every": 1})
    assert "step 1 could not be saved" in told[0] and told[1:] == [2]


@pytest.mark.parametrize("fails", ["CheckpointFolder.begin", "config.json"])
def test_what_fails_before_anything_is_written_is_a_save_that_failed(tmp_path, monkeypatch, fails):
    """On a full disk nothing can be begun, either."""

    class Told(Observer):
        def saved(self, step):
            told.append(step)
            disk.full = not disk.full

        def not_saved(self, step, why):
            told.append(why)
            disk.full = False

    def maybe(real):
        def call(*args):
            if disk.full:
                raise OSError(28, "No space left on device")
            return real(*args)

        return call

    told, disk = [], SimpleNamespace(full=False)
    if fails == "config.json":
        monkeypatch.setattr("spmd_engine.training.run.replace_file", maybe(replace_file))
    else:
        monkeypatch.setattr(CheckpointFolder, "begin", maybe(CheckpointFolder.begin))
    options = {"save_every": 2, "observers": [Told()], "config": {"a": 1}, "go_on_unsaved": True}
    trained(tmp_path, {"data": 2}, 6, **options)
    assert told[0] == 2 and "No space left on device" in told[1] and told[2] == 6


@pytest.mark.parametrize("size", [0, 200])
def test_a_full_disk_is_one_line_at_the_beginning_and_when_a_run_goes_on(tmp_path, size):
    """Not even the lock can be written; or config.json, or metrics.jsonl, or the first checkpoint."""
    folder, how = tmp_path / "run", {"config": {"a": "long" * 20}, "save_every": 2}
    with pytest.raises(UsageError, match=rf"{folder}.*File too large.*; (the last|what was saved)") as said:
        limited(size, lambda: trained(folder, {"data": 1}, 4, **how))
    assert "\n" not in str(said.value).partition("\nraised on rank")[0]
    trained(folder, {"data": 1}, 4, **how)
    files, before = {each.name for each in folder.iterdir()}, saved.everything(folder)
    with pytest.raises(UsageError, match=rf"{folder}.*File too large.*; (the last|what was saved)"):
        limited(size, lambda: trained(folder, {"data": 1}, 8, resume=True, **how))
    assert saved.everything(folder) == before and {each.name for each in folder.iterdir()} == files
    kept = (folder / "metrics.jsonl").read_text().splitlines()[:4]  # the last may be cut short
    assert [json.loads(line)["step"] for line in kept] == [1, 2, 3, 4]
    trained(folder, {"data": 1}, 8, resume=True, **how)
    trained(tmp_path / "whole", {"data": 1}, 8, **how)
    assert saved.everything(folder) == saved.everything(tmp_path / "whole")
    assert [each["loss"] for each in metrics(folder)] == [each["loss"] for each in metrics(tmp_path / "whole")]


def test_a_run_that_another_host_took_over_writes_nothing_more(tmp_path):
    """Which did not see its lock: what the other one says of its steps is left alone, and so are its checkpoints."""

    class Another(Observer):
        def stepped(self, report):
            if report.step == 3:
                (tmp_path / ".lock").write_text("process 7 on another, 123")
                replace_file(tmp_path / "metrics.jsonl", "theirs")

        def saved(self, step):
            assert step == 2

    with pytest.raises(UsageError, match=r"being written by another run \(process 7 on another\), which has begun"):
        trained(tmp_path, {"data": 2}, 9, observers=[Another()], save_every=2)
    assert (tmp_path / "metrics.jsonl").read_text() == "theirs"
    assert [each.name for each in CheckpointFolder(tmp_path).complete()] == ["step-00000002"]


@pytest.mark.parametrize("moved", [False, True], ids=["removed", "moved"])
def test_a_folder_that_goes_in_mid_run_is_made_again(tmp_path, caplog, moved):
    class Remover(Observer):
        def stepped(self, report):
            if report.step == 2:
                folder.rename(elsewhere)  # at once: activity.json is written at any moment
                if not moved:
                    shutil.rmtree(elsewhere)

    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    trained(folder, {"data": 2}, 4, observers=[Remover()])
    assert [each["step"] for each in metrics(folder)] == [3, 4]
    assert "metrics.jsonl is gone, and what it said up to step 2; made again" in caplog.text
    trained(folder, {"data": 2}, 5, resume=True)


def test_metrics_beyond_the_checkpoint_are_taken_back(tmp_path):
    trained(tmp_path, {"data": 1}, 2)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss": 0}\n{"step": 4, "lo')
    trained(tmp_path, {"data": 1}, 3, resume=True)
    assert [each["step"] for each in metrics(tmp_path)] == [1, 2, 3] and metrics(tmp_path)[2]["loss"] > 0
    assert MetricsFile.NAME in os.listdir(tmp_path)


def test_metrics_that_are_rubbish_in_part_are_taken_up_without_it(tmp_path):
    trained(tmp_path, {"data": 1}, 2)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'\x85\xff\x00\n{"loss": 0}\n[1]\n7\n{"step": "2"}\n' + b"[" * 100_000 + b"\n")
    trained(tmp_path, {"data": 1}, 3, resume=True)
    assert [each["step"] for each in metrics(tmp_path)] == [1, 2, 3]


@pytest.mark.parametrize("name", ["metrics.jsonl", ".lock"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_where_one_should_be_is_refused_at_once(tmp_path, name, make):
    trained(tmp_path, {"data": 1}, 1)
    (tmp_path / name).unlink()
    make(tmp_path / name)
    with pytest.raises(UsageError, match=f"{name} is no file: move it away"):
        trained(tmp_path, {"data": 1}, 2, resume=True)


@pytest.mark.parametrize("make", [os.symlink, os.link])
def test_a_lock_that_is_another_file_leaves_it_as_it_was(tmp_path, make):
    (tmp_path / "victim").write_text("a long text of somebody's\nthat nobody asked to change\n" * 9)
    before = (tmp_path / "victim").read_bytes()
    (tmp_path / "run").mkdir()
    make(tmp_path / "victim", tmp_path / "run" / ".lock")
    with pytest.raises(UsageError, match=r"\.lock is (no file|not the lock of a run): move it away"):
        trained(tmp_path / "run", {"data": 1}, 1)
    assert (tmp_path / "victim").read_bytes() == before
    (tmp_path / "run" / ".lock").unlink()
    make(tmp_path / "nowhere", tmp_path / "run" / ".lock") if make is os.symlink else None
    if make is os.symlink:
        with pytest.raises(UsageError, match=r"\.lock is no file: move it away"):
            trained(tmp_path / "run", {"data": 1}, 1)
        assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("left", [b"", b"\0" * 60, b"process 7 on a-host-with-a-long-name" + b"x" * 60 + b", 123"])
def test_a_lock_that_a_dead_run_left_is_taken_whatever_its_length(tmp_path, left):
    (tmp_path / ".lock").write_bytes(left)
    trained(tmp_path, {"data": 1}, 2, save_every=1)
    with RunLock(tmp_path), pytest.raises(UsageError, match=rf"another run \(process {os.getpid()} on [^,]*\)\."):
        trained(tmp_path, {"data": 1}, 3, resume=True)


@pytest.mark.parametrize("make", [os.symlink, os.mkfifo])
def test_metrics_are_not_written_through_what_is_put_in_their_place(tmp_path, make):
    class Mischief(Observer):
        def stepped(self, report):
            if report.step == 1:
                (tmp_path / "metrics.jsonl").unlink()
                make(*((tmp_path / "victim",) if make is os.symlink else ()), tmp_path / "metrics.jsonl")

    (tmp_path / "victim").write_text("theirs")
    with pytest.raises(UsageError, match=r"metrics\.jsonl is no file: move it away"):
        trained(tmp_path, {"data": 1}, 3, observers=[Mischief()])
    assert (tmp_path / "victim").read_text() == "theirs"


def test_a_run_that_could_save_nothing_is_refused_before_it_trains(tmp_path, monkeypatch):
    def mkdir(path, *args, real=os.mkdir):
        if "unfinished-" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        real(path, *args)

    monkeypatch.setattr(os, "mkdir", mkdir)
    with pytest.raises(UsageError, match="Permission denied: .*checkpoints/unfinished-"):
        trained(tmp_path, {"data": 2}, 4, observers=[MetricsFile()])
    assert not (tmp_path / MetricsFile.NAME).exists()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_configuration_that_is_no_file_is_refused_before_anything_is_trained(tmp_path, make):
    make(tmp_path / "config.json")
    with pytest.raises(UsageError, match=r"config\.json is no file: move it away"):
        read_run(tmp_path)


# --- jobs


def test_memory_limits_are_by_rank_wherever_the_ranks_are_on_the_mesh(tmp_path, monkeypatch):
    monkeypatch.setattr("spmd_engine.training.run.memory_here", lambda: 3 * world().rank)

    def program():
        with Mesh(data=3, order=[2, 0, 1]) as mesh:
            run = make_run(tmp_path, mesh)
            run.train(1)
            return run.memory_limits

    assert run_threads(program, 3) == [[0, 1, 2]] * 3
