"""Candidates: the shapes that a running job may change to, and what a step would take in each.

A proposer is a function of an ``Outlook`` that yields candidates. The seconds of a step follow from the parts of the
work that the ranks of a shape do, and from the speeds that the ranks show; a proposer that knows better gives a factor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import gcd, prod

import numpy as np

from spmd_engine.adaptive.monitor import Observation
from spmd_engine.axes import MeshPosition, all_positions, uneven_axes
from spmd_engine.comm.notation import weighted_lengths
from spmd_engine.engine.reshape import Shape, ShapeRequest
from spmd_engine.engine.state.assignment import BATCH, PIPE, overlaps, shares_text
from spmd_engine.errors import UsageError
from spmd_engine.models import Model
from spmd_engine.planning.search.estimate import best_division
from spmd_engine.planning.search.placement import shares
from spmd_engine.planning.search.shares import fewest_along_model

MODEL = "model"  #: the axis of which ranks may have uneven parts of heads and widths


@dataclass(frozen=True)
class Proposal:
    """A shape that the job may change to."""

    shape: Shape
    factor: float = 1.0  #: seconds of a step, over those that ``Outlook.step_seconds`` predicts
    memory_pressure: float | None = None  #: as in ``PredictedShape``


@dataclass(frozen=True)
class Outlook:
    """What candidates depend on."""

    observation: Observation
    shape: Shape  #: the present one
    speeds: Sequence[float]  #: by rank of the job, in parts of the whole work a second
    limits: Sequence[float] | None = None  #: bytes that each rank of the job may use; None: not known
    #: whose layers divide the work of a pipeline; None: all stages are taken to have as much
    model: Model | None = None

    def step_seconds(self, shape: Shape) -> float:
        """Seconds of a step in a shape: all but the communication of the busiest rank grows with its computation."""
        seen = self.observation
        longest = max(seen.computing)
        moving = seen.communicating[seen.computing.index(longest)]
        busiest = max(
            part / self.speeds[rank] for rank, part in zip(ranks_at(shape), parts(shape, model=self.model), strict=True)
        )
        return moving + (seen.step_seconds - moving) * busiest / longest


Proposer = Callable[[Outlook], Iterable[Proposal]]


def kind_of_change(before: Shape, after: Shape) -> str:
    """What a change moves, which decides its cost: ``ranks``, ``mesh``, ``stages`` (boundaries that overlap),
    ``tensors`` or ``samples``."""
    if before.ranks != after.ranks:
        return "ranks"
    if before.composition.changed(shares=None) != after.composition.changed(shares=None):
        boundaries = {"shares": after.composition.shares, "stages": after.composition.stages}
        is_overlap = before.composition.overlap_layers and before.composition.changed(**boundaries) == after.composition
        return "stages" if is_overlap else "mesh"
    old, new = before.composition.work_shares, after.composition.work_shares
    uneven = (old.keys() | new.keys()) - set(BATCH)
    return "tensors" if any(old.get(axis) != new.get(axis) for axis in uneven) else "samples"


def ranks_at(shape: Shape) -> list[int]:
    """The rank at each position of the mesh of a shape, if the ranks of a node follow one another."""
    return [shape.ranks[number] for number in shape.composition.order or range(len(shape.ranks))]


def parts(shape: Shape, without: str = "", model: Model | None = None) -> list[float]:
    """The part of a step's work at each position of the mesh, as if all of it were divided along each axis but
    ``without``; stages have that of their layers, if the model is given."""
    given, of_stages = shape.composition.work_shares, list[float]()
    if model and without != PIPE and (stages := shape.axes.get(PIPE, 1)) > 1:
        costs, chunks = _costs(model), shape.composition.chunks_on(shape.axes, model)
        of_stages = [sum(costs[layer] for part in chunks[stage::stages] for layer in part) for stage in range(stages)]

    def part(place: MeshPosition) -> float:
        along: dict[str, Sequence[float]] = {axis: given.get(axis, (1,) * size) for axis, size in place.axes.items()}
        along |= {PIPE: of_stages} if of_stages else {}
        return prod(
            numbers[place.coordinates[axis]] / sum(numbers) for axis, numbers in along.items() if axis != without
        )

    return [part(place) for place in all_positions(shape.axes)]


def _costs(model: Model) -> list[float]:
    return [layer.cost(model.context) for _, layer in model.layers]


@dataclass(frozen=True)
class BoundariesBySpeed:
    """Proposes the boundaries between stages by which the slowest stage is fastest, within the layers that both
    neighbours hold (``--overlap-layers``): no weights move."""

    model: Model

    def __call__(self, outlook: Outlook) -> Iterator[Proposal]:
        shape, overlap = outlook.shape, outlook.shape.composition.storage.overlap
        if shape.axes.get(PIPE, 1) == 1 or not overlap or not isinstance(overlap, int):  # else it is being moved
            return
        chunks, costs = shape.composition.chunks_on(shape.axes, self.model), _costs(self.model)
        held = [(0, 0), *overlaps(chunks, overlap), (len(costs), len(costs))]
        slowdowns = [1 / speed for speed in _along(shape, PIPE, outlook.speeds)]

        def within(stage: int) -> np.ndarray:
            (first, last), (begin, end) = held[stage : stage + 2]
            number = np.arange(len(costs) + 1)
            return ((first <= number) & (number <= last))[:, None] & ((begin <= number) & (number <= end))[None, :]

        starts = best_division(costs, len(chunks), fits=within, slowdowns=slowdowns)
        if starts and list(starts) != [chunk.start for chunk in chunks]:
            stages = ",".join(map(str, starts))
            yield Proposal(Shape(shape.composition.changed(stages=stages), shape.ranks, shape.experts))


@dataclass(frozen=True)
class SharesBySpeed:
    """Proposes even shares of samples, heads and widths, shares by speed, and a mesh without the slowest ranks.

    ``samples`` are those of a micro-batch.
    """

    model: Model
    samples: int

    def __call__(self, outlook: Outlook) -> Iterator[Proposal]:
        shape, all_axes = outlook.shape, outlook.shape
        yield Proposal(Shape(shape.composition.changed(shares=None), shape.ranks))
        for axis in self.axes(shape):
            yield Proposal(self.by_speed(shape, axis, outlook.speeds))
            all_axes = self.by_speed(all_axes, axis, outlook.speeds)
        yield Proposal(all_axes)
        for axis in self.axes(shape):
            with suppress(UsageError):  # the model or the options do not fit
                if fewer := self._without_slowest(shape, axis, outlook.speeds):
                    yield Proposal(self.by_speed(fewer, axis, outlook.speeds))

    def axes(self, shape: Shape) -> list[str]:
        """The axes of several ranks along which work may be shared by speed."""
        alike = {axis: size for axis, size in shape.axes.items() if axis not in uneven_axes(shape.axes)}
        return [axis for axis, size in alike.items() if size > 1 and (axis in BATCH or axis == MODEL)]

    def by_speed(self, shape: Shape, axis: str, speeds: Sequence[float]) -> Shape:
        """The shape with shares along an axis by which the last rank is done soonest. The slowest rank at each index
        counts, and each index has at least one sample, or head."""
        numbers = self._numbers(shape, axis, _along(shape, axis, speeds))
        others = {other: given for other, given in shape.composition.work_shares.items() if other != axis}
        uneven = {axis: numbers} if numbers else {}
        return Shape(shape.composition.changed(shares=shares_text({**others, **uneven}) or None), shape.ranks)

    def _numbers(self, shape: Shape, axis: str, speeds: Sequence[float]) -> tuple[int, ...]:
        """Whole shares along an axis, of lowest terms; () for even ones, and with fewer samples or heads than ranks."""
        if axis == MODEL:
            whole = fewest_along_model(self.model, shape.axes)
        else:
            whole = self.samples // prod(size for other, size in shape.axes.items() if other in BATCH and other != axis)
        if whole < len(speeds):
            return ()
        numbers = shares(speeds, whole)
        if 0 in numbers:
            numbers = tuple(1 + number for number in shares(speeds, whole - len(speeds)))
        if list(numbers) == weighted_lengths(whole, (1,) * len(numbers)):
            return ()
        return tuple(number // gcd(*numbers) for number in numbers)

    def _without_slowest(self, shape: Shape, axis: str, speeds: Sequence[float]) -> Shape | None:
        """The shape without the ranks of the slowest index of an axis; None if rank 0, which must stay, is of them."""
        along = _along(shape, axis, speeds)
        slowest, places = along.index(min(along)), all_positions(shape.axes)
        left = [rank for rank, at in zip(ranks_at(shape), places, strict=True) if at.coordinates[axis] != slowest]
        if 0 not in left:
            return None
        others = {other: given for other, given in shape.composition.work_shares.items() if other != axis}
        options = {"mesh": {**shape.axes, axis: shape.axes[axis] - 1}, "shares": shares_text(others) or None}
        return shape.changed(ShapeRequest(options, left), self.model)[0]


def _along(shape: Shape, axis: str, speeds: Sequence[float]) -> list[float]:
    """The speed at each index of an axis: that of the slowest rank there, for its part along the other axes."""
    slowest = [float("inf")] * shape.axes[axis]
    for position, rank, part in zip(all_positions(shape.axes), ranks_at(shape), parts(shape, axis), strict=True):
        index = position.coordinates[axis]
        slowest[index] = min(slowest[index], speeds[rank] / part)
    return slowest
