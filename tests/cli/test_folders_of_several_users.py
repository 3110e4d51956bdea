"""What other users of a machine can do to a run: hold its lock, ask it for something, or redirect what it writes."""

import errno
import os
from types import SimpleNamespace

import pytest

from spmd_engine.adaptive.joining import JoinRequests, LockedFile
from spmd_engine.arrays.numba import object_code
from spmd_engine.checkpoints.format.folder import LOCK, RunLock
from spmd_engine.comm.communicators.threads import solo
from spmd_engine.engine.reshape import ShapeRequest
from spmd_engine.errors import UsageError
from spmd_engine.files import RequestFile, check_owner
from spmd_engine.observability.run_record import RunRecord
from spmd_engine.training.loggers import CSVLogger
from support.command_line import QUIET, TEXT

STRANGER = 4_000_000  # a user without a name here


def mode(path):
    return oct(path.stat().st_mode & 0o777)


def lock_run(folder):
    with RunLock(folder):
        return mode(folder / LOCK)


def answer_request(folder):
    file = LockedFile.create(folder / "join-0-answer.json", {"port": "secret"})
    try:
        return mode(file.path)
    finally:
        file.close()


def compile_loops(folder):
    with object_code._locked(folder / "loops.lock"):
        return mode(folder / "loops.lock")


@pytest.fixture
def umask():
    before = os.umask(0)
    yield os.umask
    os.umask(before)


@pytest.mark.parametrize("make", [lock_run, answer_request, compile_loops])
def test_a_lock_has_the_permissions_of_the_group_that_shares_its_folder_and_none_of_others(make, tmp_path, umask):
    modes = {}
    for of_folder in (0o700, 0o755, 0o775, 0o2770, 0o777):
        folder = tmp_path / oct(of_folder)
        folder.mkdir()
        folder.chmod(of_folder)
        modes[of_folder] = make(folder)
    assert modes == {0o700: "0o600", 0o755: "0o600", 0o775: "0o660", 0o2770: "0o660", 0o777: "0o660"}
    umask(0o022)
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o775)
    assert make(tmp_path / "shared") == "0o640"


def test_a_lock_that_others_can_hold_is_closed_to_them(tmp_path):
    tmp_path.chmod(0o755)
    (tmp_path / LOCK).write_text("\n")
    (tmp_path / LOCK).chmod(0o644)
    assert lock_run(tmp_path) == "0o600"


def test_a_lock_that_cannot_be_closed_to_others_is_named_once(tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    (tmp_path / LOCK).write_text("\n")
    (tmp_path / LOCK).chmod(0o666)
    tmp_path.chmod(0o755)
    monkeypatch.setattr(os, "fchmod", refuse)
    assert lock_run(tmp_path) == "0o666"
    (line,) = caplog.messages
    assert line.startswith(f"{tmp_path / LOCK}: other users can hold or change it (mode 666, owner {os.getuid()})")


def test_a_file_for_the_group_gets_the_group_of_its_folder(tmp_path, monkeypatch):
    """Without setgid a new file has the group of its user."""
    given, group = [], tmp_path.stat().st_gid + 1

    def stat_of(path, *args, real=os.stat, **options):
        status = real(path, *args, **options)
        folder = SimpleNamespace(st_mode=0o40770, st_gid=status.st_gid + 1, st_uid=STRANGER)
        return folder if path == tmp_path else status

    monkeypatch.setattr(os, "stat", stat_of)
    monkeypatch.setattr(os, "fchown", lambda handle, *ids: given.append(ids))
    LockedFile.create(tmp_path / "join.json", {})
    assert (-1, group) in given


def test_what_an_administrator_asks_is_for_the_user_of_the_folder(tmp_path, monkeypatch):
    given, owner = [], tmp_path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "fchown", lambda handle, *ids: given.append(ids))
    LockedFile.create(tmp_path / ShapeRequest.FILE, {})
    assert given == [(owner, -1)]


def test_a_request_that_replaces_another_is_not_removed_with_it(tmp_path):
    """Also if it gets the number of the removed file."""
    request = RequestFile(tmp_path / ShapeRequest.FILE)
    request.path.write_text("first")
    assert request.is_there()
    request.path.write_text("next")
    os.utime(request.path, ns=(0, 1))
    request.answered()
    assert request.is_there() and request.path.read_text() == "next"
    request.answered()
    assert not request.is_there() and not request.path.exists()


def test_a_request_that_cannot_be_removed_is_answered_once(tmp_path, monkeypatch):
    request = RequestFile(tmp_path / ShapeRequest.FILE)
    request.path.write_text("first")
    monkeypatch.setattr(type(request.path), "unlink", lambda *_, **__: os.rmdir(tmp_path / "none"))
    assert request.is_there()
    request.answered()
    assert not request.is_there()
    os.utime(request.path, ns=(0, 1))  # as after a new content
    assert request.is_there()


