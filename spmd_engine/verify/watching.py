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
from spmd_engine.layers.later import wait_for
from spmd_engine.sharding.notation import Spec
from spmd_engine.verify.comparison import Index, Part

OUTPUT, OUTPUT_GRADIENT, INPUT_GRADIENT = "output", "gradient of the outputs", "input gradient"
Place = Callable[[tuple[int, ...]], Index]  # the shape of a whole array -> this rank's part of it


@dataclass(frozen=True)
class Moment:
    """When an array passes by."""

    kind: str
    layer: str  #: empty: of the whole engine
    micro_batch: int


@dataclass(frozen=True)
class Taken:
    """An array that passed by on this rank."""

    array: Array
    place: Place
    base: Array | None = None

    def part(self, shape: tuple[int, ...]) -> Part | None:
        """It, in a whole of this shape; None if it is cut in a way that is not known here."""
        if len(shape) != self.array.ndim:
            return None
        index = self.place(shape)
        lengths = tuple(len(np.arange(n)[places]) for n, places in zip(shape, index, strict=True))
        return Part(self.array, index, base=self.base) if lengths == self.array.shape else None


class Watch:
    """Makes a step of an engine and keeps its outputs, their gradients and, of the last micro-batch, the inputs'."""

    layers: Sequence[str] = ("",)  #: in the order of the forward

    def __init__(self, engine: ShardedEngine) -> None:
        self.engine = engine
        self.taken: dict[Moment, Taken] = {}

    def layer_of(self, parameter: str) -> str:
        """Which of ``layers`` has a parameter."""
        return ""

    def step(self, batch: Batch, loss: Loss | None = None) -> float:
        """The engine's step; returns its loss."""
        value = self._watched_step(batch, loss)
        if (dx := self.engine.input_gradient) is not None:
            moment = Moment(INPUT_GRADIENT, "", len(batch.micro_batches) - 1)
            self.taken[moment] = Taken(dx, partial(_cut, self.engine, self.engine.input_sharding))
        return value

    def _watched_step(self, batch: Batch, loss: Loss | None) -> float:
        self.taken.clear()
        return self.engine.step(batch, partial(self._lose, batch, loss or self.engine.loss))

    def _lose(self, batch: Batch, loss: Loss, outputs: Array, targets: Array, **options: Any) -> tuple[float, Array]:
        m = next(m for m, micro in enumerate(batch.micro_batches) if micro.targets is targets)
        place = self._place_of_outputs()
        self.taken[Moment(OUTPUT, self.layers[-1], m)] = Taken(outputs.copy(), place)  # the loss may write over them
        value, gradient = loss(outputs, targets, **options)
        self.taken[Moment(OUTPUT_GRADIENT, self.layers[-1], m)] = Taken(gradient.copy(), place)
        return value, gradient

    def _place_of_outputs(self) -> Place:
        return partial(_cut, self.engine, self.engine.output_sharding)


class LayeredWatch(Watch):
    """Keeps the output and the input's gradient of each layer that is on this rank."""

    engine: LayeredEngine

    def __init__(self, engine: LayeredEngine) -> None:
        super().__init__(engine)
        self.layers = [name for name, _ in engine.model.layers]
        self._known = set(self.layers)

    def layer_of(self, parameter: str) -> str:
        return next(layer for layer in _beginnings(parameter) if layer in self._known)

    def step(self, batch: Batch, loss: Loss | None = None) -> float:
        with self.engine.watched(partial(_WatchedLayer, self)):
            return self._watched_step(batch, loss)

    def take(self, moment: Moment, array: Array, declared: Activation, base: Array) -> None:
        """Keep what a layer that was given ``base`` gives to the next one, with the letters that it declares."""
        if (moment.kind, moment.layer) == (OUTPUT, self.layers[-1]):
            return  # the loss is given those, and may write over them
        if len(declared.dims.split()) != array.ndim:
            raise UsageError(
                f"layer {moment.layer}: the {moment.kind} has shape {array.shape}, but the layer declares "
                f'[{declared.dims}]; say inputs = Activation("...") and outputs = Activation("...") in its class'
            )
        taken = Taken(array, partial(self._dealt, declared), base if base.shape == array.shape else None)
        self.taken.setdefault(moment, taken)  # where it is recomputed, it comes again

    def _place_of_outputs(self) -> Place:
        return partial(self._dealt, Activation(self.engine.model.outputs, where="inside"))

    def _dealt(self, declared: Activation, shape: tuple[int, ...]) -> Index:
        layout, mesh = self.engine.layout, self.engine.mesh

        def places(letter: str, length: int) -> slice | np.ndarray:
            if letter in declared.whole:
                return slice(0, length)
            mine = layout.positions(length, mesh, declared.where, letter)
            if letter in layout.balanced:
                return mine
            return slice(int(mine[0]), int(mine[-1]) + 1) if mine.size else slice(0, 0)  # consecutive: no list of them

        return tuple(map(places, declared.dims.split(), shape))


class _WatchedLayer(Layer):
    """A layer that shows its watch what it gives to others."""

    def __init__(self, watch: LayeredWatch, name: str, layer: Layer) -> None:
        self._watch, self._name, self._layer = watch, name, layer

    def forward(self, sh, p, x, ctx):
        y, saved, *extra = self._layer.forward(sh, p, x, ctx)
        self._watch.take(Moment(OUTPUT, self._name, ctx.micro_batch), y, self._layer.outputs, x)
        return y, (ctx.micro_batch, saved), *extra

    def backward_input(self, sh, p, saved, dy, *side):
        m, saved = saved
        dx, rest = self._layer.backward_input(sh, p, saved, dy, *side)
        if (dx := wait_for(dx)) is not None:
            self._watch.take(Moment(INPUT_GRADIENT, self._name, m), dx, self._layer.inputs, dy)
        return dx, rest

    def backward_weight(self, sh, rest, g):
        self._layer.backward_weight(sh, rest, g)


def _beginnings(name: str) -> Iterator[str]:
    """"a/b" and "a" of "a/b/c": what may be the name of its layer."""
    while name := name.rpartition("/")[0]:
        yield name


def _cut(engine: ShardedEngine, sharding: str, shape: tuple[int, ...]) -> Index:
    return Spec.parse(sharding).block(shape, engine.mesh) if sharding else (slice(None),) * len(shape)


def watch(engine: ShardedEngine) -> Watch:
    """A watch that suits the engine: one with named layers is watched layer by layer."""
    return LayeredWatch(engine) if isinstance(engine, LayeredEngine) else Watch(engine)
