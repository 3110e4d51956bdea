"""Loading into arrays that are there: each block is read by one rank, and what one finds damaged is told by all."""

from threading import Lock

import numpy as np
import pytest

import saved
import tiny
from spmd_engine import Mesh, run
from spmd_engine.checkpoints import Checkpoint, CheckpointFolder, fill, load_checkpoint, save_checkpoint
from spmd_engine.checkpoints.read import read_block, read_manifest
from spmd_engine.engine import AdamW
from spmd_engine.errors import CheckpointError


def save(folder, **axes):
    """A checkpoint of a model and its optimizer, all numbers different."""

    def program():
        with Mesh(**axes) as mesh:
            engine, optimizer = tiny.make_engine(mesh, zero=1), AdamW()
            optimizer.prepare(engine)
            for kind in optimizer.state.values():
                for array in kind.values():
                    array[...] = np.random.default_rng(mesh.rank).standard_normal(array.shape)
            save_checkpoint(folder, engine, optimizer, step=1)

    run(program, tiny.ranks_of(axes))


def loaded(folder, into, zero=0, dtype=np.float64, **axes):
    """Load on another mesh, and save what is there then."""

    def program():
        with Mesh(**axes) as mesh:
            engine, optimizer = tiny.make_engine(mesh, zero=zero, dtype=dtype), AdamW()
            load_checkpoint(folder, engine, optimizer)
            save_checkpoint(into, engine, optimizer, step=1)

    run(program, tiny.ranks_of(axes))


@pytest.mark.parametrize("axes", [{"data": 4}, {"data": 2, "model": 2}, {"pipe": 2, "data": 2}], ids=str)
@pytest.mark.parametrize("zero", [0, 3])
def test_each_block_is_read_once_by_all_ranks_together(tmp_path, monkeypatch, axes, zero):
    save(tmp_path / "a", data=3)
    blocks = [
        (CheckpointFolder(tmp_path / "a").newest() / block.file, block.offset)
        for arrays in Checkpoint(tmp_path / "a").manifest.sections.values()
        for array in arrays.values()
        for block in array.blocks
    ]
    read, lock = [], Lock()

    def counted(path, offset, *others):
        with lock:
            read.append((path, offset))
        return read_block(path, offset, *others)

    monkeypatch.setattr("spmd_engine.checkpoints.read.read_block", counted)
    monkeypatch.setattr(fill, "AT_ONCE", 500)  # bytes: many batches
    loaded(tmp_path / "a", tmp_path / "b", zero, **axes)
    monkeypatch.undo()
    assert sorted(read) == sorted(blocks)
    assert saved.everything(tmp_path / "b") == saved.everything(tmp_path / "a")


def test_an_engine_of_another_dtype_gets_the_values_in_its_own(tmp_path):
    save(tmp_path / "a", data=2)
    loaded(tmp_path / "a", tmp_path / "b", 0, np.float32, model=2)
    ours, theirs = saved.parameters(tmp_path / "b"), saved.parameters(tmp_path / "a")
    for name, array in theirs.items():
        np.testing.assert_array_equal(ours[name], array.astype(np.float32), strict=True)


def test_damage_that_one_rank_reads_is_an_error_on_all(tmp_path):
    save(tmp_path, data=2)
    path = CheckpointFolder(tmp_path).newest() / "optimizer-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)

    def program():
        with Mesh(data=4) as mesh, pytest.raises(CheckpointError, match=r"rank . of 4: .*00001.*is damaged"):
            load_checkpoint(tmp_path, tiny.make_engine(mesh), AdamW())

    run(program, 4)


def test_all_ranks_load_the_checkpoint_that_rank_zero_found(tmp_path, monkeypatch):
    """A run that goes on may save a newer one while others look for the newest."""
    save(tmp_path, data=2)
    first = CheckpointFolder(tmp_path).newest()
    save(tmp_path, data=2)
    found = iter([first])
    monkeypatch.setattr("spmd_engine.checkpoints.read.find_checkpoint", lambda path: next(found, path))
    looked = []
    monkeypatch.setattr(
        "spmd_engine.checkpoints.read.read_manifest", lambda path: looked.append(path) or read_manifest(path)
    )

    def program():
        with Mesh(data=3) as mesh:
            load_checkpoint(tmp_path, tiny.make_engine(mesh))

    run(program, 3)
    assert looked == [first] * 3
