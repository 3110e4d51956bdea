"""The arrays of a parameter group on this rank, as the rows of its table say, and the collectives that move them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import Array, Backend, backend_of
from spmd_engine.arrays.memory import fresh_zeros
from spmd_engine.arrays.precision import rounded
from spmd_engine.axes import PIPE
from spmd_engine.comm import Group, Mesh
from spmd_engine.comm.pending import Deferred, Pending, then
from spmd_engine.engine.state.array_table import GRADIENT, MEMORY, SENT, SUMMED, UPDATED, USED, ArrayRow, ArrayTable
from spmd_engine.engine.zero.compression import compression
from spmd_engine.sharding.groups import ParameterGroup

StartSum = Callable[[Array], Pending | Deferred]  #: begins to sum gradients over ranks, in place


class GroupStorage:
    """A parameter group's flat arrays on this rank, and the collectives that move its parts.

    ``own_...`` are what this rank updates, ``whole_...`` what layers use. The ``table`` says which of them are the same
    memory, and which are None between uses.
    """

    def __init__(
        self,
        group: ParameterGroup,
        mesh: Mesh,
        table: ArrayTable,
        backend: Backend,
        compress: str = "none",
        zeros: Callable[[Sequence[int], np.dtype], Array] | None = None,
        sum_over_stages: StartSum | None = None,
    ) -> None:
        """``zeros`` makes an array, of a shape and a dtype, in the place of what does not live in memory.
        ``sum_over_stages`` sums over stages that hold other blocks of the parameters."""
        summed = group.summed
        over, stages = tuple(axis for axis in summed.over if axis not in summed.sharded), None
        computed_on = summed.computed_on or summed.stages
        if len(computed_on) > 1 and sum_over_stages is None:
            over, stages = (PIPE, *over), {PIPE: computed_on}
        is_computed = not computed_on or mesh.coordinates[PIPE] in computed_on
        self._pipe = mesh.group(PIPE) if summed.computed_on else None
        self.group, self.table, self.dtype = group, table, table[USED].dtype
        self._stored = table.stored
        self.owners = mesh.group(summed.sharded) if summed.sharded else None  #: ranks that own its parts
        #: ranks that own the same part, to sum over last
        self.rest = mesh.group(over, among=stages) if over and is_computed else None
        self.compression = compression(compress, group)
        self._rest_comes_last = self.owners is not None or len(computed_on) > 1
        self._sum_over_stages = sum_over_stages
        intervals = group.intervals(self.owners.size) if self.owners else [group.whole]
        self._sizes = [part.stop - part.start for part in intervals]
        self.interval = intervals[self.owners.rank if self.owners else 0]
        # Shared with other ranks of the node, where possible: collectives then read and reduce it in place.
        self.empty = backend.empty if backend.on_device else mesh.empty
        self._maps = mesh.size == 1 and isinstance(self.empty(0, self.dtype), np.ndarray)  # no device, no meta arrays
        self.arrays: dict[str, Any] = {}  #: as they are between uses, by kind; None for those that do not last
        for kind in (USED, SENT, UPDATED, GRADIENT, SUMMED):
            if kind in table:
                self.arrays[kind] = self._allocate(table[kind], zeros)
        self.whole_parameters: Any = self.arrays[USED]
        self.sent_parameters: Any = self.arrays[SENT]
        self.own_parameters: Array = self.arrays[UPDATED if UPDATED in table else SENT]
        self.whole_gradients: Any = self.arrays.get(GRADIENT)
        self.own_gradients: Any = self.arrays.get(SUMMED)
        self._gathering: Any = None  # a Pending, or a Future of what is read
        self._views: dict[str, Array] | None = None
        self._gradient_views: dict[str, Array] | None = None

    def _allocate(self, row: ArrayRow, elsewhere: Callable[[Sequence[int], np.dtype], Array] | None) -> Any:
        if row.alias is not None:
            whole = self.arrays[row.alias]
            return whole if row.axes == self.table[row.alias].axes else whole[self.interval]
        if not row.lasts:
            return None
        size = self._sizes[self.owners.rank] if row.axes and self.owners else self.group.size
        if row.place != MEMORY:
            assert elsewhere is not None
            return elsewhere((size,), row.dtype)
        if self._maps:
            # Gradients that are never computed take no memory.
            return fresh_zeros(size, row.dtype, huge=row.kind not in (GRADIENT, SUMMED))
        array = self.empty(size, row.dtype)
        array[...] = 0
        return array

    @property
    def stored(self) -> slice:
        """The interval of the parameters that this rank stores between uses, and that checkpoints contain."""
        return self.interval if self._stored.axes else self.group.whole

    @property
    def stored_parameters(self) -> Array:
        return self.arrays[self._stored.kind]

    # --- parameters --------------------------------------------------------------------------------------

    def start_fill(self, fill: Callable[[slice, Array], None]) -> Pending | None:
        """Fill the parameters that this rank stores, by ``fill(interval, flat array of it)``.

        Ranks of one node that store the same parameters fill a part each, and begin to gather the other parts. Between
        nodes the transfer would take longer than the computation.
        """
        is_whole = not self._stored.axes and self._stored.place == MEMORY
        replicas = (self.owners or self.rest) if is_whole else None
        if replicas is None or len(set(replicas.comm.hosts)) > 1:
            fill(self.stored, self.stored_parameters)
            return None
        parts = self.group.intervals(replicas.size)
        mine = self.stored_parameters[parts[replicas.rank]]
        fill(parts[replicas.rank], mine)
        sizes = [part.stop - part.start for part in parts]
        return replicas.start_all_gather(mine, sizes=sizes, out=self.stored_parameters, label="parameters")

    def start_gather(self) -> None:
        """Begin to gather the whole parameters, unless they are present or in flight."""
        if self.whole_parameters is None:
            self.whole_parameters = self.empty(self.group.size, self.dtype)
            in_memory = self._stored.place == MEMORY
            self._gathering = self._start_all_gather(self.sent_parameters) if in_memory else self._start_read()

    def _start_read(self) -> Future[Array]:
        own: Any = self.own_parameters
        is_whole = not self.owners and own.dtype == self.dtype
        return own.start_read(self.whole_parameters if is_whole else self.empty(own.size, own.dtype))

    def finish_gather(self) -> None:
        """Wait until the whole parameters are present."""
        if self._gathering is None:
            return
        if self._stored.place == MEMORY:
            self._gathering.wait()
        elif self.owners:
            self._start_all_gather(rounded(self._gathering.result(), self.dtype)).wait()
        elif (own := self._gathering.result()) is not self.whole_parameters:
            rounded(own, self.dtype, self.whole_parameters)
        self._gathering = None

    @property
    def parameters(self) -> dict[str, Array]:
        """The whole parameters by name, while they are present."""
        if self._views is None:
            self._views = self.group.views(self.whole_parameters)
        return self._views

    def release(self) -> None:
        """Free the memory of gathered parameters."""
        self.finish_gather()  # no message may arrive in memory that has another use
        if not self.table[USED].lasts:
            self.whole_parameters = self._views = None

    def start_refresh(self) -> Pending | None:
        """After an update of the own part: begin to send it to the ranks that hold the whole group."""
        sent = self.table[SENT]
        if self.table.rounds and sent.lasts:
            rounded(self.own_parameters, self.dtype, self.sent_parameters)
        return self._start_all_gather(self.sent_parameters) if sent.axes and self.table[USED].lasts else None

    def _start_all_gather(self, own: Array) -> Pending:
        assert self.owners
        return self.owners.start_all_gather(own, sizes=self._sizes, out=self.whole_parameters, label="parameters")

    # --- gradients ---------------------------------------------------------------------------------------

    @property
    def gradients(self) -> dict[str, Array]:
        """The whole gradients by name, to be added to; those that do not last, in new memory (not zeroed) each time."""
        if self.whole_gradients is None:
            self.whole_gradients = self.empty(self.group.size, self.own_gradients.dtype)
        if self._gradient_views is None:
            self._gradient_views = self.group.views(self.whole_gradients)
        return self._gradient_views

    def start_reduce(self) -> Pending | Deferred | None:
        """Begin to sum the whole gradients over the owners, each of which gets its part; None if there are no owners.

        Gradients that last are summed in place; the memory of others is freed.
        """
        if not self.owners:
            return None if self._rest_comes_last else self._start_sum_rest()
        lasts = self.table[GRADIENT].lasts
        out = self.own_gradients if lasts else None
        pending = self.compression.start_reduce_scatter(self.whole_gradients, self.owners, self._sizes, out)
        if not lasts:
            self.whole_gradients = self._gradient_views = None
        return pending

    def start_reduce_rest(self) -> Pending | Deferred | None:
        """Begin to sum the own part over the ranks that own the same part; None if there are none, or it has begun.

        This comes last, and in the order of groups: stages complete their shared groups in different orders.
        """
        pending = self._start_sum_rest() if self._rest_comes_last else None
        if self._sum_over_stages is None:
            return pending
        if pending is not None:
            pending.wait()
        return self._sum_over_stages(self.own_gradients)

    def _start_sum_rest(self) -> Pending | Deferred | None:
        return self.compression.start_all_reduce(self.own_gradients, self.rest) if self.rest else None

    def start_copies(self) -> Sequence[Pending | Deferred]:
        """Begin to send the sum of the own part to the stages that only hold it, or to receive it.

        This comes after all sums, so that all stages do it in the same order.
        """
        summed = self.group.summed
        if not summed.computed_on or self._pipe is None:
            return ()
        return start_copies(self._pipe, self.own_gradients, summed.computed_on[0], summed.stages, "gradients")


def wait_for_all(started: Iterable[Pending | Deferred | None]) -> None:
    """Wait for operations that have all begun; None: there was nothing to begin."""
    for pending in list(started):
        if pending is not None:
            pending.wait()


def start_copies(pipe: Group, x: Array, source: int, stages: Sequence[int], label: str) -> Sequence[Pending | Deferred]:
    """Begin to copy ``x`` of stage ``source`` to that of the other ``stages``, of which this rank's is one."""
    if pipe.rank == source:
        return [pipe.start_send(stage, x, label=label) for stage in stages if stage != source]

    def keep(received: Array) -> None:
        x[...] = received

    return [then(pipe.start_receive(source, like=backend_of(x), label=label), keep)]
