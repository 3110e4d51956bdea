"""Reads Hugging Face's ``config.json`` as a DecoderConfig, by the record of its family.

Each field is read, ignored as harmless, refused, or named in a warning.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from spmd_engine.errors import CheckpointError, UsageError, one_of
from spmd_engine.formats.tensor import FileTensor
from spmd_engine.layers import RouterOptions
from spmd_engine.models.decoder import DecoderConfig
from spmd_engine.models.families import FAMILIES
from spmd_engine.models.families.family import Config, Family, SlidingWindow, check_required
from spmd_engine.models.hf.rope import with_rotary
from spmd_engine.models.mixture import Mixture, as_text

#: Fields without effect on logits: training, programs that wrote or run it, defaults of generation, special tokens.
HARMLESS = frozenset((
    "_name_or_path", "_attn_implementation", "_attn_implementation_internal", "_attn_implementation_autoset",
    "_commit_hash", "_experts_implementation", "_experts_implementation_internal", "_flash_attn_2_enabled",
    "architectures", "attn_implementation", "auto_map", "cache_implementation", "dtype", "is_decoder",
    "is_llama_config", "language", "license", "model_max_length", "model_name", "model_type", "name_or_path",
    "tokenizer_class", "torch_dtype", "torchscript", "transformers.js_config", "transformers_version", "use_bfloat16",
    "use_cache", "use_flash_attn", "pretraining_tp", "tp_plan", "unsloth_fixed", "unsloth_version", "use_mambapy",
    "max_window_layers", "no_rope_layer_interval", "_sliding_window_pattern", "sliding_window_pattern",
    "attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "hidden_dropout", "embd_layer_dropout",
    "initializer_range", "initializer_factor", "gradient_checkpointing", "router_aux_loss_coef",
    "router_jitter_noise", "input_jitter_noise", "router_z_loss_coef", "output_router_logits", "output_attentions",
    "output_hidden_states", "return_dict", "return_dict_in_generate", "remove_invalid_values",
    "reorder_and_upcast_attn", "n_ctx", "chunk_size_feed_forward", "bos_token_id", "eos_token_id", "pad_token_id",
    "unk_token_id", "sep_token_id", "decoder_start_token_id", "image_token_id", "forced_bos_token_id",
    "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "do_sample", "temperature",
    "top_k", "top_p", "typical_p", "min_p", "num_beams", "num_beam_groups", "num_return_sequences",
    "diversity_penalty", "early_stopping", "length_penalty", "max_length", "max_new_tokens", "min_length",
    "no_repeat_ngram_size", "output_scores", "encoder_no_repeat_ngram_size", "repetition_penalty",
    "exponential_decay_length_penalty", "finetuning_task", "id2label", "label2id", "num_labels", "prefix",
    "problem_type", "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type",
    "summary_use_proj", "task_specific_params", "tf_legacy_loss", "pruned_heads", "tie_encoder_decoder",
    "cross_attention_hidden_size", "dropout", "layerdrop", "classifier_dropout", "resid_dropout", "embed_dropout",
    "residual_dropout", "embedding_dropout", "activation_dropout", "init_std", "attention_softmax_in_fp32",
    "_num_labels", "full_attn_mod", "interpolate_factor", "init_device",
    "scale_attention_softmax_in_fp32", "mlp_type"
))  # fmt: skip

#: Fields that change what is computed, and their supported values besides None, 0, false and "". Fields in the record
#: of a family are read before.
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "mlp_bias": (),
    "clip_qkv": (),
    "do_layer_norm_before": (True,),
    "layer_norm_elementwise_affine": (True,),
    "enable_bias": (True,),
    "partial_rotary_factor": (1.0,),
    "use_sliding_window": (),
    "sliding_window": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "embedding_multiplier": (1.0,),
    "residual_multiplier": (1.0,),
    "logits_scaling": (1.0,),
    "logit_scale": (1.0,),
    "scale_attn_weights": (True,),
    "is_encoder_decoder": (),
    "use_bidirectional_attention": (),
    "quantization_config": (),
}
#: Any other field with a name like these probably changes what is computed.
_COMPUTES = re.compile(
    r"scal(e|ing)|sparse|multiplier|softcap|capping|clip|window|chunk|rope|rotary|alibi|norm|bias|expert|moe|act_fn|activation"
    r"|attention|attn|layer|hidden|lora|quant|dim|width|head|mup|parallel_residual|interleave"
)


class Fields(Mapping[str, Any]):
    """A config that records which of its fields are read."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._content, self._read = content, set()

    def __getitem__(self, name: str) -> Any:
        self._read.add(name)
        return self._content[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._content)

    def __len__(self) -> int:
        return len(self._content)

    def left(self) -> list[str]:
        """Return the fields that were not read."""
        return [name for name in self._content if name not in self._read]

    def check_rest(self, where: str) -> list[str]:
        """Return the unknown fields that were not read. Raises CheckpointError, with the field, for one that
        changes, or by its name probably changes, what is computed."""
        unknown = []
        for name in self.left():
            value = self._content[name]
            if name in HARMLESS:
                continue
            if name in REFUSED:
                supported = REFUSED[name]
                refused = value and value not in supported or value is False and supported == (True,)
            else:
                refused = value and _COMPUTES.search(name)
            if refused:
                raise CheckpointError(f"{where}: {name} is {value!r}, which is not supported")
            if value and name not in REFUSED:
                unknown.append(name)
        return unknown


