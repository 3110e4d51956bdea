"""What every rank says before a collective, so that a mismatch becomes one error instead of a hang."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spmd_engine.errors import MismatchError, UsageError

OPERATIONS = ("barrier", "broadcast", "all_gather", "all_reduce", "reduce_scatter", "all_to_all", "send", "leave")
REDUCTIONS = ("", "sum", "mean", "max", "min", "prod")
MAX_DIMS = 16

_LAYOUT = struct.Struct(f"<IBBBxiiiI40s{MAX_DIMS}q")
SIZE = _LAYOUT.size


@dataclass(frozen=True)
class Header:
    """One rank's call: everything that must agree, and the shape from which the others learn sizes."""

    sequence: int
    operation: str
    reduction: str = ""
    dtype: str = ""
    shape: tuple[int, ...] | None = None  # None: this rank contributes no array (broadcast)
    axis: int = 0
    concat_axis: int = 0
    root: int = 0
    inline: int = 0  # bytes of the array, or of ``sizes``, that ride behind the header
    sizes: tuple[int, ...] = ()  # the parts of reduce_scatter and all_to_all, if the caller gave them

    def pack(self) -> bytes:
        shape = self.shape if self.shape is not None else ()
        return _LAYOUT.pack(
            self.sequence & 0xFFFFFFFF,
            OPERATIONS.index(self.operation),
            REDUCTIONS.index(self.reduction),
            len(shape) if self.shape is not None else 255,
            self.axis,
            self.concat_axis,
            self.root,
            self.inline,
            self.dtype.encode(),
            *shape,
            *(0,) * (MAX_DIMS - len(shape)),
        )

    @classmethod
    def unpack(cls, data) -> Header:
        sequence, operation, reduction, ndim, axis, concat_axis, root, inline, dtype, *dims = _LAYOUT.unpack(
            data[:SIZE]
        )
        operation = OPERATIONS[operation]
        table = data[SIZE : SIZE + inline] if operation in ("reduce_scatter", "all_to_all") else b""
        return cls(
            sequence,
            operation,
            REDUCTIONS[reduction],
            dtype.rstrip(b"\0").decode(),
            None if ndim == 255 else tuple(dims[:ndim]),
            axis,
            concat_axis,
            root,
            inline,
            struct.unpack(f"<{len(table) // 8}q", table),
        )

    def __str__(self) -> str:
        if self.operation == "leave":
            return "nothing more: its program ended"
        how = [self.reduction] if self.reduction else []
        if self.shape is not None:
            how.append(f"{np_dtype(self.dtype).name}{list(self.shape)}")
        if self.operation in ("all_gather", "reduce_scatter", "all_to_all"):
            how.append(f"axis={self.axis}")
        if self.operation == "all_to_all":
            how.append(f"concat_axis={self.concat_axis}")
        if self.sizes:
            how.append(f"sizes={list(self.sizes)}")
        if self.operation == "broadcast":
            how.append(f"root={self.root}")
        return f"{self.operation}({', '.join(how)}) as its call number {self.sequence}"

    def agreement(self) -> tuple:
        """What must be equal on all ranks of the group."""
        shape = list(self.shape) if self.shape is not None else []
        if self.operation == "all_gather" and shape:
            shape[self.axis] = -1  # shards may be uneven along the gathered axis
        if self.operation == "all_to_all" and shape:
            shape[self.concat_axis] = -1
        if self.operation == "broadcast":  # only the root has an array
            return self.sequence, self.operation, self.root
        # What all_to_all joins along the axis it splits may be cut differently on every rank.
        sizes = () if self.operation == "all_to_all" and self.axis == self.concat_axis else self.sizes
        call = self.sequence, self.operation, self.reduction, self.dtype
        return (*call, tuple(shape), self.axis, self.concat_axis, sizes)


def check(headers: Sequence[Header], group: str) -> None:
    """Raise the same MismatchError on every rank unless all called the same thing."""
    if all(header.agreement() == headers[0].agreement() for header in headers):
        return
    said: dict[str, list[int]] = {}
    for rank, header in enumerate(headers):
        said.setdefault(str(header), []).append(rank)
    calls = "; ".join(f"{_ranks(ranks)} called {call}" for call, ranks in said.items())
    raise MismatchError(
        f"collective over {group!r} does not match (ranks of that group): {calls}. "
        "Every rank of a group must make the same calls in the same order."
    )


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def dtype_name(dtype: np.dtype) -> str:
    """A name from which ``np_dtype`` makes the dtype again on another rank."""
    dtype = np.dtype(dtype)
    name = dtype.name if dtype.isbuiltin == 2 else dtype.str  # 2: ml_dtypes', whose str says too little
    if dtype.fields is not None:
        name = repr(dtype.descr)
    if dtype.hasobject:
        raise UsageError("arrays of Python objects cannot be sent; give numbers, or bytes made by pickle")
    if len(name.encode()) > 40:
        raise UsageError(f"dtype {dtype} is too long to describe to other ranks; send its fields one by one")
    return name


def np_dtype(name: str) -> np.dtype:
    """The dtype of ``dtype_name``; knows bfloat16 and its kin from ml_dtypes."""
    if name.startswith("["):
        from ast import literal_eval

        return np.dtype([tuple(field) for field in literal_eval(name)])
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
