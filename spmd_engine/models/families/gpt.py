"""GPT-2 and its relatives: decoders with layer norms, most of them without gates."""

from typing import Any

from spmd_engine.errors import UsageError
from spmd_engine.layers import RotaryOptions
from spmd_engine.models.families import family
from spmd_engine.models.families.family import Config, Family, Gguf, Modules, Rope, SlidingWindow
from spmd_engine.models.mixture import as_text

# --- GPT-2


GPT2_FIELDS = family.TIED | {
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
    implied=family.GPT_CONSTANTS | {"learned_positions": True, "bias": True, "output_bias": True},
    transposed=True,
    rope=None,
    read=lambda config, shape: shape.changed(key_value_heads=None),
    write=lambda shape: {"n_ctx": shape.context, "activation_function": "gelu_new"},
    gguf=Gguf("gpt2", joins_rows=True),
)


# --- EleutherAI's GPT-Neo, GPT-NeoX (Pythia) and GPT-J


def _read_neo(config: Config, shape: Any) -> Any:
    """The kinds of layers are a list with one item per layer, or [[kinds, repetitions], ...]."""
    kinds = config.get("attention_layers") or []
    groups = config.get("attention_types") or [[["global", "local"], 12]]
    kinds = kinds or [kind for group, times in groups for _ in range(times) for kind in group]
    if len(kinds) != shape.layers or set(kinds) - {"global", "local"}:
        raise UsageError(f"attention_types are {kinds} for {shape.layers} layers; each must be global or local")
    window = config.get("window_size", 256)
    local = [number for number, kind in enumerate(kinds) if kind == "local"]
    if not local:
        return shape
    return shape.changed(window=window, window_layers="" if len(local) == shape.layers else as_text(local))


def _write_neo(shape: Any) -> dict[str, Any]:
    kinds = ["local" if shape.has_window(layer) else "global" for layer in range(shape.layers)]
    types = [[[kind], 1] for kind in kinds]
    return {"attention_layers": kinds, "attention_types": types, "window_size": shape.window or 256}


GPT_NEO = Family(
    "gpt_neo",
    "learned positions, layer norms, windows in `local` layers",
    family.SIZES
    | family.TIED
    | {
        "layers": ("num_layers", None), "heads": ("num_heads", None), "hidden": ("intermediate_size", 0),
        "epsilon": ("layer_norm_epsilon", 1e-5), "activation": ("activation_function", "gelu_new")
    },
    GPT2_MODULES | GPT_NEO_ATTENTION,
    family.GPT_CONSTANTS | {"output_bias": True, "learned_positions": True, "attention_scale": 1.0},
    architecture="GPTNeoForCausalLM",
    also_read=("window", "window_layers"),
    rope=None,
    read=_read_neo,
    write=_write_neo
)  # fmt: skip


def read_parallel(config: Config, shape: Any) -> Any:
    """Read whether attention and perceptron are parallel: with two norms in a GPT-NeoX, with one norm in a StableLM."""
    is_neox = shape.family == "gpt-neox"
    parallel = config.get("use_parallel_residual", is_neox)
    return shape.changed(parallel="two-norms" if is_neox else "one-norm") if parallel else shape


def write_parallel(shape: Any) -> dict[str, Any]:
    """Write the fields that ``read_parallel`` reads. Raises UsageError for other numbers of norms."""
    if shape.parallel not in ("none", "two-norms" if shape.family == "gpt-neox" else "one-norm"):
        raise UsageError(f"config.json of a {shape.family} cannot represent parallel {shape.parallel!r}")
    return {"use_parallel_residual": shape.parallel != "none"}


def _read_neox_gguf(facts: Config, tensors: Any, shape: Any) -> Any:
    """The file does not distinguish GELUs; nearly all models of this family have the exact one."""
    parallel = "two-norms" if facts["use_parallel_residual"] else "none"
    return shape.changed(parallel=parallel, activation="gelu-erf")