# --- Models of text and images: the text model's part of ``config.json`` and of the tensors


#: By ``model_type``, the defaults of ``text_config``.
MULTIMODAL: Mapping[str, Mapping[str, Any]] = {
    kind: {"model_type": family.model_type, **defaults}
    for family in FAMILIES.values()
    for kind, defaults in family.multimodal.items()
}
#: Fields beside ``text_config`` about images.
_IMAGE_FIELDS = (
    "vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index",
    "projector_hidden_act", "multimodal_projector_bias", "spatial_merge_size", "vision_feature_layer"
)  # fmt: skip
#: Prefixes of the text model's tensors, and those in a file of the text model alone; prefixes of image tensors.
_PREFIXES = {
    "model.language_model.": "model.", "language_model.model.": "model.", "language_model.lm_head.": "lm_head."
}  # fmt: skip
_IMAGE_PREFIXES = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


def text_config(config: Mapping[str, Any], where: str) -> tuple[dict[str, Any], list[str]]:
    """Return the config of the text model, and the names of ignored fields.

    Raises CheckpointError, with the field, for a field that would change what the text model computes.
    """
    outer = Fields(config)
    text = outer.get("text_config")
    if not isinstance(text, Mapping):
        raise CheckpointError(f"{where}: text_config is {text!r}; it must be an object")
    tied = outer.get("tie_word_embeddings")
    for name in _IMAGE_FIELDS:
        outer.get(name)
    unknown = outer.check_rest(where)
    merged = {**MULTIMODAL[config["model_type"]], **text, **({} if tied is None else {"tie_word_embeddings": tied})}
    return merged, [*(["vision_config"] if config.get("vision_config") else []), *unknown]


def text_tensors(tensors: Mapping[str, FileTensor]) -> dict[str, FileTensor]:
    """Return the tensors of the text model, by their names in a file of the text model alone."""
    renamed = {}
    for name, tensor in tensors.items():
        if not name.startswith(_IMAGE_PREFIXES):
            prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
            new_name = _PREFIXES.get(prefix, "") + name.removeprefix(prefix)
            renamed[new_name] = replace(tensor, name=new_name)
    return renamed


# --- A config as a DecoderConfig


MODEL_TYPES = {family.model_type: family for family in FAMILIES.values()}
#: Names of activations in configs, and of those in DecoderConfig; of equal ones the first is written.
ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu", "gelu_fast": "gelu",
    "gelu": "gelu-erf", "relu": "relu", "relu2": "relu-squared"
}  # fmt: skip
_WINDOW, _FULL = "sliding_attention", ("full_attention", "attention")
_BOOLEANS, _FACTORS = ("bias", "output_bias", "mlp_bias"), (
    "embedding_scale", "residual_scale", "attention_scale", "logits_divisor"
)  # fmt: skip
#: The types of fields that hold more than one value.
_KINDS = dict.fromkeys(("rope_parameters", "rope_scaling", "attn_config"), (Mapping, "an object")) | dict.fromkeys(
    ("layer_types", "mlp_only_layers", "no_rope_layers", "attention_types", "attention_layers"),
    ((list, tuple), "a list"),
)


def read_config(config: Config, where: str) -> tuple[DecoderConfig, list[str]]:
    """Return the decoder that a config describes, and the names of unknown fields, which probably have no effect.

    Errors name ``where`` the config is. Raises CheckpointError, with the field, for a model type or a feature that is
    not supported, and for fields that are missing or have impossible values.
    """
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in MULTIMODAL:
        text, ignored = text_config(config, where)
        shape, unknown = read_config(text, where)
        return shape, [*ignored, *unknown]
    if not isinstance(kind, str) or kind not in MODEL_TYPES:
        raise CheckpointError(f"{where}: model_type {kind!r} is not supported; {one_of(kind, MODEL_TYPES)}")
    for name, (types, description) in _KINDS.items():
        if config.get(name) is not None and not isinstance(config[name], types):
            raise CheckpointError(f"{where}: {name} is {config[name]!r}: it must be {description}")
    fields = Fields(config)
    try:
        shape = _read(MODEL_TYPES[kind], fields)
        shape = shape.changed(head_width=shape.width_of_heads)
        shape.check_rotary()
        return shape, fields.check_rest(where)
    except CheckpointError:
        raise
    except KeyError as error:
        raise CheckpointError(f"{where}: the field {error} is missing") from error
    except UsageError as error:
        raise CheckpointError(f"{where}: {error}") from error
    except (TypeError, ValueError, AttributeError, ArithmeticError, LookupError) as error:
        raise CheckpointError(f"{where}: a field has an impossible value: {error}") from error


