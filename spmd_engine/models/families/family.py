"""The record that describes a family of decoders: its ``config.json``, its weights and its GGUF files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import sqrt
from typing import TYPE_CHECKING, Any, TypeVar

from spmd_engine.errors import UsageError

if TYPE_CHECKING:
    from spmd_engine.layers.attention.attention_config import RotaryOptions
    from spmd_engine.models.decoder import DecoderConfig

T = TypeVar("T")
Config = Mapping[str, Any]  #: the content of a ``config.json``, or the metadata of a GGUF file
#: By field of a DecoderConfig: the field of ``config.json`` and its default; None: the field is required.
ConfigFields = dict[str, tuple[str, Any]]
#: By name in a block: a module, or the names that programs have used for it, the first of which is written.
Modules = dict[str, str | tuple[str, ...]]


@dataclass(frozen=True)
class Rope:
    """Rotary positions in ``config.json``, as far as they differ from a Llama's."""

    theta: float = 10_000.0  #: the default base
    part: float | None = None  #: the default rotated part of a head; None: always the whole head
    pairs: str = "halves"  #: the numbers of a head that rotate together, in the model and in its safetensors files
    theta_field: str = "rope_theta"
    part_field: str = "partial_rotary_factor"
    kinds: Mapping[str, str] = field(default_factory=dict)  #: other names of a ``rope_type``
    ignored: tuple[str, ...] = ()  #: fields inside ``rope_parameters`` that change nothing up to the context
    in_windows: bool = False  #: whether layers with a window have their own positions, in ``sliding_attention``
    window_theta: float | None = None  #: the default base of these layers; None: as in other layers
    window_theta_field: str = ""
    described: bool = True  #: whether ``rope_parameters`` is written
    #: Reads fields of this family alone.
    read: Callable[[Config, DecoderConfig], RotaryOptions] | None = None


@dataclass(frozen=True)
class SlidingWindow:
    """Layers whose queries see a window of positions (``sliding_window``, ``layer_types``)."""

    default: int | None = None  #: positions
    every: int = 0  #: the period of layers that see all positions, without ``layer_types``; 0: no such layers
    #: Returns whether a layer has a window, if ``every`` cannot describe it.
    has_window: Callable[[Config, DecoderConfig, int], bool] | None = None
    pattern: bool = False  #: whether ``sliding_window_pattern`` replaces ``every``
    switch: bool = False  #: whether there are windows only with ``use_sliding_window``
    listed: bool = True  #: whether ``layer_types`` is written
    #: Whether layers without a window have no rotary positions: "always", or in "models with windows".
    rotary_only: str = ""


@dataclass(frozen=True)
class Experts:
    """Mixtures of experts; the values are defaults for fields missing in ``config.json``."""

    experts: int
    top_k: int
    field: str = "num_experts"
    hidden: int | None = None  #: default of ``moe_intermediate_size``; None: ``intermediate_size`` is used
    shared_hidden: int | None = None  #: default of ``shared_expert_intermediate_size``; None: no shared experts
    normalised: bool = False  #: whether a token's weights always sum to 1, without ``norm_topk_prob``
    gguf_normalised: bool = False  #: whether this holds for all models in GGUF files


@dataclass(frozen=True)
class Gguf:
    """GGUF files of a family: https://github.com/ggml-org/llama.cpp (``convert_hf_to_gguf.py``) writes them."""

    architecture: str  #: ``general.architecture``
    #: Whether a file of this architecture is of this family; None: if no other family matches.
    when: Callable[[Config], Any] | None = None
    reordered: bool = False  #: whether the converter puts rows of queries and keys in the order of neighbours
    values: Mapping[str, str] = field(default_factory=dict)  #: by field of a DecoderConfig; a value of 0 is ignored
    needed: tuple[str, ...] = ()  #: metadata without a default: a file that lacks it is refused
    required: Mapping[str, Any] = field(default_factory=dict)  #: the only supported values
    ignored: tuple[str, ...] = ()  #: metadata that changes nothing up to the context
    window: int | None = None  #: the default window; None: files have no window
    modules: Modules = field(default_factory=dict)  #: tensors with different names
    joins_rows: bool = False  #: whether queries, keys and values are in one tensor
    #: Reads the remaining fields from metadata and tensors.
    read: Callable[[Config, Mapping[str, Any], DecoderConfig], DecoderConfig] | None = None
    #: Returns the metadata of the fields that ``read`` reads.
    write: Callable[[DecoderConfig], dict[str, Any]] | None = None


