"""Numbers of all ranks in a line of ``metrics.jsonl``: of few ranks all, of many what readers need of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from spmd_engine.axes import MOST

LISTED = 64  #: most ranks of which a line has all numbers
OUTSTANDING = 8  #: ranks whose numbers are given anyway, because they differ most from the median


def condensed(values: Sequence[Any]) -> Any:
    """Numbers by rank (or rows of them) as a line has them: as they are for at most LISTED ranks; else the number of
    ranks, the minimum, median and maximum, and the numbers of the ranks that differ most from the median.

    >>> short = condensed([0.5] * 99 + [0.9])
    >>> short["ranks"], short["median"], short["maximum"], short["of"]["99"], len(expanded(short))
    (100, 0.5, 0.9, 0.9, 100)
    """
    if len(values) <= LISTED:
        return values
    x = np.array(values, float).reshape(len(values), -1)
    middle = np.median(x, axis=0)
    furthest = np.argsort(-np.abs(x - middle), axis=0, kind="stable")[:OUTSTANDING]
    ranks = sorted({*furthest.reshape(-1).tolist(), *x.argmin(axis=0).tolist(), *x.argmax(axis=0).tolist()})
    shape = np.shape(values[0])
    parts = {"minimum": x.min(axis=0), "median": middle, "maximum": x.max(axis=0)}
    return {
        "ranks": len(values),
        **{name: part.round(4).reshape(shape).tolist() for name, part in parts.items()},
        "of": {str(rank): values[rank] for rank in ranks},
    }


def expanded(numbers: Any) -> Any:
    """Numbers by rank from what ``condensed`` returns: the median for ranks that have no numbers of their own.

    Raises ValueError or TypeError for a damaged line.
    """
    if not isinstance(numbers, Mapping):
        return numbers
    ranks, median, own = numbers.get("ranks"), numbers.get("median"), numbers.get("of")
    if type(ranks) is not int or not 0 < ranks <= MOST or not isinstance(own, Mapping):
        raise ValueError("numbers by rank are damaged")
    values = [median] * ranks
    for rank, value in own.items():
        if not 0 <= int(rank) < ranks:
            raise ValueError("numbers of a rank that there is not")
        values[int(rank)] = value
    return values
