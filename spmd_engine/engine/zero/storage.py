"""Where a parameter group lives on this rank: whole, or in parts as the stages of ZeRO have it.

After Rajbhandari et al., "ZeRO" (2020). Every stage has one more of these in parts, an interval of the group's
flat array a rank, over the ranks that would otherwise hold copies:

    stage 1   optimizer state
    stage 2   and gradients
    stage 3   and parameters, which are gathered just before use
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import Array, Backend
from spmd_engine.arrays.memory import fresh_zeros
from spmd_engine.comm.mesh import Mesh
from spmd_engine.comm.pending import Pending
from spmd_engine.engine.zero.compression import compression
from spmd_engine.errors import UsageError
from spmd_engine.layers.deferred import Deferred
from spmd_engine.sharding.groups import ParameterGroup


class GroupStorage:
    """A parameter group's flat arrays on this rank, and the collectives that move its parts.

    ``own_...`` are what this rank updates; ``whole_...`` what layers use: the same memory, or memory that is here
    only for a while (None otherwise). What is not ``trained``, and in parts, has no gradients.
    """

    def __init__(
        self,
        group: ParameterGroup,
        mesh: Mesh,
        zero: int,
        dtype: np.dtype,
        backend: Backend,
        compress: str = "none",
        trained: bool = True,
    ) -> None:
        summed = group.summed
        over, stages = tuple(axis for axis in summed.over if axis not in summed.cut), None
        if len(summed.stages) > 1:
            over, stages = ("pipe", *over), {"pipe": summed.stages}
        self.group, self.dtype = group, dtype
        self.owners = mesh.group(summed.cut) if summed.cut else None  #: ranks that own parts of it
        self.rest = mesh.group(over, among=stages) if over else None  #: ranks that own the same part, to sum over last
        self.zero = zero if self.owners else 0
        self.compression = compression(compress, group)
        if self.zero and not self.compression.in_parts:
            raise UsageError(f"compression {compress!r} needs whole gradients on every rank, not parts (ZeRO)")
        intervals = group.intervals(self.owners.size) if self.owners else [group.whole]
        self._sizes = [part.stop - part.start for part in intervals]
        self.interval = intervals[self.owners.rank if self.owners else 0]
        own = self.interval.stop - self.interval.start
        # Where neighbours of the node reach it: collectives then read and reduce it in place.
        self._empty = backend.empty if backend.on_device else mesh.empty

        def zeros(size: int, dtype: np.dtype, *, used: bool = True) -> Array:
            here = isinstance(self._empty(0, dtype), np.ndarray)  # neither on a device nor a shape alone
            if mesh.size == 1 and here:
                return fresh_zeros(
                    size, dtype, huge=used
                )  # unused, such as gradients without training, they take no memory
            array = self._empty(size, dtype)
            array[...] = 0
            return array

        #: arrays; None while they are not here
        self.whole_parameters: Any = zeros(group.size, dtype) if self.zero < 3 else None
        self.whole_gradients: Any = zeros(group.size, dtype, used=False) if self.zero < 2 else None
        part = self.interval
        self.own_parameters: Array = zeros(own, dtype) if self.zero == 3 else self.whole_parameters[part]
        self.own_gradients: Array = (
            zeros(own if trained else 0, dtype) if self.zero >= 2 else self.whole_gradients[part]
        )
        self._gathering: Pending | None = None
        self._views: dict[str, Array] | None = None
        self._gradient_views: dict[str, Array] | None = None

    @property
    def stored(self) -> slice:
        """The interval of the parameters that stays here between uses."""
        return self.interval if self.zero == 3 else self.group.whole

    @property
    def stored_parameters(self) -> Array:
        return self.own_parameters if self.zero == 3 else self.whole_parameters

    # --- parameters --------------------------------------------------------------------------------------

    def start_fill(self, fill: Callable[[slice, Array], None]) -> Pending | None:
        """Fill the parameters that are stored here, by ``fill(interval, flat array of it)``.

        Ranks of one node that store the same ones fill a part each, and begin to gather the others'. Between nodes
        they would travel for longer than it takes to compute them.
        """
        alike = None if self.zero == 3 else self.owners or self.rest
        if alike is None or len(set(alike.comm.hosts)) > 1:
            fill(self.stored, self.stored_parameters)
            return None
        parts = self.group.intervals(alike.size)
        mine = self.whole_parameters[parts[alike.rank]]
        fill(parts[alike.rank], mine)
        sizes = [part.stop - part.start for part in parts]
        return alike.start_all_gather(mine, sizes=sizes, out=self.whole_parameters, label="parameters")

    def start_gather(self) -> None:
        """Begin to gather the whole parameters, if they are not here or on their way."""
        if self.whole_parameters is None:
            self.whole_parameters = self._empty(self.group.size, self.dtype)
            self._gathering = self._start_all_gather()

    def finish_gather(self) -> None:
        """The whole parameters are here once this returns."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    @property
    def parameters(self) -> dict[str, Array]:
        """The whole parameters by name, while they are here."""
        if self._views is None:
            self._views = self.group.views(self.whole_parameters)
        return self._views

    def release(self) -> None:
        """Give the memory of gathered parameters back."""
        self.finish_gather()  # no message may arrive in memory that has another use
        if self.zero == 3:
            self.whole_parameters = self._views = None

    def start_refresh(self) -> Pending | None:
        """After an update of the own part: begin to send it to the ranks that hold the whole."""
        if self.zero == 3:
            self.release()
        return self._start_all_gather() if self.zero in (1, 2) else None

    def _start_all_gather(self) -> Pending:
        assert self.owners
        return self.owners.start_all_gather(
            self.own_parameters, sizes=self._sizes, out=self.whole_parameters, label="parameters"
        )

    # --- gradients ---------------------------------------------------------------------------------------

    @property
    def gradients(self) -> dict[str, Array]:
        """The whole gradients by name, to be added to; from stage 2 on, in new memory (not zeroed) each time."""
        if self.whole_gradients is None:
            self.whole_gradients = self._empty(self.group.size, self.dtype)
        if self._gradient_views is None:
            self._gradient_views = self.group.views(self.whole_gradients)
        return self._gradient_views

    def start_reduce(self) -> Pending | Deferred | None:
        """Begin to sum the whole gradients over the owners, each of which gets its part; None: there are none.

        Before stage 2 that happens in place. From stage 2 on the whole gradients' memory is given away with it.
        """
        if not self.owners:
            return None if self._shared_by_stages else self._start_all_reduce()
        out = self.own_gradients if self.zero == 1 else None
        pending = self.compression.start_reduce_scatter(self.whole_gradients, self.owners, self._sizes, out)
        if self.zero >= 2:
            self.whole_gradients = self._gradient_views = None
        return pending

    def start_reduce_rest(self) -> Pending | Deferred | None:
        """Begin to sum the own part over the ranks that own the same one; None: there are none, or it has begun.

        Last, and in the order of groups: stages finish with what they share in different orders.
        """
        return self._start_all_reduce() if self.owners or self._shared_by_stages else None

    def _start_all_reduce(self) -> Pending | Deferred | None:
        return self.compression.start_all_reduce(self.own_gradients, self.rest) if self.rest else None

    @property
    def _shared_by_stages(self) -> bool:
        return len(self.group.summed.stages) > 1
