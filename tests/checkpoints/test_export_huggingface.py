"""What is written in Hugging Face's format is, tensor by tensor, what was read; and the other way round."""

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from spmd_engine import Mesh, run_threads
from spmd_engine.checkpoints import Checkpoint, save_checkpoint
from spmd_engine.checkpoints.hf.export import export_huggingface
from spmd_engine.checkpoints.pretrained import open_pretrained
from spmd_engine.engine.build import build_engine
from spmd_engine.engine.model_config import ModelConfig
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.errors import UsageError
from spmd_engine.formats.safetensors_file import folder_tensors
from spmd_engine.layers import RotaryOptions
from spmd_engine.models import DecoderConfig
from spmd_engine.models.names import load_config
from support.pairwise import in_turn

FOLDERS = Path(__file__).parents[1] / "golden" / "decoders"
FAMILIES = sorted(path.name for path in FOLDERS.iterdir())


def saved_and_exported(source, into, axes, composition=ParallelConfig(), **options):  # noqa: B008 (immutable)
    """From a folder to a checkpoint on a mesh, and from that to a folder."""

    def program():
        with Mesh(**axes) as mesh:
            engine, _ = open_pretrained(ModelConfig(str(source)), mesh, composition)
            save_checkpoint(into / "run", engine)
            export_huggingface(
                Checkpoint(into / "run"), load_config(source), into / "out", mesh.group(), beside=source, **options
            )

    run_threads(program, int(np.prod(list(axes.values()))))
    return into / "out"


@in_turn(6, family=FAMILIES)
def test_there_and_back(family, tmp_path):
    out = saved_and_exported(FOLDERS / family, tmp_path, {"pipe": 2, "model": 2})
    found, expected = load_file(out / "model.safetensors"), load_file(FOLDERS / family / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        # Gemma's norms multiply by 1 + w, which is what is kept here: w comes back as exactly as that has it.
        offset = 1 if family.startswith(("gemma", "nemotron")) and "norm" in name else 0
        np.testing.assert_array_equal(found[name] + np.float32(offset), tensor + np.float32(offset), err_msg=name)
    assert load_config(out) == load_config(FOLDERS / family)


def test_the_tokenizer_of_a_run_is_exported_if_it_is_not_that_of_the_model(tmp_path):
    """Its tokens are those that the run has learnt."""
    source, run = tmp_path / "source", tmp_path / "run"
    shutil.copytree(FOLDERS / "llama", source)
    for folder, text in (source, b'{"version": "model"}'), (run, b'{"version": "run"}'):
        folder.mkdir(exist_ok=True)
        (folder / "tokenizer.json").write_bytes(text)
    (source / "merges.txt").write_text("of the model")
    out = saved_and_exported(source, tmp_path, {"data": 1}, tokenizer=run)
    assert (out / "tokenizer.json").read_bytes() == b'{"version": "run"}' and not (out / "merges.txt").exists()
    (run / "tokenizer.json").unlink()
    shutil.rmtree(out)
    out = saved_and_exported(source, tmp_path, {"data": 1}, tokenizer=run)
    assert (out / "tokenizer.json").read_bytes() == b'{"version": "model"}' and (out / "merges.txt").exists()


def test_several_files_in_half_precision_with_what_is_beside(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(FOLDERS / "llama", source)
    (source / "tokenizer.json").write_text("{}")
    out = saved_and_exported(
        source, tmp_path, {"data": 3}, ParallelConfig(mesh={"data": 3}, zero=3), dtype="bfloat16", largest=1000
    )
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 5
    assert (out / "tokenizer.json").read_text() == "{}"
    found, expected = folder_tensors(out), load_file(source / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        part = found[name].read([[n] for n in tensor.shape], [slice(None)] * tensor.ndim)
        np.testing.assert_array_equal(part, tensor.astype(ml_dtypes.bfloat16))


def test_a_folder_that_holds_weights_is_left_alone(tmp_path):
    saved_and_exported(FOLDERS / "qwen2", tmp_path, {"data": 1})
    with pytest.raises(UsageError, match=r"model.safetensors is there already; export into another folder"):
        export_huggingface(Checkpoint(tmp_path / "run"), load_config(FOLDERS / "qwen2"), tmp_path / "out")
    with pytest.raises(UsageError, match=r"there is no block0/attention/query of shape \[12, 2, 3, 4\]"):
        export_huggingface(Checkpoint(tmp_path / "run"), load_config(FOLDERS / "llama"), tmp_path / "other")
    assert not list((tmp_path / "other").iterdir())


@pytest.mark.parametrize("family", ["qwen3", "phi3"])  # of the latter, queries and keys are rows of one tensor
def test_neighbours_that_are_paired_become_halves(family, tmp_path):
    """The format has no word for the other pairs: what is read again computes the same with halves."""
    shape = DecoderConfig(
        family=family,
        layers=1,
        width=12,
        heads=6,
        key_value_heads=2,
        head_width=6,
        hidden=10,
        vocabulary=13,
        qk_norm=family == "qwen3",
        rotary=RotaryOptions(pairs="neighbours"),
    )
    tokens = np.random.default_rng(0).integers(0, 13, (2, 70))

    def logits(engine):
        with engine.inference():
            return engine.forward(tokens)

    def program():
        with Mesh(data=2) as mesh:  # which keeps parts of the norms of heads, too
            made = build_engine(
                ModelConfig(shape=shape, dtype="float64"), mesh, ParallelConfig(mesh={"data": 2}, zero=3)
            )
            made.load_checkpoint(
                {name: np.random.default_rng(len(name)).standard_normal(made.global_shape(name)) for name in made.names}
            )
            made.after_update()
            save_checkpoint(tmp_path / "run", made)
            export_huggingface(Checkpoint(tmp_path / "run"), shape, tmp_path / "out", mesh.group(), dtype="float64")
            return logits(made)

    expected = run_threads(program, 2)[0]
    engine, _ = open_pretrained(ModelConfig(str(tmp_path / "out"), dtype="float64"), Mesh())
    assert engine.model.name.endswith("out") and load_config(tmp_path / "out").rotary.pairs == "halves"
    np.testing.assert_allclose(logits(engine), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", ".model.safetensors-unfinished"])
def test_a_folder_with_files_of_others_is_left_as_it_is(tmp_path, name):
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(FOLDERS / "qwen2", source)
    (source / "tokenizer.json").write_text("{}")
    out.mkdir()
    for each in ("README.md", name):
        (out / each).write_text("theirs")
    with pytest.raises(UsageError, match=rf"{name} is there already"):
        saved_and_exported(source, tmp_path, {"data": 2})
    assert {each.name: each.read_text() for each in out.iterdir()} == {"README.md": "theirs", name: "theirs"}
    (out / name).unlink()
    saved_and_exported(source, tmp_path, {"data": 2})
    names = {"README.md", "config.json", "model.safetensors", "tokenizer.json"}
    assert {each.name for each in out.iterdir()} == names and (out / "README.md").read_text() == "theirs"
