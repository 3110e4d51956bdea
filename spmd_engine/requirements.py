"""What options need of a mesh, of a model and of each other, declared in the files of their features.

``ParallelConfig`` lists the declarations and checks them in one loop: it refuses, notes what has no effect, and leaves
out what does not fit when a run continues on another mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from spmd_engine.axes import axes_text
from spmd_engine.errors import UsageError


@dataclass(frozen=True)
class Case:
    """Options on a mesh with these axes, and the model if it is known."""

    options: Any  #: a ``ParallelConfig``
    axes: Mapping[str, int]
    model: Any = None  #: a ``Model``

    def text(self, option: str) -> str:
        """An option with its value, as on the command line: ``--zero 3``."""
        value, flag = getattr(self.options, option), "--" + option.replace("_", "-")
        return flag if value is True else f"{flag} {value}"


class Unmet(NamedTuple):
    """A requirement that a case does not meet."""

    requirement: Requirement
    why: str
    text: str  #: the error or the notice, in one line

    @property
    def is_refused(self) -> bool:
        return self.requirement.nearest is not None


@dataclass(frozen=True)
class Requirement:
    """What some options need. A case without it is refused, or only noted if there is no ``nearest``.

    ``unmet`` says why a case does not meet it: in words (for a notice, all of them), by True for ``needs``, or by a
    UsageError with the whole text; by None or False that it does.
    """

    name: str
    options: tuple[str, ...]  #: fields of ``ParallelConfig``; messages begin with the first, or with ``subject``
    needs: str  #: in words
    unmet: Callable[[Case], str | bool | None]
    nearest: str | None = None  #: what to do instead
    subject: str = ""
    of_model: bool = False  #: whether only the model can tell
    left_out: tuple[str, ...] = ()  #: options that another mesh may not permit; a run continues there without the last

    def on(self, case: Case) -> Unmet | None:
        """The reason why a case does not meet this; None if it does, or if its model is needed and unknown."""
        if self.of_model and case.model is None:
            return None
        try:
            why = self.unmet(case)
        except UsageError as error:
            return Unmet(self, str(error), str(error))
        if not why:
            return None
        why = self.needs if why is True else why
        if self.nearest is None:
            return Unmet(self, why, why)
        subject = self.subject or case.text(self.options[0])
        return Unmet(self, why, f"{subject} with --mesh {axes_text(case.axes)}: {why}. {self.nearest}")


def requirement(*options: str, **declared: Any) -> Callable[[Callable[[Case], str | bool | None]], Requirement]:
    """Declare a requirement of some options by its ``unmet``: the docstring is ``needs``."""

    def declare(unmet: Callable[[Case], str | bool | None]) -> Requirement:
        name = unmet.__name__.strip("_").replace("_", " ")
        return Requirement(name, options, unmet.__doc__ or "", unmet, **declared)

    return declare


def effect_along(option: str, *axes: str, least: int = 1, listed: str = "") -> Requirement:
    """The requirement of an option that has an effect along an axis, of ``least`` ranks; ``listed`` names the axes."""
    listed = listed or " or ".join(axes)

    def is_there(case: Case) -> bool:
        return any(case.axes.get(axis, 0) >= least for axis in axes)

    return effect_if(option, is_there, f"an axis {listed}", f"with --mesh {{mesh}}: there is no axis {listed}")


def effect_if(option: str, holds: Callable[[Case], Any], needs: str, otherwise: str) -> Requirement:
    """The requirement of an option that has an effect if something ``holds``; ``otherwise`` is what is noted."""

    def unmet(case: Case) -> str | bool:
        without = bool(getattr(case.options, option)) and not holds(case)
        return without and f"{case.text(option)} has no effect {otherwise.format(mesh=axes_text(case.axes))}"

    return Requirement(f"effect of {option}", (option,), needs, unmet)
