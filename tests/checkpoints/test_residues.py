"""What compression has yet to send is saved, rank by rank: who goes on has the bits of a run that was not stopped."""

import json
import logging
import shutil
from hashlib import sha256
from itertools import product

import numpy as np

from spmd_engine import Mesh, run_threads
from spmd_engine.checkpoints import Checkpoint, load_checkpoint, save_checkpoint
from spmd_engine.checkpoints.digest import digest_of_checkpoint, digest_of_engine, digest_text
from spmd_engine.checkpoints.format.manifest import Files, Manifest, Pieces, Section
from spmd_engine.checkpoints.rewrite import reshard_checkpoint
from spmd_engine.engine import AdamW
from spmd_engine.sharding.rectangles import Rectangle
from support import saved, tiny
from support.pairwise import in_turn

PLACES = [{"data": 2, "model": 2}, {"pipe": 2, "data": 2}]


def train(axes, compress, folder, begin, end, **options):
    """Steps from ``begin``, where the folder's checkpoint is, to ``end``, and a checkpoint there; the losses."""

    def program():
        with Mesh(**axes) as mesh:
            engine, optimizer, losses = tiny.make_engine(mesh, compress=compress, **options), AdamW(), []
            if begin:
                assert load_checkpoint(folder, engine, optimizer)["step"] == begin
            for step in range(begin, end):
                losses.append(engine.step(tiny.batch(engine, step)))
                optimizer.update(engine, engine.gradients, step=step + 1, rate=0.01)
            save_checkpoint(folder, engine, optimizer, step=end)
            return losses, digest_text(digest_of_engine(engine, optimizer))

    return run_threads(program, tiny.ranks_of(axes))[0]


@in_turn(4, axes=PLACES, compress=["top-k:0.1", "powersgd:2"])
def test_a_run_that_is_compressed_goes_on_with_the_same_bits(tmp_path, axes, compress):
    whole, _ = train(axes, compress, tmp_path / "whole", 0, 2)
    train(axes, compress, tmp_path / "parts", 0, 1)
    rest, digest = train(axes, compress, tmp_path / "parts", 1, 2)
    assert rest == whole[1:]
    assert saved.everything(tmp_path / "parts") == saved.everything(tmp_path / "whole")
    residues = [Checkpoint(tmp_path / name).section("residues") for name in ("parts", "whole")]
    assert residues[0].keys() == residues[1].keys() and len(residues[0]) > 2
    assert len({name[:5] for name in residues[0]}) == tiny.ranks_of(axes)
    for name, array in residues[0].items():
        np.testing.assert_array_equal(array[...], residues[1][name][...])
    assert digest_text(digest_of_checkpoint(Checkpoint(tmp_path / "parts"))) == digest  # of the model alone


def of_version_2(path):
    """Write a manifest as version 2 did: arrays by name, in order, a row for each file, all arrays of all ranks."""
    content = json.loads(path.read_text())
    for section in content["sections"].values():
        ranks, firsts, hashes = section["files"]
        section["files"] = [[*row, hashes[64 * i :][:64]] for i, row in enumerate(zip(ranks, firsts, strict=True))]
        section["arrays"] = {name: facts for name, *facts in section["arrays"]}
        for ranks, arrays in section.pop("own"):
            for rank, (name, shape, dtype, number) in product(ranks, arrays):
                bounds, writers = content["pieces"][number]
                bounds = np.array(bounds).reshape(-1, len(writers)).T.reshape(-1).tolist()
                section["arrays"][f"{rank:05d}/{name}"] = [shape, dtype, len(content["pieces"])]
                content["pieces"].append([bounds, [rank] * len(writers)])
    del content["sha256"]
    content["version"] = 2
    digest = sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    path.write_text(json.dumps(content | {"sha256": digest}))


