"""Adapters of low rank: which weights of a decoder have them, and where they stand in PEFT's files."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from math import sqrt
from typing import TYPE_CHECKING, Any

from spmd_engine.configuration import Configuration, setting
from spmd_engine.errors import CheckpointError, UsageError, one_of
from spmd_engine.layers import Layer, Parallel
from spmd_engine.models.decoder import DecoderConfig, decoder
from spmd_engine.models.families import FAMILIES
from spmd_engine.models.model import Model

if TYPE_CHECKING:
    from spmd_engine.models.weight_map import TensorSlice

_QKV = ("query", "key", "value")
#: Modules of a record's ``modules`` that can have an adapter, and the weights here that each holds.
_ADAPTED = {
    **dict.fromkeys(("rows", "stacked", "grouped"), _QKV), **{name: (name,) for name in (*_QKV, "output")},
    "gate_up": ("gate", "up"), **{name: (name,) for name in ("gate", "up", "down", "w0", "w1")},
    **{f"expert/{name}": (name,) for name in ("gate", "up", "down")},
}  # fmt: skip
_GATE_OR_UP = re.compile(r"expert\d+/(gate|up)$")
_EXPERT, _FUSED = re.compile(r"expert\d+/"), "experts."
_OF_EXPERTS = {
    f"{_FUSED}gate_up_proj": (("expert/gate", "expert/up"),), f"{_FUSED}down_proj": (("expert/down",),)
}  # fmt: skip
_DOUBLED = r".*\.gate_up_proj"  # what PEFT says of it
#: Fields of ``adapter_config.json`` that change what is computed, and their one value that is computed here.
_REFUSED: Mapping[str, Any] = {
    "bias": "none", "use_dora": False, "modules_to_save": None, "layers_to_transform": None,
    "rank_pattern": {}, "alpha_pattern": {}, "lora_bias": False, "exclude_modules": None,
    "trainable_token_indices": None, "layer_replication": None, "use_qalora": False, "use_bdlora": None,
    "alora_invocation_tokens": None,
}  # fmt: skip


@dataclass(frozen=True)
class LoRAOptions(Configuration):
    """Of each weight w of the ``targets``, w + (alpha / rank) · a · b is used, and a and b alone are trained."""

    rank: int = setting(
        8,
        least=1,
        fixed=True,
        unset="no adapters",
        help="Rank of adapters, which alone are trained; the model is frozen.",
    )
    alpha: float = setting(16.0, least=0, fixed=True, help="The factor of adapters is this, divided by the rank.")
    targets: str | None = setting(
        None,
        metavar="NAME,...",
        fixed=True,
        unset="all",
        help="Weights that have adapters, such as q_proj.",
    )
    root: bool = setting(False, option=None, help="Divide alpha by the root of the rank instead (rsLoRA).")
    doubled: bool = setting(
        False, option=None, help="`experts.gate_up_proj` has twice the rank, as PEFT stores adapters of gate and up."
    )

    def modules(self, family: str) -> dict[str, tuple[tuple[str, ...], ...]]:
        """The targets in a model of this family, and the groups of weights of each; raises UsageError for others."""
        known = _targets(family)
        if self.targets is None:
            return {name: groups for name, groups in known.items() if not name.startswith(_FUSED)}
        names = list(filter(None, (name.strip() for name in self.targets.split(","))))
        if not names or (unknown := sorted(set(names) - set(known))):
            target = unknown[0] if names else self.targets
            raise UsageError(f"targets: {target!r} of a {family} has no adapter here; {one_of(target, known)}")
        found = {name: known[name] for name in names}
        alone = {each for name in found if not name.startswith(_FUSED) for group in known[name] for each in group}
        for name in found.keys() & _OF_EXPERTS.keys():
            if twice := sorted(alone & {each.removeprefix("expert/") for group in known[name] for each in group}):
                raise UsageError(f"targets: {name} would adapt {twice[0]} of experts, which have adapters of their own")
        if self.doubled and (self.root or f"{_FUSED}gate_up_proj" not in found):
            raise UsageError("doubled: it is of the target experts.gate_up_proj, and not beside root")
        return found

    def names(self, family: str, weights: Mapping[str, str]) -> dict[str, tuple[str, str]]:
        """Of each of these weights that is adapted, the names of its a and its b; ``weights`` are names and dims."""
        from spmd_engine.layers.low_rank import names_of_adapter

        groups = {name: group for groups in self.modules(family).values() for group in groups for name in group}
        found = {}
        for name, dims in weights.items():
            own = name.rpartition("/")[2]
            group = groups.get(f"expert/{own}") if _EXPERT.search(name) else None
            if group := group or groups.get(own):
                found[name] = names_of_adapter(name, [each.removeprefix("expert/") for each in group], dims)
        return found

    @property
    def scale(self) -> float:
        """The factor of a · b."""
        return self.alpha / (sqrt(self.rank) if self.root else self.rank)


def _targets(family: str) -> dict[str, tuple[tuple[str, ...], ...]]:
    """The modules of a family that can have an adapter, by the last part of their names, and the weights that such a
    module holds: in groups, which share the a of the module. Each expert has modules of its own; or, as newer programs
    have it, all experts of a layer are two tensors, ``experts.`` and their names, and adapters are of a part of each.
    """
    record, targets = FAMILIES[family], {}
    for name, weights in _ADAPTED.items():
        if isinstance(module := record.modules.get(name), str):
            own = module.removesuffix(".weight").rpartition(".")[2]
            targets[own] = tuple(dict.fromkeys((*targets.get(own, ()), weights)))
    return targets | (_OF_EXPERTS if "expert/gate" in record.modules else {})


def with_adapters(model: Model, options: LoRAOptions, family: str) -> Model:
    """The model, all of it frozen, with adapters; raises UsageError for one that has none of the targets."""
    from spmd_engine.layers.low_rank import LowRank

    def frozen(layer: Layer) -> Layer:
        if isinstance(layer, Parallel):
            return layer.changed(frozen)
        weights = {name: each.dims for name, each in layer.parameters.items() if len(each.dims) > 1}
        names = options.names(family, weights)
        doubled = [name for name in names if options.doubled and _GATE_OR_UP.search(name)]
        return LowRank(layer, names, options.rank, options.scale, doubled)

    layers = [(name, frozen(layer)) for name, layer in model.layers]
    if not any(layer.parameters for _, layer in layers):
        raise UsageError(f"{model.name} has no adapters: it has none of {', '.join(options.modules(family))}")
    return replace(model, layers=tuple(layers))


def adapter_names(shape: DecoderConfig, options: LoRAOptions) -> Iterator[tuple[str, tuple[TensorSlice, ...]]]:
    """Where PEFT keeps a and b of every weight that is adapted."""
    from spmd_engine.models.weight_map import weight_map

    dims = {name: parameter.dims for name, (parameter, _) in decoder(shape).parameters()}
    names, modules, told = options.names(shape.family, dims), options.modules(shape.family), set()
    for name, ways in weight_map(shape):
        if name not in names:
            continue
        stored = next((each for each in ways if _FUSED + each.tensor.rpartition(".")[2] in modules), ways[0])
        for adapter, thin in zip(names[name], _thin(stored, shape.family, modules, options.doubled), strict=True):
            if adapter not in told:  # by another weight that shares it
                told.add(adapter)
                yield adapter, (thin,)


def _thin(stored: TensorSlice, family: str, modules: Collection[str], doubled: bool) -> tuple[TensorSlice, TensorSlice]:
    """Where the a and the b are of a weight that is stored there."""
    from spmd_engine.models.weight_map import TensorSlice

    folder, _, called = stored.tensor.rpartition(".")
    if _FUSED + called not in modules:
        folder = stored.tensor.removesuffix(".weight")
        out, into = stored.dims.split() if not FAMILIES[family].transposed else stored.dims.split()[::-1]
        of_a, of_b = f"q {into}", f"{out} q"
    else:
        _, out, into = stored.dims.split()
        q = "Q" if doubled and called == "gate_up_proj" else "q"
        of_a, of_b = f"e{q} {into}", f"{out} {q}e"
        if called == "gate_up_proj" and f"{_FUSED}down_proj" in modules:  # PEFT wraps one tensor of a module first
            folder += ".base_layer"

    def beside(called: str, dims: str) -> TensorSlice:
        at = {letter: number for letter, number in stored.at.items() if letter in dims}
        rows = stored.rows if dims == of_b else None
        among = {letter: part for letter, part in stored.among.items() if letter in dims}
        pairs = stored.pairs if "k" in dims else ""
        return TensorSlice(f"base_model.model.{folder}.{called}.weight", dims, at, pairs=pairs, rows=rows, among=among)

    return beside("lora_A", of_a), beside("lora_B", of_b)


def options_of_config(config: Mapping[str, Any], where: str) -> LoRAOptions:
    """What ``adapter_config.json`` says; raises CheckpointError for unsupported features, by name."""
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"{where}: peft_type {config.get('peft_type')!r} is not supported; LORA is")
    doubled = _doubles(config)
    for name, computed in _REFUSED.items():
        if doubled and name in ("rank_pattern", "alpha_pattern"):
            continue
        if (value := config.get(name)) and value != computed:
            raise CheckpointError(f"{where}: {name} is {value!r}, which is not supported")
    targets = config.get("target_modules")
    if targets == "all-linear":
        targets = None
    elif targets is None and config.get("target_parameters"):
        targets = []
    elif not isinstance(targets, list) or not all(isinstance(each, str) for each in targets):
        raise CheckpointError(f"{where}: target_modules is {targets!r}; a list of names is read here")
    of_experts = {f"{_FUSED}{str(name).rpartition('.')[2]}": name for name in config.get("target_parameters") or ()}
    if odd := sorted(str(of_experts[name]) for name in of_experts.keys() - _OF_EXPERTS.keys()):
        raise CheckpointError(f"{where}: target_parameters has {odd[0]!r}, which is not supported")
    if of_experts and targets is None:
        raise CheckpointError(f"{where}: target_parameters beside all-linear are not supported; list the modules")
    targets = None if targets is None else [*targets, *of_experts]
    try:
        alpha, root = float(config["lora_alpha"]), bool(config.get("use_rslora"))
        return LoRAOptions(config["r"], alpha, None if targets is None else ",".join(sorted(targets)), root, doubled)
    except KeyError as error:
        raise CheckpointError(f"{where}: the field {error} is missing") from error
    except (UsageError, TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: {error}") from error


def _doubles(config: Mapping[str, Any]) -> bool:
    """Whether it says that of experts gate and up together have twice the rank, with the factor of all others."""
    of_rank, of_alpha = config.get("rank_pattern"), config.get("alpha_pattern")
    if not of_rank or config.get("use_rslora") or not config.get("target_parameters"):
        return False
    twice = {_DOUBLED: 2 * (config.get("r") or 0)}, {_DOUBLED: 2 * (config.get("lora_alpha") or 0)}
    return (of_rank, of_alpha) == twice


def config_of_options(options: LoRAOptions, family: str, base: str | None) -> dict[str, Any]:
    """What ``adapter_config.json`` says of them; ``base`` is where the weights are that they adapt."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": options.rank,
        "lora_alpha": options.alpha,
        "lora_dropout": 0.0,
        "target_modules": [name for name in options.modules(family) if not name.startswith(_FUSED)],
        "target_parameters": [f"mlp.{name}" for name in options.modules(family) if name.startswith(_FUSED)] or None,
        "use_rslora": options.root,
        "rank_pattern": {_DOUBLED: 2 * options.rank} if options.doubled else {},
        "alpha_pattern": {_DOUBLED: 2 * options.alpha} if options.doubled else {},
        "bias": "none",
        "fan_in_fan_out": FAMILIES[family].transposed,  # a and b are not
        "inference_mode": True,
    }
