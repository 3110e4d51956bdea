"""A digest is of the arrays and not of how they are cut; what differs is found to within a chunk."""

import numpy as np
import pytest
from safetensors.numpy import load_file

from spmd_engine import Mesh, run_threads
from spmd_engine.checkpoints import Checkpoint, load_checkpoint, save_checkpoint
from spmd_engine.checkpoints import digest as digests
from spmd_engine.checkpoints.digest import differences, digest_of_checkpoint, digest_of_engine, digest_text
from spmd_engine.checkpoints.rewrite import export_checkpoint, reshard_checkpoint
from spmd_engine.engine import AdamW
from spmd_engine.sharding.rectangles import Rectangle
from support import saved, tiny

MESHES = [({"data": 3}, {"zero": 3}), ({"model": 2, "data": 2}, {"zero": 1}), ({"pipe": 2}, {}), ({"model": 8}, {})]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The folder of a run that was trained a little on one rank."""
    folder = tmp_path_factory.mktemp("one")
    with Mesh() as mesh:
        engine, optimizer = tiny.make_engine(mesh), AdamW()
        engine.step(tiny.batch(engine, 0))
        optimizer.update(engine, engine.gradients, step=1, rate=0.1)
        save_checkpoint(folder, engine, optimizer, step=1)
    return folder


@pytest.mark.parametrize(("axes", "options"), MESHES, ids=str)
def test_every_mesh_has_the_same_digest_and_a_flipped_bit_another(reference, axes, options):
    expected = digest_of_checkpoint(Checkpoint(reference))

    def program():
        with Mesh(**axes) as mesh:
            engine, optimizer = tiny.make_engine(mesh, **options), AdamW()
            load_checkpoint(reference, engine, optimizer)
            found = digest_of_engine(engine, optimizer)
            assert digest_text(found) == digest_text(expected) and differences(found, expected) == []
            name = "block1/mlp/w1"
            index = engine.index(name)
            if index is not None and all(side.start == 0 < side.stop for side in index):
                engine.parameters[name].reshape(-1)[:1].view(np.uint64)[...] ^= np.uint64(1 << 63)
            return differences(digest_of_engine(engine, optimizer), expected)

    for found in run_threads(program, tiny.ranks_of(axes)):
        assert len(found) == 1 and found[0].startswith("model/block1/mlp/w1: rows 0 to ")


def test_chunks_are_of_whole_rows_and_any_cut_gives_the_same_sums(monkeypatch):
    monkeypatch.setattr(digests, "CHUNK", 20)
    x = np.random.default_rng(0).standard_normal((11, 3, 4))
    cuts = [
        [Rectangle.whole(x.shape)],
        [Rectangle((0, 0, 0), (5, 3, 4)), Rectangle((5, 0, 0), (11, 3, 4))],
        [Rectangle((0, 0, 0), (11, 3, 1)), Rectangle((0, 0, 1), (11, 2, 4)), Rectangle((0, 2, 1), (11, 3, 4))],
    ]
    tables = []
    for rectangles in cuts:
        sums = np.zeros(digests.chunks_of(x.shape), np.uint64)
        for each in rectangles:
            digests._add(sums, "x", x[each.index], each, x.shape)
        tables.append(sums)
    assert len(tables[0]) == 11 and all((table == tables[0]).all() for table in tables)
    y = x.copy()
    y[7, 1, 2] = np.nextafter(y[7, 1, 2], 9)
    sums = np.zeros(11, np.uint64)
    digests._add(sums, "x", y, cuts[0][0], x.shape)
    assert np.flatnonzero(sums != tables[0]).tolist() == [7]


def test_what_was_exchanged_is_found():
    x = np.arange(12.0).reshape(4, 3)
    sums = []
    for each in (x, x[::-1], x[:, ::-1]):
        table = np.zeros(1, np.uint64)
        digests._add(table, "x", each, Rectangle.whole(x.shape), x.shape)
        sums.append(int(table[0]))
    assert len(set(sums)) == 3


def test_differences_name_the_rows_of_each_chunk(monkeypatch):
    monkeypatch.setattr(digests, "CHUNK", 6)  # two rows
    one, other = (
        {"x": digests.ArrayDigest((5, 3), "F32", np.array(sums, np.uint64))} for sums in ([1, 2, 3], [1, 4, 5])
    )
    assert differences(one, other) == ["x: rows 2 to 3 of [5, 3] differ", "x: rows 4 to 4 of [5, 3] differ"]


@pytest.mark.parametrize("ranks", [1, 3])
def test_an_export_is_one_plain_file_whoever_writes_it(tmp_path, reference, ranks):
    def program():
        with Mesh(data=ranks) as mesh:
            group = mesh.group() if ranks > 1 else None
            export_checkpoint(Checkpoint(reference), "model", tmp_path / "plain.safetensors", group)

    run_threads(program, ranks)
    plain, expected = load_file(tmp_path / "plain.safetensors"), saved.parameters(reference)
    assert plain.keys() == expected.keys() == Checkpoint(tmp_path / "plain.safetensors").keys()
    for name in expected:
        np.testing.assert_array_equal(plain[name], expected[name], strict=True)
    assert [path.name for path in tmp_path.iterdir()] == ["plain.safetensors"]


@pytest.mark.parametrize("files", [1, 3])
def test_a_checkpoint_in_other_files_is_the_same(tmp_path, reference, files):
    where = reshard_checkpoint(Checkpoint(reference), tmp_path, files)
    assert len(list(where.glob("model-*.safetensors"))) == files
    assert saved.everything(tmp_path) == saved.everything(reference)
    assert digest_text(digest_of_checkpoint(Checkpoint(tmp_path))) == digest_text(
        digest_of_checkpoint(Checkpoint(reference))
    )
