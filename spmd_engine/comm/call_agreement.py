"""How ranks agree on a call before data move: on one node in its slot table, between nodes in log2(n) messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import numpy as np

from spmd_engine.arrays.backend import Array
from spmd_engine.comm import rendezvous
from spmd_engine.comm.communicator import Communicator
from spmd_engine.comm.dissemination import Agreed, disseminate, words_of
from spmd_engine.comm.pending import RanksEnded, Steps
from spmd_engine.comm.prepared_call import PreparedCall
from spmd_engine.comm.rendezvous import meet
from spmd_engine.comm.signature import NumberedCall, Signature, Signatures
from spmd_engine.comm.transports.messages import AGREEMENT, tag


class Agreement:
    """Of one group. ``check``: whether ranks of one node compare what they call; those of several always do."""

    def __init__(self, comm: Communicator, axes: str, check: bool) -> None:
        self._comm, self._axes, self._check, self._lanes, self._table = comm, axes, check, comm.lanes, comm.table
        self._size = comm.size

    def reach(
        self,
        call: PreparedCall,
        number: int,
        x: Array | None,
        shown: np.ndarray | None = None,
        result: np.ndarray | None = None,
    ) -> Steps:
        """All ranks agree on the call; returns an Agreed.

        Small ``x`` come along; ``shown`` and ``result``: see ``rendezvous.meet``. Raises, on all ranks, what is wrong
        if they do not agree.
        """
        if self._table is None:
            return (yield from self._between_nodes(call, number, x, shown, result))
        signature, expected = call.signature, call.expected
        met = yield from meet(
            self._table, NumberedCall(number, signature), x if signature.inline else shown, result, expected
        )
        found = met.signatures
        if found is not expected or signature.operation == "refuse":
            rendezvous.check(met, signature, self._axes, self._check)
            call.expect(found)
        root = found.by_rank[signature.root] if signature.operation == "broadcast" else None
        inline = found.at_once if root is None else root.inline > 0
        rows = met.blocks if inline and signature.operation != "barrier" else None
        host = inline or found.wait or met.shown
        return Agreed(True, found.same, True, host, call.payload, rows, root, met)

    def _between_nodes(
        self, call: PreparedCall, number: int, x: Array | None, shown: np.ndarray | None, result: np.ndarray | None
    ) -> Steps:
        """As ``reach``, in log2(n) messages; the ranks of each node first on their table, if nodes are even."""
        terms, broadcasts = call.terms, call.signature.operation == "broadcast"
        row = b""
        if broadcasts and x is not None:
            row = terms.packed + (x.tobytes() if terms.inline else b"")
        elif terms.inline and terms.shape is not None:
            row = x.tobytes()
        if self._lanes is None:
            words, own_tag = words_of(terms.sizes), tag(number, AGREEMENT)
            agreed = yield from disseminate(self._comm, words, row, own_tag, copies=broadcasts)
        else:
            shown = x if terms.inline else shown
            agreed = yield from self._by_nodes(call, number, shown, result, broadcasts)
        if not agreed.same or call.signature.operation == "refuse":
            text = x if call.signature.shape is None else None
            told = call.signature if text is not None else replace(call.signature, inline=0)
            yield from rendezvous.explain(self._comm, NumberedCall(number, told), text, self._axes)
        rows, root = agreed.rows, None
        if rows is not None and broadcasts:
            root = Signature.unpack(rows[0])
            data = np.frombuffer(rows[0], np.uint8)[len(root.packed) :]
            rows = [_arrays([data], root.shape, root.array_type[1])[0]] * self._size if root.inline else None
        elif rows is not None:
            inline = agreed.alike and agreed.host and terms.inline
            rows = _arrays(rows, x.shape, x.dtype) if inline else None
        return agreed._replace(rows=rows, root=root)

    def _by_nodes(
        self, call: PreparedCall, number: int, shown: np.ndarray | None, result: np.ndarray | None, broadcasts: bool
    ) -> Steps:
        """First the ranks of each node, on their table, then those of each lane."""
        lanes, met, ended, row = self._lanes, None, None, b""
        terms = call.terms
        words = words_of(terms.sizes)
        try:
            expected = call.expected if call.expected is not None else Signatures([terms] * lanes.local.size)
            met = yield from meet(lanes.table, NumberedCall(number, terms), shown, result, expected)
        except RanksEnded as error:
            ended = error
        else:
            call.expected, signatures = met.signatures, met.signatures.by_rank
            words = np.max([words_of(each.sizes) for each in signatures], axis=0)
            inline = [each.inline and each.shape is not None for each in signatures]
            data = [b.tobytes() if i else b"" for b, i in zip(met.blocks, inline, strict=True)]
            if broadcasts:
                pairs = zip(signatures, data, strict=True)
                row = next((each.packed + block for each, block in pairs if each.shape is not None), b"")
            elif len({len(block) for block in data}) == 1 and terms.shape is not None:
                row = b"".join(data)
        agreed = yield from disseminate(lanes.lane, words, row, tag(number, AGREEMENT), copies=broadcasts, ended=ended)
        if agreed.rows is not None and not broadcasts:
            by_rank, width = [b""] * self._size, lanes.local.size
            for node, each in zip(lanes.nodes, agreed.rows, strict=True):
                length = len(each) // width
                for i, rank in enumerate(node):
                    by_rank[rank] = each[i * length : (i + 1) * length]
            agreed = agreed._replace(rows=by_rank)
        return agreed._replace(met=met)


def _arrays(rows: Sequence, shape: Sequence[int], dtype: np.dtype) -> list[np.ndarray]:
    return [np.frombuffer(row, dtype, prod(shape)).reshape(shape) for row in rows]
