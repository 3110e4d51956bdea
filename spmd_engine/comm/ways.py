"""Which way the data of a call go, once all ranks have agreed on it: pure functions of what all of them know."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from spmd_engine.comm.tuning import Tuning


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
