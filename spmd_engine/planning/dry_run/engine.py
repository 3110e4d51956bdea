"""The layered engine in a dry run: each distinct pass through a layer is executed once, and recorded for all others.

A layer's forward and backward are executed in isolation, on stand-ins for their inputs. What they compute, send and
hold is a ``LayerPass``. For an equal pass, the record is repeated, and the layer keeps memory without content for its
backward.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import RLock
from types import ModuleType
from typing import Any

import numpy as np

from spmd_engine.arrays.meta.array import ShapedArray
from spmd_engine.arrays.meta.meter import Meter, metered
from spmd_engine.comm import Group, Mesh
from spmd_engine.comm.pending import Pending, wait_for
from spmd_engine.engine import LayeredEngine
from spmd_engine.layers import ForwardContext, GradientSums, Layer
from spmd_engine.planning.dry_run.recorder import ANY_LAYER, Phase, Recorder
from spmd_engine.planning.dry_run.step_analysis import Communication, Computation, Phases
from spmd_engine.sharding import Shards

#: The input, output and output gradient of a layer, which it may keep.
X, Y, DY = "x", "y", "dy"


ShapeAndDtype = tuple[tuple[int, ...], Any]


@dataclass
class LayerPass:
    """What a rank does in one call of a layer. Computations are numbered from the beginning of the pass."""

    computations: list[Computation]
    tops: list[int]  #: peak bytes of each computation, above what was held at the beginning
    communications: list[Communication]
    begun: list[int]  #: indices of the ``communications`` that are under way at the end
    #: earlier communications that end: (index, computation, bytes received)
    ended: list[tuple[int, int, int]] = field(default_factory=list)
    kept: int = 0  #: bytes kept for later calls, without inputs and outputs
    keeps: frozenset[str] = frozenset()  #: which of X, Y and DY are kept as well
    result: ShapeAndDtype | None = None  #: the result's shape and dtype; None: no result
    under_way: bool = False  #: whether the result must be waited for
    extra: tuple = ()  #: side outputs of a forward
    same: bool = False  #: whether the result shares the memory of the input
    touched: frozenset[str] = frozenset()  #: parameters that received a gradient
    constants: Mapping[Hashable, int] = field(default_factory=dict)  #: bytes of constants, as in a meter


class PassCache:
    """Passes by everything that they depend on. One cache may serve many analyses."""

    def __init__(self) -> None:
        self.passes: dict[Hashable, LayerPass] = {}
        self.lock = RLock()
        self._numbers: dict[Hashable, int] = {}
        # By the layer's id; the layer is kept so that its id is not reused.
        self._kinds: dict[int, tuple[Layer, int]] = {}

    def kind(self, layer: Layer) -> int:
        """A number that is equal for equal layers."""
        if id(layer) not in self._kinds:
            self._kinds[id(layer)] = layer, self.number(kind_of(layer))
        return self._kinds[id(layer)][1]

    def number(self, key: Hashable) -> int:
        """A number that is equal for equal keys, and quick to compare."""
        with self.lock:
            return self._numbers.setdefault(key, len(self._numbers))


@dataclass
class LayerCall:
    """A layer with the arguments of a call; ``key`` identifies its passes."""

    layer: Layer
    key: Hashable
    sh: Any
    p: Any
    ctx: ForwardContext
    x: ShapeAndDtype
    side: tuple = ()


class IsolatedLayer:
    """Executes one layer's calls outside the step, one after the other."""

    def __init__(self, call: LayerCall, choose: str) -> None:
        self._call = call
        self._recorder = Recorder(Meter(choose, on_device=call.sh.mesh.recorder.meter.on_device))
        self._recorder.own_class = call.sh.mesh.recorder.own_class
        self._mark: tuple[int, int, int] = (0, 0, 0)
        self.done: tuple[str, ...] = ()  #: the calls executed so far
        self._last = LayerPass([], [], [], [])  #: the pass of the last executed call
        self._arrays: dict[str, Any] = {}  #: inputs, outputs and their gradients
        self._held: list = []  #: what the layer keeps for its next call

    def run(self, names: Sequence[str], side: tuple = (), gradients: GradientSums | None = None) -> LayerPass:
        """The pass of the last of these calls; calls that are ``done`` are skipped.

        Calls are "forward", "backward" with these gradients of ``side`` outputs, then "wait" and "weights" in either
        order.
        """
        mesh = self._call.sh.mesh
        before, mesh.recorder = mesh.recorder, self._recorder
        try:
            with metered(self._recorder.meter):
                for name in names[len(self.done) :]:
                    self._last = self._next(name, side, gradients)
                    self.done = (*self.done, name)
        finally:
            mesh.recorder = before
        return self._last

    def _next(self, name: str, side: tuple, gradients: GradientSums | None) -> LayerPass:
        match name:
            case "forward":
                return self._forward()
            case "backward":
                return self._backward(side)
        under_way = [call for call in self._recorder.communications if call.ends is None]
        if name == "wait":
            layer_pass = self._wait()
        else:
            assert gradients is not None
            layer_pass = self._weights(gradients)
        layer_pass.ended = [
            (index, call.ends - self._mark[0], call.facts["received"])
            for index, call in enumerate(under_way)
            if call.ends is not None
        ]
        return layer_pass

    def _forward(self) -> LayerPass:
        call, self._arrays = self._call, {X: ShapedArray.new(*self._call.x)}
        arrays = self._arrays
        self._begin()
        y, saved, *extra = call.layer.forward(call.sh, call.p, arrays[X], call.ctx)
        arrays[Y], self._held = y, [saved]
        same, result = y.memory is arrays[X].memory, (y.shape, y.dtype)
        del y, saved
        return self._end(result, tuple(extra), same)

    def _backward(self, side: tuple) -> LayerPass:
        call, before = self._call, self._last
        self._arrays = {name: self._arrays[name] for name in before.keeps}  # the rest is released
        arrays = self._arrays
        assert before.result is not None
        arrays[DY] = ShapedArray.new(*before.result)
        self._begin()
        dx, rest = call.layer.backward_input(call.sh, call.p, self._held.pop(), arrays[DY], *side)
        self._held, arrays["dx"] = [rest], dx
        del rest
        ready = isinstance(dx, ShapedArray)
        result = (dx.shape, dx.dtype) if ready else None
        layer_pass = self._end(result, (), ready and dx.memory is arrays[DY].memory)
        layer_pass.under_way = dx is not None and not ready
        return layer_pass

    def _wait(self) -> LayerPass:
        self._begin()
        dx = self._arrays["dx"] = wait_for(self._arrays["dx"])
        return self._end((dx.shape, dx.dtype))

    def _weights(self, gradients: GradientSums) -> LayerPass:
        call, before = self._call, untouched(gradients)
        self._begin()
        call.layer.backward_weight(call.sh, self._held.pop(), gradients)
        self._held = []
        layer_pass = self._end(None)
        layer_pass.touched = before - untouched(gradients)
        return layer_pass

    def _begin(self) -> None:
        recorder = self._recorder
        recorder.flush()
        recorder.meter.take_top()
        self._mark = len(recorder.computations), len(recorder.communications), recorder.meter.total

    def _end(self, result: ShapeAndDtype | None, extra: tuple = (), same: bool = False) -> LayerPass:
        """The pass since ``_begin``."""
        recorder = self._recorder
        recorder.flush()
        first, first_call, total = self._mark
        communications = recorder.communications[first_call:]
        last = len(recorder.computations)
        kept, keeps = _find_kept(self._held, self._arrays)
        return LayerPass(
            recorder.computations[first:],
            [max(0, top.total - total) for top in recorder.tops[first:]],
            [call.as_communication(last).moved(-first) for call in communications],
            [index for index, call in enumerate(communications) if call.ends is None],
            kept=kept,
            keeps=keeps,
            result=result,
            extra=extra,
            same=same,
            constants=dict(recorder.meter.constants),
        )


