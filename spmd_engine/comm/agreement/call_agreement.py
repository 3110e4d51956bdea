"""Agreement of ranks on a call before data move, so that a mismatch is an error instead of a hang.

Each rank has the Signature of its call. Ranks of one node exchange signatures in the slot table; ranks of several
nodes, in a tree of messages (``tree``).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from spmd_engine.arrays.backend import Array
from spmd_engine.comm.agreement.signature import NumberedCall, Signature, Signatures, common, room
from spmd_engine.comm.agreement.tree import Inline, agree
from spmd_engine.comm.connections import Connections
from spmd_engine.comm.exchange import AGREEMENT, EXPLANATION, exchange, tag
from spmd_engine.comm.pending import RanksEnded, Steps
from spmd_engine.comm.shared_memory.slot_table import Entries
from spmd_engine.errors import MismatchError, RankAborted, UsageError

INLINE = 4096  #: bytes of a text that travels with a signature
_NUMBER = struct.Struct("<q")


class Agreed(NamedTuple):
    """Facts that all ranks know about a call on which they have agreed."""

    alike: bool  #: whether values that may differ (lengths along the axis, splits) are equal on all ranks
    sizes_known: bool  #: whether the callers of all ranks passed the lengths of the others' arrays
    host: bool  #: whether all arrays are in host memory
    most: int  #: bytes of the largest array of any rank
    blocks: Sequence[Any]  #: arrays of all ranks, in rank order, if they were sent inline on one node; otherwise empty
    root: Signature  #: of the root's call in a broadcast; otherwise of this rank's call
    entries: Entries | None = None  #: of this node's ranks in their slot table, if there is one
    signatures: Signatures | None = None  #: of all ranks, if they are on one node
    device: bool = False  #: whether all arrays are on devices
    answer: np.ndarray | None = None  #: the bytes that this rank has got between nodes, if arrays were sent inline


class Agreement:
    """Agreement of one group. ``check``: whether ranks of one node compare their calls; several nodes always do."""

    def __init__(self, connections: Connections, axes: str, check: bool) -> None:
        self._connections, self._axes, self._check = connections, axes, check

    def reach(
        self,
        signature: Signature,
        expected: Signatures,
        number: int,
        x: Array | None,
        readable: np.ndarray | None = None,
        result: np.ndarray | None = None,
        inline: Inline | None = None,
    ) -> Steps:
        """Agree with all ranks on call ``number``; returns an Agreed.

        ``x`` travels inline if the signature says so, between nodes as ``inline``. For ``expected``, ``readable`` and
        ``result`` see ``SlotTable.exchange``. If the calls do not match, all ranks raise the same error.
        """
        connections, table, entries, ended = self._connections, self._connections.node_table, None, None
        if table is not None:
            data = x if signature.inline else readable
            try:
                while (entries := table.exchange(number, signature, data, result, expected)) is None:
                    yield table.until_exchanged(number, signature.inline)
            except RanksEnded as error:
                if table is connections.table:
                    raise
                ended = error
            else:
                if table is connections.table:
                    return entries.agreed or self._on_one_node(signature, expected, number, x, entries)
        return (yield from self._between_nodes(signature, number, x, entries, ended, inline))

    def _on_one_node(
        self, signature: Signature, expected: Signatures, number: int, x: Array | None, entries: Entries
    ) -> Agreed:
        signatures = entries.signatures
        if signatures is not expected or signature.operation == "refuse":
            calls = [NumberedCall(number, signature) for signature in signatures.by_rank]
            _raise_shared_error(calls, entries.blocks, signature, self._axes, self._check)
        broadcasts = signature.operation == "broadcast"
        root = signatures.by_rank[signature.root] if broadcasts else signature
        inline = root.inline > 0 if broadcasts else signatures.inline_all
        most = 0 if x is None else x.nbytes
        host, blocks = inline or entries.readable, entries.blocks if inline else ()
        agreed = Agreed(signatures.same, True, host, most, blocks, root, entries, signatures, signatures.device)
        if signatures.inline_all:  # these entries are kept; others, in a cycle with this, would keep large arrays
            entries.agreed = agreed
        return agreed

    def _between_nodes(
        self,
        signature: Signature,
        number: int,
        x: Array | None,
        entries: Entries | None,
        ended: RanksEnded | None,
        inline: Inline | None,
    ) -> Steps:
        """Agree between nodes: in lanes, for nodes that have agreed in their tables; otherwise among all ranks."""
        local: Sequence[Signature] = [signature] if entries is None else entries.signatures.by_rank
        blocks: Sequence[Any] = [x] if entries is None else entries.blocks
        words = np.max([signature.words for signature in local], axis=0)
        ranks, own, data = self._connections.senders, None, np.empty(0, np.uint8)
        if inline is None and signature.operation != "broadcast":  # as with an array on a device; others may have rows
            inline = Inline(combine=lambda rows: rows[0][:0])
        if signature.operation == "broadcast":
            for each, block in zip(local, blocks, strict=True):
                if each.shape is not None:
                    data = np.frombuffer(each.packed + (block.tobytes() if each.inline else b""), np.uint8)
        elif inline is not None and all(each.inline for each in local) and len(set(map(np.size, blocks))) == 1:
            data = inline.row(blocks, ranks.outer(ranks.size - 1 - ranks.rank))
            own = inline.row(blocks, ranks.outer(ranks.rank)) if ranks.size == 2 else None
        tuning, agreement = self._connections.tuning, tag(number, AGREEMENT)
        most, joined = tuning.inline_between(ranks.size), tuning.with_agreement
        words, answer = yield from agree(ranks, words, data, agreement, inline, own, most, joined, ended)
        same, alike, sizes_known, host, device, most = common(words)
        if not same or signature.operation == "refuse":
            yield from self._explain(signature, number, x)
        root, complete = signature, alike and host and signature.inline > 0
        if signature.operation == "broadcast":
            root = Signature.unpack(answer.tobytes())
            answer, complete = answer[answer.size - root.inline :], root.inline > 0
        answer = answer if complete else None
        return Agreed(alike, sizes_known, host, most, (), root, entries, device=device, answer=answer)

    def _explain(self, signature: Signature, number: int, x: Array | None) -> Steps:
        """Raise the same error on all ranks if their calls differ or a rank cannot make its call: each rank sends its
        signature to all others. Collective."""
        comm = self._connections.comm
        signature = signature if signature.shape is None else replace(signature, inline=0)  # sends texts, not arrays
        text = x.tobytes() if signature.inline and x is not None else b""
        sent = np.frombuffer(_NUMBER.pack(number) + signature.packed + text, np.uint8)
        received = np.empty((comm.size, _NUMBER.size + room(comm.size) + INLINE), np.uint8)
        yield from exchange(comm, [sent] * comm.size, list(received), tag(number, EXPLANATION))
        received[comm.rank, : sent.size] = sent
        calls, texts = [], []
        for row in received:
            data = row.tobytes()
            their_signature = Signature.unpack(data[_NUMBER.size :])
            calls.append(NumberedCall(_NUMBER.unpack_from(data)[0], their_signature))
            begin = _NUMBER.size + len(their_signature.packed)
            texts.append(row[begin : begin + their_signature.inline])
        _raise_shared_error(calls, texts, signature, self._axes, True)


# --- errors that all ranks raise


def bytes_of(text: str) -> np.ndarray:
    """A text in the form that travels with a signature, shortened to INLINE bytes."""
    return np.frombuffer(text.encode(errors="replace")[:INLINE], np.uint8)


def text_of(data: np.ndarray) -> str:
    """The text from the result of ``bytes_of``."""
    return data.tobytes().decode(errors="replace")


def _raise_shared_error(
    calls: Sequence[NumberedCall], texts: Sequence, own_signature: Signature, axes: str, check: bool
) -> None:
    """Raise the same error on all ranks if one has failed, cannot make its call, or makes a different call."""
    refusals: dict[str, list[int]] = {}
    for rank, (_, signature) in enumerate(calls):
        if signature.operation == "leave" != own_signature.operation and signature.inline:
            raise RankAborted(f"rank {rank} of {axes!r} failed: {text_of(texts[rank])}")
        if signature.operation == "refuse":
            refusals.setdefault(text_of(texts[rank]), []).append(rank)
    if refusals:
        raise refused(refusals, axes, len(calls))
    if check:
        check_calls(calls, axes)


def check_calls(calls: Sequence[NumberedCall], group: str) -> None:
    """Raise the same MismatchError on every rank unless all ranks made the same call."""
    number, agreement = calls[0].number, calls[0].signature.agreement()
    if all(call.number == number and call.signature.agreement() == agreement for call in calls):
        return
    by_call: dict[str, list[int]] = {}
    for rank, call in enumerate(calls):
        by_call.setdefault(str(call), []).append(rank)
    text = "; ".join(f"{named(ranks)} called {call}" for call, ranks in by_call.items())
    raise MismatchError(
        f"collective over {group!r} does not match (ranks of that group): {text}. "
        "Every rank of a group must make the same calls in the same order."
    )


def refused(texts: Mapping[str, Sequence[int]], group: str, size: int) -> UsageError:
    """The error of all ranks if some cannot make their calls. ``texts``: the ranks that report each error text."""
    first, ranks = next(iter(texts.items()))
    if len(ranks) == size:
        return UsageError(first)
    return UsageError("; ".join(f"{named(ranks)} of {group!r}: {text}" for text, ranks in texts.items()))


def named(ranks: Sequence[int]) -> str:
    """``rank 1`` or ``ranks 0, 2``."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
