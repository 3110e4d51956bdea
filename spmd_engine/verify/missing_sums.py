"""Which array of a user's forward or backward lacks a sum over ranks: found by making the sum, and looking again.

The sum that is forgotten most is that of an activation's gradient: dx[b d] {U_model} = dz[b f/model] · w[d f/model]
in a tensor-parallel backward. No gradient of a weight then is a sum, or a multiple, of what it should be. So the step
is repeated, with one array that the engine's backward (or forward) binds to a name summed over some mesh axes, each
time that its line runs, for one such name and one set of axes after the other. The name that makes the first wrong
tensor right, and no right one wrong, is where a sum is missing: or the first of several such names, as sums may be
made before or after what is linear and the same on all ranks. Only what is bound to a local variable can be found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import combinations
from typing import Any
from zlib import crc32

import numpy as np

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.engine.base import ShardedEngine
from spmd_engine.verify.bindings import Bindings, Name
from spmd_engine.verify.comparison import from_first, to_first
from spmd_engine.verify.report import Cause, Finding

Axes = tuple[str, ...]
MOST = 300  # repeated steps
#: Repeats the step; returns which tensors are off then, in the order of computation.
Repeat = Callable[[], Sequence[str]]


def missing_sums(
    engine: ShardedEngine, whose: Any, method: str, repeat: Repeat, wrong: Sequence[str]
) -> tuple[Finding, ...]:
    """The sums, over ranks, that would make the first of ``wrong`` tensors right; empty if none does. Collective.

    ``method`` is "forward" or "backward" of the engine, or "forward" or "backward_input" of one of its layers:
    ``whose``. While some tensor is still wrong, a further sum is looked for.
    """
    sums: dict[Name, Axes] = {}
    order = _candidates(engine, whose, method, repeat)
    left = MOST
    while wrong and left > 0:
        for name, over in order[:left]:
            left -= 1
            with _summing(engine, whose, method, {**sums, name: over}):
                still = repeat()
            if wrong[0] not in still and set(still) <= set(wrong):
                sums[name], wrong = over, still
                break
        else:
            break
        order = [(name, over) for name, over in order if name not in sums]
    return tuple(_finding(method, name, over) for name, over in sums.items())


def _finding(method: str, name: Name, over: Axes) -> Finding:
    axes = " and ".join(over)
    text = f"with {name} of {method} summed over {axes} it would be right: an all_reduce over {axes} is missing there"
    return Finding(Cause.MISSING_SUM, text, over)


def _candidates(engine: ShardedEngine, whose: Any, method: str, repeat: Repeat) -> list[tuple[Name, Axes]]:
    """Names in the order of their lines' first runs, with the axes along which ranks have other values of one shape."""
    seen: dict[Name, list[tuple[tuple[int, ...], int]]] = {}

    def see(name: Name, array: Array) -> None:
        host = np.ascontiguousarray(backend_of(array).to_host(array))
        seen.setdefault(name, []).append((array.shape, crc32(host.view(np.uint8).data)))

    with _observed(whose, method, see):
        repeat()
    mesh, found = engine.mesh, None
    everyone = to_first(engine.group(), (dict(mesh.coordinates), seen))
    if everyone is not None:
        everyone = [each for each in everyone if each[1]]  # a layer is called on the ranks of its stage alone
        long = [axis for axis in mesh.axes if len({coordinates[axis] for coordinates, _ in everyone}) > 1]
        sets = [over for count in range(1, len(long) + 1) for over in combinations(long, count)]
        first = everyone[0][1] if everyone else {}
        names = [name for name in first if all(name in theirs for _, theirs in everyone)]
        found = [(name, over) for name in names for over in sets if _may_be_summed(name, over, everyone)]
    return from_first(engine.group(), found)


def _may_be_summed(name: Name, over: Axes, everyone: Sequence[tuple[dict, dict]]) -> bool:
    """Whether ranks that differ along these axes alone have arrays of the same shapes, some with other values."""
    teams: dict[tuple, list] = {}
    for coordinates, seen in everyone:
        key = tuple(place for axis, place in coordinates.items() if axis not in over)
        teams.setdefault(key, []).append(seen[name])
    shapes = all(len({tuple(shape for shape, _ in runs) for runs in team}) == 1 for team in teams.values())
    return shapes and any(runs != team[0] for team in teams.values() for runs in team)


def _summing(
    engine: ShardedEngine, whose: Any, method: str, sums: dict[Name, Axes]
) -> AbstractContextManager[None]:
    """Meanwhile these names are bound to their arrays' sums over ranks."""

    def see(name: Name, array: Array) -> Array | None:
        return engine.group(sums[name]).all_reduce(array, label="verify") if name in sums else None

    return _observed(whose, method, see)


@contextmanager
def _observed(whose: Any, method: str, see: Callable[[Name, Array], Array | None]) -> Iterator[None]:
    """Meanwhile ``see`` is shown what a method of an engine or a layer, and what it calls, binds to names."""
    plain, own = getattr(whose, method), whose.__dict__.get(method)

    def observed(*args):
        with Bindings(see):
            return plain(*args)

    setattr(whose, method, observed)
    try:
        yield
    finally:
        delattr(whose, method)
        if own is not None:
            setattr(whose, method, own)
