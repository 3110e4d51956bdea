"""GGUF files, as others write them: all types of tensors, two architectures, and what is damaged."""

from pathlib import Path

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.checkpoints.hf.weights import Pretrained
from spmd_engine.checkpoints.pretrained import open_pretrained
from spmd_engine.engine.model_config import ModelConfig
from spmd_engine.errors import CheckpointError
from spmd_engine.formats.gguf import BY_NAME, GGUF, BlockedTensor, read_gguf
from spmd_engine.models.gguf import config_of_gguf
from support import tiny

FOLDER = Path(__file__).parents[1] / "golden" / "gguf"


@pytest.mark.parametrize("axes", [{"data": 1}, {"model": 3}, {"expert": 2, "pipe": 2}], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3moe", "gpt2"])
def test_logits(name, axes):
    expected = np.load(FOLDER / f"{name}.npz")

    def program():
        with Mesh(**axes) as mesh:
            engine, _ = open_pretrained(ModelConfig(str(FOLDER / f"{name}.gguf"), dtype="float64"), mesh)
            with engine.inference():
                y = engine.forward(expected["tokens"][engine.batch_span(2)])
            return None if y is None else engine.join_outputs(y)

    found = [each for each in run_threads(program, tiny.ranks_of(axes)) if each is not None]
    assert found
    for logits in found:
        np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=1e-10)


def test_all_types_are_there_and_any_slice_is_that_of_the_whole():
    found = Pretrained(FOLDER / "qwen3moe.gguf")
    dtypes = {each.tensor.dtype for each in found.filled.values()} | {
        each.tensor.dtype for each in Pretrained(FOLDER / "llama.gguf").filled.values()
    }
    assert dtypes == {"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"}
    for name, index in {
        "block0/moe/expert1/up": np.s_[3:7, 5:30],
        "block0/attention/output": np.s_[1:2, :, 4:9, 3:],
        "embedding/table": np.s_[17:],
    }.items():
        np.testing.assert_array_equal(found[name][index], found[name][...][index])


@pytest.mark.parametrize("name", BY_NAME)
def test_blocks_are_unpacked_as_others_do_and_any_slice_is_that_of_the_whole(name, tmp_path):
    golden = np.load(FOLDER / "blocks.npz")
    blocks, expected = golden[f"{name} bytes"], golden[name]
    np.testing.assert_array_equal(BY_NAME[name].unpack(blocks), expected)
    (tmp_path / "file").write_bytes(b"head" + blocks.repeat(4, 0).tobytes())
    tensor = BlockedTensor("w", str(tmp_path / "file"), (6, 2 * expected.shape[1]), name, 4)
    whole = expected.repeat(4, 0).reshape(6, 2, -1)
    assert tensor.nbytes == 4 * blocks.nbytes
    found = tensor.read([[6], [2, expected.shape[1]]], np.s_[1:5, 1:, 3:20])
    np.testing.assert_array_equal(found, whole[1:5, 1:, 3:20])


@pytest.mark.parametrize(
    "bits", [range(0, 1500, 37), pytest.param(range(0, 1 << 20), marks=pytest.mark.soak)], ids=["some", "all"]
)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_tensors_must_lie_side_by_side(name, bits, tmp_path):
    """A flipped bit in the sizes, the type or the offset of any tensor is an error: it would be read as another."""
    whole = (FOLDER / f"{name}.gguf").read_bytes()
    places = []
    for tensor in read_gguf(FOLDER / f"{name}.gguf").tensors:
        text = tensor.encode()
        dims = whole.index(len(text).to_bytes(8, "little") + text) + 8 + len(text)
        places += range(dims, dims + 4 + 8 * whole[dims] + 4 + 8)
    spoilt = tmp_path / "spoilt.gguf"
    for bit in bits[: 8 * len(places)]:
        changed = bytearray(whole)
        changed[places[bit // 8 % len(places)]] ^= 1 << bit % 8
        spoilt.write_bytes(changed)
        with pytest.raises(CheckpointError):
            Pretrained(spoilt)
    offset = places[-1] - 7
    spoilt.write_bytes(
        whole[:offset]
        + (int.from_bytes(whole[offset : offset + 8], "little") - 32).to_bytes(8, "little")
        + whole[offset + 8 :]
    )
    with pytest.raises(CheckpointError, match="its header places .* must begin at byte"):
        read_gguf(spoilt)
    spoilt.write_bytes(whole + b"\0" * 32)
    with pytest.raises(CheckpointError, match="its tensors end at byte"):
        read_gguf(spoilt)


def test_facts():
    facts = read_gguf(FOLDER / "llama.gguf").facts
    assert facts["general.architecture"] == "llama" and facts["tokenizer.ggml.tokens"][7] == "t7"


def spoilt(tmp_path, change):
    (tmp_path / "spoilt.gguf").write_bytes(change((FOLDER / "llama.gguf").read_bytes()))
    return tmp_path / "spoilt.gguf"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: c[:-2000], r"is truncated: \S+ should extend to byte"),
        (lambda c: c[:300], "ends within its header"),
        (lambda c: c[:0], "cannot be read as a GGUF file"),
        (lambda c: b"PK" + c, "is no GGUF file"),
        (lambda c: c.replace(b"GGUF\3", b"GGUF\1", 1), "is of version 1 of the format"),
        (lambda c: c.replace(b"llama.block_count", b"llama.blokc_count"), "there is no metadata 'block_count'"),
        (lambda c: c.replace(b"\5" + b"\0" * 7 + b"llama", b"\5" + b"\0" * 7 + b"mamba", 1), "architecture 'mamba'"),
        (lambda c: c.replace(b"attn_output", b"attn_outptu"), "no tensor blk.0.attn_output.weight to fill"),
        (lambda c: c.replace(b"rope.dimension_count", b"rope.dimension_scale"), "llama.rope.dimension_scale is 16, "),
        (lambda c: c[:8] + b"\xff" * 8 + c[16:], "ends within its header|cannot be read"),
        (lambda c: c.replace(b"\2" + b"\0" * 7 + b"t7", b"\xff" * 8 + b"t7"), "ends within its header"),
        (lambda c: c.replace(b"\3" + b"\0" * 7 + b"t39", b"\3" + b"\0" * 6 + b"\1t39"), "ends within its header"),
    ],
    ids=["short", "header", "empty", "zip", "version", "fact", "kind", "name", "unknown", "count", "text", "last text"],
)
def test_damaged_files_are_errors(tmp_path, change, said):
    with pytest.raises(CheckpointError, match=said):
        Pretrained(spoilt(tmp_path, change))


def test_a_pointer_of_git_lfs_is_named(tmp_path):
    (tmp_path / "x.gguf").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12\n")
    with pytest.raises(CheckpointError, match="x.gguf is a pointer of Git LFS, not the file itself"):
        read_gguf(tmp_path / "x.gguf")


def test_values_for_each_block_are_as_many_as_the_blocks():
    file = read_gguf(FOLDER / "llama.gguf")
    blocks, heads = (file.facts[f"llama.{name}"] for name in ("block_count", "attention.head_count"))
    listed = {"llama.attention.head_count": [heads] * blocks}
    expected = config_of_gguf(file, "x")
    assert config_of_gguf(GGUF(file.facts | listed, file.tensors), "x") == expected
    listed["llama.attention.head_count"].append(heads)
    with pytest.raises(CheckpointError, match=rf"head_count has {blocks + 1} values, but there are {blocks} blocks"):
        config_of_gguf(GGUF(file.facts | listed, file.tensors), "x")
