"""The costs of each layer for one micro-batch on a rank, from which plans are estimated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np

from spmd_engine.arrays.precision import accumulated_in
from spmd_engine.engine.pipeline import Recompute, segments
from spmd_engine.engine.zero.reducer import IN_FLIGHT
from spmd_engine.models import Model
from spmd_engine.planning.dry_run.step_analysis import HashedOnce
from spmd_engine.planning.simulator.times import CollectiveTimes


@dataclass(frozen=True)
class LayerCosts:
    """The costs of one layer, on a rank with its shard of a micro-batch."""

    name: str
    forward: float = 0.0  #: seconds of work
    backward_input: float = 0.0
    backward_weights: float = 0.0
    inside_forward: float = 0.0  #: seconds of exposed communication inside the layer: tensor and context parallel
    inside_backward: float = 0.0
    sent_forward: float = 0  #: bytes that the rank sends in the layer
    sent_backward: float = 0
    saved: int = 0  #: bytes kept from the forward to the backward
    output: int = 0  #: bytes of the output
    above_forward: int = 0  #: peak bytes of its forward, above what it saves
    above_backward: int = 0  #: peak bytes of its backward, above what it had saved
    parameters: int = 0  #: elements on the rank, unsharded
    tied: int = 0  #: elements of ``parameters`` that are tied to another layer
    groups: tuple[int, ...] = ()  #: elements of its own parameter groups, in the order of their gathers
    tied_groups: tuple[int, ...] = ()  #: elements of groups of other layers that it uses
    host_forward: float = 0.0  #: seconds in which a device's host launches the forward
    host_backward: float = 0.0


def between(a: LayerCosts, b: LayerCosts, share: float) -> LayerCosts:
    """Linear interpolation from ``a`` to ``b``, or extrapolation, but never below 0."""
    values = {}
    for cost in fields(LayerCosts):
        low, high = getattr(a, cost.name), getattr(b, cost.name)
        if isinstance(low, float | int):
            value = max(low + (high - low) * share, 0.0)
            values[cost.name] = round(value) if isinstance(low, int) and isinstance(high, int) else value
    return replace(a, **values)


OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce")
#: Seconds of each layer's parameter groups, each alone on its link, by operation: float64[2, layers], of its own groups
#: and those of other layers that it uses; and of a "last reduce_scatter", of ``IN_FLIGHT`` groups: float64[1, layers].
ZeroComm = dict[str, np.ndarray]


class ShardedLayers:
    """All layers of a model under one sharding and one choice of recomputation, as arrays float64[layers].

    ``forward``, ``back`` and ``weights`` are seconds of each layer for a micro-batch: of the forward, of the input
    gradient with recomputation, of the weight gradient; ``work`` is their sum, ``whole`` that of all layers. ``kept``
    are bytes of activations that a forward keeps for its backward, ``kept_before`` their sum over earlier layers, and
    ``running`` the peak while a layer runs, including ``kept_before``. ``elements`` are parameters.
    """

    def __init__(self, model: Model, costs: Sequence[LayerCosts], recompute: str) -> None:
        self.costs = costs
        parts = segments(model, range(len(costs)), Recompute(recompute))
        repeated = [part.layers for part in parts if part.recomputed]
        recomputed = np.zeros(len(costs), bool)
        for layers in repeated:
            recomputed[layers.start : layers.stop] = True
        self.later_repeated = {layer for layers in repeated for layer in layers[1:]}
        self.forward = self._array("forward") + self._array("inside_forward")
        self.forward += self._idle(model, self._array("host_forward"), self.forward)
        inputs, inside = self._array("backward_input"), self._array("inside_backward")
        self.weights = self._array("backward_weights")
        work = inputs + inside + self.weights
        idle = self._idle(model, self._array("host_backward"), work)
        self.back = inputs + inside + idle + recomputed * self.forward
        self.add_up()
        self.exposed = 0.0  #: seconds of ``whole`` in gathers and reductions of ZeRO
        #: seconds of the forward and backward of a micro-batch, without weight gradients and recomputation
        self.path = float(self.forward.sum() + inputs.sum())
        #: seconds of ``work`` in communication inside layers; and bytes that a rank with all layers sends in them
        self.inside = float((self._array("inside_forward") * (1 + recomputed) + inside).sum())
        sent = self._array("sent_forward"), self._array("sent_backward")
        self.sent = float((sent[0] * (1 + recomputed) + sent[1]).sum())
        self.output = self._array("output")
        saved = self._array("saved")
        self.kept = np.where(recomputed, 0.0, saved)
        for layers in repeated:
            if layers.start > 0:
                self.kept[layers.start] = costs[layers.start - 1].output
        self.all_kept = float(self.kept.sum())
        self.kept_before = np.cumsum(self.kept) - self.kept
        above = np.maximum(self._array("above_forward"), self._array("above_backward"))
        self.running = self.kept_before + self.kept + above
        for layers in repeated:
            part = slice(layers.start, layers.stop)
            self.running[part] += np.cumsum(saved[part])
        self.elements = self._array("parameters")
        self.own_elements = float(self.elements.sum() - self._array("tied").sum())
        #: elements that are gathered at once for a layer: those of its segment if that is recomputed
        self.gathered = self.elements.copy()
        for layers in repeated:
            part = slice(layers.start, layers.stop)
            self.gathered[part] = self.elements[part].sum()
        #: elements of each layer's last reduced groups
        self.last_groups = np.array([float(sum(cost.groups[-IN_FLIGHT:])) for cost in costs])
        numbers = {name: number for number, (name, _) in enumerate(model.layers)}
        #: layer with a tied parameter -> the layer that owns it
        self.owners = {
            numbers[name]: numbers[full.rpartition("/")[0]]
            for name, layer in model.layers
            for full in layer.tied.values()
        }

    def __len__(self) -> int:
        return len(self.costs)

    def add_up(self) -> None:
        """Add up the seconds of each layer, and of the layers before each: float64[3, layers + 1]."""
        kinds = np.array([self.forward, self.back, self.weights])
        self.work = kinds.sum(axis=0)
        self.before = np.concatenate([np.zeros((3, 1)), np.cumsum(kinds, axis=1)], axis=1)
        self.whole = float(self.work.sum())

    def _array(self, name: str) -> np.ndarray:
        """A field of each layer's costs: float64[layers]."""
        distinct, indices = self.different
        return np.array([float(getattr(cost, name)) for cost in distinct])[indices]

    def _idle(self, model: Model, host: np.ndarray, work: np.ndarray) -> np.ndarray:
        """Seconds that a device waits for its host, float64[layers]. Within a block the host launches ahead of the
        device, so their times are compared block by block."""
        if not host.any():
            return np.zeros(len(host))
        blocks = [name.partition("/")[0] for name, _ in model.layers]
        number = np.cumsum([block != before for block, before in zip(blocks, ["", *blocks], strict=False)])
        hosts = np.bincount(number, host)
        idle = np.maximum(hosts - np.bincount(number, work), 0.0) / np.maximum(hosts, 1e-30)
        return idle[number] * host

    # Communication of ZeRO, by parameter group. Under ZeRO-3 a layer's groups are prefetched while the layer before it
    # computes (``engine.zero.unsharder``). All groups of a recomputed segment are gathered at its beginning, except its
    # last layer's, which were prefetched. From ZeRO-2 on gradients are reduced in every micro-batch,
    # at most ``IN_FLIGHT`` groups at a time (``engine.zero.reducer``). A rank's link serves one collective at a time

    @cached_property
    def groups(self) -> HashedOnce:
        """The parameter groups of all layers: what communication of ZeRO depends on."""
        distinct, indices = self.different
        return HashedOnce((tuple((cost.groups, cost.tied_groups) for cost in distinct), tuple(indices)))

    def zero_comm(self, collectives: CollectiveTimes, ranks: Sequence[int], dtype: np.dtype) -> ZeroComm:
        """Seconds of the communication of parameter groups that are sharded over these ranks."""
        distinct, indices = self.different

        def seconds(operation: str, groups: Sequence[Sequence[int]]) -> np.ndarray:
            itemsize = (accumulated_in(dtype) if operation == "reduce_scatter" else dtype).itemsize
            times = [sum(collectives.of(operation, ranks, size * itemsize).seconds for size in row) for row in groups]
            return np.array(times)[indices]

        all_groups = [[cost.groups for cost in distinct], [cost.tied_groups for cost in distinct]]
        comm = {name: np.array([seconds(name, groups) for groups in all_groups]) for name in OPERATIONS}
        last = seconds("reduce_scatter", [cost.groups[-IN_FLIGHT:] for cost in distinct])
        return comm | {"last reduce_scatter": np.array([last])}

    def under_zero(self, zero: int, comm: ZeroComm) -> ShardedLayers:
        """These layers, with exposed gathers and reductions of a micro-batch under this ZeRO stage in their seconds."""
        layers = copy(self)
        layers.back = self._backward(self.back + self.weights, zero, comm) - self.weights
        if zero >= 3:
            layers.forward = np.maximum(self.forward, comm["all_gather"].sum(axis=0))
        layers.path = self.path + float((layers.forward - self.forward).sum())
        layers.add_up()
        layers.exposed = layers.whole - self.whole
        return layers

    def _backward(self, work: np.ndarray, zero: int, comm: ZeroComm) -> np.ndarray:
        """Seconds of each layer's backward and recomputation under ZeRO-2 or 3, given its ``work``."""
        last = comm["last reduce_scatter"][0]
        waited = comm["reduce_scatter"][0] - last
        if zero < 3:
            return waited + np.maximum(work, last)
        gathers = comm["all_gather"].sum(axis=0)
        prefetched, exposed = gathers.copy(), np.zeros_like(gathers)
        for layer in self.later_repeated:
            if layer - 1 not in self.later_repeated:  # the first of its segment
                prefetched[layer - 1], exposed[layer - 1] = 0.0, gathers[layer - 1]
            if layer + 1 in self.later_repeated:  # gathered with the segment's first layer, while that computes
                prefetched[layer], exposed[layer] = 0.0, max(gathers[layer] - self.forward[layer - 1], 0.0)
        return exposed + waited + np.maximum(work, prefetched + last)

    @cached_property
    def different(self) -> tuple[list[LayerCosts], list[int]]:
        """The distinct costs, and the index of each layer's costs: most layers of a model are equal."""
        numbers: dict[int, int] = {}
        indices = [numbers.setdefault(id(cost), len(numbers)) for cost in self.costs]
        return [self.costs[indices.index(number)] for number in range(len(numbers))], indices