def test_a_manifest_of_the_second_version_is_read_and_written_anew(tmp_path):
    train({"data": 2}, "powersgd:2", tmp_path / "now", 0, 2)
    shutil.copytree(tmp_path / "now", tmp_path / "then")
    of_version_2(Checkpoint(tmp_path / "then").path / "manifest.json")
    now, then = Checkpoint(tmp_path / "now"), Checkpoint(tmp_path / "then")
    assert saved.everything(tmp_path / "now") == saved.everything(tmp_path / "then")
    for section, arrays in now.manifest.sections.items():
        assert {name: list(array.blocks) for name, array in arrays.items()} == {
            name: list(array.blocks) for name, array in then.manifest.sections[section].items()
        }
    continued = [train({"data": 2}, "powersgd:2", tmp_path / name, 2, 3) for name in ("now", "then")]
    assert continued[0] == continued[1]
    assert json.loads((Checkpoint(tmp_path / "then").path / "manifest.json").read_text())["version"] == 3


def test_residues_of_other_files_are_read(tmp_path, caplog):
    """Those that ``reshard_checkpoint`` has written, in which a rank's arrays are in any file."""
    train({"data": 2}, "powersgd:2", tmp_path / "now", 0, 2)
    reshard_checkpoint(Checkpoint(tmp_path / "now"), tmp_path / "other", 3)
    continued = [train({"data": 2}, "powersgd:2", tmp_path / name, 2, 3) for name in ("now", "other")]
    assert continued[0] == continued[1] and not caplog.text


def test_the_residues_of_many_ranks_are_listed_once():
    ranks = np.arange(1000)
    arrays = {name: ((6, 8), "F32", Pieces(np.array([[[0, 0], [6, 8]]]), np.array([0]))) for name in "wv"}
    files = Files(ranks, 4096 + ranks, "0" * 64 * len(ranks))
    odd = {"w": ((0, 8), "F32", Pieces(np.zeros((0, 2, 2), np.int64), np.zeros(0, np.int64)))}
    section = Section("residues", {}, files, [(range(999), arrays), ([999], odd)])
    text = Manifest(1, {"model": Section("model", {}, files), "residues": section}).text()
    assert len(text) < 2 * 64 * 1000 + 5 * 5 * 1000
    read = saved.manifest(text).sections["residues"]
    assert len(read) == 2 * 999 + 1 and list(read)[-2:] == ["00998/v", "00999/w"] and "00999/v" not in read
    (block,) = read["00007/v"].blocks
    expected = Rectangle((0, 0), (6, 8)), "residues-00007.safetensors", 4103 + 6 * 8 * 4, 1
    assert (block.rectangle, block.file, block.offset, block.row) == expected


def test_on_another_mesh_it_begins_anew_and_that_is_told(tmp_path, caplog):
    train({"data": 2}, "powersgd:2", tmp_path, 0, 1)
    with caplog.at_level(logging.WARNING):
        train({"data": 3}, "powersgd:2", tmp_path, 1, 2)
    assert "--compress start from zero: they were saved on mesh data=2, not on data=3" in caplog.text


def test_with_other_shares_it_begins_anew_and_that_is_told(tmp_path, caplog):
    for step, shares in enumerate([(2, 1), (1, 2)]):
        with caplog.at_level(logging.WARNING):
            train({"data": 2, "model": 2}, "top-k:0.1", tmp_path, step, step + 1, shares={"model": shares})
    told = "on mesh data=2,model=2 with shares model=2:1, not on data=2,model=2 with shares model=1:2"
    assert told in caplog.text


def test_with_another_compression_it_begins_anew_on_all_ranks(tmp_path, caplog):
    train({"data": 2}, "powersgd:2", tmp_path, 0, 1)
    with caplog.at_level(logging.WARNING):
        for step, compress in ((1, "powersgd:1"), (2, "top-k:0.5")):
            train({"data": 2}, compress, tmp_path, step, step + 1)
    assert caplog.text.count("--compress start from zero: --compress has changed") == 2


def test_without_compression_there_is_no_such_section(tmp_path):
    train({"data": 2}, "bfloat16", tmp_path, 0, 1)
    assert list(Checkpoint(tmp_path).manifest.sections) == ["model", "optimizer"]
