"""Helper ranks: ranks of the world outside the mesh that compute some layers of a stage for its ranks, their owners.

The owners keep the weights, their gradients, the optimizer state and the buffers. A range of layers that is assigned to
a helper rank is a *part* of its stage's chunk; between two such parts, and at both ends, is one of the owners', perhaps
without layers. All ranks execute programs on parts as they do on chunks: those of a stage follow from its schedule, and
a helper rank computes what its stages send, in the order in which they do; ``PartedPasses`` makes both, and proves that
they can be executed together.

1. Rank 0 orders a pass, and the first owner of each part sends its weights, if they have changed.
2. In a forward all owners send their samples; the helper rank computes the whole micro-batch, as one device would, with
   the statistics and routing of all samples, keeps what the backward needs, and sends each owner its rows.
3. In a backward the same happens with gradients. After the last one the helper rank sends the gradients of the weights
   to the first owner. The reductions among the owners follow as usual.

A pass with a cache is the owners' alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate, groupby, pairwise
from math import prod
from string import digits
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from spmd_engine.arrays.backend import Array, Backend
from spmd_engine.arrays.precision import accumulated_in
from spmd_engine.axes import all_positions, axes_of_stage, axes_text
from spmd_engine.comm import Group
from spmd_engine.comm.mesh import Mesh, ranks_by_position
from spmd_engine.comm.pending import Deferred, Pending, Several
from spmd_engine.engine.pipeline import Chunk, Execution, PipelineNeighbours, Recompute, segments
from spmd_engine.engine.schedules import schedule as schedules
from spmd_engine.engine.state.assignment import BATCH, PIPE
from spmd_engine.engine.state.buffers_and_side_outputs import Extras
from spmd_engine.engine.uneven_stages import concatenated
from spmd_engine.engine.zero.reducer import Reducer
from spmd_engine.engine.zero.unsharder import Unsharder, tree_of
from spmd_engine.errors import UsageError
from spmd_engine.layers.layer import Documents, Extra, ForwardContext, GradientSums, Layer
from spmd_engine.models import Model, layout_for
from spmd_engine.requirements import Case, requirement
from spmd_engine.sharding import Shards

if TYPE_CHECKING:
    from spmd_engine.engine.base import ShardedEngine
    from spmd_engine.engine.parallel_config import ParallelConfig

NONE = "none"  #: an assignment without helper ranks


# --- What is assigned: "block0-1:rank2,head:rank3"


class Assigned(NamedTuple):
    """Layers that a helper rank computes."""

    layers: str  #: the name of a layer or a block, or a range of blocks: "block3-5"
    rank: int  #: in the world

    def numbers(self, model: Model) -> range:
        """The layers of the model. Raises UsageError if it does not have them, one after the other."""
        first, _, last = self.layers.rpartition("-")
        stem = first.rstrip(digits)
        names = [self.layers]
        if last.isdecimal() and stem != first:
            begin = int(first[len(stem) :])  # the end may be any number
            names = [f"{stem}{number}" for number in range(begin, min(int(last), begin + len(model.layers)) + 1)]
        of_names = [
            [n for n, (name, _) in enumerate(model.layers) if part in (name, name.split("/")[0])] for part in names
        ]
        numbers = [number for of_name in of_names for number in of_name]
        if not all(of_names) or not numbers or numbers != list(range(numbers[0], numbers[-1] + 1)):
            known = dict.fromkeys(name.split("/")[0] for name, _ in model.layers)
            raise UsageError(
                f"--assign {self.layers}:rank{self.rank}: {model.name} has no such layers in a row; name a layer, a "
                f"block or a range as block0-1, of {', '.join(known)}"
            )
        return range(numbers[0], numbers[-1] + 1)


def helper_ranks(assigned: Sequence[Assigned]) -> list[int]:
    """The ranks of the world outside the mesh."""
    return sorted({term.rank for term in assigned})


def parse_assign(text: str | None) -> tuple[Assigned, ...]:
    """``"block0-1:rank2,head:rank3"``; () for None and "none". Raises UsageError for anything else, and for rank 0."""
    assigned = []
    for term in text.split(",") if text not in (None, NONE) else ():
        layers, colon, rank = term.strip().partition(":")
        if not (layers and colon and rank.startswith("rank") and rank[4:].isdecimal()):
            raise UsageError(f"cannot read --assign {text!r} at {term!r}; write LAYERS:rankN, as in block3-5:rank2")
        assigned.append(Assigned(layers, int(rank[4:])))
        if assigned[-1].rank == 0:
            raise UsageError(f"--assign {text}: rank 0 writes the run's files; name another helper rank")
    return tuple(assigned)


@requirement("assign", nearest="Name other layers, or use other axes", of_model=True, left_out=("assign",))
def _layers_of_helper_ranks(case: Case) -> None:
    """layers that are whole on each owner: sharded over samples alone"""
    options, axes, model = case.options, case.axes, case.model
    taken: set[int] = set()
    for term in options.assigned:
        option, numbers = f"--assign {term.layers}:rank{term.rank}", term.numbers(model)
        owners = [axes_of_stage(axes, stage) for stage in stages_of(term, model, axes, options)]
        splits = [axis for sizes in owners for axis, size in sizes.items() if size > 1 and axis not in (*BATCH, PIPE)]
        if any("e" in model.layers[number][1].sizes for number in numbers):
            over = ("expert",) if options.expert_axes is None else options.expert_axes
            splits += [axis for axis in over if axes.get(axis, 1) > 1]
        if splits:
            raise UsageError(
                f"{option} with --mesh {axes_text(axes)}: axis {splits[0]} splits these layers, and a helper rank "
                f"computes whole ones; use other axes than {splits[0]}"
            )
        if taken & set(numbers):
            raise UsageError(f"{option}: another rank has some of these layers; assign each to one")
        taken |= set(numbers)


REQUIREMENTS = (_layers_of_helper_ranks,)


# --- Parts of chunks, and the programs of all places: stages, and then helper ranks


class Part(NamedTuple):
    """Consecutive layers of a chunk that its owners, or a helper rank, compute."""

    layers: range
    chunk: int
    rank: int | None  #: the helper rank; None: the owners


def parts_of(chunks: Sequence[range], assigned: Sequence[Assigned], model: Model) -> list[Part]:
    """The parts of all chunks, in order: those of owners and of helper ranks in turn, the owners' first and last."""
    helper = {number: term.rank for term in assigned for number in term.numbers(model)}
    parts = []
    for chunk, layers in enumerate(chunks):
        parts.append(Part(layers[:0], chunk, None))
        for rank, run in groupby(layers, helper.get):
            numbers = list(run)
            part = Part(range(numbers[0], numbers[-1] + 1), chunk, rank)
            if rank is None:
                parts[-1] = part
            else:
                parts += [part, Part(range(part.layers.stop, part.layers.stop), chunk, None)]
    return parts


