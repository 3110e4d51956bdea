"""Compares one device's gradients with finite differences of its loss, and finds the wrong line of a backward.

A mistake that one device makes, too, is no difference between two engines; finite differences find it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice
from math import isfinite
from typing import Any

import numpy as np
from ml_dtypes import finfo

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.random import key_of, normal
from spmd_engine.engine import Batch, ShardedEngine
from spmd_engine.engine.definition import Loss
from spmd_engine.verification.bindings import Bindings, Name, place
from spmd_engine.verification.reference import put_back
from spmd_engine.verification.report import Cause, Finding, GradientCheck, Slope

DIRECTIONS = 3  # a gradient that is wrong along the first is compared along all: it may be one multiple in all
SHORTER = 16.0  # divides the second step, since the first may have crossed a kink such as that of relu
SIZE_OF_ZEROS = 0.1
ROUNDING = 16.0  # units in the last place by which a loss may differ


class Point:
    """A parameter or another array ``x`` with elements of that size; ``loss_at(y)`` is the loss with y in its place."""

    def __init__(self, name: str, x: Array, size: float, loss_at: Callable[[Array], float], precision: float) -> None:
        self.name, self.x, self.size, self.precision = name, x, size, precision
        self._loss_at = loss_at
        self._direction, self._value = cache(self._drawn), cache(self._loss_along)

    def anew(self) -> Point:
        """Return a copy without the computed losses."""
        return Point(self.name, self.x, self.size, self._loss_at, self.precision)

    def compare(self, gradient: Array | None) -> Slope:
        """Return the slope along the first direction; a wrong one has the multiple that is common to all directions."""
        if gradient is not None and gradient.shape != self.x.shape:
            fault = f"has shape {gradient.shape}, the parameter {self.x.shape}"
            return Slope(self.name, 0.0, 0.0, np.inf, wrong=True, fault=fault)
        slopes = self._slopes(gradient)
        first = next(slopes)
        if not first.wrong:
            return first
        all_slopes = [first, *slopes]
        multiples = [slope.backward / slope.differences if slope.differences else 0.0 for slope in all_slopes]
        same = all(abs(multiple - multiples[0]) <= 1e-3 * abs(multiples[0]) for multiple in multiples)
        return replace(first, multiple=float(np.median(multiples))) if same else first

    def is_gradient(self, array: Array) -> bool:
        """Return whether an array is the gradient, and not 0."""
        if array.shape != self.x.shape:
            return False
        return all(not slope.wrong and slope.differences and slope.backward for slope in self._slopes(array))

    def _slopes(self, gradient: Array | None) -> Iterator[Slope]:
        """Yield the slopes along random directions."""
        for number in range(DIRECTIONS):
            direction = self._direction(number)
            backward = 0.0 if gradient is None else float((gradient * direction).sum())
            length = 0.0 if gradient is None else norm(gradient) * self.size
            yield self._compare_slope(backward, length, number)

    def _drawn(self, number: int) -> Array:
        return self.x.dtype.type(self.size) * random_like(self.x, "direction", self.name, number)

    def _loss_along(self, number: int, h: float) -> float:
        return self._loss_at(self.x + self.x.dtype.type(h) * self._direction(number))

    def _compare_slope(self, backward: float, length: float, number: int) -> Slope:
        """Compare the slope ``backward`` with finite differences; ``length`` is the slope's size in most directions.

        Errors of central differences grow as h^2 and, by rounding, as precision / h: the best h is near the cube root
        of the precision. If they disagree, a shorter h decides, as a kink may lie within the first.
        """
        root, first = self.precision ** (1 / 3), None
        for h in (2 * root, 2 * root / SHORTER):
            above, below = self._value(number, h), self._value(number, -h)
            differences = (above - below) / (2 * h)
            scale = max(abs(backward), abs(differences), length)
            rounding = ROUNDING * self.precision * max(abs(above), abs(below)) / h
            wrong = not abs(differences - backward) <= 4 * root * scale + rounding
            slope = Slope(self.name, backward, differences, abs(differences - backward) / (scale or 1.0), wrong)
            first = first or slope
            if not wrong:
                return slope
        return first


def size_of(x: Array) -> float:
    """Return the root mean square of the elements."""
    return norm(x) / max(x.size, 1) ** 0.5 or SIZE_OF_ZEROS


def norm(x: Array) -> float:
    """Return the 2-norm."""
    return float((x**2).sum()) ** 0.5


def random_like(like: Array, *key: object) -> Array:
    """Return numbers from a normal distribution that depend only on the key and the shape."""
    return normal(key_of("finite differences", *key), like.shape, like.dtype, backend=backend_of(like))


# --- Find the wrong line of a backward: change one of its arrays, and repeat the step
#
# Finite differences give the gradient of every array that the forward binds to a name. They show which arrays of the
# backward are such gradients, and which would be if they were divided by a number, transposed, or multiplied by a mask
# or a slope. The search tries these changes. The explanation is the change that makes wrong gradients right and no
# right one wrong.


Change = Callable[[Array], Array]
#: One device's step with a loss function; returns its loss and gradients.
Step = Callable[[Callable], tuple[float, Mapping[str, Array]]]
MOST = 60  # arrays of a forward to examine
#: Factors that a backward may apply: derivatives as functions of u, the input or the output of an activation.
FACTORS: dict[str, Change] = {
    "({0} > 0)": lambda u: u > 0,
    "(1 - {0} * {0})": lambda u: 1 - u * u,
    "{0} * (1 - {0})": lambda u: u * (1 - u),
    "{0}": lambda u: u,
}


@dataclass(frozen=True)
class _Bound:
    """An array that a line bound to a name."""

    name: Name
    time: int  #: how often the line has run before
    array: Array  #: the array itself, which may change later
    copy: Array


class _Search:
    """Explains why gradients of ``points``, the parameters, are wrong."""

    def __init__(self, points: Mapping[str, Point], gradients: Mapping[str, Array], step: Step, loss: Callable) -> None:
        self._points, self._step, self._loss = points, step, loss
        self._wrong, self._gradients = self._wrong_parameters(gradients), gradients
        forward, self._backward = self._record()
        self._forward = [x for x in forward if x.name.name.isidentifier()][:MOST]
        self._targets = [*points.values(), *map(self._point, self._forward)]

    def _wrong_parameters(self, gradients: Mapping[str, Array]) -> list[str]:
        return [name for name, point in self._points.items() if point.compare(gradients.get(name)).wrong]

    def _record(self) -> tuple[list[_Bound], list[_Bound]]:
        """Return the arrays that forward and backward bind in a step."""
        bound: tuple[list[_Bound], list[_Bound]] = ([], [])
        times: Counter[Name] = Counter()
        in_backward = False

        def see(name: Name, x: Array) -> None:
            bound[in_backward].append(_Bound(name, times[name], x, x.copy()))
            times[name] += 1

        def loss(*args, **options):
            nonlocal in_backward
            in_backward = True
            return self._loss(*args, **options)

        with Bindings(see):
            self._step(loss)
        return bound

    def _point(self, bound: _Bound) -> Point:
        """Return a point for an array of the forward."""

        def loss_at(values: Array) -> float:
            return self._changed_step(bound.name, lambda x: values, bound.time)[0]

        x, precision = bound.copy, next(iter(self._points.values())).precision
        return Point(f"{bound.name}", x, size_of(x), loss_at, precision)

    def _changed_step(self, name: Name, change: Change, time: int | None = None) -> tuple[float, Mapping[str, Array]]:
        """Run the step with a change to the array bound to a name, each time or only at ``time``."""
        times = -1

        def see(bound: Name, x: Array) -> Array | None:
            nonlocal times
            times += bound == name
            return change(x) if bound == name and time in (None, times) else None

        with Bindings(see):
            return self._step(self._loss)

    def _is_repaired(self, still_wrong: Sequence[str]) -> bool:
        return self._wrong[0] not in still_wrong and set(still_wrong) <= set(self._wrong)

    def findings(self) -> Iterator[Finding]:
        """Yield the explanations, the likeliest first."""
        if absent := [name for name in self._wrong if name not in self._gradients]:
            yield from self._explain_absent(absent)
        masks, zeros = [], []
        for bound in self._backward:
            if bound.name.name.startswith("argument "):
                continue  # it is tried under the caller's name for it, if there is one
            for cause, text, change in self._candidate_changes(bound.copy):
                finding = Finding(cause, f"{bound.name}: {text}")
                if cause is Cause.ZERO:
                    zeros += [] if bound.array.any() else [finding]
                elif self._is_repaired(self._wrong_parameters(self._changed_step(bound.name, change)[1])):
                    if cause is not Cause.MISSING_MASK:
                        yield finding
                    masks.append(finding)
        yield from masks[::-1]  # the last of several names of one array comes first
        yield from zeros
        yield from self._find_missing_in_forward()

    def _explain_absent(self, names: Sequence[str]) -> Iterator[Finding]:
        returned = [x.name for x in self._backward if x.name.name.startswith("what ") and '"' in x.name.name]
        location = f" {place(returned[0].file, returned[0].line)}" if returned else ""
        yield Finding(Cause.ABSENT, f"what backward returns{location} has no gradient of {', '.join(names)}")

    def _candidate_changes(self, x: Array) -> Iterator[tuple[Cause, str, Change]]:
        """Yield the changes that would make an array of the backward a gradient; none if it is one already."""
        matching = [point for point in self._targets if point.is_gradient(x)]
        for point in self._targets:
            if matching:
                break
            if point.x.shape == x.T.shape and x.ndim > 1 and point.is_gradient(x.T):
                yield Cause.TRANSPOSED, f"it is the transpose of the gradient of {point.name}", lambda x: x.T
            elif point.x.shape == x.shape and (multiple := point.compare(x).multiple) is not None:
                text = f"it is {multiple:.4g} times the gradient of {point.name}"
                yield (Cause.FACTOR if multiple else Cause.ZERO), text, lambda x, m=multiple: x / (m or 1)
        for u in self._forward if matching else ():
            for text, factor in FACTORS.items():
                if u.copy.shape == x.shape and self._is_other_gradient(x * factor(u.copy), matching):
                    mask = f"{text.format(u.name.name)}, with {u.name}"
                    values = factor(u.copy)
                    yield Cause.MISSING_MASK, f"it is not multiplied by {mask}", lambda x, values=values: x * values

    def _is_other_gradient(self, x: Array, excluded: Sequence[Point]) -> bool:
        return any(point not in excluded and point.is_gradient(x) for point in self._targets)

    def _find_missing_in_forward(self) -> Iterator[Finding]:
        """Yield masks that the backward applies and the forward does not, at the last of several names of one array."""
        for bound in reversed(self._forward):

            def see(name: Name, x: Array, wanted: Name = bound.name) -> Array | None:
                return x * (x > 0) if name == wanted else None

            with Bindings(see):
                _, gradients = self._step(self._loss)
                points = [point.anew() for point in self._points.values()]
                still_wrong = [point.name for point in points if point.compare(gradients.get(point.name)).wrong]
            if self._is_repaired(still_wrong):
                yield Finding(
                    Cause.MISSING_MASK, f"{bound.name}: the backward masks it where it is not positive, the forward not"
                )


# --- The check of all gradients


NUDGE = 0.05  # relative to a parameter's size: the distance from its values, which may be at kinks, such as zero


def check_gradients(engine: ShardedEngine, batch: Callable[[], Batch], loss: Loss | None = None) -> GradientCheck:
    """Compare the gradients of an engine on one device with central differences of its loss, parameter by parameter.

    Along a random direction v in one parameter w, (L(w + h v) - L(w - h v)) / 2h should be the gradient times v. L is
    ``engine.step``'s loss, in training mode, of ``batch()``, which gives the same batch whenever it is called. The
    loss function's gradient, with respect to the outputs, is checked first. Parameters are moved a little for the
    check, since there may be kinks at zeros, and are restored at the end. The engine's attributes and random generators
    are restored after every step, so that dropout repeats itself.
    """
    parameters = engine.named(engine.owned)
    floats = {name: x for name, x in parameters.items() if x.dtype.kind == "f"}
    before = {name: x.copy() for name, x in floats.items()}
    precision = max((float(finfo(x.dtype).eps) for x in floats.values()), default=1.0)
    if precision > 1e-6:
        return GradientCheck(skipped="no parameter has the precision of float32 or more")
    chosen_loss, loss_slopes = loss or engine.loss, []

    def step(watched: Loss = chosen_loss) -> tuple[float, dict[str, Array]]:
        with put_back(engine):
            value = engine.step(batch(), watched)
            return value, {name: x.copy() for name, x in engine.named(engine.gradients).items()}

    def loss_at(name: str, values: Array) -> float:
        saved = floats[name].copy()
        floats[name][...] = values
        engine.after_update()
        value, _ = step()
        floats[name][...] = saved
        return value

    try:
        sizes = {name: _nudge(name, x) for name, x in floats.items()}
        engine.after_update()
        value, gradients = step(lambda *args, **options: _watch(chosen_loss, loss_slopes, precision, *args, **options))
        if not isfinite(value):
            return GradientCheck(skipped=f"the loss is {value}")
        if abs(step()[0] - value) > ROUNDING * precision * abs(value):
            return GradientCheck(skipped="two steps on the same batch, with the same parameters, have different losses")
        if any(slope.wrong for slope in loss_slopes):
            return GradientCheck((next(slope for slope in loss_slopes if slope.wrong),))
        points = {n: Point(n, x.copy(), sizes[n], partial(loss_at, n), precision) for n, x in floats.items()}
        slopes = tuple(point.compare(gradients.get(name)) for name, point in points.items())
        causes = _Search(points, gradients, step, chosen_loss).findings() if any(x.wrong for x in slopes) else ()
        return GradientCheck(slopes, tuple(islice(causes, 1)))
    finally:
        for name, x in before.items():
            floats[name][...] = x
        engine.after_update()


def _watch(
    loss: Loss, slopes: list[Slope], precision: float, outputs: Array, targets: Array, **options: Any
) -> tuple[float, Array]:
    """Compute the loss and append the slope of its gradient. The loss may overwrite the outputs."""
    saved = outputs.copy()
    value, gradient = loss(outputs, targets, **options)
    if saved.dtype.kind == "f" and saved.size:
        point = Point("", saved, size_of(saved), lambda x: loss(x, targets, **options)[0], precision)
        slopes.append(point.compare(gradient.copy()))
    return value, gradient


def _nudge(name: str, x: Array) -> float:
    """Move a parameter a little, at random; returns the size of its elements."""
    size = size_of(x)
    x += x.dtype.type(NUDGE * size if norm(x) else size) * random_like(x, "nudge", name)
    return size
