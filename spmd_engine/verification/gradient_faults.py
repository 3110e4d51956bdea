"""Which line of a backward is wrong on one device, too: one of its arrays is changed, and the step is made again.

Of every array that the forward binds to a name, differences of the loss tell the gradient. So of what the backward
binds, it is known what is such a gradient, and what would be if it were divided by a number, transposed, or multiplied
by a mask or a slope. Each such change is tried: the step is repeated with it, and the one that makes the wrong
gradients right, and no right one wrong, is the explanation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from spmd_engine.arrays.backend import Array
from spmd_engine.verification.bindings import Bindings, Name, place
from spmd_engine.verification.point import Point, size_of
from spmd_engine.verification.report import Cause, Finding

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
