"""Messages that may overtake each other, and groups among some places of an axis."""

import time

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.errors import MeshError
from support.on_ranks import INLINE, assert_same, everywhere, on_ranks

# --- channels


def array_of(channel, sender):
    """Of another dtype, shape and size on every channel; some are empty."""
    dtype = (np.float64, np.int32, np.float16)[channel % 3]
    return np.full((channel % 4, 1 + 700 * (channel % 5)), 10 * channel + sender, dtype)


@everywhere(2, 3)
def test_messages_are_received_in_another_order_than_sent(ranks):
    def program():
        group = Mesh().group()
        right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        orders = [np.random.default_rng(seed).permutation(12).tolist() for seed in range(4)]
        sent = [group.start_send(right, array_of(c, group.rank), channel=c) for c in orders[0]]
        received = {c: group.start_receive(left, channel=c) for c in orders[1]}
        for channel in orders[2]:
            assert_same(received[channel].wait(), array_of(channel, left))
        for number in orders[3]:
            sent[number].wait()

    on_ranks(program, ranks)


@everywhere(2)
def test_each_is_waited_for_before_the_next_is_asked_for(ranks):
    """What is not asked for yet does not stand in the way of what is."""

    def program():
        group = Mesh().group()
        if group.rank == 0:
            sent = [group.start_send(1, np.full(INLINE, c), channel=c) for c in range(5)]
            for each in sent:
                each.wait()
        if group.rank == 1:
            for channel in (3, 0, 4, 2, 1):
                assert_same(group.receive(0, channel=channel), np.full(INLINE, channel))

    on_ranks(program, ranks)


@everywhere(2)
def test_channels_and_messages_without_one_do_not_mix(ranks):
    def program():
        group = Mesh().group()
        if group.rank == 0:
            for number in range(6):
                group.send(1, np.array([number]), channel=number % 2 if number < 4 else None)
        if group.rank == 1:
            assert [int(group.receive(0)[0]) for _ in range(2)] == [4, 5]
            assert [int(group.receive(0, channel=c)[0]) for c in (1, 0, 0, 1)] == [1, 0, 2, 3]

    on_ranks(program, ranks)


@everywhere(2)
def test_a_channel_is_used_again_and_again(ranks):
    def program():
        group = Mesh().group()
        for number in range(50):
            sent = group.start_send(1 - group.rank, np.full(number % 3, number), channel=7)
            assert_same(group.receive(1 - group.rank, channel=7), np.full(number % 3, number))
            sent.wait()

    on_ranks(lambda: program() if Mesh().size == 2 else None, ranks)


@everywhere(2)
def test_a_message_on_a_high_channel_is_not_taken_for_the_end_of_a_program(ranks):
    """While a rank waits it looks for those whose program has ended; they say so by messages, too."""
    channels = range(4080, 4100)

    def program():
        group = Mesh().group()
        if group.rank == 0:
            sent = [group.start_send(1, np.array([c]), channel=c) for c in channels]
            time.sleep(0.8)
            group.send(1, np.ones(1))
            for each in sent:
                each.wait()
        if group.rank == 1:
            assert_same(group.receive(0), np.ones(1))
            assert [int(group.receive(0, channel=c)[0]) for c in channels] == list(channels)

    on_ranks(program, ranks)


def test_labels_and_bytes_are_in_the_ledger():
    def program():
        with Mesh() as mesh:
            group = mesh.group()
            if group.rank == 0:
                group.send(1, np.ones(5), channel=3, label="input")
            else:
                group.receive(0, channel=3, label="input")
            return {key: (entry.calls, entry.sent) for key, entry in mesh.ledger.entries.items()}

    assert run_threads(program, 2) == [{("send", "data", "input"): (1, 40)}, {("receive", "data", "input"): (1, 0)}]


# --- groups among some places

CUBE = {"pipe": 4, "data": 2}


def test_a_group_among_some_places_has_only_their_ranks():
    def program():
        with Mesh(**CUBE) as mesh:
            here = mesh.coordinates["pipe"]
            found = {}
            if here in (0, 3):
                ends = mesh.group("pipe", among={"pipe": (0, 3)})
                assert ends is mesh.group("pipe", among={"pipe": [0, 3]}) and ends is not mesh.group("pipe")
                assert (ends.rank, ends.size) == ((0, 3).index(here), 2)
                found["ends"] = ends.all_gather(np.array([mesh.rank])).tolist()
            if here in (1, 2, 3):
                both = mesh.group(("data", "pipe"), among={"pipe": (1, 2, 3)})
                found["both"] = both.all_gather(np.array([mesh.rank])).tolist()
            found["all"] = mesh.group("pipe", among={}).all_gather(np.array([mesh.rank])).tolist()
            return found

    for rank, found in enumerate(run_threads(program, 8)):
        column = rank % 2
        assert found["all"] == [column, 2 + column, 4 + column, 6 + column]
        assert found.get("ends", [column, 6 + column]) == [column, 6 + column]
        assert found.get("both", [2, 4, 6, 3, 5, 7]) == [2, 4, 6, 3, 5, 7]
        assert ("ends" in found) == (rank // 2 in (0, 3)) and ("both" in found) == (rank >= 2)


@everywhere(3)
def test_others_go_on_meanwhile(ranks):
    """Ranks that are not among those of a group neither take part nor wait."""

    def program():
        with Mesh(pipe=3) as mesh:
            if mesh.rank != 1:
                ends = mesh.group("pipe", among={"pipe": (0, 2)})
                x = np.full(INLINE, float(mesh.rank))
                assert_same(ends.all_reduce(x), np.full(INLINE, 2.0))
            assert mesh.all_reduce(np.array([1])).tolist() == [3]

    on_ranks(lambda: program() if Mesh().size == 3 else None, ranks)


@pytest.mark.parametrize(
    "over, among, message",
    [
        ("pipe", {"pipe": (1, 2)}, "rank [0,6] is not among the places .* of axis 'pipe'"),
        ("pipe", {"pipe": (0, 0, 3)}, r"places \[0, 0, 3\] of axis 'pipe': use each of 0 to 3 at most once"),
        ("pipe", {"pipe": (0, 3, 4)}, r"places \[0, 3, 4\] of axis 'pipe'"),
        ("pipe", {"pipe": (0, -1)}, r"places \[0, -1\] of axis 'pipe'"),
        ("data", {"pipe": (0, 3)}, "among selects coordinates of axes pipe, but the group is over data"),
        ("pipe", {"pipe": (0, 3), "deta": (0,)}, "among selects coordinates of axes pipe, deta, but"),
    ],
)
def test_places_that_cannot_be_are_refused(over, among, message):
    def program():
        with Mesh(**CUBE) as mesh:
            if mesh.rank in (0, 6):
                mesh.group(over, among=among)

    with pytest.raises(MeshError, match=message):
        run_threads(program, 8)
