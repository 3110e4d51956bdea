"""The exceptions of this package. Each message says what is wrong, where, and what to do."""

from __future__ import annotations

import os
from collections.abc import Iterable
from difflib import SequenceMatcher
from traceback import walk_stack

LIKE = 0.65  #: least similarity, by difflib, of a suggested name


def one_of(given: object, names: Iterable[str]) -> str:
    """The end of an error about an unknown name: the valid ``names``, those most similar to ``given`` first.

    >>> one_of("mpl", ["gpt", "mlp", "convnet"])
    "did you mean 'mlp'? There are: mlp, gpt, convnet"
    """

    def likeness(name: str) -> float:
        return SequenceMatcher(None, str(given)[:100].lower(), name.lower()).ratio()

    valid = list(names)
    similar = sorted((name for name in valid if likeness(name) >= LIKE), key=likeness, reverse=True)
    listed = ", ".join(dict.fromkeys([*similar, *valid]))
    return f"did you mean {similar[0]!r}? There are: {listed}" if similar else f"there are: {listed or 'none'}"


LONGEST = 4000  #: characters of a message


class SpmdError(Exception):
    """Base of every error that spmd_engine raises on purpose."""


class UsageError(SpmdError):
    """The user requested something impossible. A message that quotes a long value is shortened in its middle."""

    def __str__(self) -> str:
        text = super().__str__()
        return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} ... {text[-LONGEST // 4 :]}"


class PlanError(UsageError):
    """A step differs from its analysis: the analysis or the engine is wrong."""


class NotFiniteError(UsageError):
    """A loss or a gradient is infinite or not a number; raised on every rank before the parameters change."""


class MeshError(UsageError):
    """A mesh does not match the number of ranks, or an axis is unknown."""


class WrongNumberOfRanks(MeshError):
    """The size of a mesh is not the number of ranks."""

    def __init__(self, mesh: str, ranks: int, there_are: int) -> None:
        super().__init__(
            f"mesh {mesh} needs {ranks} ranks, but there are {there_are}. "
            f"Change the sizes, or start with: mpiexec -n {ranks} ..."
        )
        self.mesh, self.ranks = mesh, ranks  #: axes, as in "data=2,model=2"; number of ranks that they need


class UnknownParameter(UsageError, KeyError):
    """An engine, or a layer, has no parameter of this name."""

    def __init__(self, name: str, names: Iterable[str], of: str = "engine") -> None:
        super().__init__(f"this {of} has no parameter {name!r}; {one_of(name, names)}")

    __str__ = Exception.__str__  # KeyError quotes its message


class NotationError(UsageError):
    """A pattern such as ``"b/data d"`` or an einsum cannot be read or does not fit its array."""


class MismatchError(SpmdError):
    """Ranks of one group called different collectives; all of them raise it with the same text."""


class CommunicationTimeout(SpmdError):
    """A rank waited for other ranks longer than the group's timeout."""


class RankAborted(SpmdError):
    """Another rank of this program failed first; the error of that rank gives the reason."""


class CheckpointError(UsageError):
    """A checkpoint is damaged, does not fit, or could not be written."""


class ReplicasDifferError(SpmdError):
    """Replicas of an array differ in some bits; all ranks raise it with the same text."""


_LIBRARIES = tuple(os.path.dirname(file) + os.sep for file in (__file__, os.__file__))


def user_line() -> str:
    """Where the user's own code called this package, as " (FILE:LINE)"; "" if only programs of this package run."""
    for frame, line in walk_stack(None):
        file = frame.f_code.co_filename
        if not file.startswith((*_LIBRARIES, "<")) and "site-packages" not in file:
            return f" ({file}:{line})"
    return ""
