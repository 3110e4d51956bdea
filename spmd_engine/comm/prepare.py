"""What is found out of a call before it is made, and kept for those like it: checks, parts, sizes for the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.comm.by_library import move_all_gather, move_all_reduce, move_all_to_all, move_reduce_scatter
from spmd_engine.comm.prepared_call import PreparedCall
from spmd_engine.comm.reducing import reducer, reducible
from spmd_engine.comm.signature import Signature, Signatures
from spmd_engine.comm.spans import joined, span, spans
from spmd_engine.comm.staging import is_reachable
from spmd_engine.errors import UsageError

if TYPE_CHECKING:
    from spmd_engine.comm.calls import Calls

Found = Signatures | None  # what ``PreparedCall.finish`` is given


def barrier(calls: Calls, x: None, label: str) -> PreparedCall:
    """Of ``Group.barrier``."""
    where = "barrier", calls.axes, label
    return PreparedCall(Signature("barrier"), where, calls.steps.meet_only, lambda *_: None)


def broadcast(calls: Calls, mine: Array | None, root: int, label: str) -> PreparedCall:
    """Of ``Group.broadcast``; ``mine``: the root's array, None elsewhere."""
    if not 0 <= root < calls.size:
        raise UsageError(f"broadcast over {calls.axes!r}: root {root} is not one of {calls.size} ranks")
    if calls.rank == root and mine is None:
        raise UsageError(f"broadcast over {calls.axes!r}: the root must give an array")

    def sent(result: Array) -> int:  # the root hands out the parts, then everyone passes its part on
        own = span(result.size, calls.size, calls.rank)
        part = (own.stop - own.start) * result.itemsize
        return result.nbytes - part + part * (calls.size - 1) if calls.rank == root else part * (calls.size - 2)

    return PreparedCall(
        calls.signature_of("broadcast", mine, root=root),
        ("broadcast", calls.axes, label),
        calls.steps.broadcast,
        _received,
        payload=mine.nbytes if mine is not None else 0,
        sent=sent,
        dtype=mine.dtype if mine is not None else None,
    )


def all_reduce(calls: Calls, x: Array, op: str, label: str) -> PreparedCall:
    """Of ``Group.all_reduce``."""
    own = reducible("all_reduce", x, op)
    mine = span(own.size, calls.size, calls.rank)
    part = (mine.stop - mine.start) * own.itemsize
    return PreparedCall(
        calls.signature_of("all_reduce", own, reduction=op),
        ("all_reduce", calls.axes, label),
        calls.steps.all_reduce,
        _reduced,
        move_all_reduce,
        payload=own.nbytes,
        sent=own.nbytes - part + part * (calls.size - 1),
        shape=own.shape,
        dtype=own.dtype,
        reduce=reducer(op, own.dtype, backend_of(own).xp if is_reachable(calls.comm, own) else np),
    )


def reduce_scatter(
    calls: Calls, x: Array, axis: int, op: str, sizes: tuple[int, ...] | None, label: str
) -> PreparedCall:
    """Of ``Group.reduce_scatter``."""
    own = reducible("reduce_scatter", x, op)
    axis = _axis(calls, "reduce_scatter", own, axis)
    parts = _parts(calls, "reduce_scatter", own, axis, sizes)
    mine = own[parts[calls.rank]]
    return PreparedCall(
        calls.signature_of("reduce_scatter", own, reduction=op, axis=axis, sizes=sizes or ()),
        ("reduce_scatter", calls.axes, label),
        calls.steps.reduce_scatter,
        lambda call, _, blocks, out: _reduced(call, _, [block[parts[calls.rank]] for block in blocks], out),
        move_reduce_scatter if axis == 0 else None,
        payload=own.nbytes,
        sent=own.nbytes - mine.nbytes,
        shape=mine.shape,
        dtype=own.dtype,
        parts=parts,
        reduce=reducer(op, own.dtype, backend_of(own).xp if is_reachable(calls.comm, own) else np),
    )


def all_gather(calls: Calls, x: Array, axis: int, sizes: tuple[int, ...] | None, label: str) -> PreparedCall:
    """Of ``Group.all_gather``."""
    axis = _axis(calls, "all_gather", x, axis)
    if sizes is not None and (len(sizes) != calls.size or sizes[calls.rank] != x.shape[axis]):
        raise UsageError(
            f"all_gather over {calls.axes!r}: sizes {list(sizes)} must be {calls.size} numbers; number "
            f"{calls.rank} is {x.shape[axis]}, the length of this rank's array along axis {axis}"
        )
    return PreparedCall(
        calls.signature_of("all_gather", x, axis=axis),
        ("all_gather", calls.axes, label),
        calls.steps.all_gather,
        lambda call, _, blocks, out: joined(blocks, axis, call.dtype, out),
        move_all_gather if axis == 0 else None,
        payload=x.nbytes,
        sent=x.nbytes * (calls.size - 1),
        shape=(x.shape[0] * calls.size, *x.shape[1:]) if axis == 0 else (),  # elsewhere, no out will do
        dtype=x.dtype,
        sizes=sizes,
    )


