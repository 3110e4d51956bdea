"""A parameter in a tensor of a file: dims, as words of the parameter's letters.

A query's weights d h r k are stored as ``"hrk d"``, two dims, of which the first runs over h, r and k. A letter that
the parameter has not stands for several parameters in one tensor, and ``at`` says which of them this is: of GPT-2's
``"d nhk"`` the query is n = 0 of 3. Of a letter that it has, it may be a part: where each key head has its r queries
in a tensor, then its key and its value, these are r + 2 in all, of which the queries are ``among`` from 0 on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Stored:
    """A parameter in a tensor."""

    tensor: str
    dims: str
    at: Mapping[str, tuple[int, int]] = field(default_factory=dict)  #: letter -> number of this parameter, of how many
    #: How rotary positions pair the numbers of k in the file, if otherwise than here: see ``RotaryOptions.pairs``.
    pairs: str = ""
    rows: tuple[int, int, int] | None = None  #: these of its rows: first, end, of how many; None: all
    less: float = 0.0  #: what is stored is so much less
    #: Letter -> where this parameter's begin, of how many that the tensor has.
    among: Mapping[str, tuple[int, int]] = field(default_factory=dict)


#: A parameter's full name, and the ways in which it may be stored, the first of which is how it is written.
Names = Iterator[tuple[str, tuple[Stored, ...]]]
