"""Writes down what one rank does while its step is run on shapes: computations, communications, memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from spmd_engine.arrays.meta.meter import TEMPORARIES, Meter
from spmd_engine.planning.dry_run.step_analysis import (
    FORWARD,
    OTHER,
    Communication,
    Computation,
    Moment,
    Peak,
    Product,
    Products,
)

ARRIVED = "communication buffers"  #: what kind of memory holds what came before it was waited for
LABEL = "the layer"  #: in the place of a layer's name, where what is written down may be any layer's
_FACTS = ("operation", "axes", "label", "ranks", "place", "payload", "sent", "peer", "channel", "received")


@dataclass(frozen=True)
class Phase:
    """What a rank is at."""

    name: str
    layer: str = ""
    phase: str = OTHER
    micro_batch: int | None = None
    chunk: int | None = None


class Recorder:
    """The course of one rank's step. ``meter`` counts; what it counted since is written down when something is sent."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.computations: list[Computation] = []
        self.communications: list[_Call] = []
        self.timeline: list[Moment] = []
        self.tops: list[Top] = []  #: the most that was held while each computation ran
        self.own_class = 0  #: of the rank whose step it is
        self.saved: dict[str, int] = {}  #: bytes that a forward leaves, by layer
        self.temporaries: dict[str, int] = {}  #: bytes at their peak, by a phase's name
        self.sending: list[list] = []  #: what was handed to others, and in how many phases since
        #: what came before it was waited for: since when, and till when, by numbers of computations, and bytes
        self._arriving: list[tuple[int, int, int]] = []
        self._now = Phase("before the step")

    def restart(self) -> None:
        """Forget all but what is held: a step begins."""
        self.meter.take_work()
        self.meter.take_top()
        self._now = Phase("between layers")
        self.computations, self.communications, self.timeline, self.tops = [], [], [], []

    @property
    def place(self) -> int:
        """The number of the computation that is to come: what has been computed so far is written down first."""
        self.flush()
        return len(self.computations)

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Meanwhile the rank is at this; what is left of it is there to stay."""
        self.flush()
        before, self._now, total = self._now, phase, self.meter.total
        self.meter.what, first = phase.name, len(self.tops)
        try:
            yield
        finally:
            self.flush()
            if phase.phase == FORWARD:
                self.saved[phase.layer] = max(self.saved.get(phase.layer, 0), self.meter.total - total)
            most = max((top.total for top in self.tops[first:]), default=total) - total
            self.temporaries[phase.name] = max(self.temporaries.get(phase.name, 0), most)
            self.meter.keep_young("activations")
            self._now = before
            self.meter.what = before.name
            for each in self.sending:
                each[0] += 1

    def waited(self, at_once: bool) -> None:
        """The rank has waited for something, ``at_once`` after that began: so long that it saw what else was done.
        Ranks are taken to be in step: two phases after something was handed to others, they have taken it."""
        for each in self.sending if at_once else ():
            if each[0] > 2:
                each[1].has_left()
        self.sending = [each for each in self.sending if each[1].held]

    def flush(self) -> None:
        """Write down what was computed since, as one computation."""
        if self.meter.work.calls == 0:
            return
        work = self.meter.take_work()
        products = Products(
            Product(m, n, k, batch, size, calls, fused, kernel)
            for (batch, m, n, k, size, fused, kernel), calls in work.products.items()
        )
        self._write(self._computation(products, work.elements, work.calls, work.read, work.written))

    def _computation(self, *work: Any) -> Computation:
        """This much ``work``, from products to bytes written, of the phase at hand."""
        now = self._now
        return Computation(now.name, now.layer, now.phase, now.micro_batch, now.chunk, *work)

    def _write(self, computation: Computation, more: int = 0) -> None:
        """One more computation, in which, beside what is held now, ``more`` bytes are held at the most."""
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

    def repeat(self, layer_pass: Any, under_way: list[_Call]) -> list[_Call]:
        """Write down what was found of such a call before; ``under_way``: what the calls before it have begun.

        Returns what is under way afterwards.
        """
        first, now = self.place, self._now
        self.meter.constants.update(layer_pass.constants)
        for each, top in zip(layer_pass.computations, layer_pass.tops, strict=True):
            work = each.products, each.elements, each.calls, each.bytes_read, each.bytes_written
            self._write(self._computation(*work), top)
        for place, ends, received in layer_pass.ended:
            under_way[place].end(first + ends, received)
        calls = [_Call.again(each, first, now.layer, self.own_class) for each in layer_pass.communications]
        for number, call in enumerate(calls):
            if number in layer_pass.begun:
                call.ends = None
        self.communications += calls
        self.waited(any(each.begins == each.ends for each in layer_pass.communications))
        return [call for call in (*under_way, *calls) if call.ends is None]

    def begin(self, **facts: Any) -> _Call:
        """Something begins to be sent now."""
        call = _Call(facts, self.place)
        self.communications.append(call)
        return call

    def arrived(self, begun: int, size: int) -> None:
        """What was asked for before the computation ``begun`` is here, and is taken to have been so since then."""
        self._arriving.append((begun, len(self.computations), size))

    def finish(self) -> tuple[list[Communication], Peak]:
        """What was sent, and the peak."""
        self.flush()
        for begun, end, size in self._arriving:
            for number in range(begun, end):
                held = self.timeline[number].bytes_by_kind
                self.timeline[number] = Moment(number, {**held, ARRIVED: held.get(ARRIVED, 0) + size})
        last = len(self.computations)
        return [call.as_communication(last) for call in self.communications], self._find_peak()

    def _find_peak(self) -> Peak:
        """The peak, with what was held then: the arrays of each phase and kind together."""
        if not self.timeline:
            return Peak(0, 0, {})
        moment = max(self.timeline, key=lambda each: each.total)
        computation = moment.computation
        top = self.tops[computation]
        held: dict[int, tuple[int, str, str]] = {}
        for size, number, kind, what in self.meter.events[: top.event]:
            if size < 0:
                held.pop(number, None)
            else:
                held[number] = size or held[number][0], kind, what
        sums: dict[tuple[str, str], int] = {}
        for size, kind, what in held.values():
            sums[kind, what] = sums.get((kind, what), 0) + size
        if top.more:
            sums[TEMPORARIES, self.computations[computation].name] = top.more
        if early := moment.total - top.total:
            sums[ARRIVED, "from other stages, ahead of time"] = early
        listed = sorted(((kind, what, size) for (kind, what), size in sums.items()), key=lambda each: -each[2])
        return Peak(moment.total, computation, moment.bytes_by_kind, tuple(listed[:24]))


@dataclass(frozen=True)
class Top:
    """The most that was held in a computation: bytes, after which event, and how much of it for a moment alone."""

    total: int
    event: int
    more: int = 0


class _Call:
    """A communication under way."""

    @classmethod
    def again(cls, each: Communication, first: int, layer: str, own_class: int) -> _Call:
        """The same, that much later, of this layer, and of ranks of this class if it is among ranks of one."""
        facts = {name: getattr(each, name) for name in _FACTS}
        facts["label"] = layer if each.label == LABEL else each.label
        facts["classes"] = (own_class,) if len(each.classes) == 1 else each.classes
        call = cls(facts, each.begins + first)
        call.ends = each.ends + first
        return call

    def __init__(self, facts: dict[str, Any], begins: int) -> None:
        self.facts, self.begins, self.ends = facts, begins, None

    def end(self, place: int, received: int) -> None:
        """It is waited for before the computation of this number; later waits wait no more."""
        if self.ends is None:
            self.ends, self.facts["received"] = place, received

    def as_communication(self, last: int) -> Communication:
        """The record; what nobody waited for ends with the step."""
        return Communication(**self.facts, begins=self.begins, ends=last if self.ends is None else self.ends)
