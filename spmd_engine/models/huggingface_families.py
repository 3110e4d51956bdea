"""What the models of each family have in common, and what a ``config.json`` of a family can say of one."""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt
from typing import Any

from spmd_engine.models.decoder import DecoderShape

#: Fields of a DecoderShape of which not every config speaks, and the families of which one does.
_SAID_BY = {
    "bias": ("llama", "qwen3", "qwen3-moe", "smollm3", "granite", "gemma", "gemma3-text"),
    "query_key_norm": (),
    "norms": (),
    "activation": (),
    "unturned": ("smollm3",),
    "rotary_in_window": ("gemma3-text",),
    "embedding_scale": ("granite",),
    "residual_scale": ("granite",),
    "attention_scale": ("granite", "gemma3-text"),
    "logits_divisor": ("granite",),
}


def says(family: str, name: str) -> bool:
    """Whether a config of this family speaks of this field of a DecoderShape."""
    return name not in _SAID_BY or family in _SAID_BY[name]


def always(family: str, width: int) -> dict[str, Any]:
    """What is not as by default in all models of a family of this width, though no config says it: fields by name."""
    found: dict[str, Any] = {}
    if family == "qwen2":
        found["bias"] = True
    if family in ("qwen3", "qwen3-moe", "gemma3-text"):
        found["query_key_norm"] = True
    if family in ("gemma", "gemma3-text"):
        found |= {"activation": "gelu", "embedding_scale": sqrt(width)}
    if family == "gemma3-text":
        found["norms"] = "both"
    return found


def unsayable(shape: DecoderShape) -> Iterator[str]:
    """Fields that are not as in all models of the family, though its config cannot say so."""
    usual = DecoderShape(family=shape.family).changed(**always(shape.family, shape.width))
    for name in _SAID_BY:
        if not says(shape.family, name) and getattr(shape, name) != getattr(usual, name):
            yield name
    if shape.output_bias != (shape.bias and says(shape.family, "bias")):  # one word is for both
        yield "output_bias"
    if shape.rotary.part != 1 and shape.family != "phi3":
        yield "rotary"
    if (shape.mixture is not None) != (shape.family in ("mixtral", "qwen3-moe")):
        yield "mixture"
