"""Where the arrays of a rank live: one row for each kind of array of a parameter group.

A row says which part a rank holds, in which dtype, where and how long, and whose memory it is unless it has its own.
What allocates, gathers, reduces and counts arrays asks these rows. A ZeRO stage (Rajbhandari et al., "ZeRO", 2020) is a
column: each shards one more kind over the ranks that would otherwise hold replicas ("part"), and "=" is the memory of
the row above:

    kind of array        ZeRO 0    ZeRO 1        ZeRO 2              ZeRO 3
    parameter in use     whole     whole         whole               whole, while used
    part that is sent    =         part of it    part of it          part
    master               =         =             =                   =
    gradient             whole     whole         whole, while used   whole, while used
    sum of gradients     =         part of it    part                part
    optimizer state      whole     part          part                part
    frozen weight        whole     whole         whole               part

A master of 16-bit floats has memory of its own, in the dtype of sums. Offloaded parameters are in memory only while
they are used, and their masters in another place. Where nothing is trained there is neither master nor gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from spmd_engine.arrays.precision import accumulated_in

MEMORY = "memory"  #: the place of arrays that the backend computes with

USED = "parameter in use"  #: what layers use
SENT = "part that is sent"  #: what owners gather, in the dtype that layers use
UPDATED = "master"  #: what the optimizer updates
GRADIENT = "gradient"  #: what layers add to
SUMMED = "sum of gradients"  #: over ranks, of what this rank updates
STATE = "optimizer state"  #: each kind of it
FROZEN = "frozen weight"  #: without a gradient, as under adapters
BUFFER = "buffer"  #: running statistics, which are sums
RESIDUE = "residue"  #: what compression has omitted from sums
SAVED = "saved activation"

#: Kinds of memory, as estimates and dry runs count it, by kind of array.
CLASSES: Mapping[str, str] = {
    **dict.fromkeys((USED, SENT, UPDATED), "parameters"),
    **dict.fromkeys((GRADIENT, SUMMED), "gradients"),
    STATE: "optimizer state",
}


@dataclass(frozen=True)
class ArrayRow:
    """Where a kind of array lives."""

    kind: str
    axes: tuple[str, ...]  #: that shard it over the ranks that would otherwise hold replicas; (): it is whole
    dtype: np.dtype
    place: str = MEMORY  #: or the name of an offload target
    lasts: bool = True  #: whether it stays between uses; else it is there while it is used
    alias: str | None = None  #: the kind whose memory it is, or is a part of

    def nbytes(self, whole: Any, part: Any) -> Any:
        """Bytes of its own between steps, wherever it lives, on a rank that has this ``part`` of a ``whole``: numbers
        of elements, or arrays of these."""
        return (part if self.axes else whole) * (self.dtype.itemsize if self.lasts and self.alias is None else 0)


class ArrayTable(dict[str, ArrayRow]):
    """The rows of a parameter group, by kind. Without training, some kinds are missing."""

    @property
    def stored(self) -> ArrayRow:
        """The parameters that a rank keeps between uses, and that checkpoints contain."""
        rows = (self[kind] for kind in (UPDATED, SENT, USED) if kind in self)
        return next(row for row in rows if row.lasts and row.alias is None)

    @property
    def rounds(self) -> bool:
        """Whether what the optimizer updates is rounded to what layers use."""
        return UPDATED in self and self[UPDATED].alias is None

    def bytes_by_class(self, whole: Any, part: Any, states: int = 1) -> dict[str, Any]:
        """Bytes in memory between steps of parameters, of gradients and of ``states`` kinds of optimizer state.

        ``whole`` elements, a number or an array of numbers, are those of the group, and ``part`` those of this rank's
        part of it.
        """
        total = dict.fromkeys(CLASSES.values(), 0 * whole)
        for row in self.values():
            if row.place == MEMORY and row.kind in CLASSES:
                held = row.nbytes(whole, part) * (states if row.kind == STATE else 1)
                total[CLASSES[row.kind]] = total[CLASSES[row.kind]] + held
        return total


def array_table(
    stage: int,
    axes: tuple[str, ...],
    dtype: np.dtype,
    *,
    places: Mapping[str, str] = MappingProxyType({}),
    trained: bool = True,
    feeds_back: bool = False,
) -> ArrayTable:
    """The rows of a parameter group of this dtype, which a ZeRO stage shards over these mesh axes; (): over none.

    ``places`` names the offload targets of "parameters", "optimizer" and "activations" that do not live in memory.
    ``feeds_back``: whether the compression of gradients keeps residues.
    """
    optimizer_axes, gradient_axes, parameter_axes = (axes if stage >= least else () for least in (1, 2, 3))
    wide, place = accumulated_in(dtype), places.get("parameters", MEMORY)
    rounds = trained and wide != dtype  # the optimizer updates other numbers than layers use
    used = ArrayRow(USED, (), dtype, lasts=not parameter_axes and place == MEMORY)
    if rounds and place != MEMORY:
        sent = ArrayRow(SENT, optimizer_axes, dtype, lasts=False)
    else:
        sent = ArrayRow(SENT, optimizer_axes, dtype, place, alias=USED if used.lasts else None)
    rows = [used, sent]
    if trained:
        gradient = ArrayRow(GRADIENT, (), wide, lasts=not gradient_axes)
        rows += [
            ArrayRow(UPDATED, optimizer_axes, wide, place, alias=None if rounds else SENT),
            gradient,
            ArrayRow(SUMMED, optimizer_axes, wide, alias=GRADIENT if gradient.lasts else None),
            ArrayRow(STATE, optimizer_axes, wide, places.get("optimizer", MEMORY)),
            ArrayRow(SAVED, (), dtype, places.get("activations", MEMORY), lasts=False),
        ]
        rows += [ArrayRow(RESIDUE, (), wide)] if feeds_back else []
    rows += [ArrayRow(FROZEN, parameter_axes, dtype), ArrayRow(BUFFER, (), wide)]
    return ArrayTable({row.kind: row for row in rows})