@dataclass(frozen=True)
class PartedPasses:
    """The passes through a model whose layers are assigned in part, or not: what each place does, in order."""

    model: Model
    assigned: Sequence[Assigned]
    chunks: Sequence[range]
    stages: int
    schedule: schedules.Schedule
    _programs: dict[tuple[int, int], schedules.Program] = field(default_factory=dict)  # by micro-batches and place

    @cached_property
    def parts(self) -> list[Part]:
        """The parts of the model."""
        return parts_of(self.chunks, self.assigned, self.model)

    @cached_property
    def helpers(self) -> list[int]:
        """The helper ranks, whose places are after those of the stages."""
        return helper_ranks(self.assigned)

    @cached_property
    def places(self) -> list[int]:
        """The place of each part."""
        return [
            self.stage_of(number) if part.rank is None else self.stages + self.helpers.index(part.rank)
            for number, part in enumerate(self.parts)
        ]

    @property
    def first(self) -> int:
        """The first part that passes on a gradient: nobody needs that of data."""
        return int(not self.parts[0].layers and self.parts[1].layers.start == 0)

    def on_place(self, place: int) -> list[int]:
        """The parts on a place."""
        return [number for number, of_part in enumerate(self.places) if of_part == place]

    def stage_of(self, part: int) -> int:
        """The stage that owns a part."""
        return self.parts[part].chunk % self.stages

    def helped_on(self, stage: int) -> list[int]:
        """The parts of a stage that helper ranks compute."""
        return [n for n, part in enumerate(self.parts) if part.rank is not None and self.stage_of(n) == stage]

    def one_pass(self, kind: type[schedules.Compute], place: int) -> schedules.Program:
        """Forwards or backwards of one micro-batch."""
        parts = self.on_place(place)
        if kind is schedules.Forward:
            order: list[schedules.Compute] = [kind(0, part) for part in parts]
        elif place < self.stages:
            order = [kind(0, part) for part in reversed(parts) if part >= self.first]
            order += [schedules.MoveGradients(0, part) for part in reversed(self.helped_on(place))]
        else:
            order = [make(0, part) for part in reversed(parts) for make in (kind, schedules.MoveGradients)]
        return self._with_transfers(order, len(order))

    def _with_transfers(self, order: list[schedules.Compute], unfinished: int) -> schedules.Program:
        if len({*self.places}) == 1:
            return [*order]
        return schedules.with_transfers(order, len(self.parts) - 1, sends_unfinished=unfinished, first=self.first)

    def program(self, micro_batches: int, place: int) -> schedules.Program:
        """The program of a step on a place. Raises UsageError if those of all would wait for each other."""
        key = micro_batches, place
        if key not in self._programs and not self.helpers:
            self._programs[key] = self.schedule.program(self.stages, *key)
        elif key not in self._programs:
            unfinished = self.schedule.sends_unfinished(self.stages, micro_batches) * len(self.parts)
            made = [self._with_transfers(order, unfinished) for order in self._orders(micro_batches)]
            names = [f"stage {stage}" for stage in range(self.stages)]
            schedules.check_programs(made, self.places, names + [f"helper rank {rank}" for rank in self.helpers])
            self._programs.update({(micro_batches, number): program for number, program in enumerate(made)})
        return self._programs[key]

    def _orders(self, micro_batches: int) -> list[list[schedules.Compute]]:
        """What each place computes. In rounds every stage computes what is next, if it has what it needs, and every
        helper rank what it has had longest."""
        own = [self.schedule.order(self.stages, micro_batches, stage) for stage in range(self.stages)]
        waiting = [deque(part for work in order for part in self._on_parts(work)) for order in own]
        waiting += [deque() for _ in self.helpers]
        orders: list[list[schedules.Compute]] = [[] for _ in waiting]
        done: set[tuple[bool, int, int]] = set()  # whether it is a forward; micro-batch and part
        while any(waiting):
            ready = [
                (place, queue)
                for place, queue in enumerate(waiting)
                if queue and ((needed := self._needs(queue[0])) is None or needed in done)
            ]
            if not ready:
                stuck = [f"stage {place} at {queue[0]}" for place, queue in enumerate(waiting) if queue]
                raise UsageError(f"{self.schedule.name}: deadlock with helper ranks: {', '.join(stuck)}")
            computed = [(place, queue.popleft()) for place, queue in ready]
            for place, work in computed:
                orders[place].append(work)
                if isinstance(work, (schedules.BackwardWeight, schedules.MoveGradients)):
                    continue
                is_forward = isinstance(work, schedules.Forward)
                done.add((is_forward, work.m, work.chunk))
                after = work.chunk + (1 if is_forward else -1)
                if 0 <= after < len(self.parts) and self.parts[after].rank is not None:
                    kinds = (schedules.Forward,) if is_forward else (schedules.Backward, schedules.MoveGradients)
                    waiting[self.places[after]] += [kind(work.m, after) for kind in kinds]
        return orders

    def _on_parts(self, compute: schedules.Compute) -> list[schedules.Compute]:
        """What the owners of a chunk compute on its parts instead of ``compute`` on the chunk."""
        of_chunk = [number for number, part in enumerate(self.parts) if part.chunk == compute.chunk]
        own = [number for number in of_chunk if self.parts[number].rank is None]
        if isinstance(compute, schedules.Forward):
            return [replace(compute, chunk=number) for number in own]
        order = [replace(compute, chunk=number) for number in reversed(own) if number >= self.first]
        if not isinstance(compute, schedules.BackwardInput):
            order += [schedules.MoveGradients(compute.m, n) for n in reversed(of_chunk) if n not in own]
        return order

    def _needs(self, compute: schedules.Compute) -> tuple[bool, int, int] | None:
        """What must be done on another place before."""
        received = schedules.receive_before(compute, len(self.parts) - 1)
        if received is None:
            return None
        other = schedules.other_end(received)
        return isinstance(compute, schedules.Forward), other.m, other.chunk


