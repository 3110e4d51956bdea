"""Transfers between pipeline stages with different numbers of ranks: ``--mesh pipe=2,model=1|2``.

Inside a stage nothing differs from a mesh with its sizes. Activations and their gradients cross a boundary by planned
transfers: every rank receives, once, the part that it needs, the whole or, under sequence parallelism, its positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import eq, itemgetter, ne
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from spmd_engine.arrays.backend import Array, Backend, backend_of
from spmd_engine.arrays.precision import accumulated_in
from spmd_engine.axes import PIPE, MeshPosition, uneven_axes
from spmd_engine.comm import Mesh
from spmd_engine.comm.blocks import reduce_into
from spmd_engine.comm.notation import Spec
from spmd_engine.comm.pending import Deferred, Several
from spmd_engine.engine.pipeline import PipelineNeighbours
from spmd_engine.engine.state.assignment import ZeroConfig, owned_rectangle
from spmd_engine.layers import ForwardContext, Layer, Parameter
from spmd_engine.requirements import Case, requirement
from spmd_engine.sharding import ArrayPlacement, Layout, Placement, Rectangle, plan_transfer
from spmd_engine.sharding.groups import ParameterGroup
from spmd_engine.sharding.routes import Blocks

if TYPE_CHECKING:
    from spmd_engine.engine.helpers import PartedPasses


class StageMessage(NamedTuple):
    """A message of a transfer between two stages."""

    sender: int  #: its rank in the group of both stages
    receiver: int
    part: slice  #: along the dim that is split, in what the sender has; the whole if none is


class UnevenNeighbours(PipelineNeighbours):
    """Stages with different sizes along some axes: a result goes from all ranks of a stage to all of another.

    Ranks of the two differ along ``pipe`` and the uneven axes; on other axes their coordinates are equal.
    """

    def __init__(self, mesh: Mesh, passes: PartedPasses, backend: Backend, layout: Layout) -> None:
        self._axes = uneven_axes(mesh.all_axes)
        over = PIPE, *self._axes
        super().__init__(mesh.group(over), passes.places, backend)
        self.stages, self.stage = mesh.axes[PIPE], mesh.coordinates[PIPE]
        self._places = mesh.peers(over)
        self._nodes = mesh.nodes_at(self._places)
        layers = passes.model.layers
        self._splits = [self._split(layers[: max(1, part.layers.stop)], layout) for part in passes.parts]
        self._links: dict[tuple[int, int, int | None], list[StageMessage]] = {}

    def _split(self, layers: Sequence[tuple[str, Layer]], layout: Layout) -> tuple[int, int | None] | None:
        """The dim of the last layer's output that the uneven axes shard, and its length, None for positions; None if
        none."""
        outputs = layers[-1][1].outputs
        for dim, (letter, axes) in enumerate(layout.spec(outputs.dims, outputs.where)):
            if letter not in outputs.whole and set(axes) & set(self._axes):
                return dim, None if letter == "s" else _length(layers, letter)
        return None

    def start_send(self, x: Array, m: int, chunk: int, to: int, ctx: ForwardContext | None = None) -> Any:
        dim, links = self._transfer(chunk, to, ctx)
        channel, label = self._channel(m, chunk, to), "input" if to > chunk else "gradient"
        return Several(
            self._pipe.start_send(link.receiver, x[(slice(None),) * dim + (link.part,)], channel=channel, label=label)
            for link in links
            if link.sender == self._pipe.rank
        )

    def start_receive(self, m: int, chunk: int, source: int, ctx: ForwardContext | None = None) -> Any:
        dim, links = self._transfer(source, chunk, ctx)
        channel, label = self._channel(m, source, chunk), "input" if chunk > source else "gradient"
        pieces = Several(
            self._pipe.start_receive(link.sender, like=self._backend, channel=channel, label=label)
            for link in links
            if link.receiver == self._pipe.rank
        )
        return Deferred(pieces, partial(concatenated, dim=dim))

    def _transfer(self, source: int, to: int, ctx: ForwardContext | None) -> tuple[int, list[StageMessage]]:
        """The dim that is split, and the messages, in the order of their parts, from chunk ``source`` to ``to``."""
        split = self._splits[min(source, to)]  # a gradient is sharded as what it is the gradient of
        dim, length = split or (0, None)
        if split and length is None and ctx is not None:
            length = ctx.positions.shape[-1]
        stages = self.places[source], self.places[to]
        if (*stages, length) not in self._links:
            self._links[*stages, length] = self._plan(*stages, length)
        return dim, self._links[*stages, length]

    def _plan(self, source: int, to: int, length: int | None) -> list[StageMessage]:
        """The messages for a dim of this ``length``; None: every rank of the stages has the whole."""
        spec, shape = Spec((("x", self._axes if length is not None else ()),)), (1 if length is None else length,)
        held, wanted = (
            ArrayPlacement.of_spec(spec, shape, np.dtype(np.int8), self._places, among={PIPE: (stage,)})
            for stage in (source, to)
        )
        plan = plan_transfer(Placement({"x": held}), Placement({"x": wanted}), nodes=self._nodes)
        links = []
        for route in (route for routes in plan.routes.values() for route in routes):
            ((_, part),), (first,) = route.parts, held.held[route.sender][0].start
            whole = slice(part.start[0] - first, part.stop[0] - first) if length is not None else slice(None)
            links += [(part.start, StageMessage(route.sender, receiver, whole)) for receiver in route.receivers]
        links = [link for _, link in sorted(links, key=itemgetter(0))]
        # A rank without positions gets an array of no elements, for its shape and dtype.
        lacking = {rank for rank, blocks in enumerate(wanted.held) if blocks} - {link.receiver for link in links}
        sender = next(rank for rank, blocks in enumerate(held.held) if blocks)
        return links + [StageMessage(sender, rank, slice(0, 0)) for rank in sorted(lacking)]


def _length(layers: Sequence[tuple[str, Layer]], letter: str) -> int:
    """That of ``letter`` in the last layer's output; layers without parameters, as ReLU, leave it to earlier ones."""
    return next(
        layer.sizes[letter] for _, layer in reversed(layers) if letter in layer.sizes and letter in layer.outputs.dims
    )


