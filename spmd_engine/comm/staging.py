"""Arrays brought to where a transport can read them, and results to where they are wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.comm.communicator import Communicator
from spmd_engine.comm.spans import spans


def ready(comm: Communicator, x: Array) -> tuple[Array, Callable[[Array], Array]]:
    """``x`` contiguous where the transport can read it, and what brings a result home to its device."""
    if isinstance(x, np.ndarray):
        return x if x.flags.c_contiguous else np.ascontiguousarray(x).reshape(x.shape), _stays
    backend = backend_of(x)
    if comm.device_aware:
        return backend.xp.ascontiguousarray(x).reshape(x.shape), _stays  # ascontiguousarray makes scalars 1-D
    staged = backend.pinned_empty(x.shape, x.dtype)
    backend.synchronize()
    backend.copy_to_host(x, staged)
    return staged, backend.asarray


def is_reachable(comm: Communicator, x: Array) -> bool:
    """Whether the transport can write to ``x``."""
    return isinstance(x, np.ndarray) or comm.device_aware


def copied(x: Array, out: Array) -> Array:
    """``out``, with the values of ``x``, which may be ``out`` itself."""
    if x is not out:
        out[...] = x
    return out


def shapes_of(shape: Sequence[int], parts: Sequence[tuple[slice, ...]]) -> list[tuple[int, ...]]:
    """Of parts of an array of this shape, which are cut along the last axis that their indices name."""
    axis = len(parts[0]) - 1
    return [(*shape[:axis], part[axis].stop - part[axis].start, *shape[axis + 1 :]) for part in parts]


def packed(x: Array, parts: Sequence[tuple[slice, ...]]) -> tuple[Array, list[slice]]:
    """The ``parts`` of ``x``, each in one piece of flat memory, as the transports want them; and where they are."""
    places = spans([prod(shape) for shape in shapes_of(x.shape, parts)])
    if len(parts[0]) == 1:  # cut along the first axis, they are that already
        return x.reshape(-1), places
    flat = backend_of(x).empty((x.size,), x.dtype)
    for part, place in zip(parts, places, strict=True):
        flat[place] = x[part].reshape(-1)
    return flat, places


def _stays(result: Array) -> Array:
    return result
