"""Exports: every stored block is read once, by one rank, and comes to its place, however tensors are put together."""

from collections import Counter
from functools import partial
from pathlib import Path
from threading import Lock

import numpy as np
import pytest
from safetensors.numpy import load_file

from spmd_engine import Mesh, run_threads
from spmd_engine.checkpoints import Checkpoint, CheckpointFolder, save_checkpoint
from spmd_engine.checkpoints.hf import export
from spmd_engine.checkpoints.hf.export import TensorToWrite, export_huggingface, write_tensors
from spmd_engine.checkpoints.hf.weights import as_it_is
from spmd_engine.checkpoints.pretrained import open_pretrained
from spmd_engine.checkpoints.read import Sliceable
from spmd_engine.checkpoints.rewrite import export_checkpoint
from spmd_engine.engine.model_config import ModelConfig
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.errors import CheckpointError
from spmd_engine.formats.safetensors_header import header
from spmd_engine.models.names import load_config
from support import tiny
from support.pairwise import in_turn

FOLDERS = Path(__file__).parents[1] / "golden" / "decoders"


def stored_on(folder, source, axes, zero):
    def program():
        with Mesh(**axes) as mesh:
            engine, _ = open_pretrained(ModelConfig(str(source)), mesh, ParallelConfig(mesh=axes, zero=zero))
            save_checkpoint(folder, engine)

    run_threads(program, tiny.ranks_of(axes))


@in_turn(6, axes=[{"data": 1}, {"model": 2}, {"data": 3}], ranks=[1, 3], at_once=[0, 200, 8 << 20])
def test_blocks_are_read_once_and_come_to_their_places(tmp_path, monkeypatch, axes, ranks, at_once):
    """Of tensors that are large and small, of GPT-2's, where three parameters are in one, and with rows turned."""
    monkeypatch.setattr(export, "AT_ONCE", at_once)
    monkeypatch.setattr("spmd_engine.checkpoints.save.assign_blocks.__kwdefaults__", {"block_bytes": 100})
    for family in ("gpt2", "llama"):
        source, folder, out = FOLDERS / family, tmp_path / family, tmp_path / f"{family}-out"
        stored_on(folder, source, axes, zero=3 if "data" in axes else 0)
        checkpoint, read, lock = Checkpoint(folder), Counter(), Lock()
        real = Checkpoint.read_block

        def counted(self, name, array, block, *out, real=real, read=read, lock=lock):
            with lock:
                read[name, block.rectangle] += 1
            return real(self, name, array, block, *out)

        monkeypatch.setattr(Checkpoint, "read_block", counted)

        def program(source=source, folder=folder, out=out):
            with Mesh(data=ranks) as mesh:
                group = mesh.group() if ranks > 1 else None
                export_huggingface(Checkpoint(folder), load_config(source), out, group)
                export_checkpoint(Checkpoint(folder), "model", f"{out}.safetensors", group)

        run_threads(program, ranks)
        monkeypatch.setattr(Checkpoint, "read_block", real)
        arrays = checkpoint.manifest.sections["model"].items()
        blocks = [(name, block.rectangle) for name, array in arrays for block in array.blocks]
        assert len(blocks) > 3 * len(checkpoint) and read == dict.fromkeys(blocks, 2)
        found, expected = load_file(out / "model.safetensors"), load_file(source / "model.safetensors")
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            np.testing.assert_array_equal(found[name], tensor, err_msg=name)
        plain = load_file(f"{out}.safetensors")
        assert plain.keys() == checkpoint.keys()
        for name, array in checkpoint.items():
            np.testing.assert_array_equal(plain[name], array[...], err_msg=name)


def test_work_is_shared_by_bytes(tmp_path):
    stored_on(tmp_path, FOLDERS / "llama", {"data": 1}, zero=0)
    checkpoint = Checkpoint(tmp_path)
    tensors = [
        TensorToWrite(name, "F32", each.shape, {name: as_it_is(each.shape)}) for name, each in checkpoint.items()
    ]
    files = {tmp_path / "x.safetensors": tensors}
    shares = [export._share(checkpoint, files, rank, 4) for rank in range(4)]
    sizes = [[each.nbytes for _, each, _ in share] for share in shares]
    assert [size for own in sizes for size in own] == [each.nbytes for each in tensors]
    total = sum(map(sum, sizes))
    assert all(abs(sum(own) - total / 4) <= max(map(max, sizes)) for own in sizes)


def test_what_one_rank_finds_damaged_is_told_on_all_and_nothing_is_left(tmp_path):
    saved_in, out = tmp_path / "run", tmp_path / "out"
    stored_on(saved_in, FOLDERS / "llama", {"data": 1}, zero=0)
    path = CheckpointFolder(saved_in).newest() / "model-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)

    def program():
        with Mesh(data=3) as mesh:
            for export in (
                lambda: export_checkpoint(Checkpoint(saved_in), "model", out / "plain.safetensors", mesh.group()),
                lambda: export_huggingface(Checkpoint(saved_in), load_config(FOLDERS / "llama"), out, mesh.group()),
            ):
                with pytest.raises(CheckpointError, match="model-00000.safetensors is damaged"):
                    export()
                mesh.group().barrier()

    run_threads(program, 3)
    assert list(out.iterdir()) == []


def test_numbers_and_empty_arrays_are_exported(tmp_path):
    arrays = {"number": np.array(2.5), "none": np.zeros((0, 3), np.float32), "flags": np.array([True, False, True])}
    save = {name: Sliceable(each.shape, each.dtype, each.__getitem__) for name, each in arrays.items()}
    tensors = [
        TensorToWrite(name, dtype, arrays[name].shape, {name: as_it_is(arrays[name].shape)})
        for name, dtype in (("flags", "BOOL"), ("number", "F64"), ("none", "F32"))
    ]
    write_tensors(save, {tmp_path / "x.safetensors": tensors}, None, partial(header, facts={}))
    found = load_file(tmp_path / "x.safetensors")
    for name, each in arrays.items():
        np.testing.assert_array_equal(found[name], each, strict=True)
