"""Batches of a model that are only shapes; what says which rows of a table are used, tokens and classes, is spread."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import Array
from spmd_engine.arrays.meta.array import ShapedArray
from spmd_engine.engine.batch import Batch, CutsBatches, make_batch
from spmd_engine.errors import UsageError
from spmd_engine.models.model import Model

_PRIME = 2_147_483_647


def sample_shapes(model: Model, length: int | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of one sample's input and target, whole; ``length`` is that of a sequence, None: the model's own."""
    sizes = [model.layers[0][1].sizes, model.layers[-1][1].sizes]
    whole = {"s": length or model.context}
    shapes = []
    for dims, of_layer in zip((model.inputs, model.targets), sizes, strict=True):
        letters = dims.split()[1:]
        if dims == model.inputs and model.sample is not None:
            shapes.append(tuple(model.sample))
            continue
        missing = [letter for letter in letters if letter not in whole and letter not in of_layer]
        if missing:
            raise UsageError(f"{model.name}: how long {missing[0]} of [{dims}] is, is not known; give Model a sample")
        shapes.append(tuple(whole.get(letter) or of_layer[letter] for letter in letters))
    return shapes[0], shapes[1]


def foretold_batch(
    model: Model,
    engine: CutsBatches,
    size: int,
    micro_batches: int,
    length: int | None,
    dtype: Any,
    *,
    real: bool = False,
) -> Batch:
    """The batch of a step as a rank has it; with ``real`` numbers, zeros, to be computed with."""
    inputs, targets = sample_shapes(model, length)
    classes = _classes(model)

    floats = np.zeros if real else ShapedArray.new

    def load(samples: np.ndarray) -> Sequence[Array]:
        sizes = (len(samples), *inputs), (len(samples), *targets)
        return [
            _spread(shape, below) if below else floats(shape, dtype)
            for shape, below in zip(sizes, (model.vocabulary, classes), strict=True)
        ]

    return make_batch(load, size, micro_batches, engine, count=size * prod(targets))


def _classes(model: Model) -> int:
    """How many classes targets are numbers of; 0: they are no such numbers."""
    if len(model.targets.split()) == len(model.outputs.split()):
        return 0
    letter = model.outputs.split()[-1]
    return next(layer.sizes[letter] for _, layer in reversed(model.layers) if letter in layer.sizes)


def _spread(shape: tuple[int, ...], below: int) -> np.ndarray:
    """Whole numbers that are spread evenly below a limit."""
    return (np.arange(prod(shape), dtype=np.int64) * _PRIME % below).reshape(shape)
