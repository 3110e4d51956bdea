"""Which token comes next, chosen from scores that are cut over the vocabulary: ranks exchange candidates, never scores.

Order and meaning are those of transformers: repetition penalty, temperature, top-k, top-p, min-p. What is drawn is the
token with the highest score + Gumbel noise, which has the distribution of the softmax (Gumbel, 1954). Its noise is a
function of a key of the sequence and its position, and of the token: no rank needs another's, and neither the mesh nor
the other sequences of a batch can change it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spmd_engine.arrays.random import gumbel_at
from spmd_engine.comm.group import Group
from spmd_engine.serving.options import SamplingOptions

_FIRST_CANDIDATES = 64  # of each rank, when the likeliest tokens that reach a probability are looked for
_NONE = -np.inf


@dataclass(frozen=True)
class Vocabulary:
    """This rank's part of the tokens, and the ranks that have the others."""

    start: int = 0  #: its first token
    over: Group | None = None  #: None: it has all

    def gather(self, x: np.ndarray) -> np.ndarray:
        """x[n c] of all ranks, as [n ranks c]."""
        if self.over is None:
            return x[:, None]
        return np.stack(np.split(self.over.all_gather(np.ascontiguousarray(x), label="sampling"), self.over.size), 1)

    def reduce(self, x: np.ndarray, op: str) -> np.ndarray:
        """The sum, or the maximum, over all ranks."""
        return x if self.over is None else self.over.all_reduce(x, op, label="sampling")


@dataclass(frozen=True)
class Chosen:
    """One token for each row."""

    tokens: np.ndarray  #: [n]
    margins: np.ndarray  #: [n]: by how much its score, with the noise, was above that of the second best
    log_probs: np.ndarray  #: [n]: log of the model's own probability of it, before any option; NaN if not asked for


def choose(
    scores: np.ndarray,
    options: SamplingOptions,
    *,
    seen: Sequence[Sequence[int]] = (),
    keys: Sequence[int] = (),
    vocabulary: Vocabulary = Vocabulary(),  # noqa: B008 (immutable)
    log_probs: bool = False,
) -> Chosen:
    """The next token of each row of scores[n v], where v is this rank's part. Collective over the vocabulary's group.

    ``seen`` are the tokens that each row has so far, ``keys`` of what its noise is a function. Of equal scores, the
    lower token's counts as the higher.
    """
    if not len(scores):
        return Chosen(np.zeros(0, np.int64), np.zeros(0), np.zeros(0))
    raw, scores = scores, allowed_scores(scores, options, seen, vocabulary)
    if options.draws:
        scores = _noisy(scores, keys, vocabulary.start)
    best = _best_two(scores, vocabulary)
    of_ranks = vocabulary.gather(best)  # [n ranks (score, token, second score)]
    order = np.lexsort((of_ranks[..., 1], -of_ranks[..., 0]), axis=1)
    rows = np.arange(len(scores))
    first = order[:, 0]
    value, token = of_ranks[rows, first, 0], of_ranks[rows, first, 1]
    second = of_ranks[rows, first, 2]
    if of_ranks.shape[1] > 1:
        second = np.maximum(second, of_ranks[rows, order[:, 1], 0])
    tokens = token.astype(np.int64)
    likely = _log_probs(raw, tokens, vocabulary) if log_probs else np.full(len(tokens), np.nan)
    return Chosen(tokens, value - second, likely)


def allowed_scores(
    scores: np.ndarray, options: SamplingOptions, seen: Sequence[Sequence[int]], vocabulary: Vocabulary
) -> np.ndarray:
    """What the options make of scores[n v], with -inf where a token is not to be drawn: what noise is added to.
    Collective over the vocabulary's group."""
    if options.repetition_penalty != 1.0:
        scores = _penalised(scores.copy(), seen, options.repetition_penalty, vocabulary.start)
    if options.draws:
        scores = _allowed(scores.astype(np.float64) / options.temperature, options, vocabulary)
    return scores


