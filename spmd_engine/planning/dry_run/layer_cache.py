"""Passes through layers, run on shapes once for all layers and micro-batches alike, and written down for each.

A layer's forward and backward are run apart, on stand-ins for what goes into them; what they compute, send and hold
is a ``LayerPass``. Where the same is to be done again the pass is written down again, and of what the layer had kept
for its backward nothing is there but its memory.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import RLock
from typing import Any

import numpy as np

from spmd_engine.arrays.meta.array import ShapedArray
from spmd_engine.arrays.meta.meter import Meter, metered
from spmd_engine.comm.group import Group
from spmd_engine.comm.mesh import Mesh
from spmd_engine.layers.deferred import wait_for
from spmd_engine.layers.layer import ForwardContext, GradientSums, Layer
from spmd_engine.planning.dry_run.recorder import Recorder
from spmd_engine.planning.dry_run.step_analysis import Communication, Computation
from spmd_engine.sharding.shards import Shards

#: What goes into a layer, and what it makes: of these it may keep some.
X, Y, DY = "x", "y", "dy"


@dataclass
class LayerPass:
    """What a rank does in one call of a layer. Positions are counted from its beginning."""

    computations: list[Computation]
    tops: list[int]  #: bytes beyond what was held at the beginning, at the most, by computation
    communications: list[Communication]
    begun: list[int]  #: numbers, in ``communications``, of those that are under way at its end
    ended: list[tuple[int, int, int]] = field(default_factory=list)  #: of those before: which, where, bytes received
    kept: int = 0  #: bytes that it leaves for later calls, beside what goes in and comes out
    keeps: frozenset[str] = frozenset()  #: which of X, Y and DY it leaves there, too
    result: tuple | None = None  #: shape and dtype of what it returns; None: nothing
    under_way: bool = False  #: whether that must be waited for
    extra: tuple = ()  #: what else a forward returns
    same: bool = False  #: whether that has the memory of what went in
    touched: frozenset[str] = frozenset()  #: parameters that have got a gradient
    constants: Mapping[Hashable, int] = field(default_factory=dict)  #: as a meter has them


class PassCache:
    """Passes by all that they depend on: one cache may serve many analyses."""

    def __init__(self) -> None:
        self.passes: dict[Hashable, LayerPass] = {}
        self.lock = RLock()
        self._numbers: dict[Hashable, int] = {}
        self._kinds: dict[int, tuple[Layer, int]] = {}  # by the layer's id; with it, so that this stays its own

    def kind(self, layer: Layer) -> int:
        """A number that is equal for layers that do the same."""
        if id(layer) not in self._kinds:
            self._kinds[id(layer)] = layer, self.number(kind_of(layer))
        return self._kinds[id(layer)][1]

    def number(self, what: Hashable) -> int:
        """A number that stands for this: equal for equals, and quickly compared."""
        with self.lock:
            return self._numbers.setdefault(what, len(self._numbers))


@dataclass
class LayerCall:
    """A layer and what it is called with, by which its passes are found."""

    layer: Layer
    key: Hashable
    sh: Any
    p: Any
    ctx: ForwardContext
    x: tuple  # shape and dtype
    side: tuple = ()


class LayerAlone:
    """Runs one layer's calls apart from the step, each from where the one before it left off."""

    def __init__(self, call: LayerCall, choose: str) -> None:
        self._call, self._recorder = call, Recorder(Meter(choose))
        self._recorder.own_class = call.sh.mesh.recorder.own_class
        self._mark: tuple[int, int, int] = (0, 0, 0)
        self.done: tuple[str, ...] = ()  #: calls that were run
        self._found: LayerPass | None = None  #: the last of them
        self._given: dict[str, Any] = {}  #: what went in and came out
        self._held: list = []  #: what the layer keeps for its next call

    def run(self, names: Sequence[str], side: tuple = (), gradients: GradientSums | None = None) -> LayerPass:
        """The last of these calls, of which those that are ``done`` are the first: "forward", "backward" with these
        gradients of ``side`` outputs, then "wait" and "weights" in either order."""
        mesh = self._call.sh.mesh
        before, mesh.recorder = mesh.recorder, self._recorder
        try:
            with metered(self._recorder.meter):
                for name in names[len(self.done) :]:
                    self._found = self._next(name, side, gradients)
                    self.done = (*self.done, name)
        finally:
            mesh.recorder = before
        return self._found

    def _next(self, name: str, side: tuple, gradients: GradientSums | None) -> LayerPass:
        match name:
            case "forward":
                return self._forward()
            case "backward":
                return self._backward(side)
        outgoing = [number for number, each in enumerate(self._recorder.communications) if each.ends is None]
        found = self._wait() if name == "wait" else self._weights(gradients)
        calls = self._recorder.communications
        found.ended = [
            (place, calls[number].ends - self._mark[0], calls[number].facts["received"])
            for place, number in enumerate(outgoing)
            if calls[number].ends is not None
        ]
        return found

    def _forward(self) -> LayerPass:
        call, self._given = self._call, {X: _new(self._call.x)}
        given = self._given
        self._begin()
        y, saved, *extra = call.layer.forward(call.sh, call.p, given[X], call.ctx)
        given[Y], self._held = y, [saved]
        same, result = y.memory is given[X].memory, (y.shape, y.dtype)
        del y, saved
        return self._end(result, tuple(extra), same)

    def _backward(self, side: tuple) -> LayerPass:
        call, before = self._call, self._found
        self._given = {name: self._given[name] for name in before.keeps}  # nobody else has what the layer does not keep
        given = self._given
        given[DY] = _new(before.result)
        self._begin()
        dx, rest = call.layer.backward_input(call.sh, call.p, self._held.pop(), given[DY], *side)
        under_way = dx is not None and not isinstance(dx, ShapedArray)
        self._held, given["dx"] = [rest], dx
        del rest
        shape = None if dx is None or under_way else (dx.shape, dx.dtype)
        same = shape is not None and dx.memory is given[DY].memory
        found = self._end(shape, (), same)
        found.under_way = under_way
        return found

    def _wait(self) -> LayerPass:
        self._begin()
        dx = self._given["dx"] = wait_for(self._given["dx"])
        return self._end((dx.shape, dx.dtype))

    def _weights(self, gradients: GradientSums) -> LayerPass:
        call, before = self._call, untouched(gradients)
        self._begin()
        call.layer.backward_weight(call.sh, self._held.pop(), gradients)
        self._held = []
        found = self._end(None)
        found.touched = before - untouched(gradients)
        return found

    def _begin(self) -> None:
        recorder = self._recorder
        recorder.flush()
        recorder.meter.take_top()
        self._mark = len(recorder.computations), len(recorder.communications), recorder.meter.total

    def _end(self, result: tuple | None, extra: tuple = (), same: bool = False) -> LayerPass:
        """The pass since the mark."""
        recorder = self._recorder
        recorder.flush()
        first, calls, total = self._mark
        made = recorder.communications[calls:]
        last = len(recorder.computations)
        kept, keeps = _kept(self._held, self._given)
        return LayerPass(
            recorder.computations[first:],
            [max(0, top.total - total) for top in recorder.tops[first:]],
            [each.as_communication(last).moved(-first) for each in made],
            [number for number, each in enumerate(made) if each.ends is None],
            kept=kept,
            keeps=keeps,
            result=result,
            extra=extra,
            same=same,
            constants=dict(recorder.meter.constants),
        )