GPT_NEOX = Family(
    "gpt_neox",
    "(Pythia) layer norms, rotary positions of a part of each head, attention and perceptron side by side",
    family.SIZES
    | family.same("attention_bias", "bias", "output_bias", default=True)
    | {"activation": ("hidden_act", "gelu")},
    {
        "": "gpt_neox.", "embedding": "embed_in", "norm": "final_layer_norm", "head": ("embed_out", "lm_head"),
        "block": "layers.", "attention/norm": "input_layernorm", "grouped": "attention.query_key_value",
        "output": "attention.dense", "mlp/norm": "post_attention_layernorm", "w0": "mlp.dense_h_to_4h",
        "w1": "mlp.dense_4h_to_h"
    },
    family.GPT_CONSTANTS,
    architecture="GPTNeoXForCausalLM",
    also_read=("parallel",),
    rope=Rope(part=0.25, theta_field="rotary_emb_base", part_field="rotary_pct"),
    read=read_parallel,
    write=write_parallel,
    gguf=Gguf(
        "gptneox",
        joins_rows=True,
        read=_read_neox_gguf,
        write=lambda shape: {"use_parallel_residual": shape.parallel == "two-norms"},
    )
)  # fmt: skip


def _rotary_gptj(config: Config, shape: Any) -> RotaryOptions:
    rotated, width = config.get("rotary_dim", 64), shape.width // shape.heads
    return RotaryOptions(pairs="neighbours", part=1.0 if rotated is None else rotated / width)


GPTJ = Family(
    "gptj",
    "one layer norm before attention and perceptron, side by side; neighbours of a part of each head rotate, logits "
    "have a bias",
    GPT2_FIELDS | {
        "context": ("n_positions", 2048), "tied": ("tie_word_embeddings", False),
        "activation": ("activation_function", "gelu_new")
    },
    {
        "": "transformer.", "embedding": "wte", "norm": "ln_f", "block": "h.", "block/norm": "ln_1",
        "query": "attn.q_proj", "key": "attn.k_proj", "value": "attn.v_proj", "output": "attn.out_proj",
        "w0": "mlp.fc_in", "w1": "mlp.fc_out"
    },
    family.GPT_CONSTANTS | {"parallel": "one-norm", "head_bias": True},
    architecture="GPTJForCausalLM",
    required={"rotary": True},
    rope=Rope(part=1.0, pairs="neighbours", described=False, read=_rotary_gptj),
    write=lambda shape: {"rotary_dim": int(shape.width_of_heads * shape.rotary.part)}
)  # fmt: skip


# --- SantaCoder, StarCoder (``gpt_bigcode``) and StarCoder 2


def _read_bigcode(config: Config, shape: Any) -> Any:
    heads = 1 if config.get("multi_query", True) else shape.heads
    family.check_required("num_key_value_heads", config.get("num_key_value_heads", heads), heads)
    return shape.changed(key_value_heads=heads)


def _write_bigcode(shape: Any) -> dict[str, Any]:
    heads = shape.key_value_heads or shape.heads
    if heads not in (1, shape.heads):
        raise UsageError(f"config.json of a gpt-bigcode cannot represent key_value_heads {heads}: give 1, or heads")
    return {"multi_query": heads == 1}


GPT_BIGCODE = Family(
    "gpt_bigcode",
    "a GPT-2 with one key head for all queries (SantaCoder, StarCoder)",
    GPT2_FIELDS | {"activation": ("activation_function", "gelu_pytorch_tanh")},
    GPT2_MODULES | {"grouped": "attn.c_attn"},
    family.GPT_CONSTANTS | {"learned_positions": True, "bias": True, "output_bias": True},
    architecture="GPTBigCodeForCausalLM",
    also_read=("key_value_heads",),
    required={"add_cross_attention": False},
    rope=None,
    read=_read_bigcode,
    write=_write_bigcode,
    gguf=Gguf("starcoder", joins_rows=True),
)
STARCODER2 = Family(
    "starcoder2",
    "layer norms, rotary positions, perceptrons without a gate, biases, a window",
    family.SIZES
    | family.TIED
    | family.GROUPED
    | family.same("use_bias", "bias", "output_bias", "mlp_bias", default=True)
    | family.defaults(key_value_heads=2, context=4096)
    | {"epsilon": ("norm_epsilon", 1e-5), "activation": ("hidden_act", "gelu_pytorch_tanh")},
    family.LLAMA_ATTENTION | {"w0": "mlp.c_fc", "w1": "mlp.c_proj"},
    family.GPT_CONSTANTS,
    required={"norm_type": "layer_norm"},
    ignored=("activation_function", "layer_norm_epsilon"),  # fields of older programs
    rope=Rope(),
    windows=SlidingWindow(listed=False),
    gguf=Gguf("starcoder2"),
)


