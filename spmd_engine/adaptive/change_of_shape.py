"""A change of shape from its request to its answer, as a state machine: without ranks, files, arrays and clocks.

    requested -> planned [-> moving] -> committed
    requested, planned or moving -> refused
    planned -> estimated

A change is *moving* while a live migration copies. It is *estimated* if only its costs are asked for. All ranks of the
world have such a machine, and give it the same events in the same order, as they agree on each; an event returns what
all of them do next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from spmd_engine.engine import ParallelConfig
from spmd_engine.engine.reshape import Shape, ShapeRequest

State = Literal["requested", "planned", "moving", "committed", "refused", "estimated"]


@dataclass(frozen=True)
class Notify:
    """Tell the observers."""

    name: str  #: a method of ``Observer``
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class ReadRequest:
    """Read what is requested, and take in the ranks that join. Then comes ``read``."""


@dataclass(frozen=True)
class CheckShape:
    """Check whether all ranks can take the shape. Then comes ``checked``."""

    request: ShapeRequest


@dataclass(frozen=True)
class EstimateChange:
    """Estimate what a change to this shape costs. Then comes ``estimated``."""

    shape: Shape


@dataclass(frozen=True)
class BeginLive:
    """Begin a live migration. Then comes ``copying``."""

    shape: Shape
    within: float | None  #: seconds after which it is given up


@dataclass(frozen=True)
class AdvanceLive:
    """Continue the live migration after a step, unless it ``ends``. Then comes ``advanced``."""

    ends: str  #: why it is given up


@dataclass(frozen=True)
class MoveTo:
    """Continue in another shape. Then comes ``moved``."""

    shape: Shape
    protocol: str  #: one of ``PROTOCOLS``: "live" takes the copies


Action = ReadRequest | CheckShape | EstimateChange | BeginLive | AdvanceLive | MoveTo
Next = list[Notify | Action]


class ChangeOfShape:
    """The change that goes on, or the last one. Instead of each event that it waits for ``failed`` may come."""

    def __init__(self) -> None:
        self.state: State = "committed"  #: in which the next one can be requested, as in "refused" and "estimated"
        self._request = ShapeRequest({})
        self._shape = Shape(ParallelConfig(), ())  # the new one
        self._notices: Sequence[str] = ()
        self._is_answered = False  # a move is reported, and the rest of the change goes on

    def due(self, number: str = "") -> Next:
        """Something is requested, by ``migrate``, ``join`` or a program. ``number``: its id, if it is known."""
        self._go("requested", "committed", "refused", "estimated")
        self._request, self._is_answered = ShapeRequest({}, id=number), False
        return [ReadRequest()]

    def read(self, request: ShapeRequest | None, joined: Mapping[str, Any] | None = None) -> Next:
        """All ranks know the request; None if there is none. ``joined``: facts of ranks that are taken in."""
        self._go("requested" if request else "committed", "requested")
        reports: Next = [Notify("joined", joined)] if joined else []
        if request is None:
            return reports
        self._request = request
        return [*reports, CheckShape(request)]

    def checked(self, shape: Shape, notices: Sequence[str], at_once: Shape) -> Next:
        """All ranks can take the shape, and that ``at_once``, on the way to it, for which nothing needs to be sent."""
        self._go("planned", "requested")
        self._shape, self._notices, protocol = shape, notices, self._request.protocol
        if self._request.dry_run:
            return [EstimateChange(shape)]
        if at_once != shape:
            return [MoveTo(at_once, "stop-and-copy")]
        return [BeginLive(shape, self._request.within) if protocol == "live" else MoveTo(shape, protocol)]

    def estimated(self, facts: Mapping[str, Any]) -> Next:
        """The costs of the change are known, and the job stays as it is."""
        self._go("estimated", "planned")
        return [Notify("estimated", {**facts, "notices": self._notices, "request": self._request.id})]

    def copying(self, plan: Mapping[str, Any]) -> Next:
        """The live migration has begun."""
        self._go("moving", "planned")
        return [Notify("migrating", {"request": self._request.id, **plan})]

    def stepped(self, ends: str) -> Next:
        """A step is done meanwhile; ``ends``: why no other one follows, if so."""
        self._go("moving", "moving")
        return [AdvanceLive(ends)]

    def advanced(self, is_complete: bool) -> Next:
        """More is copied."""
        self._go("moving", "moving")
        return [MoveTo(self._shape, "live")] if is_complete else []

    def moved(self, shape: Shape, facts: Mapping[str, Any], copied: Mapping[str, Any]) -> Next:
        """The job continues in this shape; ``copied``: facts of the live migration, if there was one."""
        self._go("committed", "planned", "moving")
        answer = {**facts, "notices": self._notices, **copied, "request": self._request.id}
        if shape == self._shape:
            return [Notify("reshaped", answer)]
        self._go("planned", "committed")
        self._notices, self._is_answered = [], True
        return [Notify("reshaped", answer), BeginLive(self._shape, None)]

    def failed(self, why: str) -> Next:
        """The job cannot do what was next, on all ranks, and continues as it was."""
        is_answered = self._is_answered and self.state == "planned"
        self._go("committed" if is_answered else "refused", "requested", "planned", "moving")
        return [] if is_answered else [Notify("not_reshaped", {"why": why, "request": self._request.id})]

    def _go(self, state: State, *earlier: State) -> None:
        assert self.state in earlier, f"{self.state}: not one of {earlier}"
        self.state = state
