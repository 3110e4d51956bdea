"""Agreement of ranks on several nodes, in a tree of messages, which also carry small arrays.

Each rank sends its words, and its row of data, to its parent; each parent the maximum of its subtree's words, and their
rows, combined. Rank 0 then has all of them, and makes the answer, which goes down the same edges with the maximum of
all words. That all ranks learn of all ranks takes 2 (n - 1) messages at least, and these are as many. Parents have up
to RADIX - 1 children in each level, so that the tree is half as deep as log2(n): up and down together take log2(n)
steps. Two ranks send their rows to each other, at once.

It uses messages instead of the library's Iallreduce: such a request cannot be abandoned when a rank never arrives, and
would not give the others the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from spmd_engine.comm.agreement.signature import BYTES, ENDED, common
from spmd_engine.comm.blocks import spans
from spmd_engine.comm.communicators.communicator import Communicator, MessagePart, Ranks
from spmd_engine.comm.exchange import Requests
from spmd_engine.comm.pending import TIMEOUT, Operation, RanksEnded, Steps
from spmd_engine.comm.rounds import Payload, carry, gather_rounds

RADIX = 4
_TEXTS = 32763  # the tag of ``gather_texts``; no other messages of the world have it
_SHORT = 128  # bytes of a text that travels with the lengths
_LEAST = 1 << 13  # least bytes of room for rows: more than the description of a broadcast's array


class Inline(NamedTuple):
    """How rows, which are the bytes of small arrays, are combined, and what each rank gets of them."""

    dtype: np.dtype = np.dtype(np.uint8)  #: in which arrays travel
    combine: Callable[[list[np.ndarray]], np.ndarray] = np.concatenate  #: makes one row of those of consecutive ranks
    size: int = 0  #: bytes of the rows of all ranks, combined, that have an ``answer``
    answer: Callable[[np.ndarray], np.ndarray] = lambda rows: rows
    places: Sequence[slice] | None = None  #: by rank, what each of them gets of the answer; None: all of it
    #: whether a parent sends no rank the rows of that rank's own subtree, which are joined, and equally long
    keeps: bool = False
    part: Callable[[Any, int], Any] = lambda x, rank: x  #: what of an array is sent; of two ranks, to this one

    def row(self, arrays: Sequence[Any], rank: int) -> np.ndarray:
        """What a rank gets of these ``arrays``."""
        parts = [np.ascontiguousarray(self.part(x, rank), self.dtype) for x in arrays]
        return self.combine([part.reshape(-1).view(np.uint8) for part in parts])


def edges(rank: int, ranks: int) -> tuple[int, Sequence[tuple[int, int]]]:
    """The parent of a rank, and its children in ascending order, each with the end of its subtree, which begins with
    it. (Rank 0 is its own parent.)"""
    children, step = [], 1
    while step < ranks and rank % (step * RADIX) == 0:
        for child in range(rank + step, min(rank + step * RADIX, ranks), step):
            children.append((child, min(child + step, ranks)))
        step *= RADIX
    return rank - rank % (step * RADIX), children


def agree(
    ranks: Ranks,
    words: np.ndarray,
    row: np.ndarray,
    tag: int,
    inline: Inline | None = None,
    own: np.ndarray | None = None,
    most: int = 0,
    joined: int = 0,
    ended: RanksEnded | None = None,
) -> Steps:
    """The maximum of all ranks' ``words`` (see ``Signature``), and what this rank gets of the rows of all ranks.

    ``row``: bytes, of which other ranks may have up to ``most``, and all together, where rows are joined, up to
    ``joined``; a single rank may have a row of a few KiB more. Rows are dropped if the calls differ. ``own``: of two
    ranks, what this one combines with the other's row, if not ``row``. ``ended``: ranks have ended that this rank
    waited for, so it cannot make its call; all raise RanksEnded.
    """
    words, most, joined = words.copy(), max(most, row.size), max(joined, ranks.size * row.size)
    inline = inline or Inline()  # joins rows
    places, keeps = inline.places, inline.keeps
    first, length, pair = ranks.rank, row.size, ranks.size == 2
    parent, children = edges(first, ranks.size) if not pair else (first, [(1 - first, 2)])

    def note(error: RanksEnded) -> None:
        words[ENDED] = max(words[ENDED], 1 + max(error.ranks))

    def send(requests: Requests, to: int, data: np.ndarray) -> Requests:
        words[BYTES] = data.size
        return requests.add(to, ranks.start_send(np.concatenate([words.view(np.uint8), data]), to, tag))

    def receive(source: int, size: int) -> tuple[np.ndarray, Requests]:
        message = np.empty(words.nbytes + _LEAST + max(most, size), np.uint8)
        return message, Requests(ranks).add(source, ranks.start_receive(message, source, tag))

    def taken(message: np.ndarray) -> np.ndarray:
        theirs = message[: words.nbytes].view(np.int64)
        np.maximum(words, theirs, out=words)
        return message[words.nbytes :][: theirs[BYTES]]

    if ended is not None:
        note(ended)
    words[BYTES], rows = 0, [row if own is None else own]
    arrivals = [receive(child, (end - child) * joined // ranks.size) for child, end in children]
    if pair:
        send(arrivals[0][1], 1 - ranks.rank, row)
    for message, arrival in arrivals:
        try:
            yield arrival
            rows.append(taken(message))
        except RanksEnded as error:
            note(error)
    same, alike, *_ = common(words)
    rows = rows[::-1] if pair and first else rows
    row = inline.combine(rows) if same and alike and not words[ENDED] else row[:0]
    if parent == ranks.rank:
        row, first = inline.answer(row) if row.size == inline.size else row, 0
    else:
        message, arrival = receive(parent, joined)
        try:
            yield send(arrival, parent, row)
            rest = taken(message)
            place = first * length
            row = np.concatenate([rest[:place], row, rest[place:]]) if keeps else rest
        except RanksEnded as error:
            note(error)
    base = places[first].start if places is not None else 0

    def part(rank: int, end: int) -> np.ndarray:
        if keeps:
            return np.concatenate([row[: rank * length], row[end * length :]])
        return row if places is None else row[places[rank].start - base : places[end - 1].stop - base]

    down = Requests(ranks)
    for child, end in children if not pair else ():
        send(down, child, part(child, end))
    try:
        yield down
    except RanksEnded as error:
        note(error)
    if words[ENDED]:
        raise RanksEnded([int(words[ENDED]) - 1])
    return words, row if keeps else part(ranks.rank, ranks.rank + 1)


# --- What ranks say to each other before anything connects them but messages: when they join a world


def gather_texts(comm: Communicator, text: str, ranks: Sequence[int] | None = None) -> list[str]:
    """The texts of these ``ranks``, one of which is this one, in their order; None: of all. Collective among them.

    Each rank sends log2(n) messages with all lengths and short texts; if a text is longer, as many again, with all
    texts at the length of the longest.
    """
    members = list(ranks) if ranks is not None else list(range(comm.size))
    part, data = MessagePart(comm, members), text.encode()

    def rows_of_all(row: bytes) -> Steps:
        rows = np.zeros((part.size, len(row)), np.uint8)
        rows[part.rank] = np.frombuffer(row, np.uint8)
        payload = Payload(rows.reshape(-1), spans([len(row)] * part.size), gather_rounds(part.rank, part.size))
        yield from carry(part, payload, _TEXTS)
        return [each.tobytes() for each in rows]

    def steps() -> Steps:
        short = data[:_SHORT].ljust(_SHORT, b"\0")
        rows = yield from rows_of_all(short + len(data).to_bytes(8, "little"))
        lengths = [int.from_bytes(row[_SHORT:], "little") for row in rows]
        if (longest := max(lengths)) > _SHORT:
            rows = yield from rows_of_all(data.ljust(longest, b"\0"))
        return [row[:length].decode() for row, length in zip(rows, lengths, strict=True)]

    if part.size == 1:
        return [text]
    return comm.progress.begin(Operation(comm, steps(), TIMEOUT, "for all ranks to join")).wait()
