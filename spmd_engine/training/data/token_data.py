"""Learning from a file of tokens: every row once in an epoch, in an order that hangs on the seed alone."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from spmd_engine.comm.group import Group
from spmd_engine.errors import UsageError
from spmd_engine.formats.token_file import TokenFile
from spmd_engine.layers.layer import Documents, documents_of
from spmd_engine.tokens.hugging_face import TOKENIZER
from spmd_engine.training.data.array_data import SampledData, in_epochs, spread

HELD_OUT = 20  #: one row in so many is to validate on, if the file has no documents for that


@dataclass(frozen=True)
class PreparedData(SampledData):
    """Rows of ``context`` positions from a file of tokens, each once in an epoch.

    Instructions are always kept apart, and only what is to be
    learnt of them counts in the loss, whose mean is over what counts in the whole batch.
    """

    file: TokenFile
    train: Packed
    held_out: Packed
    held_out_rows: range
    train_rows: range
    documents: str
    seed: int = 0

    @classmethod
    def of(cls, file: TokenFile, context: int, documents: str | None = None, seed: int = 0) -> PreparedData:
        """Raises UsageError for a file with less than a row to learn from, or none to validate on."""
        instructions = file.learnt is not None
        documents = documents or ("apart" if instructions else "joined")
        if instructions and documents == "joined":
            raise UsageError(f"{file.path} holds instructions: keep them apart (--documents apart or restarted)")
        facts = file.facts
        if documents == "joined":
            train = windows(0, facts.train_tokens, context)
            held_out = windows(facts.train_tokens, facts.tokens, context)
        else:
            ends = np.asarray(file.ends)
            begins = np.concatenate(([0], ends[:-1]))
            parts = slice(0, facts.train_documents), slice(facts.train_documents, None)
            train, held_out = (
                whole_documents(begins[part], ends[part], context, truncate=instructions, learnt=file.learnt)
                for part in parts
            )
        rows, others = range(len(train)), range(len(held_out))
        if not others:  # too few documents, or too short ones: the end of what there is serves as well
            end = len(train) - max(1, len(train) // HELD_OUT)
            held_out, rows, others = train, range(end), range(end, len(train))
        if not rows:
            which = " with something to learn in them" if instructions else ""
            remedy = "longer" if instructions else "shorter"
            raise UsageError(
                f"--data {file.path}: {facts.tokens:,} tokens make {len(train)} row(s) of {context}{which}: one at "
                "least is needed to learn from, and one to validate on. Give more text, or a model with a "
                f"{remedy} context"
            )
        return cls(file, train, held_out, others, rows, documents, seed)

    def __str__(self) -> str:
        facts = self.file.facts
        what = f"{facts.train_tokens:,} tokens of {facts.train_documents:,} documents"
        own = "" if self.held_out is not self.train else f", {len(self.held_out_rows):,} more of them to validate on"
        return f"{what} in {len(self.train_rows):,} rows{own} ({self.file.path})"

    @property
    def files(self) -> int:
        return self.file.facts.files

    @property
    def sha256(self) -> str:
        return self.file.facts.sha256

    @property
    def terms(self) -> int:
        return self.train.length

    def held_out_numbers(self, samples: int | None) -> np.ndarray:
        return self.held_out_rows.start + spread(len(self.held_out_rows), samples)

    def _rows(self, numbers: np.ndarray, held_out: bool) -> tuple[np.ndarray, np.ndarray]:
        if held_out:
            return self.held_out.rows(numbers)
        return self.train.rows(in_epochs(self.seed, len(self.train_rows), numbers))

    def documents_of(self, numbers: np.ndarray, held_out: bool) -> Documents | None:
        if self.documents == "joined":
            return None
        return documents_of(self._rows(numbers, held_out)[1], self.documents == "restarted")

    def examples(self, numbers: np.ndarray, held_out: bool = False) -> list[np.ndarray]:
        """inputs[b s], targets[b s] and, if not everything counts, mask[b s]."""
        places, _ = self._rows(numbers, held_out)
        there = places >= 0
        inputs, targets = (np.where(there, self.file.tokens[places + more], 0).astype(np.int64) for more in (0, 1))
        if self.documents == "joined":
            return [inputs, targets]
        counts = there if self.file.learnt is None else there & (self.file.learnt[places + 1] > 0)
        return [inputs, targets, counts.astype(np.float32)]

    def count(self, numbers: np.ndarray, held_out: bool) -> float:
        if self.documents == "joined":
            return super().count(numbers, held_out)
        rows = np.split(numbers, len(numbers))  # one at a time: each rank counts those of the whole batch
        return float(sum(self.examples(row, held_out)[2].sum() for row in rows))


def check_file(group: Group, file: TokenFile) -> None:
    """Raise UsageError, on all ranks, if a file's documents are not those that it was written with. Collective; ranks
    share the reading."""
    bounds = np.searchsorted(file.ends, file.facts.tokens * np.arange(1, group.size) // group.size)
    bounds = [0, *bounds.tolist(), file.facts.documents]
    mine = file.digests(bounds[group.rank], bounds[group.rank + 1])
    found = group.all_gather(np.frombuffer(mine, np.uint8), label="corpus")
    check_digests(file, found.tobytes())


def check_digests(file: TokenFile, digests: bytes) -> None:
    """Raise UsageError if these are not the digests of the file's documents, or its tokenizer is not what it was."""
    facts, texts = file.facts, file.tokenizer
    # A file without texts is of bytes, or of a caller's own tokenizer, of which nothing is kept to be compared.
    tokenizer = facts.tokenizer_sha256
    if texts:
        tokenizer = sha256(texts.get(TOKENIZER, "").encode(errors="replace")).hexdigest()
    for what, found, written in (
        ("documents are", sha256(digests).hexdigest(), facts.sha256),
        ("tokenizer is", tokenizer, facts.tokenizer_sha256),
    ):
        if found != written:
            why = f"its {what} not what was written (SHA-256 differs)"
            raise UsageError(f"{file.path} is damaged: {why}; prepare it again")


