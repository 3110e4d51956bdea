"""The layered engine in a dry run: its own code, with a recorder that knows the current layer and micro-batch."""

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
    IsolatedLayer,
    LayerCall,
    LayerPass,
    PassCache,
    X,
    Y,
    stand_ins,
    untouched,
)
from spmd_engine.planning.dry_run.recorder import ANY_LAYER, Phase, Recorder
from spmd_engine.planning.dry_run.step_analysis import BACKWARD_INPUT, BACKWARD_WEIGHTS, FORWARD, RECOMPUTED
from spmd_engine.sharding.shards import Shards


class DryRunEngine(LayeredEngine):
    """A layered engine on arrays without values."""

    def initialize(self) -> None:
        """There are no values to initialize."""


@dataclass
class StepPasses:
    """The passes through layers of one rank's step: taken from the cache or, the first time, executed."""

    recorder: Recorder
    cache: PassCache
    scope: Hashable  #: of this rank: what passes depend on, besides the layer and its inputs
    choose: str
    kinds: Mapping[str, Hashable]  #: of each layer by name: equal for equal layers
    samples: Sequence[int]  #: of each micro-batch over all ranks, if a rank's own do not determine the others'; else ()
    _started: dict[Hashable, IsolatedLayer] = field(default_factory=dict)  #: layers by the calls that were executed

    def find(
        self, call: LayerCall, names: tuple[str, ...], more: Hashable = None, gradients: GradientSums | None = None
    ) -> LayerPass:
        """The pass of the last of these calls; ``more``: what it depends on besides."""
        side = tuple(tuple(outputs.items()) for outputs in call.side)
        key = self.scope, call.key, names, side, more
        with self.cache.lock:
            if key not in self.cache.passes:
                before = call.key, names[:-1], side if len(names) > 2 else ()  # a forward has no side gradients
                layer = self._started.pop(before, None) or IsolatedLayer(call, self.choose)
                self.cache.passes[key] = layer.run(names, call.side, gradients)
                self._started[call.key, names, side] = layer
            return self.cache.passes[key]


class _Saved:
    """What a layer keeps for its backward: memory, and some of its inputs and outputs."""

    def __init__(self, call: LayerCall, micro_batch: int) -> None:
        self.call, self.micro_batch = call, micro_batch
        self.names: tuple[str, ...] = ("forward",)
        self.under_way: list[Any] = []
        self.memory: Any = None
        self.arrays: Mapping[str, Any] = {}

    def keep(self, layer_pass: LayerPass, meter: Any, arrays: Mapping[str, Any]) -> None:
        """From now on, hold what this pass keeps."""
        self.memory = None
        self.memory = meter.allocate(layer_pass.kept)
        self.arrays = {name: arrays[name] for name in layer_pass.keeps if name in arrays}


class _PendingInputGradient(Pending):
    """An input gradient whose reduction is under way."""

    __slots__ = ("_layer", "_saved")

    def __init__(self, layer: RecordedLayer, saved: _Saved) -> None:
        super().__init__()
        self._layer, self._saved = layer, saved

    def wait(self) -> Any:
        layer, saved = self._layer, self._saved
        del self._layer, self._saved
        return layer.wait_input_gradient(saved)