def all_to_all(
    calls: Calls,
    x: Array,
    axis: int,
    concat_axis: int | None,
    splits: tuple[int, ...] | None,
    received: tuple[int, ...] | None,
    label: str,
) -> PreparedCall:
    """Of ``Group.all_to_all``; ``received``: how long what comes from each rank is, if this one knows."""
    axis = _axis(calls, "all_to_all", x, axis)
    concat = axis if concat_axis is None else _axis(calls, "all_to_all", x, concat_axis)
    parts = _parts(calls, "all_to_all", x, axis, splits)
    if received is not None and (len(received) != calls.size or min(received) < 0):
        raise UsageError(f"all_to_all over {calls.axes!r}: received {list(received)} must be {calls.size} numbers")

    def finish(call: PreparedCall, found: Found, blocks: Sequence[np.ndarray], out: np.ndarray | None) -> Any:
        cuts = [parts[calls.rank]] * calls.size
        if found is not None and not found.same:
            cuts = [(*parts[0][:-1], each.part_for(calls.rank, calls.size)) for each in found.by_rank]
        came = [block[cut] for block, cut in zip(blocks, cuts, strict=True)]
        y = joined(came, concat, call.dtype, out)
        return (y, [each.shape[concat] for each in came]) if call.tells else y

    shape, mine = list(x.shape), parts[calls.rank][-1]
    shape[axis] = mine.stop - mine.start
    shape[concat] *= calls.size
    return PreparedCall(
        calls.signature_of("all_to_all", x, axis=axis, concat_axis=concat, sizes=splits or ()),
        ("all_to_all", calls.axes, label),
        calls.steps.all_to_all,
        finish,
        move_all_to_all if axis == concat == 0 and splits is None else None,
        payload=x.nbytes,
        sent=x.nbytes - x[parts[calls.rank]].nbytes,
        shape=tuple(shape) if concat == 0 else (),
        dtype=x.dtype,
        parts=parts,
        sizes=received,
        tells=splits is not None,
    )


PREPARE = {
    "barrier": barrier,
    "broadcast": broadcast,
    "all_reduce": all_reduce,
    "reduce_scatter": reduce_scatter,
    "all_gather": all_gather,
    "all_to_all": all_to_all,
}


def check_out(call: PreparedCall, x: Array, out: Any, ranks: int) -> None:
    """Raise UsageError unless ``out`` can receive the result of a call of ``x``."""
    operation, told = call.signature.operation, call.signature
    if operation == "broadcast":  # it only says where the result is wanted
        return
    fits = out.dtype == call.dtype and out.flags.c_contiguous
    fits = fits and getattr(out.flags, "writeable", True)  # CuPy's arrays always are
    if operation in ("all_gather", "all_to_all"):
        if not fits or told.concat_axis or (operation == "all_gather" and told.axis):
            how = "axis 0" if operation == "all_gather" else "what comes be joined along axis 0"
            raise UsageError(f"{operation}: out must be a contiguous, writable array of {call.dtype}, and {how}")
        if operation == "all_to_all" and isinstance(x, np.ndarray) and np.may_share_memory(x, out):
            raise UsageError("all_to_all: out must not share memory with what is sent")
        if ranks > 1:  # how long the result is follows from all ranks' arrays
            return
    shape = x.shape if ranks == 1 else call.shape
    if out.shape != shape or not fits:
        wanted, given = f"{call.dtype}{list(shape)}", f"{out.dtype}{list(out.shape)}"
        raise UsageError(f"{operation}: out must be contiguous, writable {wanted}, is {given}")


def _reduced(call: PreparedCall, _: Found, blocks: Sequence[np.ndarray], out: np.ndarray | None) -> np.ndarray:
    """The reduction of blocks that are shaped as the result is; ``out`` may be one of them, else it overlaps none."""
    if out is None:
        out = np.empty(call.shape, call.dtype)
    call.reduce(out, blocks)
    return out


def _received(call: PreparedCall, _: Found, blocks: Sequence[np.ndarray | None], __: None) -> np.ndarray:
    return blocks[call.signature.root].copy()


def _axis(calls: Calls, operation: str, x: Array, axis: int) -> int:
    if not -x.ndim <= axis < x.ndim:
        raise UsageError(f"{operation} over {calls.axes!r}: axis {axis} of an array of shape {x.shape}")
    return axis % x.ndim


def _parts(
    calls: Calls, operation: str, x: Array, axis: int, sizes: Sequence[int] | None
) -> list[tuple[slice, ...]]:
    """Index of each rank's part of ``x`` along ``axis``."""
    if sizes is None:
        cuts = [span(x.shape[axis], calls.size, r) for r in range(calls.size)]
    else:
        if len(sizes) != calls.size or sum(sizes) != x.shape[axis] or min(sizes) < 0:
            raise UsageError(
                f"{operation} over {calls.axes!r}: sizes {list(sizes)} must be {calls.size} numbers that "
                f"add up to {x.shape[axis]}, the array's length along axis {axis}"
            )
        cuts = spans(sizes)
    return [(slice(None),) * axis + (cut,) for cut in cuts]
