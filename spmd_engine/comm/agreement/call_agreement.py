"""Agreement of ranks on a call before data move, so that a mismatch is an error instead of a hang.

Each rank has the Signature of its call. Ranks of one node exchange signatures in the slot table; ranks of several
nodes, in log2(n) rounds of messages (``disseminate``).
"""

from __future__ import annotations

import marshal
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from hashlib import blake2b
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from spmd_engine.arrays import dtypes
from spmd_engine.arrays.backend import Array
from spmd_engine.comm.blocks import span
from spmd_engine.comm.pending import RanksEnded, Requests, Steps
from spmd_engine.comm.transports.messages import AGREEMENT, EXPLANATION, Ranks, exchange, tag
from spmd_engine.errors import MismatchError, RankAborted, UsageError

if TYPE_CHECKING:
    from spmd_engine.comm.communicators.communicator import Communicator
    from spmd_engine.comm.shared_memory.slot_table import Entries

INLINE = 4096  #: bytes of a text that travels with a signature
MAX_DIMS = 16
#: Indices in ``Signature.words``. Each of the first three is followed by its negative.
SAME, ALIKE, KNOWN, HOST, DEVICE, MOST, ENDED = 0, 2, 4, 6, 7, 8, 9
_FORMAT = 2  # of marshal: equal values give equal bytes, and ``loads`` ignores bytes after them
_DIGITS = 15  # most bytes of a marshalled number
_NUMBER = struct.Struct("<q")
_LENGTH = 8  # bytes that hold the length of a row of ``copies``
_LEAST = 1 << 13  # least bytes of room for rows: more than the description of a broadcast's array


# --- the call of a rank


def room(ranks: int) -> int:
    """The most bytes of a signature in a group of this size."""
    return 192 + _DIGITS * (MAX_DIMS + ranks) + dtypes.LONGEST


@dataclass(frozen=True)
class Signature:
    """The call of one rank: the fields that must be equal on all ranks, the data that it offers, and its lengths."""

    operation: str  # a collective; "leave": the program ends; "refuse": this rank cannot make its call
    reduction: str = ""
    dtype: str = ""  # by ``dtypes.describe``
    shape: tuple[int, ...] | None = None  # None: this rank contributes no array (broadcast)
    axis: int = 0
    concat_axis: int = 0
    root: int = 0
    sizes: tuple[int, ...] = ()  # of the parts of reduce_scatter and all_to_all, if the caller passed them
    inline: int = 0  # bytes of data that travel with the signature
    host: bool = True  # whether the array, or in a broadcast the result, is in host memory
    known: int = -1  # a number for the lengths of all ranks, if the caller passed them; otherwise -1

    @cached_property
    def packed(self) -> bytes:
        """All fields as bytes."""
        return marshal.dumps(tuple(getattr(self, field.name) for field in fields(self)), _FORMAT)

    @staticmethod
    def unpack(data: bytes) -> Signature:
        """The signature that ``data`` begins with."""
        return Signature(*marshal.loads(data))

    @cached_property
    def digest(self) -> int:
        """A number that identifies the signature."""
        return int.from_bytes(blake2b(self.packed, digest_size=8).digest(), "little", signed=True)

    @cached_property
    def words(self) -> np.ndarray:
        """Numbers whose maximum ranks of several nodes compute, instead of exchanging signatures: see ``disseminate``.

        A number and its negative show whether fields are equal that must be, or may be, equal; other numbers are worst
        cases.
        """
        agreed, variable = number_of(self.agreement()), 0
        if self.operation == "all_gather" and self.shape:  # lengths along the gathered axis may differ
            variable = self.shape[self.axis]
        elif self.operation == "all_to_all":  # the splits may differ
            variable = number_of((self.shape, self.sizes))
        size = 0 if self.shape is None else prod(self.shape) * self.array_type[1].itemsize
        both = (sign * word for word in (agreed, variable, self.known) for sign in (1, -1))
        return np.array([*both, -self.host, self.host, size, 0], np.int64)

    @cached_property
    def array_type(self) -> tuple[tuple[int, ...], np.dtype]:
        """Shape and dtype of the array, or of the bytes of a text."""
        if self.shape is None:
            return (self.inline,), np.dtype(np.uint8)
        return self.shape, dtypes.described(self.dtype)

    def part_for(self, rank: int, ranks: int) -> tuple[slice, ...]:
        """Index of the part of this rank's array that goes to another rank."""
        if self.sizes:
            part = slice(sum(self.sizes[:rank]), sum(self.sizes[: rank + 1]))
        else:
            part = span(self.array_type[0][self.axis], ranks, rank)
        return (slice(None),) * self.axis + (part,)

    def length_for(self, rank: int, ranks: int) -> int:
        """Length along ``concat_axis`` of the block that another rank receives from this one."""
        if self.operation == "all_gather" or self.axis != self.concat_axis:
            return self.array_type[0][self.concat_axis]
        part = self.part_for(rank, ranks)[-1]
        return part.stop - part.start

    def __str__(self) -> str:
        if self.operation == "leave":
            return "nothing more: its program ended"
        if self.operation == "refuse":
            return "what it cannot call"
        arguments = [self.reduction] if self.reduction else []
        if self.shape is not None:
            arguments.append(f"{dtypes.described(self.dtype)}{list(self.shape)}")
        if self.operation in ("all_gather", "reduce_scatter", "all_to_all"):
            arguments.append(f"axis={self.axis}")
        if self.operation == "all_to_all":
            arguments.append(f"concat_axis={self.concat_axis}")
        if self.sizes:
            arguments.append(f"sizes={list(self.sizes)}")
        if self.operation == "broadcast":
            arguments.append(f"root={self.root}")
        return f"{self.operation}({', '.join(arguments)})"

    def agreement(self) -> tuple:
        """The values that must be equal on all ranks of the group."""
        shape = list(self.shape) if self.shape is not None else []
        if self.operation == "all_gather" and shape:
            shape[self.axis] = -1  # shards may be uneven along the gathered axis
        if self.operation == "all_to_all" and shape:
            shape[self.concat_axis] = -1
        if self.operation == "broadcast":  # only the root has an array
            return self.operation, self.root
        # An all_to_all that splits and joins along the same axis may be split differently on every rank.
        sizes = () if self.operation == "all_to_all" and self.axis == self.concat_axis else self.sizes
        return self.operation, self.reduction, self.dtype, tuple(shape), self.axis, self.concat_axis, sizes


