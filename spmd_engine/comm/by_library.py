"""Calls that the MPI library makes at once: where all ranks of a node call the same, and wait for it.

Each ``move_...``, a ``PreparedCall.move``, brings the result of ``x`` to ``result``, both of them ordinary memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from spmd_engine.comm.pending import Steps
from spmd_engine.comm.prepared_call import PreparedCall
from spmd_engine.comm.spans import spans
from spmd_engine.comm.staging import packed

if TYPE_CHECKING:
    from spmd_engine.comm.transports.mpi import BlockingCollectives


def make_by_library(
    library: BlockingCollectives, call: PreparedCall, x: np.ndarray, out: np.ndarray | None
) -> np.ndarray:
    """The result of the call, in ``out`` if there is one."""
    result = out if out is not None else np.empty(call.shape, call.dtype)
    for _ in call.move(library, call, x, result):
        pass  # nothing is waited for but in the library
    return result


def move_all_gather(library: BlockingCollectives, call: PreparedCall, x: np.ndarray, result: np.ndarray) -> Steps:
    """Of all_gather along axis 0, of arrays that are equally long."""
    result[library.rank * len(x) : (library.rank + 1) * len(x)] = x
    return library.all_gather(0, result.reshape(-1), spans([x.size] * library.size))


def move_all_to_all(library: BlockingCollectives, call: PreparedCall, x: np.ndarray, result: np.ndarray) -> Steps:
    """Of all_to_all along axis 0, in even parts."""
    flat, parts = packed(np.ascontiguousarray(x), call.parts)
    comes, places = result.reshape(-1), spans([result.size // library.size] * library.size)
    comes[places[library.rank]] = flat[parts[library.rank]]
    return library.all_to_all(0, flat, parts, comes, places)


def move_reduce_scatter(library: BlockingCollectives, call: PreparedCall, x: np.ndarray, result: np.ndarray) -> Steps:
    """Of reduce_scatter along axis 0."""
    flat, parts = packed(np.ascontiguousarray(x), call.parts)
    return library.reduce_scatter(0, flat, parts, result.reshape(-1), call.signature.reduction)


def move_all_reduce(library: BlockingCollectives, call: PreparedCall, x: np.ndarray, result: np.ndarray) -> Steps:
    """Of all_reduce."""
    flat = np.ascontiguousarray(x).reshape(-1)
    return library.all_reduce(0, flat, result.reshape(-1), call.signature.reduction)
