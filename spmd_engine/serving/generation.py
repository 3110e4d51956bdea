"""Texts that go on: many prompts at once, each until it ends."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from zlib import crc32

import numpy as np

from spmd_engine.arrays.random import key_of
from spmd_engine.comm.agreement.rank_zero import text_from_rank_zero
from spmd_engine.engine.layered import LayeredEngine
from spmd_engine.errors import UsageError
from spmd_engine.serving.next_tokens import LOG_PROB, MARGIN, TOKEN, NextTokens, call
from spmd_engine.serving.options import SamplingOptions
from spmd_engine.tokens import TextStream, Tokenizer

BATCH = 32  #: sequences at a time
#: Scores nearer than this may change places by rounding, by the number of bytes of a score.
ROUNDING = {4: 1e-4, 8: 1e-12}


@dataclass(frozen=True)
class StoppingCriteria:
    """When a text ends."""

    tokens: int = 240  #: at most so many new ones
    ends: tuple[int, ...] = ()  #: tokens that end it
    stop: tuple[str, ...] = ()  #: texts that end it, and are left out
    #: Whether a text that fills the model's context goes on: its last half is then read anew, the rest forgotten.
    slide: bool = False


@dataclass(frozen=True)
class Completion:
    """What followed a prompt."""

    prompt: list[int]
    tokens: list[int]
    finish: str  #: "length": as many tokens as wanted; "end": an end's token; "stop": a stop string; "context": no room
    text: str | None = None  #: of the tokens, without an end's token or a stop string; None without a tokenizer
    stop: str | None = None  #: that stop string
    log_probs: list[float] | None = None  #: of the tokens, by the model alone
    near_ties: int = 0  #: tokens whose score was so near the second best's that rounding may decide between them


@dataclass
class _Sequence:
    """A text under way, on rank 0."""

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
    """What follows each prompt, the same on every rank. Collective.

    A text is a function of its prompt, of the options and of the seed: neither the mesh nor the other prompts change
    it. Where a prompt is given several times, each of them is drawn anew. ``on_text(number, text)`` is told, on rank
    0, what is certain of a text as soon as it is. Raises UsageError for a prompt that is empty or has tokens that the
    model does not know, for one that leaves no room in the context, and for a model that takes no tokens.
    """
    _check(engine, prompts, stopping, tokenizer)
    model = NextTokens(engine, sampling, log_probs=log_probs)
    writing = _Writing(engine, prompts, stopping, tokenizer, sampling, on_text, batch_size)
    model.inference_loop(writing.calls(), writing)
    done = text_from_rank_zero(engine.group(), lambda: json.dumps(_as_json(writing.sequences, log_probs)))
    return [Completion(**each) for each in json.loads(done)]


def _as_json(sequences: Sequence[_Sequence], log_probs: bool) -> list[dict]:
    return [asdict(sequence.completion(log_probs)) for sequence in sequences]


def _check(
    engine: LayeredEngine, prompts: Sequence[Sequence[int]], stopping: StoppingCriteria, tokenizer: Tokenizer | None
) -> None:
    model = engine.model
    if not model.vocabulary:
        raise UsageError(f"generate: {model.name} is no model of text, it takes no tokens")
    if stopping.stop and tokenizer is None:
        raise UsageError("generate: stop strings need a tokenizer")
    for number, prompt in enumerate(prompts):
        which = f"prompt {number}" if len(prompts) > 1 else "the prompt"
        if not len(prompt):
            raise UsageError(f"generate: {which} is empty; give at least one character")
        if unknown := [token for token in prompt if not 0 <= token < model.vocabulary]:
            raise UsageError(
                f"generate: {which} has token {unknown[0]}, but {model.name} knows 0 to {model.vocabulary - 1}; "
                "was it encoded by the model's own tokenizer?"
            )
        if 0 < model.context < len(prompt):
            raise UsageError(
                f"generate: {which} has {len(prompt)} tokens, more than the context of {model.context} of "
                f"{model.name}; shorten it"
            )


class _Writing:
    """Rank 0's part: which tokens are read next, and what comes of those that were chosen."""

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
        before: Counter[tuple[int, ...]] = Counter()
        self.sequences = []
        for number, prompt in enumerate(prompts):
            prompt = [int(token) for token in prompt]
            key = key_of(sampling.seed, "generate", crc32(np.array(prompt, "<i8").tobytes()), before[tuple(prompt)])
            before[tuple(prompt)] += 1
            stream = TextStream(tokenizer, prompt, stopping.stop) if tokenizer else None
            self.sequences.append(_Sequence(number, prompt, key, stream))
        self._under_way: list[_Sequence] = []

    def calls(self) -> Iterator[np.ndarray]:
        """Inputs of ``NextTokens`` until all texts have ended; ``write`` is told what came of each."""
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

    def write(self, found: np.ndarray) -> None:
        """The tokens that were chosen: the outputs of the last call."""
        for sequence, line in zip(self._under_way, found, strict=True):
            token = int(line[TOKEN])
            sequence.tokens.append(token)
            sequence.log_probs.append(float(line[LOG_PROB]))
            sequence.near_ties += bool(line[MARGIN] < self._rounding)
            ended = token in self._stopping.ends
            if sequence.stream and not ended:
                self._tell(sequence, sequence.stream.feed(token))
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
                self._tell(sequence, sequence.stream.finish())
                if sequence.stream.stopped is not None:
                    sequence.finish = "stop"

    def _tell(self, sequence: _Sequence, text: str) -> None:
        if text and self._on_text:
            self._on_text(sequence.number, text)
