"""Arrays brought to where a transport can read them, and results to where they are wanted."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.comm.communicators.communicator import Communicator


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


def _stays(result: Array) -> Array:
    return result