def passes_of(model: Model, composition: ParallelConfig, axes: Mapping[str, Any]) -> PartedPasses:
    """The passes of a composition on a mesh with these axes."""
    chunks, schedule = composition.chunks_on(axes, model), composition.schedule_on(axes)
    return PartedPasses(model, composition.assigned, chunks, axes.get(PIPE, 1), schedule)


def stages_of(term: Assigned, model: Model, axes: Mapping[str, Any], composition: ParallelConfig) -> list[int]:
    """The stages that own these layers."""
    numbers, chunks = set(term.numbers(model)), composition.chunks_on(axes, model)
    return sorted({chunk % axes.get(PIPE, 1) for chunk, layers in enumerate(chunks) if numbers & set(layers)})


def owners_of(stage: int, axes: Mapping[str, Any], ranks: Sequence[int]) -> list[int]:
    """The ranks of a stage in the order of their samples; ``ranks`` are those of the mesh by position."""
    places = all_positions(axes)
    return [rank for place, rank in zip(places, ranks, strict=True) if place.coordinates.get(PIPE, 0) == stage]


# --- Messages between owners and helper ranks


_SCALARS = ("step", "seed", "training", "length", "micro_batch", "share", "scale")  # fields of a ForwardContext
_KINDS = 8  # channels of a message between two parts: at most so many arrays


