"""The next token: options of sampling, and the choice where the vocabulary may be sharded.

Order and meaning of the options are those of transformers: repetition penalty, temperature, top-k, top-p, min-p. The
token with the highest logit + Gumbel noise is chosen, which samples from the softmax (Gumbel, 1954). The noise is a
function of a key of the sequence, of the position and of the token: it depends neither on the mesh nor on the other
sequences of a batch. Ranks exchange candidates, never logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.random import gumbel_at
from spmd_engine.comm.group import Group
from spmd_engine.configuration import Configuration, setting
from spmd_engine.errors import UsageError
from spmd_engine.foreign import json_at

LARGEST = 1e6  #: the largest temperature or penalty
#: Options of sampling; giving one of them turns sampling on.
AT_RANDOM = ("temperature", "top_k", "top_p", "min_p")


@dataclass(frozen=True)
class SamplingOptions(Configuration):
    """Changes to the logits, in the order of the fields, before the best token is taken or one is sampled."""

    sample: bool = False  #: whether tokens are sampled; else the likeliest is taken
    repetition_penalty: float = setting(1.0, least=1e-6, most=LARGEST)  #: divides positive logits of earlier tokens
    temperature: float = setting(1.0, least=0, most=LARGEST)  #: divides all logits; 0: the likeliest is taken
    top_k: int = setting(0, least=0)  #: keep this many of the likeliest tokens, and ties; 0: all
    top_p: float = setting(1.0, least=0, most=1)  #: keep the likeliest that together reach this probability
    min_p: float = setting(0.0, least=0, most=1)  #: keep tokens with this fraction of the largest probability
    seed: int = 0  #: the seed of the noise

    @property
    def draws(self) -> bool:
        """Whether tokens are chosen at random."""
        return self.sample and self.temperature > 0

    def with_given(self, **values: Any) -> SamplingOptions:
        """These options with the values that are not None; one of ``AT_RANDOM`` turns sampling on."""
        values = {name: value for name, value in values.items() if value is not None}
        if any(name in values for name in AT_RANDOM):
            values.setdefault("sample", True)
        return self.changed(**values)


@dataclass(frozen=True)
class GenerationConfig:
    """The content of a model's ``generation_config.json``."""

    sampling: SamplingOptions = SamplingOptions()
    ends: tuple[int, ...] = ()  #: tokens that end a text
    tokens: int | None = None  #: most new tokens
    unknown: tuple[str, ...] = ()  #: unsupported fields that would change the text


#: Unsupported fields, with the values that have no effect.
_WITHOUT_EFFECT = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "typical_p"), (None, 1)),
    **dict.fromkeys(("encoder_repetition_penalty", "guidance_scale"), (None, 1)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size", "diversity_penalty"), (None, 0)),
    **dict.fromkeys(("penalty_alpha", "min_length", "min_new_tokens"), (None, 0)),
    **dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens"), (None, [])),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id"), (None,)),
    "sequence_bias": (None, {}),
}
_USUAL_TOP_K = 50  # the default of transformers for models that sample


def read_generation_config(folder: str | Path) -> GenerationConfig:
    """The configuration of a model's folder; without the file, only the end tokens of its ``config.json``.

    Raises UsageError for a damaged file.
    """
    file = Path(folder, "generation_config.json")
    if file.is_file():
        content = json_at(file)
        if not isinstance(content, Mapping):
            raise UsageError(f"{file} must hold an object, {{...}}")
        return generation_config(content, str(file))
    file = file.with_name("config.json")  # a training run's file has no such field
    content = None
    with suppress(UsageError):
        content = json_at(file)
    ends = content.get("eos_token_id") if isinstance(content, Mapping) else None
    return generation_config({"eos_token_id": ends}, str(file))


def generation_config(content: Mapping[str, Any], where: str = "generation_config.json") -> GenerationConfig:
    """The configuration in a JSON object; raises UsageError, naming ``where``, for values that a field cannot have."""
    names = {field.name for field in fields(SamplingOptions)} - {"sample", "seed"}
    options = {name: value for name, value in content.items() if name in names and value is not None}
    if content.get("do_sample"):
        options = {"top_k": _USUAL_TOP_K, **options, "sample": True}
    try:
        sampling = SamplingOptions(**options)
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


# --- The choice


_FIRST_CANDIDATES = 64  # candidates of each rank in the search for the tokens of top-p
_NONE = -np.inf


