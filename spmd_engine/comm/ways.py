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
    axis: int,
    lengths_known: bool,
    host: bool,
    by_nodes: bool,
    library: bool,
    tuning: Tuning,
) -> Way:
    """Of an array of ``size`` bytes, of all ranks together or the same on each, larger than goes with the agreement.

    ``lengths_known``: whether all ranks knew before how long the others' arrays are. ``host``: whether all arrays are
    in the host's memory. ``by_nodes``: whether there are several nodes, with as many ranks each, more than one, and
    memory that these share. ``library``: whether there is an MPI library.
    """
    gathers = operation == "all_gather" and axis == 0 and lengths_known
    has_lanes = operation in ("all_reduce", "reduce_scatter") or gathers
    if by_nodes and has_lanes and size >= tuning.hierarchical:
        return Way.HIERARCHICAL
    if library and host and 0 < size <= tuning.largest_count:
        return Way.MPI
    return Way.MESSAGES
