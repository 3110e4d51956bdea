"""The storage of a parameter group on this rank: whole, or sharded as a ZeRO stage specifies.

After Rajbhandari et al., "ZeRO" (2020). Each stage shards one more of these, into an interval of the group's flat
array for each of the ranks that would otherwise hold replicas:

    stage 1   optimizer state
    stage 2   and gradients
    stage 3   and parameters, which are gathered just before use
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from operator import eq, ne
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import Array, Backend, backend_of
from spmd_engine.arrays.memory import fresh_zeros
from spmd_engine.arrays.precision import accumulated_in, is_half, rounded
from spmd_engine.axes import PIPE, MeshPosition
from spmd_engine.comm.blocks import reduce_into
from spmd_engine.comm.group import Group
from spmd_engine.comm.mesh import Mesh
from spmd_engine.comm.pending import Deferred, Pending, then
from spmd_engine.engine.zero.compression import compression
from spmd_engine.sharding.groups import ParameterGroup
from spmd_engine.sharding.placement import ArrayPlacement, Placement
from spmd_engine.sharding.rectangles import Rectangle
from spmd_engine.sharding.routes import Blocks
from spmd_engine.sharding.transfer import plan_transfer


class GroupStorage:
    """A parameter group's flat arrays on this rank, and the collectives that move its parts.

    ``own_...`` are what this rank updates; ``whole_...`` what layers use: the same memory, temporary memory (None
    while it is absent), or, for 16-bit floats, a copy. Then own parameters are masters in the dtype of sums, which
    gradients have, too; ``publish`` rounds them to what layers use. A group that is not ``trained`` has neither masters
    nor, if sharded, gradients.
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
        offloaded: Callable[[int], Array] | None = None,
        uneven: SumOverStages | None = None,
    ) -> None:
        """``offloaded`` makes an array of a size for parameters that are offloaded, unless others hold parts of them.
        ``uneven`` sums over the stages that hold other blocks of them."""
        summed = group.summed
        over, stages = tuple(axis for axis in summed.over if axis not in summed.cut), None
        self._uneven = uneven
        computed_on = summed.computed_on or summed.stages
        if len(computed_on) > 1 and uneven is None:
            over, stages = (PIPE, *over), {PIPE: computed_on}
        is_computed = not computed_on or mesh.coordinates[PIPE] in computed_on
        self._pipe = mesh.group(PIPE) if summed.computed_on else None
        self.group, self.dtype = group, dtype
        wide = accumulated_in(dtype) if trained else dtype
        self.has_masters = wide != dtype  #: whether the own parameters are in another dtype than the layers use
        self.owners = mesh.group(summed.cut) if summed.cut else None  #: ranks that own its parts
        #: ranks that own the same part, to sum over last
        self.rest = mesh.group(over, among=stages) if over and is_computed else None
        self.zero = zero if self.owners else 0
        self.compression = compression(compress, group)
        intervals = group.intervals(self.owners.size) if self.owners else [group.whole]
        self._sizes = [part.stop - part.start for part in intervals]
        self.interval = intervals[self.owners.rank if self.owners else 0]
        own_size = self.interval.stop - self.interval.start
        self.is_offloaded = offloaded is not None and (self.zero == 3 or not self.owners)
        #: whether the whole parameters are present only while they are used
        self.is_released = self.zero == 3 or self.is_offloaded
        # Shared with other ranks of the node, where possible: collectives then read and reduce it in place.
        self.empty = backend.empty if backend.on_device else mesh.empty

        def zeros(size: int, dtype: np.dtype, *, used: bool = True) -> Array:
            on_host = isinstance(self.empty(0, dtype), np.ndarray)  # neither on a device nor a meta array
            if mesh.size == 1 and on_host:
                # Unused arrays, such as gradients without training, take no memory.
                return fresh_zeros(size, dtype, huge=used)
            array = self.empty(size, dtype)
            array[...] = 0
            return array

        #: arrays; None while they are absent
        self.whole_parameters: Any = None if self.is_released else zeros(group.size, dtype)
        self.whole_gradients: Any = zeros(group.size, wide, used=False) if self.zero < 2 else None
        part = self.interval
        #: this rank's part of what layers use, which is gathered; None if it is offloaded
        self.sent_parameters: Any = None
        if not self.is_offloaded:
            self.sent_parameters = zeros(own_size, dtype) if self.zero == 3 else self.whole_parameters[part]
        if self.is_offloaded and offloaded is not None:
            self.own_parameters: Array = offloaded(own_size)
        else:
            self.own_parameters = zeros(own_size, wide) if self.has_masters else self.sent_parameters
        self.own_gradients: Array = (
            zeros(own_size if trained else 0, wide) if self.zero >= 2 else self.whole_gradients[part]
        )
        self._gathering: Any = None  # a Pending, or a Future of what is offloaded
        self._views: dict[str, Array] | None = None
        self._gradient_views: dict[str, Array] | None = None

    @property
    def is_apart(self) -> bool:
        """Whether the own parameters have memory of their own, apart from the whole ones."""
        return self.is_released or self.has_masters

    @property
    def stored(self) -> slice:
        """The interval of the parameters that this rank stores between uses, and that checkpoints contain."""
        return self.interval if self.is_apart else self.group.whole

    @property
    def stored_parameters(self) -> Array:
        return self.own_parameters if self.is_apart else self.whole_parameters

    # --- parameters --------------------------------------------------------------------------------------

    def start_fill(self, fill: Callable[[slice, Array], None]) -> Pending | None:
        """Fill the parameters that this rank stores, by ``fill(interval, flat array of it)``.

        Ranks of one node that store the same parameters fill a part each, and begin to gather the other parts. Between
        nodes the transfer would take longer than the computation.
        """
        replicas = None if self.is_released or self.has_masters and self.zero else self.owners or self.rest
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
            self._gathering = self._start_read() if self.is_offloaded else self._start_all_gather()

    def _start_read(self) -> Future[Array]:
        own, is_whole = self.own_parameters, not self.owners and not self.has_masters
        return own.start_read(self.whole_parameters if is_whole else self.empty(own.size, own.dtype))

    def finish_gather(self) -> None:
        """Wait until the whole parameters are present."""
        if self._gathering is not None:
            own = self._gathering.result() if self.is_offloaded else self._gathering.wait()
            self._gathering = None
            if self.is_offloaded and self.owners:
                self._start_all_gather(rounded(own, self.dtype)).wait()
            elif self.is_offloaded and self.has_masters:
                rounded(own, self.dtype, self.whole_parameters)

    @property
    def parameters(self) -> dict[str, Array]:
        """The whole parameters by name, while they are present."""
        if self._views is None:
            self._views = self.group.views(self.whole_parameters)
        return self._views

    def release(self) -> None:
        """Free the memory of gathered parameters."""
        self.finish_gather()  # no message may arrive in memory that has another use
        if self.is_released:
            self.whole_parameters = self._views = None

    def start_refresh(self) -> Pending | None:
        """After an update of the own part: begin to send it to the ranks that hold the whole group."""
        if self.is_released:
            self.release()
        self.publish()
        return self._start_all_gather() if self.zero in (1, 2) else None

    def publish(self) -> None:
        """Round masters to this rank's part of what layers use."""
        if self.has_masters and not self.is_offloaded:
            rounded(self.own_parameters, self.dtype, self.sent_parameters)

    def _start_all_gather(self, own: Array | None = None) -> Pending:
        assert self.owners
        return self.owners.start_all_gather(
            self.sent_parameters if own is None else own,
            sizes=self._sizes,
            out=self.whole_parameters,
            label="parameters",
        )

    # --- gradients ---------------------------------------------------------------------------------------

    @property
    def gradients(self) -> dict[str, Array]:
        """The whole gradients by name, to be added to; from stage 2 on, in new memory (not zeroed) each time."""
        if self.whole_gradients is None:
            self.whole_gradients = self.empty(self.group.size, self.own_gradients.dtype)
        if self._gradient_views is None:
            self._gradient_views = self.group.views(self.whole_gradients)
        return self._gradient_views

    def start_reduce(self) -> Pending | Deferred | None:
        """Begin to sum the whole gradients over the owners, each of which gets its part; None if there are no owners.

        Before stage 2 the sum is in place. From stage 2 on, the memory of the whole gradients is freed.
        """
        if not self.owners:
            return None if self._summed_over_stages else self._start_all_reduce()
        out = self.own_gradients if self.zero == 1 else None
        pending = self.compression.start_reduce_scatter(self.whole_gradients, self.owners, self._sizes, out)
        if self.zero >= 2:
            self.whole_gradients = self._gradient_views = None
        return pending

    def start_reduce_rest(self) -> Pending | Deferred | None:
        """Begin to sum the own part over the ranks that own the same part; None if there are none, or it has begun.

        This comes last, and in the order of groups: stages complete their shared groups in different orders.
        """
        pending = self._start_all_reduce() if self.owners or self._summed_over_stages else None
        if self._uneven is None:
            return pending
        if pending:
            pending.wait()
        return self._uneven.start(self.own_gradients)

    def start_copies(self) -> Sequence[Pending | Deferred]:
        """Begin to send the sum of the own part to the stages that only hold it, or to receive it.

        This comes after all sums, so that all stages do it in the same order.
        """
        summed = self.group.summed
        if not summed.computed_on or self._pipe is None:
            return ()
        return start_copies(self._pipe, self.own_gradients, summed.computed_on[0], summed.stages, "gradients")

    def _start_all_reduce(self) -> Pending | Deferred | None:
        return self.compression.start_all_reduce(self.own_gradients, self.rest) if self.rest else None

    @property
    def _summed_over_stages(self) -> bool:
        return len(self.group.summed.computed_on or self.group.summed.stages) > 1