# --- BLOOM


BLOOM = Family(
    "bloom",
    "scores that fall with the distance of the key (ALiBi), layer norms, one behind the embedding, GELU",
    family.TIED | {
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
    family.GPT_CONSTANTS | {"bias": True, "output_bias": True, "alibi": 8.0, "embedding_norm": True},
    aliases={"hidden_size": "n_embed", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"},
    required={"apply_residual_connection_post_layernorm": False},
    ignored=("offset_alibi", "bias_dropout_fusion", "masked_softmax_fusion", "skip_bias_add", "skip_bias_add_qkv"),
    rope=None,
    gguf=Gguf("bloom", joins_rows=True)
)  # fmt: skip


# --- Meta's OPT


def _read_opt(config: Config, shape: Any) -> Any:
    family.check_required("word_embed_proj_dim", config.get("word_embed_proj_dim") or shape.width, shape.width)
    return shape


OPT = Family(
    "opt",
    "learned positions, layer norms, ReLU; `do_layer_norm_before`",
    family.without(family.SIZES, "epsilon") | family.TIED
    | {"hidden": ("ffn_dim", None), "activation": ("activation_function", "relu")},
    family.ATTENTION | {
        "": "model.", "embedding": "decoder.embed_tokens", "positions": "decoder.embed_positions",
        "norm": "decoder.final_layer_norm", "block": "decoder.layers.", "attention/norm": "self_attn_layer_norm",
        "output": "self_attn.out_proj", "mlp/norm": "final_layer_norm", "w0": "fc1", "w1": "fc2"
    },
    family.GPT_CONSTANTS
    | {"bias": True, "output_bias": True, "learned_positions": True, "unused_positions": 2, "epsilon": 1e-5},
    architecture="OPTForCausalLM",
    rope=None,
    read=_read_opt,
    write=lambda shape: {"do_layer_norm_before": True, "word_embed_proj_dim": shape.width}
)  # fmt: skip


# --- MosaicML's MPT


#: Fields of ``attn_config`` that are read below or change nothing up to the context.
_MPT_FIELDS = ("alibi", "alibi_bias_max", "softmax_scale", "attn_pdrop", "attn_impl", "attn_uses_sequence_id")


def _read_mpt(config: Config, shape: Any) -> Any:
    from spmd_engine.models.hf.read_config import HARMLESS

    attention = config.get("attn_config") or {}
    for name, value in attention.items():
        if value and name not in HARMLESS.union(_MPT_FIELDS) and (name, value) != ("attn_type", "multihead_attention"):
            raise UsageError(f"attn_config: {name} is {value!r}, which is not supported")
    family.check_required("alibi of attn_config", attention.get("alibi", True), True)
    norm = config.get("norm_type") or "layernorm"
    if norm not in ("layernorm", "low_precision_layernorm"):
        raise UsageError(f"norm_type is {norm!r}, which is not supported")
    scale = attention.get("softmax_scale")
    return shape.changed(
        hidden=config.get("expansion_ratio", 4) * shape.width,
        alibi=float(attention.get("alibi_bias_max", 8)),
        attention_scale=None if scale is None else float(scale),
    )


def _write_mpt(shape: Any) -> dict[str, Any]:
    ratio, rest = divmod(shape.hidden, shape.width)
    if rest or shape.alibi is None:
        raise UsageError(
            "config.json of an mpt cannot represent a hidden width that is no multiple of the width, or "
            f"no ALiBi: hidden {shape.hidden}, width {shape.width}, alibi {shape.alibi}"
        )
    attention = {"alibi": True, "alibi_bias_max": int(shape.alibi), "softmax_scale": shape.attention_scale}
    return {"expansion_ratio": ratio, "no_bias": True, "attn_config": attention}


def _read_mpt_gguf(facts: Config, tensors: Any, shape: Any) -> Any:
    if not facts["attention.max_alibi_bias"]:
        raise UsageError("attention.max_alibi_bias is 0: learned positions of an MPT are not supported")
    return shape


MPT = Family(
    "mpt",
    "scores that fall with the distance of the key (ALiBi), layer norms that have a scale alone, no biases; its "
    "`alibi_bias_max` counts, where transformers takes 8 for it",
    family.TIED | {
        "layers": ("n_layers", None), "width": ("d_model", None), "heads": ("n_heads", None),
        "vocabulary": ("vocab_size", None), "context": ("max_seq_len", 2048), "epsilon": ("layer_norm_epsilon", 1e-5)
    },
    {
        "": "transformer.", "embedding": "wte", "norm": "norm_f", "block": "blocks.", "attention/norm": "norm_1",
        "stacked": "attn.Wqkv", "output": "attn.out_proj", "mlp/norm": "norm_2", "w0": "ffn.up_proj",
        "w1": "ffn.down_proj"
    },
    {"norm": "layer-scale", "gated": False, "activation": "gelu-erf", "alibi": 8.0},
    also_read=("hidden", "alibi", "attention_scale"),
    required={"no_bias": True, "logit_scale": None, "embedding_fraction": 1.0},
    ignored=("learned_pos_emb", "init_config"),  # with ALiBi there are no learned positions
    rope=None,
    read=_read_mpt,
    write=_write_mpt,
    gguf=Gguf("mpt", joins_rows=True, values={"alibi": "attention.max_alibi_bias"}, read=_read_mpt_gguf)
)  # fmt: skip


# --- Falcon


_FALCON_NORMS = {"two-norms": 2, "one-norm": 1}


def _read_falcon(config: Config, shape: Any) -> Any:
    """One key head for all queries (Falcon 7B), or several in the new architecture, in which attention and perceptron
    may have a norm each."""
    parallel, multi_query = config.get("parallel_attn", True), config.get("multi_query", True)
    heads, norms = config.get("num_kv_heads"), config.get("num_ln_in_parallel_attn")
    new = bool(config.get("new_decoder_architecture"))
    two_norms = new and (norms or 2) == 2
    if not two_norms:
        family.check_required("parallel_attn", parallel, True)
    if not new:
        family.check_required("multi_query", multi_query, True)
        return shape.changed(key_value_heads=1)
    return shape.changed(key_value_heads=heads or shape.heads, parallel="two-norms" if two_norms else "one-norm")


def _write_falcon(shape: Any) -> dict[str, Any]:
    if shape.parallel not in _FALCON_NORMS:
        raise UsageError(f"config.json of a falcon cannot represent parallel {shape.parallel!r}")
    heads = shape.key_value_heads or shape.heads
    new = heads > 1 or shape.parallel == "two-norms"
    written = {"alibi": False, "new_decoder_architecture": new, "multi_query": True, "parallel_attn": True}
    return written | ({"num_kv_heads": heads, "num_ln_in_parallel_attn": _FALCON_NORMS[shape.parallel]} if new else {})


FALCON = Family(
    "falcon",
    "one layer norm before attention and perceptron, side by side, and one key head for all queries (7B), or several "
    "(`new_decoder_architecture`: 40B, 11B); its `alibi`, rounded to bfloat16, is refused",
    family.SIZES | family.TIED | family.same("bias", "bias", "output_bias", "mlp_bias") | {
        "hidden": ("ffn_hidden_size", 0), "epsilon": ("layer_norm_epsilon", 1e-5), "activation": ("activation", "gelu")
    },
    {
        "": "transformer.", "embedding": "word_embeddings", "norm": "ln_f", "block": "h.",
        "block/norm": "input_layernorm", "attention/norm": "ln_attn", "mlp/norm": "ln_mlp",
        "grouped": "self_attention.query_key_value", "output": "self_attention.dense", "w0": "mlp.dense_h_to_4h",
        "w1": "mlp.dense_4h_to_h"
    },
    {"norm": "layer", "gated": False, "parallel": "one-norm", "activation": "gelu-erf"},
    also_read=("key_value_heads", "parallel"),
    required={"alibi": False, "apply_residual_connection_post_layernorm": False},
    rope=Rope(),
    read=_read_falcon,
    write=_write_falcon,
    gguf=Gguf(
        "falcon",
        modules={"attention/norm": "attn_norm_2", "mlp/norm": "attn_norm"},
        joins_rows=True,
        read=lambda facts, tensors, shape: (
            shape.changed(parallel="two-norms") if "blk.0.attn_norm_2.weight" in tensors else shape
        ),
    )
)  # fmt: skip


# --- StableLM


def _read_stablelm_gguf(facts: Config, tensors: Any, shape: Any) -> Any:
    """Parallel branches are recognized by the norms: some files do not have ``use_parallel_residual``."""
    return shape if "blk.0.ffn_norm.weight" in tensors else shape.changed(parallel="one-norm")


STABLELM = Family(
    "stablelm",
    "layer norms, rotary positions of a part of each head; `use_parallel_residual`: attention and perceptron behind "
    "one norm",
    family.SIZES | family.SILU | family.GROUPED | family.same("use_qkv_bias", "bias") | family.defaults(context=4096),
    family.LLAMA_MODULES | {"block/norm": "input_layernorm"},
    {"norm": "layer"},
    architecture="StableLmForCausalLM",
    also_read=("parallel",),
    rope=Rope(part=0.25),
    read=read_parallel,
    write=write_parallel,
    gguf=Gguf(
        "stablelm",
        read=_read_stablelm_gguf,
        write=lambda shape: {"use_parallel_residual": shape.parallel == "one-norm"},
    ),
)


# --- Phi 1, 1.5 and 2, and Phi-3


def _write_phi3(shape: Any) -> dict[str, Any]:
    divided = shape.rotary.scaling == "divided"
    return {"original_max_position_embeddings": shape.rotary.original_context} if divided else {}


PHI = Family(
    "phi",
    "layer norms, rotary positions of a part of each head, attention and perceptron behind one norm; biases",
    family.SIZES | family.GROUPED | {"activation": ("hidden_act", "gelu_new")},
    family.ATTENTION | {
        "": "model.", "embedding": "embed_tokens", "norm": "final_layernorm", "block": "layers.",
        "block/norm": "input_layernorm", "output": "self_attn.dense", "w0": "mlp.fc1", "w1": "mlp.fc2"
    },
    family.GPT_CONSTANTS | {"bias": True, "output_bias": True, "parallel": "one-norm", "head_bias": True},
    rope=Rope(part=0.5),
    gguf=Gguf("phi2")
)  # fmt: skip
PHI3 = Family(
    "phi3",
    "queries, keys and values in one tensor, gate and up in one; `partial_rotary_factor`, `longrope` (up to "
    "`original_max_position_embeddings`)",
    family.RMS | family.defaults(context=4096),
    family.without(family.LLAMA_ATTENTION, "query", "key", "value") | {"rows": "self_attn.qkv_proj"} | family.GATE_UP,
    ignored=("original_max_position_embeddings",),
    rope=Rope(part=1.0, kinds={"yarn": "longrope"}),
    windows=SlidingWindow(listed=False),
    write=_write_phi3,
    gguf=Gguf("phi3", joins_rows=True, window=0),
)
