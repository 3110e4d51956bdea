"""Models of text and images: the part of their ``config.json`` and of their tensors that is the text model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from spmd_engine.errors import CheckpointError
from spmd_engine.formats.tensor import FileTensor
from spmd_engine.models.families import FAMILIES
from spmd_engine.models.hf.unknown_fields import Fields

#: By ``model_type``, what ``text_config`` means where it is silent.
MULTIMODAL: Mapping[str, Mapping[str, Any]] = {
    kind: {"model_type": family.model_type, **silent}
    for family in FAMILIES.values()
    for kind, silent in family.multimodal.items()
}
#: Fields beside ``text_config``, about how images become part of a text.
_IMAGE_FIELDS = (
    "vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index",
    "projector_hidden_act", "multimodal_projector_bias", "spatial_merge_size", "vision_feature_layer"
)  # fmt: skip
#: Prefixes of the text model's tensors, and what they are in a file of it alone; prefixes of tensors for images.
_PREFIXES = {
    "model.language_model.": "model.", "language_model.model.": "model.", "language_model.lm_head.": "lm_head."
}  # fmt: skip
_IMAGE_PREFIXES = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


def text_config(config: Mapping[str, Any], where: str) -> tuple[dict[str, Any], list[str]]:
    """The config of the text model, and the names of fields that are ignored.

    Raises CheckpointError, naming the field, for one that would change what the text model computes.
    """
    outer = Fields(config)
    text = outer.get("text_config")
    if not isinstance(text, Mapping):
        raise CheckpointError(f"{where}: text_config is {text!r}; it is an object")
    tied = outer.get("tie_word_embeddings")
    for name in _IMAGE_FIELDS:
        outer.get(name)
    unknown = outer.check_rest(where)
    whole = {**MULTIMODAL[config["model_type"]], **text, **({} if tied is None else {"tie_word_embeddings": tied})}
    return whole, [*(["vision_config"] if config.get("vision_config") else []), *unknown]


def text_tensors(tensors: Mapping[str, FileTensor]) -> dict[str, FileTensor]:
    """Tensors of the text model, by their names in a file of it alone."""
    renamed = {}
    for name, tensor in tensors.items():
        if not name.startswith(_IMAGE_PREFIXES):
            prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
            own = _PREFIXES.get(prefix, "") + name.removeprefix(prefix)
            renamed[own] = replace(tensor, name=own)
    return renamed
