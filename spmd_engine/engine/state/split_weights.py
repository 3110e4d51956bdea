"""Unequal ranks: what each along an axis has of the samples, or of what is stored in parts, beside the others.

The two are not the same share: work goes by speed, state by memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import prod

from spmd_engine.errors import UsageError

Shares = Mapping[str, tuple[int, ...]]

WORK = ("data", "replicate", "shard", "expert")  #: axes that cut samples and nothing else between layers
STATE = ("data", "shard", "expert", "context")  #: axes over which state is stored in parts


def parse_shares(text: str | None, option: str, known: Sequence[str], *, least: int) -> Shares:
    """``"data=3:1"`` as {"data": (3, 1)}, of several axes with commas; None and "" as none.

    ``least``: the smallest share that makes sense. Raises UsageError for what cannot be read, and for other axes than
    the ``known``.
    """
    shares: dict[str, tuple[int, ...]] = {}
    for term in filter(None, (each.strip() for each in (text or "").split(","))):
        axis, equals, numbers = term.partition("=")
        given = numbers.split(":")
        if not equals or axis in shares or not all(number.isdecimal() for number in given):
            raise UsageError(
                f"cannot read {option} {text!r} at {term!r}; write whole numbers, each rank's share, as in data=3:1"
            )
        shares[axis] = tuple(map(int, given))
        if axis not in known:
            raise UsageError(f"{option} {text}: axis {axis!r} is cut evenly; shares are of {', '.join(known)}")
        if min(shares[axis]) < least or not any(shares[axis]):
            said = "from 1" if least else "from 0, and one is above"
            raise UsageError(f"{option} {text}: shares are {said}")
    return shares


def misfit(shares: Shares, axes: Mapping[str, int]) -> str | None:
    """Why shares do not go with a mesh of these axes; None: they do."""
    for axis, numbers in shares.items():
        if axis not in axes:
            return f"there is no axis {axis!r}"
        if len(numbers) != axes[axis]:
            return f"it says {len(numbers)} shares of {axis}, which has {axes[axis]} ranks"
    return None


def shares_along(cut: Sequence[str], axes: Mapping[str, int], shares: Shares) -> tuple[int, ...]:
    """The share of each rank along several axes, the last of which varies fastest; (): all have as much."""
    if not any(axis in shares for axis in cut):
        return ()
    return tuple(map(prod, product(*(shares.get(axis, (1,) * axes[axis]) for axis in cut))))


def said(shares: Shares) -> str:
    """What ``parse_shares`` reads."""
    return ",".join(f"{axis}={':'.join(map(str, numbers))}" for axis, numbers in shares.items())