def kind_of(x: Any, outer: tuple[int, ...] = ()) -> Hashable:
    """The content of an object as a key: equal for equal layers. ``outer`` are the objects that contain it."""
    if x is None or isinstance(x, (str, int, float, bool, type, ModuleType)):
        return x
    if id(x) in outer:  # it contains itself
        return len(outer) - outer.index(id(x))
    if isinstance(x, partial):
        content: Any = x.func, x.args, x.keywords
    elif hasattr(x, "__code__"):
        content = x.__module__, x.__qualname__, *(cell.cell_contents for cell in x.__closure__ or ())
    elif isinstance(x, np.ndarray):
        return x.dtype.str, x.shape, x.tobytes()
    elif isinstance(x, Mapping):
        content = x.items()
    elif isinstance(x, (list, tuple)):
        content = x
    elif hasattr(x, "__dict__"):
        content = type(x), *((name, value) for name, value in vars(x).items() if name != "tied")
    else:
        return repr(x)
    return tuple(kind_of(value, (*outer, id(x))) for value in content)


def untouched(gradients: GradientSums) -> frozenset[str]:
    """The layer's names of its parameters without a gradient so far."""
    return frozenset(name for name, full_name in gradients._full_names.items() if full_name in gradients._untouched)


def stand_ins(tree: Any) -> Any:
    """The tree with arrays of the same shapes, without memory."""
    if isinstance(tree, Mapping):
        return {name: stand_ins(node) for name, node in tree.items()}
    return ShapedArray(tree.shape, tree.dtype)