def test_a_request_is_of_the_folders_user_or_of_a_member_of_its_group(tmp_path, monkeypatch):
    path, folder = tmp_path / "reshape.json", SimpleNamespace(st_uid=5, st_gid=50, st_mode=0o40770)
    monkeypatch.setattr(os, "stat", lambda *_, **__: folder)
    monkeypatch.setattr("pwd.getpwuid", lambda user: {6: SimpleNamespace(pw_name="six", pw_gid=60)}[user])
    monkeypatch.setattr(os, "getgrouplist", lambda name, group: [group, 50])
    for user in (0, os.geteuid(), 5, 6):
        check_owner(path, SimpleNamespace(st_uid=user))
    refusal = rf"^{path} is ignored: it belongs to user \d+, not to the users of its folder$"
    with pytest.raises(UsageError, match=refusal):
        check_owner(path, SimpleNamespace(st_uid=STRANGER))
    for mode, groups in ((0o40755, [60, 50]), (0o40777, [60])):  # not the group's to write, or another group's
        folder.st_mode = mode
        monkeypatch.setattr(os, "getgrouplist", lambda name, group, groups=groups: groups)
        with pytest.raises(UsageError, match="belongs to user 6"):
            check_owner(path, SimpleNamespace(st_uid=6))


@pytest.fixture
def of_a_stranger(monkeypatch):
    """Files of these names belong to another user."""
    names = set()

    def changed(status, name):
        if os.path.basename(name) not in names:
            return status
        return os.stat_result((*status[:4], STRANGER, *status[5:10]))

    monkeypatch.setattr(os, "lstat", lambda path, real=os.lstat: changed(real(path), path))
    monkeypatch.setattr(
        os, "fstat", lambda handle, real=os.fstat: changed(real(handle), os.readlink(f"/proc/self/fd/{handle}"))
    )
    return names.add


def test_requests_of_strangers_are_ignored_with_one_warning(tmp_path, of_a_stranger, caplog):
    for name in ("join.json", "join-0123456789abcdef.json", ShapeRequest.FILE):
        of_a_stranger(name)
        (tmp_path / name).write_text("{}")
    joining, reshape = JoinRequests(tmp_path, "", {}), RequestFile(tmp_path / ShapeRequest.FILE)
    for _ in range(3):
        assert not joining.is_ready(solo()) and not reshape.is_there()
    assert len(caplog.messages) == 2 and all(f"belongs to user {STRANGER}" in line for line in caplog.messages)
    assert len(list(tmp_path.iterdir())) == 3
    (tmp_path / "own").write_text("{}")
    assert RequestFile(tmp_path / "own").is_there()


def test_the_answer_of_a_stranger_is_not_believed(tmp_path, of_a_stranger):
    """It would name a port of theirs."""
    of_a_stranger("join-0-answer.json")
    (tmp_path / "join-0-answer.json").write_text('{"port": "theirs"}')
    with pytest.raises(UsageError, match=rf"join-0-answer\.json is ignored: it belongs to user {STRANGER}"):
        LockedFile.open(tmp_path / "join-0-answer.json")


def test_nothing_in_a_runs_folder_is_written_through_a_link(here, tmp_path):
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    names = ("report.html", "metrics.jsonl", "metrics.csv", "metrics.prom", "activity.json", ".activity.json")
    for name in names:
        (tmp_path / name).write_text("theirs")
        (folder / name).symlink_to(tmp_path / name)
    loggers = ["--logger", "csv", "--logger", "prometheus"]
    job = ["train", "--model", "mlp", "--run", "mine", "--steps", "2", "--batch-size", "2", *QUIET, *TEXT]
    assert here(*job, "--report", *loggers)[0] == 0
    (folder / "report.html").unlink()
    (folder / "report.html").symlink_to(tmp_path / "report.html")
    assert here("report", "mine")[0] == 0
    assert {name: (tmp_path / name).read_text() for name in names} == dict.fromkeys(names, "theirs")
    assert "<html" in (folder / "report.html").read_text() and not (folder / "report.html").is_symlink()
    (folder / ".lock").write_text("\n")
    assert RunRecord.read(folder).state == "finished"
    (tmp_path / "page.html").symlink_to(tmp_path / "elsewhere.html")
    assert here("report", "mine", "-o", "page.html")[0] == 0  # a name that the user gives
    assert "<html" in (tmp_path / "elsewhere.html").read_text()


def test_a_row_of_metrics_is_not_written_through_what_is_put_in_its_place(tmp_path):
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"loss": 2.0}, 1)
    (tmp_path / "victim").write_text("theirs")
    (tmp_path / "metrics.csv").unlink()
    (tmp_path / "metrics.csv").symlink_to(tmp_path / "victim")
    with pytest.raises(UsageError, match=r"metrics\.csv is no file: move it away"):
        logger.log_metrics({"loss": 1.0}, 2)
    assert (tmp_path / "victim").read_text() == "theirs"


def test_a_run_whose_lock_only_its_user_can_read_goes_on_until_it_is_closed(here, tmp_path, monkeypatch):
    folder = tmp_path / "runs" / "theirs"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    (folder / "events.jsonl").write_text('{"event": "started"}\n')
    (folder / LOCK).write_text("")
    monkeypatch.setattr(os, "access", lambda path, how: how != os.R_OK)
    assert RunRecord.read(folder).state == "running"
    with open(folder / "events.jsonl", "a") as file:
        file.write('{"event": "finished"}\n{"event": "closed"}\n')
    assert RunRecord.read(folder).state == "finished"
