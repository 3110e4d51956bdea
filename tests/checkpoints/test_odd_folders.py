"""Folders that are odd, and right: what lies beside weights, what is said twice; or at odds with themselves."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from spmd_engine import Mesh
from spmd_engine.checkpoints.pretrained import open_pretrained
from spmd_engine.engine.model_config import ModelConfig
from spmd_engine.errors import UsageError
from spmd_engine.models.names import load_config

FOLDERS = Path(__file__).parents[1] / "golden" / "decoders"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def copied(tmp_path):
    def copy(family, **values):
        shutil.copytree(FOLDERS / family, tmp_path / family)
        change(tmp_path / family, **values)
        return tmp_path / family

    return copy


def change(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def logits(folder):
    engine, _ = open_pretrained(ModelConfig(str(folder), dtype="float64"), Mesh())
    with engine.inference():
        return engine.forward(np.load(folder / "reference.npz")["tokens"])


def assert_right(folder):
    np.testing.assert_allclose(logits(folder), np.load(folder / "reference.npz")["logits64"], rtol=0, atol=1e-10)


def test_masks_of_other_dtypes_lie_beside_the_weights_of_old_files(copied):
    """As in Pythia's and GPT-Neo's on the Hub: bytes, and frequencies that programs once stored."""
    folder = copied("gpt_neox")
    tensors = load_file(folder / WEIGHTS)
    for layer in range(2):
        tensors[f"gpt_neox.layers.{layer}.attention.bias"] = np.ones((1, 1, 96, 96), bool)
        tensors[f"gpt_neox.layers.{layer}.attention.masked_bias"] = np.array(-1e9, np.float32)
        tensors[f"gpt_neox.layers.{layer}.attention.rotary_emb.inv_freq"] = np.ones(1, np.float32)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt", "written by": "somebody"})
    assert_right(folder)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, bool, np.int64])
def test_weights_of_whole_numbers_are_refused(copied, dtype):
    folder = copied("llama")
    tensors = load_file(folder / WEIGHTS)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(tensors | {name: np.ones((14, 12), dtype)}, folder / WEIGHTS)
    with pytest.raises(UsageError, match=rf"{name} is of dtype \w+; no weights are read of that"):
        logits(folder)


def test_an_index_that_is_left_over_beside_one_file_is_not_looked_at(copied):
    folder = copied("llama")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}))
    assert_right(folder)


@pytest.mark.parametrize(
    "values",
    [
        {"rope_scaling": None, "torch_dtype": "bfloat16", "dtype": "bfloat16", "somebodys_note": "fine", "head_dim": 4},
        {"rope_theta": 500.0, "pad_token_id": 3, "eos_token_id": [1, 2], "transformers_version": "4.43.0"},
    ],
    ids=["null", "theta twice"],
)
def test_what_is_said_twice_alike_or_does_no_harm(copied, values):
    assert_right(copied("llama", **values))


@pytest.mark.parametrize(
    ("family", "values", "said"),
    [
        ("llama", {"rope_theta": 10000.0}, "rope_theta is 10000.0, but 500.0 in"),
        ("glm", {"partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25, but 0.5 in"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "differ; remove the wrong one"),
        ("llama", {"vocab_size": 24}, r"is \[23, 12\], but the model's configuration says \[24, 12\]"),
        ("llama", {"rope_theta": "big"}, "config.json"),
    ],
    ids=["theta", "part", "scaling", "vocabulary", "text"],
)
def test_what_is_said_twice_otherwise(copied, family, values, said):
    with pytest.raises(UsageError, match=said):
        logits(copied(family, **values))


def test_a_vocabulary_may_be_larger_than_the_tokenizers(copied):
    """Rows that pad it to a round number have numbers that no token has: they are read, and mean nothing."""
    folder = copied("qwen2")
    tensors = load_file(folder / WEIGHTS)
    table = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"model.embed_tokens.weight": np.pad(table, ((0, 9), (0, 0)))}, folder / WEIGHTS)
    change(folder, vocab_size=32)
    assert load_config(folder).vocabulary == 32
    found = logits(folder)
    expected = np.load(folder / "reference.npz")["logits64"]
    np.testing.assert_allclose(found[..., :23], expected, rtol=0, atol=1e-10)
    assert not found[..., 23:].any()


# --- Which file is read


def in_two_files(folder):
    """The weights of a folder in two files with an index; the folder keeps no others."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    files = {name: f"model-{1 + number % 2:05}-of-00002.safetensors" for number, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))
    return folder


def test_weights_beside_those_that_are_read_are_named(copied, caplog):
    folder = in_two_files(copied("llama"))
    logits(folder)
    assert not caplog.messages
    shutil.copy(FOLDERS / "llama" / WEIGHTS, folder)
    assert_right(folder)
    parts = "model-00001-of-00002.safetensors, model-00002-of-00002.safetensors"
    assert caplog.messages == [f"{folder}: weights are read from {WEIGHTS}, not from {parts}, {INDEX}"]


def test_a_tensor_that_an_index_has_twice_is_refused(copied):
    folder = in_two_files(copied("llama"))
    text = (folder / INDEX).read_text()
    name = "model.norm.weight"
    (folder / INDEX).write_text(text.replace('{"weight_map": {', f'{{"weight_map": {{"{name}": "other.safetensors", '))
    with pytest.raises(UsageError, match=rf"{INDEX} cannot be read as JSON: '{name}' occurs twice"):
        logits(folder)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 2\n"
NEITHER = f"there is neither {WEIGHTS} nor {INDEX}"


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (
            "model-00002-of-00003.safetensors",
            f"{NEITHER}, but model-00002-of-00003.safetensors, a part of the weights. ",
        ),
        ("consolidated.safetensors", f"{NEITHER}, but consolidated.safetensors. If it has the model's weights"),
        ("tf_model.h5", f"{NEITHER}, but tf_model.h5, weights of TensorFlow, which are not read"),
        ("flax_model.msgpack", "weights of Flax, which are not read"),
        ("model.gguf", "but model.gguf: name this file itself"),
        ("pytorch_model.bin", "is pickled"),
    ],
)
def test_weights_that_are_not_read_are_named(copied, file, said):
    folder = copied("llama")
    (folder / WEIGHTS).rename(folder / file)
    with pytest.raises(UsageError, match=said) as caught:
        logits(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("file", [WEIGHTS, "config.json"])
def test_a_pointer_of_git_lfs_is_named(copied, file):
    folder = copied("llama")
    (folder / file).write_text(POINTER)
    with pytest.raises(UsageError, match=rf"{file} is a pointer of Git LFS, not the file itself: run 'git lfs pull'"):
        logits(folder)