def number_of(values: tuple) -> int:
    """A hash of texts and numbers, below 2^62, so that its negative is also an int64."""
    return int.from_bytes(blake2b(repr(values).encode(), digest_size=8).digest(), "little") >> 2


class NumberedCall(NamedTuple):
    """A signature with the number of the call in its group, counted from 1."""

    number: int
    signature: Signature

    def __str__(self) -> str:
        if self.signature.operation == "leave":
            return str(self.signature)
        return f"{self.signature} as its call number {self.number}"


class Signatures:
    """The signatures of all ranks in a call. A group keeps them: digests alone identify a repeated call."""

    __slots__ = ("by_rank", "digests", "same", "inline_all", "inline", "device")

    def __init__(self, by_rank: Sequence[Signature]) -> None:
        self.by_rank, self.digests = list(by_rank), [signature.digest for signature in by_rank]
        self.same = len(set(self.digests)) == 1  #: whether all ranks have the same signature
        #: whether all data travel with the signatures
        self.inline_all = all(signature.inline or signature.shape is None for signature in by_rank)
        self.device = not any(signature.host for signature in by_rank)  #: whether all arrays are on devices
        self.inline: dict[int, list[Any]] = {}  #: by slot: views of all ranks' data, None: no data


# --- agreement between nodes: log2(n) rounds of messages


def disseminate(
    ranks: Ranks, words: np.ndarray, row: bytes, tag: int, *, copies: bool = False, ended: RanksEnded | None = None
) -> Steps:
    """The maximum of all ranks' ``words`` (see ``Signature``), and the rows by rank; None unless equally long.

    In round i each rank sends its words and rows to the rank 2^i after it and receives from the rank 2^i before it.
    (Hensgen, Finkel, Manber: Two algorithms for barrier synchronization, 1988; Bruck et al.: Efficient algorithms for
    all-to-all communications, 1997.) It uses messages instead of the library's Iallreduce: such a request cannot be
    abandoned when a rank never arrives, and would not give the others the reason.

    With ``copies`` at most one rank has a row, and all receive it. ``ended``: ranks have ended that this rank waited
    for, so it cannot take part; it notifies the ranks that wait for it, and all raise the same RanksEnded.
    """
    words, rows, n = words.copy(), [row], ranks.size
    capacity = words.nbytes + max(ranks.tuning.with_agreement, _LEAST, 0 if copies else n * len(row))
    for distance in (1 << i for i in range((n - 1).bit_length())):
        if ended is not None:
            words[ENDED] = 1 + max(ended.ranks)
        count = min(distance, n - distance)
        rows_sent = len(row).to_bytes(_LENGTH, "little") + row if copies else b"".join(rows[:count])
        message = np.frombuffer(words.tobytes() + rows_sent, np.uint8)
        incoming = np.empty(capacity, np.uint8)
        to, source = (ranks.rank + distance) % n, (ranks.rank - distance) % n
        requests = Requests(ranks)
        if ended is None:
            requests.add(source, ranks.start_receive(incoming, source, tag))
        requests.add(to, ranks.start_send(message, to, tag))
        try:
            yield requests
        except RanksEnded as error:
            ended = error
        if ended is not None:
            continue
        their_words = incoming[: words.nbytes].view(np.int64)
        if copies:
            length = int.from_bytes(incoming[words.nbytes : words.nbytes + _LENGTH].tobytes(), "little")
            row = incoming[words.nbytes + _LENGTH :][:length].tobytes() if not row and length < capacity else row
        elif row and (words[:KNOWN] == their_words[:KNOWN]).all():
            data, size = incoming[words.nbytes :].tobytes(), len(row)
            rows += [data[i * size : (i + 1) * size] for i in range(count)]
        np.maximum(words, their_words, out=words)
    if ended is not None:
        raise ended
    if words[ENDED]:
        raise RanksEnded([int(words[ENDED]) - 1])
    if copies:
        return words, [row]
    return words, [rows[(ranks.rank - r) % n] for r in range(n)] if row and len(rows) == n else None


