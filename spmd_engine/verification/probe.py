"""Records outputs of layers and their gradients during a step of an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import Array
from spmd_engine.comm.notation import Spec
from spmd_engine.comm.pending import wait_for
from spmd_engine.engine.base import ShardedEngine
from spmd_engine.engine.batch import Batch
from spmd_engine.engine.definition import Loss
from spmd_engine.engine.layered import LayeredEngine
from spmd_engine.errors import UsageError
from spmd_engine.layers import Activation, Layer
from spmd_engine.verification.comparison import Index, LocalPart

OUTPUT, OUTPUT_GRADIENT, INPUT_GRADIENT = "output", "gradient of the outputs", "input gradient"
Place = Callable[[tuple[int, ...]], Index]  # the shape of a global array -> the index of this rank's part


@dataclass(frozen=True)
class ProbePoint:
    """The point of a step at which an array is recorded."""

    kind: str
    layer: str  #: empty: the whole engine
    micro_batch: int


@dataclass(frozen=True)
class Probed:
    """An array recorded on this rank."""

    array: Array
    place: Place
    base: Array | None = None

    def part(self, shape: tuple[int, ...]) -> LocalPart | None:
        """Return the array as part of a global array of this shape; None if its own shape does not fit."""
        if len(shape) != self.array.ndim:
            return None
        index = self.place(shape)
        lengths = tuple(len(np.arange(n)[places]) for n, places in zip(shape, index, strict=True))
        return LocalPart(self.array, index, base=self.base) if lengths == self.array.shape else None


class Probe:
    """Runs a step of an engine and records outputs, their gradients and the last micro-batch's input gradient."""

    layers: Sequence[str] = ("",)  #: in the order of the forward

    def __init__(self, engine: ShardedEngine) -> None:
        self.engine = engine
        self.probed: dict[ProbePoint, Probed] = {}

    def layer_of(self, parameter: str) -> str:
        """Return the one of ``layers`` that has a parameter."""
        return ""

    def step(self, batch: Batch, loss: Loss | None = None) -> float:
        """Run the engine's step and return its loss."""
        value = self._probed_step(batch, loss)
        if (dx := self.engine.input_gradient) is not None:
            point = ProbePoint(INPUT_GRADIENT, "", len(batch.micro_batches) - 1)
            self.probed[point] = Probed(dx, partial(_index_in_sharding, self.engine, self.engine.input_sharding))
        return value

    def _probed_step(self, batch: Batch, loss: Loss | None) -> float:
        self.probed.clear()
        return self.engine.step(batch, partial(self._probed_loss, batch, loss or self.engine.loss))

    def _probed_loss(
        self, batch: Batch, loss: Loss, outputs: Array, targets: Array, **options: Any
    ) -> tuple[float, Array]:
        m = next(m for m, micro in enumerate(batch.micro_batches) if micro.targets is targets)
        place = self._place_of_outputs()
        # Copies, since the loss may overwrite its arguments.
        self.probed[ProbePoint(OUTPUT, self.layers[-1], m)] = Probed(outputs.copy(), place)
        value, gradient = loss(outputs, targets, **options)
        self.probed[ProbePoint(OUTPUT_GRADIENT, self.layers[-1], m)] = Probed(gradient.copy(), place)
        return value, gradient

    def _place_of_outputs(self) -> Place:
        return partial(_index_in_sharding, self.engine, self.engine.output_sharding)


class LayeredProbe(Probe):
    """Records the output and the input gradient of each layer on this rank."""

    engine: LayeredEngine

    def __init__(self, engine: LayeredEngine) -> None:
        super().__init__(engine)
        self.layers = [name for name, _ in engine.model.layers]
        self._known = set(self.layers)

    def layer_of(self, parameter: str) -> str:
        return next(layer for layer in _name_prefixes(parameter) if layer in self._known)

    def step(self, batch: Batch, loss: Loss | None = None) -> float:
        with self.engine.wrapped(partial(ProbedLayer, self)):
            return self._probed_step(batch, loss)

    def take(self, point: ProbePoint, array: Array, declared: Activation, base: Array) -> None:
        """Record a layer's result for input ``base``. Raises UsageError if its dims differ from the declaration."""
        if (point.kind, point.layer) == (OUTPUT, self.layers[-1]):
            return  # _probed_loss records these, since the loss may overwrite them
        if len(declared.dims.split()) != array.ndim:
            raise UsageError(
                f"layer {point.layer}: the {point.kind} has shape {array.shape}, but the layer declares "
                f'[{declared.dims}]; set inputs = Activation("...") and outputs = Activation("...") in its class'
            )
        probed = Probed(array, partial(self._index_of, declared), base if base.shape == array.shape else None)
        self.probed.setdefault(point, probed)  # a recomputed array arrives again

    def _place_of_outputs(self) -> Place:
        return partial(self._index_of, Activation(self.engine.model.outputs, where="inside"))

    def _index_of(self, declared: Activation, shape: tuple[int, ...]) -> Index:
        layout, mesh = self.engine.layout, self.engine.mesh

        def places(letter: str, length: int) -> slice | np.ndarray:
            if letter in declared.whole:
                return slice(0, length)
            local = layout.positions(length, mesh, declared.where, letter)
            if letter in layout.zigzag:
                return local
            return slice(int(local[0]), int(local[-1]) + 1) if local.size else slice(0, 0)  # they are consecutive

        return tuple(map(places, declared.dims.split(), shape))


class ProbedLayer(Layer):
    """A layer that passes its results to a probe."""

    def __init__(self, probe: LayeredProbe, name: str, layer: Layer) -> None:
        self._probe, self._name, self._layer = probe, name, layer

    def forward(self, sh, p, x, ctx):
        y, saved, *extra = self._layer.forward(sh, p, x, ctx)
        self._probe.take(ProbePoint(OUTPUT, self._name, ctx.micro_batch), y, self._layer.outputs, x)
        return y, (ctx.micro_batch, saved), *extra

    def backward_input(self, sh, p, saved, dy, *side):
        m, saved = saved
        dx, rest = self._layer.backward_input(sh, p, saved, dy, *side)
        if (dx := wait_for(dx)) is not None:
            self._probe.take(ProbePoint(INPUT_GRADIENT, self._name, m), dx, self._layer.inputs, dy)
        return dx, rest

    def backward_weight(self, sh, rest, g):
        self._layer.backward_weight(sh, rest, g)


def _name_prefixes(name: str) -> Iterator[str]:
    """Yield "a/b" and "a" for "a/b/c": possible names of its layer."""
    while name := name.rpartition("/")[0]:
        yield name


def _index_in_sharding(engine: ShardedEngine, sharding: str, shape: tuple[int, ...]) -> Index:
    return Spec.parse(sharding).block(shape, engine.mesh) if sharding else (slice(None),) * len(shape)


def probe(engine: ShardedEngine) -> Probe:
    """Return a probe for the engine; an engine with named layers is probed layer by layer."""
    return LayeredProbe(engine) if isinstance(engine, LayeredEngine) else Probe(engine)