class _Messages(PipelineNeighbours):
    """What both ends know: on which channels an array is sent."""

    def __init__(self, passes: PartedPasses, group: Group, backend: Backend) -> None:
        super().__init__(None, passes.places, backend)
        self.passes, self._group, self.first = passes, group, passes.first
        helped = [part for part in passes.parts if part.rank is not None]
        weights = [(n, name) for part in helped for n in part.layers for name in passes.model.layers[n][1].parameters]
        self._slots = {weight: slot for slot, weight in enumerate(weights)}
        self._micro_batches = 0
        self._moved: dict[int, int] = {}  # micro-batches whose gradients are added, by part

    def begin(self, micro_batches: int) -> None:
        super().begin(micro_batches)
        self._micro_batches, self._moved = micro_batches, {}
        self._used += len(self._slots)

    def _kind(self, m: int, source: int, to: int, kind: int) -> int:
        return _KINDS * self._channel(m, source, to) + kind

    def _slot(self, number: int, name: str) -> int:
        """The channel of the gradient of a weight."""
        messages = 2 * self._micro_batches * self.chunks
        return _KINDS * (self._first_channel + messages + self._slots[number, name])

    def _is_last(self, part: int) -> bool:
        """Count a micro-batch of a part; whether it is the last."""
        self._moved[part] = self._moved.get(part, 0) + 1
        return self._moved[part] == self._micro_batches

    def _layers(self, part: int) -> Iterator[tuple[int, Layer]]:
        return ((number, self.passes.model.layers[number][1]) for number in self.passes.parts[part].layers)

    def _extras(self, part: int) -> list[tuple[int, bool, str, tuple[int, ...]]]:
        """What forwards of a part return in addition: layer, whether it is an update of a buffer, name, and shape."""
        extras = []
        for number, layer in self._layers(part):
            updated = {name: buffer for name, buffer in layer.buffers.items() if not buffer.frozen}
            extras += [(number, True, name, buffer.whole(layer.sizes)) for name, buffer in updated.items()]
            for name, output in layer.side_outputs.items():
                extras.append((number, False, name, tuple(layer.sizes[x] for x in output.dims.split())))
        return extras


