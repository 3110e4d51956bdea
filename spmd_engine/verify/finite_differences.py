"""One device's gradients beside finite differences of its loss: what is wrong there too, no two engines disagree on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import isfinite
from typing import Any

import numpy as np
from ml_dtypes import finfo

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.random import key_of, normal
from spmd_engine.engine.base import Loss, ShardedEngine
from spmd_engine.engine.batch import Batch
from spmd_engine.verify.reference import put_back
from spmd_engine.verify.report import GradientCheck, Slope

DIRECTIONS = 3  # in which a gradient that is wrong in the first is looked at: is it the same multiple in all?
SHORTER = 16.0  # a second, shorter step, where the first may have crossed a kink such as relu's
NUDGE = 0.05  # of a parameter's size, away from where kinks may be, such as zero
SIZE_OF_ZEROS = 0.1
ROUNDING = 16.0  # units in the last place by which a loss may be off


def check_gradients(engine: ShardedEngine, batch: Callable[[], Batch], loss: Loss | None = None) -> GradientCheck:
    """Compare the gradients of an engine on one device with central differences of its loss, parameter by parameter.

    Along a random direction v in one parameter w, (L(w + h v) - L(w - h v)) / 2h should be the gradient times v. L is
    ``engine.step``'s loss, in training mode, of ``batch()``, which gives the same batch whenever it is called. The
    loss function's own gradient, with respect to the outputs, comes first. All is done a little away from the
    parameters' values, since there may be kinks at zeros, and the parameters are put back. What the engine assigns to
    its attributes, and its random generators, are put back before every step, so that dropout repeats itself.
    """
    held = engine.named(engine.owned)
    floats = {name: x for name, x in held.items() if x.dtype.kind == "f"}
    before = {name: x.copy() for name, x in floats.items()}
    precision = max((float(finfo(x.dtype).eps) for x in floats.values()), default=1.0)
    if precision > 1e-6:
        return GradientCheck(skipped="no parameter has the precision of float32 or more")
    of_loss: list[Slope] = []

    def step(watched: Loss | None = loss) -> float:
        with put_back(engine):
            return engine.step(batch(), watched)

    def change(name: str, direction: Array, by: float) -> float:
        here = floats[name].copy()
        floats[name][...] = here + floats[name].dtype.type(by) * direction
        engine.after_update()
        value = step()
        floats[name][...] = here
        return value

    try:
        sizes = {name: _nudge(name, x) for name, x in floats.items()}
        engine.after_update()
        with put_back(engine):
            own = loss or engine.loss
            value = engine.step(batch(), lambda *args, **options: _watch(own, of_loss, precision, *args, **options))
            gradients = {name: x.copy() for name, x in engine.named(engine.gradients).items()}
        if not isfinite(value):
            return GradientCheck(skipped=f"the loss is {value}")
        if abs(step() - value) > ROUNDING * precision * abs(value):
            return GradientCheck(skipped="two steps on the same batch, with the same parameters, have different losses")
        if any(slope.wrong for slope in of_loss):
            return GradientCheck((next(slope for slope in of_loss if slope.wrong),))
        slopes = []
        for name, size in sizes.items():
            of_parameter = _slopes_of(name, gradients.get(name), floats[name], size, change, precision)
            slopes.append(_with_multiple(of_parameter))
        return GradientCheck(tuple(slopes))
    finally:
        for name, x in before.items():
            floats[name][...] = x
        engine.after_update()


def _slopes_of(
    name: str,
    gradient: Array | None,
    x: Array,
    size: float,
    change: Callable[[str, Array, float], float],
    precision: float,
) -> Iterator[Slope]:
    """The slope along one random direction after another, of elements of that size."""
    for number in range(DIRECTIONS):
        direction = x.dtype.type(size) * _random(x, "direction", name, number)
        said = 0.0 if gradient is None else float((gradient * direction).sum())
        length = 0.0 if gradient is None else _norm(gradient) * size
        yield _compared(name, said, length, lambda h, v=direction: change(name, v, h), precision)


def _compared(name: str, said: float, length: float, value_at: Callable[[float], float], precision: float) -> Slope:
    """A slope of ``value_at``, at 0, beside what is ``said`` of it; ``length`` is what it is in most directions.

    Errors of central differences grow as h^2 and, by rounding, as precision / h: the best h is near the cube root of
    the precision. A shorter one decides if they disagree, as a kink may lie within the first.
    """
    root, first = precision ** (1 / 3), None
    for h in (2 * root, 2 * root / SHORTER):
        above, below = value_at(h), value_at(-h)
        found = (above - below) / (2 * h)
        scale = max(abs(said), abs(found), length)
        rounding = ROUNDING * precision * max(abs(above), abs(below)) / h
        wrong = not abs(found - said) <= 4 * root * scale + rounding
        slope = Slope(name, said, found, abs(found - said) / (scale or 1.0), wrong)
        first = first or slope
        if not wrong:
            return slope
    return first


def _with_multiple(slopes: Iterator[Slope]) -> Slope:
    """The first; if it is wrong, with the multiple that it is of the right one, if it is that in all directions."""
    first = next(slopes)
    if not first.wrong:
        return first
    every = [first, *slopes]
    multiples = [slope.backward / slope.differences if slope.differences else 0.0 for slope in every]
    same = all(abs(each - multiples[0]) <= 1e-3 * abs(multiples[0]) for each in multiples)
    return replace(first, multiple=float(np.median(multiples))) if same else first


def _watch(
    loss: Loss, slopes: list[Slope], precision: float, outputs: Array, targets: Array, **options: Any
) -> tuple[float, Array]:
    """The loss; notes how its own gradient compares. It may write over the outputs it is given."""
    at = outputs.copy()
    value, gradient = loss(outputs, targets, **options)
    if at.dtype.kind == "f" and at.size:

        def change(name: str, direction: Array, by: float) -> float:
            return loss(at + at.dtype.type(by) * direction, targets, **options)[0]

        slopes.append(_with_multiple(_slopes_of("", gradient.copy(), at, _size(at), change, precision)))
    return value, gradient


def _nudge(name: str, x: Array) -> float:
    """Move a parameter a little, at random; returns the size of its elements."""
    size = _size(x)
    x += x.dtype.type(NUDGE * size if _norm(x) else size) * _random(x, "nudge", name)
    return size


def _size(x: Array) -> float:
    """The root of the elements' mean square."""
    return _norm(x) / max(x.size, 1) ** 0.5 or SIZE_OF_ZEROS


def _norm(x: Array) -> float:
    return float((x**2).sum()) ** 0.5


def _random(like: Array, *what: object) -> Array:
    return normal(key_of("finite differences", *what), like.shape, like.dtype, backend=backend_of(like))
