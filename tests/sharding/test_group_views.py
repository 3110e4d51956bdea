"""The members' views of a parameter group's flat array, whole and in intervals."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_engine.sharding.groups import joined
from support.parameter_groups import cases, group_of


def joined_members(group, segments, like, interval=None):
    """Arrays by member from arrays by segment."""
    return {member.name: joined(group.place(member, interval), segments, like) for member in group.members}


def wholes(group):
    """Each member's block, filled with its places in the group's flat array."""
    ends = np.cumsum([0, *(m.size for m in group.members)])
    return {m.name: np.arange(a, b).reshape(m.shape) for m, (a, b) in zip(group.members, pairwise(ends))}


MIXED = [("norm", (3,), False), ("w0", (2, 3), True), ("bias", (2,), False), ("w1", (3, 2), True)]


# --- views of the whole and of an interval


@given(cases())
def test_writing_through_views_fills_the_flat_array(case):
    group, _ = case
    flat = np.zeros(group.size)
    for i, (name, view) in enumerate(group.views(flat).items()):
        assert view.shape == next(m.shape for m in group.members if m.name == name)
        view += i + 1
    np.testing.assert_array_equal(flat, np.repeat(np.arange(len(group.members)) + 1.0, [m.size for m in group.members]))


def in_part(group, interval):
    """What of each member's block lies in an interval, found element by element."""
    parts = {}
    for name, block in wholes(group).items():
        inside = (block >= interval.start) & (block < interval.stop)
        if not block.size:
            parts[name] = block
        elif not block.ndim:
            parts[name] = block if inside else block[inside]  # a number has no rows: it is there, or nothing is
        else:
            rows = inside.reshape(len(block), -1)
            assert (rows.all(axis=1) | ~rows.any(axis=1)).all()  # whole rows
            parts[name] = block[rows.all(axis=1)]
    return parts


@given(cases())
def test_views_of_an_interval_are_the_rows_in_it(case):
    group, interval = case
    flat = np.arange(group.size)[interval]
    expected, rows, views = in_part(group, interval), group.rows(interval), group.views(flat, interval)
    assert list(views) == list(rows) == list(expected) == [m.name for m in group.members]
    for name, block in wholes(group).items():
        np.testing.assert_array_equal(views[name], expected[name], strict=True)
        assert np.shares_memory(views[name], flat) or not views[name].size
        if block.ndim:
            np.testing.assert_array_equal(block[rows[name]], expected[name], strict=True)
        else:
            assert rows[name].stop - rows[name].start == expected[name].size


@given(cases())
def test_segments_cover_an_interval_and_part_the_decayed(case):
    group, interval = case
    flat = np.arange(group.size)[interval]
    segments = group.segments(flat, interval)
    np.testing.assert_array_equal(np.concatenate([*segments.values(), flat[:0]]), flat, strict=True)
    assert all(segment.size for segment in segments.values())
    views = group.views(flat, interval)
    for kind, decay in (("decayed", True), ("plain", False)):
        parts = [views[m.name].reshape(-1) for m in group.members if m.decay == decay]
        segment = segments.get(f"{group.name}/{kind}", flat[:0])
        np.testing.assert_array_equal(segment, np.concatenate([*parts, flat[:0]]), strict=True)


@given(cases())
def test_join_is_the_way_back_from_segments(case):
    group, interval = case
    flat = np.arange(group.size)[interval]
    segments = group.segments(flat, interval)
    arrays, views = joined_members(group, segments, flat, interval), group.views(flat, interval)
    assert list(arrays) == list(views)
    for name, view in views.items():
        np.testing.assert_array_equal(arrays[name], view, strict=True)
        assert np.shares_memory(arrays[name], flat) or not view.size


