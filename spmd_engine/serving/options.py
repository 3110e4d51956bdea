"""How the next token is chosen: greedily, or at random among the likelier ones, as transformers does it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from spmd_engine.configuration import Configuration, setting
from spmd_engine.errors import UsageError
from spmd_engine.foreign import json_at

LARGEST = 1e6  #: of temperatures and penalties
#: Options that say how it is chosen at random: where one is given, it is.
AT_RANDOM = ("temperature", "top_k", "top_p", "min_p")


@dataclass(frozen=True)
class SamplingOptions(Configuration):
    """What is done to scores, in the order of the fields, before the best one is taken, or one is drawn."""

    sample: bool = False  #: whether tokens are drawn at random; else the likeliest is taken
    repetition_penalty: float = setting(1.0, least=1e-6, most=LARGEST)  #: divides, if positive, scores of tokens seen
    temperature: float = setting(1.0, least=0, most=LARGEST)  #: divides all scores; 0: the likeliest is taken
    top_k: int = setting(0, least=0)  #: only so many of the likeliest tokens, and what is as likely; 0: all
    top_p: float = setting(1.0, least=0, most=1)  #: only the likeliest that together reach this probability
    min_p: float = setting(
        0.0, least=0, most=1
    )  #: only tokens so likely, as a share of the likeliest one's probability
    seed: int = 0  #: of what is drawn

    @property
    def draws(self) -> bool:
        """Whether anything is left to chance."""
        return self.sample and self.temperature > 0

    def with_given(self, **given: Any) -> SamplingOptions:
        """These with the values that somebody gave (None: not given); an option of drawing makes it draw."""
        given = {name: value for name, value in given.items() if value is not None}
        if any(name in given for name in AT_RANDOM):
            given.setdefault("sample", True)
        return self.changed(**given)


@dataclass(frozen=True)
class GenerationConfig:
    """What a model's ``generation_config.json`` says."""

    sampling: SamplingOptions = SamplingOptions()
    ends: tuple[int, ...] = ()  #: tokens that end a text
    tokens: int | None = None  #: how many are written at most
    unknown: tuple[str, ...] = ()  #: fields that would change what is written, and are not known here


#: Fields by which nothing changes if they have these values.
_WITHOUT_EFFECT = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "typical_p": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1.0),
    "diversity_penalty": (None, 0.0),
    "penalty_alpha": (None, 0.0),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "bad_words_ids": (None, []),
    "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "guidance_scale": (None, 1.0),
    "sequence_bias": (None, {}),
}
_USUAL_TOP_K = 50  # transformers', where a model says that tokens are drawn, and not from how many


def read_generation_config(folder: str | Path) -> GenerationConfig:
    """That of a model's folder; without the file, the tokens that end a text for its ``config.json``, if that names
    any. Raises UsageError for a damaged one."""
    file = Path(folder, "generation_config.json")
    if not file.is_file():
        return _ends_of_config(Path(folder, "config.json"))
    content = json_at(file)
    if not isinstance(content, Mapping):
        raise UsageError(f"{file} must hold an object, {{...}}")
    return generation_config(content, str(file))


def _ends_of_config(file: Path) -> GenerationConfig:
    """What a model's configuration says of them; a run's has no such field."""
    try:
        content = json_at(file)
    except UsageError:
        return GenerationConfig()
    ends = content.get("eos_token_id") if isinstance(content, Mapping) else None
    return generation_config({"eos_token_id": ends}, str(file))


def generation_config(content: Mapping[str, Any], where: str = "generation_config.json") -> GenerationConfig:
    """What such an object says; raises UsageError, naming ``where``, for values that a field cannot have."""
    known = {each.name for each in fields(SamplingOptions)} - {"sample", "seed"}
    given = {name: value for name, value in content.items() if name in known and value is not None}
    if content.get("do_sample"):
        given = {"top_k": _USUAL_TOP_K, **given, "sample": True}
    try:
        sampling = SamplingOptions(**given)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    ends = content.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if not all(type(token) is int for token in ends):
        raise UsageError(
            f"{where}: eos_token_id is {content['eos_token_id']!r}: it must be a number, or a list of them"
        )
    unknown = [name for name, usual in _WITHOUT_EFFECT.items() if content.get(name) not in usual]
    tokens = content.get("max_new_tokens")
    return GenerationConfig(sampling, tuple(ends), tokens if type(tokens) is int else None, tuple(unknown))
