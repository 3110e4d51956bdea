"""Several documents in one sequence, which see nothing of each other."""

from __future__ import annotations

from dataclasses import dataclass

from spmd_engine.arrays.backend import Array, Backend, backend_of

#: How documents share a row: as one text; seeing nothing of each other; and with learned positions from 0 in each.
DOCUMENTS = ("joined", "apart", "restarted")


@dataclass(frozen=True)
class Documents:
    """Which document each position of this rank's samples belongs to; of whole sequences, however they are cut."""

    numbers: Array  #: [b t], ascending in each sample
    starts: Array | None = None  #: [b t]: where its document begins, if learned positions begin anew there; None: not

    def at(self, positions: Array) -> Array:
        """The documents of these positions[s], as [b s]."""
        return self.numbers[:, positions]

    def learned(self, positions: Array) -> Array:
        """Which of the learned positions these are: [s], or [b s] counted from the beginnings of documents.

        Rotary positions need no such count: only distances within a document matter to them.
        """
        return positions if self.starts is None else positions - self.starts[:, positions]

    def on(self, backend: Backend) -> Documents:
        """The same where a backend computes."""
        starts = None if self.starts is None else backend.asarray(self.starts)
        return Documents(backend.asarray(self.numbers), starts)


def documents_of(numbers: Array, restart: bool) -> Documents:
    """Documents by numbers[b t] that ascend in each sample; with ``restart``, learned positions begin anew in each."""
    if not restart:
        return Documents(numbers)
    xp = backend_of(numbers).xp
    begins = xp.zeros(numbers.shape, xp.int64)
    columns = xp.arange(numbers.shape[1])
    begins[:, 1:] = xp.where(numbers[:, 1:] != numbers[:, :-1], columns[1:], 0)
    return Documents(numbers, xp.maximum.accumulate(begins, axis=1))