@given(cases(), st.integers(0, 255))
def test_runs_are_the_wanted_members_with_neighbours_joined(case, chosen):
    group, interval = case
    wanted = {m.name for i, m in enumerate(group.members) if chosen >> i & 1}
    flat = np.arange(group.size)[interval]
    runs = group.runs(flat, wanted.__contains__, interval)
    parts = [view.reshape(-1) for name, view in group.views(flat, interval).items() if name in wanted]
    np.testing.assert_array_equal(np.concatenate([*runs, flat[:0]]), np.concatenate([*parts, flat[:0]]))
    assert all(np.shares_memory(run, flat) for run in runs)
    assert all(one[-1] + 1 < other[0] for one, other in pairwise(runs))  # else they were one run


@given(cases(), st.integers(1, 5))
def test_owners_have_every_row_once(case, parts):
    group, _ = case
    owned = [group.views(np.arange(group.size)[part], part) for part in group.intervals(parts)]
    for name, block in wholes(group).items():
        found = np.concatenate([views[name].reshape(-1) for views in owned])
        np.testing.assert_array_equal(found, block.reshape(-1))


@given(cases())
def test_without_an_interval_it_is_the_whole(case):
    group, _ = case
    flat, everything = np.arange(group.size), slice(0, group.size)
    named = [
        (group.views(flat), group.views(flat, everything)),
        (group.segments(flat), group.segments(flat, everything)),
        (
            joined_members(group, group.segments(flat), flat),
            joined_members(group, group.segments(flat), flat, everything),
        ),
    ]
    for ours, theirs in named:
        assert list(ours) == list(theirs)
        for name in ours:
            np.testing.assert_array_equal(ours[name], theirs[name], strict=True)
    assert [run.tolist() for run in group.runs(flat, lambda name: True)] == ([flat.tolist()] if group.size else [])


# --- by example


def test_decayed_members_lie_first_each_kind_in_order():
    group = group_of(*MIXED)
    assert list(group.spans) == ["w0", "w1", "norm", "bias"]
    segments = group.segments(np.zeros(group.size))
    assert {name: part.size for name, part in segments.items()} == {"group0/decayed": 12, "group0/plain": 5}


def test_rows_of_an_interval():
    group = group_of(*MIXED)  # w0: 0 to 6, w1: 6 to 12, norm: 12 to 15, bias: 15 to 17
    assert group.rows(slice(3, 10)) == {"w0": slice(1, 2), "w1": slice(0, 2), "norm": slice(0, 0), "bias": slice(0, 0)}
    assert group.rows(slice(14, 16)) == {"w0": slice(2, 2), "w1": slice(3, 3), "norm": slice(2, 3), "bias": slice(0, 1)}


@pytest.mark.parametrize("decay, name", [(True, "group0/decayed"), (False, "group0/plain")])
def test_a_segment_of_nothing_is_left_out(decay, name):
    assert list(group_of(("p", (3,), decay)).segments(np.zeros(3))) == [name]


def test_members_without_elements_are_in_no_segment_but_have_their_views():
    """Collectives go by name, so a rank with an empty block must know it too."""
    group = group_of(("w", (0, 3), True), ("x", (2,), True), ("rows", (2, 0), False))
    flat = np.zeros(2)
    segments = group.segments(flat)
    assert list(segments) == ["group0/decayed"]
    for views in (group.views(flat), joined_members(group, segments, flat)):
        assert {name: view.shape for name, view in views.items()} == {"w": (0, 3), "x": (2,), "rows": (2, 0)}


def test_a_group_of_nothing_but_empty_members():
    group = group_of(("w", (0, 3), True))
    assert group.size == 0 and group.segments(np.zeros(0)) == {} and group.runs(np.zeros(0), lambda name: True) == []
    assert joined_members(group, {}, np.zeros(0))["w"].shape == (0, 3)


def test_what_is_joined_of_no_segments_is_of_the_same_kind():
    group = group_of(("w", (2, 3), True), ("bias", (2,), False))
    like, interval = np.zeros(6, np.float32), slice(0, 6)
    arrays = joined_members(group, group.segments(like, interval), like, interval)
    assert arrays["bias"].shape == (0,) and arrays["bias"].dtype == np.float32
