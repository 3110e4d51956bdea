"""What a model costs on a machine: the costs of its layers, by dry runs of one micro-batch on one stage, and estimates.

One of equal layers is run. The small mesh of the dry run has the axes that shard layers (tensor, context and expert
parallelism, rows and columns of images), not those that only repeat them (data, pipe).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from copy import copy
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from spmd_engine.arrays.precision import dtype_of
from spmd_engine.axes import MeshPosition, position_of
from spmd_engine.engine import ParallelConfig
from spmd_engine.engine.build import composed_layout
from spmd_engine.engine.optimizers import AdamW, Optimizer
from spmd_engine.engine.schedules import named
from spmd_engine.engine.state.assignment import assign
from spmd_engine.errors import SpmdError
from spmd_engine.layers import Layer
from spmd_engine.models import Model, layout_for
from spmd_engine.planning.dry_run.analyze import analyze
from spmd_engine.planning.dry_run.engine import PassCache, kind_of
from spmd_engine.planning.dry_run.step_analysis import Computation, HashedOnce, Phases, RankStep, StepAnalysis
from spmd_engine.planning.machine.machine import Machine
from spmd_engine.planning.search.estimate import Estimator, Slots
from spmd_engine.planning.search.layer_costs import LayerCosts, ShardedLayers, ZeroComm, between
from spmd_engine.planning.search.search_space import BATCH, PIPE, REPLICAS, STORED, SUMMED, Axes, Candidate, first_group
from spmd_engine.planning.search.shares import stage_slowdowns
from spmd_engine.planning.simulator.times import CollectiveTimes, ComputeTimes
from spmd_engine.sharding import Layout

#: Samples of a micro-batch per rank for which layers are dry run; other costs are interpolated linearly.
SAMPLES = (1, 8)
Costs = tuple[dict[str, LayerCosts], float]  #: costs of layers by name; the optimizer's seconds per element
STATES = ("parameters", "gradients", "optimizer state")
#: The fields of ``LayerCosts`` that hold the seconds of each phase.
_SECONDS = {
    Phases.FORWARD: "forward",
    Phases.BACKWARD_INPUT: "backward_input",
    Phases.BACKWARD_WEIGHTS: "backward_weights",
}


class CostModel:
    """Costs of a model on a machine, for all candidates; what several of them share is computed once."""

    def __init__(
        self,
        model: Model,
        machine: Machine,
        *,
        dtype: Any = np.float32,
        sequence: int | None = None,
        optimizer: Optimizer | None = None,
        base: ParallelConfig = ParallelConfig(),  # noqa: B008 (immutable)
        hides_sums: bool = True,
    ) -> None:
        """``hides_sums``: whether gradients are reduced while the last backward runs, as in the engine."""
        self.model, self.machine, self.sequence, self.base = model, machine, sequence, base
        self.dtype, self.optimizer, self.hides_sums = dtype_of(dtype), optimizer or AdamW(), hides_sums
        self.states = len(self.optimizer.kinds)  #: arrays of optimizer state per parameter
        self.compute, self.collectives = ComputeTimes(machine), CollectiveTimes(machine)
        self.small, self.like = reduced(model)
        self._has_images = {"h", "w"} <= set(model.inputs.split())
        self._results: dict[tuple, Any] = {}
        self._refusal: SpmdError | None = None  # why the model cannot be sharded by a candidate
        self._estimates_anything = False
        #: dry runs by the axes and options of the small mesh: they do not depend on the machine
        self.analyses: dict[tuple, StepAnalysis] = {}
        #: seconds of the same work while all ranks of a node compute, by the name of the kind of node
        self.seconds_by_node: dict[str, float] = {}
        self.cache = PassCache()  #: other analyses of the model may share it

    def once(self, key: tuple, compute: Callable[[], Any]) -> Any:
        """The result of ``compute``, which is called once for each key."""
        if key not in self._results:
            self._results[key] = compute()
        return self._results[key]

    def estimator(self, candidate: Candidate, first: bool = False) -> Estimator | None:
        """The estimator of a candidate, or of its ``first`` bound; None if the model cannot be sharded by it."""
        samples = candidate.batch_size // candidate.micro_batches
        key = candidate.axes, samples, candidate.sequence_parallel, candidate.recompute, candidate.zero, first
        if key not in self._results:  # not by ``once``: this is called for each bound
            self._results[key] = self._sharded(candidate, first)
        sharded, slowdowns = self._results[key], None
        given, by_node = self.base.work_shares, self.seconds_by_node
        if sharded and (self.machine.heterogeneous or given):
            key = "slowdowns", candidate.axes, samples, candidate.order
            slowdowns = self.once(key, lambda: stage_slowdowns(self.machine, by_node, candidate, given))
        return sharded and Estimator(self, candidate, *sharded, slowdowns=slowdowns)

    def check_layers(self) -> None:
        """Raise the error of a candidate if no candidate could be analyzed: the layers themselves are wrong."""
        if self._refusal is not None and not self._estimates_anything:
            raise self._refusal

    def _sharded(self, candidate: Candidate, first: bool) -> tuple[ShardedLayers, float] | None:
        """The layers under the candidate's ZeRO stage, and the seconds of the optimizer for an element; None if the
        model cannot be sharded so."""
        try:
            costs, update = self.costs(candidate, first)
        except SpmdError as error:
            self._refusal = error
            return None
        self._estimates_anything = True
        key = "layers", id(costs), candidate.recompute
        layers = self.once(key, lambda: ShardedLayers(self.model, costs, candidate.recompute))
        _, stored, _, _ = self.groups(candidate.axes)
        # a bound on work does not bound what hides ZeRO's gathers; ZeRO-1 sends nothing per micro-batch
        if first or candidate.zero < 2 or len(stored) == 1 or self.is_by_copy(candidate):
            return layers, update
        zero, comm = candidate.zero, lambda: self.zero_comm(layers, stored)
        return self.once((*key, stored, zero), lambda: layers.under_zero(zero, comm())), update

    def groups(self, axes: Axes) -> tuple[HashedOnce, ...]:
        """The ranks of a mesh's first group over SUMMED, STORED, REPLICAS, and axis pipe."""
        if axes not in self._results:
            self._results[axes] = tuple(first_group(axes, over) for over in (SUMMED, STORED, REPLICAS, (PIPE,)))
        return self._results[axes]

    def is_by_copy(self, candidate: Candidate) -> bool:
        """Whether ranks that sum gradients move the bytes themselves."""
        summed = self.groups(candidate.axes)[0]
        return self.once(("by copy", summed), lambda: self.collectives.of("all_reduce", summed, 1.0).works)

    def zero_comm(self, layers: ShardedLayers, ranks: HashedOnce) -> ZeroComm:
        """The times of gathers and reductions of the layers' parameter groups over these ranks."""
        key = "zero comm", layers.groups, ranks
        return self.once(key, lambda: layers.zero_comm(self.collectives, ranks, self.dtype))

    def slots(self, candidate: Candidate, micro_batches: int) -> Slots:
        """The slots of the candidate's schedule."""
        name, chunks, pipe = candidate.schedule, candidate.chunks, candidate.pipe

        def compute() -> Slots:
            assert name is not None
            return Slots(named(name, chunks if chunks > 1 else None), pipe, micro_batches)

        return self.once(("slots", name, chunks, pipe, micro_batches), compute)

    # --- costs of layers

    def costs(self, candidate: Candidate, first: bool = False) -> tuple[list[LayerCosts], float]:
        """The costs of each layer as the candidate shards it, and the seconds of the optimizer and the gradient norm
        per element that a rank updates. Equal layers have one name.

        ``first``: lower bounds of these, the costs of equal shares of unsharded layers without communication inside.
        """

        def listed() -> tuple[list[LayerCosts], float]:
            costs, update = self._interpolate(candidate, candidate.samples, first)
            return [costs[self.like[name]] for name, _ in self.model.layers], update

        return self.once(("listed", *self._key(candidate, candidate.samples), first), listed)

    def shards_layers(self, candidate: Candidate) -> bool:
        """Whether the candidate shards layers; if not, ``costs`` needs no more dry runs than its ``first`` bounds."""
        return _shard_count(self._inner_axes(candidate)) > 1

    def _inner_axes(self, candidate: Candidate) -> dict[str, int]:
        """The axes of the small mesh."""
        outer = (PIPE, "replicate", "shard") if self._has_images else (PIPE, "data", "replicate", "shard")
        return {axis: size for axis, size in candidate.axes if axis not in outer and size > 1}

    def _key(self, candidate: Candidate, samples: int) -> tuple:
        """What a dry run of the small model depends on."""
        inner = tuple(self._inner_axes(candidate).items())
        return inner, candidate.sequence_parallel, candidate.context_method, samples

    def _interpolate(self, candidate: Candidate, samples: int, first: bool) -> Costs:
        """Costs for a number of samples: by a dry run, or by linear interpolation between two."""
        if samples in SAMPLES:
            key = "costs", *self._key(candidate, samples), first
            return self.once(key, lambda: self._find(candidate, samples, first))
        above = min((n for n in SAMPLES if n > samples), default=SAMPLES[-1])
        low = max(n for n in SAMPLES if n < above)
        (few, _), (many, update) = (self._interpolate(candidate, n, first) for n in (low, above))
        share = (samples - low) / (above - low)
        return {name: between(few[name], many[name], share) for name in few}, update

    def _find(self, candidate: Candidate, samples: int, first: bool) -> Costs:
        """Costs by a dry run; a ``first`` bound has no saved memory, which either of two layers may count."""
        inner = self._inner_axes(candidate)
        if first:
            plain = replace(candidate, axes=(), sequence_parallel=False, context_method=None)
            step, parts = self._analyze(plain, samples).classes[0].step, _shard_count(inner)
            position = MeshPosition(inner, dict.fromkeys(inner, 0))
        else:
            classes, parts = self._analyze(candidate, samples).classes, 1
            step = max((rank_class.step for rank_class in classes), key=lambda step: step.flops)
            position = MeshPosition(inner or {"data": 1}, dict(step.coordinates))
        layout = layout_for(self.small, position, sequence_parallel=candidate.sequence_parallel)
        costs = self._layer_costs(step, position, layout, candidate, samples, parts)
        for rank, (_, node) in enumerate(self.machine.places if self.machine.heterogeneous else ()):
            if node.name not in self.seconds_by_node:
                work = sum(self.compute.of(rank, computation).seconds for computation in step.computations)
                self.seconds_by_node[node.name] = work * node.contention
        elements = sum(layer.parameters - layer.tied for layer in costs)
        rest = [computation for computation in step.computations if computation.phase in (Phases.UPDATE, Phases.NORM)]
        seconds = sum(self._seconds(computation, parts) for computation in rest)
        return {layer.name: layer for layer in costs}, seconds / max(elements, 1)

    def _seconds(self, computation: Computation, parts: int) -> float:
        compute = self.compute
        return compute.of(0, computation).seconds if parts == 1 else compute.least(0, computation, parts)

    def _analyze(self, candidate: Candidate, samples: int) -> StepAnalysis:
        key, inner = self._key(candidate, samples), self._inner_axes(candidate)
        if key not in self.analyses:
            composition = ParallelConfig(
                sequence_parallel=candidate.sequence_parallel, context_method=candidate.context_method
            )
            axes = inner or {"data": 1}
            self.analyses[key] = analyze(
                with_even_vocabulary(self.small, axes, composition),
                axes,
                composition,
                batch_size=samples * prod(size for axis, size in inner.items() if axis in BATCH),
                sequence=self.sequence,
                dtype=self.dtype,
                optimizer=self.optimizer,
                cache=self.cache,
                device=self.machine.device,
            )
        return self.analyses[key]

    def _layer_costs(
        self, step: RankStep, position: MeshPosition, layout: Layout, candidate: Candidate, samples: int, parts: int
    ) -> list[LayerCosts]:
        names = [name for name, _ in self.small.layers]
        costs: dict[str, dict[str, Any]] = {name: defaultdict(int) for name in names}
        launched: dict[tuple[str, str], float] = {}  # seconds of a device's host, for any number of parts
        for computation in step.computations:
            layer, phase = computation.layer, computation.phase
            if phase == Phases.LOSS:
                layer, phase = names[-1], Phases.FORWARD
            if layer not in costs or phase not in _SECONDS:
                continue
            costs[layer][_SECONDS[phase]] += self._seconds(computation, parts)
            if computation.phase != Phases.LOSS:
                time = self.compute.of(0, computation)
                before = launched.get((layer, phase), time.host)
                launched[layer, phase] = before + (time.launches if parts == 1 else 0.0)  # a shard may have fewer
        for (layer, phase), seconds in launched.items():
            costs[layer]["host_forward" if phase == Phases.FORWARD else "host_backward"] += seconds
        if parts == 1:
            self._add_communication(costs, step, candidate)
            _add_memory(costs, step)
        self._add_outputs(costs, position, layout, samples)
        _add_parameters(costs, self.small, position, layout)
        self._add_groups(costs, position, layout)
        return [LayerCosts(name, **fields) for name, fields in costs.items()]

    def _add_communication(self, costs: Mapping[str, dict[str, Any]], step: RankStep, candidate: Candidate) -> None:
        """Add exposed seconds of communication inside layers, and bytes sent."""
        computations = step.computations
        for call in step.communications:
            number = call.begins - 1 if call.operation in ("all_reduce", "reduce_scatter") else call.begins
            computation = computations[min(max(number, 0), len(computations) - 1)]
            if computation.phase in (Phases.UPDATE, Phases.NORM) or call.begins >= len(computations):
                continue
            fields = costs[computation.layer or self.small.layers[-1][0]]
            is_backward = computation.phase in (Phases.BACKWARD_INPUT, Phases.BACKWARD_WEIGHTS)
            direction = "backward" if is_backward else "forward"
            ranks = first_group(candidate.axes, call.axes.split(","))
            seconds = self.collectives.of(call.operation, ranks, call.whole_bytes).seconds
            hidden = sum(self.compute.of(0, c).seconds for c in computations[call.begins : call.ends])
            fields[f"inside_{direction}"] += max(seconds - hidden, 0.0)
            fields[f"sent_{direction}"] += call.sent

    def _add_outputs(
        self, costs: Mapping[str, dict[str, Any]], place: MeshPosition, layout: Layout, samples: int
    ) -> None:
        """Add bytes of each layer's output on a rank."""
        model = self.small
        lengths = {"s": self.sequence or model.context or 1}
        if model.sample is not None:
            lengths |= dict(zip(model.inputs.split()[1:], model.sample, strict=True))
        for name, layer in model.layers:
            windows: Any = getattr(layer, "windows", None)
            if hasattr(windows, "outputs"):
                lengths |= dict(zip("hwyx", 2 * windows.outputs, strict=True))
            lengths |= {letter: n for letter, n in layer.sizes.items() if letter not in "hwyx" or not model.sample}
            count = 1.0
            for letter in layer.outputs.dims.split():
                if letter in "bn":
                    count *= samples
                else:
                    shards = place.axis_size(layout.axes(letter, layer.outputs.where))
                    count *= -(-lengths.get(letter, 1) // shards)
            costs[name]["output"] = int(count) * self.dtype.itemsize

    def _add_groups(self, costs: Mapping[str, dict[str, Any]], place: MeshPosition, layout: Layout) -> None:
        """Add elements of each layer's parameter groups in the order of their use: its own, and those of other layers.

        A group that several layers share belongs to the first of them.
        """
        assignment = assign(self.small, place, layout, self.dtype.itemsize, storage=self.base.storage)
        group_of = {name: group for group in assignment.groups for name in group.spans}
        assigned = set()
        for number, (name, layer) in enumerate(self.small.layers):
            tied = set(layer.tied.values())
            used = dict.fromkeys((group_of[full], full in tied) for full in assignment.uses[number].values())
            own_groups = [group for group, is_tied in used if not is_tied and group not in assigned]
            assigned.update(own_groups)
            costs[name]["groups"] = tuple(group.size for group in own_groups)
            costs[name]["tied_groups"] = tuple(group.size for group, is_tied in used if is_tied)


def reduced(model: Model) -> tuple[Model, dict[str, str]]:
    """The model with one of each set of equal layers, and for each layer's name the name of the layer that is kept.

    Equal layers of images may have images of other sizes, so only one of equal consecutive layers is kept.
    """
    first_like: dict[Hashable, str] = {}
    like: dict[str, str] = {}
    distinct = []
    images = {"h", "w"} <= set(model.inputs.split())
    for name, layer in model.layers:
        key = kind_of(layer) if images else _layer_key(name, layer)
        if images and key not in first_like:
            first_like.clear()
        if layer.inputs.dims != layer.outputs.dims or key not in first_like:
            first_like.setdefault(key, name)
            like[name] = name
            distinct.append((name, layer))
        else:
            like[name] = first_like[key]
    return replace(model, layers=tuple(distinct)), like


def _layer_key(name: str, layer: Layer) -> Hashable:
    """A key that is equal for equal layers."""
    declared = tuple((parameter, array.dims, array.whole(layer.sizes)) for parameter, array in layer.parameters.items())
    signature = type(layer).__name__, layer.inputs, layer.outputs, name.partition("/")[2]
    return *signature, tuple(sorted(layer.sizes.items())), declared


def with_even_vocabulary(model: Model, axes: Mapping[str, int], composition: ParallelConfig) -> Model:
    """The model with its vocabulary rounded up to equal shards: with uneven shards, every rank would need a dry run."""
    place = position_of(0, axes)
    parts = place.axis_size(composed_layout(model, place, composition).axes("v"))
    even, layers = -(-model.vocabulary // parts) * parts, []
    for name, layer in model.layers:
        if even and layer.sizes.get("v") == model.vocabulary:
            layer = copy(layer)
            layer.sizes = {**layer.sizes, "v": even}
        layers.append((name, layer))
    return replace(model, layers=tuple(layers), vocabulary=even)


def _shard_count(inner: Mapping[str, int]) -> int:
    """The number of shards of a layer on a mesh, not counting axes that shard samples."""
    return prod(size for axis, size in inner.items() if axis not in BATCH)


# --- The fields of ``LayerCosts``, added to those of each layer by name


def _add_memory(costs: Mapping[str, dict[str, Any]], step: RankStep) -> None:
    """Add bytes that a forward keeps, and peak bytes above these in the forward and the backward."""
    activations: dict[tuple[str, str], int] = {}
    peaks: dict[tuple[str, str], int] = {}
    static = sum(step.before.get(kind, 0) for kind in STATES)
    for moment in step.timeline:
        computation = step.computations[moment.computation]
        key = computation.layer or computation.phase, computation.phase
        activations.setdefault(key, moment.bytes_by_kind.get("activations", 0))
        peaks[key] = max(peaks.get(key, 0), moment.total - static)
    for name, following in zip(costs, [*list(costs)[1:], Phases.LOSS], strict=True):
        before = activations.get((name, Phases.FORWARD), 0)
        after = activations.get((following, Phases.LOSS if following == Phases.LOSS else Phases.FORWARD), before)
        saved = max(after - before, 0)
        forward = peaks.get((name, Phases.FORWARD), 0)
        if following == Phases.LOSS:
            forward = max(forward, peaks.get((Phases.LOSS, Phases.LOSS), 0))
        backward = max(peaks.get((name, Phases.BACKWARD_INPUT), 0), peaks.get((name, Phases.BACKWARD_WEIGHTS), 0))
        costs[name]["saved"] = saved
        costs[name]["above_forward"] = max(forward - before - saved, 0)
        costs[name]["above_backward"] = max(backward - before - saved, 0)


def _add_parameters(costs: Mapping[str, dict[str, Any]], model: Model, place: MeshPosition, layout: Layout) -> None:
    """Add elements of each layer's parameters on a rank, and how many of them are tied."""
    for name, layer in model.layers:
        counts = {}
        for key, parameter in layer.parameters.items():
            count = prod(layout.spec(parameter.dims).largest_shape(parameter.whole(layer.sizes), place))
            shards = place.axis_size(layout.axes(parameter.element[0])) if parameter.element else 1
            counts[key] = -(-count // shards)
        costs[name]["parameters"] = sum(counts.values())
        costs[name]["tied"] = sum(count for key, count in counts.items() if key in layer.tied)
