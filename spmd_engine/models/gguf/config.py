"""What a GGUF file says of a decoder: the facts of each architecture as a DecoderConfig.

Facts and their names are those of https://github.com/ggml-org/llama.cpp (``convert_hf_to_gguf.py`` writes them). What
a fact does not say, as which blocks of a Gemma see a window, is what that program takes for granted.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from math import log
from typing import Any

from spmd_engine.errors import CheckpointError, UsageError, one_of
from spmd_engine.formats.gguf import GGUF
from spmd_engine.formats.tensor import FileTensor
from spmd_engine.layers.attention.rotary import RotaryOptions
from spmd_engine.layers.moe.router_options import RouterOptions
from spmd_engine.models.block_numbers import as_text
from spmd_engine.models.decoder import DecoderConfig
from spmd_engine.models.gguf.names import PUT_IN_ORDER
from spmd_engine.models.hf.families import always
from spmd_engine.models.hf.unknown_fields import Fields, must_be
from spmd_engine.models.mixture import Mixture

#: Architectures, and the family that each is here; three are of another one if they say more: see ``_family``.
FAMILIES = {
    "gpt2": "gpt2", "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3-moe", "gemma": "gemma",
    "gemma2": "gemma2", "gemma3": "gemma3-text", "phi3": "phi3", "olmo2": "olmo2", "starcoder2": "starcoder2",
    "granite": "granite", "granitemoe": "granitemoe", "qwen2moe": "qwen2-moe", "olmoe": "olmoe", "olmo": "olmo",
    "command-r": "cohere", "cohere2": "cohere2", "falcon": "falcon", "stablelm": "stablelm", "nemotron": "nemotron",
    "smollm3": "smollm3", "glm4": "glm4", "mistral3": "mistral", "ernie4_5": "ernie4-5", "exaone": "exaone",
    "exaone4": "exaone4", "hunyuan-dense": "hunyuan-v1-dense", "seed_oss": "seed-oss", "bloom": "bloom", "mpt": "mpt",
    "gptneox": "gpt-neox", "phi2": "phi", "internlm2": "internlm2", "minicpm": "minicpm", "starcoder": "gpt-bigcode",
    "arcee": "arcee", "jais2": "jais2", "chatglm": "glm",
}  # fmt: skip
_MULTIPLIERS = {"embedding_scale": "embedding_scale", "residual_scale": "residual_scale"}
_GRANITE = _MULTIPLIERS | {"attention_scale": "attention.scale", "logits_divisor": "logit_scale"}
#: Fields of a DecoderConfig, and the facts that have them; one that is missing or 0 is as if it were not there.
_FACTORS: Mapping[str, Mapping[str, str]] = {
    "granite": _GRANITE,
    "granitemoe": _GRANITE,
    "gemma2": {"attention_cap": "attn_logit_softcapping", "logits_cap": "final_logit_softcapping"},
    "gemma3-text": {"logits_cap": "final_logit_softcapping"},
    "minicpm": _MULTIPLIERS | {"logits_divisor": "logit_scale"},
}
#: Facts that are missing in old files, whose models had others than these.
_NEEDED = {
    "minicpm": ("embedding_scale", "residual_scale", "logit_scale"), "granite": ("logit_scale",),
    "gemma2": ("attn_logit_softcapping", "final_logit_softcapping"),
}  # fmt: skip
#: Families that have windows: the usual one, and the block of each so many that sees all (0: none), unless files say.
_WINDOWS = {
    "gemma2": (4096, 2), "gemma3-text": (0, 6), "olmo3": (0, 4), "cohere2": (4096, 4), "exaone4": (0, 4),
    "phi3": (0, 0),
}  # fmt: skip
_TURNED_IN_WINDOWS = ("cohere2", "exaone4")  # alone
#: Blocks of the one model of these families (27B) whose queries are divided by more than their width's root.
_OF_27B = {"gemma2": 46, "gemma3-text": 62}
_NEIGHBOURS = ("cohere", "cohere2", "glm", "glm4", "ernie4-5")  # are turned, in the model that was trained, too
#: Families with experts: whether the weights of a token's sum to 1.
_RENORMALISED = {"mixtral": True, "qwen3-moe": True, "granitemoe": True, "qwen2-moe": False, "olmoe": False}
#: Facts that say nothing new, or change nothing up to the context; a value is the one that does not.
_WITHOUT_EFFECT: Mapping[str, Any] = {
    "vocab_size": None, "tensor_data_layout": None, "attention.layer_norm_epsilon": None,
    "attention.layer_norm_rms_epsilon": None, "rope.scaling.finetuned": None, "rope.dimension_count": None,
    "rope.scaling.original_context_length": None, "use_parallel_residual": None, "expert_used_count": None,
    "expert_feed_forward_length": None, "expert_shared_feed_forward_length": None,
    "expert_weights_scale": 1.0, "expert_gating_func": 1, "logit_scale": 1.0, "residual_scale": 1.0,
    "embedding_scale": 1.0, "rope.scaling.attn_factor": 1.0,
}  # fmt: skip


def shape_of_gguf(file: GGUF, where: str) -> DecoderConfig:
    """The decoder that a file describes; raises CheckpointError for an architecture or feature not known here."""
    kind = file.facts.get("general.architecture")
    if kind not in FAMILIES:
        raise CheckpointError(f"{where}: architecture {kind!r} is not known here; {one_of(kind, FAMILIES)}")
    if not file.tensors:
        raise CheckpointError(f"{where} has no weights, at most a vocabulary; fetch the model's own file")
    own = f"{kind}."
    facts = Fields({name.removeprefix(own): each for name, each in file.facts.items() if name.startswith(own)})
    try:
        shape = _shape(_family(kind, facts), facts, file.tensors)
        shape.rotaries()  # raises if heads are of a width that they cannot turn
    except CheckpointError:
        raise
    except KeyError as error:
        raise CheckpointError(f"{where}: nothing says {error}") from error
    except (UsageError, TypeError, ValueError, AttributeError, ArithmeticError, LookupError) as error:
        raise CheckpointError(f"{where}: {error}") from error
    for name in facts.left():
        silent = name.startswith("ssm.") or _WITHOUT_EFFECT.get(name, 0) in (None, facts[name])  # ssm: tensors tell
        if facts[name] and not silent:
            raise CheckpointError(f"{where}: {own}{name} is {facts[name]!r}, a feature that is not known here")
    return shape


def _family(kind: str, facts: Mapping[str, Any]) -> str:
    if kind == "llama" and facts.get("expert_count"):
        return "mixtral"
    if kind == "olmo2" and facts.get("attention.sliding_window"):
        return "olmo3"
    if kind == "mistral3" and facts.get("rope.scaling.type") == "yarn":
        return "ministral3"
    return FAMILIES[kind]


def _shape(family: str, facts: Mapping[str, Any], tensors: Mapping[str, FileTensor]) -> DecoderConfig:
    heads, width = _of_all_blocks(facts, "attention.head_count"), facts["embedding_length"]
    usual = {"norm": "layer"} if family == "gpt2" else always(family, width)
    epsilon = "layer_norm_rms_epsilon" if usual.get("norm", "rms") == "rms" else "layer_norm_epsilon"
    head_width = facts.get("attention.key_length") or width // heads
    must_be("attention.value_length", facts.get("attention.value_length") or head_width, head_width)
    must_be("attention.causal", facts.get("attention.causal", True), True)
    if family in PUT_IN_ORDER:  # whole heads are
        must_be("rope.dimension_count", facts.get("rope.dimension_count") or head_width, head_width)
    shape = DecoderConfig(
        family=family,
        layers=facts["block_count"],
        width=width,
        heads=heads,
        key_value_heads=_of_all_blocks(facts, "attention.head_count_kv", heads),
        head_width=head_width,
        hidden=_of_all_blocks(facts, "feed_forward_length"),
        vocabulary=tensors["token_embd.weight"].shape[0],
        context=facts["context_length"],
        epsilon=as_written(facts[f"attention.{epsilon}"]),
        tied="output.weight" not in tensors,
    )
    if family == "gpt2":
        return shape.changed(key_value_heads=None)
    usual |= {
        "bias": "blk.0.attn_q.bias" in tensors or "blk.0.attn_qkv.bias" in tensors,
        "output_bias": "blk.0.attn_output.bias" in tensors,
        "perceptron_bias": "blk.0.ffn_up.bias" in tensors,
        "head_bias": "output.bias" in tensors,
    }
    shape = shape.changed(**usual, mixture=_mixture(family, facts))
    shape = _with_factors(facts, shape)
    if not shape.learned and not shape.alibi:
        rotary = rotary_of_gguf(facts, tensors, head_width, shape.context)
        if rotary.scaling == "divided":  # longer sequences have other divisors
            shape = shape.changed(context=min(shape.context, rotary.original_context))
        pairs = "neighbours" if family in _NEIGHBOURS else "halves"
        shape = shape.changed(rotary=rotary.changed(pairs=pairs))
    shape = _with_window(facts, shape)
    return _OWN[family](facts, tensors, shape) if family in _OWN else shape


def _of_all_blocks(facts: Mapping[str, Any], name: str, usual: int | None = None) -> int:
    """A fact of which newer files may have one a block."""
    value = facts[name] if usual is None else facts.get(name, usual)
    if not isinstance(value, list):
        return value
    if len(set(value)) != 1:
        raise UsageError(f"{name} is {value}, not the same in all blocks, which is not known here")
    return value[0]


def _mixture(family: str, facts: Mapping[str, Any]) -> Mixture | None:
    if family not in _RENORMALISED or not facts.get("expert_count"):
        return None
    hidden = facts.get("expert_feed_forward_length") or facts["feed_forward_length"]
    summed = _RENORMALISED[family]
    must_be("expert_weights_norm", bool(facts.get("expert_weights_norm", summed)), summed)
    shared, left = divmod(facts.get("expert_shared_feed_forward_length") or 0, hidden)
    if left or shared and family != "qwen2-moe":
        raise UsageError(f"expert_shared_feed_forward_length is {facts['expert_shared_feed_forward_length']}")
    router = RouterOptions(top_k=facts["expert_used_count"], renormalise=summed)
    return Mixture(facts["expert_count"], shared, hidden, router=router, shared_gate=shared > 0)


def _with_factors(facts: Mapping[str, Any], shape: DecoderConfig) -> DecoderConfig:
    for name in _NEEDED.get(shape.family, ()):
        facts[name]
    said = {own: facts.get(name) for own, name in _FACTORS.get(shape.family, {}).items()}
    return shape.changed(**{own: as_written(value) for own, value in said.items() if value})


def _with_window(facts: Mapping[str, Any], shape: DecoderConfig) -> DecoderConfig:
    if shape.family not in _WINDOWS:
        return shape
    usual, every = _WINDOWS[shape.family]
    window, every = facts.get("attention.sliding_window", usual), facts.get("attention.sliding_window_pattern", every)
    if isinstance(every, int):
        every = [bool(not every or (block + 1) % every) for block in range(shape.layers)]
    if len(every) != shape.layers:
        raise UsageError(
            f"attention.sliding_window_pattern has {len(every)} values, but there are {shape.layers} blocks"
        )
    near = [block for block, windowed in enumerate(every) if window and windowed]
    if not near:
        return shape
    far = as_text(set(range(shape.layers)) - set(near))
    if shape.family in _TURNED_IN_WINDOWS:
        shape = shape.changed(unturned=far)
    return shape.changed(window=window, windowed=as_text(near) if far else "")


def _cohere(facts: Mapping[str, Any], tensors: Mapping[str, FileTensor], shape: DecoderConfig) -> DecoderConfig:
    return shape.changed(logits_divisor=1 / as_written(facts["logit_scale"]))


def _falcon(facts: Mapping[str, Any], tensors: Mapping[str, FileTensor], shape: DecoderConfig) -> DecoderConfig:
    return shape.changed(parallel="two-norms") if "blk.0.attn_norm_2.weight" in tensors else shape


def _gemma(facts: Mapping[str, Any], tensors: Mapping[str, FileTensor], shape: DecoderConfig) -> DecoderConfig:
    """Of the largest, queries are divided by the root of the width of a head if heads were as wide as all together."""
    large = shape.layers == _OF_27B[shape.family]
    shape = shape.changed(attention_scale=(shape.width // shape.heads if large else shape.head_width) ** -0.5)
    if shape.family == "gemma2" or not shape.window:
        return shape
    return shape.changed(rotary_in_window=rotary_in_window_of_gguf(facts, shape.rotary, 10_000.0))


def _gpt_neox(facts: Mapping[str, Any], tensors: Mapping[str, FileTensor], shape: DecoderConfig) -> DecoderConfig:
    """The file does not say which GELU it is; nearly all of this family have the exact one."""
    parallel = "two-norms" if facts["use_parallel_residual"] else "none"
    return shape.changed(parallel=parallel, activation="gelu-erf")


def _granite(facts: Mapping[str, Any], tensors: Mapping[str, FileTensor], shape: DecoderConfig) -> DecoderConfig:
    must_be("rope.scaling.finetuned", facts.get("rope.scaling.finetuned", True), True)  # Granite 4 has no positions
    return shape


def _ministral3(facts: Mapping[str, Any], tensors: Mapping[str, FileTensor], shape: DecoderConfig) -> DecoderConfig:
    """Queries have a factor beyond what was learnt before positions were scaled; up to there, it is 1."""
    facts.get("attention.temperature_scale")
    return shape.changed(context=min(shape.context, shape.rotary.original_context))


def _mpt(facts: Mapping[str, Any], tensors: Mapping[str, FileTensor], shape: DecoderConfig) -> DecoderConfig:
    if not (alibi := as_written(facts["attention.max_alibi_bias"])):
        raise UsageError("attention.max_alibi_bias is 0: learned positions of an MPT are not known here")
    return shape.changed(alibi=alibi)


def _olmo3(facts: Mapping[str, Any], tensors: Mapping[str, FileTensor], shape: DecoderConfig) -> DecoderConfig:
    return shape.changed(rotary_in_window=rotary_in_window_of_gguf(facts, shape.rotary, shape.rotary.theta))


def _smollm3(facts: Mapping[str, Any], tensors: Mapping[str, FileTensor], shape: DecoderConfig) -> DecoderConfig:
    return shape.changed(unturned=as_text(block for block in range(shape.layers) if block % 4 == 3))


def _stablelm(facts: Mapping[str, Any], tensors: Mapping[str, FileTensor], shape: DecoderConfig) -> DecoderConfig:
    """By its norms: of a model that says nothing of it, ``use_parallel_residual`` does."""
    return shape if "blk.0.ffn_norm.weight" in tensors else shape.changed(parallel="one-norm")


#: By family, the decoder with what it has beside the tables.
_OWN: Mapping[str, Callable[[Mapping[str, Any], Mapping[str, FileTensor], DecoderConfig], DecoderConfig]] = {
    "cohere": _cohere, "cohere2": _cohere, "falcon": _falcon, "gemma2": _gemma, "gemma3-text": _gemma,
    "gpt-neox": _gpt_neox, "granite": _granite, "granitemoe": _granite, "ministral3": _ministral3, "mpt": _mpt,
    "olmo3": _olmo3, "smollm3": _smollm3, "stablelm": _stablelm,
}  # fmt: skip


# --- Rotary positions as the facts of a GGUF file say them, and the tensors in which it keeps what no fact can


_LEARNT = 8192  # positions before Llama 3.1 was scaled: what ``rope_freqs`` is made of, with a factor
_FREQUENCIES, _SHORT = "rope_freqs.weight", "rope_factors_short.weight"
IGNORED = (_FREQUENCIES, _SHORT, "rope_factors_long.weight")  #: tensors whose numbers the rotary options have


def as_written(value: float) -> float:
    """1e-5, of which a file keeps 32 bits: the shortest number that has these."""
    shorter = (float(f"{value:.{digits}g}") for digits in range(6, 10))
    return next((found for found in shorter if _narrow(found) == _narrow(value)), value)


def rotary_of_gguf(
    facts: Mapping[str, Any], tensors: Mapping[str, FileTensor], head_width: int, context: int
) -> RotaryOptions:
    """Of all blocks, or of those without a window; raises UsageError for what is not known here."""
    turned = facts.get("rope.dimension_count") or head_width
    plain = RotaryOptions(as_written(facts.get("rope.freq_base", 10_000.0)), part=turned / head_width)
    kind = facts.get("rope.scaling.type", "linear")
    factor = as_written(facts.get("rope.scaling.factor") or facts.get("rope.scale_linear") or 1.0)
    name = next((each for each in (_SHORT, _FREQUENCIES) if each in tensors), None)
    if name is not None:
        if kind not in ("none", "longrope"):
            must_be("rope.scaling.factor", factor, 1.0)
        divisors = tensors[name].read([[turned // 2]], [slice(None)]).tolist()
        if name == _FREQUENCIES:
            return _of_llama3(plain, divisors) or _divided(plain, divisors, context)
        magnitude = as_written(facts.get("rope.scaling.attn_factor") or 1.0)
        return _divided(plain, divisors, facts["rope.scaling.original_context_length"]).changed(magnitude=magnitude)
    if kind == "none" or factor == 1 and kind == "linear":
        return plain
    if kind == "linear":
        return plain.changed(scaling="linear", factor=factor)
    if kind != "yarn":
        known = f"none, linear, yarn, and longrope with {_SHORT}"
        raise UsageError(f"rope.scaling.type {kind!r} is not known here; known are {known}")
    must_be("rope.scaling.yarn_ext_factor", facts.get("rope.scaling.yarn_ext_factor", 1.0), 1.0)
    usual = _magnitude(factor) / _magnitude(factor, as_written(facts.get("rope.scaling.yarn_log_multiplier", 0.0)))
    return plain.changed(
        scaling="yarn",
        factor=factor,
        original_context=facts.get("rope.scaling.original_context_length") or context,
        fast_turns=as_written(facts.get("rope.scaling.yarn_beta_fast", 32.0)),
        slow_turns=as_written(facts.get("rope.scaling.yarn_beta_slow", 1.0)),
        magnitude=as_written(facts.get("rope.scaling.yarn_attn_factor") or 0.0) or usual,
    )


def rotary_in_window_of_gguf(facts: Mapping[str, Any], rotary: RotaryOptions, usual: float) -> RotaryOptions:
    """Of the blocks with a window, of families where they are turned in another way: never scaled."""
    return RotaryOptions(as_written(facts.get("rope.freq_base_swa", usual)), part=rotary.part)


def _of_llama3(plain: RotaryOptions, divisors: list[float]) -> RotaryOptions | None:
    """What Llama 3.1 calls its scaling, if these are its."""
    found = plain.changed(scaling="llama3", factor=float(round(max(divisors), 3)), original_context=_LEARNT)
    frequencies = zip(plain.frequencies(len(divisors)), found.frequencies(len(divisors)), divisors, strict=True)
    return found if all(abs(old / new - divisor) <= 1e-4 * divisor for old, new, divisor in frequencies) else None


def _divided(plain: RotaryOptions, divisors: list[float], learnt: int) -> RotaryOptions:
    written = ",".join(repr(as_written(each)) for each in divisors)
    return plain.changed(scaling="divided", divisors=written, original_context=learnt)


def _narrow(value: float) -> float:
    """With 32 bits."""
    return struct.unpack("f", struct.pack("f", value))[0]


def _magnitude(factor: float, scale: float = 1.0) -> float:
    return 0.1 * scale * log(factor) + 1.0 if factor > 1 else 1.0
