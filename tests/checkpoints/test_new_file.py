"""A file that threads fill side by side has every byte in its place, past the cache or through it, or fails on all."""

import errno
import fcntl
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from spmd_engine.checkpoints.format import write
from spmd_engine.checkpoints.format.write import NewFile

WINDOW = 2 * write.PAGE


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr(write, "WINDOW", WINDOW)


def written(path, size, piece):
    """Put so many bytes, a piece at a time, from 3 threads."""
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    file = NewFile(path, size)
    with ThreadPoolExecutor(3) as threads:
        puts = [threads.submit(file.put, first, data[first : first + piece]) for first in range(0, size, piece)]
        try:
            for each in puts:
                each.result()
        finally:
            file.fail(RuntimeError("no more"))
    file.close()
    return data


@pytest.mark.parametrize("size", [1, WINDOW, WINDOW + 1, 9 * WINDOW, 9 * WINDOW + 4097])
@pytest.mark.parametrize("piece", [777, WINDOW, 6 * WINDOW + 5])
def test_every_byte_is_in_its_place(tmp_path, size, piece):
    data = written(tmp_path / "x", size, piece)
    assert (tmp_path / "x").read_bytes() == data.tobytes()


@pytest.mark.parametrize("refused", ["opening", "writing"])
def test_where_nothing_can_be_written_directly_it_goes_through_the_cache(tmp_path, monkeypatch, refused):
    flags, write, control = [], os.pwrite, fcntl.fcntl

    def set_flags(descriptor, command, *args):
        if refused == "opening" and args and args[0] & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return control(descriptor, command, *args)

    def only_through_the_cache(descriptor, data, offset):
        flags.append(control(descriptor, fcntl.F_GETFL))
        if flags[-1] & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(descriptor, data, offset)

    monkeypatch.setattr(fcntl, "fcntl", set_flags)
    monkeypatch.setattr(os, "pwrite", only_through_the_cache)
    data = written(tmp_path / "x", 7 * WINDOW + 5, 1000)
    assert (tmp_path / "x").read_bytes() == data.tobytes()
    assert any(each & os.O_DIRECT for each in flags) == (refused == "writing")


def test_a_disk_that_is_full_is_told_to_all_who_wait(tmp_path, monkeypatch):
    def full(descriptor, data, offset, real=os.pwrite):
        if offset >= 2 * WINDOW:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left on device"):
        written(tmp_path / "x", 40 * WINDOW, WINDOW)


def test_who_waits_for_bytes_that_will_not_come_is_freed(tmp_path):
    file = NewFile(tmp_path / "x", 40 * WINDOW)
    with ThreadPoolExecutor(1) as threads:
        late = threads.submit(file.put, 30 * WINDOW, np.zeros(5, np.uint8))
        file.fail(ValueError("not finite"))
        with pytest.raises(ValueError, match="not finite"):
            late.result(10)
    file.close()


def test_what_is_there_is_not_written_over(tmp_path):
    (tmp_path / "x").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        NewFile(tmp_path / "x", 3)