@dataclass(frozen=True)
class Family:
    """The features of a ``model_type``. Features that the record does not describe are refused by name."""

    model_type: str
    about: str  #: one line of docs/models.md
    fields: ConfigFields
    modules: Modules = field(default_factory=lambda: LLAMA_MODULES)
    constants: dict[str, Any] = field(default_factory=dict)  #: values that differ from a DecoderConfig's defaults
    architecture: str = ""  #: the class of transformers; the default for "qwen2_moe" is "Qwen2MoeForCausalLM"
    implied: Mapping[str, Any] = field(default_factory=dict)  #: like ``constants``, but not recorded in a DecoderConfig
    scaled_embedding: bool = False  #: whether embeddings are multiplied by sqrt(width)
    scale_offset: float = 0.0  #: subtracted from scales of norms in its files
    transposed: bool = False  #: whether files have weights as inputs by outputs
    also_read: tuple[str, ...] = ()  #: fields of a DecoderConfig that ``read`` and ``write`` handle
    aliases: Mapping[str, str] = field(default_factory=dict)  #: second names of fields of ``config.json``
    required: Mapping[str, Any] = field(default_factory=dict)  #: fields of ``config.json``, with the supported value
    ignored: tuple[str, ...] = ()  #: fields of ``config.json`` without effect on logits
    rope: Rope | None = Rope()
    windows: SlidingWindow | None = None
    experts: Experts | None = None
    read: Callable[[Config, DecoderConfig], DecoderConfig] | None = None
    write: Callable[[DecoderConfig], dict[str, Any]] | None = None
    #: ``model_type`` of models of text and images whose text model is of this family, and the defaults of
    #: ``text_config``.
    multimodal: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    gguf: Gguf = Gguf("")  #: no architecture: no GGUF files

    @property
    def class_name(self) -> str:
        """The class of transformers."""
        return self.architecture or "".join(map(str.capitalize, self.model_type.split("_"))) + "ForCausalLM"

    @property
    def name(self) -> str:
        """The name in runs and errors."""
        return self.model_type.replace("_", "-")

    def usual(self, width: int) -> dict[str, Any]:
        """Return the fields of a DecoderConfig of this width that are not in ``config.json``."""
        return self.constants | ({"embedding_scale": sqrt(width)} if self.scaled_embedding else {})


def check_required(name: str, value: Any, supported: Any) -> None:
    """Raise UsageError, with the field, for a value that is not supported.

    Null is accepted for any text, and null, 0 and "" for false.
    """
    is_empty = not value and not supported or value is None and isinstance(supported, str)
    if value != supported and not is_empty:
        raise UsageError(f"{name} is {value!r}, which is not supported; {supported!r} is")


def same(name: str, *fields: str, default: Any = False) -> ConfigFields:
    """Return several fields of a DecoderConfig that one field of ``config.json`` determines."""
    return dict.fromkeys(fields, (name, default))


def defaults(**values: Any) -> ConfigFields:
    """Return fields of a Llama with other defaults: context, epsilon, key_value_heads, head_width and activation."""
    return {field: (RMS[field][0], value) for field, value in values.items()}


def without(table: Mapping[str, T], *names: str) -> dict[str, T]:
    """Return fields or modules except those of some names."""
    return {name: value for name, value in table.items() if name not in names}


# --- Parts of many families

SIZES: ConfigFields = {
    "layers": ("num_hidden_layers", None),
    "width": ("hidden_size", None),
    "heads": ("num_attention_heads", None),
    "hidden": ("intermediate_size", None),
    "vocabulary": ("vocab_size", None),
    "context": ("max_position_embeddings", 2048),
    "epsilon": ("layer_norm_eps", 1e-5),
    "tied": ("tie_word_embeddings", False),
}
TIED: ConfigFields = {"tied": ("tie_word_embeddings", True)}
SILU: ConfigFields = {"activation": ("hidden_act", "silu")}
GROUPED: ConfigFields = {"key_value_heads": ("num_key_value_heads", 0)}
RMS: ConfigFields = SIZES | SILU | GROUPED | {"epsilon": ("rms_norm_eps", 1e-5), "head_width": ("head_dim", 0)}
ATTENTION_BIAS = same("attention_bias", "bias", "output_bias")
MLP_BIAS = same("mlp_bias", "mlp_bias")

ATTENTION: Modules = {
    "query": "self_attn.q_proj", "key": "self_attn.k_proj", "value": "self_attn.v_proj", "output": "self_attn.o_proj",
    "query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm"
}  # fmt: skip
#: A Llama's modules except its perceptron.
LLAMA_ATTENTION: Modules = ATTENTION | {
    "": "model.", "embedding": "embed_tokens", "norm": "norm", "block": "layers.",
    "attention/norm": "input_layernorm", "mlp/norm": "post_attention_layernorm"
}  # fmt: skip
LLAMA_MODULES: Modules = LLAMA_ATTENTION | {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}
#: All experts of a layer in two tensors, or separate tensors for each expert.
EXPERTS: Modules = {
    "router": "mlp.gate.weight", "expert/gate": "mlp.experts.{}.gate_proj.weight",
    "expert/up": "mlp.experts.{}.up_proj.weight", "expert/down": "mlp.experts.{}.down_proj.weight",
    "experts/gate_up": "mlp.experts.gate_up_proj", "experts/down": "mlp.experts.down_proj"
}  # fmt: skip
GATE_UP: Modules = {"gate_up": "mlp.gate_up_proj", "down": "mlp.down_proj"}  #: gate and up in one tensor
UNGATED_MODULES: Modules = LLAMA_ATTENTION | {"w0": "mlp.up_proj", "w1": "mlp.down_proj"}
NORMS_AFTER: Modules = {
    "attention/norm_after": "post_attention_layernorm", "mlp/norm": "pre_feedforward_layernorm",
    "mlp/norm_after": "post_feedforward_layernorm"
}  # fmt: skip
#: Layer norms, GELU.
GPT_CONSTANTS: dict[str, Any] = {"norm": "layer", "gated": False, "activation": "gelu", "mlp_bias": True}
