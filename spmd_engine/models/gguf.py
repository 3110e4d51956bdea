"""Reads the metadata of a GGUF file as a DecoderConfig, by the record of its family, and writes one as metadata.

Metadata and their names are those of https://github.com/ggml-org/llama.cpp. Facts that they do not contain, such as the
blocks of a Gemma with a window, are as that program assumes.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from spmd_engine.errors import CheckpointError, UsageError, one_of
from spmd_engine.formats.gguf import GGUF
from spmd_engine.formats.tensor import FileTensor, Index
from spmd_engine.layers import RotaryOptions, RouterOptions
from spmd_engine.models.decoder import DecoderConfig
from spmd_engine.models.families import FAMILIES
from spmd_engine.models.families.family import Config, Family, SlidingWindow, check_required
from spmd_engine.models.hf.read_config import Fields, with_windows_in
from spmd_engine.models.hf.rope import yarn_magnitude
from spmd_engine.models.hf.write_config import check_same
from spmd_engine.models.mixture import Mixture

#: Families of GGUF files; those that have an architecture only under a condition come first.
_FAMILIES = [family for family in FAMILIES.values() if family.gguf.architecture]
_FAMILIES.sort(key=lambda family: family.gguf.when is None)
ARCHITECTURES = tuple(dict.fromkeys(family.gguf.architecture for family in _FAMILIES))
#: Metadata that repeat others, or change nothing up to the context. Values are those without effect; None: any value.
_WITHOUT_EFFECT: Mapping[str, Any] = {
    "vocab_size": None, "tensor_data_layout": None, "attention.layer_norm_epsilon": None,
    "attention.layer_norm_rms_epsilon": None, "rope.scaling.finetuned": None, "rope.dimension_count": None,
    "rope.scaling.original_context_length": None, "use_parallel_residual": None, "expert_used_count": None,
    "expert_feed_forward_length": None, "expert_shared_feed_forward_length": None,
    "expert_weights_scale": 1.0, "expert_gating_func": 1, "logit_scale": 1.0, "residual_scale": 1.0,
    "embedding_scale": 1.0, "rope.scaling.attn_factor": 1.0
}  # fmt: skip


def config_of_gguf(file: GGUF, where: str) -> DecoderConfig:
    """Return the decoder that a file describes; raises CheckpointError for an unsupported architecture or feature."""
    kind = file.facts.get("general.architecture")
    if kind not in ARCHITECTURES:
        raise CheckpointError(f"{where}: architecture {kind!r} is not supported; {one_of(kind, ARCHITECTURES)}")
    if not file.tensors:
        raise CheckpointError(f"{where} has no weights, at most a vocabulary; fetch the model's own file")
    prefix = f"{kind}."
    try:
        facts = Fields(
            {name.removeprefix(prefix): shortest(x) for name, x in file.facts.items() if name.startswith(prefix)}
        )
        matching = (record for record in _FAMILIES if record.gguf.architecture == kind)
        family = next(record for record in matching if record.gguf.when is None or record.gguf.when(facts))
        shape = _read(family, facts, file.tensors)
        shape.check_rotary()
    except CheckpointError:
        raise
    except KeyError as error:
        raise CheckpointError(f"{where}: there is no metadata {error}") from error
    except (UsageError, TypeError, ValueError, AttributeError, ArithmeticError, LookupError) as error:
        raise CheckpointError(f"{where}: {error}") from error
    for name in facts.left():
        # Tensors show whether a model uses metadata of ssm.
        harmless = name.startswith("ssm.") or _WITHOUT_EFFECT.get(name, 0) in (None, facts[name])
        if facts[name] and not harmless:
            raise CheckpointError(f"{where}: {prefix}{name} is {facts[name]!r}, which is not supported")
    return shape


def _read(family: Family, facts: Config, tensors: Mapping[str, FileTensor]) -> DecoderConfig:
    heads, width = _common_value(facts, "attention.head_count"), facts["embedding_length"]
    usual = family.usual(width)
    rms = {**usual, **family.implied}.get("norm", "rms") == "rms"
    head_width = facts.get("attention.key_length") or width // heads
    supported = {"attention.value_length": head_width, "attention.causal": True, **family.gguf.required}
    if family.gguf.reordered:  # only whole heads are reordered
        supported["rope.dimension_count"] = head_width
    for name, value in supported.items():
        check_required(name, facts.get(name, value), value)
    for name in family.gguf.ignored:
        facts.get(name)
    for name in family.gguf.needed:
        facts[name]
    shape = DecoderConfig(
        family=family.name,
        layers=facts["block_count"],
        width=width,
        heads=heads,
        key_value_heads=_common_value(facts, "attention.head_count_kv", heads),
        head_width=head_width,
        hidden=_common_value(facts, "feed_forward_length"),
        vocabulary=tensors["token_embd.weight"].shape[0],
        context=facts["context_length"],
        epsilon=facts[f"attention.layer_norm_{'rms_' if rms else ''}epsilon"],
        tied="output.weight" not in tensors,
    )
    if family.implied:
        return shape.changed(key_value_heads=None)
    usual |= {
        "epsilon": shape.epsilon,
        "bias": "blk.0.attn_q.bias" in tensors or "blk.0.attn_qkv.bias" in tensors,
        "output_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "head_bias": "output.bias" in tensors,
    }
    usual |= {field: value for field, name in family.gguf.values.items() if (value := facts.get(name))}
    shape = shape.changed(**usual, mixture=_mixture(family, facts))
    if family.rope is not None:
        rotary = rotary_of_gguf(facts, tensors, head_width, shape.context)
        if rotary.scaling == "divided":  # longer sequences have other divisors
            shape = shape.changed(context=min(shape.context, rotary.original_context))
        shape = shape.changed(rotary=rotary.changed(pairs=family.rope.pairs))
    if family.windows is not None and family.gguf.window is not None:
        shape = _with_windows(facts, shape, family.windows, family.gguf.window)
    if family.rope is not None and family.rope.in_windows and shape.window:  # positions in windows are never scaled
        theta = facts.get("rope.freq_base_swa", family.rope.window_theta or shape.rotary.theta)
        shape = shape.changed(window_rotary=RotaryOptions(theta, part=shape.rotary.part))
    return family.gguf.read(facts, tensors, shape) if family.gguf.read else shape


def _common_value(facts: Config, name: str, default: int | None = None) -> int:
    """Return metadata that must be equal in all blocks; newer files may list a value per block."""
    value = facts[name] if default is None else facts.get(name, default)
    if not isinstance(value, list):
        return value
    if len(value) != facts["block_count"]:
        raise UsageError(f"{name} has {len(value)} values, but there are {facts['block_count']} blocks")
    if len(set(value)) != 1:
        raise UsageError(f"{name} is {value}, not the same in all blocks, which is not supported")
    return value[0]


def _mixture(family: Family, facts: Config) -> Mixture | None:
    if family.experts is None or not facts.get("expert_count"):
        return None
    hidden = _common_value(facts, "expert_feed_forward_length", 0) or _common_value(facts, "feed_forward_length")
    normalised = family.experts.gguf_normalised
    check_required("expert_weights_norm", bool(facts.get("expert_weights_norm", normalised)), normalised)
    shared, rest = divmod(facts.get("expert_shared_feed_forward_length") or 0, hidden)
    if rest or shared and family.experts.shared_hidden is None:
        raise UsageError(f"expert_shared_feed_forward_length is {facts['expert_shared_feed_forward_length']}")
    router = RouterOptions(top_k=facts["expert_used_count"], renormalise=normalised)
    return Mixture(facts["expert_count"], shared, hidden, router=router, shared_gate=shared > 0)


def _with_windows(facts: Config, shape: DecoderConfig, windows: SlidingWindow, default: int) -> DecoderConfig:
    window = facts.get("attention.sliding_window", default)
    every = facts.get("attention.sliding_window_pattern", windows.every)
    if isinstance(every, int):
        every = [bool(not every or (block + 1) % every) for block in range(shape.layers)]
    if len(every) != shape.layers:
        raise UsageError(
            f"attention.sliding_window_pattern has {len(every)} values, but there are {shape.layers} blocks"
        )
    near = [block for block, windowed in enumerate(every) if windowed] if window else []
    return with_windows_in(shape, windows, window, near)


# --- Rotary positions, from metadata and from tensors of divisors


_ORIGINAL = 8192  # the context of Llama 3.1 before scaling; ``rope_freqs`` follows from it and a factor
FREQUENCIES, _SHORT = "rope_freqs.weight", "rope_factors_short.weight"
IGNORED = (FREQUENCIES, _SHORT, "rope_factors_long.weight")  #: tensors whose values are in the rotary options


def shortest(value: Any) -> Any:
    """Return the shortest decimal with the same 32-bit float, such as 1e-5; values of other types as they are."""
    if not isinstance(value, float):
        return value
    shorter = (float(f"{value:.{digits}g}") for digits in range(6, 10))
    return next((number for number in shorter if _as_float32(number) == _as_float32(value)), value)


def rotary_of_gguf(
    facts: Mapping[str, Any], tensors: Mapping[str, FileTensor], head_width: int, context: int
) -> RotaryOptions:
    """Return the rotary positions of all blocks, or of those without a window. Raises UsageError if not supported."""
    rotated = facts.get("rope.dimension_count") or head_width
    plain = RotaryOptions(facts.get("rope.freq_base", 10_000.0), part=rotated / head_width)
    kind = facts.get("rope.scaling.type", "linear")
    factor = facts.get("rope.scaling.factor") or facts.get("rope.scale_linear") or 1.0
    name = next((tensor for tensor in (_SHORT, FREQUENCIES) if tensor in tensors), None)
    if name is not None:
        if kind not in ("none", "longrope"):
            check_required("rope.scaling.factor", factor, 1.0)
        divisors = tensors[name].read([[rotated // 2]], [slice(None)]).tolist()
        if name == FREQUENCIES:
            return _match_llama3(plain, divisors) or _divided(plain, divisors, context)
        magnitude = facts.get("rope.scaling.attn_factor") or 1.0
        return _divided(plain, divisors, facts["rope.scaling.original_context_length"]).changed(magnitude=magnitude)
    if kind == "none" or factor == 1 and kind == "linear":
        return plain
    if kind == "linear":
        return plain.changed(scaling="linear", factor=factor)
    if kind != "yarn":
        supported = f"none, linear, yarn, and longrope with {_SHORT}"
        raise UsageError(f"rope.scaling.type {kind!r} is not supported; {supported} are")
    check_required("rope.scaling.yarn_ext_factor", facts.get("rope.scaling.yarn_ext_factor", 1.0), 1.0)
    usual = yarn_magnitude(factor) / yarn_magnitude(factor, facts.get("rope.scaling.yarn_log_multiplier", 0.0))
    return plain.changed(
        scaling="yarn",
        factor=factor,
        original_context=facts.get("rope.scaling.original_context_length") or context,
        fast_turns=facts.get("rope.scaling.yarn_beta_fast", 32.0),
        slow_turns=facts.get("rope.scaling.yarn_beta_slow", 1.0),
        magnitude=facts.get("rope.scaling.yarn_attn_factor") or usual,
    )


def _match_llama3(plain: RotaryOptions, divisors: list[float]) -> RotaryOptions | None:
    """Return the scaling of Llama 3.1 if the divisors are those of Llama 3.1, else None."""
    scaled = plain.changed(scaling="llama3", factor=float(round(max(divisors), 3)), original_context=_ORIGINAL)
    frequencies = zip(plain.frequencies(len(divisors)), scaled.frequencies(len(divisors)), divisors, strict=True)
    return scaled if all(abs(old / new - divisor) <= 1e-4 * divisor for old, new, divisor in frequencies) else None


def _divided(plain: RotaryOptions, divisors: list[float], original: int) -> RotaryOptions:
    text = ",".join(repr(shortest(divisor)) for divisor in divisors)
    return plain.changed(scaling="divided", divisors=text, original_context=original)


def _as_float32(value: float) -> float:
    """Round to 32 bits."""
    return struct.unpack("f", struct.pack("f", value))[0]


# --- A DecoderConfig as metadata, in which the reader must find the same decoder

#: ``general.file_type`` by the dtype of most tensors.
FILE_TYPES = {"float32": 0, "float16": 1, "bfloat16": 32}
_WITH_FREQUENCIES = ("llama", "exaone", "exaone4")  # families whose divisors of frequencies llama.cpp reads


def gguf_facts(shape: DecoderConfig) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Return the metadata of a decoder, and the tensors, besides its weights, that hold a part of its configuration.

    Raises UsageError for a family without GGUF files, and for what they cannot represent.
    """
    family = FAMILIES[shape.family]
    if not family.gguf.architecture:
        raise UsageError(f"llama.cpp has no architecture for a {shape.family}; export it as huggingface")
    shape = shape.changed(key_value_heads=shape.key_value_heads or shape.heads, head_width=shape.width_of_heads)
    rms = {**family.usual(shape.width), **family.implied}.get("norm", "rms") == "rms"
    facts: dict[str, Any] = {
        "block_count": shape.layers,
        "context_length": shape.context,
        "embedding_length": shape.width,
        "feed_forward_length": shape.hidden,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.key_value_heads,
        f"attention.layer_norm_{'rms_' if rms else ''}epsilon": shape.epsilon,
        "vocab_size": shape.vocabulary,
    }
    if family.implied:
        facts.pop("attention.head_count_kv")
    if shape.width_of_heads * shape.heads != shape.width:
        facts |= dict.fromkeys(("attention.key_length", "attention.value_length"), shape.width_of_heads)
    facts |= {name: value for field, name in family.gguf.values.items() if (value := getattr(shape, field)) is not None}
    tensors = {}
    if family.rope is not None:
        rope, tensors = _rotary_facts(shape)
        facts |= rope
    if family.windows is not None and shape.window is not None:
        facts["attention.sliding_window"] = shape.window
        facts["attention.sliding_window_pattern"] = [shape.has_window(block) for block in range(shape.layers)]
        if family.rope is not None and family.rope.in_windows and shape.window_rotary is not None:
            facts["rope.freq_base_swa"] = shape.window_rotary.theta
    if shape.mixture is not None:
        facts |= _expert_facts(shape)
    if family.gguf.write is not None:
        facts |= family.gguf.write(shape)
    kind = family.gguf.architecture
    return {"general.architecture": kind} | {f"{kind}.{name}": value for name, value in facts.items()}, tensors


