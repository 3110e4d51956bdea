"""What ranks write, and that any mesh reads it: each element once, replicas sharing the work."""

import json
import threading
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from spmd_engine import Mesh, run_threads
from spmd_engine.checkpoints import Checkpoint, CheckpointFolder, Save, load_checkpoint, save_checkpoint
from spmd_engine.checkpoints.format import manifest
from spmd_engine.checkpoints.format.blocks import dtype_name
from spmd_engine.checkpoints.format.manifest import Files, Manifest, Section, StoredBlock
from spmd_engine.checkpoints.format.write import HASHES, BlockToWrite, write_files
from spmd_engine.checkpoints.load_in_place import PartOfBlock, PartReader, Wanted, parts_of_rank
from spmd_engine.checkpoints.rewrite import problems
from spmd_engine.checkpoints.save import assign_blocks
from spmd_engine.engine import AdamW
from spmd_engine.errors import CheckpointError
from spmd_engine.sharding.placement import ArrayPlacement, OneEach, Placement
from spmd_engine.sharding.rectangles import Rectangle
from support import saved, tiny
from support.pairwise import in_turn

GOLDEN = Path(__file__).parents[1] / "golden"


def stepped(mesh, steps=2, **options):
    """A small GPT and its optimizer after some steps."""
    engine, optimizer = tiny.make_engine(mesh, **options), AdamW()
    for step in range(steps):
        engine.step(tiny.batch(engine, step))
        optimizer.update(engine, engine.gradients, step=step + 1, rate=0.01)
    return engine, optimizer


