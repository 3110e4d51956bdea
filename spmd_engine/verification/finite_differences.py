"""One device's gradients compared with finite differences of its loss, and the line of a backward that is wrong.

A mistake that one device makes too is no difference between two engines; finite differences find it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from math import isfinite
from typing import Any

import numpy as np
from ml_dtypes import finfo

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.random import key_of, normal
from spmd_engine.engine.base import Loss, ShardedEngine
from spmd_engine.engine.batch import Batch
from spmd_engine.verification.bindings import Bindings, Name, place
from spmd_engine.verification.reference import put_back
from spmd_engine.verification.report import Cause, Finding, GradientCheck, Slope

DIRECTIONS = 3  # in which a gradient that is wrong in the first is looked at: is it the same multiple in all?
SHORTER = 16.0  # a second, shorter step, where the first may have crossed a kink such as relu's
SIZE_OF_ZEROS = 0.1
ROUNDING = 16.0  # units in the last place by which a loss may be off


class Point:
    """A parameter or another array ``x`` with elements of that size; ``loss_at(y)`` is the loss with y in its place."""

    def __init__(self, name: str, x: Array, size: float, loss_at: Callable[[Array], float], precision: float) -> None:
        self.name, self.x, self.size, self.precision = name, x, size, precision
        self._loss_at = loss_at
        self._losses: dict[tuple[int, float], float] = {}
        self._directions: dict[int, Array] = {}

    def anew(self) -> Point:
        """The same, of another loss."""
        return Point(self.name, self.x, self.size, self._loss_at, self.precision)

    def compare(self, gradient: Array | None) -> Slope:
        """The slope along the first direction; if it is wrong, with the multiple that it is of the right one in all."""
        if gradient is not None and gradient.shape != self.x.shape:
            fault = f"has shape {gradient.shape}, the parameter {self.x.shape}"
            return Slope(self.name, 0.0, 0.0, np.inf, wrong=True, fault=fault)
        slopes = self._slopes(gradient)
        first = next(slopes)
        if not first.wrong:
            return first
        every = [first, *slopes]
        multiples = [slope.backward / slope.differences if slope.differences else 0.0 for slope in every]
        same = all(abs(each - multiples[0]) <= 1e-3 * abs(multiples[0]) for each in multiples)
        return replace(first, multiple=float(np.median(multiples))) if same else first

    def is_gradient(self, array: Array) -> bool:
        """Whether an array is the gradient, and not 0."""
        if array.shape != self.x.shape:
            return False
        return all(not slope.wrong and slope.differences and slope.backward for slope in self._slopes(array))

    def _slopes(self, gradient: Array | None) -> Iterator[Slope]:
        """The slope along one random direction after another."""
        for number in range(DIRECTIONS):
            direction = self._direction(number)
            said = 0.0 if gradient is None else float((gradient * direction).sum())
            length = 0.0 if gradient is None else norm(gradient) * self.size
            yield self._compared(said, length, number)

    def _direction(self, number: int) -> Array:
        if number not in self._directions:
            drawn = random_like(self.x, "direction", self.name, number)
            self._directions[number] = self.x.dtype.type(self.size) * drawn
        return self._directions[number]

    def _value(self, number: int, h: float) -> float:
        if (number, h) not in self._losses:
            there = self.x + self.x.dtype.type(h) * self._direction(number)
            self._losses[number, h] = self._loss_at(there)
        return self._losses[number, h]

    def _compared(self, said: float, length: float, number: int) -> Slope:
        """A slope beside what is ``said`` of it; ``length`` is what it is in most directions.

        Errors of central differences grow as h^2 and, by rounding, as precision / h: the best h is near the cube root
        of the precision. A shorter one decides if they disagree, as a kink may lie within the first.
        """
        root, first = self.precision ** (1 / 3), None
        for h in (2 * root, 2 * root / SHORTER):
            above, below = self._value(number, h), self._value(number, -h)
            found = (above - below) / (2 * h)
            scale = max(abs(said), abs(found), length)
            rounding = ROUNDING * self.precision * max(abs(above), abs(below)) / h
            wrong = not abs(found - said) <= 4 * root * scale + rounding
            slope = Slope(self.name, said, found, abs(found - said) / (scale or 1.0), wrong)
            first = first or slope
            if not wrong:
                return slope
        return first


def size_of(x: Array) -> float:
    """The root of the elements' mean square."""
    return norm(x) / max(x.size, 1) ** 0.5 or SIZE_OF_ZEROS


def norm(x: Array) -> float:
    """The 2-norm."""
    return float((x**2).sum()) ** 0.5


def random_like(like: Array, *what: object) -> Array:
    """Numbers from a normal distribution: always the same for the same words."""
    return normal(key_of("finite differences", *what), like.shape, like.dtype, backend=backend_of(like))


# --- Which line of a backward is wrong: one of its arrays is changed, and the step is repeated
#
# Finite differences give the gradient of every array that the forward binds to a name. So it is known which array of
# the backward is such a gradient, and which would be one if it were divided by a number, transposed, or multiplied by a
# mask or a slope. Each such change is tried: the one with which the wrong gradients become right, and no right one
# becomes wrong, is the explanation.


Change = Callable[[Array], Array]
#: The step of one device, with that loss function: its loss and gradients.
Step = Callable[[Callable], tuple[float, Mapping[str, Array]]]
MOST = 60  # arrays of a forward that are looked at
#: What the gradient of an array that u is made of, or made to, is multiplied by.
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
    time: int  #: how often it had done so before
    array: Array  #: the array itself, whatever it holds later
    copy: Array


