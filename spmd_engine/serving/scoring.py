"""Scores of texts: the log-probability that a model gives to each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

import numpy as np

from spmd_engine.arrays import backend_of
from spmd_engine.engine import LayeredEngine
from spmd_engine.errors import NotFiniteError, UsageError
from spmd_engine.serving.generation import vocabulary_of
from spmd_engine.serving.sampling import log_probs_of


@dataclass(frozen=True)
class Score:
    """Log-probabilities of all tokens of a text except the first."""

    log_probs: np.ndarray

    @property
    def nats(self) -> float:
        """The mean negative log-probability of a token."""
        return float(-self.log_probs.mean())

    @property
    def perplexity(self) -> float:
        return exp(self.nats) if self.nats < 700 else float("inf")


def score(
    engine: LayeredEngine, texts: Sequence[Sequence[int]], *, stride: int | None = None, batch_size: int = 8
) -> list[Score]:
    """The scores of texts as tokens, the same on every rank and every mesh. Collective.

    A text that is longer than the model's context is read in windows that begin ``stride`` tokens (half a context)
    after each other. The first window with a token scores it, so that at least context - stride tokens precede it.
    Raises UsageError for texts of less than two tokens, and for tokens outside the vocabulary.
    """
    context = engine.model.context or max(map(len, texts), default=1)
    stride = stride or max(1, context // 2)
    if not 0 < stride <= context:
        raise UsageError(f"stride {stride}: it must be from 1 to the context of {context}")
    windows: list[tuple[int, int, int, int]] = []  # text, begin and end of the read tokens, first scored target
    for number, text in enumerate(texts):
        if len(text) < 2:
            raise UsageError(f"text {number} has {len(text)} token(s); at least two are needed to score one")
        if unknown := [token for token in text if not 0 <= token < engine.model.vocabulary]:
            last_token = engine.model.vocabulary - 1
            raise UsageError(f"text {number} has token {unknown[0]}; {engine.model.name} knows 0 to {last_token}")
        begin, scored = 0, 1
        while scored < len(text):
            end = min(begin + context + 1, len(text))
            windows.append((number, begin, end, scored))
            begin, scored = begin + stride, end
    log_probs = [np.zeros(len(text) - 1) for text in texts]
    with engine.inference():
        for first in range(0, len(windows), batch_size):
            batch = windows[first : first + batch_size]
            likely = _score_windows(engine, [texts[number][begin:end] for number, begin, end, _ in batch])
            for line, (number, begin, end, scored) in zip(likely, batch, strict=True):
                log_probs[number][scored - 1 : end - 1] = line[scored - 1 - begin : end - 1 - begin]
    if not all(np.isfinite(values).all() for values in log_probs):
        raise NotFiniteError(f"{engine.model.name}: its scores are not finite; check its parameters")
    return [Score(values) for values in log_probs]


def _score_windows(engine: LayeredEngine, windows: Sequence[Sequence[int]]) -> np.ndarray:
    """[b s]: the log-probability of each token except the first of each window, on every rank. Collective."""
    length = max(map(len, windows)) - 1
    tokens = np.zeros((len(windows), length + 1), np.int64)  # positions after a window's end are ignored
    for line, window in zip(tokens, windows, strict=True):
        line[: len(window)] = window
    part = engine.batch_span(len(tokens))
    inputs, targets = engine.cut_rows(tokens[part, :-1], tokens[part, 1:])
    outputs = engine.forward(inputs)
    likely = np.full((len(tokens), length), -np.inf)
    if outputs is not None:
        local = log_probs_of(outputs, engine.backend.asarray(targets), vocabulary_of(engine))
        likely[part, engine.layout.positions(length, engine.mesh)] = backend_of(local).to_host(local)
    return engine.all_reduce(likely, "max", label="score") if engine.num_devices > 1 else likely
