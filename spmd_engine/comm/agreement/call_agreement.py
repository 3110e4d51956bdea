"""How ranks agree on a call before data move: on one node in its slot table, between nodes in log2(n) messages."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from spmd_engine.arrays.backend import Array
from spmd_engine.comm.agreement import signature
from spmd_engine.comm.agreement.dissemination import disseminate
from spmd_engine.comm.agreement.signature import ALIKE, HOST, KNOWN, MOST, SAME, NumberedCall, Signature
from spmd_engine.comm.communicators.communicator import Communicator
from spmd_engine.comm.pending import RanksEnded, Steps
from spmd_engine.comm.transports.messages import AGREEMENT, EXPLANATION, exchange, tag
from spmd_engine.comm.transports.shared_memory import SharedMemory, meet
from spmd_engine.errors import RankAborted

if TYPE_CHECKING:
    from spmd_engine.comm.collectives import PreparedCall

INLINE = 4096  # bytes of a text that travels with a signature

_NUMBER = struct.Struct("<q")


class Agreed(NamedTuple):
    """What all ranks know of a call once they have agreed on it."""

    alike: bool  #: whether what may differ (lengths along the axis, splits) is the same on all
    sizes_known: bool  #: whether all ranks were told the others' lengths by their callers
    host: bool  #: whether all have their arrays in the host's memory
    most: int  #: bytes of the largest array of any rank
    rows: list | None  #: everyone's array, in rank order, if they came along
    root: Signature | None = None  #: of a broadcast
    met: SharedMemory | None = None  #: what this rank's node knows besides, if its ranks met


class Agreement:
    """Of one group. ``check``: whether ranks of one node compare what they call; those of several always do."""

    def __init__(self, comm: Communicator, axes: str, check: bool) -> None:
        self._comm, self._axes, self._check = comm, axes, check

    def reach(
        self,
        call: PreparedCall,
        number: int,
        x: Array | None,
        shown: np.ndarray | None = None,
        result: np.ndarray | None = None,
    ) -> Steps:
        """All ranks agree on the call; returns an Agreed.

        Small ``x`` come along; ``shown`` and ``result``: see ``shared_memory.meet``. Raises, on all ranks, what is
        wrong if they do not agree.
        """
        own, comm = call.signature, self._comm
        met = ended = None
        if comm.node_table is not None:
            data = x if own.inline else shown
            try:
                met = yield from meet(comm.node_table, number, own, data, result, call.expected)
            except RanksEnded as error:
                if comm.table is not None:
                    raise
                ended = error
        if comm.table is not None:
            return self._on_one_node(call, met)
        if met is not None:
            call.expected = met.signatures
        return (yield from self._between_nodes(call, number, x, met, ended))

    def _on_one_node(self, call: PreparedCall, met: SharedMemory) -> Agreed:
        own, found = call.signature, met.signatures
        if found is not call.expected or own.operation == "refuse":
            calls = [NumberedCall(met.number, each) for each in found.by_rank]
            _raise_what_is_wrong(calls, met.blocks, own, self._axes, self._check)
            call.expect(found)
        root = found.by_rank[own.root] if own.operation == "broadcast" else None
        inline = found.inline_all if root is None else root.inline > 0
        host = inline or met.shown
        return Agreed(found.same, True, host, call.payload, met.blocks if inline else None, root, met)

    def _between_nodes(
        self, call: PreparedCall, number: int, x: Array | None, met: SharedMemory | None, ended: RanksEnded | None
    ) -> Steps:
        """Those that have met, on the table of their node, tell the others of their lane; else each tells all."""
        comm, lanes, own = self._comm, self._comm.lanes, call.signature
        near, blocks = (met.signatures.by_rank, met.blocks) if met is not None else ([own], [x])
        words = np.max([each.words for each in near], axis=0)
        data = [b.tobytes() if s.inline and s.shape is not None else b"" for s, b in zip(near, blocks, strict=True)]
        broadcasts = own.operation == "broadcast"
        if broadcasts:
            row = next((s.packed + d for s, d in zip(near, data, strict=True) if s.shape is not None), b"")
        else:
            row = b"".join(data) if len(set(map(len, data))) == 1 else b""
        lane, own_tag = lanes.lane if lanes else comm, tag(number, AGREEMENT)
        words, rows = yield from disseminate(lane, words, row, own_tag, copies=broadcasts, ended=ended)
        same, alike, known = (bool(words[i] == -words[i + 1]) for i in (SAME, ALIKE, KNOWN))
        known, host, most = known and words[KNOWN] >= 0, bool(words[HOST]), int(words[MOST])
        if not same or own.operation == "refuse":
            yield from self._explain(call, number, x)
        root = None
        if broadcasts:
            root, whole = Signature.unpack(rows[0]), rows[0]
            rows = [whole[len(whole) - root.inline :]] * comm.size if root.inline else None
        elif rows is not None and own.inline and alike and host:
            rows = _by_rank(rows, lanes.nodes) if lanes else rows
        else:
            rows = None
        if rows is not None:
            shape, dtype = root.array_type if broadcasts else (x.shape, x.dtype)
            rows = [np.frombuffer(each, dtype, prod(shape)).reshape(shape) for each in rows]
        return Agreed(alike, known, host, most, rows, root, met)

    def _explain(self, call: PreparedCall, number: int, x: Array | None) -> Steps:
        """Raise the error of all when they do not call the same, or cannot: each tells every other what it calls.

        Everyone knows before that there is something to explain.
        """
        comm, own = self._comm, call.signature
        own = own if own.shape is None else replace(own, inline=0)  # a text goes along, an array does not
        text = x.tobytes() if own.inline else b""
        told = np.frombuffer(_NUMBER.pack(number) + own.packed + text, np.uint8)
        heard = np.empty((comm.size, _NUMBER.size + signature.room(comm.size) + INLINE), np.uint8)
        yield from exchange(comm, [told] * comm.size, list(heard), tag(number, EXPLANATION))
        heard[comm.rank, : told.size] = told
        calls, texts = [], []
        for row in heard:
            theirs = Signature.unpack(row[_NUMBER.size :])
            calls.append(NumberedCall(*_NUMBER.unpack_from(row), theirs))
            begin = _NUMBER.size + len(theirs.packed)
            texts.append(row[begin : begin + theirs.inline])
        _raise_what_is_wrong(calls, texts, own, self._axes, True)


def _by_rank(rows: Sequence[bytes], nodes: Sequence[Sequence[int]]) -> list[bytes]:
    """Rows of nodes, in which those of their ranks lie one after the other, as rows by rank."""
    size, by_rank = len(rows[0]) // len(nodes[0]), [b""] * sum(map(len, nodes))
    for node, row in zip(nodes, rows, strict=True):
        for i, rank in enumerate(node):
            by_rank[rank] = row[i * size : (i + 1) * size]
    return by_rank


def bytes_of(text: str) -> np.ndarray:
    """A text, as it travels with a signature: not more than its beginning."""
    return np.frombuffer(text.encode(errors="replace")[:INLINE], np.uint8)


def text_of(data: np.ndarray) -> str:
    """The text of which these are the ``bytes_of``."""
    return data.tobytes().decode(errors="replace")


def _raise_what_is_wrong(
    calls: Sequence[NumberedCall], texts: Sequence, own: Signature, axes: str, check: bool
) -> None:
    """The error of all, if a rank has failed, cannot make its call, or does not call the same."""
    refusals: dict[str, list[int]] = {}
    for rank, (_, theirs) in enumerate(calls):
        if theirs.operation == "leave" != own.operation and theirs.inline:
            raise RankAborted(f"rank {rank} of {axes!r} failed: {text_of(texts[rank])}")
        if theirs.operation == "refuse":
            refusals.setdefault(text_of(texts[rank]), []).append(rank)
    if refusals:
        raise signature.refused(refusals, axes, len(calls))
    if check:
        signature.check(calls, axes)