def _rotary_facts(shape: DecoderConfig) -> tuple[dict[str, Any], dict[str, list[float]]]:
    rotary, rotated = shape.rotary, round(shape.rotary.part * shape.width_of_heads)
    facts: dict[str, Any] = {"rope.dimension_count": rotated, "rope.freq_base": rotary.theta}
    if rotary.scaling == "llama3" and shape.family in _WITH_FREQUENCIES:
        plain = rotary.changed(scaling="none").frequencies(rotated // 2)
        divisors = [old / new for old, new in zip(plain, rotary.frequencies(rotated // 2), strict=True)]
        return facts, {FREQUENCIES: divisors}
    if rotary.scaling in ("linear", "yarn"):
        facts |= {"rope.scaling.type": rotary.scaling, "rope.scaling.factor": rotary.factor}
    if rotary.scaling == "yarn":
        facts["rope.scaling.original_context_length"] = rotary.original_context
        facts |= {"rope.scaling.yarn_beta_fast": rotary.fast_turns, "rope.scaling.yarn_beta_slow": rotary.slow_turns}
    return facts, {}


def _expert_facts(shape: DecoderConfig) -> dict[str, Any]:
    mixture = shape.mixture
    assert mixture is not None
    hidden = mixture.hidden or shape.hidden
    facts = {"expert_count": mixture.experts, "expert_used_count": mixture.router.top_k}
    experts = FAMILIES[shape.family].experts
    if experts is not None and experts.hidden is not None:
        facts["expert_feed_forward_length"] = hidden
    if mixture.shared:
        facts["expert_shared_feed_forward_length"] = mixture.shared * hidden
    return facts


@dataclass(frozen=True)
class TensorToRead(FileTensor):
    """A tensor of a file that is yet to be written, with its values if they describe the configuration."""

    values: Sequence[float] = ()

    def read(self, split: Sequence[Sequence[int]], index: Index) -> Any:
        """Return the values, as of a tensor of one dim."""
        return array("f", self.values)[index[0]]

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor in float32."""
        return 4 * prod(self.shape)


def check_gguf(
    shape: DecoderConfig,
    facts: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    values: Mapping[str, Sequence[float]],
) -> None:
    """Raise UsageError unless the reader finds this decoder in a file with these facts and tensors."""
    where = f"a GGUF file of a {shape.family}"
    tensors = {name: TensorToRead(name, "", shape, "F32", 0, values.get(name, ())) for name, shape in shapes.items()}
    try:
        read = config_of_gguf(GGUF(dict(facts), dict(tensors)), where)
    except CheckpointError as error:
        raise UsageError(f"{error}; export it as huggingface") from error
    check_same(shape, read, where, "; export it as huggingface")
