"""What every ``OffloadTarget`` must do; a target of your own passes the same tests with a line in ``TARGETS``."""

import errno
import gc
import os

import numpy as np
import pytest

from spmd_engine.arrays.backend import CPU
from spmd_engine.arrays.meta.meter import Meter, metered
from spmd_engine.engine.offload import file as offload_file
from spmd_engine.engine.offload.array import OffloadedArray, streamed
from spmd_engine.engine.offload.config import TARGETS
from spmd_engine.engine.offload.target import PAGE, OffloadError, OffloadTarget, ShapesTarget, pages

MAKERS = {**TARGETS, "shapes": lambda folder, backend: ShapesTarget()}


@pytest.fixture(params=MAKERS)
def target(request, tmp_path, monkeypatch):
    monkeypatch.setattr(offload_file, "_in_memory", lambda folder: "")
    monkeypatch.setattr(OffloadTarget, "piece", 2 * PAGE)
    with metered(Meter()):
        yield MAKERS[request.param](str(tmp_path), CPU)


def test_a_target_returns_the_bits_that_were_written_at_any_offset(target):
    random, counted = np.random.default_rng(0), Meter()
    sizes = [1, PAGE - 1, PAGE, 5 * PAGE + 17]
    places = [target.reserve(size) for size in sizes]
    ends = [place + pages(size) for place, size in zip(places, sizes, strict=True)]
    assert ends[:-1] == places[1:]  # in whole pages, one after the other
    with metered(counted):
        for place, size in zip(places, sizes, strict=True):
            data = random.integers(0, 256, size, np.uint8)
            target.write_all(place, data)
            part = slice(size // 3, size)
            target.transfer(place + part.start, data[part] + 1, writes=True)
            back = target.read_all(place, np.empty_like(data))
            if target.has_bytes:
                assert np.array_equal(back[: part.start], data[: part.start])
                assert np.array_equal(back[part], data[part] + 1)
    if not target.has_bytes:
        assert counted.work.stored >= sum(map(pages, sizes)) and counted.work.loaded >= sum(map(pages, sizes))


def test_threads_move_several_arrays_at_once(target):
    if not target.has_bytes:
        pytest.skip("a dry run has no threads")
    blocks = [np.full(3 * PAGE + n, n, np.uint8) for n in range(12)]
    places = [target.reserve(block.nbytes) for block in blocks]
    for moving in [target.start_store(place, block) for place, block in zip(places, blocks, strict=True)]:
        moving.result()
    read = [target.start_load(place, block.nbytes) for place, block in zip(places, blocks, strict=True)]
    into = target.start_read(places[5] + 1, np.empty(7, np.uint8))
    assert all(np.array_equal(moving.result(), block) for moving, block in zip(read, blocks, strict=True))
    assert into.result().tolist() == [5] * 7


def test_space_that_is_given_back_is_used_again_but_not_for_zeros(target):
    place, x = target.reserve(PAGE + 1), np.ones(2 * PAGE, np.uint8)
    target.write_all(place, x)
    target.give_back(place, PAGE + 1)
    fresh = target.reserve(2 * PAGE, zeros=True)
    assert fresh != place and target.reserve(2 * PAGE) == place
    if target.has_bytes:
        assert not target.read_all(fresh, x).any()


def test_an_offloaded_array_passes_through_memory_in_pieces(target):
    if not target.has_bytes:
        pytest.skip("``streamed`` makes shapes of an engine's backend: tests/planning has dry runs")
    x = np.random.default_rng(0).normal(size=(9, 1000))
    array = OffloadedArray(target, x.shape, x.dtype, CPU)
    assert not np.asarray(array).any()
    array[...] = x
    for _, _, (part,) in streamed([[array]]):
        part *= 2
    assert np.array_equal(array, 2 * x) and np.array_equal(array[3:5, 7:], 2 * x[3:5, 7:])


@pytest.mark.parametrize(
    ("method", "why"), [("grow", "cannot hold"), ("read", "cannot be read"), ("write", "cannot be written")]
)
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), MemoryError("no memory")])
def test_a_target_that_fails_says_where_and_what_to_do(target, method, why, error, monkeypatch):
    def fail(*arguments):
        raise error

    monkeypatch.setattr(target, method, fail)
    with pytest.raises(OffloadError) as raised:
        place = target.reserve(PAGE)
        target.read_all(place, np.empty(PAGE, np.uint8))
        target.write_all(place, np.empty(PAGE, np.uint8))
    text = str(raised.value)
    assert text.startswith(f"{target.where}: it {why}") and "\n" not in text
    assert (error.strerror if isinstance(error, OSError) else "no memory") in text
    assert f"{target.remedy}, and continue from the last checkpoint (--resume)" in text


def test_nothing_is_left_of_a_target_that_nobody_uses(tmp_path, monkeypatch):
    monkeypatch.setattr(offload_file, "_in_memory", lambda folder: "")
    open_before = os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd") else []
    for make in TARGETS.values():
        target = make(str(tmp_path), CPU)
        target.write_all(target.reserve(PAGE), np.ones(PAGE, np.uint8))
        del target
    gc.collect()
    assert not list(tmp_path.iterdir())
    assert not open_before or len(os.listdir("/proc/self/fd")) <= len(open_before)
