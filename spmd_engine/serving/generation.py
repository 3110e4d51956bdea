"""Generation: the next token of each sequence as an engine, and the loop that continues many prompts at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any
from zlib import crc32

import numpy as np

from spmd_engine.arguments import checked
from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.random import key_of
from spmd_engine.comm.agreement.rank_zero import json_from_rank_zero
from spmd_engine.configuration import Configuration, setting
from spmd_engine.engine.base import ShardedEngine
from spmd_engine.engine.inference import decode_inputs
from spmd_engine.engine.layered import LayeredEngine
from spmd_engine.engine.state.moving_state import Parts, pack_cache, unpack_cache
from spmd_engine.errors import NotFiniteError, UsageError
from spmd_engine.layers.attention.kv_cache import Cache
from spmd_engine.serving.sampling import SamplingOptions, Vocabulary, choose
from spmd_engine.sharding.placement import Placement
from spmd_engine.sharding.shards import Shards
from spmd_engine.tokens import TextStream, Tokenizer

#: Columns of the input before its tokens: the sequence's number, the key of its noise, how many of its positions in
#: the cache are kept, how many of its tokens come before these, and how many tokens these are.
SEQUENCE, KEY, KEPT, BEFORE, COUNT, TOKENS = range(6)
TOKEN, LOG_PROB, MARGIN = range(3)  # columns of the output


def call(rows: Sequence[tuple[int, int, int, int, Sequence[int]]]) -> np.ndarray:
    """The input of ``NextTokens`` for rows of sequence, key, kept, before and tokens."""
    x = np.zeros((len(rows), TOKENS + max(len(row[-1]) for row in rows)), np.int64)
    for line, (*head, tokens) in zip(x, rows, strict=True):
        line[:COUNT], line[COUNT], line[TOKENS : TOKENS + len(tokens)] = head, len(tokens), tokens
    return x


class NextTokens(ShardedEngine):
    """The next token of sequences, from their last tokens and the cache of the others.

    Inputs are whole on every rank, and so are outputs[b 3]: token, log-probability and margin (see ``Chosen``). A call
    continues the sequences that it lists and removes the others from the cache. New sequences are sharded as a batch
    is, and stay on their ranks.
    """

    outputs_everywhere = True

    def __init__(self, engine: LayeredEngine, options: SamplingOptions, *, log_probs: bool = False) -> None:
        if not engine.model.vocabulary:
            raise UsageError(f"generate: {engine.model.name} is no model of text, it takes no tokens")
        self.engine, self.options, self.log_probs = engine, options, log_probs
        self.mesh = engine.mesh
        self._cache = Cache()
        self._rows: list[int] = []  # sequences in the cache, in its order: this rank's
        self._texts: dict[int, list[int]] = {}  # all sequences' tokens
        self._sequences: set[int] = set()  # sequences of the last call

    def load_checkpoint(self, params: Mapping[str, Any]) -> None:
        self.engine.load_checkpoint(params)

    def backward(self, grads: Array | None) -> dict[str, Array]:
        raise UsageError("tokens have no gradient; train the model itself")

    def forward(self, x: np.ndarray) -> np.ndarray:
        """x[b TOKENS+s], as ``call`` makes it -> [b 3]. Collective."""
        x = np.asarray(x)
        local_rows = self._select_local_rows(x)
        mine = x[local_rows]
        self._cache.truncate(mine[:, KEPT].tolist())
        chosen = np.full((len(x), 3), -np.inf)
        with self.engine.inference():
            step = decode_inputs(self.engine, mine[:, TOKENS:], self._cache, mine[:, COUNT].tolist(), last=True)
            scores = self.engine.forward(step.inputs, step.ctx)
        if scores is not None:
            rows = [local_rows[row] for row in step.rows]
            chosen[rows] = self._choose(backend_of(scores).to_host(scores)[:, 0], x[rows])
        if self.num_devices > 1:
            chosen = self.all_reduce(chosen, "max", label="next tokens")
        if (chosen[:, TOKEN] == np.inf).any():
            raise NotFiniteError(f"{self.engine.model.name}: its scores are not finite; check its parameters")
        return chosen

    def _select_local_rows(self, x: np.ndarray) -> list[int]:
        """The rows of this rank's sequences, in the order of the cache, from which all other sequences are removed."""
        sequences = x[:, SEQUENCE].tolist()
        for sequence, line in zip(sequences, x, strict=True):
            text = self._texts.setdefault(sequence, [])
            text[line[BEFORE] :] = line[TOKENS : TOKENS + line[COUNT]].tolist()
        if set(sequences) == self._sequences:
            at = {sequence: row for row, sequence in enumerate(sequences)}
            return [at[sequence] for sequence in self._rows]
        new = [sequence for sequence in sequences if sequence not in self._sequences]
        self._texts = {sequence: self._texts[sequence] for sequence in sequences}
        self._sequences = set(sequences)
        at = {sequence: row for row, sequence in enumerate(sequences)}
        if self._cache.lengths or self._rows:
            self._cache.select([row for row, sequence in enumerate(self._rows) if sequence in at])
        self._rows = [sequence for sequence in self._rows if sequence in at]
        mine = new[self.engine.batch_span(len(new))]
        if mine:
            self._cache.add_empty(len(mine))
            self._rows += mine
        return [at[sequence] for sequence in self._rows]

    def pack(self, engine: LayeredEngine) -> tuple[Any, Parts]:
        """The sequences in progress, which move with the engine to another mesh: see ``MovingState``."""
        facts, parts = pack_cache(engine, self._cache, self._rows)
        return {**facts, "texts": [(sequence, self._texts[sequence]) for sequence in self._rows]}, parts

    def unpack(self, engine: LayeredEngine | None, facts: Sequence[Any], whole: Placement) -> Parts:
        """Continue these sequences on another mesh, sharded anew as a batch is."""
        self._texts = {sequence: text for of_rank in facts for sequence, text in of_rank["texts"]}
        self._sequences, self._rows, self._cache = set(self._texts), [], Cache()
        if engine is None:
            return {}
        self.mesh, self._is_checked = engine.mesh, True  # by the ranks that have begun
        vars(self).pop("_vocabulary", None)  # that of the old mesh
        self._rows = sorted(self._texts)[engine.batch_span(len(self._texts))]
        self._cache, parts = unpack_cache(engine, self._rows, facts, whole)
        return parts

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return vocabulary_of(self.engine)

    def _choose(self, scores: np.ndarray, x: np.ndarray) -> np.ndarray:
        texts = [self._texts[sequence] for sequence in x[:, SEQUENCE].tolist()]
        lines = zip(x, texts, strict=True) if self.options.draws else ()
        keys = [key_of(int(line[KEY]), len(text)) for line, text in lines]
        options = {"seen": texts, "keys": keys, "vocabulary": self._vocabulary, "log_probs": self.log_probs}
        chosen = choose(scores, self.options, **options)
        likely = np.where(np.isnan(chosen.log_probs), -np.inf, chosen.log_probs)
        tokens = np.where(np.isnan(chosen.margins), np.inf, chosen.tokens)
        return np.stack((tokens, likely, np.where(np.isnan(chosen.margins), 0, chosen.margins)), axis=1)


