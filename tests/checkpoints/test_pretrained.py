"""Weights that others wrote: each rank reads its slices, and whatever is wrong with a folder is said by name."""

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from spmd_engine import Mesh, run_threads
from spmd_engine.checkpoints.hf.weights import Pretrained
from spmd_engine.checkpoints.pretrained import load_pretrained, open_pretrained, table
from spmd_engine.comm.world import world
from spmd_engine.engine.build import build_engine
from spmd_engine.engine.model_config import ModelConfig
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.errors import UsageError
from spmd_engine.formats.safetensors_file import read_safetensors
from spmd_engine.formats.tensor import PlainTensor
from spmd_engine.layers import RotaryOptions
from spmd_engine.models.hf.read_config import read_config
from spmd_engine.models.hf.write_config import config_json
from spmd_engine.models.mixture import Mixture
from spmd_engine.models.names import load_config

FOLDERS = Path(__file__).parents[1] / "golden" / "decoders"
WEIGHTS = "model.safetensors"
GATE = "model.layers.0.mlp.gate_proj.weight"


@pytest.fixture
def folder(tmp_path):
    """A copy of the Llama's folder, to be spoilt."""
    made = tmp_path / "llama"
    shutil.copytree(FOLDERS / "llama", made)
    return made


def change(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def rewrite(folder, change):
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def load(folder, axes=None):
    axes = axes or {"data": 1}

    def program():
        with Mesh(**axes) as mesh:
            engine, _ = open_pretrained(ModelConfig(str(folder)), mesh, ParallelConfig(mesh=axes))
            return {name: engine.gather(name) for name in engine.names}

    return run_threads(program, int(np.prod(list(axes.values()))))[0]


# --- what is read


def test_each_rank_reads_what_it_holds_and_no_more(monkeypatch):
    """Along four ranks of a pipeline, of tensors and of ZeRO-3's parts together, that is everything once."""
    read, whole = {}, PlainTensor.read

    def counted(self, split, index):
        part = whole(self, split, index)
        read[world().rank] = read.get(world().rank, 0) + part.size
        return part

    monkeypatch.setattr(PlainTensor, "read", counted)
    folder = FOLDERS / "mixtral"
    total = Pretrained(folder)
    elements = sum(int(np.prod(each.view.shape)) for each in total.filled.values())

    def program(axes, composition):
        with Mesh(**axes) as mesh:
            engine = build_engine(ModelConfig(str(folder)), mesh, ParallelConfig(mesh=axes, **composition))
            load_pretrained(engine, folder)
            return sum(parameter.size for parameter in engine.parameters.values())

    for axes, composition in (
        ({"pipe": 2, "model": 2}, {}),
        ({"data": 4}, {"zero": 3}),
        ({"expert": 2, "model": 2}, {}),
    ):
        read.clear()
        held = run_threads(program, 4, args=(axes, composition))
        assert [read[rank] for rank in range(4)] == held
        assert max(held) < 0.6 * elements
    assert sum(held) < 2 * elements


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float64], ids=lambda each: np.dtype(each).name)
def test_other_dtypes_are_widened(folder, dtype):
    expected = {}

    def narrow(tensors):
        for name, each in tensors.items():
            tensors[name] = each.astype(dtype)
        expected.update(tensors)

    rewrite(folder, narrow)
    found = load(folder, {"model": 2})
    np.testing.assert_array_equal(found["block0/mlp/gate"], expected[GATE].astype(np.float32).T)


def test_several_files(folder):
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    files = {name: f"part-{number % 3}.safetensors" for number, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        save_file({name: each for name, each in tensors.items() if files[name] == file}, folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    found, expected = load(folder, {"model": 3}), load(FOLDERS / "llama")
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name])

    index.write_text(json.dumps({"weight_map": files | {"another": "part-0.safetensors"}}))
    with pytest.raises(UsageError, match=r"part-0.safetensors: another is in the index, but not in the file"):
        load(folder)
    index.write_text(json.dumps({"weight_map": files}))
    (folder / "part-1.safetensors").unlink()
    with pytest.raises(UsageError, match=r"part-1.safetensors is missing: \d+ tensors of the index are in it"):
        load(folder)


