"""Sums gradients over ranks, a group at a time, as soon as the last backward has finished with a group."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from spmd_engine.comm.pending import Pending
from spmd_engine.engine.zero.storage import GroupStorage
from spmd_engine.errors import SpmdError
from spmd_engine.layers.deferred import Deferred
from spmd_engine.layers.layer import GradientSums

IN_FLIGHT = 2  #: groups of micro-batches' gradients that may be under way to their owners (ZeRO-2 and 3)


class Reducer:
    """Where layers put gradients, and when these are sent.

    A group whose whole gradients are stored here is reduced in place once, when every layer that adds to it has
    done so for all micro-batches. One whose gradients belong to owners (from ZeRO-2 on) is sent to them after
    every backward of the layers that use it, and owners add up what comes. Layers finish in backward order, so
    reductions run while earlier layers still compute.

    ``uses`` holds, for each layer of this rank, its own names of its parameters and their full names; ``passes``
    the layers that one backward goes through together (a chunk of a pipeline).
    """

    def __init__(
        self,
        storages: Sequence[GroupStorage],
        uses: Mapping[int, Mapping[str, str]],
        passes: Sequence[Sequence[int]],
    ) -> None:
        self._storages, self._uses = storages, uses
        self._storage_of = {name: storage for storage in storages for name in storage.group.spans}
        self._pass_of = {layer: number for number, layers in enumerate(passes) for layer in layers}
        #: contributions that a group gets in one backward of each pass
        self._in_pass = [
            Counter(self._storage_of[full] for layer in layers for full in uses[layer].values()) for layers in passes
        ]
        self._storages_of_layer = {layer: [self._storage_of[full] for full in uses[layer].values()] for layer in uses}
        self._sums: dict[int, GradientSums] = {}  # of layers all of whose gradients stay here
        self._untouched: set[str] = set()
        self._waiting: Counter = Counter()
        self._reducing: list[Pending | Deferred] = []
        self._in_flight: deque[tuple[GroupStorage, Pending | Deferred]] = deque()
        self._first: set[GroupStorage] = set()  # groups whose owners have got nothing yet in this step

    def begin(self, micro_batches: int) -> None:
        """Make ready for a step, also after one that an exception broke off."""
        for pending in self._reducing:  # of such a one: until they end they write to the gradients
            with suppress(SpmdError):
                pending.wait()
        self._reducing.clear()
        self._in_flight.clear()
        self._waiting.clear()
        self._first = {storage for storage in self._storages if storage.zero >= 2}
        self._untouched.clear()
        for storage in self._storages:
            if storage.zero < 2:
                self._untouched.update(storage.group.spans)
                self._waiting[storage] = micro_batches * sum(counts[storage] for counts in self._in_pass)

    def sums(self, layer: int) -> GradientSums:
        """Where a layer adds its gradients in the backward that is about to begin."""
        if layer in self._sums:
            return self._sums[layer]
        names = self._uses[layer]
        storages = set(map(self._storage_of.__getitem__, names.values()))
        for storage in storages:
            if storage.zero >= 2 and not self._waiting[storage]:
                self._untouched.update(storage.group.spans)
                self._waiting[storage] = self._in_pass[self._pass_of[layer]][storage]
        arrays = {own: self._storage_of[full].gradients[full] for own, full in names.items()}
        sums = GradientSums(arrays, names, self._untouched)
        if all(storage.zero < 2 for storage in storages):
            self._sums[layer] = sums
        return sums

    def layer_done(self, layer: int) -> None:
        """One backward of a layer is over."""
        for storage in self._storages_of_layer[layer]:
            self._waiting[storage] -= 1
            if self._waiting[storage] == 0:
                self._send(storage)

    def _send(self, storage: GroupStorage) -> None:
        gradients = storage.gradients
        for name in self._untouched.intersection(gradients):
            gradients[name][...] = 0
        self._untouched.difference_update(gradients)
        pending: Any = storage.start_reduce()  # None only where nothing is sent to owners
        if storage.zero < 2:
            self._reducing += [pending] if pending else []
            return
        while len(self._in_flight) >= IN_FLIGHT:
            self._take_in()
        self._in_flight.append((storage, pending))

    def _take_in(self) -> None:
        """Add what has come for the oldest group under way to this rank's own part."""
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
            self._take_in()
        for pending in self._reducing:
            pending.wait()
        # Only now: a reduction that others wait for must not wait for one that has not begun.
        for pending in [storage.start_reduce_rest() for storage in self._storages]:
            if pending:
                pending.wait()
        self._reducing.clear()