def _penalised(scores: np.ndarray, seen: Sequence[Sequence[int]], penalty: float, start: int) -> np.ndarray:
    for row, tokens in zip(scores, seen, strict=True):
        here = np.unique(np.asarray(tokens, np.int64)) - start
        here = here[(here >= 0) & (here < len(row))]
        row[here] = np.where(row[here] < 0, row[here] * penalty, row[here] / penalty)
    return scores


def _allowed(scores: np.ndarray, options: SamplingOptions, vocabulary: Vocabulary) -> np.ndarray:
    """Scores, -inf where a token is not to be drawn."""
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
    """The k highest scores of each row, filled up with -inf, and where they are; of equal ones the first."""
    have = min(k, scores.shape[1])
    values, places = np.full((len(scores), k), _NONE), np.zeros((len(scores), k), np.int64)
    for row, line in enumerate(scores):
        at_least = np.partition(line, -have)[-have] if have else _NONE
        found = np.flatnonzero(line >= at_least)
        found = found[np.lexsort((found, -line[found]))][:have]
        values[row, :have], places[row, :have] = line[found], found
    return values, places


def _last_of_nucleus(scores: np.ndarray, p: float, vocabulary: Vocabulary) -> tuple[np.ndarray, np.ndarray]:
    """[n], [n]: score and token of the last of the likeliest tokens that together reach probability ``p``.

    Every rank tells its highest scores. Down to the lowest that is told by a rank with more, the order of all is
    certain; if the probability is not reached by then, they tell more.
    """
    top = vocabulary.reduce(scores.max(axis=1, initial=_NONE), "max")
    total = vocabulary.reduce(np.exp(scores - top[:, None]).sum(axis=1), "sum")
    count = _FIRST_CANDIDATES
    while True:
        values, places = _highest(scores, count)
        told = np.stack((values, places + vocabulary.start), axis=1).reshape(len(scores), -1)
        of_ranks = vocabulary.gather(told).reshape(len(scores), -1, 2, count)
        certain = of_ranks[:, :, 0, -1].max(axis=1)  # -inf: every rank has told all
        candidates = of_ranks[:, :, 0].reshape(len(scores), -1), of_ranks[:, :, 1].reshape(len(scores), -1)
        order = np.lexsort((candidates[1], -candidates[0]), axis=1)
        value, token = (np.take_along_axis(each, order, axis=1) for each in candidates)
        before = np.cumsum(np.exp(value - top[:, None]), axis=1) / total[:, None]
        kept = np.concatenate([np.full((len(scores), 1), True), before[:, :-1] < p], axis=1) & (value > _NONE)
        last = np.maximum(kept.sum(axis=1) - 1, 0)
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
    """[n 3]: the highest score here, its token, and the second highest score."""
    best = np.full((len(scores), 3), _NONE)
    best[:, 1] = vocabulary.start
    if scores.shape[1]:
        rows, at = np.arange(len(scores)), scores.argmax(axis=1)
        best[:, 0], best[:, 1] = scores[rows, at], at + vocabulary.start
        for row, place in enumerate(at):
            line = scores[row]
            best[row, 2] = max(line[:place].max(initial=_NONE), line[place + 1 :].max(initial=_NONE))
    return best


def _log_probs(scores: np.ndarray, tokens: np.ndarray, vocabulary: Vocabulary) -> np.ndarray:
    """[n]: log softmax(scores) at the tokens."""
    scores = scores.astype(np.float64)
    top = vocabulary.reduce(scores.max(axis=1, initial=_NONE), "max")
    sums = np.zeros((2, len(scores)))
    sums[0] = np.exp(scores - top[:, None]).sum(axis=1)
    place = tokens - vocabulary.start
    here = (place >= 0) & (place < scores.shape[1])
    sums[1, here] = scores[here, place[here]] - top[here]
    sums = vocabulary.reduce(sums, "sum")
    return sums[1] - np.log(sums[0])
