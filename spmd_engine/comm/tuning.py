"""Every threshold by which the way of a call is chosen."""

from __future__ import annotations

from dataclasses import dataclass


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
