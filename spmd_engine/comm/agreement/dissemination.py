"""How ranks between which there is no shared memory agree, in log2(n) rounds of one message each.

In round i each rank sends what it has to the rank 2^i after it, and takes in what the rank 2^i before it has: after the
last round everyone has everyone's. (Hensgen, Finkel, Manber: Two algorithms for barrier synchronization, 1988; Bruck et
al.: Efficient algorithms for all-to-all communications, 1997.) What they have is a few words, of which each keeps the
largest, and the rows of data that came, if these are small.

It is made of messages, not of the library's Iallreduce: a request of that cannot be given up where a rank never comes,
and would not tell the others why.
"""

from __future__ import annotations

import numpy as np

from spmd_engine.comm.agreement.signature import ENDED, KNOWN
from spmd_engine.comm.condition import Requests
from spmd_engine.comm.pending import RanksEnded, Steps
from spmd_engine.comm.transports.messages import Ranks

_LENGTH = 8  # bytes that say how long a row of ``copies`` is
_LEAST = 1 << 13  # bytes of rows for which there always is room: the description of a broadcast's array and more


def disseminate(
    ranks: Ranks, words: np.ndarray, row: bytes, tag: int, *, copies: bool = False, ended: RanksEnded | None = None
) -> Steps:
    """All ranks' largest ``words`` (see ``Signature``) and everyone's ``row``, by rank: None unless all are as long.

    With ``copies`` one rank at most has a row, and its is everyone's. ``ended``: this rank cannot take part, since
    those have ended for whom it waited; it says so to those that wait for it: the same RanksEnded is raised on all.
    """
    words, rows, n = words.copy(), [row], ranks.size
    room = words.nbytes + max(ranks.tuning.with_agreement, _LEAST, 0 if copies else n * len(row))
    for distance in (1 << i for i in range((n - 1).bit_length())):
        if ended is not None:
            words[ENDED] = 1 + max(ended.ranks)
        count = min(distance, n - distance)
        rest = len(row).to_bytes(_LENGTH, "little") + row if copies else b"".join(rows[:count])
        message, comes = np.frombuffer(words.tobytes() + rest, np.uint8), np.empty(room, np.uint8)
        to, source = (ranks.rank + distance) % n, (ranks.rank - distance) % n
        requests = Requests(ranks)
        if ended is None:
            requests.add(source, ranks.start_receive(comes, source, tag))
        requests.add(to, ranks.start_send(message, to, tag))
        try:
            yield requests
        except RanksEnded as error:
            ended = error
        if ended is not None:
            continue
        theirs = comes[: words.nbytes].view(np.int64)
        if copies:
            length = int.from_bytes(comes[words.nbytes : words.nbytes + _LENGTH].tobytes(), "little")
            row = comes[words.nbytes + _LENGTH :][:length].tobytes() if not row and length < room else row
        elif row and (words[:KNOWN] == theirs[:KNOWN]).all():
            data, size = comes[words.nbytes :].tobytes(), len(row)
            rows += [data[i * size : (i + 1) * size] for i in range(count)]
        np.maximum(words, theirs, out=words)
    if ended is not None:
        raise ended
    if words[ENDED]:
        raise RanksEnded([int(words[ENDED]) - 1])
    if copies:
        return words, [row]
    return words, [rows[(ranks.rank - r) % n] for r in range(n)] if row and len(rows) == n else None
