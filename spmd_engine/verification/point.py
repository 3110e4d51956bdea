"""An array on which a loss depends: its gradient beside central differences of the loss along random directions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.random import key_of, normal
from spmd_engine.verification.report import Slope

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
