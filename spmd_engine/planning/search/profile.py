"""The costs of a model's layers on a machine, found by analyzing one micro-batch of one stage that has them all.

Layers that are alike are looked at once. What cuts layers (tensor, context and expert parallelism, rows and columns of
images) is on the small mesh that is analyzed; what only repeats them (data, pipe) is not.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from spmd_engine.axes import MeshPosition
from spmd_engine.engine.parallel_config import ParallelConfig, composed_layout
from spmd_engine.engine.state.assignment import assign
from spmd_engine.layers.layer import Layer
from spmd_engine.models import Model, layout_for
from spmd_engine.planning.dry_run.analyze import analyze
from spmd_engine.planning.dry_run.layer_cache import PassCache, kind_of
from spmd_engine.planning.dry_run.match_calls import place_of, whole_bytes
from spmd_engine.planning.dry_run.step_analysis import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHTS,
    FORWARD,
    NORM,
    UPDATE,
    Computation,
    RankStep,
    StepAnalysis,
)
from spmd_engine.planning.machine.machine import Machine
from spmd_engine.planning.search.layer_costs import LayerCosts, between
from spmd_engine.planning.search.search_space import BATCH, PIPE, Candidate
from spmd_engine.planning.simulator.collective_time import CollectiveTimes
from spmd_engine.planning.simulator.compute_time import ComputeTimes

#: Samples of a micro-batch on a rank for which layers are looked at; in between, and beyond, costs follow a line.
SAMPLES = (1, 8)
Costs = tuple[dict[str, LayerCosts], float]  #: of layers by name, and the optimizer's seconds an element
Find = Callable[[Mapping[str, int], Candidate, int], Costs]  #: of layers on a small mesh, with so many samples
STATES = ("parameters", "gradients", "optimizer state")


class Profiles:
    """Costs of layers for every way to cut them, each found once."""

    def __init__(
        self,
        model: Model,
        machine: Machine,
        dtype: Any,
        sequence: int | None = None,
        optimizer: Any = None,
        base: ParallelConfig = ParallelConfig(),  # noqa: B008 (immutable)
    ) -> None:
        self.model, self.machine, self.dtype, self.sequence, self.base = model, machine, dtype, sequence, base
        self.optimizer = optimizer
        self.compute, self.collectives = ComputeTimes(machine), CollectiveTimes(machine)
        self.small, self.like = reduced(model)
        self._images = {"h", "w"} <= set(model.inputs.split())
        self._known: dict[tuple, Costs] = {}
        self._listed: dict[tuple, tuple[list[LayerCosts], float]] = {}
        #: analyses by what is on the small mesh: they are the same on any machine
        self.raw: dict[tuple, StepAnalysis] = {}
        self.of_nodes: dict[str, float] = {}  #: seconds of one and the same work, by the name of a node's kind
        self.cache = PassCache()  #: of passes through layers: other analyses of the model may share it

    def of(self, candidate: Candidate) -> tuple[list[LayerCosts], float]:
        """Of each layer of the model, as this candidate cuts it; named as the first that is like it. And the seconds
        of the optimizer, and of the gradient's norm, for each element that a rank updates."""
        return self._all(self._found, self._inner(candidate), candidate)

    def least(self, candidate: Candidate) -> tuple[list[LayerCosts], float]:
        """What these costs are not below: of parts as large as this candidate's, of layers that were looked at whole,
        with nothing sent inside of them."""
        return self._all(self._part, self._inner(candidate), candidate)

    def cuts(self, candidate: Candidate) -> bool:
        """Whether it cuts layers: else ``of`` has to look at no more than ``least``."""
        return _parts(self._inner(candidate)) > 1

    def _inner(self, candidate: Candidate) -> dict[str, int]:
        """The axes of the small mesh."""
        outer = (PIPE, "replicate", "shard") if self._images else (PIPE, "data", "replicate", "shard")
        return {axis: size for axis, size in candidate.axes if axis not in outer and size > 1}

    def _all(self, find: Find, inner: Mapping[str, int], candidate: Candidate) -> tuple[list[LayerCosts], float]:
        """Of each layer of the model, what is ``find``'s of the small one's."""
        key = self._key(find, inner, candidate, candidate.samples)
        if key not in self._listed:
            costs, update = self._at(find, inner, candidate, candidate.samples)
            self._listed[key] = [costs[self.like[name]] for name, _ in self.model.layers], update
        return self._listed[key]

    @staticmethod
    def _key(find: Find, inner: Mapping[str, int], candidate: Candidate, samples: int) -> tuple:
        how = candidate.sequence_parallel, candidate.context_method
        return find.__name__, tuple(inner.items()), *how, samples

    def _at(self, find: Find, inner: Mapping[str, int], candidate: Candidate, samples: int) -> Costs:
        """Of the small model's layers by name, and the optimizer's, with so many samples: looked at, or on a line."""
        if samples in SAMPLES:
            key = self._key(find, inner, candidate, samples)
            if key not in self._known:
                self._known[key] = find(inner, candidate, samples)
            return self._known[key]
        above = min((n for n in SAMPLES if n > samples), default=SAMPLES[-1])
        low = max(n for n in SAMPLES if n < above)
        (few, _), (many, update) = (self._at(find, inner, candidate, n) for n in (low, above))
        share = (samples - low) / (above - low)
        return {name: between(few[name], many[name], share) for name in few}, update

    def _found(self, inner: Mapping[str, int], candidate: Candidate, samples: int) -> Costs:
        """What layers take that are cut so."""
        found = self._analyzed(inner, candidate, samples)
        step = max((kind.step for kind in found.classes), key=lambda step: step.flops)
        place = MeshPosition(dict(inner) or {"data": 1}, dict(step.coordinates))
        return self._costs(step, place, candidate, samples)

    def _part(self, inner: Mapping[str, int], candidate: Candidate, samples: int) -> Costs:
        """What a part takes, if layers that are not cut are cut into so many; nothing is said of what they save, which
        of two layers may be counted for either."""
        step = (
            self._analyzed({}, replace(candidate, sequence_parallel=False, context_method=None), samples)
            .classes[0]
            .step
        )
        place = MeshPosition(dict(inner), dict.fromkeys(inner, 0))
        return self._costs(step, place, candidate, samples, _parts(inner))

    def _costs(self, step: RankStep, place: MeshPosition, candidate: Candidate, samples: int, parts: int = 1) -> Costs:
        """Of a step, or of a part of it: one of so many."""
        layout = layout_for(self.small, place, sequence_parallel=candidate.sequence_parallel)
        costs = self._layers(step, place, layout, candidate, samples, parts)
        if self.machine.unlike and not self.of_nodes:
            self.of_nodes = self._by_node(step)
        elements = sum(each.parameters - each.tied for each in costs)
        rest = [c for c in step.computations if c.phase in (UPDATE, NORM)]
        seconds = sum(self._seconds(each, parts) for each in rest)
        return {each.name: each for each in costs}, seconds / max(elements, 1)

    def _seconds(self, computation: Computation, parts: int) -> float:
        compute = self.compute
        return compute.of(0, computation).seconds if parts == 1 else compute.least(0, computation, parts)

    def _by_node(self, step: RankStep) -> dict[str, float]:
        """Seconds of a step on a rank of each kind of node, while all ranks of the node compute."""
        found: dict[str, float] = {}
        for rank, (_, node) in enumerate(self.machine.places):
            if node.name not in found:
                seconds = sum(self.compute.of(rank, each).seconds for each in step.computations)
                found[node.name] = seconds * self.machine.crowd(rank)
        return found

    def _analyzed(self, inner: Mapping[str, int], candidate: Candidate, samples: int) -> StepAnalysis:
        key = tuple(inner.items()), candidate.sequence_parallel, candidate.context_method, samples
        if key not in self.raw:
            composition = ParallelConfig(
                sequence_parallel=candidate.sequence_parallel, context_method=candidate.context_method
            )
            axes = inner or {"data": 1}
            self.raw[key] = analyze(
                with_even_vocabulary(self.small, axes, composition),
                axes,
                composition,
                batch_size=samples * prod(size for axis, size in inner.items() if axis in BATCH),
                sequence=self.sequence,
                dtype=self.dtype,
                optimizer=self.optimizer,
                cache=self.cache,
            )
        return self.raw[key]

    def _layers(
        self, step: RankStep, place: MeshPosition, layout, candidate: Candidate, samples: int, parts: int
    ) -> list[LayerCosts]:
        work = {name: dict.fromkeys((FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHTS), 0.0) for name, _ in self.small.layers}
        for each in step.computations:
            if each.layer in work and each.phase in work[each.layer]:
                work[each.layer][each.phase] += self._seconds(each, parts)
        host = {name: dict.fromkeys((FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHTS), 0.0) for name in work}
        for each in step.computations:
            if each.layer in host and each.phase in host[each.layer]:
                host[each.layer][each.phase] = self.compute.of(0, each).host  # of a pass, however many parts it has
        last = self.small.layers[-1][0]
        for each in step.computations:
            if each.phase == "loss":
                work[last][FORWARD] += self._seconds(each, parts)
        inside, sent = self._communication(step, place, candidate) if parts == 1 else ({}, {})
        names = [name for name, _ in self.small.layers]
        memory = _memory(step, names) if parts == 1 else dict.fromkeys(names, (0, 0, 0))
        sizes = _outputs(self.small, place, layout, samples, self.sequence, self.dtype)
        elements = _parameters(self.small, place, layout)
        groups = _groups(self.small, place, layout, np.dtype(self.dtype).itemsize, self.base)
        return [
            LayerCosts(
                name,
                work[name][FORWARD],
                work[name][BACKWARD_INPUT],
                work[name][BACKWARD_WEIGHTS],
                inside.get((name, True), 0.0),
                inside.get((name, False), 0.0),
                sent.get((name, True), 0),
                sent.get((name, False), 0),
                *_kept(memory[name], sizes[name]),
                *elements[name],
                *groups[name],
                host[name][FORWARD],
                host[name][BACKWARD_INPUT] + host[name][BACKWARD_WEIGHTS],
            )
            for name, _ in self.small.layers
        ]

    def _communication(self, step: RankStep, place: MeshPosition, candidate: Candidate) -> tuple[dict, dict]:
        """Seconds that layers wait in communication of their own, and bytes sent: by layer, and whether forward."""
        inside: dict[tuple[str, bool], float] = {}
        sent: dict[tuple[str, bool], int] = {}
        computations = step.computations
        for each in step.communications:
            at = each.begins - 1 if each.operation in ("all_reduce", "reduce_scatter") else each.begins
            at = min(max(at, 0), len(computations) - 1)
            computation = computations[at]
            if computation.phase in (UPDATE, NORM) or each.begins >= len(computations):
                continue
            name = computation.layer or self.small.layers[-1][0]
            key = name, computation.phase not in (BACKWARD_INPUT, BACKWARD_WEIGHTS)
            ranks = self._group(each.axes.split(","), place, candidate)
            seconds = self.collectives.of(each.operation, ranks, whole_bytes(each)).seconds
            hidden = sum(self.compute.of(0, c).seconds for c in computations[each.begins : each.ends])
            inside[key] = inside.get(key, 0.0) + max(seconds - hidden, 0.0)
            sent[key] = sent.get(key, 0) + each.sent
        return inside, sent

    def _group(self, axes: Sequence[str], place: MeshPosition, candidate: Candidate) -> tuple[int, ...]:
        """The first group over these axes, on the candidate's whole mesh."""
        ranks = [0]
        stride = 1
        for axis, size in reversed(candidate.axes):
            if axis in axes:
                ranks = [rank + stride * k for k in range(size) for rank in ranks]
            stride *= size
        return tuple(sorted(ranks))


