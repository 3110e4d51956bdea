"""Adapters of low rank: which weights of a decoder have them, and where they stand in PEFT's files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import sqrt
from typing import Any

from spmd_engine.configuration import Configuration, setting
from spmd_engine.dataclass import dataclass
from spmd_engine.errors import CheckpointError, UsageError
from spmd_engine.layers import Layer, Parallel
from spmd_engine.layers.low_rank import B, LowRank, name_of_a
from spmd_engine.models.decoder import DecoderShape
from spmd_engine.models.model import Model
from spmd_engine.models.stored import Stored
from spmd_engine.models.stored_names import stored_names

_THREE = {"q_proj": (("query",),), "k_proj": (("key",),), "v_proj": (("value",),)}
_ATTENTION = _THREE | {"o_proj": (("output",),)}
_OF_LLAMA = _ATTENTION | {"gate_proj": (("gate",),), "up_proj": (("up",),), "down_proj": (("down",),)}
#: By family, what others call the modules that can have an adapter, and the weights here that such a module holds: in
#: groups, which share the a of the module. Of models with experts only the attention has adapters.
_TARGETS: Mapping[str, Mapping[str, tuple[tuple[str, ...], ...]]] = {
    "gpt2": {"c_attn": (("query", "key", "value"),), "c_fc": (("w0",),), "c_proj": (("output",), ("w1",))},
    "phi3": {
        "qkv_proj": (("query", "key", "value"),), "o_proj": (("output",),), "gate_up_proj": (("gate", "up"),),
        "down_proj": (("down",),),
    },
    **dict.fromkeys(("mixtral", "qwen2-moe", "qwen3-moe", "olmoe"), _ATTENTION),
    "gpt-neo": _THREE | {"out_proj": (("output",),), "c_fc": (("w0",),), "c_proj": (("w1",),)},
    "gpt-neox": {
        "query_key_value": (("query", "key", "value"),), "dense": (("output",),), "dense_h_to_4h": (("w0",),),
        "dense_4h_to_h": (("w1",),),
    },
    "opt": _THREE | {"out_proj": (("output",),), "fc1": (("w0",),), "fc2": (("w1",),)},
    "phi": _THREE | {"dense": (("output",),), "fc1": (("w0",),), "fc2": (("w1",),)},
    "starcoder2": _ATTENTION | {"c_fc": (("w0",),), "c_proj": (("w1",),)},
}  # fmt: skip
#: Fields of ``adapter_config.json`` that change what is computed, and their one value that is computed here.
_REFUSED: Mapping[str, Any] = {
    "bias": "none", "use_dora": False, "modules_to_save": None, "layers_to_transform": None,
    "rank_pattern": {}, "alpha_pattern": {}, "target_parameters": None, "lora_bias": False, "exclude_modules": None,
    "trainable_token_indices": None, "layer_replication": None, "use_qalora": False, "use_bdlora": None,
    "alora_invocation_tokens": None,
}  # fmt: skip


@dataclass(frozen=True)
class LoRAOptions(Configuration):
    """Of each weight w of the ``targets``, w + (alpha / rank) · a · b is used, and a and b alone are trained."""

    rank: int = setting(8, least=1)
    alpha: float = setting(16.0, least=0)
    targets: str | None = None  #: names, with commas; None: all that the model has
    root: bool = False  #: whether the factor is alpha / sqrt(rank) instead (rsLoRA)

    def modules(self, family: str) -> dict[str, tuple[tuple[str, ...], ...]]:
        """The targets in a model of this family, and the groups of weights of each; raises UsageError for others."""
        known = _TARGETS.get(family, _OF_LLAMA)
        if self.targets is None:
            return dict(known)
        names = list(filter(None, (name.strip() for name in self.targets.split(","))))
        if not names or (unknown := sorted(set(names) - set(known))):
            said = unknown[0] if names else self.targets
            raise UsageError(
                f"targets: {said!r} of a {family} has no adapter here; those that can are {', '.join(known)}"
            )
        return {name: known[name] for name in names}

    def groups(self, family: str) -> list[tuple[str, ...]]:
        """The weights that are adapted, without the layer's name: those that share an a together."""
        return [group for groups in self.modules(family).values() for group in groups]

    def names_of_a(self, family: str) -> dict[str, str]:
        """Of each of these weights, the name of its a."""
        return {name: name_of_a(group) for group in self.groups(family) for name in group}

    @property
    def scale(self) -> float:
        """The factor of a · b."""
        return self.alpha / (sqrt(self.rank) if self.root else self.rank)


