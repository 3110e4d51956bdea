"""Records what one rank does in a dry run: computations, communications, memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from spmd_engine.arrays.meta.meter import TEMPORARIES, Meter
from spmd_engine.engine.layered import LayeredEngine
from spmd_engine.engine.state.array_table import CLASSES
from spmd_engine.planning.dry_run.step_analysis import (
    Communication,
    Computation,
    Moment,
    Peak,
    Phases,
    Product,
    Products,
    RankStep,
)

RECEIVED = "communication buffers"  #: the kind of memory of messages that arrive before they are waited for
ANY_LAYER = "the layer"  #: the label of communications in a cached pass, which may be any layer's
_FACTS = ("operation", "axes", "label", "ranks", "place", "payload", "sent", "peer", "channel", "received")


@dataclass(frozen=True)
class Phase:
    """What a rank does at a moment of the step."""

    name: str
    layer: str = ""
    phase: str = Phases.OTHER
    micro_batch: int | None = None
    chunk: int | None = None


class Recorder:
    """Records one rank's step. What ``meter`` has counted becomes a computation when a communication begins or ends."""

    def __init__(self, meter: Meter, on_work: Callable[[], None] = lambda: None) -> None:
        """``on_work`` is called with each computation; it may raise what ends the dry run."""
        self.meter, self._on_work = meter, on_work
        self.computations: list[Computation] = []
        self.communications: list[_RecordedCall] = []
        self.timeline: list[Moment] = []
        self.tops: list[Top] = []  #: the peak memory of each computation
        self.own_class = 0  #: the class of the recorded rank
        self.saved: dict[str, int] = {}  #: bytes that a forward keeps, by layer
        self.temporaries: dict[str, int] = {}  #: bytes at their peak, by a phase's name
        self.sending: list[list] = []  #: for each array handed in: [phases since then, pending call]
        #: messages that arrive before they are waited for: first and last computation, and bytes
        self._arriving: list[tuple[int, int, int]] = []
        self._now = Phase("before the step")

    def restart(self) -> None:
        """Discard the records from before a step, except those of memory."""
        self.meter.take_work()
        self.meter.take_top()
        self._now = Phase("between layers")
        self.computations, self.communications, self.timeline, self.tops = [], [], [], []

    @property
    def next_computation(self) -> int:
        """The number of the next computation, after all work so far is recorded."""
        self.flush()
        return len(self.computations)

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """A context in which all work belongs to ``phase``. Memory still allocated at its end counts as kept."""
        self.flush()
        before, self._now, total = self._now, phase, self.meter.total
        self.meter.what, first = phase.name, len(self.tops)
        try:
            yield
        finally:
            self.flush()
            if phase.phase == Phases.FORWARD:
                self.saved[phase.layer] = max(self.saved.get(phase.layer, 0), self.meter.total - total)
            most = max((top.total for top in self.tops[first:]), default=total) - total
            self.temporaries[phase.name] = max(self.temporaries.get(phase.name, 0), most)
            self.meter.keep_young("activations")
            self._now = before
            self.meter.what = before.name
            for entry in self.sending:
                entry[0] += 1

    def waited(self, at_once: bool) -> None:
        """The rank has waited for a call. ``at_once``: nothing was computed since that call began, so the wait is
        long, and calls whose arrays were handed in more than two phases ago are assumed to be complete."""
        for phases, pending in self.sending if at_once else ():
            if phases > 2:
                pending.release()
        self.sending = [entry for entry in self.sending if entry[1].held]

    def flush(self) -> None:
        """Record what was computed since the last record as one computation."""
        work = self.meter.work
        if not any((work.calls, work.loaded, work.stored, work.waits, work.copies)):
            return
        work = self.meter.take_work()
        products = Products(
            Product(m, n, k, batch, size, calls, fused, kernel)
            for (batch, m, n, k, size, fused, kernel), calls in work.products.items()
        )
        launches = work.calls if self.meter.on_device else 0
        moved = work.read, work.written, work.loaded, work.stored
        self._append(self._computation(products, work.elements, work.calls, *moved, launches, work.waits, work.copies))

    def _computation(self, *work: Any) -> Computation:
        """A computation of the current phase; ``work`` are its fields from products on."""
        now = self._now
        return Computation(now.name, now.layer, now.phase, now.micro_batch, now.chunk, *work)

    def _append(self, computation: Computation, more: int = 0) -> None:
        """Record a computation, during which at most ``more`` bytes are held in addition to what is held now."""
        self._on_work()
        top = self.meter.take_top()
        total, by_kind = top.total, top.by_kind
        if more and self.meter.total + more > total:
            by_kind = {**self.meter.held, TEMPORARIES: self.meter.held[TEMPORARIES] + more}
            total = self.meter.total + more
        else:
            more = 0
        self.timeline.append(Moment(len(self.computations), {kind: n for kind, n in by_kind.items() if n}))
        self.tops.append(Top(total, len(self.meter.events) if more else top.event, more))
        self.computations.append(computation)

    def repeat(self, layer_pass: Any, under_way: list[_RecordedCall]) -> list[_RecordedCall]:
        """Record a cached pass. ``under_way`` are the calls that earlier passes of the layer have begun.

        Returns the calls that are under way afterwards.
        """
        first, now = self.next_computation, self._now
        self.meter.constants.update(layer_pass.constants)
        for cached, top in zip(layer_pass.computations, layer_pass.tops, strict=True):
            work = cached.products, cached.elements, cached.calls, cached.bytes_read, cached.bytes_written
            asked = cached.launches, cached.waits, cached.copies
            self._append(self._computation(*work, 0, 0, *asked), top)
        for index, ends, received in layer_pass.ended:
            under_way[index].end(first + ends, received)
        calls = [_RecordedCall.repeat(cached, first, now.layer, self.own_class) for cached in layer_pass.communications]
        for number, call in enumerate(calls):
            if number in layer_pass.begun:
                call.ends = None
        self.communications += calls
        self.waited(any(cached.begins == cached.ends for cached in layer_pass.communications))
        return [call for call in (*under_way, *calls) if call.ends is None]

    def begin(self, **facts: Any) -> _RecordedCall:
        """Record that a communication begins."""
        call = _RecordedCall(facts, self.next_computation)
        self.communications.append(call)
        return call

    def arrived(self, begun: int, size: int) -> None:
        """A message of ``size`` bytes has arrived. It is assumed to be in memory since its receive began, before the
        computation ``begun``."""
        self._arriving.append((begun, len(self.computations), size))

    def finish(self, coordinates: Mapping[str, int]) -> RankStep:
        """The recorded step of a rank at these coordinates."""
        self.flush()
        for begun, end, size in self._arriving:
            for number in range(begun, end):
                held = self.timeline[number].bytes_by_kind
                self.timeline[number] = Moment(number, {**held, RECEIVED: held.get(RECEIVED, 0) + size})
        communications = [call.as_communication(len(self.computations)) for call in self.communications]
        what = self.computations, communications, self.timeline, self._find_peak()
        constants = sum(self.meter.constants.values())
        return RankStep(coordinates, *what, saved=self.saved, temporaries=self.temporaries, constants=constants)

    def _find_peak(self) -> Peak:
        """The peak, with the bytes held then by kind and phase."""
        if not self.timeline:
            return Peak(0, 0, {})
        moment = max(self.timeline, key=lambda moment: moment.total)
        computation = moment.computation
        top = self.tops[computation]
        held: dict[int, tuple[int, str, str]] = {}
        for size, number, kind, origin in self.meter.events[: top.event]:
            if size < 0:
                held.pop(number, None)
            else:
                held[number] = size or held[number][0], kind, origin
        sums: dict[tuple[str, str], int] = {}
        for size, kind, origin in held.values():
            sums[kind, origin] = sums.get((kind, origin), 0) + size
        if top.more:
            sums[TEMPORARIES, self.computations[computation].name] = top.more
        if early := moment.total - top.total:
            sums[RECEIVED, "from other stages, ahead of time"] = early
        listed = sorted(((kind, origin, size) for (kind, origin), size in sums.items()), key=lambda entry: -entry[2])
        return Peak(moment.total, computation, moment.bytes_by_kind, tuple(listed[:24]))