def vocabulary_of(engine: LayeredEngine) -> Vocabulary:
    """This rank's shard of the vocabulary of an engine."""
    shards = Shards(engine.mesh, engine.layout, "sampling")
    return Vocabulary(shards.span("v", engine.model.vocabulary).start, shards.group_of("v"))


# --- The loop: many prompts at once, each until it ends


BATCH = 32  #: sequences at a time
#: Differences of logits within rounding, by bytes of a number.
ROUNDING = {2: 0.05, 4: 1e-4, 8: 1e-12}


@dataclass(frozen=True)
class StoppingCriteria(Configuration):
    """When a text ends."""

    tokens: int = setting(240, least=0)  #: most new tokens
    ends: tuple[int, ...] = ()  #: tokens that end it
    stop: tuple[str, ...] = ()  #: strings that end it, and are left out
    #: Whether a text that fills the model's context continues: from a cache of its last half alone.
    slide: bool = False


@dataclass(frozen=True)
class Completion:
    """The continuation of a prompt."""

    prompt: list[int]
    tokens: list[int]
    finish: str  #: "length": as many tokens as wanted; "end": an end token; "stop": a stop string; "context": no room
    text: str | None = None  #: the tokens' text, without an end token or a stop string; None without a tokenizer
    stop: str | None = None  #: that stop string
    log_probs: list[float] | None = None  #: the tokens' log-probabilities, by the model alone
    near_ties: int = 0  #: tokens whose margin is within rounding: another mesh may choose the second best


