"""The layered engine on shapes: its own text, and a recorder that knows which layer and micro-batch it is at."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spmd_engine.arrays.meta.array import ShapedArray
from spmd_engine.comm.pending import Pending
from spmd_engine.engine.layered import LayeredEngine
from spmd_engine.layers.layer import GradientSums, Layer
from spmd_engine.planning.dry_run.layer_cache import (
    DY,
    LayerAlone,
    LayerCall,
    LayerPass,
    PassCache,
    X,
    Y,
    stand_ins,
    untouched,
)
from spmd_engine.planning.dry_run.recorder import LABEL, Phase, Recorder
from spmd_engine.planning.dry_run.step_analysis import BACKWARD_INPUT, BACKWARD_WEIGHTS, FORWARD, RECOMPUTED
from spmd_engine.sharding.shards import Shards


class ForetoldEngine(LayeredEngine):
    """Has no values, and so no initial ones."""

    def initialize(self) -> None:
        pass


@dataclass
class Passes:
    """What the layers of one rank's step have in common: the recorder, and passes that are known already."""

    recorder: Recorder
    cache: PassCache
    scope: Hashable  #: of this rank: what passes depend on, beside the layer and its inputs
    choose: str
    kinds: Mapping[str, Hashable]  #: of each layer: equal for equal ones
    samples: Sequence[int]  #: of each micro-batch, on all ranks: where these differ, a rank's own do not tell others'
    _begun: dict[Hashable, LayerAlone] = field(default_factory=dict)  #: layers by the calls that were run of them

    def find(self, call: LayerCall, names: tuple[str, ...], more: Hashable = None, gradients: Any = None) -> LayerPass:
        """The pass that is the last of these calls; ``more``: what it depends on besides."""
        side = _plain(call.side)
        key = self.scope, call.key, names, side, more
        with self.cache.lock:
            if key not in self.cache.passes:
                before = call.key, names[:-1], side if len(names) > 2 else ()  # the forward knows of no gradients
                alone = self._begun.pop(before, None) or LayerAlone(call, self.choose)
                self.cache.passes[key] = alone.run(names, call.side, gradients)
                self._begun[call.key, names, side] = alone
            return self.cache.passes[key]


class _Kept:
    """What a layer keeps for its backward: memory alone, and some of what went in and came out."""

    def __init__(self, call: LayerCall, m: int) -> None:
        self.call, self.micro_batch = call, m
        self.names: tuple[str, ...] = ("forward",)
        self.under_way: list[Any] = []
        self.memory: Any = None
        self.arrays: Mapping[str, Any] = {}

    def take(self, layer_pass: LayerPass, meter: Any, arrays: Mapping[str, Any]) -> None:
        """From now on, keep what this pass leaves."""
        self.memory = None
        self.memory = meter.allocate(layer_pass.kept)
        self.arrays = {name: arrays[name] for name in layer_pass.keeps if name in arrays}


class _Arriving(Pending):
    """An input's gradient that is under way."""

    __slots__ = ("_layer", "_kept")

    def __init__(self, layer: RecordedLayer, kept: _Kept) -> None:
        super().__init__(None, None)
        self._layer, self._kept = layer, kept

    def wait(self) -> Any:
        layer, kept, self._layer, self._kept = self._layer, self._kept, None, None
        return layer.arrived(kept)  # handed over, and kept no longer


