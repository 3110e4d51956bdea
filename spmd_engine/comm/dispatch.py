"""Which way the data of a call go, once all ranks have agreed on it: pure functions of what all of them know."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Way(Enum):
    """A transport; see the files of ``transports``."""

    INLINE = "with the agreement"
    SHARED_MEMORY = "shared memory"
    HIERARCHICAL = "within nodes, then between them"
    MPI = "the MPI library's nonblocking call"
    MESSAGES = "messages"


class Facts(NamedTuple):
    """What all ranks know of a call. What each of them offers counts if all do."""

    operation: str
    size: int  #: bytes of an array: of all ranks together, or the same on each
    ranks: int
    axis: int = 0
    one_node: bool = False  #: whether all ranks are on one node, and share memory
    by_nodes: bool = False  #: whether there are several nodes, with as many ranks each, that share memory
    library: bool = False  #: whether there is an MPI library
    lengths_known: bool = True  #: whether all ranks knew before how long the others' arrays are
    inline: bool = False  #: offered: the data came with the agreement
    shown: bool = False  #: offered: the node's other ranks can read the data
    host: bool = True  #: offered: the data are in the host's memory


def way(facts: Facts, tuning: Tuning) -> Way:
    """The way of a call."""
    if facts.inline and facts.host:
        return Way.INLINE
    if facts.one_node:
        return within_node(facts.shown)
    gathers = facts.operation == "all_gather" and facts.axis == 0 and facts.lengths_known
    has_lanes = facts.operation in ("all_reduce", "reduce_scatter") or gathers
    if facts.by_nodes and has_lanes and facts.size >= tuning.hierarchical:
        return Way.HIERARCHICAL
    # Of an all_to_all, all ranks may send all of theirs to one.
    largest = facts.size * facts.ranks if facts.operation == "all_to_all" else facts.size
    return between_nodes(facts, largest, tuning)


def within_node(shown: bool) -> Way:
    """Of the ranks of one node; of a hierarchical call as well."""
    return Way.SHARED_MEMORY if shown else Way.MESSAGES


def between_nodes(facts: Facts, largest: int, tuning: Tuning) -> Way:
    """Of any ranks, all of them or a lane. ``largest``: bytes that one of them has, or gets, at most."""
    small = 0 < facts.size < tuning.by_library * facts.ranks and largest <= tuning.largest_count
    return Way.MPI if facts.library and facts.host and small else Way.MESSAGES


def inline_at_most(operation: str, ranks: int, room: int, reads: bool, tuning: Tuning) -> int:
    """Bytes of a rank's array that come with the agreement, if there is ``room`` for so many; ``reads``: whether the
    others can read their parts of it where it lies."""
    if operation == "all_reduce":
        return min(room, tuning.reduced_by_all // ranks)
    if operation == "reduce_scatter" or not reads:
        return room
    return min(room, tuning.copied_to_table * (ranks if operation == "all_to_all" else 1))


# --- Every threshold by which the way of a call is chosen


@dataclass(frozen=True)
class Tuning:
    """Sizes in bytes, unless it says otherwise. Equal on all ranks: the choice of a way follows from it."""

    #: Data of all ranks together that travel with the agreement between nodes, so that a small call is one exchange.
    with_agreement: int = 1 << 14
    #: Of all ranks of a node, up to which each of them reduces all rather than a part, which would take a phase more.
    reduced_by_all: int = 1 << 19
    #: Of what a rank reads of another's array, which is not reduced, up to which that goes with its signature through
    #: the node's table; more is read where it lies, if it can be: a system call then costs less than a second copy.
    copied_to_table: int = 64 << 10
    #: Of an array that the others cannot read, up to which it is copied to where they can.
    copied: int = 1 << 22
    #: A whole array from which ranks of a node first combine theirs, and then one of each node exchange them.
    hierarchical: int = 1 << 16
    #: What a rank has for each other rank, below which the library moves it: many small messages cost it less than us,
    #: few large ones more (4 MiB on 4 ranks: 2.5 times; 64 KiB on 32: 0.6 times).
    by_library: int = 1 << 14
    #: What is received of each rank's block before it is reduced: bounds the memory that a reduction takes.
    piece: int = 4 << 20
    #: Ranks up to which sums of what the library moves are made here, in rank order; beyond, by the library as well.
    #: Chosen, not measured: for so many blocks of 16 KiB, all_to_all brings each rank 512 KiB, which its cache holds.
    in_rank_order: int = 32
    #: The largest count or displacement that the MPI library is given; larger arrays go by messages.
    largest_count: int = (1 << 31) - 1
