"""Collectives of a group of ranks, whatever the transport.

Every call takes and returns local arrays, blocks as the method and ``start_...`` as the same thing begun now
and finished by ``.wait()``. Input may be of any dtype NumPy knows, not contiguous, uneven, or empty.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spmd_engine.arrays.backend import CPU, Array, Backend, backend_of
from spmd_engine.comm import dtypes
from spmd_engine.comm.door import Plan
from spmd_engine.comm.exchanges import Exchanges
from spmd_engine.comm.header import Header
from spmd_engine.comm.lending import fill
from spmd_engine.comm.meeting import bytes_of
from spmd_engine.comm.pending import Pending, Steps
from spmd_engine.comm.spans import span
from spmd_engine.errors import UsageError


class Group(Exchanges):
    """All collectives, besides the messages between two ranks: barrier, leave and broadcast are here."""

    def barrier(self) -> None:
        """Return once every rank of the group has come here."""
        plan = self._plans.get(("barrier", ""))
        if plan is not None and plan.at_once:
            self._at_once(plan, None, None)
        else:
            self.start_barrier().wait()

    def start_barrier(self, label: str = "") -> Pending:
        if self.size == 1:
            return Pending.completed(None)
        key = "barrier", label
        plan = self._plans.get(key)
        if plan is None:
            where = "barrier", self.axes, label
            steps = self._between.meet_only if self._between else self._meet_only
            plan = self._keep(key, Plan(Header("barrier"), where, steps, lambda *_: None))
        return self._begin(plan, None)

    def leave(self, reason: str = "") -> None:
        """Say that this rank's program ends. If another rank is in a collective, both get a MismatchError.

        With a ``reason``, an error that this rank reports, the others get RankAborted instead.
        """
        if self.size > 1:
            text = bytes_of(reason)
            if not reason:
                self.comm.announce_end()  # for those who wait in other groups
            meeting = self._begin(self._say("leave", ("leave", self.axes, ""), text), text)
            meeting.until_the_end = True
            meeting.wait()
            if not reason:
                self.comm.announce_end()  # to those who have asked meanwhile

    def broadcast(self, x: Array | None, root: int = 0, *, label: str = "") -> Array:
        """The root's ``x`` on every rank; what the others give is not looked at, and may be None."""
        if x is None or type(x) is np.ndarray:
            mine = x if self.rank == root else None
            plan = self._plans.get(_broadcast_key(mine, root, label))
            if plan is not None and plan.at_once:
                return self._at_once(plan, mine, CPU)
        return self.start_broadcast(x, root, label=label).wait()

    def start_broadcast(self, x: Array | None, root: int = 0, *, label: str = "") -> Pending:
        try:
            if not 0 <= root < self.size:
                raise UsageError(f"broadcast over {self.axes!r}: root {root} is not one of {self.size} ranks")
            if self.rank == root and x is None:
                raise UsageError(f"broadcast over {self.axes!r}: the root must give an array")
            if self.size == 1:
                dtypes.describe(x.dtype)  # what several ranks would refuse
                return Pending.completed(np.array(x, copy=True) if isinstance(x, np.ndarray) else x.copy())
            mine = self._ready(x)[0] if self.rank == root else None
            key = _broadcast_key(mine, root, label)
            plan = self._plans.get(key) or self._keep(key, self._plan_broadcast(mine, root, label), mine)
        except UsageError as error:
            return self._refuse("broadcast", label, error)
        return self._begin(plan, mine, backend_of(x) if x is not None else CPU)

    def _plan_broadcast(self, mine: Array | None, root: int, label: str) -> Plan:
        def sent(result: Array) -> int:  # the root hands out the parts, then everyone passes its part on
            own = span(result.size, self.size, self.rank)
            part = (own.stop - own.start) * result.itemsize
            return result.nbytes - part + part * (self.size - 1) if self.rank == root else part * (self.size - 2)

        header = self._header("broadcast", mine, root=root)
        payload = mine.nbytes if mine is not None else 0
        dtype = mine.dtype if mine is not None else None
        where = "broadcast", self.axes, label
        steps = self._between.broadcast if self._between else self._broadcast
        return Plan(header, where, steps, _received, payload=payload, sent=sent, dtype=dtype)

    def _broadcast(self, plan: Plan, number: int, mine: Array | None, home: Backend) -> Steps:
        root = plan.header.root
        meeting = yield from self._meet(plan, number, mine, lend=True)
        block = meeting.blocks[root]
        where = home if self.comm.device_aware and block is None else CPU
        data = mine.copy() if mine is not None else where.empty(*meeting.headers[root].array_type)
        if block is None:
            yield from self._messages.broadcast(number, data.reshape(-1), root)
        elif mine is None:
            fill(data, block)
        if meeting.exposed:
            yield from meeting.end()
        return home.asarray(data)


def _broadcast_key(mine: Array | None, root: int, label: str) -> tuple:
    if mine is None:
        return "broadcast", None, root, label
    return "broadcast", type(mine), mine.dtype, mine.shape, root, label


def _received(plan: Plan, _: np.ndarray | None, blocks: Sequence[np.ndarray | None], home: Backend) -> np.ndarray:
    return blocks[plan.header.root].copy()