@dataclass
class _Sequence:
    """A text in progress, on rank 0."""

    number: int
    prompt: list[int]
    key: int
    stream: TextStream | None
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    kept: int = 0  # positions in the cache
    near_ties: int = 0
    finish: str = ""

    def completion(self, with_log_probs: bool) -> Completion:
        text = self.stream.text if self.stream else None
        stop = self.stream.stopped if self.stream else None
        likely = self.log_probs if with_log_probs else None
        return Completion(self.prompt, self.tokens, self.finish, text, stop, likely, self.near_ties)


OnText = Callable[[int, str], None]


@checked(
    {"batch_size": 1},
    engine="a LayeredEngine, as build_engine or as_distributed make",
    sampling="SamplingOptions(temperature=...)",
    prompts="lists of tokens, [[1, 2], [3]]; a tokenizer encodes texts",
)
def generate(
    engine: LayeredEngine,
    prompts: Sequence[Sequence[int]],
    *,
    sampling: SamplingOptions = SamplingOptions(),  # noqa: B008 (immutable)
    stopping: StoppingCriteria = StoppingCriteria(),  # noqa: B008 (immutable)
    tokenizer: Tokenizer | None = None,
    log_probs: bool = False,
    batch_size: int = BATCH,
    on_text: OnText | None = None,
) -> list[Completion]:
    """The completion of each prompt, the same on every rank. Collective.

    A text is a function of its prompt, of the options and of the seed; it depends neither on the mesh nor on the other
    prompts. A repeated prompt is sampled anew each time. ``on_text(number, text)`` is called on rank 0 with each piece
    of text as soon as later tokens cannot change it. Raises UsageError for a prompt that is empty, has unknown tokens
    or leaves no room in the context, and for a model that takes no tokens.
    """
    model = NextTokens(engine, sampling, log_probs=log_probs)
    _check(engine, prompts, stopping, tokenizer)
    writer = _Writer(engine, prompts, stopping, tokenizer, sampling, on_text, batch_size)
    model.inference_loop(writer.calls(), writer)

    def written() -> list[dict[str, Any]]:
        return [asdict(sequence.completion(log_probs)) for sequence in writer.sequences]

    return [Completion(**fields) for fields in json_from_rank_zero(engine.group(), written)]


def _check(
    engine: LayeredEngine, prompts: Sequence[Sequence[int]], stopping: StoppingCriteria, tokenizer: Tokenizer | None
) -> None:
    model = engine.model
    if stopping.stop and tokenizer is None:
        raise UsageError("generate: stop strings need a tokenizer")
    if "" in stopping.stop:
        raise UsageError("generate: a stop string is empty; give at least one character")
    for number, prompt in enumerate(prompts):
        which = f"prompt {number}" if len(prompts) > 1 else "the prompt"
        if not len(prompt):
            raise UsageError(f"generate: {which} is empty; give at least one character")
        if unknown := [token for token in prompt if not (0 <= token < model.vocabulary and int(token) == token)]:
            raise UsageError(
                f"generate: {which} has token {unknown[0]}, but {model.name} knows 0 to {model.vocabulary - 1}; "
                "was it encoded by the model's own tokenizer?"
            )
        if 0 < model.context < len(prompt):
            raise UsageError(
                f"generate: {which} has {len(prompt)} tokens, more than the context of {model.context} of "
                f"{model.name}; shorten it"
            )


