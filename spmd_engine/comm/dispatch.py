"""The route of a call's data: one pure function of the call and of facts that all ranks of its group know.

``choose`` is asked once for a call, after the ranks have agreed on it (a call that is repeated keeps the answer), and
once more for each of the two levels of a hierarchical call. ``show collective`` draws the same function.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from spmd_engine.comm.agreement.call_agreement import Signature


class Route(Enum):
    """How the data of a call travel. All but the first are files of ``transports``."""

    INLINE = "inline with the agreement"
    SHARED_MEMORY = "shared memory"
    HIERARCHICAL = "hierarchical: within nodes, then between them"
    MPI = "the MPI library's nonblocking collective"
    MESSAGES = "messages"


@dataclass(frozen=True)
class Tuning:
    """Thresholds in bytes, unless stated otherwise. They must be equal on all ranks, as routes follow from them."""

    #: Largest payload of all ranks together that travels inline between nodes, so that a small call is one exchange.
    with_agreement: int = 1 << 14
    #: Largest payload of a node's ranks together that each rank reduces whole. Above it each rank reduces a part, which
    #: takes one more phase.
    reduced_by_all: int = 1 << 19
    #: Largest block, not reduced, that a rank reads inline from the slot table. Larger ones are read where they lie, if
    #: possible: a system call then costs less than a second copy.
    copied_to_table: int = 64 << 10
    #: Largest array that is copied into shared memory because the other ranks cannot read it where it lies.
    copied: int = 1 << 22
    #: Smallest whole array that takes the hierarchical route.
    hierarchical: int = 1 << 16
    #: Bytes from each rank to each other rank below which the MPI library moves them. Many small messages cost the
    #: library less than us, few large ones more (4 MiB on 4 ranks: 2.5 times; 64 KiB on 32: 0.6 times).
    by_library: int = 1 << 14
    #: Bytes of each rank's block that are received before they are reduced. Bounds the memory of a reduction.
    piece: int = 4 << 20
    #: Largest number of ranks for which sums on the MPI route are made here, in rank order; above it the library sums.
    #: Not measured: for 32 blocks of 16 KiB, all_to_all brings each rank 512 KiB, which fits into its cache.
    in_rank_order: int = 32
    #: Largest count or displacement that the MPI library is given. Larger arrays are sent as messages.
    largest_count: int = (1 << 31) - 1


class Facts(NamedTuple):
    """What all ranks of a group know of a call on which they have agreed. The same on every rank."""

    size: int  #: bytes of an array: of all ranks together, or the same on each
    ranks: int
    one_node: bool = False  #: whether all ranks are on one node and share memory
    even_nodes: bool = False  #: whether there are several nodes with equally many ranks, which share memory
    library: bool = False  #: whether there is an MPI library
    lengths_known: bool = True  #: whether all ranks knew the lengths of the others' arrays before the call
    inline: bool = False  #: whether the data of all ranks travelled with the agreement
    readable: bool = False  #: whether the ranks of a node can read one another's data
    host: bool = True  #: whether all data are in host memory
    tuning: Tuning = Tuning()


def choose(call: Signature, facts: Facts) -> Route:
    """The route of a call's data."""
    if facts.inline and facts.host:
        return Route.INLINE
    if facts.one_node:
        return Route.SHARED_MEMORY if facts.readable else Route.MESSAGES
    tuning, size = facts.tuning, facts.size
    gathers_known_rows = call.operation == "all_gather" and call.axis == 0 and facts.lengths_known
    splits_by_nodes = call.operation in ("all_reduce", "reduce_scatter") or gathers_known_rows
    if facts.even_nodes and splits_by_nodes and size >= tuning.hierarchical:
        return Route.HIERARCHICAL
    largest = size * facts.ranks if call.operation == "all_to_all" else size  # one rank may receive all that all send
    small = 0 < size < tuning.by_library * facts.ranks and largest <= tuning.largest_count
    return Route.MPI if facts.library and facts.host and small else Route.MESSAGES


def inline_limit(operation: str, ranks: int, room: int, readable: bool, tuning: Tuning) -> int:
    """The most bytes of a rank's array that travel inline, where there is ``room`` for so many.

    ``readable``: whether the other ranks can read their parts of the array where it lies.
    """
    if operation == "all_reduce":
        return min(room, tuning.reduced_by_all // ranks)
    if operation == "reduce_scatter" or not readable:
        return room
    return min(room, tuning.copied_to_table * (ranks if operation == "all_to_all" else 1))