def test_a_table_of_what_went_where():
    lines = list(table(found := Pretrained(FOLDERS / "gpt2"), dict.fromkeys(Pretrained(FOLDERS / "gpt2"), "cut")))
    assert f"{len(found)} parameters from" in lines[0]
    (line,) = (line for line in lines if line.startswith("block*/attention/value "))
    said = "block*/attention/value cut x 2 transformer.h.*.attn.c_attn.weight[n=2] F32 d nhk [12, 36]"
    assert line.split() == said.split()


# --- what is refused


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported; there are: arcee, bloom, cohere"),
        ({"rope_parameters": {"rope_type": "mrope", "factor": 2.0}}, "rope_type 'mrope' is not supported"),
        ({"rope_parameters": {"rope_type": "default", "odd": 1}}, "odd of rope_type 'default' is 1, which"),
        ({"rope_parameters": {"rope_theta": 10}, "rope_scaling": {"type": "linear", "factor": 2}}, "differ; remove"),
        ({"sliding_window": 64}, "sliding_window is 64, which is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "but there is no sliding_window"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 values, but there are 2 layers"),
        ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping is 30.0, which"),
        ({"mla_attention_rank": 4}, "mla_attention_rank is 4, which is not supported"),
        ({"hidden_act": "quick_gelu"}, "the activation 'quick_gelu' is not supported; there are: silu"),
        ({"mlp_bias": True}, "no tensor model.layers.0.mlp.gate_proj.bias to fill block0/mlp/gate_bias with"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is"),
        ({"num_key_value_heads": 4}, "6 heads cannot share 4 heads of keys and values"),
        ({"hidden_size": "12"}, "width is '12': it must be a whole number"),
        ({"num_hidden_layers": 3}, "no tensor model.layers.2.input_layernorm.weight to fill block2/attention/norm"),
        ({"num_hidden_layers": 1}, "nothing of a llama is called model.layers.1.input_layernorm.weight"),
        ({"intermediate_size": 15}, r"gate_proj.weight is \[14, 12\], but the model's configuration says \[15, 12\]"),
        ({"attention_bias": False}, "nothing of a llama is called model.layers.0.self_attn.k_proj.bias"),
        ({"tie_word_embeddings": True}, "lm_head.weight is model.embed_tokens.weight, but both are stored and differ"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_a_config_that_is_unknown_here_or_lies(folder, values, said):
    change(folder, **values)
    with pytest.raises(UsageError, match=said):
        load(folder, {"model": 2})


def test_a_field_of_which_nothing_is_known_is_told(folder, caplog):
    change(folder, favourite_colour="green", use_cache=False, transformers_version="9")
    load(folder)
    (told,) = caplog.messages
    assert told.endswith("unknown fields, ignored: favourite_colour")


def test_a_field_that_is_missing(folder):
    path = folder / "config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "vocab_size"}))
    with pytest.raises(UsageError, match=r"config.json: the field 'vocab_size' is missing"):
        load(folder)
    path.write_text("{")
    with pytest.raises(UsageError, match=r"config.json cannot be read as JSON"):
        load(folder)
    path.unlink()
    with pytest.raises(UsageError, match=r"is no model: it has no config.json"):
        load(folder)


def test_values_that_are_not_finite(folder):
    def spoil(tensors):
        tensors[GATE] = tensors[GATE].copy()
        tensors[GATE][3, 5] = np.nan

    rewrite(folder, spoil)
    with pytest.raises(UsageError, match=rf"{GATE} has values that are infinite or not a number"):
        load(folder, {"model": 2})


def test_pickles(folder):
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    with pytest.raises(UsageError, match=r"pytorch_model.bin is pickled: reading it would run the code"):
        load(folder)


def damaged(path, change):
    """A safetensors file with its header changed; ``change`` may return what follows it."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    data = change(header) or data
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda h: h[GATE].update(shape=[15, 12]), rf"the header has \d+ bytes for {GATE}, F32\[15, 12\], which needs"),
        (lambda h: h[GATE].update(dtype="I7"), rf"{GATE} is of dtype I7; weights are read of F64, F32, F16, BF16"),
        (lambda h: h[GATE].update(shape=[-14, -12]), rf"the header says of {GATE} shape \[-14, -12\]"),
        (lambda h: h[GATE].pop("data_offsets") and None, rf"the header says of {GATE} shape .* at None"),
        (lambda h: h[GATE].update(data_offsets=[0, 672]), "not where others end"),
        (lambda h: b"\0" * 100, r"its tensors need \d+ bytes, the file has \d+"),
    ],
    ids=["shape", "dtype", "negative", "no-offsets", "overlap", "cut-short"],
)
def test_a_header_that_lies(folder, change, said):
    damaged(folder / WEIGHTS, change)
    with pytest.raises(UsageError, match=said):
        read_safetensors(folder / WEIGHTS)


@pytest.mark.parametrize(
    "content", [b"", b"PK\3\4" * 100, (1 << 40).to_bytes(8, "little") + b"{}", b"\2" + b"\0" * 7 + b"[]"]
)
def test_no_safetensors_file_at_all(folder, content):
    (folder / WEIGHTS).write_bytes(content)
    with pytest.raises(UsageError, match=r"model.safetensors"):
        read_safetensors(folder / WEIGHTS)


@pytest.mark.parametrize("family", sorted(path.name for path in FOLDERS.iterdir()))
def test_a_config_written_is_the_one_that_was_read(family):
    shape = load_config(FOLDERS / family)
    assert read_config(config_json(shape), "written")[0] == shape


@pytest.mark.parametrize(
    ("family", "values", "said"),
    [
        ("gemma", {"activation": "silu"}, "config.json of a gemma cannot represent activation 'silu'"),
        ("gemma", {"embedding_scale": 1.0}, "config.json of a gemma cannot represent embedding_scale 1.0"),
        ("gemma3", {"norm_position": "before"}, "config.json of a gemma3-text cannot represent norm_position 'before'"),
        ("gemma3", {"attention_scale": 0.0}, "config.json of a gemma3-text cannot represent attention_scale 0.0"),
        ("gemma3", {"attention_scale": 0.3}, r"cannot represent attention_scale 0.3: it must be 1 / sqrt\(integer\)"),
        ("llama", {"qk_norm": True}, "config.json of a llama cannot represent qk_norm True"),
        ("llama", {"bias": True, "output_bias": False}, "config.json of a llama cannot represent output_bias False"),
        ("llama", {"mixture": Mixture()}, "config.json of a llama cannot represent mixture"),
        ("mixtral", {"mixture": None}, "config.json of a mixtral cannot represent mixture None"),
        (
            "llama",
            {"rotary": RotaryOptions(part=0.5)},
            "partial_rotary_factor is 0.5, which is not supported in a llama",
        ),
        ("llama", {"norm_position": "after"}, "config.json of a llama cannot represent norm_position 'after'"),
        ("llama", {"attention_cap": 2.0}, "config.json of a llama cannot represent attention_cap 2.0"),
        ("gpt_neox", {"parallel": "one-norm"}, "config.json of a gpt-neox cannot represent parallel 'one-norm'"),
        ("gpt_neox", {"key_value_heads": 2}, "config.json of a gpt-neox cannot represent key_value_heads 2"),
        ("starcoder2", {"mlp_bias": False}, "config.json of a starcoder2 cannot represent mlp_bias"),
        ("opt", {"epsilon": 1e-6}, "config.json of a opt cannot represent epsilon 1e-06"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_what_a_config_cannot_say_is_not_left_out(family, values, said):
    shape = load_config(FOLDERS / family).changed(**values)
    with pytest.raises(UsageError, match=said):
        config_json(shape)


def test_a_head_s_width_that_follows_from_the_model_s_is_written():
    shape = load_config(FOLDERS / "gemma3").changed(width=40, heads=4, key_value_heads=2, head_width=None)
    config = config_json(shape.changed(attention_scale=None, embedding_scale=40**0.5))
    assert (config["head_dim"], config["query_pre_attn_scalar"]) == (10, 10)
