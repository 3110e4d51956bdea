"""The package's ``dataclass`` does what the standard library's does, and the two go together."""

import copy
import dataclasses
import pickle
from dataclasses import FrozenInstanceError, asdict, field, fields, replace

import pytest

from spmd_engine.dataclass import dataclass


@dataclass(frozen=True)
class Point:
    """Of each kind of field."""

    x: int
    y: "int" = 2
    names: list = field(default_factory=list)
    hidden: int = field(default=7, repr=False, compare=False)
    total: int = field(init=False)
    last: int = field(default=0, kw_only=True)

    def __post_init__(self):
        object.__setattr__(self, "total", self.x + self.y)


@dataclass
class Changing:
    x: int
    y: float = 0.5


def standard(cls):
    """The same class as the standard library makes it."""
    body = {name: value for name, value in vars(cls).items() if not name.startswith("__") or name == "__post_init__"}
    given = [(each.name, each.type, each) for each in fields(cls)]
    frozen = cls.__dataclass_params__.frozen
    return dataclasses.make_dataclass(
        cls.__name__, given, namespace={"__post_init__": body.get("__post_init__", lambda _: None)}, frozen=frozen
    )


CALLS = [
    ((1,), {}),
    ((1, 3, ["a"]), {"last": 4}),
    ((), {"x": 1, "hidden": 3}),
    ((), {}),
    ((1, 2, [], 3, 4), {}),
    ((1,), {"z": 2}),
]


@pytest.mark.parametrize(("given", "named"), CALLS, ids=str)
def test_instances_are_made_and_shown_alike(given, named):
    made = []
    for kind in (Point, standard(Point)):
        try:
            point = kind(*given, **named)
            made.append((repr(point), asdict(point), vars(point)))
        except TypeError as error:
            made.append(str(error).rpartition("__init__")[2])
    assert made[0] == made[1]


def test_equal_are_those_of_a_class_with_equal_fields():
    assert Changing(1) == Changing(1, 0.5) != Changing(2)
    assert Point(1, hidden=3) == Point(1, hidden=4)
    assert Changing(1) != standard(Changing)(1) and Changing(1) != 1


def test_what_is_frozen_has_a_hash_and_cannot_be_changed():
    @dataclass(frozen=True)
    class Pair:
        a: int
        b: int

    assert len({Pair(1, 2), Pair(1, 2), Pair(2, 1)}) == 2
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'a'"):
        Pair(1, 2).a = 3
    with pytest.raises(FrozenInstanceError, match="cannot delete field 'a'"):
        del Pair(1, 2).a
    with pytest.raises(FrozenInstanceError):
        Pair(1, 2).c = 3
    with pytest.raises(TypeError, match="unhashable"):
        hash(Changing(1))


def test_what_is_not_frozen_changes():
    one = Changing(1)
    one.x = 4
    assert one == Changing(4)


def test_copies():
    point = Point(1, names=["a"])
    assert replace(point, x=5) == Point(5, names=["a"])
    assert pickle.loads(pickle.dumps(point)) == copy.deepcopy(point) == copy.copy(point) == point
    assert [each.name for each in fields(point)] == ["x", "y", "names", "hidden", "total", "last"]
    match Changing(3, 4.0):
        case Changing(x, y):
            assert (x, y) == (3, 4.0)


@pytest.mark.parametrize("below", [dataclass, dataclasses.dataclass])
@pytest.mark.parametrize("above", [dataclass, dataclasses.dataclass])
def test_classes_of_both_are_derived_from_one_another(below, above):
    @below(frozen=True)
    class Base:
        x: int
        y: int = 1

    @above(frozen=True)
    class Derived(Base):
        z: int = 2

    assert Derived(5) == Derived(5, 1, 2) and repr(Derived(5)).endswith("Derived(x=5, y=1, z=2)")
    with pytest.raises(FrozenInstanceError):
        Derived(5).y = 2
    with pytest.raises(TypeError, match="frozen"):
        above(type("Loose", (Base,), {}))


def test_methods_of_its_own_stay():
    @dataclass(frozen=True)
    class Own:
        x: int

        def __init__(self):
            object.__setattr__(self, "x", 3)

        def __eq__(self, other):
            return True

        def __repr__(self):
            return "own"

    assert repr(Own()) == "own" and Own() == 5 and Own().x == 3 and hash(Own()) == hash(Own())


def test_a_subclass_without_fields_may_keep_more():
    class More(Point):
        def __init__(self):
            super().__init__(1)
            self.more = 2

    assert More().more == 2
    with pytest.raises(FrozenInstanceError):
        More().x = 2
