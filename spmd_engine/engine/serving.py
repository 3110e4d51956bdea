"""Serving: whole inputs in and whole outputs out on rank 0, the work on all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.errors import RankAborted, SpmdError

if TYPE_CHECKING:
    from spmd_engine.engine.base import ShardedEngine


_END, _INPUT, _FAILED = range(3)


class Writer(Protocol):
    """Where outputs go."""

    def write(self, array: Array, /) -> Any: ...


def serve(engine: ShardedEngine, inputs: Iterable[Array] | None, outputs: Writer | None) -> None:
    """``ShardedEngine.inference_loop``: rank 0 reads, all ranks compute, rank 0 writes. Collective."""
    engine.check_declared()
    source = iter(inputs) if engine.device_id == 0 else iter(())
    with engine.inference():
        while True:
            x, failure = None, None
            if engine.device_id == 0:
                try:
                    x = next(source, None)
                except Exception as error:  # the others wait: tell them before it ends the loop here
                    failure = error
            state = _FAILED if failure is not None else _INPUT if x is not None else _END
            state = int(engine.broadcast(np.array(state), label="inference"))
            if state == _FAILED:
                raise failure or RankAborted("rank 0 could not read its input")
            if state == _END:
                return
            y = _answer(engine, engine.broadcast(np.asarray(x) if x is not None else None, label="inference"))
            if engine.device_id == 0:
                outputs.write(y)


def _answer(engine: ShardedEngine, whole: np.ndarray) -> np.ndarray | None:
    """The whole output for one whole input, on rank 0 at least."""
    (x,) = engine.cut_rows(whole[engine.batch_span(len(whole))] if whole.ndim else whole, None)[:1]
    y = engine.forward(engine.backend.asarray(np.ascontiguousarray(x)))
    if engine.outputs_everywhere:
        return backend_of(y).to_host(y)
    holder = int(engine.all_reduce(np.array(engine.device_id if y is not None else -1), "max", label="inference"))
    if holder < 0:
        raise SpmdError("inference_loop: forward returned None on every rank; one at least must have the output")
    if y is not None:
        y = engine.join_outputs(y, label="inference")
    here = backend_of(y).to_host(y) if y is not None else None
    missing_on_zero = engine.broadcast(np.array(y is None), label="inference")
    return engine.broadcast(here, root=holder, label="inference") if missing_on_zero else here
