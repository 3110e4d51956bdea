"""Adapters of low rank: which weights of a decoder have them, and where they stand in PEFT's files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

from spmd_engine.configuration import Configuration, setting
from spmd_engine.errors import CheckpointError, UsageError
from spmd_engine.layers.low_rank import A, B, LowRank, sides
from spmd_engine.models.decoder import DecoderShape
from spmd_engine.models.model import Model
from spmd_engine.models.stored_names import Stored, stored_names

#: What others call the weights that can have an adapter, and what they are called here.
TARGETS = {
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "o_proj": "output",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
}
#: Fields of ``adapter_config.json`` that change what is computed, and their one value that is computed here.
_REFUSED: Mapping[str, Any] = {
    "bias": "none", "use_dora": False, "fan_in_fan_out": False, "modules_to_save": None, "layers_to_transform": None,
    "rank_pattern": {}, "alpha_pattern": {}, "target_parameters": None, "lora_bias": False, "exclude_modules": None,
    "trainable_token_indices": None, "layer_replication": None, "use_qalora": False, "use_bdlora": None,
    "alora_invocation_tokens": None,
}  # fmt: skip


@dataclass(frozen=True)
class LoRAOptions(Configuration):
    """Of each weight w of the ``targets``, w + (alpha / rank) · a · b is used, and a and b alone are trained."""

    rank: int = setting(8, least=1)
    alpha: float = setting(16.0, least=0)
    targets: str = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"  #: names, with commas
    root: bool = False  #: whether the factor is alpha / sqrt(rank) instead (rsLoRA)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.names or (unknown := sorted(set(self.names) - set(TARGETS))):
            said = unknown[0] if self.names else self.targets
            raise UsageError(f"targets: {said!r} has no adapter here; those that can are {', '.join(TARGETS)}")

    @property
    def names(self) -> tuple[str, ...]:
        """The targets, one by one."""
        return tuple(filter(None, (name.strip() for name in self.targets.split(","))))

    @property
    def scale(self) -> float:
        """The factor of a · b."""
        return self.alpha / (sqrt(self.rank) if self.root else self.rank)


def with_adapters(model: Model, options: LoRAOptions) -> Model:
    """The model, all of it frozen, with adapters; raises UsageError for one that has experts, or is no Llama's kin."""
    own = {TARGETS[name] for name in options.names}
    layers = []
    for name, layer in model.layers:
        if any(parameter.element for parameter in layer.parameters.values()):
            raise UsageError(f"{model.name}: LoRA freezes dense models; {name} has experts")
        adapted = [each for each in layer.parameters if each in own]
        layers.append((name, LowRank(layer, adapted, options.rank, options.scale)))
    if not any(layer.parameters for _, layer in layers) or "positions" in dict(layers):
        raise UsageError(f"{model.name}: LoRA is for Llama's kin, whose weights are {', '.join(TARGETS)}")
    return replace(model, layers=tuple(layers))


def adapter_names(shape: DecoderShape, options: LoRAOptions) -> Iterator[tuple[str, tuple[Stored, ...]]]:
    """Where PEFT keeps a and b of every weight that is adapted."""
    targets = {f"{name}.weight" for name in options.names}
    for name, (stored, *_) in stored_names(shape):
        folder, _, own = stored.tensor.removesuffix(".weight").rpartition(".")
        if f"{own}.weight" not in targets:
            continue
        out, into = stored.dims.split()  # as the weight is stored
        module = f"base_model.model.{folder}.{own}"
        of_a, of_b = (stored.pairs if "k" in letters else "" for letters in (into, out))
        yield name + A, (Stored(f"{module}.lora_A.weight", f"q {into}", pairs=of_a),)
        yield name + B, (Stored(f"{module}.lora_B.weight", f"{out} q", pairs=of_b),)


def options_of_config(config: Mapping[str, Any], where: str) -> LoRAOptions:
    """What ``adapter_config.json`` says; raises CheckpointError for features that are not known here, by name."""
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"{where}: peft_type {config.get('peft_type')!r} is not known here; LORA is")
    for name, computed in _REFUSED.items():
        if (value := config.get(name)) and value != computed:
            raise CheckpointError(f"{where}: {name} is {value!r}, a feature that is not known here")
    targets = config.get("target_modules")
    if targets == "all-linear":
        targets = list(TARGETS)
    if not isinstance(targets, list):
        raise CheckpointError(f"{where}: target_modules is {targets!r}; a list of names is read here")
    try:
        ordered = [name for name in TARGETS if name in targets] + sorted(set(targets) - set(TARGETS))
        return LoRAOptions(config["r"], float(config["lora_alpha"]), ",".join(ordered), bool(config.get("use_rslora")))
    except KeyError as error:
        raise CheckpointError(f"{where}: the field {error} is missing") from error
    except UsageError as error:
        raise CheckpointError(f"{where}: {error}") from error


def config_of_options(options: LoRAOptions, base: str | None) -> dict[str, Any]:
    """What ``adapter_config.json`` says of them; ``base`` is where the weights are that they adapt."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": options.rank,
        "lora_alpha": options.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(options.names),
        "use_rslora": options.root,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def product_of(name: str, dims: str) -> tuple[str, str, str]:
    """The names of a and b of a weight, and the einsum that makes their product as the weight is."""
    into, out = sides(dims)
    return name + A, name + B, f"{into}q,q{out}->{into}{out}"
