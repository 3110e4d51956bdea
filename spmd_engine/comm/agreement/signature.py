"""What every rank says before a collective, so that a mismatch becomes one error instead of a hang."""

from __future__ import annotations

import marshal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from hashlib import blake2b
from math import prod
from typing import NamedTuple

import numpy as np

from spmd_engine.arrays import dtypes
from spmd_engine.comm.spans import span
from spmd_engine.errors import MismatchError, UsageError

MAX_DIMS = 16
SAME, ALIKE, KNOWN, HOST, MOST, ENDED = 0, 2, 4, 6, 7, 8  # where in ``words``; three with their negatives behind them
_FORMAT = 2  # of marshal: equal values are equal bytes, and bytes that come after them are not looked at
_NUMBER = 15  # bytes of one, at most


def room(ranks: int) -> int:
    """Bytes of a signature at most, in a group of so many ranks."""
    return 192 + _NUMBER * (MAX_DIMS + ranks) + dtypes.LONGEST


@dataclass(frozen=True)
class Signature:
    """What one rank calls: what must be equal on all, and besides what each offers, and its own lengths."""

    operation: str  # of Group's; or, instead of a call, "leave": the program ends, "refuse": this rank cannot make it
    reduction: str = ""
    dtype: str = ""  # as ``dtypes.describe`` says it
    shape: tuple[int, ...] | None = None  # None: this rank contributes no array (broadcast)
    axis: int = 0
    concat_axis: int = 0
    root: int = 0
    sizes: tuple[int, ...] = ()  # the parts of reduce_scatter and all_to_all, if the caller gave them
    inline: int = 0  # bytes of data that come with the signature
    host: bool = True  # whether its array is in the host's memory
    known: int = -1  # a number for what ranks of several nodes know of each other's lengths; -1: nothing

    @cached_property
    def packed(self) -> bytes:
        """All of it as bytes."""
        return marshal.dumps(tuple(getattr(self, each.name) for each in fields(self)), _FORMAT)

    @staticmethod
    def unpack(data: bytes) -> Signature:
        """The signature that ``data`` begins with."""
        return Signature(*marshal.loads(data))

    @cached_property
    def digest(self) -> int:
        """A number by which it is recognized."""
        return int.from_bytes(blake2b(self.packed, digest_size=8).digest(), "little", signed=True)

    @cached_property
    def words(self) -> np.ndarray:
        """Numbers of which ranks of several nodes find the largest, in place of all the rest: see ``dissemination``.

        Number and negative of what must be equal, and of what may be, and is then good to know; of the rest, the worst.
        """
        agreed, variable = number_of(self.agreement()), 0
        if self.operation == "all_gather" and self.shape:  # may be gathered though they are not of one length
            variable = self.shape[self.axis]
        elif self.operation == "all_to_all":  # or be split in another way
            variable = number_of((self.shape, self.sizes))
        size = 0 if self.shape is None else prod(self.shape) * self.array_type[1].itemsize
        both = (sign * each for each in (agreed, variable, self.known) for sign in (1, -1))
        return np.array([*both, -self.host, size, 0], np.int64)

    @cached_property
    def array_type(self) -> tuple[tuple[int, ...], np.dtype]:
        """Shape and dtype of the data that travel: of the array, or of the bytes of a text."""
        if self.shape is None:
            return (self.inline,), np.dtype(np.uint8)
        return self.shape, dtypes.described(self.dtype)

    def part_for(self, rank: int, ranks: int) -> tuple[slice, ...]:
        """Which part of this rank's array is for another."""
        if self.sizes:
            part = slice(sum(self.sizes[:rank]), sum(self.sizes[: rank + 1]))
        else:
            part = span(self.shape[self.axis], ranks, rank)
        return (slice(None),) * self.axis + (part,)

    def length_for(self, rank: int, ranks: int) -> int:
        """How long, along ``concat_axis``, that is which another rank gets of this one's array."""
        if self.operation == "all_gather" or self.axis != self.concat_axis:
            return self.shape[self.concat_axis]
        part = self.part_for(rank, ranks)[-1]
        return part.stop - part.start

    def __str__(self) -> str:
        if self.operation == "leave":
            return "nothing more: its program ended"
        if self.operation == "refuse":
            return "what it cannot call"
        how = [self.reduction] if self.reduction else []
        if self.shape is not None:
            how.append(f"{dtypes.described(self.dtype)}{list(self.shape)}")
        if self.operation in ("all_gather", "reduce_scatter", "all_to_all"):
            how.append(f"axis={self.axis}")
        if self.operation == "all_to_all":
            how.append(f"concat_axis={self.concat_axis}")
        if self.sizes:
            how.append(f"sizes={list(self.sizes)}")
        if self.operation == "broadcast":
            how.append(f"root={self.root}")
        return f"{self.operation}({', '.join(how)})"

    def agreement(self) -> tuple:
        """What must be equal on all ranks of the group."""
        shape = list(self.shape) if self.shape is not None else []
        if self.operation == "all_gather" and shape:
            shape[self.axis] = -1  # shards may be uneven along the gathered axis
        if self.operation == "all_to_all" and shape:
            shape[self.concat_axis] = -1
        if self.operation == "broadcast":  # only the root has an array
            return self.operation, self.root
        # What all_to_all joins along the axis it splits may be cut differently on every rank.
        sizes = () if self.operation == "all_to_all" and self.axis == self.concat_axis else self.sizes
        return self.operation, self.reduction, self.dtype, tuple(shape), self.axis, self.concat_axis, sizes


