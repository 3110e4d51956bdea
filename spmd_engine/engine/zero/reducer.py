"""Sums gradients over ranks, a group at a time, as soon as the last backward has completed the group."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from spmd_engine.comm.pending import Deferred, Pending
from spmd_engine.engine.state.array_table import GRADIENT
from spmd_engine.engine.zero.storage import GroupStorage, wait_for_all
from spmd_engine.errors import SpmdError, UsageError
from spmd_engine.layers import GradientSums

IN_FLIGHT = 2  #: groups of micro-batches' gradients that may be in flight to their owners (ZeRO-2 and 3)


class Reducer:
    """The sums to which layers add gradients, and the reductions of groups.

    A group with whole gradients on this rank is reduced in place once, when every layer that uses it has added its
    gradients for all micro-batches. A group with sharded gradients (from ZeRO-2 on) is sent to its owners after
    every backward of the layers that use it, and the owners sum what they receive. Layers finish in backward order, so
    reductions run while earlier layers still compute.

    ``uses`` holds, for each layer of this rank, the local and the full names of its parameters; ``passes``
    the layers that one backward passes through together (a chunk of a pipeline).
    """

    def __init__(
        self,
        storages: Sequence[GroupStorage],
        uses: Mapping[int, Mapping[str, str]],
        passes: Sequence[Sequence[int]],
        trained: bool = True,
    ) -> None:
        self._storages, self._uses = storages, uses
        self._trained = trained
        #: groups with whole gradients, and those whose gradients are sent to owners in each backward
        self._kept = [storage for storage in storages if trained and storage.table[GRADIENT].lasts]
        self._sent = {storage for storage in storages if trained and storage not in self._kept}
        self._storage_of = {name: storage for storage in storages for name in storage.group.spans}
        self._pass_of = {layer: number for number, layers in enumerate(passes) for layer in layers}
        #: the number of contributions to each group in one backward of each pass
        self._in_pass = [
            Counter(self._storage_of[name] for layer in layers for name in uses[layer].values()) for layers in passes
        ]
        self._storages_of_layer = {layer: [self._storage_of[name] for name in uses[layer].values()] for layer in uses}
        self._sums: dict[int, GradientSums] = {}  # by layers whose gradients all stay on this rank
        self._untouched: set[str] = set()
        self._waiting: Counter = Counter()
        self._reducing: list[Pending | Deferred] = []
        self._in_flight: deque[tuple[GroupStorage, Pending | Deferred]] = deque()
        self._first: set[GroupStorage] = set()  # groups whose owners have received nothing in this step
        self.steps = self.micro_batches = 0  #: steps begun, and the micro-batches of the present one

    def begin(self, micro_batches: int) -> None:
        """Prepare for a step, also after one that raised an exception. Raises UsageError if there are no gradients."""
        if not self._trained:
            raise UsageError("this engine was made for inference, without gradients: make another one to train")
        self.steps, self.micro_batches = self.steps + 1, micro_batches
        for pending in self._reducing:  # those of a failed step write to the gradients until they end
            with suppress(SpmdError):
                pending.wait()
        self._reducing.clear()
        self._in_flight.clear()
        self._waiting.clear()
        self._first = set(self._sent)
        self._untouched.clear()
        for storage in self._kept:
            self._untouched.update(storage.group.spans)
            self._waiting[storage] = micro_batches * sum(counts[storage] for counts in self._in_pass)

    def sums(self, layer: int) -> GradientSums:
        """The sums to which a layer adds its gradients in the backward that is about to begin."""
        if layer in self._sums:
            return self._sums[layer]
        names = self._uses[layer]
        storages = set(map(self._storage_of.__getitem__, names.values()))
        for storage in storages:
            if storage in self._sent and not self._waiting[storage]:
                self._untouched.update(storage.group.spans)
                self._waiting[storage] = self._in_pass[self._pass_of[layer]][storage]
        arrays = {name: self._storage_of[full_name].gradients[full_name] for name, full_name in names.items()}
        sums = GradientSums(arrays, names, self._untouched)
        if not storages & self._sent:
            self._sums[layer] = sums
        return sums

    def layer_done(self, layer: int) -> None:
        """Record that one backward of a layer is complete; reduce the groups that it completes."""
        for storage in self._storages_of_layer[layer]:
            self._waiting[storage] -= 1
            if self._waiting[storage] == 0:
                self._send(storage)

    def _send(self, storage: GroupStorage) -> None:
        gradients = storage.gradients
        for name in self._untouched.intersection(gradients):
            gradients[name][...] = 0
        self._untouched.difference_update(gradients)
        pending: Any = storage.start_reduce()  # None only if no gradients are sent to owners
        if storage not in self._sent:
            self._reducing += [pending] if pending else []
            return
        while len(self._in_flight) >= IN_FLIGHT:
            self._accumulate_oldest()
        self._in_flight.append((storage, pending))

    def _accumulate_oldest(self) -> None:
        """Wait for the oldest group in flight, and add its sum to this rank's part."""
        storage, pending = self._in_flight.popleft()
        summed = pending.wait()
        if storage in self._first:
            storage.own_gradients[...] = summed
            self._first.discard(storage)
        else:
            storage.own_gradients += summed

    def finish(self) -> None:
        """Wait until every owner has the sum over all ranks."""
        while self._in_flight:
            self._accumulate_oldest()
        wait_for_all(self._reducing)
        # Last: a reduction that other ranks wait for must not wait for one that has not begun.
        wait_for_all(storage.start_reduce_rest() for storage in self._storages)
        wait_for_all(copied for storage in self._storages for copied in storage.start_copies())
        self._reducing.clear()
