"""The layered engine on shapes: its own text, and a recorder that knows which layer and micro-batch it is at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spmd_engine.engine.layered import LayeredEngine
from spmd_engine.layers.layer import Layer
from spmd_engine.planning.recorder import Phase, Recorder
from spmd_engine.planning.step_analysis import BACKWARD_INPUT, BACKWARD_WEIGHTS, FORWARD, RECOMPUTED


class ForetoldEngine(LayeredEngine):
    """Has no values, and so no initial ones."""

    def initialize(self) -> None:
        pass


class RecordedLayer(Layer):
    """A layer whose forward and backward are phases of a recorder."""

    def __init__(self, recorder: Recorder, name: str, layer: Layer, chunk: int | None = None) -> None:
        self._recorder, self._name, self._layer, self._chunk = recorder, name, layer, chunk
        self.side_outputs = layer.side_outputs
        self._seen: set[int] = set()

    def _at(self, phase: str, micro_batch: int) -> Phase:
        return Phase(f"{self._name} {phase}", self._name, phase, micro_batch, self._chunk)

    def forward(self, sh, p, x, ctx):
        m = ctx.micro_batch
        again = m in self._seen
        self._seen.add(m)
        with self._recorder.phase(self._at(RECOMPUTED if again else FORWARD, m)):
            y, saved, *extra = self._layer.forward(sh, p, x, ctx)
        return y, (m, saved), *extra

    def backward_input(self, sh, p, saved, dy, *side):
        m, saved = saved
        with self._recorder.phase(self._at(BACKWARD_INPUT, m)):
            dx, rest = self._layer.backward_input(sh, p, saved, dy, *side)
        return dx, (m, rest)

    def backward_weight(self, sh, rest, g):
        m, rest = rest
        with self._recorder.phase(self._at(BACKWARD_WEIGHTS, m)):
            self._layer.backward_weight(sh, rest, g)


def watch_storage(engine: LayeredEngine, recorder: Recorder) -> None:
    """Have the memory of parameter groups counted as what it is."""
    meter = recorder.meter
    for storage in engine.storages:
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
