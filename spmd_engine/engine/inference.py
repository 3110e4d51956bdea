"""Inference: whole outputs for whole inputs, and the next positions of sequences in a KV cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from spmd_engine.arrays.attention import HIDDEN
from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.precision import widened
from spmd_engine.comm.agreement.rank_zero import waits_outside
from spmd_engine.comm.notation import nested_span
from spmd_engine.errors import RankAborted, SpmdError, UsageError, described
from spmd_engine.layers.attention.kv_cache import Cache
from spmd_engine.layers.layer import ForwardContext

if TYPE_CHECKING:
    from spmd_engine.engine.base import ShardedEngine
    from spmd_engine.engine.layered import LayeredEngine

_END, _INPUT, _FAILED = range(3)


class Writer(Protocol):
    """A destination of outputs."""

    def write(self, array: Array, /) -> Any: ...


def serve(engine: ShardedEngine, inputs: Any, outputs: Any) -> None:
    """``ShardedEngine.inference_loop``: rank 0 reads, all ranks compute, rank 0 writes. Collective.

    ``inputs`` and ``outputs`` are used on rank 0 alone.
    """
    engine.check_declared()
    if engine.device_id == 0:
        if not isinstance(inputs, Iterable):
            raise UsageError(f"inference_loop: input_stream is {described(inputs)}; give an iterable of whole inputs")
        if not hasattr(outputs, "write"):
            raise UsageError(f"inference_loop: output_stream is {described(outputs)}; give one with write(array)")
    zero = engine.group().lowest
    source = iter(inputs) if engine.device_id == 0 else iter(())
    with engine.inference():
        while True:
            x, failure = None, None
            with waits_outside(engine.group(), "waiting for an input"):
                if engine.device_id == 0:
                    try:
                        x = next(source, None)
                    except Exception as error:  # broadcast the failure first: other ranks wait
                        failure = error
                state = _FAILED if failure is not None else _INPUT if x is not None else _END
                state = int(engine.broadcast(np.array(state), zero, label="inference"))
            if state == _FAILED:
                raise failure or RankAborted("rank 0 could not read its input")
            if state == _END:
                return
            y = _answer(engine, engine.broadcast(np.asarray(x) if x is not None else None, zero, label="inference"))
            if engine.device_id == 0:
                outputs.write(widened(y))  # files have no bfloat16


def _answer(engine: ShardedEngine, inputs: np.ndarray) -> np.ndarray | None:
    """The whole output for one whole input, on rank 0 at least."""
    (x,) = engine.cut_rows(inputs[engine.batch_span(len(inputs))] if inputs.ndim else inputs, None)[:1]
    y = engine.forward(engine.converted(engine.backend.asarray(np.ascontiguousarray(x))))
    if engine.outputs_everywhere:
        return backend_of(y).to_host(y)
    world = engine.group()
    holder = int(engine.all_reduce(np.array(world.rank if y is not None else -1), "max", label="inference"))
    if holder < 0:
        raise SpmdError("inference_loop: forward returned None on every rank; one at least must have the output")
    if y is not None:
        y = engine.join_outputs(y, label="inference")
    output = backend_of(y).to_host(y) if y is not None else None
    missing_on_zero = engine.broadcast(np.array(y is None), world.lowest, label="inference")
    return engine.broadcast(output, root=holder, label="inference") if missing_on_zero else output


# --- The next tokens of sequences in a KV cache: the columns that this rank computes, and their positions


@dataclass(frozen=True)
class DecodeInputs:
    """The arguments of ``engine.forward(step.inputs, step.ctx)``."""

    inputs: Array  #: [b s]: this rank's columns of the tokens
    ctx: ForwardContext
    rows: np.ndarray  #: with ``last``: this rank's sequences whose last token is among the inputs


def decode_inputs(
    engine: LayeredEngine, tokens: np.ndarray, cache: Cache, counts: Sequence[int] | None = None, *, last: bool = False
) -> DecodeInputs:
    """Append tokens[b s], of this rank's sequences and whole in s, to the cached sequences.

    Only the first ``counts[b]`` (at least one) of row b are tokens; the others are padding. Where s is sharded, each
    rank takes its part of the columns; a single column goes to the ranks in turn, so that their caches stay even. With
    ``last`` the outputs are those of each sequence's last token, [n 1 ...] for ``rows``. Raises UsageError for
    sequences that become longer than the model's context.
    """
    if engine.is_training:
        raise UsageError("forward with a cache saves nothing for a backward; call it in engine.inference()")
    begins, length = np.array(cache.check(len(tokens)), np.int64), tokens.shape[1]
    lengths = np.full(len(tokens), length) if counts is None else np.asarray(counts, np.int64)
    longest = int((begins + lengths).max(initial=0))
    if 0 < engine.model.context < longest:
        raise UsageError(
            f"{engine.model.name}: {longest} positions with those of the cache, but the context is "
            f"{engine.model.context}"
        )
    columns, last_column = _columns(engine, length, int(begins.max(initial=0))), lengths[:, None] - 1
    positions = begins[:, None] + np.minimum(columns, last_column)
    cache.begin(engine.backend.asarray(np.where(columns <= last_column, positions, HIDDEN)), lengths.tolist())
    residual = engine.layout.axes("s", "residual")[len(engine.layout.axes("s")) :]
    part = nested_span(len(columns), residual, engine.mesh.axes, engine.mesh.coordinates)
    wanted, rows = None, np.arange(len(tokens))
    if last:
        rows, last_columns = (columns == last_column).nonzero()
        wanted = engine.backend.asarray(rows), engine.backend.asarray(last_columns)
    ctx = ForwardContext(
        engine.backend.asarray(positions),
        engine.backend.asarray(positions[:, part]),
        seed=engine.seed,
        length=length,
        cache=cache,
        wanted=wanted,
    )
    return DecodeInputs(tokens[:, columns], ctx, rows)


def _columns(engine: LayeredEngine, length: int, begin: int) -> np.ndarray:
    """This rank's columns of ``length`` new ones at position ``begin``."""
    ranks = engine.mesh.axis_size(engine.layout.axes("s"))
    if ranks == 1:
        return np.arange(length)
    if length >= ranks:
        return engine.layout.positions(length, engine.mesh)
    turn = (np.arange(length) + begin) % ranks
    return np.flatnonzero(turn == engine.mesh.index(engine.layout.axes("s")))