# --- agreement of a group


class Agreed(NamedTuple):
    """Facts that all ranks know about a call on which they have agreed."""

    alike: bool  #: whether values that may differ (lengths along the axis, splits) are equal on all ranks
    sizes_known: bool  #: whether the callers of all ranks passed the lengths of the others' arrays
    host: bool  #: whether all arrays are in host memory
    most: int  #: bytes of the largest array of any rank
    blocks: Sequence[Any]  #: arrays of all ranks, in rank order, if they were sent inline; otherwise empty
    root: Signature  #: of the root's call in a broadcast; otherwise of this rank's call
    entries: Entries | None = None  #: of this node's ranks in their slot table, if there is one
    signatures: Signatures | None = None  #: of all ranks, if they are on one node
    device: bool = False  #: whether all arrays are on devices


class Agreement:
    """Agreement of one group. ``check``: whether ranks of one node compare their calls; several nodes always do."""

    def __init__(self, comm: Communicator, axes: str, check: bool) -> None:
        self._comm, self._axes, self._check = comm, axes, check

    def reach(
        self,
        signature: Signature,
        expected: Signatures,
        number: int,
        x: Array | None,
        readable: np.ndarray | None = None,
        result: np.ndarray | None = None,
    ) -> Steps:
        """Agree with all ranks on call ``number``; returns an Agreed.

        ``x`` travels inline if the signature says so; for ``expected``, ``readable`` and ``result`` see
        ``SlotTable.exchange``. If the calls do not match, all ranks raise the same error.
        """
        comm, table, entries, ended = self._comm, self._comm.node_table, None, None
        if table is not None:
            data = x if signature.inline else readable
            try:
                entries = yield from table.exchange(number, signature, data, result, expected)
            except RanksEnded as error:
                if table is comm.table:
                    raise
                ended = error
            else:
                if table is comm.table:
                    return self._on_one_node(signature, expected, number, x, entries)
        return (yield from self._between_nodes(signature, number, x, entries, ended))

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
        return Agreed(signatures.same, True, host, most, blocks, root, entries, signatures, signatures.device)

    def _between_nodes(
        self, signature: Signature, number: int, x: Array | None, entries: Entries | None, ended: RanksEnded | None
    ) -> Steps:
        """Agree between nodes: in lanes, for nodes that have agreed in their tables; otherwise among all ranks."""
        comm, lanes = self._comm, self._comm.lanes
        local: Sequence[Signature] = [signature] if entries is None else entries.signatures.by_rank
        blocks: Sequence[Any] = [x] if entries is None else entries.blocks
        words = np.max([signature.words for signature in local], axis=0)
        data = [b.tobytes() if s.inline and s.shape is not None else b"" for s, b in zip(local, blocks, strict=True)]
        broadcasts = signature.operation == "broadcast"
        if broadcasts:
            row = next((s.packed + d for s, d in zip(local, data, strict=True) if s.shape is not None), b"")
        else:
            row = b"".join(data) if len(set(map(len, data))) == 1 else b""
        lane, message_tag = lanes.lane if lanes else comm, tag(number, AGREEMENT)
        words, rows = yield from disseminate(lane, words, row, message_tag, copies=broadcasts, ended=ended)
        same, alike, sizes_known = (bool(words[i] == -words[i + 1]) for i in (SAME, ALIKE, KNOWN))
        sizes_known, host, most = sizes_known and words[KNOWN] >= 0, bool(words[HOST]), int(words[MOST])
        if not same or signature.operation == "refuse":
            yield from self._explain(signature, number, x)
        root = signature
        if broadcasts:
            root, root_row = Signature.unpack(rows[0]), rows[0]
            rows = [root_row[len(root_row) - root.inline :]] * comm.size if root.inline else None
        elif rows is not None and signature.inline and alike and host:
            rows = _order_by_rank(rows, lanes.nodes) if lanes else rows
        else:
            rows = None
        shape, dtype = root.array_type
        blocks = [np.frombuffer(row, dtype, prod(shape)).reshape(shape) for row in rows or ()]
        return Agreed(alike, sizes_known, host, most, blocks, root, entries, device=bool(words[DEVICE] == 0))

    def _explain(self, signature: Signature, number: int, x: Array | None) -> Steps:
        """Raise the same error on all ranks if their calls differ or a rank cannot make its call: each rank sends its
        signature to all others. Collective."""
        comm = self._comm
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


def _order_by_rank(rows: Sequence[bytes], nodes: Sequence[Sequence[int]]) -> list[bytes]:
    """Rows by rank, from the rows of nodes, each of which joins the rows of the node's ranks."""
    size, by_rank = len(rows[0]) // len(nodes[0]), [b""] * sum(map(len, nodes))
    for node, row in zip(nodes, rows, strict=True):
        for i, rank in enumerate(node):
            by_rank[rank] = row[i * size : (i + 1) * size]
    return by_rank


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
