"""Adapters of low rank: the weights of a decoder that have them, and their tensors in PEFT's files."""

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
#: Modules in a record's ``modules`` that can have an adapter, and the weights of this package that each holds.
_ADAPTED = {
    **dict.fromkeys(("rows", "stacked", "grouped"), _QKV), **{name: (name,) for name in (*_QKV, "output")},
    "gate_up": ("gate", "up"), **{name: (name,) for name in ("gate", "up", "down", "w0", "w1")},
    **{f"expert/{name}": (name,) for name in ("gate", "up", "down")},
}  # fmt: skip
_GATE_OR_UP = re.compile(r"expert\d+/(gate|up)$")
_EXPERT, _FUSED = re.compile(r"expert\d+/"), "experts."
_EXPERT_TARGETS = {
    f"{_FUSED}gate_up_proj": (("expert/gate", "expert/up"),), f"{_FUSED}down_proj": (("expert/down",),)
}  # fmt: skip
_DOUBLED = r".*\.gate_up_proj"  # in PEFT's patterns
#: Fields of ``adapter_config.json`` that change what is computed, and their supported values. Any field may be empty,
#: and one that is in none of these tables must be.
_SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),
}
#: Fields without effect on what is computed, or without effect as long as another field is supported.
_HARMLESS = frozenset((
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "fan_in_fan_out",
    "inference_mode", "layers_pattern", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core",
    "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type"
))  # fmt: skip
#: Fields that are read.
_READ = frozenset(("peft_type", "r", "lora_alpha", "target_modules", "target_parameters", "use_rslora"))
#: Beginnings of values of ``init_lora_weights`` with which PEFT changes the base weights, and their names.
_CHANGED_BASE = {"pissa": "PiSSA", "olora": "OLoRA", "corda": "CorDA", "lora_ga": "LoRA-GA", "loftq": "LoftQ"}


@dataclass(frozen=True)
class LoRAOptions(Configuration):
    """Replaces each weight w of the ``targets`` by w + (alpha / rank) · a · b; only a and b are trained."""

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
        """Return the targets in a model of a family, and their groups of weights; raises UsageError for others."""
        targets = _targets(family)
        if self.targets is None:
            return {name: groups for name, groups in targets.items() if not name.startswith(_FUSED)}
        names = list(filter(None, (name.strip() for name in self.targets.split(","))))
        if not names or (unknown := sorted(set(names) - set(targets))):
            target = unknown[0] if names else self.targets
            raise UsageError(f"targets: {target!r} of a {family} has no adapter here; {one_of(target, targets)}")
        chosen = {name: targets[name] for name in names}
        separate = {w for name in chosen if not name.startswith(_FUSED) for group in targets[name] for w in group}
        for name in chosen.keys() & _EXPERT_TARGETS.keys():
            if twice := sorted(separate & {w.removeprefix("expert/") for group in targets[name] for w in group}):
                raise UsageError(f"targets: {name} would adapt {twice[0]} of experts, which have adapters of their own")
        if self.doubled and (self.root or f"{_FUSED}gate_up_proj" not in chosen):
            raise UsageError("doubled requires the target experts.gate_up_proj, and excludes root")
        return chosen

    def names(self, family: str, weights: Mapping[str, str]) -> dict[str, tuple[str, str]]:
        """Return the names of a and b for each adapted weight; ``weights`` are names and dims."""
        from spmd_engine.layers.low_rank import names_of_adapter

        groups = {name: group for groups in self.modules(family).values() for group in groups for name in group}
        adapters = {}
        for name, dims in weights.items():
            short_name = name.rpartition("/")[2]
            group = groups.get(f"expert/{short_name}") if _EXPERT.search(name) else None
            if group := group or groups.get(short_name):
                adapters[name] = names_of_adapter(name, [w.removeprefix("expert/") for w in group], dims)
        return adapters

    @property
    def scale(self) -> float:
        """The factor of a · b."""
        return self.alpha / (sqrt(self.rank) if self.root else self.rank)