# --- Sums over the layers of each pipeline stage


class StageSums:
    """Chunk k begins at layer ``starts[k]`` and is on stage k % ``stages``, which also holds ``overlap`` more layers on
    each side, if it has one chunk. Results are float64[stages]."""

    def __init__(self, layers: ShardedLayers, starts: Sequence[int], stages: int, overlap: int = 0) -> None:
        self.layers, self.starts, self.stages, self._overlap = layers, np.asarray(starts), stages, overlap
        self.edges = np.array([*starts, len(layers)])

    def by_chunk(self, of_layer: np.ndarray) -> np.ndarray:
        """Sums over each chunk's layers: float64[chunks]."""
        return np.add.reduceat(of_layer, self.starts)

    def by_stage(self, of_chunk: np.ndarray) -> np.ndarray:
        """Sums over each stage's chunks."""
        return of_chunk.reshape(-1, self.stages).sum(axis=0)

    def worst_chunk(self, of_chunk: np.ndarray) -> np.ndarray:
        """The largest of each stage's chunks."""
        return of_chunk.reshape(-1, self.stages).max(axis=0)

    @cached_property
    def kept(self) -> np.ndarray:
        """Bytes of activations that a micro-batch keeps in each chunk: float64[chunks]."""
        return self.by_chunk(self.layers.kept)

    @cached_property
    def running(self) -> np.ndarray:
        """Peak bytes while a layer runs backward, above what the stage keeps of micro-batches."""
        most = np.maximum.reduceat(self.layers.running, self.starts)
        return self.worst_chunk(most - self.layers.kept_before[self.starts] - self.kept)

    @cached_property
    def _tied_layers(self) -> list[tuple[int, int, int]]:
        """For each layer with a tied parameter: the layer, its stage, and the stage of the owner."""
        owners = self.layers.owners
        chunks = {x: int(np.searchsorted(self.starts, x, side="right")) - 1 for x in {*owners, *owners.values()}}
        stage = {layer: chunk % self.stages for layer, chunk in chunks.items()}
        return [(layer, stage[layer], stage[owner]) for layer, owner in owners.items()]

    @cached_property
    def elements(self) -> np.ndarray:
        """Parameters of a rank; a tied parameter counts once on each stage."""
        return self.by_stage(self.by_chunk(self.layers.elements)) - self._tied_elements(
            lambda stage, owner_stage: stage == owner_stage
        )

    @cached_property
    def only_held(self) -> np.ndarray:
        """Parameters of a rank that another stage computes."""
        return self._around(self.layers.elements, self._overlap) - self._around(self.layers.elements, 0)

    @cached_property
    def sent_gradients(self) -> np.ndarray:
        """Gradients that a stage sends to stages that only hold their parameters: elements."""
        layers, holding = np.arange(len(self.layers)), np.zeros(len(self.layers))
        for first, end in zip(self.edges[:-1], self.edges[1:], strict=True):
            holding += (layers >= first - self._overlap) & (layers < end + self._overlap)
        return self.by_stage(self.by_chunk(self.layers.elements * (holding - 1))) * bool(self._overlap)

    def _around(self, of_layer: np.ndarray, more: int) -> np.ndarray:
        """Sums over each stage's layers, of one chunk, and so many ``more`` on each side."""
        before = np.array([0.0, *np.cumsum(of_layer)])
        firsts, ends = np.maximum(self.edges[:-1] - more, 0), np.minimum(self.edges[1:] + more, len(of_layer))
        return self.by_stage(before[ends] - before[firsts])

    @cached_property
    def tied(self) -> np.ndarray:
        """Parameters of a rank that are tied to another layer."""
        return self._tied_elements(lambda stage, owner_stage: True)

    @cached_property
    def apart(self) -> np.ndarray:
        """Parameters of a rank that are tied to a layer of another stage."""
        return self._tied_elements(lambda stage, owner_stage: stage != owner_stage)

    def _tied_elements(self, counts: Callable[[int, int], bool]) -> np.ndarray:
        """Tied parameters of each stage that ``counts``: a function of their stage and the stage of their owner."""
        elements = np.zeros(self.stages)
        for layer, stage, owner_stage in self._tied_layers:
            if counts(stage, owner_stage):
                elements[stage] += self.layers.costs[layer].tied
        return elements

    def zero_seconds(self, comm: ZeroComm) -> list[np.ndarray]:
        """Seconds of communicating all parameter groups once, for each of ``OPERATIONS``."""
        times = []
        for own, tied in map(comm.__getitem__, OPERATIONS):
            seconds = self.by_stage(self.by_chunk(own))
            for layer, stage, owner_stage in self._tied_layers:
                if stage != owner_stage:
                    seconds[stage] += tied[layer]
            times.append(seconds)
        return times

    @cached_property
    def gathered(self) -> np.ndarray:
        """The most elements that ZeRO-3 has gathered: a layer, and the prefetched next one."""
        before, after = np.roll(self.layers.elements, 1), np.roll(self.layers.elements, -1)
        before[self.starts] = after[self.edges[1:] - 1] = 0  # these belong to other chunks
        return self.worst_chunk(np.maximum.reduceat(self.layers.gathered + np.maximum(before, after), self.starts))

    def whole_gradients(self, micro_batches: int) -> np.ndarray:
        """The most elements of unsharded gradients under ZeRO-2 and 3: those of a layer, and the groups under way of
        the layer that ran backward before it, which may be the chunk's first layer in the micro-batch before."""
        leaving = np.roll(self.layers.last_groups, -1)
        leaving[self.edges[1:] - 1] = self.layers.last_groups[self.starts] if micro_batches > 1 else 0
        return self.worst_chunk(np.maximum.reduceat(self.layers.elements + leaving, self.starts))
