"""How a collective begins: each rank says what it calls and shows its data, and hears the others."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from spmd_engine.comm import header
from spmd_engine.comm.board import LEFT, SAID, Board
from spmd_engine.comm.header import Call, Header, Said
from spmd_engine.comm.lending import Block
from spmd_engine.comm.pending import Steps
from spmd_engine.comm.transports.messages import EXPLANATION, Ranks, exchange, tag
from spmd_engine.errors import RankAborted

INLINE = 4096  # bytes that travel with a header's message
STAGED = 4 << 20  # bytes of ordinary memory that are copied for neighbours; more goes by messages

_NUMBER = struct.Struct("<q")


class Meeting:
    """What the ranks of a group said and showed.

    ``headers`` are empty where checks are switched off and nothing had to be told. ``blocks`` has everyone's array
    where this rank can read it already, None where it must be sent.
    """

    __slots__ = ("headers", "blocks", "readable", "board", "said", "number", "exposed")

    def __init__(self, headers: Sequence[Header], blocks: Sequence[Block | None]) -> None:
        self.headers, self.blocks = headers, blocks
        #: whether this rank can read all data already; then so can the others, if all said the same
        self.readable = bool(blocks)
        for block in blocks:
            if block is None:
                self.readable = False
        self.board: Board | None = None  # where the meeting was, if not by messages
        self.said: Said | None = None  # what to expect there next time
        self.number = 0
        self.exposed = False  # whether others read the caller's own memory

    @property
    def by_library(self) -> bool:
        """Whether all said that the MPI library may move the data."""
        return self.said is not None and self.said.by_library

    def end(self) -> Steps:
        """Go on when nobody reads the caller's memory any more."""
        if self.exposed:
            self.board.say(self.number, LEFT)
            yield self.board.until(self.number, LEFT)


def on_board(
    board: Board,
    call: Call,
    data: np.ndarray | None,
    axes: str = "",
    check: bool = False,
    *,
    agree: bool = True,
    lend: bool = False,
    copy: bool = False,
    result: np.ndarray | None = None,
    expected: Said | None = None,
) -> Steps:
    """Meet in shared memory, where contiguous ``data`` are shown, and ``result``, where it is to come to.

    What does not lie in the arena is shown where it is, if this rank may ``lend`` it, else as a copy if it is not too
    large; with ``copy`` it always is a copy, because this rank is going to change its data. Who shows None for an
    array, as it is on a device, reads none; what the MPI library may move is not shown. ``expected``: what was said,
    and agreed to, last time. Without ``agree`` the caller compares what was said. Returns the Meeting.
    """
    number, own = call
    expected = expected or Said([own] * board.size)
    if not board.has_page(number, own.inline):
        yield board.until_page(number, own.inline)
    place, exposed = None, False
    if data is not None and not own.inline and data.size:
        place = None if copy else board.place_of(data, lend)
        exposed = place is not None
        if not exposed and data.nbytes <= STAGED:
            place = board.stage(number, data)
    board.write(number, own, data, place, board.place_of(result, lend) if result is not None else None)
    board.say(number, SAID)
    if not board.reached(number, SAID):
        yield board.until(number, SAID)
    said, blocks = board.hear(number, expected)
    if agree and (said is not expected or own.operation == "refuse"):
        _agree([Call(number, each) for each in said.headers], blocks, own, axes, check)
    if data is None and own.shape is not None and not own.by_library:
        blocks = [None] * board.size
    elif exposed:
        blocks[board.rank] = data
    meeting = Meeting(said.headers, blocks)
    meeting.board, meeting.said, meeting.number, meeting.exposed = board, said, number, exposed
    return meeting


def explain(ranks: Ranks, call: Call, text: np.ndarray | None, axes: str) -> Steps:
    """Raise the error of all when they do not call the same, or cannot: each tells every other what it calls.

    ``text``: of a header that has data inline. Everyone has agreed before that there is something to explain.
    """
    own = call.header
    said = np.frombuffer(_NUMBER.pack(call.number) + own.packed + (text.tobytes() if own.inline else b""), np.uint8)
    heard = np.empty((ranks.size, _NUMBER.size + header.room(ranks.size) + INLINE), np.uint8)
    yield from exchange(ranks, [said] * ranks.size, list(heard), tag(call.number, EXPLANATION))
    heard[ranks.rank, : said.size] = said
    calls, texts = [], []
    for row in heard:
        theirs = Header.unpack(row[_NUMBER.size :].tobytes())
        calls.append(Call(*_NUMBER.unpack_from(row), theirs))
        begin = _NUMBER.size + len(theirs.packed)
        texts.append(row[begin : begin + theirs.inline])
    _agree(calls, texts, own, axes, True)


def bytes_of(text: str) -> np.ndarray:
    """A text, as it travels with a header: not more than its beginning."""
    return np.frombuffer(text.encode(errors="replace")[:INLINE], np.uint8)


def text_of(data: np.ndarray) -> str:
    """The text of which these are the ``bytes_of``."""
    return data.tobytes().decode(errors="replace")


def _agree(calls: Sequence[Call], blocks: Sequence, own: Header, axes: str, check: bool) -> None:
    """Raise what everyone has to raise, if a rank has failed, cannot make its call, or does not call the same."""
    refusals: dict[str, list[int]] = {}
    for rank, call in enumerate(calls):
        if call.header.operation == "leave" != own.operation and call.header.inline:
            raise RankAborted(f"rank {rank} of {axes!r} failed: {text_of(blocks[rank])}")
        if call.header.operation == "refuse":
            refusals.setdefault(text_of(blocks[rank]), []).append(rank)
    if refusals:
        raise header.refused(refusals, axes, len(calls))
    if check:
        header.check(calls, axes)