@dataclass(frozen=True)
class Vocabulary:
    """This rank's shard of the vocabulary, and the group of ranks that have the other shards."""

    start: int = 0  #: its first token
    over: Group | None = None  #: None: this rank has all

    def gather(self, x: np.ndarray) -> np.ndarray:
        """x[n c] of all ranks, as [n ranks c]."""
        if self.over is None:
            return x[:, None]
        return np.stack(np.split(self.over.all_gather(np.ascontiguousarray(x), label="sampling"), self.over.size), 1)

    def reduce(self, x: Array, op: str) -> Array:
        """The sum, or the maximum, over all ranks."""
        return x if self.over is None else self.over.all_reduce(x, op, label="sampling")


@dataclass(frozen=True)
class Chosen:
    """One token for each row."""

    tokens: np.ndarray  #: [n]
    margins: np.ndarray  #: [n]: its logit, with the noise, minus the second best
    log_probs: np.ndarray  #: [n]: by the model alone, before any option; NaN without ``log_probs``


def choose(
    scores: np.ndarray,
    options: SamplingOptions,
    *,
    seen: Sequence[Sequence[int]] = (),
    keys: Sequence[int] = (),
    vocabulary: Vocabulary = Vocabulary(),  # noqa: B008 (immutable)
    log_probs: bool = False,
) -> Chosen:
    """The next token of each row of scores[n v], where v is this rank's shard. Collective over the vocabulary's group.

    ``seen`` are the earlier tokens of each row, ``keys`` the keys of its noise. Ties go to the lower token.
    """
    if not len(scores):
        return Chosen(np.zeros(0, np.int64), np.zeros(0), np.zeros(0))
    raw, scores = scores, allowed_scores(scores, options, seen, vocabulary)
    if options.draws:
        scores = _noisy(scores, keys, vocabulary.start)
    best = _best_two(scores, vocabulary)  # [n (score, token, second score)]
    if vocabulary.over is not None:
        by_rank, rows = vocabulary.gather(best), np.arange(len(scores))
        order = np.lexsort((by_rank[..., 1], -by_rank[..., 0]), axis=1)
        best = by_rank[rows, order[:, 0]]
        best[:, 2] = np.maximum(best[:, 2], by_rank[rows, order[:, 1], 0])
    value, token, second = best.T
    tokens = token.astype(np.int64)
    likely = log_probs_of(raw, tokens, vocabulary) if log_probs else np.full(len(tokens), np.nan)
    return Chosen(tokens, value - second, likely)


def allowed_scores(
    scores: np.ndarray, options: SamplingOptions, seen: Sequence[Sequence[int]], vocabulary: Vocabulary
) -> np.ndarray:
    """scores[n v] after all options, before the noise, -inf for excluded tokens. Collective over the vocabulary's
    group."""
    if options.repetition_penalty != 1.0:
        scores = _penalised(scores.copy(), seen, options.repetition_penalty, vocabulary.start)
    if options.draws:
        scores = _allowed(scores.astype(np.float64) / options.temperature, options, vocabulary)
    return scores


def _penalised(scores: np.ndarray, texts: Sequence[Sequence[int]], penalty: float, start: int) -> np.ndarray:
    for row, tokens in zip(scores, texts, strict=True):
        columns = np.unique(np.asarray(tokens, np.int64)) - start
        columns = columns[(columns >= 0) & (columns < len(row))]
        row[columns] = np.where(row[columns] < 0, row[columns] * penalty, row[columns] / penalty)
    return scores


def _allowed(scores: np.ndarray, options: SamplingOptions, vocabulary: Vocabulary) -> np.ndarray:
    """Scores after top-k, top-p and min-p, -inf for excluded tokens."""
    if options.top_k:
        at_least = _kth_highest(scores, options.top_k, vocabulary)
        scores[scores < at_least[:, None]] = _NONE
    if options.top_p < 1:
        value, token = _last_of_nucleus(scores, options.top_p, vocabulary)
        tokens = vocabulary.start + np.arange(scores.shape[1])
        beyond = (scores < value[:, None]) | ((scores == value[:, None]) & (tokens > token[:, None]))
        scores[beyond] = _NONE
    if options.min_p > 0:
        top = vocabulary.reduce(scores.max(axis=1, initial=_NONE), "max")
        scores[scores < (top + np.log(options.min_p))[:, None]] = _NONE
    return scores


