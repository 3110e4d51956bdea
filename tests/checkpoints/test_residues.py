"""What compression has yet to send is saved, rank by rank: who goes on has the bits of a run that was not stopped."""

import logging

import numpy as np

from spmd_engine import Mesh, run_threads
from spmd_engine.checkpoints import Checkpoint, load_checkpoint, save_checkpoint
from spmd_engine.checkpoints.digest import digest_of_checkpoint, digest_of_engine, digest_text
from spmd_engine.engine import AdamW
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
