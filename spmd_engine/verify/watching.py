"""What passes by while an engine makes a step: outputs of layers, and gradients on their way back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.engine.base import Loss, ShardedEngine
from spmd_engine.engine.batch import Batch
from spmd_engine.engine.layered import LayeredEngine
from spmd_engine.layers import Layer, Linear, Skip
from spmd_engine.sharding.notation import Spec, nested_span
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
        self._batch = batch
        with self.engine.watched(partial(_WatchedLayer, self)):
            return self._watched_step(batch, loss)

    def number(self, samples: Array) -> int | None:
        """Which micro-batch has these samples; None if the batch does not number them."""
        samples = backend_of(samples).to_host(samples)
        numbers = enumerate(self._batch.micro_batches)
        return next((m for m, micro in numbers if np.array_equal(micro.samples, samples)), None)

    def take(self, moment: Moment, array: Array, letter: str, base: Array) -> None:
        """Keep what a layer that was given ``base`` gives to the next one; its last dim has that letter."""
        if (moment.kind, moment.layer) == (OUTPUT, self.layers[-1]):
            return  # the loss is given those, and may write over them
        letters = ("b", "s", letter) if array.ndim == 3 else ("b", letter)
        place = partial(self._dealt, letters, "residual")
        taken = Taken(array, place, base if base.shape == array.shape else None)
        self.taken.setdefault(moment, taken)  # where it is recomputed, it comes again

    def _place_of_outputs(self) -> Place:
        return partial(self._dealt, self.engine.model.outputs.split(), "inside")

    def _dealt(self, letters: Sequence[str], where: str, shape: tuple[int, ...]) -> Index:
        layout, mesh = self.engine.layout, self.engine.mesh

        def places(letter: str, length: int) -> slice | np.ndarray:
            if letter == "s":  # the only letter that is another on the residual stream, and need not be consecutive
                return layout.positions(length, mesh, where)
            return nested_span(length, layout.axes(letter), mesh.axes, mesh.coordinates)

        return tuple(map(places, letters, shape))


class _WatchedLayer(Layer):
    """A layer that shows its watch what it gives to others."""

    def __init__(self, watch: LayeredWatch, name: str, layer: Layer) -> None:
        self._watch, self._name, self._layer = watch, name, layer
        self._into, self._out = _stream_letters(layer)

    def forward(self, sh, p, x, at):
        y, saved = self._layer.forward(sh, p, x, at)
        m = self._watch.number(at.samples)
        if m is not None:
            self._watch.take(Moment(OUTPUT, self._name, m), y, self._out, x)
        return y, (m, saved)

    def backward_input(self, sh, p, saved, dy):
        m, saved = saved
        dx, rest = self._layer.backward_input(sh, p, saved, dy)
        if m is not None and dx is not None:
            self._watch.take(Moment(INPUT_GRADIENT, self._name, m), dx, self._into, dy)
        return dx, rest

    def backward_weight(self, sh, rest, g):
        self._layer.backward_weight(sh, rest, g)


def _beginnings(name: str) -> Iterator[str]:
    """"a/b" and "a" of "a/b/c": what may be the name of its layer."""
    while name := name.rpartition("/")[0]:
        yield name


def _stream_letters(layer: Layer) -> tuple[str, str]:
    """The letters of the last dims of what goes into a layer and comes out of it; none where that is whole."""
    if not isinstance(layer, (Linear, Skip)):
        return "", ""
    first, last = (layer.up, layer.down) if isinstance(layer, Skip) else (layer, layer)
    return "" if first.slice_input else first.letters[0], "" if last.gather_output else last.letters[1]


def _cut(engine: ShardedEngine, sharding: str, shape: tuple[int, ...]) -> Index:
    return Spec.parse(sharding).block(shape, engine.mesh) if sharding else (slice(None),) * len(shape)


def watch(engine: ShardedEngine) -> Watch:
    """A watch that suits the engine: one with named layers is watched layer by layer."""
    return LayeredWatch(engine) if isinstance(engine, LayeredEngine) else Watch(engine)
