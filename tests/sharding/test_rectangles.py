"""Rectangles of an array, by the sets of elements that they are."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_engine.sharding.rectangles import Grid, Rectangle, joined

SHAPE = (5, 4, 3)


@st.composite
def rectangles(draw, shape=SHAPE):
    """Any part of an array, empty ones included."""
    sides = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return Rectangle(tuple(a for a, _ in sides), tuple(b for _, b in sides))


def elements(*parts):
    """The elements of disjoint rectangles, in order."""
    numbers = np.arange(np.prod(SHAPE)).reshape(SHAPE)
    return [n for part in parts for n in numbers[part.index].ravel().tolist()]


@given(rectangles(), rectangles())
def test_as_sets(one, other):
    assert set(elements(one & other)) == set(elements(one)) & set(elements(other))
    rest = elements(*(one - other))
    assert len(rest) == len(set(rest)) and set(rest) == set(elements(one)) - set(elements(other))
    assert (one in other) == (set(elements(one)) <= set(elements(other)))
    assert one.size == len(elements(one))


@given(rectangles(), rectangles())
def test_where_it_is_in_a_block(outer, other):
    inner = outer & other
    numbers = np.arange(np.prod(SHAPE)).reshape(SHAPE)
    if inner.size:
        np.testing.assert_array_equal(numbers[outer.index][inner.within(outer).index], numbers[inner.index])


@given(rectangles(), st.data())
def test_consecutive_elements_are_rectangles_in_order(rectangle, data):
    first, last = sorted(data.draw(st.tuples(*[st.integers(0, rectangle.size)] * 2)))
    parts = list(rectangle.elements(first, last))
    assert elements(*parts) == elements(rectangle)[first:last]
    assert all(part.size for part in parts)
    assert len(parts) <= 2 * len(SHAPE) - 1


@given(st.lists(rectangles(), max_size=5))
def test_cells_of_a_grid_are_the_rectangles_and_no_more(found):
    grid = Grid(SHAPE, found)
    assert grid.sizes().sum() == np.prod(SHAPE)
    for each in found:
        mask = np.zeros(grid.shape, bool)
        mask[grid.cells(each)] = bool(each.size)
        assert grid.rectangles(mask) == ([each] if each.size else [])


@given(st.lists(rectangles(), max_size=5), st.randoms())
def test_any_cells_are_disjoint_rectangles(found, random):
    grid = Grid(SHAPE, found)
    mask = np.array([random.random() < 0.6 for _ in range(int(np.prod(grid.shape)))]).reshape(grid.shape)
    numbers = elements(*grid.rectangles(mask))
    assert len(numbers) == len(set(numbers)) == grid.sizes()[mask].sum()


def test_neighbours_are_joined():
    cells = [Rectangle(at, tuple(n + 1 for n in at)) for at in product(range(3), range(2, 4))]
    assert joined(cells) == [Rectangle((0, 2), (3, 4))]
    assert joined(cells[1:]) == [Rectangle((0, 3), (1, 4)), Rectangle((1, 2), (3, 4))]
    assert joined([]) == []


def test_a_number_is_one_element():
    number = Rectangle((), ())
    assert number.size == 1 and number.shape == () and number & number == number and number - number == []
    assert list(number.elements(0, 1)) == [number] and number in number
    grid = Grid((), [number])
    assert grid.rectangles(np.array(True)) == [number] and grid.rectangles(np.array(False)) == []


def test_of_slices_and_back():
    index = (slice(1, 3), slice(0, 4))
    assert Rectangle.of(index).index == index and str(Rectangle.of(index)) == "[1:3, 0:4]"
    assert Rectangle.whole((2, 5)) == Rectangle((0, 0), (2, 5))


def test_what_is_not_in_the_array_is_refused():
    with pytest.raises(ValueError, match=r"\[0:3\] is not a part of an array of shape \(2,\)"):
        Grid((2,), [Rectangle((0,), (3,))])
