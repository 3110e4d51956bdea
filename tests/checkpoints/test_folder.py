"""One rename makes a checkpoint: a save that is killed, at whatever moment, leaves the old one or the new one."""

import errno
import os
import signal
from pathlib import Path

import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.checkpoints import Checkpoint, CheckpointFolder, find_checkpoint, save_checkpoint
from spmd_engine.checkpoints.format.folder import RunLock
from spmd_engine.engine import AdamW
from spmd_engine.errors import CheckpointError, UsageError
from spmd_engine.strategies import DataParallel
from support import saved

CALLS = ("fsync", "rename", "replace", "mkdir", "symlink")  # what a save asks of the system, beside writing


def save(folder, ranks, step, keep=2):
    def program():
        with Mesh(data=ranks) as mesh:
            engine, optimizer = DataParallel(4, 6, mesh), AdamW()
            engine.initialize(0)
            engine.parameters["layer_0/weights"][...] = step
            optimizer.prepare(engine)
            save_checkpoint(folder, engine, optimizer, step=step, keep=keep, config={"made": step})

    run_threads(program, ranks)


def not_to_be_looked_into(monkeypatch, name):
    """As for a user who may not: root may look into any folder."""

    def is_file(self, real=Path.is_file):
        if self.parent.name == name:
            raise PermissionError(13, "Permission denied", str(self))
        return real(self)

    monkeypatch.setattr(Path, "is_file", is_file)


def test_a_newest_checkpoint_that_may_not_be_looked_into_is_an_error_and_not_the_one_before(tmp_path, monkeypatch):
    for step in (1, 2):
        save(tmp_path, 1, step)
    not_to_be_looked_into(monkeypatch, "step-00000002")
    with pytest.raises(CheckpointError, match=r"checkpoints cannot be read: .*Permission denied: .*step-00000002"):
        find_checkpoint(tmp_path)


def test_an_old_checkpoint_that_may_not_be_looked_into_fails_no_save(tmp_path, monkeypatch):
    for step in (1, 2):
        save(tmp_path, 1, step)
    not_to_be_looked_into(monkeypatch, "step-00000001")
    save(tmp_path, 1, 3)
    monkeypatch.undo()
    assert Checkpoint(tmp_path).metadata["step"] == 3


def killed_save(folder, ranks, at):
    """Save step 2 in a process that is killed at its call number ``at``; False if it got to its end before."""
    pid = os.fork()
    if pid == 0:
        try:
            count = 0

            def counted(real):
                def call(*args, **kwargs):
                    nonlocal count
                    count += 1
                    if count > at:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return real(*args, **kwargs)

                return call

            for name in CALLS:
                setattr(os, name, counted(getattr(os, name)))
            Path.open = counted(Path.open)
            save(folder, ranks, 2)
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.soak  # test_kills has some of these moments, and finer ones
def test_a_save_that_is_killed_leaves_the_old_or_the_new(tmp_path):
    steps = []
    for at in range(200):
        folder = tmp_path / str(at)
        save(folder, 1, 1)
        if not killed_save(folder, 2, at):
            break
        checkpoint = Checkpoint(folder)
        step = checkpoint.metadata["step"]
        assert checkpoint.manifest.config == {"made": step}
        assert (saved.parameters(folder)["layer_0/weights"] == step).all()
        assert saved.state(folder)
        steps.append(step)
        CheckpointFolder(folder).sweep()
        left = {path.name for path in (folder / "checkpoints").iterdir()}
        assert left <= {"latest", "step-00000001", "step-00000002"}
        save(folder, 2, 3)
        assert Checkpoint(folder).metadata["step"] == 3
    assert len(steps) > 8 and steps == sorted(steps) and {1, 2} == set(steps)  # the old one, and then the new one


def test_the_last_ones_stay_and_latest_leads_to_the_newest(tmp_path):
    for step in (1, 2, 10, 9):
        save(tmp_path, 1, step, keep=3)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["latest", "step-00000002", "step-00000009", "step-00000010"]
    assert os.readlink(tmp_path / "checkpoints" / "latest") == "step-00000009"
    assert find_checkpoint(tmp_path).name == find_checkpoint(tmp_path / "checkpoints").name == "step-00000010"
    assert find_checkpoint(tmp_path / "checkpoints" / "latest").name == "latest"


