"""One process makes what all keep in a folder; nobody waits without a word, or for ever, or for nothing."""

import fcntl
import logging
import os
import stat
import threading
import time

import pytest

pytest.importorskip("llvmlite")
fast_cache = pytest.importorskip("spmd_engine.arrays.numba.object_code")

NAME = "of_a_test"


class Made:
    """Makes code, and counts how often."""

    def __init__(self, code=b"some code"):
        self.code, self.times = code, 0

    def __call__(self):
        self.times += 1
        return self.code


def made(code=b"some code"):
    """Whether it had to be made."""
    make = Made(code)
    assert fast_cache.kept(NAME, make) == code
    return bool(make.times)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def file(folder):
    return folder / f"spmd_engine.{NAME}.{fast_cache._key().hex()[:16]}"


@pytest.fixture
def lock(file):
    return file.with_name(f"{file.name}.lock")


@pytest.fixture
def held(lock):
    """The lock, as another process has it."""
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("process 4321 on that node")
        file.flush()
        yield file


def no_lock(*_):
    raise AssertionError("took a lock")


def test_the_first_makes_it_and_a_warm_start_takes_no_lock(lock, monkeypatch):
    assert made()
    assert lock.read_text().startswith(f"process {os.getpid()} on ")
    monkeypatch.setattr(fcntl, "flock", no_lock)
    assert not made()


def test_what_is_kept_is_one_file_that_others_may_read(folder, file, lock):
    made()
    assert set(folder.iterdir()) == {file, lock}
    assert stat.S_IMODE(file.stat().st_mode) == 0o644


@pytest.mark.parametrize("place", [0, 40, -1], ids=["the digest", "the code", "the end"])
def test_a_damaged_file_is_made_again(file, place):
    made()
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)
    assert made() and not made()


@pytest.mark.parametrize("length", [0, 20, 35])
def test_half_a_file_is_made_again(file, length):
    made()
    file.write_bytes(file.read_bytes()[:length])
    assert made() and not made()


def test_two_processors_keep_code_side_by_side(monkeypatch):
    made()
    with monkeypatch.context() as patch:
        patch.setattr(fast_cache, "_processor", lambda: ["another"])
        assert made(b"its code") and not made(b"its code")
    assert not made()


def test_another_processor_s_code_is_not_run_under_this_one_s_name(file, monkeypatch):
    made()
    with monkeypatch.context() as patch:
        patch.setattr(fast_cache, "_processor", lambda: ["another"])
        made(b"its code")
    (other,) = set(file.parent.glob(f"spmd_engine.{NAME}.*")) - set(file.parent.glob("*.lock")) - {file}
    other.replace(file)
    assert made()


def test_other_settings_of_numba_s_are_other_code(monkeypatch):
    made()
    monkeypatch.setenv("NUMBA_CPU_NAME", "generic")
    assert made(b"its code")


def test_another_user_s_file_is_not_run(monkeypatch):
    made()
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    monkeypatch.setattr(os, "fstat", lambda _: os.stat_result([0, 0, 0, 0, 1234, *[0] * 5]))
    assert made()


def test_a_link_is_not_followed(file, tmp_path):
    made()
    elsewhere = file.rename(tmp_path / "elsewhere")
    file.symlink_to(elsewhere)
    assert made()


def test_who_waits_finds_what_the_other_made(held, lock, monkeypatch, caplog):
    monkeypatch.setattr(fast_cache, "WARN_AFTER", 0.02)
    others = fast_cache._write

    def make_slowly():
        while not caplog.records:  # until it has waited for long
            time.sleep(0.01)
        others(lock.with_suffix(""), fast_cache._key(), b"some code")
        fcntl.flock(held, fcntl.LOCK_UN)

    other = threading.Thread(target=make_slowly)
    other.start()
    with caplog.at_level(logging.WARNING):
        assert not made()
    other.join()
    (record,) = caplog.records
    assert "process 4321 on that node" in record.getMessage() and str(lock) in record.getMessage()


def test_of_many_one_makes_it():
    """Each opens the lock for itself, as processes do."""
    make, found = Made(), []
    make_slowly = lambda: time.sleep(0.1) or make()  # noqa: E731
    threads = [threading.Thread(target=lambda: found.append(fast_cache.kept(NAME, make_slowly))) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert found == [b"some code"] * 4 and make.times == 1


def test_who_held_the_lock_may_have_died_over_it(held):
    end = threading.Timer(0.3, fcntl.flock, (held, fcntl.LOCK_UN))
    end.start()
    assert made()
    end.join()


def test_nobody_waits_for_ever(held, monkeypatch, caplog):
    monkeypatch.setattr(fast_cache, "LIMIT", 0.3)
    with caplog.at_level(logging.WARNING):
        assert made()
    assert "process 4321 on that node still has the lock" in caplog.text


def test_a_lock_that_cannot_be_had_is_no_reason_to_stop(lock):
    lock.symlink_to("/nowhere")  # not to be followed: somebody else made it
    assert made()


def test_a_file_system_without_locks_is_no_reason_to_stop(monkeypatch, caplog):
    def refuse(*_):
        raise OSError("No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert made()
    assert "No locks available" in caplog.text


def test_a_folder_that_cannot_be_written_is_no_reason_to_stop(folder, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(folder / "file"))
    (folder / "file").touch()
    assert made() and made()


def test_without_room_nothing_is_kept_and_nothing_is_left(folder, lock, monkeypatch):
    def refuse(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    assert made()
    assert set(folder.iterdir()) == {lock}


def test_nobody_else_can_write_to_the_cache_s_lock(lock):
    made()
    assert stat.S_IMODE(lock.stat().st_mode) & 0o022 == 0


def test_a_compile_that_is_stopped_keeps_what_it_has_made_and_says_once_what_it_does(folder, capsys):
    def stopped():
        raise KeyboardInterrupt

    first, second, again = fast_cache.Parts(NAME), fast_cache.Parts(NAME), Made()
    assert first.keep("relu", 2, Made(b"relu")) == b"relu"
    with pytest.raises(KeyboardInterrupt):
        first.keep("gelu", 2, stopped)
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"spmd_engine: compiles 2 loops for this processor, once: later starts find them in {folder}"
    assert second.keep("relu", 2, again) == b"relu" and not again.times
    assert second.keep("gelu", 2, Made(b"gelu")) == b"gelu"
    second.remove()
    assert not list(folder.iterdir())
