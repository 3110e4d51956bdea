"""GPT-2."""

from spmd_engine.models.families.family import GPT_CONSTANTS, TIED, Family, Gguf, Modules

GPT2_FIELDS = TIED | {
    "layers": ("n_layer", None), "width": ("n_embd", None), "heads": ("n_head", None), "hidden": ("n_inner", 0),
    "vocabulary": ("vocab_size", None), "context": ("n_positions", 1024), "epsilon": ("layer_norm_epsilon", 1e-5)
}  # fmt: skip
GPT2_MODULES: Modules = {
    "": "transformer.", "embedding": "wte", "positions": "wpe", "norm": "ln_f", "block": "h.",
    "attention/norm": "ln_1", "output": "attn.c_proj", "mlp/norm": "ln_2", "w0": "mlp.c_fc", "w1": "mlp.c_proj"
}  # fmt: skip
GPT_NEO_ATTENTION: Modules = {
    "query": "attn.attention.q_proj", "key": "attn.attention.k_proj", "value": "attn.attention.v_proj",
    "output": "attn.attention.out_proj"
}  # fmt: skip

GPT2 = Family(
    "gpt2",
    "learned positions, layer norms, GELU, biases",
    GPT2_FIELDS,
    GPT2_MODULES | {"stacked": "attn.c_attn"},
    architecture="GPT2LMHeadModel",
    implied=GPT_CONSTANTS | {"learned_positions": True, "bias": True, "output_bias": True},
    transposed=True,
    rope=None,
    read=lambda config, shape: shape.changed(key_value_heads=None),
    write=lambda shape: {"n_ctx": shape.context, "activation_function": "gelu_new"},
    gguf=Gguf("gpt2", joins_rows=True),
)