def save(folder, axes, steps=2, **options):
    def program():
        with Mesh(**axes) as mesh:
            save_checkpoint(folder, *stepped(mesh, **options), step=steps, fact="x")

    run_threads(program, tiny.ranks_of(axes))


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The folder of what one rank has saved."""
    folder = tmp_path_factory.mktemp("one")
    save(folder, {"data": 1})
    return folder


PLACES = [({"data": 3}, {"zero": 1}), ({"data": 2, "model": 2}, {}), ({"pipe": 2, "shard": 2}, {}), ({"model": 4}, {})]
PLACES.append(({"data": 2, "model": 3}, {"zero": 3, "shares": {"model": (0, 5, 2)}}))
PLACES.append(({"data": 2, "pipe": 2, "model": (2, 1)}, {"zero": 1}))


@in_turn(3, **{"axes, options": PLACES})
def test_any_mesh_saves_the_same_and_loads_what_another_saved(tmp_path, reference, axes, options):
    save(tmp_path, axes, **options)
    for of in (saved.parameters, saved.state):
        ours, theirs = of(tmp_path), of(reference)
        assert sorted(ours) == sorted(theirs)
        for name in theirs:
            np.testing.assert_allclose(ours[name], theirs[name], atol=1e-9, err_msg=name)

    def load():
        with Mesh(**axes) as mesh:
            engine, optimizer = stepped(mesh, steps=0, **options)
            assert load_checkpoint(reference, engine, optimizer) == {"step": 2, "fact": "x"}
            save_checkpoint(tmp_path / "again", engine, optimizer, step=2)

    run_threads(load, tiny.ranks_of(axes))
    assert saved.everything(tmp_path / "again") == saved.everything(reference)


def test_replicas_share_the_work_and_nothing_is_written_twice(tmp_path):
    save(tmp_path, {"data": 4})
    folder = CheckpointFolder(tmp_path).newest()
    sizes = [sum(file.stat().st_size for file in folder.glob(f"*-{rank:05d}.safetensors")) for rank in range(4)]
    manifest = Checkpoint(tmp_path).manifest
    arrays = [array for held in manifest.sections.values() for array in held.values()]
    assert sum(array.nbytes for array in arrays) < sum(sizes) < 1.5 * sum(array.nbytes for array in arrays)
    assert max(sizes) < 1.3 * min(sizes)


def test_dealing_covers_each_element_once_by_those_who_hold_it():
    whole, halves = Rectangle.whole((10, 3)), [Rectangle((0, 0), (5, 3)), Rectangle((5, 0), (10, 3))]
    number = Rectangle((), ())
    placement = Placement(
        {
            "replicated": ArrayPlacement.of_rectangles((10, 3), "f4", [(whole,)] * 4),
            "halves": ArrayPlacement.of_rectangles((10, 3), "f8", [(halves[rank // 2],) for rank in range(4)]),
            "number": ArrayPlacement.of_rectangles((), "f8", [(), (number,), (), (number,)]),
            "nothing": ArrayPlacement.of_rectangles((0, 3), "f8", [(Rectangle.whole((0, 3)),)] * 4),
        }
    )
    loads = np.zeros(4, int)
    dealt = assign_blocks(placement, loads, block_bytes=50)
    for name, array in placement.items():
        written = np.zeros(array.shape, int)
        for rank in range(4):
            for piece in dealt[name].of(rank):
                assert any(piece in held for held in array.held[rank])
                written[piece.index] += 1
        assert (written == 1).all()
    assert sum(loads) == 120 + 240 + 8 and max(loads) - min(loads) <= 60


def of_rows(ranks, rows, replicas=1):
    """The placement of arrays of which each rank holds other rows, or as many ranks as there are ``replicas``."""
    start = np.arange(ranks) // replicas * rows
    bounds = np.stack([np.stack([start, 0 * start], 1), np.stack([start + rows, 0 * start + 8], 1)], 1)
    held = OneEach(bounds, np.ones(ranks, bool))
    shape = int(bounds[-1, 1, 0]), 8
    return ArrayPlacement(shape, np.dtype("f4"), held, held.first_holders(shape))


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("block_bytes", [64, 4096])
def test_rectangles_as_numbers_are_dealt_as_other_rectangles(replicas, block_bytes):
    placed = of_rows(12, 5, replicas)
    other = ArrayPlacement.of_rectangles(placed.shape, placed.dtype, list(placed.held))
    assert list(placed.owned) == list(other.owned) and isinstance(placed.owned, OneEach)
    results = []
    for one in (placed, other):
        loads = np.zeros(12, int)
        dealt = assign_blocks(Placement({"w": one, "v": one}), loads, block_bytes=block_bytes)
        results.append(([[dealt[name].of(rank) for name in "wv"] for rank in range(12)], loads.tolist()))
    assert results[0] == results[1]


def files_of(ranks, first=4096, step=0):
    """The files of all ranks, which begin at ``first``, and each further one ``step`` bytes later."""
    numbers = np.arange(ranks)
    return Files(numbers, first + step * numbers, "".join(f"{rank:064x}" for rank in range(ranks)))


def test_a_manifest_lists_the_rectangles_of_ranks_once_for_equal_arrays():
    placed, ranks = of_rows(1024, 5), 1024
    sizes = []
    for count in (1, 40):
        placement = Placement({f"block{number}/w": placed for number in range(count)})
        pieces = assign_blocks(placement, np.zeros(ranks, int))
        arrays = {name: (array.shape, "F32", pieces[name]) for name, array in placement.items()}
        text = Manifest(1, {"model": Section("model", arrays, files_of(ranks, step=1))}).text()
        sizes.append(len(text))
    assert sizes[1] < sizes[0] + 40 * 60
    parsed = saved.manifest(text)
    assert parsed.text() == text
    block = parsed.sections["model"]["block3/w"].blocks[7]
    expected = Rectangle((35, 0), (40, 8)), "model-00007.safetensors", 4096 + 7 + 3 * 5 * 8 * 4, 3
    assert (block.rectangle, block.file, block.offset, block.row) == expected
    assert parsed.file("model-00007.safetensors").size == 4096 + 7 + 40 * (5 * 8 * 4 + 32)


def test_a_rank_makes_only_its_own_blocks_of_a_manifest(monkeypatch):
    placed, ranks, made = of_rows(1024, 5), 1024, []
    pieces = assign_blocks(Placement({"w": placed}), np.zeros(ranks, int))
    stored = Section("model", {name: (placed.shape, "F32", pieces["w"]) for name in "wv"}, files_of(ranks))
    monkeypatch.setattr(
        manifest, "StoredBlock", lambda *fields, **more: made.append(fields) or StoredBlock(*fields, **more)
    )
    wanted = [Wanted(name, stored[name], placed, None) for name in stored]
    found = {array.name: parts for array, parts in parts_of_rank(wanted, 7, range(4, 8))}
    assert len(made) == 2
    for (block, part, checked, place), *rest in found.values():
        assert not rest and checked and block.rectangle == part == Rectangle((35, 0), (40, 8))
        assert block.file == "model-00007.safetensors" and place == (..., slice(0, 5), slice(0, 8))


def test_a_checkpoint_of_the_first_version_is_read():
    checkpoint = Checkpoint(GOLDEN / "runs" / "text")
    assert json.loads((checkpoint.path / "manifest.json").read_text())["version"] == 1
    assert list(problems(checkpoint)) == []


def test_ranks_tell_each_other_one_hash_of_a_file(tmp_path):
    results = []

    def program():
        with Mesh(data=4) as mesh:
            engine, optimizer = stepped(mesh, steps=0, zero=3)
            engine.placement()  # which is exchanged once
            before = mesh.ledger.total()
            save_checkpoint(tmp_path, engine, optimizer, step=1)
            after = mesh.ledger.total()
            results.append((after.calls - before.calls, (after.sent - before.sent) / 3))

    run_threads(program, 4)
    arrays = sum(len(Checkpoint(tmp_path).section(section)) for section in ("model", "optimizer"))
    assert all(calls == 3 and nbytes < 600 + 40 * arrays for calls, nbytes in results)


def test_every_file_is_one_that_the_library_opens(tmp_path, reference):
    folder, arrays = CheckpointFolder(reference).newest(), saved.parameters(reference)
    with safe_open(folder / "model-00000.safetensors", framework="numpy") as file:
        assert set(file.keys()) == {*arrays, HASHES}
        assert file.get_tensor(HASHES).shape == (len(arrays), 32)
        for name in arrays:
            np.testing.assert_array_equal(file.get_tensor(name), arrays[name], strict=True)


@pytest.mark.parametrize("dtype", ["f4", ">f8", "c8", "?", ml_dtypes.bfloat16, ml_dtypes.float8_e5m2], ids=str)
def test_blocks_come_back_as_they_were_also_those_that_are_not_contiguous(tmp_path, dtype):
    x = np.arange(48).reshape(6, 8).astype(dtype)
    views = {"whole": x, "columns": x[:, ::2], "turned": x.T, "back": x[::-1], "number": x[1, 1], "none": x[:0]}
    sources = [BlockToWrite(name, view.shape, view.dtype, lambda view=view: view) for name, view in views.items()]
    (written,) = write_files({tmp_path / "x.safetensors": sources}, {})
    little = np.dtype(dtype).newbyteorder("<")
    offset, _ = written
    for row, (name, view) in enumerate(views.items()):
        block, place = np.empty(view.shape, little), Rectangle.whole(view.shape)
        stored = StoredBlock(place, "x.safetensors", offset, row)
        array = SimpleNamespace(dtype=dtype_name(view.dtype, name))
        digest = sha256(view.astype(little).tobytes()).digest()
        headers = SimpleNamespace(sha256=lambda block, digest=digest: digest)
        with PartReader(tmp_path, headers, compares=False) as reader:
            reader.read(PartOfBlock(name, array, stored, place, True, block))
        np.testing.assert_array_equal(block, view)
        offset += block.nbytes
    if dtype is not ml_dtypes.float8_e5m2:  # which the library's NumPy side does not know
        with safe_open(tmp_path / "x.safetensors", framework="numpy") as file:
            np.testing.assert_array_equal(file.get_slice("turned")[:], x.T)


def test_a_dtype_without_a_name_is_refused(tmp_path):
    x = np.zeros(3, np.complex128)
    with pytest.raises(CheckpointError, match="w is of dtype complex128, which safetensors files do not know"):
        write_files({tmp_path / "x.safetensors": [BlockToWrite("w", x.shape, x.dtype, lambda: x)]}, {})


def test_only_the_blocks_that_are_needed_are_read(tmp_path, monkeypatch):
    def program():
        with Mesh() as mesh:
            engine = tiny.make_engine(mesh)
            monkeypatch.setattr(
                "spmd_engine.checkpoints.save.assign_blocks.__kwdefaults__", {"block_bytes": 100}, raising=False
            )
            save_checkpoint(tmp_path, engine)

    run_threads(program, 1)
    checkpoint, read = Checkpoint(tmp_path), []
    name, array = max(checkpoint.manifest.sections["model"].items(), key=lambda item: len(item[1].blocks))
    assert len(array.blocks) > 4
    really_read = PartReader.read
    monkeypatch.setattr(PartReader, "read", lambda *args: read.append(args) or really_read(*args))
    last = array.blocks[-1].rectangle
    checkpoint[name][last.index]
    assert len(read) == 1


def test_what_is_not_finite_is_not_saved_and_what_was_there_stays(tmp_path):
    save(tmp_path, {"data": 2})
    before = saved.everything(tmp_path)

    def program():
        with Mesh(data=2) as mesh:
            engine, optimizer = stepped(mesh)
            if mesh.rank == 1:
                for kind in optimizer.state["mean"].values():
                    kind[...] = np.nan
            with pytest.raises(CheckpointError, match=r"step 3 could not be saved \(rank 1: .* not finite"):
                save_checkpoint(tmp_path, engine, optimizer, step=3)

    run_threads(program, 2)
    assert saved.everything(tmp_path) == before
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["latest", "step-00000002"]


@in_turn(2, victim=[0, 2], background=[False, True])
def test_a_rank_that_cannot_write_fails_the_save_on_all(tmp_path, monkeypatch, victim, background):
    save(tmp_path, {"data": 3})
    real = write_files

    def write(files, *args):
        if any(f"optimizer-{victim:05d}" in path.name for path in files):
            raise OSError(28, "No space left on device")
        return real(files, *args)

    monkeypatch.setattr("spmd_engine.checkpoints.save.write_files", write)

    def program():
        with Mesh(data=3) as mesh:
            saving = Save(tmp_path, *stepped(mesh), step=5, background=background)
            with pytest.raises(CheckpointError, match=rf"step 5 could not be saved \(rank {victim}: .*No space left"):
                saving.finish()

    run_threads(program, 3)
    assert Checkpoint(tmp_path).metadata["step"] == 2
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["latest", "step-00000002"]


def test_a_background_save_sees_no_later_step(tmp_path, monkeypatch):
    go, real = threading.Event(), write_files
    monkeypatch.setattr("spmd_engine.checkpoints.save.write_files", lambda *args: go.wait(200) and real(*args))

    def program():
        with Mesh(data=2) as mesh:
            engine, optimizer = stepped(mesh)
            saving = Save(tmp_path, engine, optimizer, step=2, background=True)
            assert not saving.is_written
            engine.step(tiny.batch(engine, 7))
            optimizer.update(engine, engine.gradients, step=3, rate=0.5)
            go.set()
            saving.finish()
            monkeypatch.undo()
            save_checkpoint(tmp_path / "straight", *stepped(mesh), step=2)

    run_threads(program, 2)
    assert saved.everything(tmp_path) == saved.everything(tmp_path / "straight")


def test_another_optimizer_s_state_is_refused(tmp_path):
    def program():
        with Mesh() as mesh:
            engine = tiny.make_engine(mesh)
            save_checkpoint(tmp_path, engine, None)
            with pytest.raises(CheckpointError, match="has no mean/.*: it was saved with another optimizer"):
                load_checkpoint(tmp_path, engine, AdamW())

    run_threads(program, 1)


def test_the_manifest_is_json_that_says_where_everything_is(tmp_path):
    save(tmp_path, {"pipe": 2, "data": 2})
    text = (CheckpointFolder(tmp_path).newest() / "manifest.json").read_text()
    said, manifest = json.loads(text), saved.manifest(text)
    assert said["step"] == manifest.step == 2 and said["mesh"] == "pipe=2,data=2" and said["facts"] == {"fact": "x"}
    assert manifest.text() == text
