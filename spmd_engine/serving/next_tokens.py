"""A model of text as an engine whose output is the next token of each sequence: what a generation's loop serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.random import key_of
from spmd_engine.engine.base import ShardedEngine
from spmd_engine.engine.inference import decode_inputs
from spmd_engine.engine.layered import LayeredEngine
from spmd_engine.errors import NotFiniteError, UsageError
from spmd_engine.layers.attention.kv_cache import Cache
from spmd_engine.serving.options import SamplingOptions
from spmd_engine.serving.sampling import Vocabulary, choose
from spmd_engine.sharding.shards import Shards

#: What a row of the input tells before its tokens: the number of its sequence, the key of its noise, how many of its
#: positions in the cache are kept, how many of its text come before these tokens, and how many tokens these are.
SEQUENCE, KEY, KEPT, BEFORE, COUNT, TOKENS = range(6)
TOKEN, LOG_PROB, MARGIN = range(3)  # columns of the output


def call(rows: Sequence[tuple[int, int, int, int, Sequence[int]]]) -> np.ndarray:
    """The input of ``NextTokens`` for rows of sequence, key, kept, before and tokens."""
    x = np.zeros((len(rows), TOKENS + max(len(row[-1]) for row in rows)), np.int64)
    for line, (*head, tokens) in zip(x, rows, strict=True):
        line[:COUNT], line[COUNT], line[TOKENS : TOKENS + len(tokens)] = head, len(tokens), tokens
    return x


class NextTokens(ShardedEngine):
    """The next token of sequences, of which the last tokens are given and the others are remembered.

    Inputs are whole on every rank, and so are outputs[b 3]: token, log-probability and margin (see ``Chosen``). Each
    call goes on with the sequences that it names; the others are forgotten. A sequence that is new is given to ranks
    as the batch is cut, and stays with them.
    """

    outputs_everywhere = True

    def __init__(self, engine: LayeredEngine, options: SamplingOptions, *, log_probs: bool = False) -> None:
        if not engine.model.vocabulary:
            raise UsageError(f"generate: {engine.model.name} is no model of text, it takes no tokens")
        self.engine, self.options, self.log_probs = engine, options, log_probs
        self.mesh = engine.mesh
        self.vocabulary = _vocabulary(engine)
        self._cache = Cache()
        self._rows: list[int] = []  # sequences in the cache, in its order: this rank's
        self._texts: dict[int, list[int]] = {}  # of all sequences
        self._known: set[int] = set()  # sequences of the last call

    def load_checkpoint(self, params: Mapping[str, Any]) -> None:
        self.engine.load_checkpoint(params)

    def backward(self, grads: Array | None) -> dict[str, Array]:
        raise UsageError("tokens have no gradient; train the model itself")

    def forward(self, x: np.ndarray) -> np.ndarray:
        """x[b TOKENS+s], as ``call`` makes it -> [b 3]. Collective."""
        x = np.asarray(x)
        here = self._go_on_with(x)
        mine = x[here]
        self._cache.truncate(mine[:, KEPT].tolist())
        found = np.full((len(x), 3), -np.inf)
        with self.engine.inference():
            step = decode_inputs(self.engine, mine[:, TOKENS:], self._cache, mine[:, COUNT].tolist(), last=True)
            scores = self.engine.forward(step.inputs, step.ctx)
        if scores is not None:
            rows = [here[row] for row in step.rows]
            found[rows] = self._choose(backend_of(scores).to_host(scores)[:, 0], x[rows])
        if self.num_devices > 1:
            found = self.all_reduce(found, "max", label="next tokens")
        if (found[:, TOKEN] == np.inf).any():
            raise NotFiniteError(f"{self.engine.model.name}: its scores are not finite; are its parameters?")
        return found

    def _go_on_with(self, x: np.ndarray) -> list[int]:
        """Which of the rows are this rank's, in the order of the cache, which has no others then."""
        sequences = x[:, SEQUENCE].tolist()
        for sequence, line in zip(sequences, x, strict=True):
            text = self._texts.setdefault(sequence, [])
            text[line[BEFORE] :] = line[TOKENS : TOKENS + line[COUNT]].tolist()
        if set(sequences) == self._known:
            at = {sequence: row for row, sequence in enumerate(sequences)}
            return [at[sequence] for sequence in self._rows]
        new = [sequence for sequence in sequences if sequence not in self._known]
        self._texts = {sequence: self._texts[sequence] for sequence in sequences}
        self._known = set(sequences)
        at = {sequence: row for row, sequence in enumerate(sequences)}
        if self._cache.lengths or self._rows:
            self._cache.select([row for row, sequence in enumerate(self._rows) if sequence in at])
        self._rows = [sequence for sequence in self._rows if sequence in at]
        mine = new[self.engine.batch_span(len(new))]
        if mine:
            self._cache.add_empty(len(mine))
            self._rows += mine
        return [at[sequence] for sequence in self._rows]

    def _choose(self, scores: np.ndarray, x: np.ndarray) -> np.ndarray:
        texts = [self._texts[sequence] for sequence in x[:, SEQUENCE].tolist()]
        keys = [key_of(int(line[KEY]), len(text)) for line, text in zip(x, texts, strict=True)]
        chosen = choose(
            scores, self.options, seen=texts, keys=keys, vocabulary=self.vocabulary, log_probs=self.log_probs
        )
        likely = np.where(np.isnan(chosen.log_probs), -np.inf, chosen.log_probs)
        tokens = np.where(np.isnan(chosen.margins), np.inf, chosen.tokens)
        return np.stack((tokens, likely, np.nan_to_num(chosen.margins, nan=0, posinf=np.inf)), axis=1)


def _vocabulary(engine: LayeredEngine) -> Vocabulary:
    shards = Shards(engine.mesh, engine.layout, "sampling")
    return Vocabulary(shards.span("v", engine.model.vocabulary).start, shards.group_of("v"))
