"""BLOOM."""

from spmd_engine.models.families.family import GPT_CONSTANTS, TIED, Family, Gguf

BLOOM = Family(
    "bloom",
    "scores that fall with the distance of the key (ALiBi), layer norms, one behind the embedding, GELU",
    TIED | {
        "layers": ("n_layer", None), "width": ("hidden_size", None), "heads": ("n_head", None),
        "hidden": ("n_inner", 0), "vocabulary": ("vocab_size", None), "context": ("seq_length", 2048),
        "epsilon": ("layer_norm_epsilon", 1e-5)
    },
    {
        "": "transformer.", "embedding": "word_embeddings", "embedding_norm": "word_embeddings_layernorm",
        "norm": "ln_f", "block": "h.", "attention/norm": "input_layernorm",
        "grouped": "self_attention.query_key_value", "output": "self_attention.dense",
        "mlp/norm": "post_attention_layernorm", "w0": "mlp.dense_h_to_4h", "w1": "mlp.dense_4h_to_h"
    },
    GPT_CONSTANTS | {"bias": True, "output_bias": True, "alibi": 8.0, "embedding_norm": True},
    aliases={"hidden_size": "n_embed", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"},
    required={"apply_residual_connection_post_layernorm": False},
    ignored=("offset_alibi", "bias_dropout_fusion", "masked_softmax_fusion", "skip_bias_add", "skip_bias_add_qkv"),
    rope=None,
    gguf=Gguf("bloom", joins_rows=True)
)  # fmt: skip
