"""Models of text and pictures: which part of their ``config.json`` and of their files is the decoder of text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from spmd_engine.errors import CheckpointError
from spmd_engine.formats.tensor import FileTensor
from spmd_engine.models.hf.unknown_fields import Fields

#: By ``model_type``, what ``text_config`` means where it is silent.
_TEXT: Mapping[str, Mapping[str, Any]] = {
    "gemma3": {
        "model_type": "gemma3_text", "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216,
        "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
    },
    "mistral3": {
        "model_type": "mistral", "vocab_size": 131072, "hidden_size": 5120, "intermediate_size": 32768,
        "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "rms_norm_eps": 1e-5, "sliding_window": None,
    },
}  # fmt: skip
#: Fields beside ``text_config`` that say how pictures become part of a text.
_OF_PICTURES = (
    "vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index",
    "projector_hidden_act", "multimodal_projector_bias", "spatial_merge_size", "vision_feature_layer",
)  # fmt: skip
#: How names of tensors begin, and how those of the decoder alone do; and those of pictures.
_NAMES = {
    "model.language_model.": "model.", "language_model.model.": "model.", "language_model.lm_head.": "lm_head.",
}  # fmt: skip
_PICTURES = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


def is_beside_pictures(config: Mapping[str, Any]) -> bool:
    """Whether a config is one of a model of text and pictures, of which the text is read."""
    return config.get("model_type") in tuple(_TEXT)


def text_of(config: Mapping[str, Any], where: str) -> tuple[dict[str, Any], list[str]]:
    """What such a config says of the decoder, and the names of fields that are not heeded.

    Raises CheckpointError, naming the field, for one that would change what the decoder computes.
    """
    outer, usual = Fields(config), _TEXT[config["model_type"]]
    said = outer.get("text_config")
    if not isinstance(said, Mapping):
        raise CheckpointError(f"{where}: text_config is {said!r}; it is an object")
    tied = outer.get("tie_word_embeddings")
    for name in _OF_PICTURES:
        outer.get(name)
    unknown = outer.check_rest(where)
    found = {**usual, **said, **({} if tied is None else {"tie_word_embeddings": tied})}
    return found, [*(["vision_config"] if config.get("vision_config") else []), *unknown]


def tensors_of_text(tensors: Mapping[str, FileTensor]) -> dict[str, FileTensor]:
    """Those of the decoder, by the names that they have in a file of it alone; those of pictures are left out."""
    found = {}
    for name, tensor in tensors.items():
        if name.startswith(_PICTURES):
            continue
        own = next((begin + name.removeprefix(old) for old, begin in _NAMES.items() if name.startswith(old)), name)
        found[own] = replace(tensor, name=own)
    return found
