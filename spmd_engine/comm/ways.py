"""Which way the data of a call go, once all ranks have agreed on it: one pure function of what all of them know."""

from __future__ import annotations

from enum import Enum

from spmd_engine.comm.tuning import Tuning


class Way(Enum):
    """A transport; see the files of those names in ``transports``."""

    HIERARCHICAL = "hierarchical"
    MPI = "mpi"
    MESSAGES = "messages"


def way(
    operation: str,
    size: int,
    *,
    ranks: int,
    axis: int,
    lengths_known: bool,
    host: bool,
    by_nodes: bool,
    library: bool,
    tuning: Tuning,
) -> Way:
    """Of arrays of ``size`` bytes, those of all ``ranks`` together or the same on each, too large for the agreement.

    ``lengths_known``: whether all ranks knew before how long the others' arrays are. ``host``: whether all arrays are
    in the host's memory. ``by_nodes``: whether there are several nodes, with as many ranks each, more than one, and
    memory that these share. ``library``: whether there is an MPI library.
    """
    gathers = operation == "all_gather" and axis == 0 and lengths_known
    has_lanes = operation in ("all_reduce", "reduce_scatter") or gathers
    if by_nodes and has_lanes and size >= tuning.hierarchical:
        return Way.HIERARCHICAL
    largest = size * ranks if operation == "all_to_all" else size  # all ranks may send all of theirs to one
    return between(size, largest, ranks=ranks, host=host, library=library, tuning=tuning)


def between(size: int, largest: int, *, ranks: int, host: bool, library: bool, tuning: Tuning) -> Way:
    """The way of data between any ``ranks``, all of them or a lane: ``size`` as above.

    ``largest``: bytes that one of them has, or gets, at most.
    """
    small = 0 < size < tuning.by_library * ranks and largest <= tuning.largest_count
    return Way.MPI if library and host and small else Way.MESSAGES