def concatenated(pieces: Sequence[Array], dim: int = 0) -> Array:
    """The pieces along a dim; a single one is no copy."""
    return pieces[0] if len(pieces) == 1 else backend_of(pieces[0]).xp.concatenate(pieces, axis=dim)


def sum_over_stages(
    group: ParameterGroup,
    described: Mapping[str, tuple[Parameter, tuple[int, ...]]],
    mesh: Mesh,
    layout: Layout,
    storage: ZeroConfig,
    dtype: np.dtype,
) -> Callable[[Array], Deferred] | None:
    """What begins to sum this rank's part of a gradient, in place, over the uneven stages that share its parameter,
    whose ranks update other parts of it; None for a group of any other parameters.

    A rank receives from each other stage the elements that it updates, once, and adds in the order of the stages, so
    that copies stay equal.
    """
    stages, here = group.summed.stages, mesh.coordinates.get(PIPE, 0)
    if len(stages) < 2 or not uneven_axes(mesh.all_axes):
        return None
    parameter, shape = described[group.members[0].name]  # the only one: see ``make_groups``
    places = [place for place in mesh.peers(None) if place.coordinates[PIPE] in stages]

    def owned(place: MeshPosition) -> Rectangle:
        return owned_rectangle(parameter, shape, place, layout, dtype.itemsize, storage, stages)

    def placement(has: Callable[[int, int], bool]) -> Placement:
        held = {str(term): [(part,) if has(stage, term) else () for stage, part in parts] for term in stages}
        wide = accumulated_in(dtype)
        return Placement({term: ArrayPlacement.of_rectangles(shape, wide, on) for term, on in held.items()})

    among, parts = mesh.group(among={PIPE: stages}), [(place.coordinates[PIPE], owned(place)) for place in places]
    plan, block = plan_transfer(placement(eq), placement(ne), nodes=mesh.nodes_at(places)), owned(mesh).shape

    def start(gradient: Array) -> Deferred:
        own = gradient.reshape(block)
        terms = plan.start(among, {str(here): [own]}, label="gradients")

        def add(received: Blocks) -> None:
            reduce_into(own, [own if stage == here else received[str(stage)][0] for stage in stages], "sum")

        return Deferred(terms, add)

    return start


@requirement("mesh", nearest="Give the other axes one size", subject="uneven stages")
def _axes_of_uneven_stages(case: Case) -> bool:
    """only axis model can have other sizes on other stages, on a mesh without queries"""
    uneven = set(uneven_axes(case.axes))
    return bool(uneven) and (uneven != {"model"} or "queries" in case.axes)


REQUIREMENTS = (_axes_of_uneven_stages,)
