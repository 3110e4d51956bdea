"""Collectives of a group of ranks, whatever the transport.

Every call takes and returns local arrays, blocks as the method and ``start_...`` as the same thing begun now and
finished by ``.wait()``, with the same arguments. Input may be of any dtype NumPy knows, not contiguous, uneven, or
empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from types import SimpleNamespace
from typing import Any, Concatenate, ParamSpec

import numpy as np

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.comm.agreement.call_agreement import bytes_of
from spmd_engine.comm.pending import Pending
from spmd_engine.comm.point_to_point import PointToPoint
from spmd_engine.comm.staging import ready

_Arguments = ParamSpec("_Arguments")


def started(call: Callable[Concatenate[Any, _Arguments], Any]) -> Callable[Concatenate[Any, _Arguments], Pending]:
    """The ``start_...`` of a collective: its own text, where ``self._call`` begins the call that it describes."""

    @wraps(call)
    def start(group: Group, *args: _Arguments.args, **options: _Arguments.kwargs) -> Pending:
        return call(group._starting, *args, **options)

    return start


class Group(PointToPoint):
    """Ranks, and what passes between them.

    Sums and their kin are made once and in the same order, so they are equal on all ranks. That is the order of ranks;
    but large arrays of a group that has several ranks on each of several nodes are first combined within nodes, in
    rank order, and then node by node, in the order of the nodes' first ranks (see ``transports.hierarchical``); and
    those of many nodes in an order of the MPI library's (see ``Tuning``).
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        #: what the text of a collective asks of a group, to be begun
        self._starting = SimpleNamespace(_call=self._begin, comm=self.comm, rank=self.rank, size=self.size)

    def barrier(self, label: str = "") -> None:
        """Return once every rank of the group has come here."""
        return self._call("barrier", None, label=label)

    start_barrier = started(barrier)

    def leave(self, reason: str = "") -> None:
        """Say that this rank's program ends. If another rank is in a collective, both get a MismatchError.

        With a ``reason``, an error that this rank reports, the others get RankAborted instead.
        """
        if self.size > 1:
            text = bytes_of(reason)
            if not reason:
                self.comm.announce_end()  # for those who wait in other groups
            last = self._start(self._say("leave", ("leave", self.axes, ""), text), text)
            last.until_the_end = True
            last.wait()

    def broadcast(self, x: Array | None, root: int = 0, *, label: str = "") -> Array:
        """The root's ``x`` on every rank; what the others give is not looked at, and may be None."""
        mine, home = x if self.rank == root else None, None
        if x is not None and type(x) is not np.ndarray:
            home = backend_of(x)
            mine = ready(self.comm, mine)[0] if mine is not None and self.size > 1 else mine
        return self._call("broadcast", mine, (root,), home, label)

    start_broadcast = started(broadcast)

    def all_gather(
        self,
        x: Array,
        axis: int = 0,
        *,
        sizes: Sequence[int] | None = None,
        out: Array | None = None,
        label: str = "",
    ) -> Array:
        """Everyone's ``x`` joined along ``axis`` in rank order. Shards may differ along ``axis`` and be empty.

        ``sizes`` (each rank's length along ``axis``) spares ranks of several nodes the exchange of lengths. ``out``,
        contiguous, with axis 0, receives the result; ``x`` may be this rank's part of it.
        """
        return self._call("all_gather", x, (axis, ints(sizes)), out, label)

    start_all_gather = started(all_gather)

    def all_reduce(self, x: Array, op: str = "sum", *, out: Array | None = None, label: str = "") -> Array:
        """The sum, mean, max, min or prod over ranks, element by element, in a fixed order: equal on all ranks.

        ``out`` (contiguous, may be ``x`` itself) receives the result. bool is counted as int64; the mean of
        integers is float64; float16 and bfloat16 are accumulated in float32.
        """
        return self._call("all_reduce", x, (op,), out, label)

    start_all_reduce = started(all_reduce)

    def reduce_scatter(
        self,
        x: Array,
        axis: int = 0,
        op: str = "sum",
        *,
        sizes: Sequence[int] | None = None,
        out: Array | None = None,
        label: str = "",
    ) -> Array:
        """This rank's part, along ``axis``, of the reduction over ranks.

        The parts are even, the first ranks getting one more where they cannot be, or as ``sizes`` says. ``out``
        (contiguous; may be this rank's part of ``x``) receives the result.
        """
        return self._call("reduce_scatter", x, (axis, op, ints(sizes)), out, label)

    start_reduce_scatter = started(reduce_scatter)

    def all_to_all(
        self,
        x: Array,
        axis: int = 0,
        concat_axis: int | None = None,
        *,
        splits: Sequence[int] | None = None,
        received: Sequence[int] | None = None,
        out: Array | None = None,
        label: str = "",
    ) -> Any:
        """Part r of ``x`` along ``axis`` goes to rank r; what comes is joined along ``concat_axis`` (``axis``).

        Parts are even. With ``splits``, the length of each, of any sum, 0 included and different on every rank, it
        returns (y, received): also how long along ``concat_axis`` that is which came from each rank, the splits of the
        way back. Who knows these says them, and ranks of several nodes, if all do, need not ask: they must be right.
        ``out``, contiguous, with ``concat_axis`` 0, receives y.
        """
        return self._call("all_to_all", x, (axis, concat_axis, ints(splits), ints(received)), out, label)

    start_all_to_all = started(all_to_all)


def ints(sizes: Sequence[int] | None) -> tuple[int, ...] | None:
    """Sizes as a signature carries them."""
    return None if sizes is None else tuple(map(int, sizes))