def _new(described: tuple) -> Any:
    shape, dtype = described
    return ShapedArray.new(shape, dtype)


def kind_of(x: Any) -> Hashable:
    """What an object consists of: equal for layers that do the same."""
    if x is None or isinstance(x, (str, int, float, bool, type)):
        return x
    if isinstance(x, Mapping):
        return tuple((name, kind_of(each)) for name, each in x.items())
    if isinstance(x, (list, tuple)):
        return tuple(kind_of(each) for each in x)
    if isinstance(x, partial):
        return kind_of((x.func, x.args, x.keywords))
    if callable(x) and not hasattr(x, "__dict__"):
        return repr(x)
    if hasattr(x, "__code__"):
        return x.__module__, x.__qualname__, kind_of([cell.cell_contents for cell in x.__closure__ or ()])
    return type(x), kind_of({name: each for name, each in vars(x).items() if name != "tied"})


def untouched(gradients: GradientSums) -> frozenset[str]:
    """Own names of a layer's parameters that have got no gradient yet."""
    return frozenset(own for own, full in gradients._full_names.items() if full in gradients._untouched)


def stand_ins(tree: Any) -> Any:
    """Arrays like those of a tree, without memory."""
    if isinstance(tree, Mapping):
        return {name: stand_ins(each) for name, each in tree.items()}
    return ShapedArray(tree.shape, tree.dtype)


def _kept(held: list, given: Mapping[str, Any]) -> tuple[int, frozenset[str]]:
    """Bytes of what is held, and which of what was given are among it."""
    memories: dict[int, Any] = {}
    _collect([held, given.get("dx")] if not isinstance(given.get("dx"), ShapedArray) else held, memories, set())
    names = {id(x.memory): name for name, x in given.items() if isinstance(x, ShapedArray) and x.memory is not None}
    keeps = frozenset(names[each] for each in memories if each in names) - {"dx"}
    return sum(memory.bytes for key, memory in memories.items() if key not in names), keeps


#: What has no memory of the layer's, and is not looked into.
_OPAQUE = (str, int, float, type, np.ndarray, Shards, Mesh, Group, Layer, Meter)


def _collect(x: Any, memories: dict[int, Any], seen: set[int]) -> None:
    """All memories that are reached from an object, through what it consists of."""
    if isinstance(x, ShapedArray):
        if x.memory is not None:
            memories[id(x.memory)] = x.memory
        return
    if x is None or isinstance(x, _OPAQUE) or id(x) in seen:
        return
    seen.add(id(x))
    for part in _parts(x):
        _collect(part, memories, seen)


def _parts(x: Any) -> Iterable[Any]:
    if isinstance(x, (tuple, list, set, frozenset)):
        return x
    if isinstance(x, Mapping):
        return x.values()
    if isinstance(x, Recorder):
        return x.sending  # all else are records
    slots = (name for kind in type(x).__mro__ for name in getattr(kind, "__slots__", ()))
    parts = [*getattr(x, "__dict__", {}).values(), *(getattr(x, name, None) for name in slots)]
    return parts + [cell.cell_contents for cell in getattr(x, "__closure__", None) or ()]