def _arrays_of(ctx: ForwardContext) -> dict[str, Array]:
    """The arrays of a context that a helper rank needs."""
    arrays: dict[str, Any] = {"samples": ctx.samples, "mask": ctx.mask}
    if ctx.documents is not None:
        arrays |= {"numbers": ctx.documents.numbers, "starts": ctx.documents.starts}
    return {name: array for name, array in arrays.items() if array is not None}


def _leaves(tree: Mapping[str, Any]) -> Iterator[Array]:
    for node in tree.values():
        if isinstance(node, Mapping):
            yield from _leaves(node)
        else:
            yield node


class HelpedNeighbours(_Messages):
    """The neighbours of an owner: other stages, and helper ranks, whose messages its ledger counts at both ends, since
    that of a helper rank is not read in a run."""

    def __init__(
        self,
        between: PipelineNeighbours,
        passes: PartedPasses,
        mesh: Mesh,
        unsharder: Unsharder,
        reducer: Reducer,
        extras: Extras,
        backend: Backend,
    ) -> None:
        """``between``: the neighbours of this stage, for parts instead of chunks. Raises UsageError if a helper rank is
        on the mesh, or not in the world."""
        super().__init__(passes, mesh.all_ranks("helper"), backend)
        self._between, self._others = between, mesh.others
        self.stages, self.stage = between.stages, between.stage
        ranks = [mesh.comm.members[number] for number in mesh.ranks_in_order]
        for rank in passes.helpers:
            if rank in ranks or rank >= self._group.size:
                raise UsageError(f"--assign: rank {rank} is not outside the mesh, of {self._group.size} ranks")
        first = owners_of(self.stage, mesh.all_axes, ranks)[0]
        self._is_first = first == mesh.comm.members[mesh.comm.rank]
        self._unsharder, self._reducer, self._extras_of_step = unsharder, reducer, extras
        self._sent, self._number = (-1, -1), 0

    def begin(self, micro_batches: int) -> None:
        super().begin(micro_batches)
        self._between.begin(micro_batches)

    def order(self, what: str, contexts: Sequence[ForwardContext], number: int | None = None) -> int:
        """Rank 0 orders the same of the helper ranks, and first owners send the weights."""
        self._number += number is None
        number, version = self._number if number is None else number, (self._unsharder.changes, self._reducer.steps)
        weights = what != "backward" and version != self._sent
        if self._others.world.rank == 0:
            described = [
                {"arrays": list(_arrays_of(ctx)), **{name: getattr(ctx, name) for name in _SCALARS}} for ctx in contexts
            ]
            order = {"pass": what, "number": number, "weights": weights, "contexts": described}
            self._others.send(order, self.passes.helpers)
        self.begin(len(contexts))
        for part in self.passes.helped_on(self.stage) if weights else ():
            for layer in self.passes.parts[part].layers:
                for array in _leaves(self._unsharder.unshard(layer)):  # collective, if they are sharded
                    if self._is_first:
                        self._group.send(self._rank(part), array, label="weights")
                        self._count("receive", "weights")
        if weights:
            self._sent = version
        return number

    def _rank(self, part: int) -> Any:
        """The helper rank of a part; None if it has none."""
        return self.passes.parts[part].rank

    def _count(self, operation: str, label: str, sent: int = 0) -> None:
        """Count the call of the helper rank."""
        self._group.ledger.record((operation, self._group.axes, label), sent, sent)

    def start_send(self, x: Array, m: int, chunk: int, to: int, ctx: ForwardContext | None = None) -> Any:
        if (rank := self._rank(to)) is None:
            return self._between.start_send(x, m, chunk, to, ctx)
        assert ctx is not None
        label, arrays = ("input", [x, *_arrays_of(ctx).values()]) if to > chunk else ("gradient", [x])
        for _ in arrays:
            self._count("receive", label)
        return Several(
            self._group.start_send(rank, array, channel=self._kind(m, chunk, to, kind), label=label)
            for kind, array in enumerate(arrays)
        )

    def start_receive(self, m: int, chunk: int, source: int, ctx: ForwardContext | None = None) -> Any:
        if (rank := self._rank(source)) is None:
            return self._between.start_receive(m, chunk, source, ctx)
        assert ctx is not None
        extras = self._extras(source) if chunk > source and ctx.training else []
        labels = ["output" if chunk > source else "gradient", *(["side outputs"] if extras else [])]

        def take(arrays: list[Array]) -> Array:
            for label, array in zip(labels, arrays, strict=True):
                self._count("send", label, array.nbytes)
            if extras:
                self._take_extras(extras, arrays[1], ctx)
            return arrays[0]

        channels = [self._kind(m, source, chunk, kind) for kind in range(len(labels))]
        messages = zip(channels, labels, strict=True)
        return Deferred(
            Several(
                self._group.start_receive(rank, like=self._backend, channel=channel, label=label)
                for channel, label in messages
            ),
            take,
        )

    def _take_extras(
        self, extras: Sequence[tuple[int, bool, str, tuple[int, ...]]], flat: Array, ctx: ForwardContext
    ) -> None:
        of_layer: dict[int, Extra] = {}
        ends = accumulate((prod(shape) for *_, shape in extras), initial=0)
        for (number, is_update, name, shape), (begin, end) in zip(extras, pairwise(ends), strict=True):
            extra = of_layer.setdefault(number, Extra({}, {}))
            taken: Any = extra.updates if is_update else extra.outputs
            taken[name] = flat[begin:end].reshape(shape)
        for number, extra in of_layer.items():
            self._extras_of_step.take_whole(number, ctx, extra, counts=self._is_first)

    def move_gradients(self, m: int, chunk: int) -> None:
        is_last = self._is_last(chunk)
        for number, layer in reversed(list(self._layers(chunk))):
            sums = self._reducer.sums(number)
            for name in layer.parameters if is_last and self._is_first else ():
                channel = self._slot(number, name)
                gradient = self._group.receive(self._rank(chunk), like=self._backend, channel=channel, label="weights")
                self._count("send", "weights", gradient.nbytes)
                sums.add(name, gradient)
            self._reducer.layer_done(number)


