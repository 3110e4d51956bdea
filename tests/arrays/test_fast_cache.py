"""One process compiles for all that share a cache; nobody waits without a word, or for ever, or for nothing."""

import fcntl
import importlib.util
import logging
import os
import stat
import threading
import time

import numpy as np
import pytest

pytest.importorskip("numba")
fast_cache = pytest.importorskip("spmd_engine.arrays.fast_cache")

LOOPS = """
from numba import njit

@njit(cache=True)
def doubled(x):
    return x * 2

@njit(cache=True)
def squared(x):
    return x * x
"""


class Process:
    """A process that has imported the loops: nothing is compiled yet, or loaded."""

    def __init__(self, path):
        spec = importlib.util.spec_from_file_location("loops_of_a_test", path)
        self.loops = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.loops)
        self.folder = path.parent / "__pycache__"
        self.lock = self.folder / "spmd_engine.lock"

    def call_all(self):
        x = np.ones(3, np.float32)
        return self.loops.doubled(x), self.loops.squared(x)

    def prepare(self):
        fast_cache.prepare(self.call_all, self.folder)
        return self.compiled()

    def compiled(self):
        """How many loops it has compiled, of those two that it has."""
        both = self.loops.doubled, self.loops.squared
        assert all(len(loop.overloads) == 1 for loop in both)
        return 2 - sum(sum(loop.stats.cache_hits.values()) for loop in both)


@pytest.fixture
def start(tmp_path, monkeypatch):
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    path = tmp_path / "loops_of_a_test.py"
    path.write_text(LOOPS)
    return lambda: Process(path)


@pytest.fixture
def held(start):
    """The lock, as another process has it."""
    with open(start().lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("process 4321 on that node")
        file.flush()
        yield file


def no_lock(*_):
    raise AssertionError("took a lock")


def test_the_first_compiles_and_a_warm_start_takes_no_lock(start, monkeypatch):
    first = start()
    assert first.prepare() == 2
    assert first.lock.read_text().startswith(f"process {os.getpid()} on ")
    monkeypatch.setattr(fcntl, "flock", no_lock)
    assert start().prepare() == 0


def test_what_is_missing_is_compiled(start):
    first = start()
    first.loops.doubled(np.ones(3, np.float32))
    assert start().prepare() == 1


def test_who_waits_finds_what_the_other_compiled(start, held, monkeypatch, caplog):
    monkeypatch.setattr(fast_cache, "WARN_AFTER", 0.2)

    def compile_slowly():
        time.sleep(0.6)
        start().call_all()
        fcntl.flock(held, fcntl.LOCK_UN)

    other = threading.Thread(target=compile_slowly)
    other.start()
    with caplog.at_level(logging.WARNING):
        assert start().prepare() == 0
    other.join()
    (record,) = caplog.records
    assert "process 4321 on that node" in record.getMessage() and str(start().lock) in record.getMessage()


def test_who_held_the_lock_may_have_died_over_it(start, held):
    end = threading.Timer(0.3, fcntl.flock, (held, fcntl.LOCK_UN))
    end.start()
    assert start().prepare() == 2
    end.join()


def test_nobody_waits_for_ever(start, held, monkeypatch, caplog):
    monkeypatch.setattr(fast_cache, "LIMIT", 0.3)
    with caplog.at_level(logging.WARNING):
        assert start().prepare() == 2
    assert "process 4321 on that node still has the lock" in caplog.text


def test_a_lock_that_cannot_be_had_is_no_reason_to_stop(start):
    process = start()
    process.lock.symlink_to("/nowhere")  # not to be followed: somebody else made it
    assert process.prepare() == 2


def test_a_file_system_without_locks_is_no_reason_to_stop(start, monkeypatch, caplog):
    def refuse(*_):
        raise OSError("No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert start().prepare() == 2
    assert "No locks available" in caplog.text


def test_other_threads_compile_meanwhile(start):
    """Only the thread that looks what is kept is stopped where it would compile."""
    inside, done = threading.Event(), threading.Event()
    compiled = []

    def wait_inside():
        inside.set()
        done.wait(60)

    looking = threading.Thread(target=lambda: fast_cache._are_kept(wait_inside))
    looking.start()
    inside.wait(60)
    compiled.append(start().call_all())
    done.set()
    looking.join()
    assert len(compiled) == 1


def test_nobody_else_can_write_to_the_cache_s_lock(start):
    process = start()
    process.prepare()
    assert stat.S_IMODE(process.lock.stat().st_mode) & 0o022 == 0
