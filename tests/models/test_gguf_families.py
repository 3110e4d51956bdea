"""GGUF files of many architectures, as llama.cpp's own converter writes them: logits, and what is refused."""

from pathlib import Path

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.checkpoints.hf.weights import Pretrained
from spmd_engine.checkpoints.pretrained import open_pretrained
from spmd_engine.engine.model_config import ModelConfig
from spmd_engine.errors import CheckpointError
from spmd_engine.formats.gguf import GGUF, read_gguf
from spmd_engine.models.gguf import ARCHITECTURES, config_of_gguf
from support import tiny

FOLDER = Path(__file__).parents[1] / "golden" / "gguf_families"
FAMILIES = sorted(path.stem for path in FOLDER.glob("*.npz"))
#: Of those whose files have 32 bits of what has more in the model: a magnitude, a scaled base, the divisors of pairs.
ROUNDED = {"phi3": 1e-6, "hunyuan-dense": 1e-6, "llama_short": 5e-5}


def file_of(name):
    """The file, or one of several."""
    return [*sorted(FOLDER.glob(f"{name}-0*.gguf"), reverse=True), FOLDER / f"{name}.gguf"][0]


def logits_of(name, axes):
    expected = np.load(FOLDER / f"{name}.npz")

    def program():
        with Mesh(**axes) as mesh:
            engine, _ = open_pretrained(ModelConfig(str(file_of(name)), dtype="float64"), mesh)
            with engine.inference():
                y = engine.forward(expected["tokens"])
            return None if y is None else engine.join_outputs(y)

    found = [each for each in run_threads(program, tiny.ranks_of(axes)) if each is not None]
    assert found
    return found, expected["logits"]


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_the_model_that_was_converted(name):
    found, expected = logits_of(name, {"model": 2})
    for logits in found:
        np.testing.assert_allclose(logits[:, -8:], expected, rtol=0, atol=ROUNDED.get(name, 1e-10))


def test_every_architecture_has_a_file():
    found = {read_gguf(file_of(name)).facts["general.architecture"] for name in FAMILIES}
    assert found | {"gpt2", "qwen3", "qwen3moe"} == set(ARCHITECTURES)


def shape_with(name, **changed):
    """Of the file, with other facts, ``__`` for each full stop in their names; None: without that one."""
    file = read_gguf(file_of(name))
    kind = file.facts["general.architecture"]
    facts = file.facts | {f"{kind}.{each.replace('__', '.')}": value for each, value in changed.items()}
    return config_of_gguf(GGUF({each: value for each, value in facts.items() if value is not None}, file.tensors), "x")


@pytest.mark.parametrize(
    ("name", "changed", "said"),
    [
        ("gemma2", {"attention__causal": False}, "attention.causal is False"),
        ("gemma2", {"attention__sliding_window_pattern": [True]}, "has 1 values, but there are 2 blocks"),
        ("gemma2", {"attention__value_length": 8}, "attention.value_length is 8"),
        ("starcoder2", {"attention__sliding_window": 9}, "starcoder2.attention.sliding_window is 9"),
        ("olmo2", {"final_logit_softcapping": 30.0}, "olmo2.final_logit_softcapping is 30.0"),
        ("olmo", {"attention__clamp_kqv": 8.0}, "olmo.attention.clamp_kqv is 8.0"),
        ("granite", {"logit_scale": None}, "there is no metadata 'logit_scale'"),
        ("granite", {"rope__scaling__finetuned": False}, "rope.scaling.finetuned is False"),
        ("granite", {"expert_count": 4}, "granite.expert_count is 4"),
        ("granitemoe", {"expert_weights_norm": False}, "expert_weights_norm is False"),
        ("granitemoe", {"expert_gating_func": 2}, "granitemoe.expert_gating_func is 2"),
        ("qwen2moe", {"expert_shared_feed_forward_length": 9}, "expert_shared_feed_forward_length is 9"),
        ("gemma2", {"attn_logit_softcapping": None}, "there is no metadata 'attn_logit_softcapping'"),
        ("phi3", {"rope__scaling__original_context_length": None}, "there is no metadata 'rope.scaling.original_"),
        ("minicpm", {"residual_scale": None}, "there is no metadata 'residual_scale'"),
        ("mixtral", {"rope__dimension_count": 1}, "rope.dimension_count is 1"),
        ("falcon", {"rope__dimension_count": 3}, "are not pairs"),
        ("qwen2_yarn", {"rope__scaling__type": "su"}, "rope.scaling.type 'su' is not supported"),
        ("qwen2_yarn", {"rope__scaling__yarn_ext_factor": 0.5}, "yarn_ext_factor is 0.5"),
        ("qwen2_yarn", {"rope__scaling__attn_factor": 0.5}, "qwen2.rope.scaling.attn_factor is 0.5"),
        ("llama_short", {"rope__scaling__factor": 2.0}, "rope.scaling.factor is 2.0"),
        ("mpt", {"attention__max_alibi_bias": 0.0}, "attention.max_alibi_bias is 0"),
        ("exaone4", {"attention__head_count_kv": [2, 1]}, r"attention.head_count_kv is \[2, 1\]"),
        ("arcee", {"rope__dimension_sections": [1, 1, 0, 0]}, "arcee.rope.dimension_sections is"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_refused_by_name(name, changed, said):
    with pytest.raises(CheckpointError, match=said):
        shape_with(name, **changed)


def test_facts_that_files_say_in_several_ways():
    assert shape_with("exaone4", attention__head_count_kv=[2, 2]) == shape_with("exaone4")
    assert shape_with("olmo2", rope__scale_linear=2.0).rotary.factor == 2
    pattern = shape_with("gemma2", attention__sliding_window_pattern=[False, True])
    assert (
        pattern.window_layers == "1" and shape_with("gemma2", attention__sliding_window_pattern=2).window_layers == "0"
    )
    assert shape_with("gemma2", attention__sliding_window=None).window == 4096
    assert shape_with("phi3", attention__sliding_window=0).window is None
    assert shape_with("phi3").context == 80  # further, pairs are divided by other numbers


def test_a_model_in_several_files_is_read_by_any_of_them(tmp_path):
    parts = [path.name for path in sorted(FOLDER.glob("arcee-*.gguf"))]
    for part in parts:
        (tmp_path / part).write_bytes((FOLDER / part).read_bytes())
    shapes = [Pretrained(tmp_path / part).shape for part in parts]
    assert len(parts) == 3 and shapes[0] == shapes[1] == shapes[2]
    (tmp_path / "arcee.gguf").write_bytes((tmp_path / parts[0]).read_bytes())
    with pytest.raises(CheckpointError, match="is one of 3 files of a model; call them NAME-00001-of-00003.gguf"):
        Pretrained(tmp_path / "arcee.gguf")
    third = (tmp_path / parts[2]).read_bytes()
    (tmp_path / parts[2]).write_bytes((tmp_path / parts[1]).read_bytes())
    with pytest.raises(CheckpointError, match="file 3 of 3 says that it is another one"):
        Pretrained(tmp_path / parts[0])
    (tmp_path / parts[2]).write_bytes(third.replace(b"blk.1.attn_output.bias", b"blk.0.attn_output.bias"))
    with pytest.raises(CheckpointError, match="tensors of 31"):
        Pretrained(tmp_path / parts[0])
    (tmp_path / parts[1]).unlink()
    with pytest.raises(CheckpointError, match=f"is one of 3 files of a model, of which {parts[1]} is not there"):
        Pretrained(tmp_path / parts[2])
