"""The routing table as text."""

from spmd_engine.sharding.experts import even, routing_table


def test_a_table_with_loads():
    assert routing_table((0, 0, 1, 3), 4, [100, 20, 1200, 80], [(0, 1), (2, 3), (4, 5), (6, 7)]).splitlines() == [
        "expert  part  ranks  load   share",
        "0       0     0, 1   100    7.1%",
        "1       0     0, 1   20     1.4%",
        "2       1     2, 3   1,200  85.7%",
        "3       3     6, 7   80     5.7%",
        "",
        "part  ranks  experts  load   share",
        "0     0, 1   0, 1     120    8.6%   ##",
        "1     2, 3   2        1,200  85.7%  ########################",
        "2     4, 5   none     0      0.0%",
        "3     6, 7   3        80     5.7%   ##",
        "",
        "The heaviest part has 3.43 x the mean.",
    ]


def test_a_table_without_loads():
    assert routing_table(even(5, 2), 2).splitlines()[-3:] == [
        "part  ranks  experts",
        "0     0      0-2",
        "1     1      3, 4",
    ]


def test_no_load_at_all_is_no_error():
    assert "0.0%" in routing_table(even(2, 2), 2, [0, 0])
