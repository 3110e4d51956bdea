"""Families that no library computes, or none that is at hand: others' golden weights, under their names."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from spmd_engine import Mesh, run_threads
from spmd_engine.checkpoints.pretrained import open_pretrained
from spmd_engine.engine.model_config import ModelConfig
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.errors import CheckpointError
from spmd_engine.models.names import load_config

FOLDERS = Path(__file__).parents[1] / "golden" / "decoders"
OF_INTERNLM = {
    "embed_tokens": "tok_embeddings", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2", "lm_head": "output",
}  # fmt: skip


def write(folder, config, tensors):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: np.ascontiguousarray(each) for name, each in tensors.items()}, folder / "model.safetensors")
    return folder


def golden(family):
    config = json.loads((FOLDERS / family / "config.json").read_text())
    return config, load_file(FOLDERS / family / "model.safetensors"), np.load(FOLDERS / family / "reference.npz")


def logits_of(folder, tokens, axes):
    def program():
        with Mesh(**axes) as mesh:
            engine, _ = open_pretrained(ModelConfig(str(folder), dtype="float64"), mesh, ParallelConfig(mesh=axes))
            with engine.inference():
                return engine.join_outputs(engine.forward(tokens[engine.batch_span(len(tokens))]))

    return run_threads(program, int(np.prod(list(axes.values()))))[0]


@pytest.mark.parametrize("axes", [{"data": 1}, {"model": 2, "queries": 2}, {"model": 3}], ids=str)
def test_internlm2_has_queries_keys_and_values_of_each_key_head_together(axes, tmp_path):
    config, tensors, reference = golden("llama")
    config |= {"model_type": "internlm2", "bias": True}
    for name in ("attention_bias", "mlp_bias"):
        config.pop(name)
    found = {}
    for name, each in tensors.items():
        for theirs, own in OF_INTERNLM.items():
            name = name.replace(theirs, own)
        if ".self_attn." not in name:
            found[name] = each
    for layer in range(2):
        for kind in ("weight", "bias"):
            module = f"model.layers.{layer}.self_attn"
            q, k, v = (tensors[f"{module}.{each}_proj.{kind}"] for each in "qkv")
            rest = q.shape[1:]
            parts = [q.reshape(2, 3, 4, *rest), k.reshape(2, 1, 4, *rest), v.reshape(2, 1, 4, *rest)]
            found[f"model.layers.{layer}.attention.wqkv.{kind}"] = np.concatenate(parts, axis=1).reshape(-1, *rest)
    folder = write(tmp_path / "internlm2", config, found)
    np.testing.assert_allclose(logits_of(folder, reference["tokens"], axes), reference["logits64"], rtol=0, atol=1e-10)


def test_minicpm_is_a_granite_with_other_words(tmp_path):
    config, tensors, reference = golden("granite")
    config |= {
        "model_type": "minicpm", "scale_emb": config.pop("embedding_multiplier"),
        "scale_depth": config.pop("residual_multiplier") * 2**0.5, "dim_model_base": 12 / config.pop("logits_scaling"),
    }  # fmt: skip
    for layer in range(2):  # the attention's factor is 1 / sqrt(k): the rest goes into the queries
        name = f"model.layers.{layer}.self_attn.q_proj.weight"
        tensors[name] = tensors[name].astype(np.float64) * (0.3 * 2**0.5)
    del config["attention_multiplier"]
    folder = write(tmp_path / "minicpm", config, tensors)
    found = logits_of(folder, reference["tokens"], {"data": 1})
    np.testing.assert_allclose(found, reference["logits64"], rtol=0, atol=1e-10)


def test_exaone_is_a_llama_with_other_names(tmp_path):
    config, tensors, reference = golden("llama")
    tensors = {name: each for name, each in tensors.items() if not name.endswith(".bias")}
    plain = write(tmp_path / "llama", config | {"attention_bias": False}, tensors)
    names = {
        "model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f", "model.layers": "transformer.h",
        "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2", "self_attn.o_proj": "attn.attention.out_proj",
        "self_attn": "attn.attention", "gate_proj": "c_fc_0", "up_proj": "c_fc_1", "down_proj": "c_proj",
    }  # fmt: skip
    found = {}
    for name, each in tensors.items():
        for theirs, own in names.items():
            name = name.replace(theirs, own)
        found[name] = each
    config |= {"model_type": "exaone", "activation_function": "silu", "num_layers": config.pop("num_hidden_layers")}
    config["layer_norm_epsilon"] = config.pop("rms_norm_eps")
    for name in ("attention_bias", "mlp_bias", "hidden_act"):
        del config[name]
    folder = write(tmp_path / "exaone", config, found)
    expected = logits_of(plain, reference["tokens"], {"data": 1})
    np.testing.assert_array_equal(logits_of(folder, reference["tokens"], {"data": 1}), expected)


@pytest.mark.parametrize("names", ["language_model.model.", "model.language_model."])
def test_of_a_model_of_text_and_pictures_the_text_is_read(names, tmp_path):
    config, tensors, reference = golden("gemma3")
    pictures = {"vision_config": {"hidden_size": 8}, "mm_tokens_per_image": 4, "image_token_index": 22}
    tied = config | {"tie_word_embeddings": False}  # what is said outside counts
    outer = {"model_type": "gemma3", "text_config": tied, "tie_word_embeddings": True, **pictures}
    found = {names + name.removeprefix("model."): each for name, each in tensors.items()}
    found["vision_tower.vision_model.post_layernorm.weight"] = np.ones(8, np.float32)
    found["multi_modal_projector.mm_input_projection_weight"] = np.ones((8, 12), np.float32)
    folder = write(tmp_path / "gemma3", outer, found)
    np.testing.assert_allclose(
        logits_of(folder, reference["tokens"], {"model": 2}), reference["logits64"], rtol=0, atol=1e-10
    )
    for values, said in (
        ({"quantization_config": {"bits": 4}}, "quantization_config is"),
        ({"text_config": config | {"model_type": "gemma9"}}, "model_type 'gemma9' is not supported"),
        ({"text_config": None}, "text_config is None"),
    ):
        (folder / "config.json").write_text(json.dumps(outer | values))
        with pytest.raises(CheckpointError, match=said):
            load_config(folder)


def test_what_gemma_3_leaves_unsaid_of_its_text(tmp_path):
    """As in the config of gemma-3-4b-it."""
    scaling = {"factor": 8.0, "rope_type": "linear"}
    text = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": scaling, "sliding_window": 1024,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    shape = load_config(tmp_path)
    assert (shape.vocabulary, shape.heads, shape.key_value_heads, shape.head_width) == (262208, 8, 4, 256)
    assert (shape.tied, shape.context, shape.window) == (True, 131072, 1024) and not shape.has_window(5)
    assert (shape.rotary.scaling, shape.rotary.factor, shape.rotary.theta) == ("linear", 8.0, 1e6)
    assert (shape.window_rotary.scaling, shape.window_rotary.theta) == ("none", 1e4)


@pytest.mark.parametrize(
    ("family", "values", "said"),
    [
        ("mpt", {"attn_config": {"alibi": False}}, "alibi of attn_config is False"),
        ("mpt", {"attn_config": {"qk_ln": True}}, "attn_config: qk_ln is True, which is not supported"),
        ("mpt", {"no_bias": False}, "no_bias is False, which is not supported"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm is"),
        ("granitemoehybrid", {"layer_types": ["mamba", "attention"]}, "layer_types has 'mamba'"),
        ("granitemoehybrid", {"num_local_experts": 4}, "num_local_experts is 4"),
        ("ministral3", {"rope_parameters": None}, "config.json"),
        ("falcon_grouped", {"alibi": True}, "alibi is True, which is not supported"),
        ("gpt_bigcode", {"add_cross_attention": True}, "add_cross_attention is True"),
        ("exaone4", {"layer_types": None, "sliding_window_pattern": "LLG"}, "sliding_window_pattern is 'LLG'"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "alpha": 3.0}}, "alpha of rope_type"),
    ],
    ids=lambda each: each if isinstance(each, str) and " " not in each else "",
)
def test_features_that_are_not_known_here(family, values, said, tmp_path):
    shutil.copytree(FOLDERS / family, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text()) | values
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=said):
        open_pretrained(ModelConfig(str(tmp_path / "model")), Mesh())
