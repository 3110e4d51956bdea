"""The exceptions of this package. Each message says what is wrong, where, and what to do."""

from __future__ import annotations

import os
from collections.abc import Iterable
from difflib import SequenceMatcher
from traceback import walk_stack
from typing import Any

LIKE = 0.65  #: least similarity, by difflib, of a suggested name
LISTED = 24  #: most names that an error lists

#: The names that other programs have for an option, an axis or a value.
ELSEWHERE = {
    "learning-rate": "lr base-lr step-size",
    "steps": "epochs max-steps num-steps train-steps iters iterations max-iters",
    "batch-size": "bs batch global-batch-size train-batch-size",
    "micro-batches": "grad-accum accumulate gradient-accumulation-steps",
    "length": "seq-len sequence sequence-length block-size context-length",
    "sequence": "seq-len length sequence-length block-size context-length",
    "weight-decay": "wd decay l2",
    "grad-clip": "clip clip-grad max-grad-norm",
    "recompute": "checkpointing gradient-checkpointing activation-checkpointing remat",
    "precision": "amp mixed-precision torch-dtype",
    "tokens": "max-new-tokens max-tokens max-length n-predict",
    "run": "name out output-dir out-dir save-dir",
    "ranks": "gpus num-gpus nproc np world-size devices",
    "lora-rank": "lora-r lora-dim",
    "data": "dp ddp batch dataset train-data data-path",
    "model": "tp tensor mp",
    "pipe": "pp pipeline stage stages",
    "context": "cp sp seq sequence",
    "expert": "ep experts",
    "shard": "fsdp",
    "bfloat16": "bf16",
    "float16": "fp16 f16 half",
    "float32": "fp32 f32 single full",
    "float64": "fp64 f64 double",
}


def similar_to(given: object, names: Iterable[str]) -> list[str]:
    """The ``names`` that are called ``given`` elsewhere, or are similar to it, the most similar first."""
    text = str(given)[:100].lower()

    def likeness(name: str) -> float:
        elsewhere = ELSEWHERE.get(_plain(name), "").split()
        return (_plain(text) in elsewhere) + SequenceMatcher(None, text, name.lower()).ratio()

    return sorted((name for name in names if likeness(name) >= LIKE), key=likeness, reverse=True)


def _plain(name: str) -> str:
    return name.strip("-").replace("_", "-")


def counted(count: int, noun: str) -> str:
    """
    >>> counted(1, "rank"), counted(1200, "rank")
    ('1 rank', '1,200 ranks')
    """
    return f"{count:,} {noun}{'s' * (count != 1)}"


def one_of(given: object, names: Iterable[str]) -> str:
    """The end of an error about an unknown name: the valid ``names``, those most similar to ``given`` first.

    >>> one_of("mpl", ["gpt", "mlp", "convnet"]), one_of("bf16", ["float16", "bfloat16"])
    ("did you mean 'mlp'? There are: mlp, gpt, convnet", "did you mean 'bfloat16'? There are: bfloat16, float16")
    """
    valid = list(names)
    similar = similar_to(given, valid)
    listed = list(dict.fromkeys([*similar, *valid]))
    more = f" and {len(listed) - LISTED} more" if len(listed) > LISTED else ""
    text = f"{', '.join(listed[:LISTED]) or 'none'}{more}"
    return f"did you mean {similar[0]!r}? There are: {text}" if similar else f"there are: {text}"


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

    def __init__(self, mesh: str, ranks: int, there_are: int, *, threads: bool = False) -> None:
        start = f"call run_threads(..., ranks={ranks})" if threads else f"start with: mpiexec -n {ranks} ..."
        needs = counted(ranks, "rank")
        super().__init__(f"mesh {mesh} needs {needs}, but there are {there_are}. Change the sizes, or {start}")
        self.mesh, self.ranks = mesh, ranks  #: axes, as in "data=2,model=2"; number of ranks that they need


class UnknownParameter(UsageError, KeyError):
    """An engine, or a layer, has no parameter of this name."""

    def __init__(self, name: str, names: Iterable[str], of: str = "engine", lack: str = "") -> None:
        super().__init__(f"this {of} has no parameter {name!r}; {lack or one_of(name, names)}")

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


def is_array(x: Any) -> bool:
    """Whether ``x`` is an array, and not a number of NumPy, which has a shape, too."""
    return getattr(x, "shape", None) is not None and hasattr(x, "__setitem__")


def described(returned: Any) -> str:
    """The description of a value in messages."""
    if returned is None:
        return "None"
    if isinstance(returned, (tuple, list)):
        return f"a {type(returned).__name__} of {len(returned)}"
    if is_array(returned):
        return f"an array of shape {tuple(returned.shape)}"
    if isinstance(returned, type):
        return f"the class {returned.__name__}"
    return f"a {type(returned).__name__}"


_LIBRARIES = tuple(os.path.dirname(file) + os.sep for file in (__file__, os.__file__))


def user_line() -> str:
    """Where the user's own code called this package, as " (FILE:LINE)"; "" if only programs of this package run."""
    for frame, line in walk_stack(None):
        file = frame.f_code.co_filename
        if not file.startswith((*_LIBRARIES, "<")) and "site-packages" not in file:
            return f" ({file}:{line})"
    return ""