def test_a_step_that_is_saved_again_is_the_newer_one(tmp_path):
    save(tmp_path, 1, 4)
    save(tmp_path, 2, 4)
    save(tmp_path, 1, 4)
    assert [path.name for path in CheckpointFolder(tmp_path).complete()] == ["step-00000004.1", "step-00000004.2"]


def test_a_copy_that_follows_links_goes_on(tmp_path):
    save(tmp_path, 1, 1)
    (tmp_path / "checkpoints" / "latest").unlink()
    (tmp_path / "checkpoints" / "latest").mkdir()
    (tmp_path / "checkpoints" / "latest" / "manifest.json").write_text("{}")
    save(tmp_path, 1, 2)
    assert os.readlink(tmp_path / "checkpoints" / "latest") == "step-00000002"


@pytest.mark.parametrize("to", ["nowhere", "latest"], ids=["dangling", "a loop"])
def test_a_link_called_latest_that_leads_nowhere_is_made_anew(tmp_path, to):
    save(tmp_path, 1, 1)
    latest = tmp_path / "checkpoints" / "latest"
    latest.unlink()
    latest.symlink_to(to)
    assert find_checkpoint(tmp_path).name == "step-00000001"
    with pytest.raises(CheckpointError, match="latest: no such checkpoint"):
        Checkpoint(latest)
    save(tmp_path, 1, 2)
    assert os.readlink(latest) == "step-00000002" and Checkpoint(latest).metadata["step"] == 2


def test_a_folder_that_is_a_link_to_nowhere_is_told(tmp_path):
    (tmp_path / "checkpoints").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"a link to .*elsewhere, where there is no folder: .*checkpoints'"):
        save(tmp_path, 1, 1)
    (tmp_path / "elsewhere").mkdir()
    save(tmp_path, 1, 1)
    assert find_checkpoint(tmp_path).name == "step-00000001"


def test_there_is_none(tmp_path):
    with pytest.raises(CheckpointError, match="no such checkpoint: neither manifest.json there, nor a complete one"):
        find_checkpoint(tmp_path / "nowhere")


def test_a_run_has_one_writer(tmp_path):
    said = rf"being written by another run \(process {os.getpid()} on .*Wait until"
    with RunLock(tmp_path), pytest.raises(UsageError, match=said):
        RunLock(tmp_path).__enter__()
    with RunLock(tmp_path):
        pass


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_told_and_a_second_writer_found(tmp_path, monkeypatch, caplog, number):
    """As of one host that does not see another's lock: who came first finds the other before it writes."""

    def flock(handle, how):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", flock)
    with RunLock(tmp_path) as first:
        first.check()
        assert "this file system has no locks" in caplog.text and "has ended: process" not in caplog.text
        with RunLock(tmp_path) as second:
            assert f"see that the last one has ended: process {os.getpid()} on " in caplog.text
            second.check()
            with pytest.raises(UsageError, match=rf"another run \(process {os.getpid()} on .* after this one"):
                first.check()
    (tmp_path / ".lock").unlink()
    first.check()  # of a folder that was moved away


def test_a_checkpoint_that_was_renamed_to_another_step_is_refused(tmp_path):
    save(tmp_path, 1, 1)
    (tmp_path / "checkpoints/step-00000001").rename(tmp_path / "checkpoints/step-00000007")
    with pytest.raises(CheckpointError, match="step-00000007 was renamed: it is the checkpoint of step 1"):
        Checkpoint(tmp_path)
    (tmp_path / "checkpoints/step-00000007").rename(tmp_path / "kept")  # a name of another kind says nothing of steps
    assert Checkpoint(tmp_path / "kept").metadata["step"] == 1


def test_what_is_left_of_a_checkpoint_keeps_nobody_from_saving_that_step_again(tmp_path):
    save(tmp_path, 1, 1)
    save(tmp_path, 1, 2)
    (tmp_path / "checkpoints/step-00000002/manifest.json").unlink()
    assert Checkpoint(tmp_path).metadata["step"] == 1
    save(tmp_path, 1, 2)
    assert Checkpoint(tmp_path).path.name == "step-00000002.1"