def _find_kept(held: list, arrays: Mapping[str, Any]) -> tuple[int, frozenset[str]]:
    """Bytes that are held, and the names of the inputs and outputs that are held too."""
    memories: dict[int, Any] = {}
    _collect([held, arrays.get("dx")] if not isinstance(arrays.get("dx"), ShapedArray) else held, memories, set())
    names = {id(x.memory): name for name, x in arrays.items() if isinstance(x, ShapedArray) and x.memory is not None}
    keeps = frozenset(names[key] for key in memories if key in names) - {"dx"}
    return sum(memory.nbytes for key, memory in memories.items() if key not in names), keeps


#: Types that hold no memory of the layer, and are not searched.
_OPAQUE = (str, int, float, type, np.ndarray, Shards, Mesh, Group, Layer, Meter)


def _collect(x: Any, memories: dict[int, Any], visited: set[int]) -> None:
    """Collect all memories that are reachable from an object."""
    if isinstance(x, ShapedArray):
        if x.memory is not None:
            memories[id(x.memory)] = x.memory
        return
    if x is None or isinstance(x, _OPAQUE) or id(x) in visited:
        return
    visited.add(id(x))
    for part in _parts(x):
        _collect(part, memories, visited)


def _parts(x: Any) -> Iterable[Any]:
    if isinstance(x, (tuple, list, set, frozenset)):
        return x
    if isinstance(x, Mapping):
        return x.values()
    if isinstance(x, Recorder):
        return x.sending  # the rest are records
    slots = (name for kind in type(x).__mro__ for name in getattr(kind, "__slots__", ()))
    parts = [*getattr(x, "__dict__", {}).values(), *(getattr(x, name, None) for name in slots)]
    return parts + [cell.cell_contents for cell in getattr(x, "__closure__", None) or ()]


# --- The layered engine, with a recorder of the current layer and micro-batch


class DryRunEngine(LayeredEngine):
    """A layered engine on arrays without values."""

    def initialize(self) -> None:
        """There are no values to initialize."""


@dataclass
class StepPasses:
    """The passes through layers of one rank's step: taken from the cache or, the first time, executed."""

    recorder: Recorder
    cache: PassCache
    scope: Hashable  #: what this rank's passes depend on, besides the layer and its inputs
    choose: str
    kinds: Mapping[str, Hashable]  #: a key of each layer by name, equal for equal layers
    samples: Sequence[int]  #: those of each micro-batch over all ranks, if a rank's samples do not imply them; else ()
    _started: dict[Hashable, IsolatedLayer] = field(default_factory=dict)  #: layers by the calls that were executed

    def find(
        self, call: LayerCall, names: tuple[str, ...], more: Hashable = None, gradients: GradientSums | None = None
    ) -> LayerPass:
        """The pass of the last of these calls; ``more``: what else the pass depends on."""
        side = tuple(tuple(outputs.items()) for outputs in call.side)
        key = self.scope, call.key, names, side, more
        with self.cache.lock:
            if key not in self.cache.passes:
                before = call.key, names[:-1], side if len(names) > 2 else ()  # a forward has no side gradients
                layer = self._started.pop(before, None) or IsolatedLayer(call, self.choose)
                self.cache.passes[key] = layer.run(names, call.side, gradients)
                self._started[call.key, names, side] = layer
            return self.cache.passes[key]


KEPT = "kept"  #: the memory that a layer keeps besides inputs and outputs


