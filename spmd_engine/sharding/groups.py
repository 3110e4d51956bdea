"""Parameter groups: neighbours that share one flat buffer, and so one collective and one optimizer pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import numpy as np

from spmd_engine.arrays.backend import Array, Backend

THRESHOLD = 1 << 20  # bytes: below this, one more neighbour costs less than one more collective


@dataclass(frozen=True)
class Member:
    """A parameter as this rank stores it."""

    name: str
    shape: tuple[int, ...]  #: of the local block
    decay: bool  #: whether weight decay applies
    summed_over: tuple[str, ...]  #: mesh axes along which its gradient is unreduced after a backward
    largest: int  #: elements of the largest block on any rank, by which every rank cuts the same groups


class ParameterGroup:
    """Members whose gradients are summed over the same axes, in one flat buffer of parameters and one of gradients.

    Arrays by name are views of the buffers. Decayed members lie first, so that weight decay is one segment.
    """

    def __init__(self, index: int, members: Sequence[Member], dtype, backend: Backend) -> None:
        self.name = f"group{index}"
        self.members = sorted(members, key=lambda member: not member.decay)
        self.summed_over = members[0].summed_over
        sizes = [prod(member.shape) for member in self.members]
        self._ends = [0, *accumulate(sizes)]
        self.size = self._ends[-1]
        self._decayed = sum(size for size, member in zip(sizes, self.members, strict=True) if member.decay)
        self.parameters = backend.xp.zeros(self.size, dtype)
        self.gradients = backend.xp.zeros(self.size, dtype)

    def views(self, flat: Array) -> dict[str, Array]:
        """A flat array of this group's length as one array a member."""
        bounds = zip(self.members, self._ends, self._ends[1:], strict=False)
        return {member.name: flat[start:stop].reshape(member.shape) for member, start, stop in bounds}

    def runs(self, flat: Array, wanted: Callable[[str], bool]) -> list[Array]:
        """The parts of a flat array that hold wanted members, neighbours joined."""
        bounds: list[list[int]] = []
        for member, start, stop in zip(self.members, self._ends, self._ends[1:], strict=False):
            if wanted(member.name):
                if bounds and bounds[-1][1] == start:
                    bounds[-1][1] = stop
                else:
                    bounds.append([start, stop])
        return [flat[start:stop] for start, stop in bounds]

    def segments(self, flat: Array) -> dict[str, Array]:
        """A flat array of this group's length, cut where weight decay ends."""
        cut = {f"{self.name}/decayed": flat[: self._decayed], f"{self.name}/plain": flat[self._decayed :]}
        return {name: part for name, part in cut.items() if part.size}

    def join(self, segments: Mapping[str, Array]) -> dict[str, Array]:
        """Arrays by member from arrays by segment: views, since segments are cut between members."""
        joined = {}
        for member, start, stop in zip(self.members, self._ends, self._ends[1:], strict=False):
            part, offset = ("decayed", 0) if member.decay else ("plain", self._decayed)
            # An empty block belongs to no segment, yet must be there: collectives go by name on all ranks.
            flat = segments.get(f"{self.name}/{part}", self.parameters[:0])
            joined[member.name] = flat[start - offset : stop - offset].reshape(member.shape)
        return joined


def make_groups(
    members: Iterable[Member], dtype, backend: Backend, threshold: int = THRESHOLD
) -> list[ParameterGroup]:
    """Group neighbours in order: a group grows until it has ``threshold`` bytes or its reduction changes."""
    groups: list[ParameterGroup] = []
    batch: list[Member] = []

    def close() -> None:
        if batch:
            groups.append(ParameterGroup(len(groups), batch, dtype, backend))
            batch.clear()

    for member in members:
        if batch and batch[0].summed_over != member.summed_over:
            close()
        batch.append(member)
        if sum(m.largest for m in batch) * np.dtype(dtype).itemsize >= threshold:
            close()
    close()
    return groups
