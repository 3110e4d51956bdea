"""The arguments of public functions are checked against their annotations, before anything is done with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import pytest

from spmd_engine.arguments import checked
from spmd_engine.errors import UsageError


class Part:
    pass


@checked({"count": 1, "share": 0, "pair": (0, 1)}, ["part"], named="as TABLE")
def called(
    count: int,
    share: float = 0.5,
    *parts: int,
    part: Part = None,  # type: ignore
    many: Sequence[Part] = (),
    text: str = "",
    flag: bool = False,
    named: Mapping[str, int] | None = None,
    does: Callable[[int], Any] | None = None,
    free: Any = None,
    unknown: Absent | None = None,  # noqa: F821
    pair: tuple[float, float] | None = None,
    which: Literal["first", "last"] | None = None,
    sized: Annotated[tuple[str, int], "a letter and its size"] = ("d", 2),
    **options: Any,
) -> int:
    return count


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"count": 0}, "called: count is 0; it must be from 1"),
        ({"count": "3"}, "called: count is '3'; give a whole number"),
        ({"count": 1.5}, "called: count is 1.5; give a whole number"),
        ({"share": float("nan")}, "called: share is nan; give a number"),
        ({"share": np.ones(1)}, r"called: share is an array of shape \(1,\); give a number"),
        ({"part": Part}, "called: part is the class Part; give a Part, not its class"),
        ({"many": Part()}, "called: many is a Part; give a list of Part objects"),
        ({"many": [Part(), 3]}, r"called: many\[1\] is 3; give a Part"),
        ({"text": None}, "called: text is None; give a text"),
        ({"flag": "no"}, "called: flag is 'no'; give True or False"),
        ({"named": ["a"]}, "called: named is a list of 1; give as TABLE"),
        ({"flag": 2}, "called: flag is 2; give True or False"),
        ({"count": int}, "called: count is the class int; give a whole number"),
        ({"pair": (0.5,)}, r"called: pair is a tuple of 1; give \(a number, a number\) or None"),
        ({"pair": (0.5, 1)}, r"called: pair\[1\] is 1; it must be from 0 below 1"),
        ({"which": "lst"}, "called: which is 'lst'; did you mean 'last'"),
        ({"sized": ("d", "2")}, r"called: sized\[1\] is '2'; give a letter and its size"),
        ({"does": 3}, "called: does is 3; give a function or None"),
        ({"does": lambda: 3}, "called: does is a function of 0 arguments; give a function or None"),
    ],
)
def test_an_argument_that_does_not_fit_is_named_with_what_fits(wrong, message):
    with pytest.raises(UsageError, match=message):
        called(**{"count": 1, **wrong})


def test_what_fits_passes():
    given = {"part": None, "many": [Part()], "named": {}, "does": max, "unknown": 3, "name": 4, "pair": [0, 0.5]}
    assert called(np.int64(2), np.float32(1), 5, flag=np.bool_(True), free=object(), **given) == 2


def test_a_class_is_checked_when_it_is_called():
    @checked({"size": 1})
    @dataclass(frozen=True)
    class Sized:
        size: int = 1

    assert Sized(2).size == 2
    with pytest.raises(UsageError, match="Sized: size is 0; it must be from 1"):
        Sized(0)


def test_an_argument_that_lacks_or_is_too_many_is_named():
    @checked()
    def few(first, second=2):
        return first

    for arguments, options, message in (
        ((), {}, "few: missing a required argument: 'first'; it takes \\(first, second\\)"),
        ((1, 2, 3), {}, "few: too many positional arguments; it takes \\(first, second\\)"),
        ((1,), {"secnd": 3}, "few has no argument 'secnd'; did you mean 'second'"),
    ):
        with pytest.raises(UsageError, match=message):
            few(*arguments, **options)
