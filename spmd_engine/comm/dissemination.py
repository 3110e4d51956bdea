"""How ranks between which there is no shared memory agree, in log2(n) rounds of one message each.

In round i each rank sends what it has to the rank 2^i after it, and takes in what the rank 2^i before it has: after the
last round everyone has everyone's. (Hensgen, Finkel, Manber: Two algorithms for barrier synchronization, 1988; Bruck et
al.: Efficient algorithms for all-to-all communications, 1997.) What they have is a few words, of which each keeps the
largest, and the rows of data that came, if these are small.

It is made of messages, not of the library's Iallreduce: a request of that cannot be given up where a rank never comes,
and would not tell the others why.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from spmd_engine.comm.condition import Requests
from spmd_engine.comm.pending import RanksEnded, Steps
from spmd_engine.comm.signature import Signature
from spmd_engine.comm.transports.messages import Ranks

if TYPE_CHECKING:
    from spmd_engine.comm.rendezvous import Rendezvous

_SAME, _ALIKE, _SIZES, _HOST, _MOST, _ENDED = 0, 2, 4, 6, 7, 8  # where in the words; three with their negatives
_LENGTH = 8  # bytes that say how long a row of ``copies`` is
_LEAST = 1 << 13  # bytes of rows for which there always is room: the description of a broadcast's array and more


class Agreed(NamedTuple):
    """What all ranks know of a call once they have agreed on it."""

    same: bool  #: whether all called the same; if not, nothing else here can be relied on
    alike: bool  #: whether what may differ (lengths along the axis, splits) is the same on all
    sizes_known: bool  #: whether all were told the same sizes by their callers
    host: bool  #: whether all have their arrays in the host's memory
    most: int  #: bytes of the largest array of any rank
    rows: list | None  #: everyone's row, in rank order, if they were small and all are alike
    root: Signature | None = None  #: of a broadcast
    met: Rendezvous | None = None  #: what this rank's node knows besides, if its ranks met


def words_of(terms: Sequence[int]) -> np.ndarray:
    """What a rank brings (see ``Signature.terms``): of these words, the largest of all ranks' remain."""
    agreed, variable, known, host, size = terms
    return np.array([agreed, -agreed, variable, -variable, known, -known, -host, size, 0], np.int64)


def disseminate(
    ranks: Ranks, words: np.ndarray, row: bytes, tag: int, *, copies: bool = False, ended: RanksEnded | None = None
) -> Steps:
    """All ranks' largest ``words`` come to be everyone's; returns an Agreed, with everyone's ``row``.

    Rows are equally long where all call the same. With ``copies`` one rank at most has a row, and its is everyone's.
    ``ended``: this rank cannot take part, since those have ended for whom it waited; it says so to those that wait for
    it, so that the same RanksEnded is raised on all.
    """
    rows, n = [row], ranks.size
    room = words.nbytes + max(ranks.tuning.with_agreement, _LEAST, 0 if copies else n * len(row))
    distances = [1 << i for i in range((n - 1).bit_length())]
    for distance in distances:
        if ended is not None:
            words[_ENDED] = 1 + max(ended.ranks)
        count = min(distance, n - distance)
        rest = len(row).to_bytes(_LENGTH, "little") + row if copies else b"".join(rows[:count])
        message, comes = np.frombuffer(words.tobytes() + rest, np.uint8), np.empty(room, np.uint8)
        to, source = (ranks.rank + distance) % n, (ranks.rank - distance) % n
        requests = Requests()
        if ended is None:
            requests.add(ranks.outer(source), ranks.start_receive(comes, source, tag))
        requests.add(ranks.outer(to), ranks.start_send(message, to, tag))
        try:
            yield requests
        except RanksEnded as error:
            ended = error
            continue
        if ended is not None:
            continue
        theirs = comes[: words.nbytes].view(np.int64)
        alike = _equal(words, _SAME, theirs) and _equal(words, _ALIKE, theirs)
        np.maximum(words, theirs, out=words)
        if copies:
            length = int.from_bytes(comes[words.nbytes : words.nbytes + _LENGTH].tobytes(), "little")
            row = comes[words.nbytes + _LENGTH :][:length].tobytes() if not row and length < room else row
        elif alike and row:
            data, size = comes[words.nbytes :].tobytes(), len(row)
            rows += [data[i * size : (i + 1) * size] for i in range(count)]
    if ended is not None:
        raise ended
    if words[_ENDED]:
        raise RanksEnded([int(words[_ENDED]) - 1])
    return _outcome(words, [row] if copies else _in_rank_order(rows, ranks.rank, n) if row else None)


def _equal(words: np.ndarray, which: int, theirs: np.ndarray) -> bool:
    """Whether all those agree so far whose words were taken in here and there."""
    return words[which] == theirs[which] == -words[which + 1] == -theirs[which + 1]


def _outcome(words: np.ndarray, rows: list[bytes] | None) -> Agreed:
    same, alike, known = (bool(words[i] == -words[i + 1]) for i in (_SAME, _ALIKE, _SIZES))
    known = known and words[_SIZES] >= 0
    return Agreed(same, same and alike, same and known, bool(words[_HOST]), int(words[_MOST]), rows)


def _in_rank_order(rows: Sequence[bytes], rank: int, n: int) -> list[bytes] | None:
    """Rows of this rank, the one before it, and so on, by rank; None if not all came."""
    return [rows[(rank - r) % n] for r in range(n)] if len(rows) == n else None
