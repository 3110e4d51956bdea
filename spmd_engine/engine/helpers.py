"""Helper ranks: ranks of the world outside the mesh that compute some layers of a stage for its ranks, their owners.

The owners keep the weights, their gradients, the optimizer state and the buffers, and run the schedule. For a range of
layers that is assigned to a helper rank, a ``HelpedChunk`` stands in the chunk of each owner:

1. In each step the first owner sends the weights of the range.
2. In a forward all owners send their samples; the helper rank computes the whole micro-batch, as one device would, with
   the statistics and routing of all samples, keeps the tape, and sends each owner its rows of the output.
3. In a backward the same happens with gradients. After the step's last one the helper rank sends the gradients of the
   weights to the first owner. The reductions among the owners follow as usual.

All owners make the same calls in the same order, and a helper rank serves the owners of one stage: no wait can cross.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import accumulate, count, pairwise
from string import digits
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from spmd_engine.arrays.backend import Array, Backend
from spmd_engine.arrays.precision import accumulated_in
from spmd_engine.axes import all_positions, axes_text
from spmd_engine.comm.group import Group
from spmd_engine.comm.mesh import Mesh
from spmd_engine.comm.pending import wait_for
from spmd_engine.engine.pipeline import Chunk, Recompute, segments
from spmd_engine.engine.state.assignment import BATCH, PIPE
from spmd_engine.engine.zero.unsharder import tree_of
from spmd_engine.errors import UsageError
from spmd_engine.layers.layer import Documents, Extra, ForwardContext, GradientSums, Layer
from spmd_engine.models.layouts import layout_for
from spmd_engine.models.model import Model
from spmd_engine.requirements import Case, requirement
from spmd_engine.sharding.shards import Shards

if TYPE_CHECKING:
    from spmd_engine.engine.parallel_config import ParallelConfig

NONE = "none"  #: an assignment without helper ranks
_REQUEST = 512  # bytes, of which a request has a multiple: its length must not depend on the digits of a number


# --- What is assigned: "block0-1:rank2,head:rank3"


class Assigned(NamedTuple):
    """Layers that a helper rank computes."""

    layers: str  #: the name of a layer or a block, or a range of blocks: "block3-5"
    rank: int  #: of the world

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
        numbers = [number for found in of_names for number in found]
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


def stage_of(rank: int, assigned: Sequence[Assigned], model: Model, chunks: Sequence[range], stages: int) -> int:
    """The stage that a helper rank serves. Raises UsageError if its layers are on several, whose requests could come in
    any order."""
    numbers = {number for term in assigned if term.rank == rank for number in term.numbers(model)}
    served = sorted({chunk % stages for chunk, layers in enumerate(chunks) if numbers & set(layers)})
    if len(served) > 1:
        raise UsageError(
            f"--assign: the layers of rank {rank} are on stages {', '.join(map(str, served))}; a helper rank serves "
            "one stage: name another rank for the others"
        )
    return served[0]


def helper_stage(model: Model, axes: Mapping[str, int], composition: ParallelConfig, rank: int) -> int:
    """The stage that a helper rank serves."""
    return stage_of(rank, composition.assigned, model, composition.chunks_on(axes, model), axes.get(PIPE, 1))


@requirement("assign", nearest="Name other layers, or use other axes", of_model=True)
def _layers_of_helper_ranks(case: Case) -> None:
    """layers of one stage for each helper rank, whole on each owner: sharded over samples alone"""
    options, axes, model = case.options, case.axes, case.model
    taken: set[int] = set()
    for term in options.assigned:
        helper_stage(model, axes, options, term.rank)
        option, numbers = f"--assign {term.layers}:rank{term.rank}", term.numbers(model)
        splits = [axis for axis, size in axes.items() if size > 1 and axis not in (*BATCH, PIPE)]
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


def owners_of(stage: int, axes: Mapping[str, int], ranks: Sequence[int]) -> list[int]:
    """The ranks of a stage in the order of their samples; ``ranks`` are those of the mesh by position."""
    places = all_positions(axes)
    return [rank for place, rank in zip(places, ranks, strict=True) if place.coordinates.get(PIPE, 0) == stage]


def runs_of(layers: Sequence[int], assigned: Sequence[Assigned], model: Model) -> list[tuple[range, int | None]]:
    """Consecutive layers, in runs that one helper rank computes, or (None) their owner."""
    helper = {number: term.rank for term in assigned for number in term.numbers(model)}
    runs: list[tuple[range, int | None]] = []
    for number in layers:
        if runs and runs[-1][1] == helper.get(number):
            runs[-1] = range(runs[-1][0].start, number + 1), runs[-1][1]
        else:
            runs.append((range(number, number + 1), helper.get(number)))
    return runs


# --- Requests: the first message of each exchange


def send_request(group: Group, rank: int, content: Mapping[str, Any], channel: int | None = None) -> None:
    """Send a request, as JSON."""
    data = json.dumps(content).encode()
    message = np.full(-(-len(data) // _REQUEST) * _REQUEST, ord(" "), np.uint8)
    message[: len(data)] = np.frombuffer(data, np.uint8)
    group.send(rank, message, channel=channel, label="request")


def content_of(message: np.ndarray) -> dict[str, Any]:
    """The content of a request."""
    return json.loads(message.tobytes())


# --- On an owner


class AssignedLayers:
    """The layers of a model on a mesh that helper ranks compute; the mesh must be opened without them."""

    def __init__(self, assign: str | None, model: Model, mesh: Mesh, chunks: Sequence[range]) -> None:
        self._assigned, self._model, self._mesh = parse_assign(assign), model, mesh
        #: for each helper rank the rank of its first owner, both of the world
        self.first_owners: dict[int, int] = {}
        if helper_ranks(self._assigned) != list(mesh.helpers):
            raise UsageError(f"assign {assign}: the mesh was opened without the ranks {mesh.helpers}; see mesh_without")
        for rank in mesh.helpers:
            stage = stage_of(rank, self._assigned, model, chunks, mesh.axes.get(PIPE, 1))
            ranks = [mesh.members[number] for number in mesh.ranks.reshape(-1)]
            self.first_owners[rank] = owners_of(stage, mesh.axes, ranks)[0]

    def chunk(self, layers: Sequence[int], chunk_of: Callable[..., Chunk], backend: Backend) -> Any:
        """The chunk of these layers, with parts for those that helper ranks compute."""
        parts = []
        for run, rank in runs_of(layers, self._assigned, self._model):
            if rank is None:
                parts.append(chunk_of(run))
            else:
                is_first = self.first_owners[rank] == self._mesh.members[self._mesh.rank]
                ends = {"group": self._mesh.outside, "rank": rank, "is_first": is_first, "backend": backend}
                parts.append(chunk_of(run, HelpedChunk, **ends))
        return ChunkInParts(parts) if any(isinstance(part, HelpedChunk) for part in parts) else parts[0]


class HelpedChunk(Chunk):
    """Consecutive layers that a helper rank computes for the ranks that own their weights.

    For a cache of keys and values, which stays with its owner, the owner computes them itself. Its ledger counts the
    messages of both ends, since that of the helper rank is not read in a run.
    """

    def __init__(self, *parts: Any, group: Group, rank: int, is_first: bool, backend: Backend) -> None:
        """``parts`` are those of Chunk; ``is_first``: whether this rank is the first owner."""
        super().__init__(*parts)
        self._group, self._rank, self._is_first, self._backend = group, rank, is_first, backend
        self._described = {number: self._layers[number][1] for number in self._numbers}
        self._tickets, self._sent, self._counted = count(), (-1, -1), (-1, 0)

    def _tell(self, **content: Any) -> None:
        if self._is_first:
            layers = self._numbers[0], self._numbers[-1] + 1
            send_request(self._group, self._rank, {"layers": layers, **content})
            self._count("receive", "request", 0)

    def _send(self, x: Array, label: str) -> None:
        self._group.send(self._rank, x, label=label)
        self._count("receive", label, 0)

    def _receive(self, label: str) -> Any:
        x = self._group.receive(self._rank, like=self._backend, label=label)
        self._count("send", label, x.nbytes)
        return x

    def _count(self, operation: str, label: str, sent: int) -> None:
        """Count the call of the helper rank."""
        self._group.ledger.record((operation, self._group.axes, label), sent, sent)

    def forward(self, x: Array, ctx: ForwardContext) -> tuple[Array, Any]:
        """As ``Chunk.forward``."""
        if ctx.cache is not None or ctx.wanted is not None:
            return super().forward(x, ctx)
        version = self._unsharder.changes, self._reducer.steps
        arrays = {"samples": ctx.samples, "mask": ctx.mask}
        if ctx.documents is not None:
            arrays |= {"numbers": ctx.documents.numbers, "starts": ctx.documents.starts}
        arrays = {name: array for name, array in arrays.items() if array is not None}
        ticket, scalars = next(self._tickets), {name: getattr(ctx, name) for name in _SCALARS}
        about = {"weights": self._sent != version, "arrays": list(arrays), "ctx": scalars}
        self._tell(do="forward", ticket=ticket, **about)
        if self._sent != version:
            self._send_weights()
            self._sent = version
        for array in (x, *arrays.values()):
            self._send(array, "input")
        y = self._receive("output")
        if ctx.training:
            self._receive_extras(ctx)
        return y, ticket

    def _send_weights(self) -> None:
        for number in self._numbers:
            for array in _leaves(self._unsharder.unshard(number)):  # collective, if they are sharded
                if self._is_first:
                    self._send(array, "weights")

    def _receive_extras(self, ctx: ForwardContext) -> None:
        for number, layer in self._described.items():
            updates = {name: self._receive("side outputs") for name in _updated(layer)}
            outputs = {name: self._receive("side outputs") for name in layer.side_outputs}
            if (updates or outputs) and self._extras is not None:
                self._extras.take_whole(number, ctx, Extra(updates, outputs), counts=self._is_first)

    def _backward_input(
        self, saved: Any, dy: Array, on_input_gradient: Callable[[Any], None]
    ) -> Iterator[tuple[int, dict[str, Array]]]:
        """As ``Chunk``'s. The helper rank goes on with the gradients of the weights, and after the step's last backward
        sends the first owner those of all."""
        step, done = self._counted if self._counted[0] == self._reducer.steps else (self._reducer.steps, 0)
        self._counted, is_last = (step, done + 1), done + 1 == self._reducer.micro_batches
        self._tell(do="backward", ticket=saved, first=done == 0, last=is_last)
        self._send(dy, "gradient")
        del dy
        on_input_gradient(self._receive("gradient") if self._numbers[0] else None)
        for number in reversed(self._numbers):
            names = self._described[number].parameters if is_last and self._is_first else ()
            yield number, {name: self._receive("weights") for name in names}

    def _backward_weight(self, number: int, rest: dict[str, Array]) -> None:
        sums = self._reducer.sums(number)
        while rest:
            sums.add(*rest.popitem())
        self._reducer.layer_done(number)


class ChunkInParts:
    """A Chunk of consecutive ``parts``."""

    def __init__(self, parts: Sequence[Chunk]) -> None:
        self.parts = parts

    @contextmanager
    def wrapped(self, wrap: Callable[[str, Layer], Layer]) -> Iterator[None]:
        """As ``Chunk.wrapped``."""
        with ExitStack() as stack:
            for part in self.parts:
                stack.enter_context(part.wrapped(wrap))
            yield

    def forward(self, x: Array, ctx: ForwardContext) -> tuple[Array, list[Any]]:
        """As ``Chunk.forward``."""
        saved = []
        for part in self.parts:
            x, of_part = part.forward(x, ctx)
            saved.append(of_part)
        return x, saved

    def backward(self, saved: list[Any], dy: Array, on_input_gradient: Callable[[Any], None]) -> None:
        """As ``Chunk.backward``."""
        gradients = [dy]
        del dy
        for part in reversed(self.parts):
            take = gradients.append if part is not self.parts[0] else on_input_gradient
            part.backward(saved.pop(), gradients.pop(), take)

    def backward_input(self, saved: list[Any], dy: Array) -> tuple[Any, list[Any]]:
        """As ``Chunk.backward_input``."""
        rests = []
        for part in reversed(self.parts):
            dy, rest = part.backward_input(saved.pop(), dy)
            rests.append((part, rest))
        return dy, rests

    def backward_weight(self, rests: list[Any]) -> None:
        """As ``Chunk.backward_weight``."""
        while rests:
            part, rest = rests.pop(0)
            part.backward_weight(rest)


_SCALARS = ("step", "seed", "training", "length", "micro_batch", "share", "scale")  # of a ForwardContext


def _updated(layer: Layer) -> list[str]:
    return [name for name, buffer in layer.buffers.items() if not buffer.frozen]


def _leaves(tree: Mapping[str, Any]) -> Iterator[Array]:
    for node in tree.values():
        if isinstance(node, Mapping):
            yield from _leaves(node)
        else:
            yield node


# --- On a helper rank


class _SentWeights:
    """The weights that owners sent, and sums of their gradients: what Unsharder and Reducer are on an owner."""

    def __init__(self, dtype: np.dtype, backend: Backend) -> None:
        self._dtype, self._backend = accumulated_in(dtype), backend
        self.arrays: dict[int, dict[str, Array]] = {}  #: by layer and local name
        self.sums_of: dict[int, dict[str, Array]] = {}  #: by layer and local name
        self.untouched: set[str] = set()

    def unshard(self, layer: int, **prefetch: Any) -> dict[str, Any]:
        """As ``Unsharder.unshard``."""
        return tree_of(self.arrays[layer])

    def sums(self, layer: int) -> GradientSums:
        """As ``Reducer.sums``."""
        sums = self.sums_of[layer]
        return GradientSums(sums, {name: f"{layer}/{name}" for name in sums}, self.untouched)

    def begin(self, layers: Mapping[int, Layer]) -> None:
        """Begin sums for a step."""
        for number, layer in layers.items():
            shapes = {name: self.arrays[number][name].shape for name in layer.parameters}
            self.sums_of[number] = {name: self._backend.empty(shape, self._dtype) for name, shape in shapes.items()}
            self.untouched |= {f"{number}/{name}" for name in shapes}

    def layer_done(self, layer: int) -> None:
        """As ``Reducer.layer_done``: nothing is reduced here."""


class _TakenExtras:
    """What forwards returned in addition to their outputs, until it is sent: what Extras is on an owner."""

    def __init__(self) -> None:
        self.of_layer: dict[int, Extra] = {}

    def take(self, number: int, ctx: ForwardContext, extra: Extra) -> None:
        """As ``Extras.take``."""
        self.of_layer[number] = extra


class HelperRank:
    """The part of a helper rank: it answers the requests of its owners, with the layers that are assigned to it."""

    def __init__(
        self,
        model: Model,
        mesh: Mesh,
        owners: Sequence[int],
        recompute: str,
        dtype: np.dtype,
        backend: Backend,
    ) -> None:
        """``mesh``: of this rank alone; ``owners``: their ranks in ``mesh.outside``, by their samples."""
        assert mesh.outside is not None
        self._model, self._mesh, self._group, self.owners = model, mesh, mesh.outside, list(owners)
        self._recompute, self._dtype, self._backend = Recompute(recompute), dtype, backend
        self._layout = layout_for(model, mesh)
        self.weights, self._extras = _SentWeights(dtype, backend), _TakenExtras()
        self._chunks: dict[range, Chunk] = {}
        #: what a forward saved for the backward, and the rows of each owner, by the first layer and the ticket
        self._under_way: dict[tuple[int, int], tuple[Any, list[slice]]] = {}
        self.wraps: Callable[[Chunk], Any] = lambda chunk: None  #: is called with each new chunk

    def answer(self, request: Mapping[str, Any]) -> None:
        """Answer a request of the first owner, which the messages of all owners follow."""
        layers = range(*request["layers"])
        if layers not in self._chunks:
            shards = [
                Shards(self._mesh, self._layout, name, takes_data=not n)
                for n, (name, _) in enumerate(self._model.layers)
            ]
            stand_ins: Any = self.weights, self.weights, self._extras
            parts = segments(self._model, layers, self._recompute)
            self._chunks[layers] = Chunk(parts, self._model.layers, shards, *stand_ins, dtype=self._dtype)
            self.wraps(self._chunks[layers])
        do = self._forward if request["do"] == "forward" else self._backward
        do(self._chunks[layers], layers, request, (layers.start, request["ticket"]))

    def _gathered(self, label: str, rows: list[int] | None = None) -> Any:
        """The rows of all owners; ``rows`` gets their numbers."""
        parts = [self._group.receive(owner, like=self._backend, label=label) for owner in self.owners]
        if rows is not None:
            rows += [len(part) for part in parts]
        return parts[0] if len(parts) == 1 else self._backend.xp.concatenate(parts)

    def _scatter(self, x: Array, rows: Sequence[slice], label: str) -> list[Any]:
        """Begin to send each owner its rows."""
        one = len(rows) == 1
        sends = zip(self.owners, rows, strict=True)
        return [self._group.start_send(owner, x if one else x[part], label=label) for owner, part in sends]

    def _forward(self, chunk: Chunk, layers: range, request: Mapping[str, Any], key: tuple[int, int]) -> None:
        if request["weights"]:
            for number in layers:
                layer = self._model.layers[number][1]
                names = self._names_of(layer)
                self.weights.arrays[number] = {name: self.receive_weight() for name in names}
        numbers: list[int] = []
        x = self._gathered("input", numbers)
        ends = [0, *accumulate(numbers)]
        rows = [slice(*pair) for pair in pairwise(ends)]
        ctx = self._context(request["ctx"], {name: self._gathered("input") for name in request["arrays"]})
        self._extras.of_layer.clear()
        y, saved = chunk.forward(x, ctx)
        del x
        sends = self._scatter(y, rows, "output")
        del y
        if ctx.training:
            self._under_way[key] = saved, rows
            self._send_extras(layers)
        for send in sends:
            send.wait()

    def receive_weight(self) -> Array:
        """The next array of weights or buffers that the first owner sends."""
        return self._group.receive(self.owners[0], like=self._backend, label="weights")

    def _names_of(self, layer: Layer) -> list[str]:
        """The names of a layer's arrays in the order in which an owner sends them."""
        names = [*layer.parameters, *layer.buffers]
        return list(_leaves(tree_of({name: name for name in names})))

    def _context(self, scalars: Mapping[str, Any], arrays: Mapping[str, Array]) -> ForwardContext:
        xp, length = self._backend.xp, scalars["length"]
        positions = [xp.asarray(self._layout.positions(length, self._mesh, where)) for where in ("inside", "residual")]
        ctx = ForwardContext(*positions, **scalars, samples=arrays.get("samples"), mask=arrays.get("mask"))
        if "numbers" in arrays:
            ctx = replace(ctx, documents=Documents(arrays["numbers"], arrays.get("starts")))
        return ctx

    def _send_extras(self, layers: range) -> None:
        xp = self._backend.xp
        for number in layers:
            layer, extra = self._model.layers[number][1], self._extras.of_layer.get(number, Extra())
            values = [extra.updates[name] for name in _updated(layer)]
            values += [extra.outputs[name] for name in layer.side_outputs]
            for value in values:
                for owner in self.owners:
                    self._group.send(
                        owner, value if hasattr(value, "shape") else xp.asarray(value), label="side outputs"
                    )

    def _backward(self, chunk: Chunk, layers: range, request: Mapping[str, Any], key: tuple[int, int]) -> None:
        (saved, rows), dy, sends = self._under_way.pop(key), self._gathered("gradient"), []

        def pass_on(dx: Any) -> None:
            if layers.start:  # nobody needs the gradient of data
                sends.extend(self._scatter(wait_for(dx), rows, "gradient"))

        if request["first"]:
            self.weights.begin({number: self._model.layers[number][1] for number in layers})
        chunk.backward(saved, dy, pass_on)
        del dy
        for send in sends:
            send.wait()
        for number in reversed(layers) if request["last"] else ():
            for name, array in self.weights.sums_of.pop(number).items():
                if (full_name := f"{number}/{name}") in self.weights.untouched:
                    array[...] = 0
                    self.weights.untouched.remove(full_name)
                self._group.send(self.owners[0], array, label="weights")