class SumOverStages:
    """Sums the gradient of a tied parameter over uneven stages, whose ranks update other parts of it.

    A rank receives from each other stage the elements that it updates, once, and adds in the order of the stages, so
    that copies stay equal. ``owned`` is the part of the parameter, of this whole ``shape``, that a rank updates.
    """

    def __init__(
        self,
        mesh: Mesh,
        stages: tuple[int, ...],
        shape: tuple[int, ...],
        dtype: np.dtype,
        owned: Callable[[MeshPosition], Rectangle],
    ) -> None:
        self._group, self._stages, self._stage = mesh.group(among={PIPE: stages}), stages, mesh.coordinates[PIPE]
        places = [place for place in mesh.peers(None) if place.coordinates[PIPE] in stages]
        parts, self._shape = [(place.coordinates[PIPE], owned(place)) for place in places], owned(mesh).shape

        def placement(has: Callable[[int, int], bool]) -> Placement:
            held = {str(term): [(part,) if has(stage, term) else () for stage, part in parts] for term in stages}
            return Placement({term: ArrayPlacement.of_rectangles(shape, dtype, on) for term, on in held.items()})

        self._plan = plan_transfer(placement(eq), placement(ne), nodes=mesh.nodes_at(places))

    def start(self, gradient: Array) -> Deferred:
        """Begin to sum ``gradient``, this rank's part as a flat array, in place."""
        own = gradient.reshape(self._shape)
        terms = self._plan.start(self._group, {str(self._stage): [own]}, label="gradients")

        def add(received: Blocks) -> None:
            parts = [own if stage == self._stage else received[str(stage)][0] for stage in self._stages]
            reduce_into(own, parts, "sum")

        return Deferred(terms, add)


def bytes_held(whole: Any, owned: Any, zero: int, dtype: np.dtype) -> tuple[Any, Any, Any]:
    """Bytes of parameters, of gradients and of each kind of optimizer state, between steps.

    Of ``whole`` elements, numbers or arrays of them, ``owned`` are those of this rank, if the ZeRO stage shards them.
    """
    size, wide = dtype.itemsize, accumulated_in(dtype).itemsize
    parameters, gradients, state = (owned if zero >= stage else whole for stage in (3, 2, 1))
    masters = state * wide if is_half(dtype) else 0
    return parameters * size + masters, gradients * wide, state * wide


def start_copies(pipe: Group, x: Array, source: int, stages: Sequence[int], label: str) -> Sequence[Pending | Deferred]:
    """Begin to copy ``x`` of stage ``source`` to that of the other ``stages``, of which this rank's is one."""
    if pipe.rank == source:
        return [pipe.start_send(stage, x, label=label) for stage in stages if stage != source]

    def keep(received: Array) -> None:
        x[...] = received

    return [then(pipe.start_receive(source, like=backend_of(x), label=label), keep)]
