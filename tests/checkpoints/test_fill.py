"""Loading into arrays that are there: one rank of a node hashes a block, and what it finds damaged is told by all."""

from collections import Counter
from threading import Lock, get_ident
from time import sleep

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.checkpoints import Checkpoint, CheckpointFolder, load_checkpoint, load_in_place, save_checkpoint
from spmd_engine.checkpoints.load_in_place import PartReader, read_file_header
from spmd_engine.checkpoints.read import read_manifest
from spmd_engine.engine import AdamW
from spmd_engine.errors import CheckpointError
from support import saved, tiny


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

    run_threads(program, tiny.ranks_of(axes))


def loaded(folder, into, zero=0, dtype=np.float64, nodes=None, **axes):
    """Load on another mesh, and save what is there then."""

    def program():
        with Mesh(**axes) as mesh:
            engine, optimizer = tiny.make_engine(mesh, zero=zero, dtype=dtype), AdamW()
            load_checkpoint(folder, engine, optimizer)
            save_checkpoint(into, engine, optimizer, step=1)

    run_threads(program, tiny.ranks_of(axes), nodes=nodes)


@pytest.mark.parametrize(
    "axes, zero, nodes",
    [
        ({"data": 4}, 0, ["left", "right"] * 2),
        ({"data": 2, "model": 2}, 3, ["here"] * 4),
        ({"pipe": 2, "data": 2}, 0, ["here"] * 4),
        pytest.param({"data": 4}, 0, ["here"] * 4, marks=pytest.mark.soak),
        pytest.param({"data": 4}, 3, ["here"] * 4, marks=pytest.mark.soak),
        pytest.param({"data": 2, "model": 2}, 0, ["here"] * 4, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_each_block_is_hashed_by_one_rank_of_a_node(tmp_path, monkeypatch, axes, zero, nodes):
    save(tmp_path / "a", data=3)
    sections = Checkpoint(tmp_path / "a").manifest.sections.values()
    arrays = [each for section in sections for each in section.items()]
    blocks = [(name, block.rectangle) for name, array in arrays for block in array.blocks]
    hashed, lock = Counter(), Lock()

    def counted(self, asked):
        with lock:
            hashed[asked.name, asked.block.rectangle] += asked.checked
        read(self, asked)

    read = PartReader.read
    monkeypatch.setattr(PartReader, "read", counted)
    monkeypatch.setattr(load_in_place, "IN_CACHE", 400)  # bytes: some rows of a block at a time
    loaded(tmp_path / "a", tmp_path / "b", zero, nodes=nodes, **axes)
    monkeypatch.undo()
    assert hashed == dict.fromkeys(blocks, len(set(nodes)))
    assert saved.everything(tmp_path / "b") == saved.everything(tmp_path / "a")


def test_a_file_is_checked_by_one_rank_where_that_leaves_others_as_much(tmp_path, monkeypatch):
    save(tmp_path, data=3)
    looked = []

    def read(path):
        looked.append(path.name)
        return read_file_header(path)

    monkeypatch.setattr(load_in_place, "read_file_header", read)

    def program():
        with Mesh(data=3) as mesh:
            load_checkpoint(tmp_path, tiny.make_engine(mesh), AdamW())

    run_threads(program, 3)
    assert sorted(looked) == sorted(each.name for each in CheckpointFolder(tmp_path).newest().glob("*.safetensors"))


@pytest.mark.parametrize("threads", [1, 3])
def test_what_one_thread_of_several_finds_damaged_ends_the_others(tmp_path, monkeypatch, threads):
    save(tmp_path, data=1)
    path = CheckpointFolder(tmp_path).newest() / "model-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    monkeypatch.setattr("spmd_engine.checkpoints.load_in_place.cores_here", lambda: threads)
    used, read = set(), PartReader.read

    def slow(self, asked):
        used.add(get_ident())
        for _ in range(5000 * (len(used) < threads)):  # until all have begun
            sleep(0.001)
            if len(used) == threads:
                break
        read(self, asked)

    monkeypatch.setattr(PartReader, "read", slow)

    def program():
        with Mesh(data=1) as mesh, pytest.raises(CheckpointError, match="model-00000.safetensors is damaged"):
            load_checkpoint(tmp_path, tiny.make_engine(mesh), AdamW())

    run_threads(program, 1)
    assert len(used) == threads


def test_an_engine_of_another_dtype_gets_the_values_in_its_own(tmp_path, monkeypatch):
    save(tmp_path / "a", data=2)
    monkeypatch.setattr(load_in_place, "AT_ONCE", 500)  # bytes: a few arrays at a time
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

    run_threads(program, 4)


def test_all_ranks_load_the_checkpoint_that_rank_zero_found(tmp_path, monkeypatch):
    """A run that goes on may save a newer one while others look for the newest."""
    save(tmp_path, data=2)
    first = CheckpointFolder(tmp_path).newest()
    save(tmp_path, data=2)
    found = iter([first])
    monkeypatch.setattr("spmd_engine.checkpoints.read.find_checkpoint", lambda path: next(found, path))
    looked = []
    monkeypatch.setattr(
        "spmd_engine.checkpoints.read.read_manifest",
        lambda path, files: looked.append((path, files.start, files.step)) or read_manifest(path, files),
    )

    def program():
        with Mesh(data=3) as mesh:
            load_checkpoint(tmp_path, tiny.make_engine(mesh))

    run_threads(program, 3)
    assert sorted(looked) == [(first, rank, 3) for rank in range(3)]  # each asks for the sizes of other files