def _targets(family: str) -> dict[str, tuple[tuple[str, ...], ...]]:
    """Return the modules of a family that can have an adapter, by the last part of their names, and the weights of each
    module, in groups that share the a of the module. Each expert has its own modules; or, in newer programs, all
    experts of a layer are in two tensors, ``experts.`` and their names, and an adapter belongs to a part of a tensor.
    """
    record, targets = FAMILIES[family], {}
    for name, weights in _ADAPTED.items():
        if isinstance(module := record.modules.get(name), str):
            short_name = module.removesuffix(".weight").rpartition(".")[2]
            targets[short_name] = tuple(dict.fromkeys((*targets.get(short_name, ()), weights)))
    return targets | (_EXPERT_TARGETS if "expert/gate" in record.modules else {})


def with_adapters(model: Model, options: LoRAOptions, family: str) -> Model:
    """Return the frozen model with adapters; raises UsageError for a model with none of the targets."""
    from spmd_engine.layers.low_rank import LowRank

    def frozen(layer: Layer) -> Layer:
        if isinstance(layer, Parallel):
            return layer.changed(frozen)
        weights = {name: x.dims for name, x in layer.parameters.items() if len(x.dims) > 1}
        names = options.names(family, weights)
        doubled = [name for name in names if options.doubled and _GATE_OR_UP.search(name)]
        return LowRank(layer, names, options.rank, options.scale, doubled)

    layers = [(name, frozen(layer)) for name, layer in model.layers]
    if not any(layer.parameters for _, layer in layers):
        raise UsageError(f"{model.name} has no adapters: it has none of {', '.join(options.modules(family))}")
    return replace(model, layers=tuple(layers))


def adapter_names(shape: DecoderConfig, options: LoRAOptions) -> Iterator[tuple[str, tuple[TensorSlice, ...]]]:
    """Yield the places of a and b of every adapted weight in PEFT's files."""
    from spmd_engine.models.weight_map import weight_map

    dims = {name: parameter.dims for name, (parameter, _) in decoder(shape).parameters()}
    names, modules, yielded = options.names(shape.family, dims), options.modules(shape.family), set()
    for name, slices in weight_map(shape):
        if name not in names:
            continue
        base = next((x for x in slices if _FUSED + x.tensor.rpartition(".")[2] in modules), slices[0])
        for adapter, factor in zip(names[name], _slices(base, shape.family, modules, options.doubled), strict=True):
            if adapter not in yielded:  # another weight may share it
                yielded.add(adapter)
                yield adapter, (factor,)


def _slices(base: TensorSlice, family: str, modules: Collection[str], doubled: bool) -> tuple[TensorSlice, TensorSlice]:
    """Return the places of a and b of a weight in its file."""
    from spmd_engine.models.weight_map import TensorSlice

    folder, _, module = base.tensor.rpartition(".")
    if _FUSED + module not in modules:
        folder = base.tensor.removesuffix(".weight")
        out, into = base.dims.split() if not FAMILIES[family].transposed else base.dims.split()[::-1]
        dims_a, dims_b = f"q {into}", f"{out} q"
    else:
        _, out, into = base.dims.split()
        q = "Q" if doubled and module == "gate_up_proj" else "q"
        dims_a, dims_b = f"e{q} {into}", f"{out} {q}e"
        if module == "gate_up_proj" and f"{_FUSED}down_proj" in modules:  # PEFT wraps one tensor of a module first
            folder += ".base_layer"

    def adapter_slice(kind: str, dims: str) -> TensorSlice:
        at = {letter: number for letter, number in base.at.items() if letter in dims}
        rows = base.rows if dims == dims_b else None
        among = {letter: part for letter, part in base.among.items() if letter in dims}
        pairs = base.pairs if "k" in dims else ""
        return TensorSlice(f"base_model.model.{folder}.{kind}.weight", dims, at, pairs=pairs, rows=rows, among=among)

    return adapter_slice("lora_A", dims_a), adapter_slice("lora_B", dims_b)


