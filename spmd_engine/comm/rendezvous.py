"""How a collective begins: each rank says what it calls and shows its data, and learns what the others do."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from spmd_engine.comm import signature
from spmd_engine.comm.pending import Steps
from spmd_engine.comm.signature import NumberedCall, Signature, Signatures
from spmd_engine.comm.slot_table import CALLED, LEFT, SlotTable
from spmd_engine.comm.transports.messages import EXPLANATION, Ranks, exchange, tag
from spmd_engine.errors import RankAborted
from spmd_engine.node.cross_memory import Block

INLINE = 4096  # bytes that travel with a signature's message

_NUMBER = struct.Struct("<q")


class Rendezvous:
    """What the ranks of a node call and show. ``blocks``: everyone's array, where this rank can read it, else None."""

    __slots__ = ("table", "number", "signatures", "blocks", "exposed")

    def __init__(
        self, table: SlotTable, number: int, signatures: Signatures, blocks: Sequence[Block | None], exposed: bool
    ) -> None:
        self.table, self.number, self.signatures, self.blocks = table, number, signatures, blocks
        self.exposed = exposed  #: whether others may read, or write to, memory that is not the table's

    @property
    def shown(self) -> bool:
        """Whether all data can be read, by all ranks."""
        for block, each in zip(self.blocks, self.signatures.by_rank, strict=True):
            if block is None and each.shape is not None:
                return False
        return True

    @property
    def results_shown(self) -> bool:
        """Whether all have shown where their results are to come."""
        return all(self.table.shows_result(self.number, rank) for rank in range(self.table.size))

    def end(self) -> Steps:
        """Go on when nobody needs this rank's memory any more."""
        if self.exposed:
            self.table.say(self.number, LEFT)
            yield self.table.until(self.number, LEFT)


def meet(
    table: SlotTable, call: NumberedCall, data: np.ndarray | None, result: np.ndarray | None, expected: Signatures
) -> Steps:
    """Meet on a node's table, where contiguous ``data`` are shown, and ``result``, where it is to come to.

    Who does not show an array makes it one that nobody reads. ``expected``: what all called last time. Returns the
    Rendezvous.
    """
    number, own = call
    if not table.is_free(number, own.inline):
        yield table.until_free(number, own.inline)
    at = table.address(data) if data is not None and not own.inline and data.size else None
    table.write(number, own, data, at, table.address(result) if result is not None else None)
    table.say(number, CALLED)
    if not table.reached(number, CALLED):
        yield table.until(number, CALLED)
    found, blocks = table.read(number, expected)
    if at is not None:
        blocks[table.rank] = data
    return Rendezvous(table, number, found, blocks, at is not None or result is not None)


def check(met: Rendezvous, own: Signature, axes: str, check: bool) -> None:
    """Raise, on all ranks, what is wrong with a call for which they have met."""
    calls = [NumberedCall(met.number, each) for each in met.signatures.by_rank]
    _check(calls, met.blocks, own, axes, check)


def explain(ranks: Ranks, call: NumberedCall, text: np.ndarray | None, axes: str) -> Steps:
    """Raise the error of all when they do not call the same, or cannot: each tells every other what it calls.

    ``text``: of a signature that has data inline. Everyone knows before that there is something to explain.
    """
    own = call.signature
    told = np.frombuffer(_NUMBER.pack(call.number) + own.packed + (text.tobytes() if own.inline else b""), np.uint8)
    heard = np.empty((ranks.size, _NUMBER.size + signature.room(ranks.size) + INLINE), np.uint8)
    yield from exchange(ranks, [told] * ranks.size, list(heard), tag(call.number, EXPLANATION))
    heard[ranks.rank, : told.size] = told
    calls, texts = [], []
    for row in heard:
        theirs = Signature.unpack(row[_NUMBER.size :].tobytes())
        calls.append(NumberedCall(*_NUMBER.unpack_from(row), theirs))
        begin = _NUMBER.size + len(theirs.packed)
        texts.append(row[begin : begin + theirs.inline])
    _check(calls, texts, own, axes, True)


def bytes_of(text: str) -> np.ndarray:
    """A text, as it travels with a signature: not more than its beginning."""
    return np.frombuffer(text.encode(errors="replace")[:INLINE], np.uint8)


def text_of(data: np.ndarray) -> str:
    """The text of which these are the ``bytes_of``."""
    return data.tobytes().decode(errors="replace")


def _check(calls: Sequence[NumberedCall], blocks: Sequence, own: Signature, axes: str, check: bool) -> None:
    """Raise what everyone has to raise, if a rank has failed, cannot make its call, or does not call the same."""
    refusals: dict[str, list[int]] = {}
    for rank, (_, theirs) in enumerate(calls):
        if theirs.operation == "leave" != own.operation and theirs.inline:
            raise RankAborted(f"rank {rank} of {axes!r} failed: {text_of(blocks[rank])}")
        if theirs.operation == "refuse":
            refusals.setdefault(text_of(blocks[rank]), []).append(rank)
    if refusals:
        raise signature.refused(refusals, axes, len(calls))
    if check:
        signature.check(calls, axes)