class RecordedLayer(Layer):
    """A layer whose forward and backward are phases of a recorder."""

    def __init__(self, passes: StepPasses, chunks: Mapping[str, int], name: str, layer: Layer) -> None:
        self._passes, self._recorder, self._name, self._layer = passes, passes.recorder, name, layer
        self._chunk = chunks.get(name)
        self.side_outputs = layer.side_outputs
        self._seen: set[int] = set()

    def _phase(self, phase: str, micro_batch: int) -> Any:
        return self._recorder.phase(Phase(f"{self._name} {phase}", self._name, phase, micro_batch, self._chunk))

    def forward(self, sh, p, x, ctx):
        m = ctx.micro_batch
        again = m in self._seen
        self._seen.add(m)
        with self._phase(RECOMPUTED if again else FORWARD, m):
            if not isinstance(x, ShapedArray):  # token ids are values: each pass is executed
                y, saved, *extra = self._layer.forward(sh, p, x, ctx)
                return y, (m, saved), *extra
            return self._forward(sh, p, x, ctx)

    def _forward(self, sh, p, x, ctx):
        shapes = _shapes(p), x.shape, x.dtype, ctx.training, ctx.saving, ctx.decided is None, ctx.length, ctx.share
        samples = self._passes.samples[ctx.micro_batch] if self._passes.samples else None
        label = sh.label if sh.label in sh.layout.experts else ANY_LAYER
        key = self._passes.kinds[self._name], label, shapes, samples
        call = LayerCall(self._layer, key, Shards(sh.mesh, sh.layout, label), stand_ins(p), ctx, (x.shape, x.dtype))
        layer_pass = self._passes.find(call, ("forward",))
        saved = _Saved(call, ctx.micro_batch)
        self._recorder.repeat(layer_pass, [])
        assert layer_pass.result is not None
        y = ShapedArray(*layer_pass.result, x.memory) if layer_pass.same else ShapedArray.new(*layer_pass.result)
        saved.keep(layer_pass, self._recorder.meter, {X: x, Y: y})
        return y, saved, *layer_pass.extra

    def backward_input(self, sh, p, saved, dy, *side):
        if not isinstance(saved, _Saved):
            m, saved = saved
            with self._phase(BACKWARD_INPUT, m):
                dx, rest = self._layer.backward_input(sh, p, saved, dy, *side)
            return dx, (m, rest)
        with self._phase(BACKWARD_INPUT, saved.micro_batch):
            saved.call.side, saved.names = side, ("forward", "backward")
            layer_pass = self._passes.find(saved.call, saved.names)
            saved.under_way = self._recorder.repeat(layer_pass, [])
            saved.keep(layer_pass, self._recorder.meter, {**saved.arrays, DY: dy})
            if layer_pass.under_way:
                return _PendingInputGradient(self, saved), saved
            if layer_pass.result is None:
                return None, saved
            if layer_pass.same:
                return ShapedArray(*layer_pass.result, dy.memory), saved
            return ShapedArray.new(*layer_pass.result), saved

    def backward_weight(self, sh, rest, g):
        if not isinstance(rest, _Saved):
            m, rest = rest
            with self._phase(BACKWARD_WEIGHTS, m):
                self._layer.backward_weight(sh, rest, g)
            return
        saved, first = rest, untouched(g)
        with self._phase(BACKWARD_WEIGHTS, saved.micro_batch):
            saved.names += ("weights",)
            sums = GradientSums(stand_ins(g._arrays), g._full_names, {g._full_names[own] for own in first})
            layer_pass = self._passes.find(saved.call, saved.names, first, sums)
            saved.under_way = self._recorder.repeat(layer_pass, saved.under_way)
            saved.keep(layer_pass, self._recorder.meter, {})
        for own in layer_pass.touched:
            g._untouched.discard(g._full_names[own])

    def wait_input_gradient(self, saved: _Saved) -> ShapedArray:
        """The input gradient whose reduction was under way."""
        saved.names += ("wait",)
        sums = GradientSums(_flat(saved.call.p)) if "weights" in saved.names else None
        with self._phase(BACKWARD_INPUT, saved.micro_batch):  # the wait may begin another communication
            layer_pass = self._passes.find(saved.call, saved.names, None, sums)
            saved.under_way = self._recorder.repeat(layer_pass, saved.under_way)
            saved.keep(layer_pass, self._recorder.meter, saved.arrays)
            assert layer_pass.result is not None
            return ShapedArray.new(*layer_pass.result)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The arrays of a layer's tree by the layer's own names: "norm/scale"."""
    arrays: dict[str, Any] = {}
    for name, node in tree.items():
        arrays |= _flat(node, f"{prefix}{name}/") if isinstance(node, Mapping) else {prefix + name: node}
    return arrays


def _shapes(p: Any) -> Hashable:
    if isinstance(p, Mapping):
        return tuple((name, _shapes(node)) for name, node in p.items())
    return p.shape


def watch_storage(engine: LayeredEngine, recorder: Recorder) -> None:
    """Count the memory of parameter groups by its kind."""
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
                meter.relabel(array.memory, kind, name)
        storage._empty = _taking(meter, storage._empty, None, name)
    unsharder, reducer = engine._placed.unsharder, engine._placed.reducer
    unsharder.unshard = _taking(meter, unsharder.unshard, "gathered groups")
    reducer.sums = _taking(meter, reducer.sums, "whole gradients")
    reducer.layer_done = _taking(meter, reducer.layer_done, "communication buffers")
    reducer.finish = _taking(meter, reducer.finish, "communication buffers")


def _taking(meter: Any, function: Callable, kind: str | None, *name: str) -> Callable:
    """The function, whose allocations count as this kind (None: the current kind)."""

    def run(*args: Any, **options: Any) -> Any:
        with meter.taking(kind or meter.kind, *name):
            return function(*args, **options)

    return run
