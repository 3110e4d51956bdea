"""Which ranks of a mesh do the same in a step, but for where they are: one of each class is enough to look at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from math import prod

import numpy as np

from spmd_engine.models.model import Model
from spmd_engine.sharding.groups import ParameterGroup
from spmd_engine.sharding.layout import Layout
from spmd_engine.sharding.notation import nested_span

#: The axes over which parameters are stored in parts, and the lengths of these.
Shared = tuple[Sequence[str], Sequence[int]]
#: Letters whose parts differ even where they are of one size: by their positions, their neighbours, or what they hold.
UNLIKE = "sehwn"


def classes_of(
    model: Model,
    layout: Layout,
    axes: Mapping[str, int],
    samples: Iterable[int],
    shared: Iterable[Shared] = (),
    sequence: int | None = None,
) -> np.ndarray:
    """The number of each rank's class, by coordinates: ranks along an axis are alike where all their blocks are.

    ``samples``: the sizes of micro-batches; ``sequence``: the length of samples, None: the model's own. Which part of
    an array a rank stores makes no difference, but for those of the ``shared`` parameters that are not of one size:
    ranks of several stages, or replicas of parts, sum them.
    """
    images = {"h", "w"} <= set(model.inputs.split())
    lengths: dict[str, set[int]] = {"b": set(samples), "s": {sequence or model.context or 1}}
    for _, layer in model.layers:
        for letter, size in layer.sizes.items():
            lengths.setdefault(letter, set()).add(size)
    unlike = {"pipe"}
    # of images channels, too, may travel from rank to rank, in a plan in which none sends to itself
    letters = {*UNLIKE, *layout.inside, *layout.residual} - {"b"} if images else set(UNLIKE) - {"h"}
    batch = layout.axes("b")
    for letter in letters:
        cut = layout.axes(letter)
        # samples that are cut again, further than the batch, travel between ranks with the same part of that
        unlike.update(cut[len(batch) :] if images and letter == "n" and cut[: len(batch)] == batch else cut)
    numbers = []
    for axis, size in axes.items():
        if axis in unlike:
            numbers.append(list(range(size)))
            continue
        rows = [
            _lengths_along(axis, cut, length, axes, layout.weights(letter, where))
            for where in ("inside", "residual")
            for letter, cuts in lengths.items()
            if axis in (cut := layout.axes(letter, where))
            for length in sorted(cuts)
        ]
        rows += [_places_along(axis, cut, parts, axes) for cut, parts in shared if axis in cut]
        alike: dict[tuple, int] = {}
        numbers.append([alike.setdefault(tuple(row[place] for row in rows), len(alike)) for place in range(size)])
    counts = [max(each) + 1 for each in numbers]
    return np.ravel_multi_index(np.ix_(*numbers), counts)


def every_rank(axes: Mapping[str, int]) -> np.ndarray:
    """A class for every rank."""
    return np.arange(prod(axes.values())).reshape(tuple(axes.values()))


def _lengths_along(
    axis: str, cut: Sequence[str], length: int, axes: Mapping[str, int], weights: Mapping[str, tuple[int, ...]]
) -> list[tuple[int, ...]]:
    """For each place along an axis, the lengths of all parts there of a letter that is cut over these axes."""
    others = [other for other in cut if other != axis]
    found = []
    for place in range(axes[axis]):
        parts = []
        for where in product(*(range(axes[other]) for other in others)):
            place_of = dict(zip(others, where, strict=True)) | {axis: place}
            part = nested_span(length, tuple(cut), axes, place_of, weights)
            parts.append(part.stop - part.start)
        found.append(tuple(parts))
    return found


def shared_parts(groups: Iterable[ParameterGroup], axes: Mapping[str, int]) -> list[Shared]:
    """The stored parts, where these are uneven, of groups of parameters that ranks sum part by part: with other stages,
    or along other axes than those which cut them."""
    found: list[Shared] = []
    for group in groups:
        summed, cut = group.summed, group.summed.cut
        if not summed.stages and not any(axes[axis] > 1 for axis in summed.over if axis not in cut):
            continue
        lengths = tuple(each.stop - each.start for each in group.intervals(prod(axes[axis] for axis in cut)))
        if len(set(lengths)) > 1:
            found.append((cut, lengths))
    return found


def _places_along(
    axis: str, cut: Sequence[str], parts: Sequence[int], axes: Mapping[str, int]
) -> list[tuple[int, ...]]:
    """For each place along an axis, the lengths of all parts there of what is stored over the axes ``cut``."""
    by_place = np.moveaxis(np.reshape(parts, [axes[each] for each in cut]), cut.index(axis), 0)
    return [tuple(each.reshape(-1).tolist()) for each in by_place]


def members(classes: np.ndarray) -> dict[int, list[int]]:
    """The ranks of each class, by number."""
    flat = classes.reshape(-1)
    order = np.argsort(flat, kind="stable")
    numbers, starts = np.unique(flat[order], return_index=True)
    return dict(zip(numbers.tolist(), (part.tolist() for part in np.split(order, starts[1:])), strict=True))
