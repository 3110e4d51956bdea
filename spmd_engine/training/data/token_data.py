"""Training data from a file of tokens: every row once in an epoch, in an order that depends on the seed alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256

import numpy as np

from spmd_engine.comm import Group
from spmd_engine.errors import UsageError
from spmd_engine.formats.token_file import TokenFile
from spmd_engine.layers.layer import Documents, documents_of
from spmd_engine.tokens.hugging_face import TOKENIZER
from spmd_engine.training.data.array_data import SampledData, in_epochs, spread

HELD_OUT = 20  #: one row of this many is for validation, if the file has no documents for that


@dataclass(frozen=True)
class PreparedData(SampledData):
    """Rows of ``context`` positions from a file of tokens, each once in an epoch.

    Instructions are always apart from each other, and only their targets count in the loss, which is the mean over the
    targets of the whole batch.
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
        """The data of a file. Raises UsageError if it has less than a row for training, or none for validation."""
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
        if not others:  # too few documents, or too short ones: validate on the last rows
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
        size = f"{facts.train_tokens:,} tokens of {facts.train_documents:,} documents"
        rest = "" if self.held_out is not self.train else f", {len(self.held_out_rows):,} more of them to validate on"
        dropped = self.train.left_out + (self.held_out.left_out if self.held_out is not self.train else 0)
        length = self.train.length
        lost = f"; {dropped:,} documents left out: nothing to learn in their first {length:,} tokens" if dropped else ""
        return f"{size} in {len(self.train_rows):,} rows{rest} ({self.file.path}){lost}"

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

    def _row_numbers(self, numbers: np.ndarray, held_out: bool) -> np.ndarray:
        return numbers if held_out else in_epochs(self.seed, len(self.train_rows), numbers)

    def _rows(self, numbers: np.ndarray, held_out: bool) -> tuple[np.ndarray, np.ndarray]:
        return (self.held_out if held_out else self.train).rows(self._row_numbers(numbers, held_out))

    def documents_of(self, numbers: np.ndarray, held_out: bool) -> Documents | None:
        if self.documents == "joined":
            return None
        return documents_of(self._rows(numbers, held_out)[1], self.documents == "restarted")

    def examples(self, numbers: np.ndarray, held_out: bool = False) -> list[np.ndarray]:
        """inputs[b s], targets[b s] and, if not everything counts, mask[b s]."""
        places, _ = self._rows(numbers, held_out)
        filled = places >= 0
        inputs, targets = (np.where(filled, self.file.tokens[places + more], 0).astype(np.int64) for more in (0, 1))
        if self.documents == "joined":
            return [inputs, targets]
        counts = filled if self.file.learnt is None else filled & (self.file.learnt[places + 1] > 0)
        return [inputs, targets, counts.astype(np.float32)]

    def count(self, numbers: np.ndarray, held_out: bool) -> float:
        if self.documents == "joined":
            return super().count(numbers, held_out)
        packed = self.held_out if held_out else self.train  # each rank counts the whole batch, without its tokens
        return float(packed.targets_of_rows[self._row_numbers(numbers, held_out)].sum())