class RecordedLayer(Layer):
    """A layer whose forward and backward are phases of a recorder."""

    def __init__(self, passes: Passes, chunks: Mapping[str, int], name: str, layer: Layer) -> None:
        self._passes, self._recorder, self._name, self._layer = passes, passes.recorder, name, layer
        self._chunk = chunks.get(name)
        self.side_outputs = layer.side_outputs
        self._seen: set[int] = set()

    def _at(self, phase: str, micro_batch: int) -> Phase:
        return Phase(f"{self._name} {phase}", self._name, phase, micro_batch, self._chunk)

    def forward(self, sh, p, x, ctx):
        m = ctx.micro_batch
        again = m in self._seen
        self._seen.add(m)
        with self._recorder.phase(self._at(RECOMPUTED if again else FORWARD, m)):
            if not isinstance(x, ShapedArray):  # tokens: looked up, and not by all layers alike
                y, saved, *extra = self._layer.forward(sh, p, x, ctx)
                return y, (m, saved), *extra
            return self._forward(sh, p, x, ctx)

    def _forward(self, sh, p, x, ctx):
        shapes = _shapes(p), x.shape, x.dtype, ctx.training, ctx.saving, ctx.decided is None, ctx.length, ctx.share
        samples = self._passes.samples[ctx.micro_batch] if self._passes.samples else None
        label = sh.label if sh.label in sh.layout.experts else LABEL
        key = self._passes.kinds[self._name], label, shapes, samples
        call = LayerCall(self._layer, key, Shards(sh.mesh, sh.layout, label), stand_ins(p), ctx, (x.shape, x.dtype))
        layer_pass = self._passes.find(call, ("forward",))
        kept = _Kept(call, ctx.micro_batch)
        self._recorder.repeat(layer_pass, [])
        y = ShapedArray(*layer_pass.result, x.memory) if layer_pass.same else ShapedArray.new(*layer_pass.result)
        kept.take(layer_pass, self._recorder.meter, {X: x, Y: y})
        return y, kept, *layer_pass.extra

    def backward_input(self, sh, p, saved, dy, *side):
        if not isinstance(saved, _Kept):
            m, saved = saved
            with self._recorder.phase(self._at(BACKWARD_INPUT, m)):
                dx, rest = self._layer.backward_input(sh, p, saved, dy, *side)
            return dx, (m, rest)
        kept = saved
        with self._recorder.phase(self._at(BACKWARD_INPUT, kept.micro_batch)):
            kept.call.side, kept.names = side, ("forward", "backward")
            layer_pass = self._passes.find(kept.call, kept.names)
            kept.under_way = self._recorder.repeat(layer_pass, [])
            kept.take(layer_pass, self._recorder.meter, {**kept.arrays, DY: dy})
            if layer_pass.under_way:
                return _Arriving(self, kept), kept
            if layer_pass.same:
                return ShapedArray(*layer_pass.result, dy.memory), kept
            return None if layer_pass.result is None else ShapedArray.new(*layer_pass.result), kept

    def backward_weight(self, sh, rest, g):
        if not isinstance(rest, _Kept):
            m, rest = rest
            with self._recorder.phase(self._at(BACKWARD_WEIGHTS, m)):
                self._layer.backward_weight(sh, rest, g)
            return
        kept, first = rest, untouched(g)
        with self._recorder.phase(self._at(BACKWARD_WEIGHTS, kept.micro_batch)):
            kept.names += ("weights",)
            sums = GradientSums(stand_ins(g._arrays), g._full_names, {g._full_names[own] for own in first})
            layer_pass = self._passes.find(kept.call, kept.names, first, sums)
            kept.under_way = self._recorder.repeat(layer_pass, kept.under_way)
            kept.take(layer_pass, self._recorder.meter, {})
        for own in layer_pass.touched:
            g._untouched.discard(g._full_names[own])

    def arrived(self, kept: _Kept) -> ShapedArray:
        """The input's gradient, that was under way."""
        kept.names += ("wait",)
        sums = None
        if "weights" in kept.names:
            sums = GradientSums(_flat(kept.call.p))
        with self._recorder.phase(self._at(BACKWARD_INPUT, kept.micro_batch)):  # it may begin something else
            layer_pass = self._passes.find(kept.call, kept.names, None, sums)
            kept.under_way = self._recorder.repeat(layer_pass, kept.under_way)
            kept.take(layer_pass, self._recorder.meter, kept.arrays)
            return ShapedArray.new(*layer_pass.result)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A layer's tree of arrays as arrays by its own names, "norm/scale"."""
    found: dict[str, Any] = {}
    for name, each in tree.items():
        found |= _flat(each, f"{prefix}{name}/") if isinstance(each, Mapping) else {prefix + name: each}
    return found


def _shapes(p: Any) -> Hashable:
    if isinstance(p, Mapping):
        return tuple((name, _shapes(each)) for name, each in p.items())
    return p.shape


def _plain(x: Any) -> Hashable:
    return tuple(tuple(each.items()) for each in x)


def watch_storage(engine: LayeredEngine, recorder: Recorder) -> None:
    """Have the memory of parameter groups counted as what it is."""
    meter = recorder.meter
    for storage in [*engine.storages, *engine._placed.frozen.storages]:
        name = storage.group.name
        for array, kind in (
            (storage.whole_parameters, "parameters"),
            (storage.own_parameters, "parameters"),
            (storage.whole_gradients, "gradients"),
            (storage.own_gradients, "gradients"),
        ):
            if array is not None:
                meter.be(array.memory, kind, name)
        storage._empty = _named(storage._empty, meter, name)
    unsharder, reducer = engine._placed.unsharder, engine._placed.reducer
    unsharder.unshard = _taking(meter, "gathered groups", unsharder.unshard)
    reducer.sums = _taking(meter, "whole gradients", reducer.sums)
    reducer.layer_done = _taking(meter, "communication buffers", reducer.layer_done)
    reducer.finish = _taking(meter, "communication buffers", reducer.finish)


def _taking(meter: Any, kind: str, function: Callable) -> Callable:
    def run(*args: Any, **options: Any) -> Any:
        with meter.taking(kind):
            return function(*args, **options)

    return run


def _named(empty: Callable, meter: Any, name: str) -> Callable:
    def run(*args: Any) -> Any:
        with meter.taking(meter.kind, name):
            return empty(*args)

    return run
