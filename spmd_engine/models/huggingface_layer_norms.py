"""What ``config.json`` says of decoders with layer norms: what each family calls fields, to be read and written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spmd_engine.errors import UsageError
from spmd_engine.models.block_numbers import as_text
from spmd_engine.models.decoder import DecoderShape
from spmd_engine.models.huggingface_families import activation_said, always, words_for_activation
from spmd_engine.models.huggingface_rope import rope_of, rotary_of_config

#: Fields of a DecoderShape, what a config calls them, and their value where it is silent; None: it must not be.
_COMMON: Mapping[str, tuple[str, Any]] = {
    "layers": ("num_hidden_layers", None),
    "width": ("hidden_size", None),
    "heads": ("num_attention_heads", None),
    "hidden": ("intermediate_size", None),
    "vocabulary": ("vocab_size", None),
    "context": ("max_position_embeddings", 2048),
    "epsilon": ("layer_norm_eps", 1e-5),
    "tied": ("tie_word_embeddings", False),
    "activation": ("hidden_act", "gelu_new"),
}
_TIED = {"tied": ("tie_word_embeddings", True)}
#: What families call otherwise, or have beside.
_OWN: Mapping[str, Mapping[str, tuple[str, Any]]] = {
    "gpt-neo": _TIED | {
        "layers": ("num_layers", None),
        "hidden": ("intermediate_size", 0),
        "heads": ("num_heads", None),
        "epsilon": ("layer_norm_epsilon", 1e-5),
        "activation": ("activation_function", "gelu_new"),
    },
    "gpt-neox": {"activation": ("hidden_act", "gelu"), "bias": ("attention_bias", True)},
    "opt": _TIED | {"hidden": ("ffn_dim", None), "activation": ("activation_function", "relu")},
    "phi": {"key_value_heads": ("num_key_value_heads", 0)},
    "stablelm": {
        "key_value_heads": ("num_key_value_heads", 0),
        "context": ("max_position_embeddings", 4096),
        "activation": ("hidden_act", "silu"),
        "bias": ("use_qkv_bias", False),
    },
    "starcoder2": _TIED | {
        "key_value_heads": ("num_key_value_heads", 2),
        "context": ("max_position_embeddings", 4096),
        "epsilon": ("norm_epsilon", 1e-5),
        "activation": ("hidden_act", "gelu_pytorch_tanh"),
        "bias": ("use_bias", True),
    },
}  # fmt: skip
LAYER_NORMS = tuple(_OWN)  #: the families
_PART = {"gpt-neox": 0.25, "stablelm": 0.25, "phi": 0.5}  # of a head that is turned, where a config does not say
_PARALLEL = {"gpt-neox": "two-norms", "stablelm": "one-norm"}  # of those that can say whether blocks are
_EPSILON_OF_OPT = 1e-5


def shape_with_layer_norms(family: str, config: Mapping[str, Any]) -> DecoderShape:
    """The decoder of one of the ``LAYER_NORMS`` that a config describes; raises UsageError and KeyError."""
    values: dict[str, Any] = {}
    for own, (name, default) in (_COMMON | _OWN[family]).items():
        if family == "opt" and own == "epsilon":
            continue
        values[own] = config[name] if default is None else config.get(name, default)
    values["hidden"] = values["hidden"] or 4 * values["width"]
    values["activation"] = activation_said(values["activation"])
    values["key_value_heads"] = values.get("key_value_heads") or values["heads"]
    shape = DecoderShape(family=family, **{**always(family, values["width"]), "epsilon": _EPSILON_OF_OPT, **values})
    if family == "starcoder2":
        shape = shape.changed(
            output_bias=shape.bias, perceptron_bias=shape.bias, window=config.get("sliding_window") or None
        )
        _same("norm_type", config.get("norm_type") or "layer_norm", "layer_norm")
        config.get("activation_function")  # of older programs; ``hidden_act`` is looked at
    if family == "gpt-neox":
        shape = shape.changed(output_bias=shape.bias)
    if family == "opt":
        _same("word_embed_proj_dim", config.get("word_embed_proj_dim") or shape.width, shape.width)
    if family in _PARALLEL and config.get("use_parallel_residual", family == "gpt-neox"):
        shape = shape.changed(parallel=_PARALLEL[family])
    if family == "gpt-neo":
        return _with_local_layers(config, shape)
    return shape if shape.learned else shape.changed(rotary=_rotary(family, config, shape))


def _rotary(family: str, config: Mapping[str, Any], shape: DecoderShape) -> Any:
    theta, part = 10_000.0, config.get("partial_rotary_factor")
    if family == "gpt-neox":
        theta, part = config.get("rotary_emb_base") or theta, config.get("rotary_pct", part)
    return rotary_of_config(config, theta, shape.context, part=_PART.get(family, 1.0) if part is None else part)


def _with_local_layers(config: Mapping[str, Any], shape: DecoderShape) -> DecoderShape:
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


def _same(name: str, value: Any, computed: Any) -> None:
    if value != computed:
        raise UsageError(f"{name} is {value!r}, a feature that is not known here; {computed!r} is")


def words_with_layer_norms(shape: DecoderShape) -> dict[str, Any]:
    """What a config says of one of the ``LAYER_NORMS``; raises UsageError for what it has no words for."""
    family, said = shape.family, {}
    for own, (name, _) in (_COMMON | _OWN[family]).items():
        said[name] = getattr(shape, own)
        if own == "activation":
            said[name] = words_for_activation(shape.activation)
    shared = shape.key_value_heads or shape.heads
    for name, value, usual in (
        ("head_width", shape.head_width or shape.width // shape.heads, shape.width / shape.heads),
        ("key_value_heads", shared, shared if "key_value_heads" in _OWN[family] else shape.heads),
        ("epsilon", shape.epsilon, _EPSILON_OF_OPT if family == "opt" else shape.epsilon),
        ("window", shape.window, shape.window if family in ("gpt-neo", "starcoder2") else None),
    ):
        if value != usual:
            raise UsageError(f"a {family} has no words for {name} {value}")
    if family == "opt":
        del said["layer_norm_eps"]
        said |= {"do_layer_norm_before": True, "word_embed_proj_dim": shape.width}
    if family == "starcoder2":
        if shape.windowed:
            raise UsageError(f"a {family} has no words for the window of blocks {shape.windowed}")
        said["sliding_window"] = shape.window
    if family in _PARALLEL:
        if shape.parallel not in ("none", _PARALLEL[family]):
            raise UsageError(f"a {family} has no words for parallel {shape.parallel!r}")
        said["use_parallel_residual"] = shape.parallel != "none"
    if family == "gpt-neo":
        kinds = ["local" if shape.has_window(layer) else "global" for layer in range(shape.layers)]
        said |= {"attention_layers": kinds, "attention_types": [[[kind], 1] for kind in kinds]}
        said["window_size"] = shape.window or 256
    if shape.learned:
        return said
    rope = rope_of(shape.rotary) | {"partial_rotary_factor": shape.rotary.part}
    said |= {"rope_parameters": rope, "rope_scaling": None if rope["rope_type"] == "default" else rope}
    theta, part = ("rotary_emb_base", "rotary_pct") if family == "gpt-neox" else ("rope_theta", "partial_rotary_factor")
    return said | {theta: shape.rotary.theta, part: shape.rotary.part}