class _Search:
    """Explains which gradients of ``points``, the parameters, are wrong."""

    def __init__(self, points: Mapping[str, Point], gradients: Mapping[str, Array], step: Step, loss: Callable) -> None:
        self._points, self._step, self._loss = points, step, loss
        self._wrong, self._gradients = self._wrong_of(gradients), gradients
        forward, self._backward = self._record()
        self._forward = [x for x in forward if x.name.name.isidentifier()][:MOST]
        self._targets = [*points.values(), *map(self._point, self._forward)]

    def _wrong_of(self, gradients: Mapping[str, Array]) -> list[str]:
        return [name for name, point in self._points.items() if point.compare(gradients.get(name)).wrong]

    def _record(self) -> tuple[list[_Bound], list[_Bound]]:
        """What forward and backward bind in a step."""
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
        """An array of the forward, on which the loss depends."""

        def loss_at(there: Array) -> float:
            return self._with(bound.name, lambda x: there, bound.time)[0]

        x, precision = bound.copy, next(iter(self._points.values())).precision
        return Point(f"{bound.name}", x, size_of(x), loss_at, precision)

    def _with(self, name: Name, change: Change, time: int | None = None) -> tuple[float, Mapping[str, Array]]:
        """The step with what is bound to a name changed, each time or that time alone."""
        times = -1

        def see(each: Name, x: Array) -> Array | None:
            nonlocal times
            times += each == name
            return change(x) if each == name and time in (None, times) else None

        with Bindings(see):
            return self._step(self._loss)

    def _is_repaired(self, still: Sequence[str]) -> bool:
        return self._wrong[0] not in still and set(still) <= set(self._wrong)

    def findings(self) -> Iterator[Finding]:
        """What explains it, the likeliest first."""
        if absent := [name for name in self._wrong if name not in self._gradients]:
            yield from self._absent(absent)
        masks, zeros = [], []
        for bound in self._backward:
            if bound.name.name.startswith("argument "):
                continue  # what calls the function has a name for it, or none
            for cause, text, change in self._suspicions(bound.copy):
                finding = Finding(cause, f"{bound.name}: {text}")
                if cause is Cause.ZERO:
                    zeros += [] if bound.array.any() else [finding]
                elif self._is_repaired(self._wrong_of(self._with(bound.name, change)[1])):
                    if cause is not Cause.MISSING_MASK:
                        yield finding
                    masks.append(finding)
        yield from masks[::-1]  # of several names of one array, the last
        yield from zeros
        yield from self._missing_in_forward()

    def _absent(self, names: Sequence[str]) -> Iterator[Finding]:
        where = [x.name for x in self._backward if x.name.name.startswith("what ") and '"' in x.name.name]
        at = f" {place(where[0].file, where[0].line)}" if where else ""
        yield Finding(Cause.ABSENT, f"what backward returns{at} has no gradient of {', '.join(names)}")

    def _suspicions(self, x: Array) -> Iterator[tuple[Cause, str, Change]]:
        """By what change an array of the backward would be a gradient; none if it is one already."""
        own = [point for point in self._targets if point.is_gradient(x)]
        for point in self._targets:
            if own:
                break
            if point.x.shape == x.T.shape and x.ndim > 1 and point.is_gradient(x.T):
                yield Cause.TRANSPOSED, f"it is the transpose of the gradient of {point.name}", lambda x: x.T
            elif point.x.shape == x.shape and (multiple := point.compare(x).multiple) is not None:
                text = f"it is {multiple:.4g} times the gradient of {point.name}"
                yield (Cause.FACTOR if multiple else Cause.ZERO), text, lambda x, m=multiple: x / (m or 1)
        for u in self._forward if own else ():
            for text, factor in FACTORS.items():
                if u.copy.shape == x.shape and self._is_other_gradient(x * factor(u.copy), own):
                    what = f"{text.format(u.name.name)}, with {u.name}"
                    by = factor(u.copy)
                    yield Cause.MISSING_MASK, f"it is not multiplied by {what}", lambda x, by=by: x * by

    def _is_other_gradient(self, x: Array, than: Sequence[Point]) -> bool:
        return any(point not in than and point.is_gradient(x) for point in self._targets)

    def _missing_in_forward(self) -> Iterator[Finding]:
        """A mask that the backward applies, but the forward does not: of several names of one array, at the last."""
        for bound in reversed(self._forward):

            def see(name: Name, x: Array, wanted: Name = bound.name) -> Array | None:
                return x * (x > 0) if name == wanted else None

            with Bindings(see):
                _, gradients = self._step(self._loss)
                anew = [point.anew() for point in self._points.values()]
                still = [point.name for point in anew if point.compare(gradients.get(point.name)).wrong]
            if self._is_repaired(still):
                yield Finding(
                    Cause.MISSING_MASK, f"{bound.name}: the backward masks it where it is not positive, the forward not"
                )


def explain_gradients(
    points: Mapping[str, Point], gradients: Mapping[str, Array], step: Step, loss: Callable
) -> tuple[Finding, ...]:
    """What is wrong, and in which line, so that some gradients of these parameters are; empty if it is not found."""
    return tuple(islice(_Search(points, gradients, step, loss).findings(), 1))


# --- The check of all gradients


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
