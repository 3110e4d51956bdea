"""What lives on the disk while it is not in use: the same bits as in memory, and one error for a disk that fails."""

import errno
import os
import weakref
from functools import partial
from threading import Event
from time import sleep
from types import SimpleNamespace

import numpy as np
import pytest
from ml_dtypes import bfloat16

from spmd_engine import Mesh, run_threads
from spmd_engine.arrays.backend import CPU
from spmd_engine.checkpoints import Checkpoint, load_checkpoint, save_checkpoint
from spmd_engine.checkpoints.digest import digest_of_engine, digest_text
from spmd_engine.engine import SGD, AdamW, LayeredEngine
from spmd_engine.engine.offload import file as offload_file
from spmd_engine.engine.offload.array import OffloadedArray, streamed
from spmd_engine.engine.offload.config import Offload
from spmd_engine.engine.offload.file import FileTarget
from spmd_engine.engine.offload.stash import Stash
from spmd_engine.engine.offload.target import OffloadError, OffloadTarget
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.engine.state.assignment import ZeroConfig
from spmd_engine.errors import UsageError
from spmd_engine.models import gpt
from spmd_engine.training import Trainer
from support import saved, tiny


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of offload files; a test runs wherever it is, and pieces are small, so that there are several."""
    monkeypatch.setattr(offload_file, "_in_memory", lambda folder: "")
    monkeypatch.setattr(OffloadTarget, "piece", 1 << 12)
    return str(tmp_path)


def train(axes, kinds, folder, *, optimizer=AdamW, after=None, run="", dtype=np.float32, zero=None, **how):
    """Losses, and a digest of parameters and state, of three steps, with a change of the mesh, or a checkpoint."""

    def engine_on(mesh, zero=zero):
        storage = ZeroConfig(zero, places=Offload(kinds, folder))
        return LayeredEngine(gpt(tiny.SIZE), mesh, dtype=dtype, seed=3, storage=storage, **how)

    def trainer_of(engine, first=0):
        chosen = optimizer()
        batches = lambda step: tiny.batch(engine, step)
        return Trainer(engine, chosen, batches, lambda step: 0.05, grad_clip=0.3, first_step=first)

    def program():
        with Mesh(**axes) as mesh:
            engine = engine_on(mesh)
            trainer = trainer_of(engine)
            losses = [report.loss for report in trainer.run(2)]
            if run:
                save_checkpoint(run, engine, trainer.optimizer, step=2)
                engine = engine_on(mesh, zero=after)
                trainer = trainer_of(engine, first=2)
                load_checkpoint(run, engine, trainer.optimizer)
            elif after:
                engine.reshard(
                    Mesh(**after), optimizer=trainer.optimizer, storage=ZeroConfig(3, places=Offload(kinds, folder))
                )
            losses += [report.loss for report in trainer.run(3)]
            arrays = [array for state in trainer.optimizer.state.values() for array in state.values()]
            assert all(isinstance(array, OffloadedArray) == ("optimizer" in kinds) for array in arrays)
            assert all(isinstance(array, OffloadedArray) == ("parameters" in kinds) for array in engine.owned.values())
            return losses, digest_text(digest_of_engine(engine, trainer.optimizer))

    return run_threads(program, tiny.ranks_of(axes))[0]


soak = partial(pytest.param, marks=pytest.mark.soak)


@pytest.mark.parametrize(
    ("axes", "kinds", "how"),
    [
        soak({"data": 1}, "optimizer", {}),
        ({"data": 1}, "optimizer", {"optimizer": SGD}),
        ({"data": 2}, "optimizer,activations", {"zero": 1}),
        soak({"data": 3}, "optimizer", {"zero": 2, "dtype": np.float64}),
        soak({"pipe": 2, "data": 2}, "optimizer,activations", {"zero": 3, "schedule": "1f1b"}),
        ({"data": 2, "model": 2}, "optimizer", {"zero": 1, "after": {"pipe": 2, "data": 2}}),
        ({"data": 2}, "optimizer", {"zero": 3, "after": 1, "run": True}),
        soak({"data": 1}, "parameters", {"optimizer": SGD}),
        ({"data": 2}, "optimizer,parameters,activations", {"zero": 3, "recompute": "block"}),
        soak({"data": 2}, "parameters", {}),
        soak({"pipe": 2, "model": 2}, "optimizer,parameters", {"schedule": "interleaved"}),
        soak({"data": 2}, "optimizer,parameters", {"zero": 3, "after": {"data": 2}}),
        soak({"data": 2}, "parameters", {"zero": 3, "after": 3, "run": True}),
        soak({"data": 2}, "optimizer,parameters,activations", {"zero": 3, "dtype": bfloat16}),
        ({"data": 2}, "parameters", {"dtype": bfloat16, "after": {"model": 2}}),
        soak({"data": 1}, "activations", {"recompute": "attention"}),
        soak({"data": 2}, "activations", {"recompute": "block", "zero": 3}),
        ({"pipe": 2}, "activations", {"schedule": "zero-bubble"}),
        soak({"pipe": 2, "model": 2}, "activations", {"schedule": "interleaved", "recompute": "block"}),
    ],
)  # fmt: skip
def test_what_is_offloaded_has_the_bits_of_what_is_in_memory(axes, kinds, how, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(OffloadTarget, "smallest", 64)
    runs = [
        train(axes, kinds, folder, **how | ({"run": str(tmp_path / f"run{len(kinds)}")} if "run" in how else {}))
        for kinds in ((), tuple(kinds.split(",")))
    ]
    assert runs[0] == runs[1]


def offloaded(folder, x):
    """An array in a file, with the values of ``x``."""
    array = OffloadedArray(FileTarget(folder), x.shape, x.dtype, CPU)
    array[...] = x
    return array


def test_an_array_in_a_file_is_indexed_and_assigned_as_one_in_memory(folder):
    x = np.random.default_rng(0).normal(size=(37, 5, 83))
    array = offloaded(folder, x)
    rows, inside = array[3:30], array[5:, 1:4, 7:]
    assert np.array_equal(rows, x[3:30]) and np.array_equal(inside, x[5:, 1:4, 7:])
    assert np.array_equal(rows.reshape(27, -1)[2:4], x[5:7].reshape(2, -1))
    inside[2:3, :1] = x[7:8, 1:2, 7:] = 5.0
    rows.reshape(-1)[:3] = x.reshape(-1)[3 * 415 : 3 * 415 + 3] = 1.0
    assert np.array_equal(array, x)


def test_pieces_are_read_ahead_and_written_behind_at_most_one_each(folder, monkeypatch):
    moved = {"read": [], "write": []}

    def noting(name, move):
        return lambda file, offset, view: moved[name].append(offset // 4096) or move(file, offset, view)

    for name in moved:
        monkeypatch.setattr(FileTarget, name, noting(name, getattr(FileTarget, name)))
    file, x = FileTarget(folder), np.zeros(4096)
    states = [[OffloadedArray(file, x.shape, x.dtype, CPU), OffloadedArray(file, x.shape, x.dtype, CPU)]]
    for number, (_, _, arrays) in enumerate(streamed(states)):
        assert max(page % 8 for page in moved["read"]) <= number + 1
        for array in arrays:
            array += number
    assert all(sorted(pages) == list(range(16)) for pages in moved.values())
    assert np.array_equal(states[0][1], np.repeat(np.arange(8.0), 512))


def test_a_stash_holds_the_last_two_layers_and_one_copy_of_what_several_save(folder):
    stash, rng = Stash(FileTarget(folder)), np.random.default_rng(0)
    weights = np.ones(1 << 14)
    trees, memories, expected = [], [], []
    x = rng.normal(size=(64, 32, 8))
    for layer in range(5):
        y = np.asfortranarray(x[::-1].transpose(2, 0, 1) * layer)
        saved = (x, [y[:, 1:-1], {"w": weights, "t": x.transpose(1, 0, 2)[3:], "n": 3}])
        expected.append((x.copy(), y[:, 1:-1].copy(), x.transpose(1, 0, 2)[3:].copy()))
        memories.append(weakref.ref(x))
        trees.append(stash.put(saved, {"w": weights}))
        x = np.ascontiguousarray(y.transpose(1, 2, 0))
    del saved, x, y
    while memories[2]() is not None:  # the thread that wrote it lets go of it a little later
        sleep(0.001)
    assert [memory() is None for memory in memories] == [True, True, True, False, False]
    for layer in reversed(range(5)):
        a, [b, rest] = stash.take(trees.pop())
        stash.expect(trees[-1:])
        assert all(map(np.array_equal, (a, b, rest["t"]), expected[layer]))
        assert np.shares_memory(a, rest["t"]) and rest["w"] is weights and rest["n"] == 3
        assert (a.strides, b.strides[0], rest["t"].strides) == ((2048, 64, 8), 8, (64, 2048, 8))
    del a, b, rest
    freed = {size: len(places) for size, places in stash._target._free.items()}
    assert freed == {64 * 32 * 8 * 8: stash._target._end // (64 * 32 * 8 * 8)}


def test_a_stash_does_not_keep_what_was_read_back_in_memory(folder):
    stash = Stash(FileTarget(folder))
    trees = [stash.put(np.full(1 << 14, layer, np.uint8)) for layer in range(3)]  # the first one is written now
    for _ in range(2):
        assert _is_freed(trees[0].block._seen)
        taken = stash.take(trees[0])
        assert not taken.any()
        del taken
    assert _is_freed(trees[0].block._seen)


def _is_freed(memory):
    """Whether memory is freed within a minute: a thread that moved it lets go of it a little later."""
    return any(memory() is None or sleep(0.001) for _ in range(60_000))


def test_another_block_gets_the_place_of_a_freed_one_only_once_that_is_written(folder, monkeypatch):
    write, disk_is_ready = FileTarget.write, Event()
    monkeypatch.setattr(
        FileTarget, "write", lambda file, place, view: disk_is_ready.wait(60) and write(file, place, view)
    )
    file = FileTarget(folder)
    stash, size = Stash(file), 1 << 14
    tree = stash.put(np.ones(size, np.uint8))
    stash.put(np.ones(size, np.uint8))  # the first one is being written
    del tree
    assert not file._free
    disk_is_ready.set()
    while not file._free:
        sleep(0.001)
    assert file._free == {size: [0]}


def test_no_file_stays_and_none_is_opened_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(offload_file, "_in_memory", lambda folder: "")
    file = FileTarget(str(tmp_path))
    file.reserve(1 << 16)
    assert not list(tmp_path.iterdir())
    with pytest.raises(OffloadError, match=r"nowhere: it cannot be written \(No such file or directory\)"):
        FileTarget(str(tmp_path / "nowhere"))
    monkeypatch.undo()
    if os.path.ismount("/dev/shm"):
        with pytest.raises(OffloadError, match=r"--offload-dir /dev/shm: it is in memory \(tmpfs\)"):
            FileTarget("/dev/shm")


def test_state_of_a_device_is_in_a_file_or_on_the_host_and_activations_stay(folder, cuda):
    device, x = cuda, np.arange(3000.0)
    for offload_to in (Offload(("optimizer",), folder), Offload(("optimizer",), to="host")):
        states = [[offload_to.open(device).zeros(x.shape, x.dtype) for _ in "mv"]]
        states[0][1][...] = x
        for _, _, (mean, square) in streamed(states):
            assert device.owns(mean) and not mean.memory.any()
            mean[...] = square
            square[...] = 7.0
        assert np.array_equal(states[0][0], x) and np.array_equal(states[0][1][2:], np.full(2998, 7.0))
    with pytest.raises(UsageError, match="--offload activations: those of a device stay there"):
        Offload(("activations",), folder).open(device)
    with pytest.raises(UsageError, match="--offload-to host: without a device everything is on the host"):
        Offload(("optimizer",), to="host").open(CPU)
    with pytest.raises(
        UsageError, match="there is no 'optimiser' to offload; choose among optimizer, parameters, activations"
    ):
        Offload.parse("optimiser")
    composition = ParallelConfig(offload="optimizer")  # of a run that is resumed with --offload none
    assert composition.changed(offload="none").storage.places == Offload()


@pytest.mark.parametrize(
    ("name", "fault", "message"),
    [
        ("posix_fallocate", OSError(errno.ENOSPC, "No space left on device"), r"it cannot hold .* \(No space left"),
        ("preadv", OSError(errno.EIO, "Input/output error"), r"it cannot be read \(Input/output error"),
        ("pwritev", OSError(errno.EIO, "Input/output error"), r"it cannot be written \(Input/output error"),
        ("preadv", 0, r"it cannot be read \(the file ends before byte"),
    ],
)
def test_a_disk_that_fails_is_one_error_and_the_last_checkpoint_stays(
    name, fault, message, folder, tmp_path, monkeypatch
):
    def program():
        engine = LayeredEngine(
            gpt(tiny.SIZE), Mesh(data=2), storage=ZeroConfig(2, places=Offload(("optimizer",), folder))
        )
        optimizer = AdamW()
        trainer = Trainer(engine, optimizer, lambda step: tiny.batch(engine, step), lambda step: 0.05)
        if name != "posix_fallocate":
            trainer.step()
            save_checkpoint(run, engine, optimizer, step=1)

        def fail(*args):
            if isinstance(fault, OSError):
                raise fault
            return fault

        engine.mesh.barrier()
        monkeypatch.setattr(offload_file, "os", SimpleNamespace(**vars(os) | {name: fail}))
        trainer.step()

    run = tmp_path / "run"
    with pytest.raises(OffloadError, match=message):
        run_threads(program, 2)
    monkeypatch.undo()
    if name != "posix_fallocate":
        assert Checkpoint(run).metadata["step"] == 1 and all(np.isfinite(x).all() for x in saved.state(run).values())
