"""What ``config.json`` says of a decoder that no table holds: what families have of their own, as it is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spmd_engine.errors import UsageError
from spmd_engine.layers.attention.rotary import RotaryOptions
from spmd_engine.models.block_numbers import as_text
from spmd_engine.models.decoder import DecoderConfig
from spmd_engine.models.hf.rope import rotary_of_config
from spmd_engine.models.hf.unknown_fields import HARMLESS, must_be

#: Of a head that is turned, where a config does not say.
_PART = {"gpt-neox": 0.25, "stablelm": 0.25, "phi": 0.5, "glm": 0.5, "glm4": 0.5, "nemotron": 0.5}
_THETA = {"ernie4-5": 5e5, "helium": 1e5, "cwm": 1e6, "ministral3": 1e6}  # where a config does not say; of others 10000
_NEIGHBOURS = ("cohere", "cohere2", "glm", "glm4", "ernie4-5", "helium")  # are what is turned
_OF_MINISTRAL3 = ("llama_4_scaling_beta", "max_position_embeddings")  # by how much its queries grow
PARALLEL = {"gpt-neox": "two-norms", "stablelm": "one-norm"}  #: of those that can say whether blocks are
#: Of ``attn_config`` of MPT: what does no harm, or is looked at, and the value of what else may be there.
_MPT_MAY_SAY = HARMLESS | {
    "alibi", "alibi_bias_max", "softmax_scale", "attn_pdrop", "attn_impl", "attn_uses_sequence_id",
}  # fmt: skip
_MPT_MUST_SAY = {"attn_type": "multihead_attention"}
_LOGIT_SCALE = 0.0625  # of Cohere's models, where a config does not say


def shape_beside_table(config: Mapping[str, Any], shape: DecoderConfig) -> DecoderConfig:
    """The decoder with what its family has beside the table, and its rotary positions; raises UsageError, KeyError."""
    own = _OWN.get(shape.family)
    if own is not None:
        shape = own(config, shape)
    return shape if shape.learned or shape.alibi else shape.changed(rotary=_rotary(config, shape))


def _starcoder2(config: Mapping[str, Any], shape: DecoderConfig) -> DecoderConfig:
    must_be("norm_type", config.get("norm_type") or "layer_norm", "layer_norm")
    config.get("activation_function")  # of older programs; ``hidden_act`` is looked at
    config.get("layer_norm_epsilon")  # the same; ``norm_epsilon`` is
    return shape.changed(window=config.get("sliding_window") or None)


def _cohere(config: Mapping[str, Any], shape: DecoderConfig) -> DecoderConfig:
    must_be("use_qk_norm", bool(config.get("use_qk_norm")), False)
    shape = shape.changed(logits_divisor=1 / float(config.get("logit_scale", _LOGIT_SCALE)))
    return _with_turned_windows(config, shape) if shape.family == "cohere2" else shape


def _gpt_bigcode(config: Mapping[str, Any], shape: DecoderConfig) -> DecoderConfig:
    must_be("add_cross_attention", bool(config.get("add_cross_attention")), False)
    heads = 1 if config.get("multi_query", True) else shape.heads
    must_be("num_key_value_heads", config.get("num_key_value_heads", heads), heads)
    return shape.changed(key_value_heads=heads)


def _opt(config: Mapping[str, Any], shape: DecoderConfig) -> DecoderConfig:
    must_be("word_embed_proj_dim", config.get("word_embed_proj_dim") or shape.width, shape.width)
    return shape


def _perhaps_parallel(config: Mapping[str, Any], shape: DecoderConfig) -> DecoderConfig:
    if config.get("use_parallel_residual", shape.family == "gpt-neox"):
        return shape.changed(parallel=PARALLEL[shape.family])
    return shape


def _with_turned_windows(config: Mapping[str, Any], shape: DecoderConfig) -> DecoderConfig:
    """Of Cohere 2: layers with a window have rotary positions, the others see all, and have none."""
    for name, usual in (
        ("layer_switch", config.get("sliding_window_pattern") or 4), ("position_embedding_type", "rope_gptj"),
        ("order_of_interleaved_layers", "local_attn_first"), ("rotary_pct", 1.0), ("use_gated_activation", True),
        ("use_parallel_block", True), ("use_embedding_sharing", True),
    ):  # fmt: skip
        must_be(name, config.get(name, usual), usual)
    config.get("use_parallel_embedding")  # of how it was trained
    every = config.get("sliding_window_pattern") or 4
    near = _near_layers(config, shape, lambda layer: bool((layer + 1) % every))
    if not near:
        return shape.changed(unturned=as_text(range(shape.layers)))
    far = as_text(set(range(shape.layers)) - set(near))
    window = config.get("sliding_window", 4096)
    return shape.changed(window=window, windowed=as_text(near) if far else "", unturned=far)


#: Of families whose config may list kinds of layers: the usual window, and the layers that see it where it does not.
_WINDOWS: Mapping[str, tuple[int, Callable[[int], bool]]] = {
    "exaone4": (4096, lambda layer: bool((layer + 1) % 4)),
    "cwm": (8192, lambda layer: bool(layer % 4)),
    "ministral": (4096, lambda layer: True),
}


def _with_windows(config: Mapping[str, Any], shape: DecoderConfig) -> DecoderConfig:
    """EXAONE 4 has rotary positions in all layers or, if there are windows, in those that see one."""
    usual, is_near = _WINDOWS[shape.family]
    window, every = config.get("sliding_window", usual), config.get("sliding_window_pattern")
    if every is not None and window and config.get("layer_types") is None:
        must_be("sliding_window_pattern", every, 4)
    near = _near_layers(config, shape, lambda layer: bool(window) and is_near(layer))
    far = as_text(set(range(shape.layers)) - set(near))
    if near and not window:
        raise UsageError("layer_types has 'sliding_attention', but no sliding_window is said")
    if window and shape.family == "exaone4":
        shape = shape.changed(unturned=far)
    return shape.changed(window=window, windowed=as_text(near) if far else "") if near else shape


def _near_layers(config: Mapping[str, Any], shape: DecoderConfig, is_near: Callable[[int], bool]) -> list[int]:
    """The layers that see a window alone: by ``layer_types`` or, where there are none, as the family has it."""
    kinds = config.get("layer_types")
    kinds = kinds or ["sliding_attention" if is_near(i) else "full_attention" for i in range(shape.layers)]
    if len(kinds) != shape.layers or set(kinds) - {"sliding_attention", "full_attention"}:
        raise UsageError(f"layer_types are {kinds} for {shape.layers} layers; each is sliding_ or full_attention")
    return [number for number, kind in enumerate(kinds) if kind == "sliding_attention"]


def _falcon(config: Mapping[str, Any], shape: DecoderConfig) -> DecoderConfig:
    """One head of keys and values for all queries (Falcon 7B), or several in the new architecture, in which attention
    and perceptron may have a norm each; what its other models have is refused."""
    new = bool(config.get("new_decoder_architecture"))
    for name, usual, computed in (
        ("alibi", False, False), ("multi_query", True, True), ("parallel_attn", True, True),
        ("apply_residual_connection_post_layernorm", False, False),
    ):  # fmt: skip
        if not (new and name in ("multi_query", "parallel_attn")):
            must_be(name, config.get(name, usual), computed)
    said, norms = config.get("num_kv_heads"), config.get("num_ln_in_parallel_attn")
    if not new:
        return shape.changed(key_value_heads=1)
    two = (norms or 2) == 2
    if not two:
        must_be("parallel_attn", config.get("parallel_attn", True), True)
    config.get("parallel_attn"), config.get("multi_query")  # without effect there
    return shape.changed(key_value_heads=said or shape.heads, parallel="two-norms" if two else "one-norm")


def _granite4(config: Mapping[str, Any], shape: DecoderConfig) -> DecoderConfig:
    """Of Granite 4: models that are all attention, and have no experts."""
    must_be("num_local_experts", config.get("num_local_experts", 8), 0)
    must_be("normalization_function", config.get("normalization_function") or "rmsnorm", "rmsnorm")
    kinds = config.get("layer_types") or config.get("layers_block_type") or ["mamba"]
    for name in ("layers_block_type", "intermediate_size", "num_experts_per_tok", "init_method"):
        config.get(name)  # of experts, or said already
    for name in config:
        if name.startswith(("mamba_", "time_step_")):
            config.get(name)
    if odd := sorted(set(kinds) - {"attention", "full_attention"}):
        raise UsageError(f"layer_types has {odd[0]!r}, a feature that is not known here")
    if config.get("position_embedding_type") == "rope":
        return shape
    must_be("position_embedding_type", config.get("position_embedding_type") or "nope", "nope")
    return shape.changed(unturned=as_text(range(shape.layers)))


def _ministral3(config: Mapping[str, Any], shape: DecoderConfig) -> DecoderConfig:
    """Queries have a factor beyond what was learnt before positions were scaled; up to there, it is 1."""
    must_be("sliding_window", config.get("sliding_window"), None)
    return shape.changed(context=min(shape.context, config["rope_parameters"]["original_max_position_embeddings"]))


def _bloom(config: Mapping[str, Any], shape: DecoderConfig) -> DecoderConfig:
    name = "apply_residual_connection_post_layernorm"
    must_be(name, bool(config.get(name)), False)
    for name in "offset_alibi", "bias_dropout_fusion", "masked_softmax_fusion", "skip_bias_add", "skip_bias_add_qkv":
        config.get(name)  # of the program that trained it
    return shape


def _mpt(config: Mapping[str, Any], shape: DecoderConfig) -> DecoderConfig:
    said = config.get("attn_config") or {}
    for name, value in said.items():
        if value and name not in _MPT_MAY_SAY and _MPT_MUST_SAY.get(name) != value:
            raise UsageError(f"attn_config: {name} is {value!r}, a feature that is not known here")
    must_be("alibi of attn_config", said.get("alibi", True), True)
    for name, usual in ("no_bias", True), ("logit_scale", None), ("embedding_fraction", 1.0):
        must_be(name, config.get(name, usual), usual)
    if (norm := config.get("norm_type") or "layernorm") not in ("layernorm", "low_precision_layernorm"):
        raise UsageError(f"norm_type is {norm!r}, a feature that is not known here")
    config.get("learned_pos_emb"), config.get("init_config")  # with ALiBi there are none; how it began
    factor, ratio = said.get("softmax_scale"), config.get("expansion_ratio", 4)
    scale = None if factor is None else float(factor)
    return shape.changed(hidden=ratio * shape.width, alibi=float(said.get("alibi_bias_max", 8)), attention_scale=scale)


def _rotary(config: Mapping[str, Any], shape: DecoderConfig) -> RotaryOptions:
    family = shape.family
    theta, part = _THETA.get(family, 10_000.0), config.get("partial_rotary_factor")
    if family == "gpt-neox":
        theta, part = config.get("rotary_emb_base") or theta, config.get("rotary_pct", part)
    if family == "gptj":
        must_be("rotary", config.get("rotary", True), True)
        turned, width = config.get("rotary_dim", 64), shape.width // shape.heads
        return RotaryOptions(pairs="neighbours", part=1.0 if turned is None else turned / width)
    if family == "hunyuan-v1-dense":
        return _stretched(config, shape)
    if family == "ministral3":
        said = {name: each for name, each in config["rope_parameters"].items() if name not in _OF_MINISTRAL3}
        config = {**config, "rope_parameters": said}
    found = rotary_of_config(config, theta, shape.context, part=_PART.get(family, 1.0) if part is None else part)
    return found.changed(pairs="neighbours") if family in _NEIGHBOURS else found


def _stretched(config: Mapping[str, Any], shape: DecoderConfig) -> RotaryOptions:
    """Of Hunyuan: ``dynamic`` with an ``alpha`` has the base theta · alpha^(k / (k - 2)) at all positions."""
    width = shape.head_width or shape.width // shape.heads
    must_be("attention_head_dim", config.get("attention_head_dim") or width, width)
    said = {name: dict(each) for name in ("rope_scaling", "rope_parameters") if (each := config.get(name))}
    dynamic = [each for each in said.values() if "dynamic" in (each.get("rope_type"), each.get("type"))]
    alphas = {float(each.get("alpha") or 1) for each in dynamic} or {1.0}
    for each in dynamic:  # whose other fields are of other kinds, and without effect
        for name in ("alpha", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
            each.pop(name, None)
    found = rotary_of_config({**config, **said}, 10_000.0, shape.context)
    if len(alphas) > 1:
        raise UsageError(f"rope_scaling and rope_parameters differ in alpha: {sorted(alphas)}")
    return found.changed(theta=found.theta * alphas.pop() ** (width / (width - 2)))


def _gpt_neo(config: Mapping[str, Any], shape: DecoderConfig) -> DecoderConfig:
    """Of GPT-Neo: kinds of layers, one by one, or as [[kinds, how many times], ...]."""
    kinds: Sequence[str] = config.get("attention_layers") or []
    groups = config.get("attention_types") or [[["global", "local"], 12]]
    kinds = kinds or [kind for some, times in groups for _ in range(times) for kind in some]
    if len(kinds) != shape.layers or set(kinds) - {"global", "local"}:
        raise UsageError(f"attention_types are {kinds} for {shape.layers} layers; each is global or local")
    window, local = config.get("window_size", 256), [number for number, kind in enumerate(kinds) if kind == "local"]
    if not local:
        return shape
    return shape.changed(window=window, windowed="" if len(local) == shape.layers else as_text(local))


#: By family, the decoder that it describes of the one that the table made.
_OWN: Mapping[str, Callable[[Mapping[str, Any], DecoderConfig], DecoderConfig]] = {
    "starcoder2": _starcoder2, "cohere": _cohere, "cohere2": _cohere, "falcon": _falcon, "gpt-bigcode": _gpt_bigcode,
    "opt": _opt, "gpt-neox": _perhaps_parallel, "stablelm": _perhaps_parallel, "gpt-neo": _gpt_neo, "bloom": _bloom,
    "mpt": _mpt, "granitemoehybrid": _granite4, "ministral3": _ministral3, **dict.fromkeys(_WINDOWS, _with_windows),
}  # fmt: skip
