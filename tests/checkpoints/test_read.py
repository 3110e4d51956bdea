"""Checkpoints and plain safetensors files as mappings of names to arrays on disk."""

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from spmd_engine import run_threads
from spmd_engine.checkpoints import Checkpoint, load_checkpoint
from spmd_engine.engine import ShardedEngine
from spmd_engine.errors import UsageError


def test_a_checkpoint_file_is_a_mapping_of_slices(tmp_path):
    save_file({"a": np.arange(12.0).reshape(3, 4)}, tmp_path / "x.safetensors")
    checkpoint = Checkpoint(tmp_path / "x.safetensors")
    assert list(checkpoint) == ["a"] and len(checkpoint) == 1 and "a" in checkpoint and "b" not in checkpoint
    assert checkpoint["a"].shape == (3, 4)
    assert checkpoint["a"][1:, :2].tolist() == [[4.0, 5.0], [8.0, 9.0]]
    with pytest.raises(KeyError):
        checkpoint["b"]
    with pytest.raises(UsageError, match="no such checkpoint"):
        Checkpoint(tmp_path / "y.safetensors")


INDICES = [
    *(..., (), 1, -1, slice(1, None), slice(None, None, -2), slice(3, 1), (..., 2), (1, ...), (0, 1, 2)),
    *((slice(None), 1), (slice(0, 2), ..., slice(4, 0, -1)), (slice(1, 1), 2), (slice(None, None, 2), -1, slice(2, 9))),
]


@pytest.mark.parametrize("index", INDICES, ids=str)
@pytest.mark.parametrize("dtype", [np.float64, np.int32, ml_dtypes.bfloat16], ids=lambda dtype: np.dtype(dtype).name)
def test_arrays_on_disk_take_numpys_basic_slicing(tmp_path, index, dtype):
    whole = np.arange(2 * 3 * 5).reshape(2, 3, 5).astype(dtype)
    save_file({"a": whole, "nothing": whole[:0], "number": np.array(2.5)}, tmp_path / "x.safetensors")
    checkpoint = Checkpoint(tmp_path / "x.safetensors")
    np.testing.assert_array_equal(checkpoint["a"][index], whole[index], strict=True)
    for of in (checkpoint["a"].dtype, checkpoint["nothing"][...].dtype, checkpoint["a"][:, 3:].dtype):
        assert of == whole.dtype
    assert checkpoint["nothing"][...].shape == (0, 3, 5) and checkpoint["number"][...] == 2.5


def test_what_is_no_place_in_an_array_on_disk_is_an_index_error(tmp_path):
    save_file({"a": np.zeros((2, 3))}, tmp_path / "x.safetensors")
    array = Checkpoint(tmp_path / "x.safetensors")["a"]
    for index in (2, (0, -4), (0, 0, 0), (..., ...), None, [0, 1], True):
        with pytest.raises(IndexError):
            array[index]


def test_what_no_sharding_names_is_loaded_whole(tmp_path):
    class Model(ShardedEngine):
        shardings = {"weight": "d f/data"}
        backward = forward = None

        def load_checkpoint(self, params):
            self.parameters = {name: self.block(name, params[name]) for name in ("weight", "bias")}

    whole = {"weight": np.arange(12.0).reshape(3, 4), "bias": np.arange(4, dtype=np.float32)}
    save_file(whole, tmp_path / "parameters.safetensors")

    def program():
        engine = Model()
        load_checkpoint(tmp_path, engine)
        for name in whole:
            np.testing.assert_array_equal(engine.parameters[name], whole[name][engine.index(name)], strict=True)

    run_threads(program, 3)


def test_a_checkpoint_is_a_file_or_the_folder_that_was_saved(tmp_path):
    save_file({"a": np.zeros(3)}, tmp_path / "parameters.safetensors")
    assert list(Checkpoint(tmp_path)) == list(Checkpoint(tmp_path / "parameters.safetensors")) == ["a"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="empty: no such checkpoint"):
        Checkpoint(tmp_path / "empty")