class _Writer:
    """The state of all texts, on rank 0: makes the inputs of ``NextTokens`` and appends its outputs."""

    def __init__(
        self,
        engine: LayeredEngine,
        prompts: Sequence[Sequence[int]],
        stopping: StoppingCriteria,
        tokenizer: Tokenizer | None,
        sampling: SamplingOptions,
        on_text: OnText | None,
        batch_size: int,
    ) -> None:
        self._context, self._stopping, self._on_text = engine.model.context, stopping, on_text
        self._batch_size = batch_size
        self._rounding = ROUNDING[engine.dtype.itemsize] / (sampling.temperature if sampling.draws else 1.0)
        repeats: Counter[tuple[int, ...]] = Counter()
        self.sequences = []
        for number, prompt in enumerate(prompts):
            prompt = [int(token) for token in prompt]
            key = key_of(sampling.seed, "generate", crc32(np.array(prompt, "<i8").tobytes()), repeats[tuple(prompt)])
            repeats[tuple(prompt)] += 1
            stream = TextStream(tokenizer, prompt, stopping.stop) if tokenizer else None
            self.sequences.append(_Sequence(number, prompt, key, stream))
        self._under_way: list[_Sequence] = []

    def calls(self) -> Iterator[np.ndarray]:
        """Inputs of ``NextTokens`` until all texts have ended; ``write`` gets the output of each."""
        waiting = iter(self.sequences)
        while True:
            room = self._batch_size if not self._under_way else 0
            self._under_way += islice(waiting, room)
            if not self._under_way:
                return
            yield call([self._row(sequence) for sequence in self._under_way])
            self._under_way = [sequence for sequence in self._under_way if not sequence.finish]

    def _row(self, sequence: _Sequence) -> tuple[int, int, int, int, Sequence[int]]:
        text = [*sequence.prompt, *sequence.tokens] if not sequence.kept else sequence.tokens[-1:]
        length = len(sequence.prompt) + len(sequence.tokens)
        if self._context and length > self._context and sequence.kept + len(text) > self._context:
            text = [*sequence.prompt, *sequence.tokens][length - max(1, self._context // 2) :]
            sequence.kept = 0
        row = sequence.number, sequence.key, sequence.kept, length - len(text), text
        sequence.kept += len(text)
        return row

    def write(self, chosen: np.ndarray) -> None:
        """Append the chosen tokens, which are the outputs of the last call."""
        for sequence, line in zip(self._under_way, chosen, strict=True):
            token = int(line[TOKEN])
            sequence.tokens.append(token)
            sequence.log_probs.append(float(line[LOG_PROB]))
            sequence.near_ties += bool(line[MARGIN] < self._rounding)
            ended = token in self._stopping.ends
            if sequence.stream and not ended:
                self._emit(sequence, sequence.stream.feed(token))
            length = len(sequence.prompt) + len(sequence.tokens)
            if ended:
                sequence.finish = "end"
            elif sequence.stream and sequence.stream.stopped is not None:
                sequence.finish = "stop"
            elif len(sequence.tokens) >= self._stopping.tokens:
                sequence.finish = "length"
            elif 0 < self._context < length and not self._stopping.slide:
                sequence.finish = "context"
            if sequence.finish and sequence.stream:
                self._emit(sequence, sequence.stream.finish())
                if sequence.stream.stopped is not None:
                    sequence.finish = "stop"

    def _emit(self, sequence: _Sequence, text: str) -> None:
        if text and self._on_text:
            self._on_text(sequence.number, text)
