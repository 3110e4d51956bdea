"""Configurations as real models bring them, with all that programs wrote into them: they are understood."""

import json

import pytest

from spmd_engine.errors import CheckpointError
from spmd_engine.models.decoder import decoder
from spmd_engine.models.hf.read_config import read_config
from spmd_engine.models.names import load_config

LLAMA3 = {
    "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip
SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 99, "max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 2,
    "initializer_range": 0.02, "torch_dtype": "bfloat16", "transformers_version": "4.46.0", "use_cache": True,
}  # fmt: skip
REAL = {
    "hunyuan": SIZES | {
        "model_type": "hunyuan_v1_dense", "add_classification_head": False, "attention_bias": False, "head_dim": 16,
        "attention_dropout": 0.1, "attention_head_dim": 16, "cla_share_factor": 2, "class_num": 0, "hidden_act": "silu",
        "dense_list": [64, 0], "eod_token_id": 3, "mlp_bias": False, "norm_type": "rms", "num_experts": 1,
        "org_vocab_size": 99, "pool_type": "last", "position_embedding_xdrope": False, "pretraining_tp": 1,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "sep_token_id": 4, "tie_word_embeddings": True, "use_cla": False,
        "use_qk_norm": True, "use_rotary_pos_emb": True, "rope_scaling": {
            "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "type": "dynamic"},
    },
    "ernie": SIZES | {
        "model_type": "ernie4_5", "head_dim": 16, "hidden_act": "silu", "pad_token_id": 0, "rms_norm_eps": 1e-5,
        "rope_scaling": None, "rope_theta": 500000.0, "tie_word_embeddings": True, "use_bias": False,
        "use_rmsnorm": True,
    },
    "granite": SIZES | {
        "model_type": "granitemoehybrid", "attention_bias": False, "attention_multiplier": 0.015625,
        "embedding_multiplier": 12, "hidden_act": "silu", "init_method": "mup", "layer_types": ["attention"] * 4,
        "logits_scaling": 10, "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64,
        "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 2, "mamba_proj_bias": False,
        "normalization_function": "rmsnorm", "num_experts_per_tok": 0, "num_local_experts": 0,
        "output_router_logits": False, "position_embedding_type": "rope", "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000000, "router_aux_loss_coef": 0.01,
        "shared_intermediate_size": 128, "tie_word_embeddings": True,
    },
    "falcon": {
        "model_type": "falcon", "alibi": False, "apply_residual_connection_post_layernorm": False, "bias": False,
        "attention_dropout": 0.0, "hidden_dropout": 0.0, "hidden_size": 64, "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-5, "new_decoder_architecture": True, "num_attention_heads": 4, "vocab_size": 99,
        "num_hidden_layers": 4, "num_kv_heads": 2, "parallel_attn": True, "multi_query": True,
    },
    "bloom": {
        "model_type": "bloom", "apply_residual_connection_post_layernorm": False, "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True, "bias_dropout_fusion": True, "hidden_dropout": 0.0, "n_embed": 64,
        "initializer_range": 0.02, "layer_norm_epsilon": 1e-5, "masked_softmax_fusion": True, "n_inner": None,
        "n_layer": 4, "num_attention_heads": 4, "offset_alibi": 100, "pretraining_tp": 1, "seq_length": 2048,
        "skip_bias_add": True, "skip_bias_add_qkv": False, "slow_but_exact": False, "vocab_size": 99,
    },
    "mpt": {
        "model_type": "mpt", "attn_config": {
            "alibi": True, "alibi_bias_max": 8, "attn_impl": "torch", "attn_pdrop": 0, "prefix_lm": False,
            "attn_type": "multihead_attention", "attn_uses_sequence_id": False, "clip_qkv": None, "qk_ln": False,
            "softmax_scale": None},
        "d_model": 64, "emb_pdrop": 0, "embedding_fraction": 1.0, "expansion_ratio": 4, "init_device": "cpu",
        "init_config": {"name": "kaiming_normal_"}, "learned_pos_emb": True, "logit_scale": None, "max_seq_len": 2048,
        "n_heads": 4, "n_layers": 4, "no_bias": True, "norm_type": "low_precision_layernorm", "resid_pdrop": 0,
        "use_cache": False, "vocab_size": 99, "verbose": 0, "tokenizer_name": "EleutherAI/gpt-neox-20b",
    },
    "internlm2": SIZES | {
        "model_type": "internlm2", "attn_implementation": "eager", "bias": False, "hidden_act": "silu",
        "pretraining_tp": 1, "rms_norm_eps": 1e-5, "rope_scaling": {"factor": 2.0, "type": "dynamic"},
        "rope_theta": 1000000, "tie_word_embeddings": False,
    },
    "exaone": {name: each for name, each in SIZES.items() if name != "num_hidden_layers"} | {
        "model_type": "exaone", "activation_function": "silu", "attention_dropout": 0.0, "embed_dropout": 0.0,
        "head_dim": 16, "layer_norm_epsilon": 1e-5, "num_layers": 4, "rope_scaling": LLAMA3, "rope_theta": 1000000,
        "tie_word_embeddings": True,
    },
    "exaone4": SIZES | {
        "model_type": "exaone4", "attention_dropout": 0.0, "head_dim": 16, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"], "rope_scaling": LLAMA3, "rope_theta": 1000000,
        "sliding_window": 4096, "sliding_window_pattern": "LLLG", "tie_word_embeddings": False,
    },
    "minicpm": SIZES | {
        "model_type": "minicpm", "dim_model_base": 16, "hidden_act": "silu", "rms_norm_eps": 1e-5, "scale_depth": 1.4,
        "scale_emb": 12, "num_experts": 0,
    },
}  # fmt: skip
SHAPES = {
    "hunyuan": {"rope_before_norm": True, "qk_norm": True, "head_width": 16},
    "ernie": {"key_value_heads": 2, "tied": True, "bias": False},
    "granite": {"attention_scale": 0.015625, "embedding_scale": 12.0, "logits_divisor": 10.0, "hidden": 128},
    "falcon": {"key_value_heads": 2, "parallel": "two-norms", "hidden": 256},
    "bloom": {"alibi": 8.0, "embedding_norm": True, "width": 64, "context": 2048},
    "mpt": {"alibi": 8.0, "norm": "layer-scale", "hidden": 256},
    "internlm2": {"bias": False, "tied": False, "context": 4096},
    "exaone": {"layers": 4, "tied": True, "epsilon": 1e-5},
    "exaone4": {"window": 4096, "window_layers": "0,1,2", "no_rope_layers": "3", "norm_position": "after"},
    "minicpm": {"embedding_scale": 12.0, "residual_scale": 0.7, "logits_divisor": 4.0, "tied": True},
}


@pytest.mark.parametrize("name", REAL)
def test_they_are_understood(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(REAL[name]))
    shape, unknown = read_config(REAL[name], "config.json")
    assert load_config(tmp_path) == shape
    assert {field: getattr(shape, field) for field in SHAPES[name]} == SHAPES[name]
    assert set(unknown) <= {
        "cla_share_factor", "class_num", "dense_list", "eod_token_id", "org_vocab_size", "pool_type", "tokenizer_name",
    }  # fmt: skip


def test_hunyuans_base_is_stretched(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(REAL["hunyuan"]))
    assert load_config(tmp_path).rotary.theta == pytest.approx(10000 * 1000 ** (16 / 14))


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("hunyuan", {"use_cla": True}, "use_cla is True"),
        ("hunyuan", {"attention_head_dim": 8}, "attention_head_dim is 8"),
        ("ernie", {"use_rmsnorm": False}, "use_rmsnorm is False"),
        ("minicpm", {"sparse_config": {"dense_len": 8192}}, "sparse_config is"),
        ("minicpm", {"num_experts": 8}, "num_experts is 8"),
        ("bloom", {"hidden_size": 32}, "hidden_size is 32"),
    ],
)
def test_what_would_change_them_is_refused(name, values, said, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(REAL[name] | values))
    with pytest.raises(CheckpointError, match=said):
        load_config(tmp_path)


GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_head": 4, "vocab_size": 61, "n_positions": 16}


@pytest.mark.parametrize(
    "config",
    [GPT2 | {"n_embd": 60}, REAL["bloom"] | {"n_embed": 60}, REAL["mpt"] | {"d_model": 60}],
    ids=["gpt2", "bloom", "mpt"],
)
def test_heads_of_an_odd_width_are_read_where_no_positions_are_rotary(config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = load_config(tmp_path)
    assert shape.width // shape.heads == 15 and decoder(shape).parameter_count


def test_heads_of_an_odd_width_are_refused_where_positions_are_rotary(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SIZES | {"model_type": "llama", "head_dim": 15}))
    with pytest.raises(CheckpointError, match=r"config\.json: rotary: 15 numbers of a head of 15 are not pairs"):
        load_config(tmp_path)