class _Saved:
    """What a layer keeps for its backward: memory, and some of its inputs and outputs."""

    def __init__(self, call: LayerCall, micro_batch: int) -> None:
        self.call, self.micro_batch = call, micro_batch
        self.names: tuple[str, ...] = ("forward",)
        self.under_way: list[Any] = []
        self.memory: Any = None
        self.arrays: Mapping[str, Any] = {}

    def keep(self, layer_pass: LayerPass, arrays: Mapping[str, Any]) -> None:
        """Hold what this pass keeps, instead of what was held before."""
        self.memory = None
        self.memory = ShapedArray.new(layer_pass.kept, np.uint8)
        self.arrays = {name: arrays[name] for name in layer_pass.keeps if name in arrays}

    def give(self) -> dict[str, Any]:
        """The arrays that it holds, for the engine to keep until ``take`` gets them back."""
        arrays, self.memory, self.arrays = {KEPT: self.memory, **self.arrays}, None, {}
        return arrays

    def take(self, arrays: dict[str, Any]) -> None:
        """Hold these arrays, and nobody else."""
        self.memory, self.arrays = arrays.pop(KEPT), dict(arrays)
        arrays.clear()


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
        self._computed: set[int] = set()
        self._is_repeated = False  # whether gradients of its weights were computed before, of another micro-batch

    def _phase(self, phase: str, micro_batch: int) -> Any:
        return self._recorder.phase(Phase(f"{self._name} {phase}", self._name, phase, micro_batch, self._chunk))

    def forward(self, sh, p, x, ctx):
        m = ctx.micro_batch
        recomputed = m in self._computed
        self._computed.add(m)
        with self._phase(Phases.RECOMPUTED if recomputed else Phases.FORWARD, m):
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
        saved.keep(layer_pass, {X: x, Y: y})
        return y, (saved, saved.give()), *layer_pass.extra

    def backward_input(self, sh, p, saved, dy, *side):
        saved, arrays = saved
        if not isinstance(saved, _Saved):
            with self._phase(Phases.BACKWARD_INPUT, saved):
                dx, rest = self._layer.backward_input(sh, p, arrays, dy, *side)
            return dx, (saved, rest)
        saved.take(arrays)
        with self._phase(Phases.BACKWARD_INPUT, saved.micro_batch):
            saved.call.side, saved.names = side, ("forward", "backward")
            layer_pass = self._passes.find(saved.call, saved.names)
            saved.under_way = self._recorder.repeat(layer_pass, [])
            saved.keep(layer_pass, {**saved.arrays, DY: dy})
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
            with self._phase(Phases.BACKWARD_WEIGHTS, m):
                self._layer.backward_weight(sh, rest, g)
            return
        saved, without_gradient = rest, untouched(g)
        with self._phase(Phases.BACKWARD_WEIGHTS, saved.micro_batch):
            saved.names += ("weights",)
            sums = GradientSums(stand_ins(g._arrays), g._full_names, {g._full_names[name] for name in without_gradient})
            # Ranks that hold other parameters, as no experts, execute a pass when the others do: they communicate.
            repeated, self._is_repeated = self._is_repeated and bool(self._passes.samples), True
            layer_pass = self._passes.find(saved.call, saved.names, (without_gradient, repeated), sums)
            saved.under_way = self._recorder.repeat(layer_pass, saved.under_way)
            saved.keep(layer_pass, {})
        for name in layer_pass.touched:
            g._untouched.discard(g._full_names[name])

    def wait_input_gradient(self, saved: _Saved) -> ShapedArray:
        """The input gradient whose reduction was under way."""
        saved.names += ("wait",)
        sums = GradientSums(_flat(saved.call.p)) if "weights" in saved.names else None
        with self._phase(Phases.BACKWARD_INPUT, saved.micro_batch):  # the wait may begin another communication
            layer_pass = self._passes.find(saved.call, saved.names, None, sums)
            saved.under_way = self._recorder.repeat(layer_pass, saved.under_way)
            saved.keep(layer_pass, saved.arrays)
            assert layer_pass.result is not None
            return ShapedArray.new(*layer_pass.result)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The arrays of a layer's tree by the layer's names: "norm/scale"."""
    arrays: dict[str, Any] = {}
    for name, node in tree.items():
        arrays |= _flat(node, f"{prefix}{name}/") if isinstance(node, Mapping) else {prefix + name: node}
    return arrays


def _shapes(p: Any) -> Hashable:
    if isinstance(p, Mapping):
        return tuple((name, _shapes(node)) for name, node in p.items())
    return p.shape