def with_adapters(model: Model, options: LoRAOptions, family: str) -> Model:
    """The model, all of it frozen, with adapters; raises UsageError for one that has none of the targets."""
    groups = options.groups(family)

    def frozen(layer: Layer) -> Layer:
        if isinstance(layer, Parallel):
            return layer.changed(frozen)
        adapted = [group for group in groups if set(group) <= set(layer.parameters)]
        return LowRank(layer, adapted, options.rank, options.scale)

    layers = [(name, frozen(layer)) for name, layer in model.layers]
    if not any(layer.parameters for _, layer in layers):
        raise UsageError(f"{model.name} has no adapters: it has none of {', '.join(options.modules(family))}")
    return replace(model, layers=tuple(layers))


def adapter_names(shape: DecoderShape, options: LoRAOptions) -> Iterator[tuple[str, tuple[Stored, ...]]]:
    """Where PEFT keeps a and b of every weight that is adapted."""
    modules, names_of_a, told = options.modules(shape.family), options.names_of_a(shape.family), set()
    for name, (stored, *_) in stored_names(shape):
        layer, _, own = name.rpartition("/")
        called, _, kind = stored.tensor.rpartition(".")
        if kind != "weight" or called.rpartition(".")[2] not in modules:
            continue
        out, into = stored.dims.split() if shape.family != "gpt2" else stored.dims.split()[::-1]
        of_a, of_b = (stored.pairs if "k" in letters else "" for letters in (into, out))
        a, module = f"{layer}/{names_of_a[own]}", f"base_model.model.{called}"
        if a not in told:
            told.add(a)
            yield a, (Stored(f"{module}.lora_A.weight", f"q {into}", pairs=of_a),)
        yield name + B, (replace(stored, tensor=f"{module}.lora_B.weight", dims=f"{out} q", pairs=of_b),)


def options_of_config(config: Mapping[str, Any], where: str) -> LoRAOptions:
    """What ``adapter_config.json`` says; raises CheckpointError for features that are not known here, by name."""
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"{where}: peft_type {config.get('peft_type')!r} is not known here; LORA is")
    for name, computed in _REFUSED.items():
        if (value := config.get(name)) and value != computed:
            raise CheckpointError(f"{where}: {name} is {value!r}, a feature that is not known here")
    targets = config.get("target_modules")
    if targets == "all-linear":
        targets = None
    elif not isinstance(targets, list) or not all(isinstance(each, str) for each in targets):
        raise CheckpointError(f"{where}: target_modules is {targets!r}; a list of names is read here")
    try:
        alpha, root = float(config["lora_alpha"]), bool(config.get("use_rslora"))
        return LoRAOptions(config["r"], alpha, None if targets is None else ",".join(sorted(targets)), root)
    except KeyError as error:
        raise CheckpointError(f"{where}: the field {error} is missing") from error
    except (UsageError, TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: {error}") from error


def config_of_options(options: LoRAOptions, family: str, base: str | None) -> dict[str, Any]:
    """What ``adapter_config.json`` says of them; ``base`` is where the weights are that they adapt."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": options.rank,
        "lora_alpha": options.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(options.modules(family)),
        "use_rslora": options.root,
        "bias": "none",
        "fan_in_fan_out": family == "gpt2",  # whose weights are stored as inputs by outputs; a and b are not
        "inference_mode": True,
    }
