"""Writes a DecoderConfig as the metadata of a GGUF file, and checks that the reader finds the same decoder in them."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from spmd_engine.errors import CheckpointError, UsageError
from spmd_engine.formats.gguf import GGUF
from spmd_engine.formats.tensor import FileTensor, Index
from spmd_engine.models.decoder import DecoderConfig
from spmd_engine.models.families import FAMILIES
from spmd_engine.models.gguf import FREQUENCIES, config_of_gguf
from spmd_engine.models.hf.write_config import check_same

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
    shape, head_width = _explicit(shape), _head_width(shape)
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
    if head_width * shape.heads != shape.width:
        facts |= {"attention.key_length": head_width, "attention.value_length": head_width}
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


def _head_width(shape: DecoderConfig) -> int:
    return shape.head_width or shape.width // shape.heads


def _explicit(shape: DecoderConfig) -> DecoderConfig:
    return shape.changed(key_value_heads=shape.key_value_heads or shape.heads, head_width=_head_width(shape))


def _rotary_facts(shape: DecoderConfig) -> tuple[dict[str, Any], dict[str, list[float]]]:
    rotary, rotated = shape.rotary, round(shape.rotary.part * _head_width(shape))
    facts: dict[str, Any] = {"rope.dimension_count": rotated, "rope.freq_base": rotary.theta}
    if rotary.scaling == "llama3" and shape.family in _WITH_FREQUENCIES:
        plain = rotary.changed(scaling="none").frequencies(rotated // 2)
        divisors = [old / new for old, new in zip(plain, rotary.frequencies(rotated // 2), strict=True)]
        return facts, {FREQUENCIES: divisors}
    if rotary.scaling in ("linear", "yarn"):
        facts |= {"rope.scaling.type": rotary.scaling, "rope.scaling.factor": rotary.factor}
    if rotary.scaling == "yarn":
        facts["rope.scaling.original_context_length"] = rotary.original_context
        facts["rope.scaling.yarn_beta_fast"], facts["rope.scaling.yarn_beta_slow"] = (
            rotary.fast_turns,
            rotary.slow_turns,
        )
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
