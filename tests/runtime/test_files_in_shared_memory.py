"""Files of MPI in /dev/shm: those of dead jobs go, those of live ones stay, and too little room is one line."""

import mmap
import os
import shutil
from types import SimpleNamespace

import pytest

from spmd_engine.errors import UsageError
from spmd_engine.runtime import join
from spmd_engine.runtime.join import check_room, files_in_shared_memory, held_files, remove_unused, siblings


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(join, "FOLDER", tmp_path)
    for name in ("mpich_shm_1_0", "mpich_shm_2_0", "sm_segment.host.0", "another's"):
        (tmp_path / name).write_bytes(bytes(4096))
    return tmp_path


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_no_process_holds_is_removed(folder):
    with (folder / "mpich_shm_1_0").open() as opened, (folder / "mpich_shm_2_0").open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 4096)
        file.close()
        assert held_files([os.getpid()]) == {folder / "mpich_shm_1_0", folder / "mpich_shm_2_0"}
        remove_unused(files_in_shared_memory())
        assert names(folder) == ["another's", "mpich_shm_1_0", "mpich_shm_2_0"]
        mapped.close()
        assert not opened.closed
    remove_unused(files_in_shared_memory())
    assert names(folder) == ["another's"]


def test_files_of_running_jobs_are_known_without_a_look_at_all_processes(folder, monkeypatch):
    own = folder / f"mpich_shm_{os.getpid():x}_0"
    own.write_bytes(bytes(4096))
    monkeypatch.setattr(join, "_processes", lambda: pytest.fail("it looks at all processes"))
    with own.open("rb"):
        remove_unused({own})
    assert own.exists()


def test_room_that_mpi_does_not_have_is_an_error(folder, monkeypatch):
    room = SimpleNamespace(f_bavail=1000, f_frsize=4096, f_blocks=2000)
    monkeypatch.setattr(join.os, "statvfs", lambda path: room)
    check_room(3, made=lambda: pytest.fail("there is room for more"))
    with pytest.raises(UsageError, match=r"has 3.91 MiB free, and MPICH needs 4.04 for 4 rank\(s\)"):
        check_room(4)
    (folder / "mpich_shm_3_0").write_bytes(bytes(1 << 20))
    check_room(4, made=lambda: [folder / "mpich_shm_3_0"])
    room.f_bavail = room.f_blocks = 0  # without a limit
    check_room(4)


def test_ranks_of_a_job_know_each_other():
    assert os.getpid() in siblings()


ROOT = os.geteuid() == 0 and shutil.which("unshare") is not None