def check_file(group: Group, file: TokenFile) -> None:
    """Raise UsageError on all ranks if a file's documents have changed since it was written. Collective; ranks share
    the reading."""
    bounds = np.searchsorted(file.ends, file.facts.tokens * np.arange(1, group.size) // group.size)
    bounds = [0, *bounds.tolist(), file.facts.documents]
    mine = file.digests(bounds[group.rank], bounds[group.rank + 1])
    digests = group.all_gather(np.frombuffer(mine, np.uint8), label="corpus")
    check_digests(file, digests.tobytes())


def check_digests(file: TokenFile, digests: bytes) -> None:
    """Raise UsageError if these are not the digests of the file's documents, or if its tokenizer has changed."""
    facts, texts = file.facts, file.tokenizer
    # A file without texts is of bytes, or of a caller's tokenizer, which is not saved, and cannot be compared.
    tokenizer = facts.tokenizer_sha256
    if texts:
        tokenizer = sha256(texts.get(TOKENIZER, "").encode(errors="replace")).hexdigest()
    for subject, actual, written in (
        ("documents are", sha256(digests).hexdigest(), facts.sha256),
        ("tokenizer is", tokenizer, facts.tokenizer_sha256),
    ):
        if actual != written:
            why = f"its {subject} not what was written (SHA-256 differs)"
            raise UsageError(f"{file.path} is damaged: {why}; prepare it again")


# --- The rows of a batch: windows of a stream of tokens, or whole documents side by side


@dataclass(frozen=True)
class Packed:
    """Rows of ``length`` positions, each made of pieces of the corpus.

    A piece of n + 1 tokens fills n positions: each predicts the next, and none predicts what comes after the piece.
    """

    begins: np.ndarray  #: where each piece begins, in tokens of the corpus
    counts: np.ndarray  #: positions that it fills
    first: np.ndarray  #: [rows + 1]: the first piece of each row
    length: int  #: positions of a row
    targets: np.ndarray  #: positions of each piece that count in the loss
    left_out: int = 0  #: documents that teach nothing

    def __len__(self) -> int:
        return len(self.first) - 1

    @cached_property
    def targets_of_rows(self) -> np.ndarray:
        """The positions of each row that count in the loss."""
        return np.diff(np.concatenate(([0], np.cumsum(self.targets)))[self.first])

    def rows(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """places[b length] of the inputs in the corpus, -1 for padding, and the piece[b length] of each; the padding of
        a row is its last piece."""
        places = np.full((len(numbers), self.length), -1, np.int64)
        pieces = np.zeros((len(numbers), self.length), np.int64)
        for line, numbering, row in zip(places, pieces, numbers.tolist(), strict=True):
            row_pieces = slice(self.first[row], self.first[row + 1])
            counts = self.counts[row_pieces]
            filled = int(counts.sum())
            offsets = np.arange(filled) - np.repeat(np.cumsum(counts) - counts, counts)
            line[:filled] = np.repeat(self.begins[row_pieces], counts) + offsets
            numbering[:filled] = np.repeat(np.arange(len(counts)), counts)
            numbering[filled:] = len(counts)
        return places, pieces


def windows(begin: int, end: int, length: int) -> Packed:
    """The tokens from ``begin`` to ``end`` as consecutive rows, across documents; an incomplete row is left out."""
    count = max(0, (end - begin - 1) // length)
    sizes = np.full(count, length)
    return Packed(begin + length * np.arange(count), sizes, np.arange(count + 1), length, sizes)


def whole_documents(
    begins: np.ndarray, ends: np.ndarray, length: int, *, truncate: bool, learnt: np.ndarray | None = None
) -> Packed:
    """Documents side by side, in order, as many as fit in a row.

    A document that is longer than a row begins a new row, and continues in the next, or (``truncate``) ends there. A
    document of a single token predicts nothing, and is left out; so is, with ``learnt``, the flags of tokens that count
    as targets, a document without such a token.
    """
    counts = ends - begins - 1
    if truncate:
        counts = np.minimum(counts, length)
    usable = counts > 0
    begins, counts, targets = begins[usable], counts[usable], None
    if learnt is not None:
        targets = _count_between(learnt, begins + 1, begins + counts + 1)
        begins, counts, targets = begins[targets > 0], counts[targets > 0], targets[targets > 0]
    left_out = len(ends) - len(counts)
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
    targets = sizes if targets is None else targets[number]
    return Packed(begins[number] + offset, sizes, np.array(first), length, targets, left_out)


def _count_between(flags: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """How many of ``flags``, each 0 or 1, are set from each begin up to its end; these ranges ascend and do not
    overlap."""
    places = np.stack([begins, ends], axis=1).reshape(-1)
    places = places[: len(places) - (len(places) > 0 and places[-1] == len(flags))]
    return np.add.reduceat(flags, places, dtype=np.int64)[::2] if len(places) else np.zeros(0, np.int64)