# --- On a helper rank


class SentWeights:
    """The weights that owners send, sums of their gradients, and what forwards return in addition to their outputs,
    until it is sent: what Unsharder, Reducer and Extras are on an owner."""

    def __init__(self, model: Model, dtype: np.dtype, backend: Backend) -> None:
        self._layers, self._dtype, self._backend = model.layers, accumulated_in(dtype), backend
        self._under_way: dict[int, dict[str, Pending]] = {}  # by layer and local name
        self._trees: dict[int, dict[str, Any]] = {}
        self._sums: dict[int, dict[str, Array]] = {}
        self._untouched: set[str] = set()
        self.extras: dict[int, Extra] = {}  #: by layer

    def start_receive(self, number: int, start: Callable[[], Pending]) -> None:
        """Begin to receive the weights of a layer; ``start`` begins to receive the next array."""
        self._trees.pop(number, None)
        layer = self._layers[number][1]
        in_order = _leaves(tree_of({name: name for name in (*layer.parameters, *layer.buffers)}))  # as an owner sends
        self._under_way[number] = {name: start() for name in in_order}

    def unshard(self, layer: int, **prefetch: Any) -> dict[str, Any]:
        """As ``Unsharder.unshard``."""
        if layer not in self._trees:
            self._trees[layer] = self.arrived(layer)
        return self._trees[layer]

    def arrived(self, layer: int) -> dict[str, Any]:
        """The weights of a layer that have been under way."""
        return tree_of({name: pending.wait() for name, pending in self._under_way.pop(layer).items()})

    def sums(self, layer: int) -> GradientSums:
        """As ``Reducer.sums``; the first of a step begins them."""
        if layer not in self._sums:
            self._sums[layer] = self.new_sums(layer)
            self._untouched |= {f"{layer}/{name}" for name in self._sums[layer]}
        sums = self._sums[layer]
        return GradientSums(sums, {name: f"{layer}/{name}" for name in sums}, self._untouched)

    def new_sums(self, layer: int) -> dict[str, Array]:
        """Memory for the gradients of a layer."""
        described = self._layers[layer][1]
        shapes = {name: parameter.whole(described.sizes) for name, parameter in described.parameters.items()}
        return {name: self._backend.empty(shape, self._dtype) for name, shape in shapes.items()}

    def take_sums(self, layer: int) -> dict[str, Array]:
        """The sums of a step, by local name, which ends them."""
        sums = self._sums.pop(layer)
        for name, array in sums.items():
            if (full_name := f"{layer}/{name}") in self._untouched:
                array[...] = 0
                self._untouched.remove(full_name)
        return sums

    def layer_done(self, layer: int) -> None:
        """As ``Reducer.layer_done``: nothing is reduced here."""

    def take(self, number: int, ctx: ForwardContext, extra: Extra) -> None:
        """As ``Extras.take``."""
        self.extras[number] = extra


