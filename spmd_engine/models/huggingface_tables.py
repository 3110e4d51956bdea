"""What ``config.json`` says of decoders that a table describes: what each family calls fields, read and written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spmd_engine.errors import UsageError
from spmd_engine.layers.rotary import RotaryOptions
from spmd_engine.models.block_numbers import as_text
from spmd_engine.models.decoder import DecoderShape
from spmd_engine.models.huggingface_families import activation_said, always, words_for_activation
from spmd_engine.models.huggingface_fields import HARMLESS
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
_COHERE = _TIED | {
    "key_value_heads": ("num_key_value_heads", 0), "activation": ("hidden_act", "silu"),
    "bias": ("attention_bias", False),
}  # fmt: skip
_RMS = {
    "epsilon": ("rms_norm_eps", 1e-5), "activation": ("hidden_act", "silu"),
    "key_value_heads": ("num_key_value_heads", 0), "head_width": ("head_dim", 0),
}  # fmt: skip
_BIASES = {"bias": ("attention_bias", False), "perceptron_bias": ("mlp_bias", False)}
_GLM = _RMS | {
    "key_value_heads": ("num_key_value_heads", 2), "head_width": ("head_dim", 128),
    "context": ("max_position_embeddings", 131072), "epsilon": ("rms_norm_eps", 1.5625e-7),
    "bias": ("attention_bias", True),
}  # fmt: skip
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
    "olmo": {
        "key_value_heads": ("num_key_value_heads", 0),
        "activation": ("hidden_act", "silu"),
        "bias": ("attention_bias", False),
    },
    "cohere": _COHERE | {"context": ("max_position_embeddings", 8192)},
    "cohere2": _COHERE | {"context": ("max_position_embeddings", 8192), "head_width": ("head_dim", 0)},
    "gptj": {
        "layers": ("n_layer", None), "width": ("n_embd", None), "heads": ("n_head", None), "hidden": ("n_inner", 0),
        "context": ("n_positions", 2048), "epsilon": ("layer_norm_epsilon", 1e-5),
        "activation": ("activation_function", "gelu_new"),
    },
    "falcon": _TIED | {
        "hidden": ("ffn_hidden_size", 0), "epsilon": ("layer_norm_epsilon", 1e-5), "activation": ("activation", "gelu"),
        "bias": ("bias", False),
    },
    "internlm2": _RMS | {
        "context": ("max_position_embeddings", 2048), "epsilon": ("rms_norm_eps", 1e-6), "bias": ("bias", True),
    },
    "granitemoehybrid": _RMS | {
        "hidden": ("shared_intermediate_size", 1024), "epsilon": ("rms_norm_eps", 1e-6),
        "bias": ("attention_bias", False), "embedding_scale": ("embedding_multiplier", 1.0),
        "residual_scale": ("residual_multiplier", 1.0), "attention_scale": ("attention_multiplier", 1.0),
        "logits_divisor": ("logits_scaling", 1.0),
    },
    "ministral3": _RMS | {
        "context": ("max_position_embeddings", 262144), "key_value_heads": ("num_key_value_heads", 8),
        "head_width": ("head_dim", 128),
    },
    "bloom": _TIED | {
        "layers": ("n_layer", None), "heads": ("n_head", None), "hidden": ("n_inner", 0),
        "context": ("seq_length", 2048), "epsilon": ("layer_norm_epsilon", 1e-5),
    },
    "mpt": _TIED | {
        "layers": ("n_layers", None), "width": ("d_model", None), "heads": ("n_heads", None),
        "context": ("max_seq_len", 2048), "epsilon": ("layer_norm_epsilon", 1e-5),
    },
    "exaone": _TIED | _RMS | {
        "layers": ("num_layers", None), "epsilon": ("layer_norm_epsilon", 1e-5),
        "activation": ("activation_function", "silu"),
    },
    "gpt-bigcode": _TIED | {
        "layers": ("n_layer", None), "width": ("n_embd", None), "heads": ("n_head", None), "hidden": ("n_inner", 0),
        "context": ("n_positions", 1024), "epsilon": ("layer_norm_epsilon", 1e-5),
        "activation": ("activation_function", "gelu_pytorch_tanh"),
    },
    "arcee": _RMS | _BIASES | {"context": ("max_position_embeddings", 4096), "activation": ("hidden_act", "relu2")},
    "seed-oss": _RMS | _BIASES | {
        "context": ("max_position_embeddings", 524288), "epsilon": ("rms_norm_eps", 1e-6),
        "key_value_heads": ("num_key_value_heads", 8), "head_width": ("head_dim", 128),
        "bias": ("attention_bias", True), "output_bias": ("attention_out_bias", False),
    },
    "exaone4": _RMS | {"key_value_heads": ("num_key_value_heads", 32)},
    "glm": _GLM,
    "glm4": _GLM,
    "ernie4-5": _TIED | _RMS | {
        "context": ("max_position_embeddings", 131072), "key_value_heads": ("num_key_value_heads", 2),
        "head_width": ("head_dim", 128), "bias": ("use_bias", False),
    },
    "helium": _RMS | _BIASES | {
        "context": ("max_position_embeddings", 4096), "epsilon": ("rms_norm_eps", 1e-8),
        "key_value_heads": ("num_key_value_heads", 20), "head_width": ("head_dim", 128),
    },
    "hunyuan-v1-dense": _RMS | {"bias": ("attention_bias", False)},
    "nemotron": _RMS | _BIASES | {
        "context": ("max_position_embeddings", 4096), "epsilon": ("norm_eps", 1e-5),
        "activation": ("hidden_act", "relu2"),
    },
    "jais2": _RMS | {
        "context": ("max_position_embeddings", 8192), "epsilon": ("layer_norm_eps", 1e-5),
        "activation": ("hidden_act", "relu2"), "bias": ("attention_bias", True), "perceptron_bias": ("mlp_bias", True),
    },
    "cwm": _RMS | {
        "context": ("max_position_embeddings", 131072), "key_value_heads": ("num_key_value_heads", 8),
        "head_width": ("head_dim", 128), "perceptron_bias": ("mlp_bias", False),
    },
    "ministral": _RMS | {
        "context": ("max_position_embeddings", 131072), "epsilon": ("rms_norm_eps", 1e-6),
        "key_value_heads": ("num_key_value_heads", 8),
    },
    "internlm3": _RMS | {
        "context": ("max_position_embeddings", 32768), "key_value_heads": ("num_key_value_heads", 2),
        "head_width": ("head_dim", 128), "bias": ("qkv_bias", False), "perceptron_bias": ("bias", False),
    },
}  # fmt: skip
BY_TABLE = tuple(_OWN)  #: the families
#: Of a head that is turned, where a config does not say.
_PART = {"gpt-neox": 0.25, "stablelm": 0.25, "phi": 0.5, "glm": 0.5, "glm4": 0.5, "nemotron": 0.5}
_THETA = {"ernie4-5": 5e5, "helium": 1e5, "cwm": 1e6}  # where a config does not say; of others 10000
_NEIGHBOURS = ("cohere", "cohere2", "glm", "glm4", "ernie4-5", "helium")  # are what is turned
#: Families of which one field speaks of all biases of the attention, and those where it speaks of all there are.
_OUTPUT_TOO = (
    "gpt-neox", "olmo", "cohere", "cohere2", "falcon", "starcoder2", "arcee", "ernie4-5", "hunyuan-v1-dense",
    "nemotron", "jais2", "internlm3", "internlm2", "granitemoehybrid",
)  # fmt: skip
_PERCEPTRONS_TOO = ("falcon", "starcoder2", "ernie4-5")
_PARALLEL = {"gpt-neox": "two-norms", "stablelm": "one-norm"}  # of those that can say whether blocks are
_SAY_WINDOWS = ("gpt-neo", "starcoder2", "cohere2", "exaone4", "cwm", "ministral")
_EPSILON = dict.fromkeys(("opt", "olmo"), 1e-5)  # of those whose config does not say
#: Fields of which the config of a family does not speak.
_UNSAID = dict.fromkeys(_EPSILON, ("epsilon",)) | {"bloom": ("activation",), "mpt": ("activation", "hidden")}
#: Fields that a config may have, and their one value that is computed.
_MUST_BE: Mapping[str, Mapping[str, Any]] = {
    "ernie4-5": {"use_rmsnorm": True},
    "hunyuan-v1-dense": {
        "use_qk_norm": True, "norm_type": "rms", "use_rotary_pos_emb": True, "use_cla": False, "num_experts": 1,
        "position_embedding_xdrope": False, "mlp_bias": False, "add_classification_head": False,
    },
}  # fmt: skip
_FACTORS = {"embedding_scale", "residual_scale", "attention_scale", "logits_divisor"}
#: Second names of fields.
_ALSO = {"bloom": {"hidden_size": "n_embed", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}}
#: Of ``attn_config`` of MPT: what does no harm, or is looked at, and the value of what else may be there.
_MPT_MAY_SAY = HARMLESS | {
    "alibi", "alibi_bias_max", "softmax_scale", "attn_pdrop", "attn_impl", "attn_uses_sequence_id",
}  # fmt: skip
_MPT_MUST_SAY = {"attn_type": "multihead_attention"}
_BETA = "llama_4_scaling_beta"  # of Ministral 3: by how much its queries grow
_LOGIT_SCALE = 0.0625  # of Cohere's models, where a config does not say


def shape_by_table(family: str, config: Mapping[str, Any]) -> DecoderShape:
    """The decoder of one of the ``BY_TABLE`` that a config describes; raises UsageError and KeyError."""
    values: dict[str, Any] = {}
    for own, (name, default) in (_COMMON | _OWN[family]).items():
        if own not in _UNSAID.get(family, ()):
            values[own] = _said(config, name, default, _ALSO.get(family, {}).get(name))
    if family == "internlm3":  # whose fields transformers calls as Llama's
        values["bias"] = config.get("attention_bias", values["bias"])
        _same("bias", config.get("mlp_bias", values["perceptron_bias"]), values["bias"])
        values["perceptron_bias"] = values["bias"]
    for own in _FACTORS & values.keys():
        values[own] = float(values[own])
    values["hidden"] = values.get("hidden") or 4 * values["width"]
    if "activation" in values:
        values["activation"] = activation_said(values["activation"])
    values["key_value_heads"] = values.get("key_value_heads") or values["heads"]
    values["head_width"] = values.get("head_width") or None
    shape = DecoderShape(family=family, **{**always(family, values["width"]), "epsilon": 1e-5, **values})
    if family == "starcoder2":
        shape = shape.changed(window=config.get("sliding_window") or None)
        _same("norm_type", config.get("norm_type") or "layer_norm", "layer_norm")
        config.get("activation_function")  # of older programs; ``hidden_act`` is looked at
        config.get("layer_norm_epsilon")  # the same; ``norm_epsilon`` is
    if family in _OUTPUT_TOO:
        shape = shape.changed(output_bias=shape.bias)
    if family in _PERCEPTRONS_TOO:
        shape = shape.changed(perceptron_bias=shape.bias)
    if family in ("cohere", "cohere2"):
        _same("use_qk_norm", bool(config.get("use_qk_norm")), False)
        shape = shape.changed(logits_divisor=1 / float(config.get("logit_scale", _LOGIT_SCALE)))
    if family == "cohere2":
        shape = _with_turned_windows(config, shape)
    if family in _WINDOWS:
        shape = _with_windows(config, shape, *_WINDOWS[family])
    if family == "falcon":
        shape = _as_falcon(config, shape)
    for name, computed in _MUST_BE.get(family, {}).items():
        _same(name, config.get(name, computed), computed)
    if family == "granitemoehybrid":
        shape = _without_mamba(config, shape)
    if family == "ministral3":
        return _as_ministral3(config, shape)
    if family == "gpt-bigcode":
        _same("add_cross_attention", bool(config.get("add_cross_attention")), False)
        heads = 1 if config.get("multi_query", True) else shape.heads
        _same("num_key_value_heads", config.get("num_key_value_heads", heads), heads)
        shape = shape.changed(key_value_heads=heads)
    if family == "opt":
        _same("word_embed_proj_dim", config.get("word_embed_proj_dim") or shape.width, shape.width)
    if family in _PARALLEL and config.get("use_parallel_residual", family == "gpt-neox"):
        shape = shape.changed(parallel=_PARALLEL[family])
    if family == "gpt-neo":
        return _with_local_layers(config, shape)
    if family == "bloom":
        _check_bloom(config)
    if family == "mpt":
        shape = _as_mpt(config, shape)
    return shape if shape.learned or shape.alibi else shape.changed(rotary=_rotary(family, config, shape))


def _said(config: Mapping[str, Any], name: str, default: Any, also: str | None) -> Any:
    """The value of a field, which may ``also`` be called otherwise."""
    if also is not None and (value := config.get(also)) is not None:
        _same(name, config.get(name, value), value)
        return value
    return config[name] if default is None else config.get(name, default)


def _with_turned_windows(config: Mapping[str, Any], shape: DecoderShape) -> DecoderShape:
    """Of Cohere 2: layers with a window have rotary positions, the others see all, and have none."""
    for name, usual in (
        ("layer_switch", config.get("sliding_window_pattern") or 4), ("position_embedding_type", "rope_gptj"),
        ("order_of_interleaved_layers", "local_attn_first"), ("rotary_pct", 1.0), ("use_gated_activation", True),
        ("use_parallel_block", True), ("use_embedding_sharing", True),
    ):  # fmt: skip
        _same(name, config.get(name, usual), usual)
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


def _with_windows(
    config: Mapping[str, Any], shape: DecoderShape, usual: int, is_near: Callable[[int], bool]
) -> DecoderShape:
    """EXAONE 4 has rotary positions in all layers or, if there are windows, in those that see one."""
    window, every = config.get("sliding_window", usual), config.get("sliding_window_pattern")
    if every is not None and window and config.get("layer_types") is None:
        _same("sliding_window_pattern", every, 4)
    near = _near_layers(config, shape, lambda layer: bool(window) and is_near(layer))
    far = as_text(set(range(shape.layers)) - set(near))
    if near and not window:
        raise UsageError("layer_types has 'sliding_attention', but no sliding_window is said")
    if window and shape.family == "exaone4":
        shape = shape.changed(unturned=far)
    return shape.changed(window=window, windowed=as_text(near) if far else "") if near else shape


def _near_layers(config: Mapping[str, Any], shape: DecoderShape, is_near: Callable[[int], bool]) -> list[int]:
    """The layers that see a window alone: by ``layer_types`` or, where there are none, as the family has it."""
    kinds = config.get("layer_types")
    kinds = kinds or ["sliding_attention" if is_near(i) else "full_attention" for i in range(shape.layers)]
    if len(kinds) != shape.layers or set(kinds) - {"sliding_attention", "full_attention"}:
        raise UsageError(f"layer_types are {kinds} for {shape.layers} layers; each is sliding_ or full_attention")
    return [number for number, kind in enumerate(kinds) if kind == "sliding_attention"]


def _as_falcon(config: Mapping[str, Any], shape: DecoderShape) -> DecoderShape:
    """One head of keys and values for all queries (Falcon 7B), or several in the new architecture, in which attention
    and perceptron may have a norm each; what its other models have is refused."""
    new = bool(config.get("new_decoder_architecture"))
    for name, usual, computed in (
        ("alibi", False, False), ("multi_query", True, True), ("parallel_attn", True, True),
        ("apply_residual_connection_post_layernorm", False, False),
    ):  # fmt: skip
        if not (new and name in ("multi_query", "parallel_attn")):
            _same(name, config.get(name, usual), computed)
    said, norms = config.get("num_kv_heads"), config.get("num_ln_in_parallel_attn")
    if not new:
        return shape.changed(key_value_heads=1)
    two = (norms or 2) == 2
    if not two:
        _same("parallel_attn", config.get("parallel_attn", True), True)
    config.get("parallel_attn"), config.get("multi_query")  # without effect there
    return shape.changed(key_value_heads=said or shape.heads, parallel="two-norms" if two else "one-norm")


def _without_mamba(config: Mapping[str, Any], shape: DecoderShape) -> DecoderShape:
    """Of Granite 4: models that are all attention, and have no experts."""
    _same("num_local_experts", config.get("num_local_experts", 8), 0)
    _same("normalization_function", config.get("normalization_function") or "rmsnorm", "rmsnorm")
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
    _same("position_embedding_type", config.get("position_embedding_type") or "nope", "nope")
    return shape.changed(unturned=as_text(range(shape.layers)))


def _as_ministral3(config: Mapping[str, Any], shape: DecoderShape) -> DecoderShape:
    """Queries have a factor beyond what was learnt before positions were scaled; up to there, it is 1."""
    said = config["rope_parameters"]
    _same("sliding_window", config.get("sliding_window"), None)
    without = {name: each for name, each in said.items() if name not in (_BETA, "max_position_embeddings")}
    rotary = rotary_of_config({**config, "rope_parameters": without}, 1e6, shape.context)
    return shape.changed(rotary=rotary, context=min(shape.context, said["original_max_position_embeddings"]))


def _check_bloom(config: Mapping[str, Any]) -> None:
    name = "apply_residual_connection_post_layernorm"
    _same(name, bool(config.get(name)), False)
    for name in "offset_alibi", "bias_dropout_fusion", "masked_softmax_fusion", "skip_bias_add", "skip_bias_add_qkv":
        config.get(name)  # of the program that trained it


def _as_mpt(config: Mapping[str, Any], shape: DecoderShape) -> DecoderShape:
    said = config.get("attn_config") or {}
    for name, value in said.items():
        if value and name not in _MPT_MAY_SAY and _MPT_MUST_SAY.get(name) != value:
            raise UsageError(f"attn_config: {name} is {value!r}, a feature that is not known here")
    _same("alibi of attn_config", said.get("alibi", True), True)
    for name, usual in ("no_bias", True), ("logit_scale", None), ("embedding_fraction", 1.0):
        _same(name, config.get(name, usual), usual)
    if (norm := config.get("norm_type") or "layernorm") not in ("layernorm", "low_precision_layernorm"):
        raise UsageError(f"norm_type is {norm!r}, a feature that is not known here")
    config.get("learned_pos_emb"), config.get("init_config")  # with ALiBi there are none; how it began
    factor, ratio = said.get("softmax_scale"), config.get("expansion_ratio", 4)
    scale = None if factor is None else float(factor)
    return shape.changed(
        hidden=ratio * shape.width, alibi=float(said.get("alibi_bias_max", 8)), attention_scale=scale
    )


def _rotary(family: str, config: Mapping[str, Any], shape: DecoderShape) -> Any:
    theta, part = _THETA.get(family, 10_000.0), config.get("partial_rotary_factor")
    if family == "gpt-neox":
        theta, part = config.get("rotary_emb_base") or theta, config.get("rotary_pct", part)
    if family == "gptj":
        _same("rotary", config.get("rotary", True), True)
        turned, width = config.get("rotary_dim", 64), shape.width // shape.heads
        return RotaryOptions(pairs="neighbours", part=1.0 if turned is None else turned / width)
    if family == "hunyuan-v1-dense":
        return _stretched(config, shape)
    found = rotary_of_config(config, theta, shape.context, part=_PART.get(family, 1.0) if part is None else part)
    return found.changed(pairs="neighbours") if family in _NEIGHBOURS else found


def _stretched(config: Mapping[str, Any], shape: DecoderShape) -> RotaryOptions:
    """Of Hunyuan: ``dynamic`` with an ``alpha`` has the base theta · alpha^(k / (k - 2)) at all positions."""
    width = shape.head_width or shape.width // shape.heads
    _same("attention_head_dim", config.get("attention_head_dim") or width, width)
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


def words_by_table(shape: DecoderShape) -> dict[str, Any]:
    """What a config says of one of the ``BY_TABLE``; raises UsageError for what it has no words for."""
    family, said = shape.family, {}
    for own, (name, _) in (_COMMON | _OWN[family]).items():
        said[name] = getattr(shape, own)
        if own == "activation":
            said[name] = words_for_activation(shape.activation)
    shared, usual_heads = shape.key_value_heads or shape.heads, shape.heads
    if family in ("falcon", "gpt-bigcode"):  # which say it in a way of their own
        usual_heads = shared
    width, usual_width = shape.head_width or shape.width // shape.heads, shape.width / shape.heads
    for name, value, usual in (
        ("head_width", width, width if "head_width" in _OWN[family] else usual_width),
        ("key_value_heads", shared, shared if "key_value_heads" in _OWN[family] else usual_heads),
        ("epsilon", shape.epsilon, _EPSILON.get(family, shape.epsilon)),
        ("window", shape.window, shape.window if family in _SAY_WINDOWS else None),
    ):
        if value != usual:
            raise UsageError(f"a {family} has no words for {name} {value}")
    for own in _UNSAID.get(family, ()):
        said.pop((_COMMON | _OWN[family])[own][0], None)
    if family == "opt":
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
    if family in ("cohere", "cohere2"):
        said |= {"logit_scale": 1 / shape.logits_divisor, "use_qk_norm": False}
    if family == "cohere2" or family in _WINDOWS:
        said |= _words_for_windows(shape)
    if family == "gptj":
        return said | {"rotary_dim": int(width * shape.rotary.part)}
    if family == "falcon":
        said |= _words_of_falcon(shape, shared)
    if family == "gpt-bigcode":
        if shared not in (1, shape.heads):
            raise UsageError(f"a {family} has no words for key_value_heads {shared}: one, or all")
        said["multi_query"] = shared == 1
    if family == "mpt":
        said |= _words_of_mpt(shape)
    if shape.learned or shape.alibi:
        return said
    rope = rope_of(shape.rotary) | {"partial_rotary_factor": shape.rotary.part}
    said |= {"rope_parameters": rope, "rope_scaling": None if rope["rope_type"] == "default" else rope}
    theta, part = ("rotary_emb_base", "rotary_pct") if family == "gpt-neox" else ("rope_theta", "partial_rotary_factor")
    said |= {theta: shape.rotary.theta, part: shape.rotary.part}
    if family == "granitemoehybrid":
        said |= _words_of_granite4(shape)
    if family == "ministral3":  # a factor that is 1 up to the context; there must be one
        said |= {"rope_parameters": rope | {_BETA: 0.1}, "rope_scaling": None}
    return said


def _words_of_granite4(shape: DecoderShape) -> dict[str, Any]:
    turned = [shape.is_turned(layer) for layer in range(shape.layers)]
    if any(turned) and not all(turned):
        raise UsageError("a granitemoehybrid has rotary positions in all blocks, or in none")
    width = shape.head_width or shape.width // shape.heads
    return {
        "num_local_experts": 0, "num_experts_per_tok": 0, "intermediate_size": shape.hidden,
        "layer_types": ["attention"] * shape.layers, "position_embedding_type": "rope" if turned[0] else "nope",
        "attention_multiplier": width**-0.5 if shape.attention_scale is None else shape.attention_scale,
        "mamba_n_heads": 1,  # there are none, but those who read it look whether their width is a multiple
    }  # fmt: skip


def _words_of_mpt(shape: DecoderShape) -> dict[str, Any]:
    ratio, left = divmod(shape.hidden, shape.width)
    if left:
        raise UsageError(f"an mpt has no words for hidden {shape.hidden}: it is a multiple of {shape.width}")
    attention = {"alibi": True, "alibi_bias_max": int(shape.alibi), "softmax_scale": shape.attention_scale}
    return {"expansion_ratio": ratio, "no_bias": True, "attn_config": attention}


def _words_of_falcon(shape: DecoderShape, shared: int) -> dict[str, Any]:
    new = shared > 1 or shape.parallel == "two-norms"
    said = {"alibi": False, "new_decoder_architecture": new, "multi_query": True, "parallel_attn": True}
    norms = {"two-norms": 2, "one-norm": 1}
    if shape.parallel not in norms:
        raise UsageError(f"a falcon has no words for parallel {shape.parallel!r}")
    return said | ({"num_kv_heads": shared, "num_ln_in_parallel_attn": norms[shape.parallel]} if new else {})


def _words_for_windows(shape: DecoderShape) -> dict[str, Any]:
    near = [shape.has_window(layer) for layer in range(shape.layers)]
    turned = [shape.is_turned(layer) for layer in range(shape.layers)]
    if shape.family in ("cohere2", "exaone4") and turned != near and (shape.family == "cohere2" or shape.window):
        raise UsageError(f"a {shape.family} has rotary positions in the blocks that see a window, and in no others")
    if shape.family == "exaone4" and not shape.window and not all(turned):
        raise UsageError("an exaone4 without windows has rotary positions in all blocks")
    kinds = ["sliding_attention" if each else "full_attention" for each in near]
    return {"sliding_window": shape.window, "layer_types": kinds}