# --- Which tokens of a corpus make the rows of a batch: windows of a stream, or whole documents side by side


@dataclass(frozen=True)
class Packed:
    """Rows of a number of positions, each made of pieces of the corpus.

    A piece of n + 1 tokens fills n positions: each predicts the next, and none predicts what comes after the piece.
    """

    begins: np.ndarray  #: of each piece, in tokens of the corpus
    counts: np.ndarray  #: positions that it fills
    first: np.ndarray  #: [rows + 1]: the first piece of each row
    length: int  #: of a row

    def __len__(self) -> int:
        return len(self.first) - 1

    def rows(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """places[b length] of the inputs in the corpus, -1 where there is none, and the piece[b length] of each; what
        fills a row up counts as its last."""
        places = np.full((len(numbers), self.length), -1, np.int64)
        pieces = np.zeros((len(numbers), self.length), np.int64)
        for line, numbering, row in zip(places, pieces, numbers.tolist(), strict=True):
            own = slice(self.first[row], self.first[row + 1])
            counts = self.counts[own]
            filled = int(counts.sum())
            offsets = np.arange(filled) - np.repeat(np.cumsum(counts) - counts, counts)
            line[:filled] = np.repeat(self.begins[own], counts) + offsets
            numbering[:filled] = np.repeat(np.arange(len(counts)), counts)
            numbering[filled:] = len(counts)
        return places, pieces


def windows(begin: int, end: int, length: int) -> Packed:
    """The tokens from ``begin`` to ``end`` as rows one after the other, wherever documents end; the rest is left."""
    count = max(0, (end - begin - 1) // length)
    return Packed(begin + length * np.arange(count), np.full(count, length), np.arange(count + 1), length)


def whole_documents(
    begins: np.ndarray, ends: np.ndarray, length: int, *, truncate: bool, learnt: np.ndarray | None = None
) -> Packed:
    """Documents side by side, in order, as many as fit in a row.

    One that is longer than a row begins a new one, and goes on in the next, or (``truncate``) ends there. One of
    a single token predicts nothing, and is left out; so is, with ``learnt``, which says by token whether it is a
    target that counts, one without any that does.
    """
    counts = ends - begins - 1
    if truncate:
        counts = np.minimum(counts, length)
    kept = counts > 0
    begins, counts = begins[kept], counts[kept]
    if learnt is not None:
        kept = _any_between(learnt, begins + 1, begins + counts + 1)
        begins, counts = begins[kept], counts[kept]
    parts = -(-counts // length)
    number = np.repeat(np.arange(len(counts)), parts)  # the document of each piece
    offset = length * (np.arange(len(number)) - np.repeat(np.cumsum(parts) - parts, parts))
    sizes = np.minimum(counts[number] - offset, length)
    first, filled = [0], 0
    for piece, size in enumerate(sizes.tolist()):
        if filled + size > length:
            first.append(piece)
            filled = 0
        filled += size
    if len(sizes):
        first.append(len(sizes))
    return Packed(begins[number] + offset, sizes, np.array(first), length)


def _any_between(flags: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Whether any of ``flags`` is set from each beginning up to its end; these ascend, and no two overlap."""
    places = np.stack([begins, ends], axis=1).reshape(-1)
    places = places[: len(places) - (len(places) > 0 and places[-1] == len(flags))]
    return np.maximum.reduceat(flags, places)[::2] > 0 if len(places) else np.zeros(0, bool)