class _Owners(_Messages):
    """The neighbours of a helper rank: the owners of its parts."""

    def __init__(
        self,
        passes: PartedPasses,
        group: Group,
        backend: Backend,
        owners: Sequence[Sequence[int]],
        weights: SentWeights,
    ) -> None:
        """``owners``: of each stage, by their samples."""
        super().__init__(passes, group, backend)
        self.stage = -1  # which holds no chunk
        self._owners, self._weights = owners, weights
        self.contexts: list[ForwardContext] = []  #: those of the present pass
        self.arrays: list[Sequence[str]] = []  #: the names of those that are sent with an input, by micro-batch
        #: those of each owner's rows, by micro-batch and stage, in the present pass
        self.rows: dict[tuple[int, int], list[slice]] = {}
        self._sends: list[Any] = []

    def owners(self, part: int) -> Sequence[int]:
        """The owners of a part, by their samples."""
        return self._owners[self.passes.stage_of(part)]

    def start_receive(self, m: int, chunk: int, source: int, ctx: ForwardContext | None = None) -> Any:
        names = ["", *self.arrays[m]] if chunk > source else [""]
        label, owners = "input" if chunk > source else "gradient", self.owners(chunk)
        messages = Several(
            self._group.start_receive(
                owner, like=self._backend, channel=self._kind(m, source, chunk, kind), label=label
            )
            for kind in range(len(names))
            for owner in owners
        )

        def take(received: list[Array]) -> Array:
            several = [received[n : n + len(owners)] for n in range(0, len(received), len(owners))]
            if chunk > source:
                ends = accumulate(map(len, several[0]), initial=0)
                self.rows[m, self.passes.stage_of(chunk)] = [slice(*pair) for pair in pairwise(ends)]
                arrays = dict(zip(names[1:], map(concatenated, several[1:]), strict=True))
                documents = Documents(arrays["numbers"], arrays.get("starts")) if "numbers" in arrays else None
                known = {"samples": arrays.get("samples"), "mask": arrays.get("mask"), "documents": documents}
                self.contexts[m] = replace(self.contexts[m], **known)
            return concatenated(several[0])

        return Deferred(messages, take)

    def start_send(self, x: Array, m: int, chunk: int, to: int, ctx: ForwardContext | None = None) -> Any:
        assert ctx is not None
        owners, rows = self.owners(chunk), self.rows[m, self.passes.stage_of(chunk)]
        label, channel = "output" if to > chunk else "gradient", self._kind(m, chunk, to, 0)
        sends = [
            self._group.start_send(owner, x if len(owners) == 1 else x[part], channel=channel, label=label)
            for owner, part in zip(owners, rows, strict=True)
        ]
        if to > chunk and ctx.training and (extras := self._extras(chunk)):
            xp, of_layer = self._backend.xp, self._weights.extras
            parts = [
                (of_layer[number].updates if is_update else of_layer[number].outputs)[name]
                for number, is_update, name, _ in extras
            ]
            flat = xp.concatenate([xp.asarray(part).astype(np.float64).reshape(-1) for part in parts])
            sends += [
                self._group.start_send(owner, flat, channel=channel + 1, label="side outputs") for owner in owners
            ]
        return Several(sends)

    def move_gradients(self, m: int, chunk: int) -> None:
        if self._is_last(chunk):
            self._sends += [
                self._group.start_send(self.owners(chunk)[0], array, channel=self._slot(number, name), label="weights")
                for number in reversed(self.passes.parts[chunk].layers)
                for name, array in self._weights.take_sums(number).items()
            ]

    def finish(self) -> None:
        """Wait until the gradients of the weights have left."""
        while self._sends:
            self._sends.pop().wait()