def number_of(what: tuple) -> int:
    """A number below 2^62, which can be negated, for texts and numbers: another one for others, as good as surely."""
    return int.from_bytes(blake2b(repr(what).encode(), digest_size=8).digest(), "little") >> 2


class NumberedCall(NamedTuple):
    """A signature, and which of the calls in its group it is, counted from 1."""

    number: int
    signature: Signature

    def __str__(self) -> str:
        if self.signature.operation == "leave":
            return str(self.signature)
        return f"{self.signature} as its call number {self.number}"


class Signatures:
    """Those of all ranks in a call: kept, so that they are recognized, and need not be read, when they come again."""

    __slots__ = ("by_rank", "digests", "same", "inline_all", "inline")

    def __init__(self, by_rank: Sequence[Signature]) -> None:
        self.by_rank, self.digests = list(by_rank), [each.digest for each in by_rank]
        self.same = len(set(self.digests)) == 1  #: whether all are the same
        #: whether all data come with the signatures
        self.inline_all = all(each.inline or each.shape is None for each in by_rank)
        self.inline: dict[int, list[np.ndarray | None]] = {}  #: by slot: where everyone's data lie, None: no data


def check(calls: Sequence[NumberedCall], group: str) -> None:
    """Raise the same MismatchError on every rank unless all called the same thing."""
    number, agreement = calls[0].number, calls[0].signature.agreement()
    if all(call.number == number and call.signature.agreement() == agreement for call in calls):
        return
    said: dict[str, list[int]] = {}
    for rank, call in enumerate(calls):
        said.setdefault(str(call), []).append(rank)
    text = "; ".join(f"{named(ranks)} called {call}" for call, ranks in said.items())
    raise MismatchError(
        f"collective over {group!r} does not match (ranks of that group): {text}. "
        "Every rank of a group must make the same calls in the same order."
    )


def refused(texts: Mapping[str, Sequence[int]], group: str, size: int) -> UsageError:
    """The error of all ranks when some cannot make their calls: these ``texts``, each said by these ranks."""
    first, said_by = next(iter(texts.items()))
    if len(said_by) == size:
        return UsageError(first)
    return UsageError("; ".join(f"{named(ranks)} of {group!r}: {text}" for text, ranks in texts.items()))


def named(ranks: Sequence[int]) -> str:
    """``rank 1``, or ``ranks 0, 2``."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