def reduced(model: Model) -> tuple[Model, dict[str, str]]:
    """The model with one of all layers that are alike, and for each layer's name the name of the one that is left.

    Of layers of images, which may be alike and yet of other sizes, one is left of those that follow each other.
    """
    seen: dict[Hashable, str] = {}
    like: dict[str, str] = {}
    kept = []
    images = {"h", "w"} <= set(model.inputs.split())
    for name, layer in model.layers:
        key = kind_of(layer) if images else _kind(name, layer)
        if images and key not in seen:
            seen.clear()
        if layer.inputs.dims != layer.outputs.dims or key not in seen:
            seen.setdefault(key, name)
            like[name] = name
            kept.append((name, layer))
        else:
            like[name] = seen[key]
    return replace(model, layers=tuple(kept)), like


def _kind(name: str, layer: Layer) -> Hashable:
    """Equal for layers that are alike."""
    declared = tuple((own, each.dims, each.whole(layer.sizes)) for own, each in layer.parameters.items())
    what = type(layer).__name__, layer.inputs, layer.outputs, name.partition("/")[2]
    return *what, tuple(sorted(layer.sizes.items())), declared


def with_even_vocabulary(model: Model, axes: Mapping[str, int], composition: ParallelConfig) -> Model:
    """The model with a vocabulary that the mesh cuts into equal parts, each as large as the largest of its own: ranks
    that differ by a word are all looked at, ranks alike once."""
    place = place_of(0, axes)
    parts = place.axis_size(composed_layout(model, place, composition).axes("v"))
    even, layers = -(-model.vocabulary // parts) * parts, []
    for name, layer in model.layers:
        if even and layer.sizes.get("v") == model.vocabulary:
            layer = copy(layer)
            layer.sizes = {**layer.sizes, "v": even}
        layers.append((name, layer))
    return replace(model, layers=tuple(layers), vocabulary=even)


def _parts(inner: Mapping[str, int]) -> int:
    """Into how many parts a mesh cuts layers, beside the samples."""
    return prod(size for axis, size in inner.items() if axis not in BATCH)


def _memory(step: RankStep, names: Sequence[str]) -> dict[str, tuple[int, int, int]]:
    """For each layer: bytes that its forward adds to what is kept, and what is held above that on either way."""
    kept, peaks = {}, {}
    static = sum(step.before.get(kind, 0) for kind in STATES)
    for moment in step.timeline:
        computation = step.computations[moment.computation]
        key = computation.layer or computation.phase, computation.phase
        kept.setdefault(key, moment.bytes_by_kind.get("activations", 0))
        peaks[key] = max(peaks.get(key, 0), moment.total - static)
    found = {}
    for number, name in enumerate(names):
        before = kept.get((name, FORWARD), 0)
        following = (names[number + 1], FORWARD) if number + 1 < len(names) else ("loss", "loss")
        saved = max(kept.get(following, before) - before, 0)
        forward = max(peaks.get((name, FORWARD), 0) - before - saved, 0)
        back = max(peaks.get((name, BACKWARD_INPUT), 0), peaks.get((name, BACKWARD_WEIGHTS), 0))
        if number + 1 == len(names):
            forward = max(forward, peaks.get(("loss", "loss"), 0) - before - saved)
        found[name] = saved, forward, max(back - before - saved, 0)
    return found


def _kept(memory: tuple[int, int, int], output: int) -> tuple[int, int, int, int]:
    saved, forward, backward = memory
    return saved, output, forward, backward


def _outputs(
    model: Model, place: MeshPosition, layout, samples: int, sequence: int | None, dtype: Any
) -> dict[str, int]:
    """Bytes of what comes out of each layer on a rank."""
    found, size = {}, np.dtype(dtype).itemsize
    lengths = {"s": sequence or model.context or 1}
    if model.sample is not None:
        lengths |= dict(zip(model.inputs.split()[1:], model.sample, strict=True))
    for name, layer in model.layers:
        windows = getattr(layer, "windows", None)
        if windows is not None and hasattr(windows, "outputs"):
            lengths["h"], lengths["w"] = windows.outputs
            lengths["y"], lengths["x"] = windows.outputs
        lengths |= {letter: n for letter, n in layer.sizes.items() if letter not in "hwyx" or not model.sample}
        count = 1.0
        for letter in layer.outputs.dims.split():
            whole = samples if letter in "bn" else lengths.get(letter, 1)
            cut = place.axis_size(layout.axes(letter, layer.outputs.where)) if letter not in "bn" else 1
            count *= -(-whole // cut)
        found[name] = int(count) * size
    return found


def _parameters(model: Model, place: MeshPosition, layout) -> dict[str, tuple[int, int]]:
    """Elements of each layer's parameters on a rank, and how many of them are another layer's."""
    found = {}
    for name, layer in model.layers:
        all_of_it = tied = 0
        for own, parameter in layer.parameters.items():
            spec = layout.spec(parameter.dims)
            count = prod(spec.largest_shape(parameter.whole(layer.sizes), place))
            if parameter.element:
                count = -(-count // place.axis_size(layout.axes(parameter.element[0])))
            all_of_it += count
            tied += count * (own in layer.tied)
        found[name] = all_of_it, tied
    return found


def _groups(
    model: Model, place: MeshPosition, layout, itemsize: int, base: ParallelConfig
) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Elements of each layer's parameter groups in the order of their use: its own, and those that another has.

    A group that several layers share counts for the first of them.
    """
    assignment = assign(model, place, layout, itemsize, storage=base.storage)
    group_of = {name: group for group in assignment.groups for name in group.spans}
    found, seen = {}, set()
    for number, (name, layer) in enumerate(model.layers):
        tied = set(layer.tied.values())
        used = dict.fromkeys((group_of[full], full in tied) for full in assignment.uses[number].values())
        own = [group for group, is_tied in used if not is_tied and group not in seen]
        seen.update(own)
        found[name] = tuple(g.size for g in own), tuple(g.size for g, is_tied in used if is_tied)
    return found
