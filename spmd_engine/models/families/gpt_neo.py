"""EleutherAI's GPT-Neo, GPT-NeoX (Pythia) and GPT-J."""

from typing import Any

from spmd_engine.errors import UsageError
from spmd_engine.layers import RotaryOptions
from spmd_engine.models.families import family
from spmd_engine.models.families.family import Config, Family, Gguf, Rope
from spmd_engine.models.families.gpt2 import GPT2_FIELDS, GPT2_MODULES, GPT_NEO_ATTENTION
from spmd_engine.models.mixture import as_text


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


def _write_neox_gguf(shape: Any) -> dict[str, Any]:
    return {"use_parallel_residual": shape.parallel == "two-norms"}


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
    gguf=Gguf("gptneox", joins_rows=True, read=_read_neox_gguf, write=_write_neox_gguf)
)  # fmt: skip


def _rotary_gptj(config: Config, shape: Any) -> RotaryOptions:
    rotated, width = config.get("rotary_dim", 64), shape.width // shape.heads
    return RotaryOptions(pairs="neighbours", part=1.0 if rotated is None else rotated / width)


def _write_gptj(shape: Any) -> dict[str, Any]:
    return {"rotary_dim": int((shape.head_width or shape.width // shape.heads) * shape.rotary.part)}


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
    write=_write_gptj
)  # fmt: skip
