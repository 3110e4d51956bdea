"""One device's gradients beside finite differences of its loss: what is wrong there too, no two engines disagree on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import isfinite
from typing import Any

from ml_dtypes import finfo

from spmd_engine.arrays.backend import Array
from spmd_engine.engine.base import Loss, ShardedEngine
from spmd_engine.engine.batch import Batch
from spmd_engine.verification.gradient_faults import explain_gradients
from spmd_engine.verification.point import ROUNDING, Point, norm, random_like, size_of
from spmd_engine.verification.reference import put_back
from spmd_engine.verification.report import GradientCheck, Slope

NUDGE = 0.05  # of a parameter's size, away from where kinks may be, such as zero


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
    own, of_loss = loss or engine.loss, []

    def step(watched: Loss = own) -> tuple[float, dict[str, Array]]:
        with put_back(engine):
            value = engine.step(batch(), watched)
            return value, {name: x.copy() for name, x in engine.named(engine.gradients).items()}

    def loss_at(name: str, there: Array) -> float:
        here = floats[name].copy()
        floats[name][...] = there
        engine.after_update()
        value, _ = step()
        floats[name][...] = here
        return value

    try:
        sizes = {name: _nudge(name, x) for name, x in floats.items()}
        engine.after_update()
        value, gradients = step(lambda *args, **options: _watch(own, of_loss, precision, *args, **options))
        if not isfinite(value):
            return GradientCheck(skipped=f"the loss is {value}")
        if abs(step()[0] - value) > ROUNDING * precision * abs(value):
            return GradientCheck(skipped="two steps on the same batch, with the same parameters, have different losses")
        if any(slope.wrong for slope in of_loss):
            return GradientCheck((next(slope for slope in of_loss if slope.wrong),))
        points = {n: Point(n, x.copy(), sizes[n], partial(loss_at, n), precision) for n, x in floats.items()}
        slopes = tuple(point.compare(gradients.get(name)) for name, point in points.items())
        wrong = any(slope.wrong for slope in slopes)
        return GradientCheck(slopes, explain_gradients(points, gradients, step, own) if wrong else ())
    finally:
        for name, x in before.items():
            floats[name][...] = x
        engine.after_update()


def _watch(
    loss: Loss, slopes: list[Slope], precision: float, outputs: Array, targets: Array, **options: Any
) -> tuple[float, Array]:
    """The loss; notes how its own gradient compares. It may write over the outputs it is given."""
    at = outputs.copy()
    value, gradient = loss(outputs, targets, **options)
    if at.dtype.kind == "f" and at.size:
        point = Point("", at, size_of(at), lambda there: loss(there, targets, **options)[0], precision)
        slopes.append(point.compare(gradient.copy()))
    return value, gradient


def _nudge(name: str, x: Array) -> float:
    """Move a parameter a little, at random; returns the size of its elements."""
    size = size_of(x)
    x += x.dtype.type(NUDGE * size if norm(x) else size) * random_like(x, "nudge", name)
    return size
