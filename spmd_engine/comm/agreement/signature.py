"""The call of a rank as a signature, which ranks compare."""

from __future__ import annotations

import marshal
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from hashlib import blake2b
from math import prod
from typing import Any, NamedTuple

import numpy as np

from spmd_engine.arrays import dtypes
from spmd_engine.comm.blocks import span

MAX_DIMS = 16
#: Indices in ``Signature.words``. Each of the first three is followed by its negative.
_SAME, _ALIKE, _KNOWN, _HOST, _DEVICE, _MOST, ENDED, BYTES = 0, 2, 4, 6, 7, 8, 9, 10
_FORMAT = 2  # of marshal: equal values give equal bytes, and ``loads`` ignores bytes after them
_DIGITS = 15  # most bytes of a marshalled number


def room(ranks: int) -> int:
    """The most bytes of a signature in a group of this size."""
    return 192 + _DIGITS * (MAX_DIMS + ranks) + dtypes.LONGEST


@dataclass(frozen=True)
class Signature:
    """The call of one rank: the fields that must be equal on all ranks, the data that it offers, and its lengths."""

    operation: str  # a collective; "leave": the program ends; "refuse": this rank cannot make its call
    reduction: str = ""
    dtype: str = ""  # by ``dtypes.describe``
    shape: tuple[int, ...] | None = None  # None: this rank contributes no array (broadcast)
    axis: int = 0
    concat_axis: int = 0
    root: int = 0
    sizes: tuple[int, ...] = ()  # of the parts of reduce_scatter and all_to_all, if the caller passed them
    inline: int = 0  # bytes of data that travel with the signature
    host: bool = True  # whether the array, or in a broadcast the result, is in host memory
    known: int = -1  # a number for the lengths of all ranks, if the caller passed them; otherwise -1

    @cached_property
    def packed(self) -> bytes:
        """All fields as bytes."""
        return marshal.dumps(tuple(getattr(self, field.name) for field in fields(self)), _FORMAT)

    @staticmethod
    def unpack(data: bytes) -> Signature:
        """The signature that ``data`` begins with."""
        return Signature(*marshal.loads(data))

    @cached_property
    def digest(self) -> int:
        """A number that identifies the signature."""
        return int.from_bytes(blake2b(self.packed, digest_size=8).digest(), "little", signed=True)

    @cached_property
    def words(self) -> np.ndarray:
        """Numbers whose maximum ranks of several nodes compute, instead of exchanging signatures: see ``tree``.

        A number and its negative show whether fields are equal that must be, or may be, equal; other numbers are worst
        cases. The last two are the tree's.
        """
        agreed, variable = number_of(self.agreement()), 0
        if self.operation == "all_gather" and self.shape:  # lengths along the gathered axis may differ
            variable = self.shape[self.axis]
        elif self.operation == "all_to_all":  # the splits may differ
            variable = number_of((self.shape, self.sizes))
        size = 0 if self.shape is None else prod(self.shape) * self.array_type[1].itemsize
        both = (sign * word for word in (agreed, variable, self.known) for sign in (1, -1))
        return np.array([*both, -self.host, self.host, size, 0, 0], np.int64)

    @cached_property
    def array_type(self) -> tuple[tuple[int, ...], np.dtype]:
        """Shape and dtype of the array, or of the bytes of a text."""
        if self.shape is None:
            return (self.inline,), np.dtype(np.uint8)
        return self.shape, dtypes.described(self.dtype)

    def part_for(self, rank: int, ranks: int) -> tuple[slice, ...]:
        """Index of the part of this rank's array that goes to another rank."""
        if self.sizes:
            part = slice(sum(self.sizes[:rank]), sum(self.sizes[: rank + 1]))
        else:
            part = span(self.array_type[0][self.axis], ranks, rank)
        return (slice(None),) * self.axis + (part,)

    def length_for(self, rank: int, ranks: int) -> int:
        """Length along ``concat_axis`` of the block that another rank receives from this one."""
        if self.operation == "all_gather" or self.axis != self.concat_axis:
            return self.array_type[0][self.concat_axis]
        part = self.part_for(rank, ranks)[-1]
        return part.stop - part.start

    def __str__(self) -> str:
        if self.operation == "leave":
            return "nothing more: its program ended"
        if self.operation == "refuse":
            return "what it cannot call"
        arguments = [self.reduction] if self.reduction else []
        if self.shape is not None:
            arguments.append(f"{dtypes.described(self.dtype)}{list(self.shape)}")
        if self.operation in ("all_gather", "reduce_scatter", "all_to_all"):
            arguments.append(f"axis={self.axis}")
        if self.operation == "all_to_all":
            arguments.append(f"concat_axis={self.concat_axis}")
        if self.sizes:
            arguments.append(f"sizes={list(self.sizes)}")
        if self.operation == "broadcast":
            arguments.append(f"root={self.root}")
        return f"{self.operation}({', '.join(arguments)})"

    def agreement(self) -> tuple:
        """The values that must be equal on all ranks of the group."""
        shape = list(self.shape) if self.shape is not None else []
        if self.operation == "all_gather" and shape:
            shape[self.axis] = -1  # shards may be uneven along the gathered axis
        if self.operation == "all_to_all" and shape:
            shape[self.concat_axis] = -1
        if self.operation == "broadcast":  # only the root has an array
            return self.operation, self.root
        # An all_to_all that splits and joins along the same axis may be split differently on every rank.
        sizes = () if self.operation == "all_to_all" and self.axis == self.concat_axis else self.sizes
        return self.operation, self.reduction, self.dtype, tuple(shape), self.axis, self.concat_axis, sizes


def number_of(values: tuple) -> int:
    """A hash of texts and numbers, below 2^62, so that its negative is also an int64."""
    return int.from_bytes(blake2b(repr(values).encode(), digest_size=8).digest(), "little") >> 2


def common(words: np.ndarray) -> tuple[bool, bool, bool, bool, bool, int]:
    """What the maximum of all ranks' ``words`` says: whether all make the same call; alike, sizes_known, host, device
    and most as in ``Agreed``."""
    same, alike, known = (bool(words[i] == -words[i + 1]) for i in (_SAME, _ALIKE, _KNOWN))
    return same, alike, known and bool(words[_KNOWN] >= 0), bool(words[_HOST]), not words[_DEVICE], int(words[_MOST])


class NumberedCall(NamedTuple):
    """A signature with the number of the call in its group, counted from 1."""

    number: int
    signature: Signature

    def __str__(self) -> str:
        if self.signature.operation == "leave":
            return str(self.signature)
        return f"{self.signature} as its call number {self.number}"


class Signatures:
    """The signatures of all ranks in a call. A group keeps them: digests alone identify a repeated call."""

    __slots__ = ("by_rank", "digests", "same", "inline_all", "inline", "device")

    def __init__(self, by_rank: Sequence[Signature]) -> None:
        self.by_rank, self.digests = list(by_rank), [signature.digest for signature in by_rank]
        self.same = len(set(self.digests)) == 1  #: whether all ranks have the same signature
        #: whether all data travel with the signatures
        self.inline_all = all(signature.inline or signature.shape is None for signature in by_rank)
        self.device = not any(signature.host for signature in by_rank)  #: whether all arrays are on devices
        self.inline: dict[int, Any] = {}  #: by slot: the slot table's Entries with all ranks' inline data