def options_of_config(config: Mapping[str, Any], where: str) -> LoRAOptions:
    """Read the options in ``adapter_config.json``; raises CheckpointError for unsupported features, by name."""
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"{where}: peft_type {config.get('peft_type')!r} is not supported; LORA is")
    doubled = _has_doubled_rank(config)
    for name, value in config.items():
        empty = value is None or value is False or value in ("", [], {})
        known = name in _HARMLESS or name in _READ or doubled and name in ("rank_pattern", "alpha_pattern")
        if not empty and not known and value not in _SUPPORTED.get(name, ()):
            raise CheckpointError(f"{where}: {name} is {value!r}, which is not supported{_conversion(name, value)}")
    if not isinstance(root := config.get("use_rslora") or False, bool):
        raise CheckpointError(f"{where}: use_rslora is {root!r}; it must be true or false")
    targets = config.get("target_modules")
    if targets == "all-linear":
        targets = None
    elif targets is None and config.get("target_parameters"):
        targets = []
    elif not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise CheckpointError(f"{where}: target_modules is {targets!r}; it must be a list of names")
    expert_targets = {f"{_FUSED}{str(name).rpartition('.')[2]}": name for name in config.get("target_parameters") or ()}
    if odd := sorted(str(expert_targets[name]) for name in expert_targets.keys() - _EXPERT_TARGETS.keys()):
        raise CheckpointError(f"{where}: target_parameters has {odd[0]!r}, which is not supported")
    if expert_targets and targets is None:
        raise CheckpointError(f"{where}: target_parameters beside all-linear are not supported; list the modules")
    targets = None if targets is None else [*targets, *expert_targets]
    try:
        alpha = float(config["lora_alpha"])
        return LoRAOptions(config["r"], alpha, None if targets is None else ",".join(sorted(targets)), root, doubled)
    except KeyError as error:
        raise CheckpointError(f"{where}: the field {error} is missing") from error
    except (UsageError, TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: {error}") from error


def _conversion(field: str, value: Any) -> str:
    """Return what to do about an adapter whose initialization changed the base weights; "" for others."""
    kind = next((name for start, name in _CHANGED_BASE.items() if str(value).startswith(start)), None)
    if field != "init_lora_weights" or kind is None:
        return ""
    merge = "merge_and_unload() of PEFT on the base weights it was trained with"
    convert = (
        "PEFT's save_pretrained(FOLDER, path_initial_model_for_weight_conversion=INITIAL), with the adapter INITIAL "
        f"that was saved before training; or merge it by {merge}"
    )
    if kind == "LoftQ":  # its base weights are quantized, which PEFT cannot undo
        convert = merge
    return f": {kind} changed the base weights, and the adapter fits only those. Convert it by {convert}"


def _has_doubled_rank(config: Mapping[str, Any]) -> bool:
    """Return whether gate and up of experts together have twice the rank, with the factor of all others."""
    rank_pattern, alpha_pattern = config.get("rank_pattern"), config.get("alpha_pattern")
    if not rank_pattern or config.get("use_rslora") or not config.get("target_parameters"):
        return False
    twice = {_DOUBLED: 2 * (config.get("r") or 0)}, {_DOUBLED: 2 * (config.get("lora_alpha") or 0)}
    return (rank_pattern, alpha_pattern) == twice


def config_of_options(options: LoRAOptions, family: str, base: str | None) -> dict[str, Any]:
    """Return ``adapter_config.json`` for the options; ``base`` is the place of the adapted weights."""
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
        "fan_in_fan_out": FAMILIES[family].transposed,  # says this about the base; a and b are never transposed
        "inference_mode": True,
    }