def _kth_highest(scores: np.ndarray, k: int, vocabulary: Vocabulary) -> np.ndarray:
    """[n]: the k-th highest score of each row, counted over all ranks."""
    highest = vocabulary.gather(_highest(scores, k)[0]).reshape(len(scores), -1)
    k = min(k, highest.shape[1])
    return np.partition(highest, -k, axis=1)[:, -k]


def _highest(scores: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k highest scores of each row, padded with -inf, and their indices; among equal ones the first."""
    count = min(k, scores.shape[1])
    values, places = np.full((len(scores), k), _NONE), np.zeros((len(scores), k), np.int64)
    for row, line in enumerate(scores):
        at_least = np.partition(line, -count)[-count] if count else _NONE
        indices = np.flatnonzero(line >= at_least)
        indices = indices[np.lexsort((indices, -line[indices]))][:count]
        values[row, :count], places[row, :count] = line[indices], indices
    return values, places


def _last_of_nucleus(scores: np.ndarray, p: float, vocabulary: Vocabulary) -> tuple[np.ndarray, np.ndarray]:
    """[n], [n]: score and token of the last of the likeliest tokens that together reach probability ``p``.

    Every rank sends its highest scores. Their order is certain down to the largest of the ranks' lowest sent scores; if
    the probability is not reached by then, the ranks send more.
    """
    top = vocabulary.reduce(scores.max(axis=1, initial=_NONE), "max")
    total = vocabulary.reduce(np.exp(scores - top[:, None]).sum(axis=1), "sum")
    count = _FIRST_CANDIDATES
    while True:
        values, places = _highest(scores, count)
        sent = np.stack((values, places + vocabulary.start), axis=1).reshape(len(scores), -1)
        by_rank = vocabulary.gather(sent).reshape(len(scores), -1, 2, count)
        certain = by_rank[:, :, 0, -1].max(axis=1)  # -inf: every rank has sent all
        candidates = by_rank[:, :, 0].reshape(len(scores), -1), by_rank[:, :, 1].reshape(len(scores), -1)
        order = np.lexsort((candidates[1], -candidates[0]), axis=1)
        value, token = (np.take_along_axis(array, order, axis=1) for array in candidates)
        before = np.cumsum(np.exp(value - top[:, None]), axis=1) / total[:, None]
        in_nucleus = np.concatenate([np.full((len(scores), 1), True), before[:, :-1] < p], axis=1) & (value > _NONE)
        last = np.maximum(in_nucleus.sum(axis=1) - 1, 0)
        rows = np.arange(len(scores))
        if (value[rows, last] > certain).all() or (certain == _NONE).all():
            return value[rows, last], token[rows, last]
        count *= 4


def _noisy(scores: np.ndarray, keys: Sequence[int], start: int) -> np.ndarray:
    for row, key in zip(scores, keys, strict=True):
        allowed = np.flatnonzero(row > _NONE)
        row[allowed] += gumbel_at(key, (allowed + start).astype(np.uint64))
    return scores


def _best_two(scores: np.ndarray, vocabulary: Vocabulary) -> np.ndarray:
    """[n 3]: the highest score of this rank, its token, and the second highest score."""
    best = np.full((len(scores), 3), _NONE)
    best[:, 1] = vocabulary.start
    if scores.shape[1]:
        rows, at = np.arange(len(scores)), scores.argmax(axis=1)
        best[:, 0], best[:, 1] = scores[rows, at], at + vocabulary.start
        for row, place in enumerate(at):
            line = scores[row]
            best[row, 2] = max(line[:place].max(initial=_NONE), line[place + 1 :].max(initial=_NONE))
    return best


def log_probs_of(scores: Array, tokens: Array, vocabulary: Vocabulary) -> Array:
    """log softmax(scores[n ... v]) at tokens[n ...], in float64. Collective over the vocabulary's group."""
    xp = backend_of(scores).xp
    top = vocabulary.reduce(scores.max(axis=-1, initial=_NONE).astype(xp.float64), "max")
    sums = xp.zeros((2, *tokens.shape))
    for number in range(len(scores)):  # a sample at a time: float64 of all would be twice the scores' memory
        sums[0, number] = xp.exp(scores[number].astype(xp.float64) - top[number, ..., None]).sum(axis=-1)
    place = tokens - vocabulary.start
    local = (place >= 0) & (place < scores.shape[-1])
    sums[1][local] = scores[local, place[local]] - top[local]
    sums = vocabulary.reduce(sums, "sum")
    return sums[1] - xp.log(sums[0])
