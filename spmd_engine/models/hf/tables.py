"""What ``config.json`` says of decoders that a table describes: what each family calls fields, read and written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spmd_engine.errors import UsageError
from spmd_engine.models.decoder import DecoderConfig
from spmd_engine.models.hf.families import activation_said, always, words_for_activation
from spmd_engine.models.hf.family_tables import shape_beside_table
from spmd_engine.models.hf.unknown_fields import must_be
from spmd_engine.models.hf.words import words_beside_table

#: Fields of a DecoderConfig, what a config calls them, and their value where it is silent; None: it must not be.
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
#: Families of which one field speaks of all biases of the attention, and those where it speaks of all there are.
_OUTPUT_TOO = (
    "gpt-neox", "olmo", "cohere", "cohere2", "falcon", "starcoder2", "arcee", "ernie4-5", "hunyuan-v1-dense",
    "nemotron", "jais2", "internlm3", "internlm2", "granitemoehybrid",
)  # fmt: skip
_PERCEPTRONS_TOO = ("falcon", "starcoder2", "ernie4-5")
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


def shape_by_table(family: str, config: Mapping[str, Any]) -> DecoderConfig:
    """The decoder of one of the ``BY_TABLE`` that a config describes; raises UsageError and KeyError."""
    values: dict[str, Any] = {}
    for own, (name, default) in (_COMMON | _OWN[family]).items():
        if own not in _UNSAID.get(family, ()):
            values[own] = _said(config, name, default, _ALSO.get(family, {}).get(name))
    if family == "internlm3":  # whose fields transformers calls as Llama's
        values["bias"] = config.get("attention_bias", values["bias"])
        must_be("bias", config.get("mlp_bias", values["perceptron_bias"]), values["bias"])
        values["perceptron_bias"] = values["bias"]
    for own in _FACTORS & values.keys():
        values[own] = float(values[own])
    values["hidden"] = values.get("hidden") or 4 * values["width"]
    if "activation" in values:
        values["activation"] = activation_said(values["activation"])
    values["key_value_heads"] = values.get("key_value_heads") or values["heads"]
    values["head_width"] = values.get("head_width") or None
    shape = DecoderConfig(family=family, **{**always(family, values["width"]), "epsilon": 1e-5, **values})
    if family in _OUTPUT_TOO:
        shape = shape.changed(output_bias=shape.bias)
    if family in _PERCEPTRONS_TOO:
        shape = shape.changed(perceptron_bias=shape.bias)
    for name, computed in _MUST_BE.get(family, {}).items():
        must_be(name, config.get(name, computed), computed)
    return shape_beside_table(config, shape)


def _said(config: Mapping[str, Any], name: str, default: Any, also: str | None) -> Any:
    """The value of a field, which may ``also`` be called otherwise."""
    if also is not None and (value := config.get(also)) is not None:
        must_be(name, config.get(name, value), value)
        return value
    return config[name] if default is None else config.get(name, default)


def words_by_table(shape: DecoderConfig) -> dict[str, Any]:
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
    return said | words_beside_table(shape)
