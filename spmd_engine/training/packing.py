"""Which tokens of a corpus make the rows of a batch: windows of a stream, or whole documents side by side."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Packed:
    """Rows of a number of positions, each made of pieces of the corpus.

    A piece of n + 1 tokens fills n positions: each foretells the next, and none what comes after the piece.
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

    One that is longer than a row begins a new one, and goes on in the next, or (``truncate``) is cut off there. One of
    a single token foretells nothing, and is left out; so is, with ``learnt``, which says by token whether it is a
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