class AssignedLayers:
    """The layers that are assigned to this rank, which is outside the mesh."""

    def __init__(
        self,
        model: Model,
        composition: ParallelConfig,
        ranks: Sequence[int],
        mesh: Mesh,
        dtype: np.dtype,
        backend: Backend,
    ) -> None:
        """``ranks``: those of the world that are on the mesh of the composition; ``mesh``: any that knows its
        ``others``."""
        world, axes = mesh.others.world, composition.mesh or {"data": len(ranks)}
        self._passes = passes = passes_of(model, composition, axes)
        self._place = passes.stages + passes.helpers.index(world.rank)
        order = ranks_by_position([world.hosts[rank] for rank in ranks], composition.order)
        owners = [owners_of(stage, axes, [ranks[number] for number in order]) for stage in range(passes.stages)]
        self._alone, self._backend, self._group = mesh.alone(), backend, mesh.all_ranks("helper")
        self._layout = layout_for(model, self._alone)
        self.weights = SentWeights(model, dtype, backend)
        self._neighbours = _Owners(passes, self._group, backend, owners, self.weights)
        shards = [Shards(self._alone, self._layout, name, takes_data=not n) for n, (name, _) in enumerate(model.layers)]
        stand_ins: Any = [self.weights] * 3
        recompute, self.chunks = Recompute(composition.recompute), dict[int, Chunk]()
        for part in passes.on_place(self._place):
            parts = segments(model, passes.parts[part].layers, recompute)
            self.chunks[part] = Chunk(parts, model.layers, shards, *stand_ins, dtype=dtype)
        self._forwards: dict[int, tuple[Execution, dict[tuple[int, int], list[slice]]]] = {}  # by number

    def follow(self, order: Mapping[str, Any]) -> None:
        """Do this rank's part of a pass that rank 0 orders: see ``HelpedNeighbours.order``."""
        what, neighbours, number = order["pass"], self._neighbours, order["number"]
        neighbours.begin(len(order["contexts"]))
        for part in self.chunks if order["weights"] else ():
            about: dict[str, Any] = {"like": self._backend, "label": "weights"}
            start = partial(self._group.start_receive, neighbours.owners(part)[0], **about)
            for layer in self._passes.parts[part].layers:
                self.weights.start_receive(layer, start)
        if what == "backward":
            execution, neighbours.rows = self._forwards.pop(number)
            program = self._passes.one_pass(schedules.Backward, self._place)
        else:
            neighbours.rows = {}
            neighbours.arrays = [described.pop("arrays") for described in order["contexts"]]
            neighbours.contexts = contexts = [self._context(described) for described in order["contexts"]]
            no_loss: Any = None
            execution = Execution(self.chunks, neighbours, contexts, [], no_loss)
            if what == "step":
                program = self._passes.program(len(contexts), self._place)
            else:
                program = self._passes.one_pass(schedules.Forward, self._place)
                if contexts[0].training:
                    self._forwards[number] = execution, neighbours.rows
        execution.run(program)
        neighbours.finish()

    def _context(self, scalars: Mapping[str, Any]) -> ForwardContext:
        xp, length = self._backend.xp, scalars["length"]
        positions = [xp.asarray(self._layout.positions(length, self._alone, where)) for where in ("inside", "residual")]
        return ForwardContext(*positions, **scalars)


def follow_orders(engine: ShardedEngine, received: Callable[[], int] = lambda: 0) -> dict[str, Any] | None:
    """Compute on this rank, which is outside the mesh of the engine, what rank 0 orders, until that is something else
    than a pass, and return it: see ``OtherRanks.take``. On a rank of the mesh, return None."""
    if getattr(engine, "is_placed", True):
        return None
    outside: Any = engine
    others, activity = engine.mesh.others, engine.mesh.activity
    while True:
        with activity.phase("outside the mesh, without an order"):
            order = others.take(received)
        if "pass" not in order:
            return order
        with activity.phase(f"helper rank: {order['pass']}, step", order["contexts"][0]["step"] + 1):
            outside.assigned.follow(order)