@dataclass(frozen=True)
class Top:
    """The peak memory of a computation: bytes, the event after which they were reached, and the temporary part."""

    total: int
    event: int
    more: int = 0


class _RecordedCall:
    """A communication that has begun."""

    @classmethod
    def repeat(cls, cached: Communication, first: int, layer: str, own_class: int) -> _RecordedCall:
        """A cached communication, ``first`` computations later, of this layer and of ranks of this class."""
        facts = {name: getattr(cached, name) for name in _FACTS}
        facts["label"] = layer if cached.label == ANY_LAYER else cached.label
        facts["classes"] = (own_class,) if len(cached.classes) == 1 else cached.classes
        call = cls(facts, cached.begins + first)
        call.ends = cached.ends + first
        return call

    def __init__(self, facts: dict[str, Any], begins: int) -> None:
        self.facts, self.begins, self.ends = facts, begins, None

    def end(self, computation: int, received: int) -> None:
        """Record a wait for the call, before the computation of this number; later waits have no effect."""
        if self.ends is None:
            self.ends, self.facts["received"] = computation, received

    def as_communication(self, last: int) -> Communication:
        """The record; a call that is never waited for ends with the step, at computation ``last``."""
        return Communication(**self.facts, begins=self.begins, ends=last if self.ends is None else self.ends)


def watch_storage(engine: LayeredEngine, recorder: Recorder) -> None:
    """Count the memory of parameter groups by its kind."""
    meter = recorder.meter
    for storage in [*engine.storages, *engine.placed.frozen.storages]:
        name = storage.group.name
        for kind, array in storage.arrays.items():
            if getattr(array, "memory", None) is not None:
                meter.relabel(array.memory, CLASSES[kind], name)
        storage.empty = count_as(meter, storage.empty, None, name)
    unsharder, reducer = engine.placed.unsharder, engine.placed.reducer
    unsharder.unshard = count_as(meter, unsharder.unshard, "gathered groups")
    reducer.sums = count_as(meter, reducer.sums, "whole gradients")
    reducer.layer_done = count_as(meter, reducer.layer_done, "communication buffers")
    reducer.finish = count_as(meter, reducer.finish, "communication buffers")


def count_as(meter: Any, function: Callable, kind: str | None, *name: str) -> Callable:
    """The function; its allocations count as this kind (None: the current kind)."""

    def run(*args: Any, **options: Any) -> Any:
        with meter.taking(kind or meter.kind, *name):
            return function(*args, **options)

    return run
