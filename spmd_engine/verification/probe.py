"""What passes by while an engine makes a step: outputs of layers, and gradients on their way back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import Array
from spmd_engine.engine.base import Loss, ShardedEngine
from spmd_engine.engine.batch import Batch
from spmd_engine.engine.layered import LayeredEngine
from spmd_engine.errors import UsageError
from spmd_engine.layers import Activation, Layer
from spmd_engine.layers.deferred import wait_for
from spmd_engine.sharding.notation import Spec
from spmd_engine.verification.comparison import Index, LocalPart

OUTPUT, OUTPUT_GRADIENT, INPUT_GRADIENT = "output", "gradient of the outputs", "input gradient"
Place = Callable[[tuple[int, ...]], Index]  # the shape of a whole array -> this rank's part of it


@dataclass(frozen=True)
class ProbePoint:
    """When an array passes by."""

    kind: str
    layer: str  #: empty: of the whole engine
    micro_batch: int


@dataclass(frozen=True)
class Probed:
    """An array that passed by on this rank."""

    array: Array
    place: Place
    base: Array | None = None

    def part(self, shape: tuple[int, ...]) -> LocalPart | None:
        """It, in a whole of this shape; None if it is cut in a way that is not known here."""
        if len(shape) != self.array.ndim:
            return None
        index = self.place(shape)
        lengths = tuple(len(np.arange(n)[places]) for n, places in zip(shape, index, strict=True))
        return LocalPart(self.array, index, base=self.base) if lengths == self.array.shape else None


class Probe:
    """Makes a step of an engine and keeps its outputs, their gradients and, of the last micro-batch, the inputs'."""

    layers: Sequence[str] = ("",)  #: in the order of the forward

    def __init__(self, engine: ShardedEngine) -> None:
        self.engine = engine
        self.probed: dict[ProbePoint, Probed] = {}

    def layer_of(self, parameter: str) -> str:
        """Which of ``layers`` has a parameter."""
        return ""

    def step(self, batch: Batch, loss: Loss | None = None) -> float:
        """The engine's step; returns its loss."""
        value = self._probed_step(batch, loss)
        if (dx := self.engine.input_gradient) is not None:
            point = ProbePoint(INPUT_GRADIENT, "", len(batch.micro_batches) - 1)
            self.probed[point] = Probed(dx, partial(_cut, self.engine, self.engine.input_sharding))
        return value

    def _probed_step(self, batch: Batch, loss: Loss | None) -> float:
        self.probed.clear()
        return self.engine.step(batch, partial(self._probed_loss, batch, loss or self.engine.loss))

    def _probed_loss(
        self, batch: Batch, loss: Loss, outputs: Array, targets: Array, **options: Any
    ) -> tuple[float, Array]:
        m = next(m for m, micro in enumerate(batch.micro_batches) if micro.targets is targets)
        place = self._place_of_outputs()
        # Copies, since the loss may write over what it is given.
        self.probed[ProbePoint(OUTPUT, self.layers[-1], m)] = Probed(outputs.copy(), place)
        value, gradient = loss(outputs, targets, **options)
        self.probed[ProbePoint(OUTPUT_GRADIENT, self.layers[-1], m)] = Probed(gradient.copy(), place)
        return value, gradient

    def _place_of_outputs(self) -> Place:
        return partial(_cut, self.engine, self.engine.output_sharding)


class LayeredProbe(Probe):
    """Keeps the output and the input's gradient of each layer that is on this rank."""

    engine: LayeredEngine

    def __init__(self, engine: LayeredEngine) -> None:
        super().__init__(engine)
        self.layers = [name for name, _ in engine.model.layers]
        self._known = set(self.layers)

    def layer_of(self, parameter: str) -> str:
        return next(layer for layer in _beginnings(parameter) if layer in self._known)

    def step(self, batch: Batch, loss: Loss | None = None) -> float:
        with self.engine.wrapped(partial(ProbedLayer, self)):
            return self._probed_step(batch, loss)

    def take(self, point: ProbePoint, array: Array, declared: Activation, base: Array) -> None:
        """Keep what a layer that was given ``base`` gives to the next one, with the letters that it declares."""
        if (point.kind, point.layer) == (OUTPUT, self.layers[-1]):
            return  # the loss is given those, and may write over them
        if len(declared.dims.split()) != array.ndim:
            raise UsageError(
                f"layer {point.layer}: the {point.kind} has shape {array.shape}, but the layer declares "
                f'[{declared.dims}]; say inputs = Activation("...") and outputs = Activation("...") in its class'
            )
        probed = Probed(array, partial(self._index_of, declared), base if base.shape == array.shape else None)
        self.probed.setdefault(point, probed)  # where it is recomputed, it comes again

    def _place_of_outputs(self) -> Place:
        return partial(self._index_of, Activation(self.engine.model.outputs, where="inside"))

    def _index_of(self, declared: Activation, shape: tuple[int, ...]) -> Index:
        layout, mesh = self.engine.layout, self.engine.mesh

        def places(letter: str, length: int) -> slice | np.ndarray:
            if letter in declared.whole:
                return slice(0, length)
            mine = layout.positions(length, mesh, declared.where, letter)
            if letter in layout.zigzag:
                return mine
            return slice(int(mine[0]), int(mine[-1]) + 1) if mine.size else slice(0, 0)  # consecutive: no list of them

        return tuple(map(places, declared.dims.split(), shape))


class ProbedLayer(Layer):
    """A layer that shows its probe what it gives to others."""

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


def _beginnings(name: str) -> Iterator[str]:
    """Of "a/b/c": "a/b" and "a", what may be the name of its layer."""
    while name := name.rpartition("/")[0]:
        yield name


def _cut(engine: ShardedEngine, sharding: str, shape: tuple[int, ...]) -> Index:
    return Spec.parse(sharding).block(shape, engine.mesh) if sharding else (slice(None),) * len(shape)


def probe(engine: ShardedEngine) -> Probe:
    """A probe that suits the engine: one with named layers is probed layer by layer."""
    return LayeredProbe(engine) if isinstance(engine, LayeredEngine) else Probe(engine)
