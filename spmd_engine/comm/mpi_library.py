"""The collectives of the MPI library, on bytes, so that it need not know any dtype."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from mpi4py import MPI


class MPILibrary:
    """See ``by_library.Library``."""

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm = comm

    def all_gather(self, own: np.ndarray | None, out: np.ndarray, sizes: Sequence[int]) -> None:
        sent = MPI.IN_PLACE if own is None else [_bytes(own), MPI.BYTE]
        if len(set(sizes)) == 1:
            self._comm.Allgather(sent, [_bytes(out), sizes[0], MPI.BYTE])
        else:
            self._comm.Allgatherv(sent, [_bytes(out), sizes, _starts(sizes), MPI.BYTE])

    def all_to_all(
        self, x: np.ndarray, sizes: Sequence[int], out: np.ndarray, out_sizes: Sequence[int], even: bool
    ) -> None:
        if even:
            self._comm.Alltoall([_bytes(x), sizes[0], MPI.BYTE], [_bytes(out), sizes[0], MPI.BYTE])
            return
        self._comm.Alltoallv(
            [_bytes(x), sizes, _starts(sizes), MPI.BYTE], [_bytes(out), out_sizes, _starts(out_sizes), MPI.BYTE]
        )


def _bytes(x: np.ndarray) -> np.ndarray:
    return x.reshape(-1).view(np.uint8)


def _starts(sizes: Sequence[int]) -> list[int]:
    return [0, *accumulate(sizes[:-1])]