def _read(family: Family, config: Config) -> DecoderConfig:
    for name in family.ignored:
        config.get(name)
    for name, supported in family.required.items():
        check_required(name, config.get(name, supported), supported)
    values = {name: _value(name, config, family) for name in family.fields}
    values["key_value_heads"] = values.get("key_value_heads") or values["heads"]
    values["head_width"] = values.get("head_width") or None
    values["hidden"] = values.get("hidden") or 4 * values["width"]
    shape = DecoderConfig(family=family.name, **{**family.usual(values["width"]), **values})
    shape = shape.changed(mixture=_mixture(family, config, shape))
    if family.read is not None:
        shape = family.read(config, shape)
    if family.rope is not None:
        shape = with_rotary(config, shape, family.rope)
    return _with_windows(config, shape, family.windows)


def _value(field: str, config: Config, family: Family) -> Any:
    """Return the value of a field of a DecoderConfig."""
    name, default = family.fields[field]
    alias = family.aliases.get(name)
    if alias is not None and (value := config.get(alias)) is not None:
        check_required(name, config.get(name, value), value)
        return value
    value = config[name] if default is None else config.get(name, default)
    if field == "activation":
        if value not in ACTIVATIONS:
            raise UsageError(f"the activation {value!r} is not supported; {one_of(value, ACTIVATIONS)}")
        return ACTIVATIONS[value]
    if field == "context":
        return value or default
    return bool(value) if field in _BOOLEANS else float(value) if field in _FACTORS else value


def _mixture(family: Family, config: Config, shape: DecoderConfig) -> Mixture | None:
    """Return the experts, without an auxiliary loss: set ``--balance-loss`` to train from scratch."""
    experts = family.experts
    if experts is None:
        return None
    normalised = experts.normalised or bool(config.get("norm_topk_prob", False))
    router = RouterOptions(top_k=config.get("num_experts_per_tok", experts.top_k), renormalise=normalised)
    if experts.field == "num_experts":
        count = config.get("num_experts") or config.get("num_local_experts", experts.experts)
    else:
        count = config.get(experts.field, experts.experts)
    if experts.hidden is None:
        return Mixture(experts=count, hidden=shape.hidden, router=router)
    every, dense = config.get("decoder_sparse_step") or 1, set(config.get("mlp_only_layers") or ())
    dense |= {layer for layer in range(shape.layers) if (layer + 1) % every}
    hidden, shared, rest = config.get("moe_intermediate_size", experts.hidden), 0, 0
    if experts.shared_hidden is not None:
        shared, rest = divmod(config.get("shared_expert_intermediate_size", experts.shared_hidden), hidden)
    if rest:
        raise UsageError(f"shared_expert_intermediate_size is not a multiple of moe_intermediate_size, {hidden}")
    return Mixture(
        experts=count, hidden=hidden, dense=as_text(dense), router=router, shared=shared, shared_gate=shared > 0
    )


# --- Windows: the blocks that have one, in config.json and in GGUF files


def _with_windows(config: Config, shape: DecoderConfig, windows: SlidingWindow | None) -> DecoderConfig:
    kinds, window = config.get("layer_types"), None
    if windows is not None:
        window = config.get("sliding_window", windows.default)
        if windows.switch and not config.get("use_sliding_window"):
            window = None
    if kinds is None:
        near = _usual_windows(config, shape, windows) if windows is not None and window else []
    else:
        if len(kinds) != shape.layers:
            raise UsageError(f"layer_types has {len(kinds)} values, but there are {shape.layers} layers")
        if unknown := sorted(set(kinds) - {_WINDOW, *_FULL}):
            raise UsageError(f"layer_types has {unknown[0]!r}, which is not supported")
        near = [layer for layer, kind in enumerate(kinds) if kind == _WINDOW]
        if near and not window:
            raise UsageError(f"layer_types has {_WINDOW!r}, but there is no sliding_window")
    if windows is not None and windows.rotary_only == "always" and not window and kinds is None:
        raise UsageError("sliding_window is null, which is not supported without layer_types")
    return with_windows_in(shape, windows, window, near)


def _usual_windows(config: Config, shape: DecoderConfig, windows: SlidingWindow) -> list[int]:
    every = windows.every
    if windows.pattern:
        every = config.get("sliding_window_pattern") or every
        check_required("sliding_window_pattern", every, every if isinstance(every, int) else windows.every)
    if windows.has_window is not None:
        return [layer for layer in range(shape.layers) if windows.has_window(config, shape, layer)]
    return [layer for layer in range(shape.layers) if not every or (layer + 1) % every]


def with_windows_in(
    shape: DecoderConfig, windows: SlidingWindow | None, window: int | None, near: list[int]
) -> DecoderConfig:
    """Return the shape with a window in the blocks ``near``, and the rotary positions that the family then has."""
    far = as_text(set(range(shape.layers)) - set(near))
    if windows is not None and (windows.rotary_only == "always" or windows.rotary_only and window):
        shape = shape.changed(no_rope_layers=far)
    if not near:
        return shape.changed(window_rotary=None)
    return shape.changed(window=window, window_layers=as_text(near) if far else "")
