"""``immutable`` makes what ``dataclass(frozen=True)`` makes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, asdict, dataclass, field, fields, replace
from inspect import signature
from typing import Any

import pytest

from spmd_engine.immutable import immutable


def made_by(decorator: Any) -> tuple[type, type, type, type]:
    @decorator
    class Empty:
        """No fields."""

    @decorator
    class Point:
        """One field that must be given, one with a default, and one that is not compared."""

        x: float
        names: Mapping[str, int] = field(default_factory=dict)
        seen: list[int] = field(default_factory=list, compare=False, repr=False)
        y: int = 2

    @decorator
    class Checked(Point):
        """A field more than its base, and a check."""

        z: str = "z"

        def __post_init__(self) -> None:
            if not self.z:
                raise ValueError("z is empty")
            object.__setattr__(self, "z", self.z.upper())

    @decorator
    class Own:
        """Methods of its own are kept."""

        x: int

        def __eq__(self, other: object) -> bool:
            return isinstance(other, int)

        def __repr__(self) -> str:
            return "own"

    return Empty, Point, Checked, Own


STANDARD, OURS = made_by(dataclass(frozen=True)), made_by(immutable)


@immutable
class Kept:
    """One that pickle finds."""

    x: int = 1


@pytest.mark.parametrize("standard, ours", [*zip(STANDARD, OURS, strict=True)], ids=lambda each: each.__name__)
def test_fields_and_signature_are_those_of_a_dataclass(standard, ours):
    assert [(each.name, each.type) for each in fields(ours)] == [(each.name, each.type) for each in fields(standard)]
    assert [*signature(ours).parameters] == [*signature(standard).parameters]
    assert ours.__match_args__ == standard.__match_args__
    assert ours.__init__.__qualname__ == standard.__init__.__qualname__


@pytest.mark.parametrize("kinds", [STANDARD, OURS], ids=["dataclass", "immutable"])
def test_it_behaves_as_a_dataclass(kinds):
    empty, point, checked, own = kinds
    one, same, other = point(1.5), point(x=1.5), point(1.5, {"a": 1})
    assert one == same and hash(point(1.5, ())) == hash(point(1.5, (), [1])) and one != other and one != checked(1.5)
    assert point(1.5, seen=[3]) == one and one.names is not same.names
    assert repr(one) == f"{point.__qualname__}(x=1.5, names={{}}, y=2)"
    assert repr(checked(1)) == f"{checked.__qualname__}(x=1, names={{}}, y=2, z='Z')"
    assert asdict(replace(one, y=3)) == {"x": 1.5, "names": {}, "seen": [], "y": 3}
    assert empty() == empty() and hash(empty()) == hash(empty()) and repr(empty()) == f"{empty.__qualname__}()"
    assert own(1) == 5 and own(1) != "5" and repr(own(1)) == "own" and {own(1): 2}
    nan = float("nan")
    assert point(nan) == point(nan) and kinds[0]() != 0
    assert one.__eq__(0) is NotImplemented
    assert copy.deepcopy(other) == other
    with pytest.raises(ValueError, match="z is empty"):
        checked(1, z="")
    with pytest.raises(TypeError, match=r"Point\.__init__\(\) missing 1 required positional argument: 'x'"):
        point()


@pytest.mark.parametrize("kinds", [STANDARD, OURS], ids=["dataclass", "immutable"])
def test_nothing_can_be_set_or_deleted(kinds):
    for one in kinds[1](1.5), kinds[2](1.5), kinds[0]():
        with pytest.raises(FrozenInstanceError, match="cannot assign to field 'x'"):
            one.x = 2
        with pytest.raises(FrozenInstanceError, match="cannot delete field 'x'"):
            del one.x
        assert vars(one).get("x", 1.5) == 1.5


def test_it_is_pickled():
    assert pickle.loads(pickle.dumps(Kept(3))) == Kept(3)


def test_what_it_cannot_make_is_refused():
    with pytest.raises(SyntaxError, match="default"):

        @immutable
        class Disordered:
            """A field without a default after one that has one."""

            x: int = 1
            y: int

    with pytest.raises(AssertionError, match="y"):

        @immutable
        class Hidden:
            """A field that cannot be given."""

            y: int = field(default=1, init=False)

    with pytest.raises(TypeError, match="frozen"):

        @dataclass(frozen=True)
        class Mixed(Kept):
            """Of two kinds."""
