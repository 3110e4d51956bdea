"""Machine files: what is packaged can be read, what is written is read again, and mistakes are one line."""

import pytest

from spmd_engine.errors import UsageError
from spmd_engine.planning.machine.machine import PACKAGED, Curve, parse_machine, read_machine, toml_of
from spmd_engine.planning.simulator.times import rounds_of_tiles

NODE = """
name = "m"
[[nodes]]
name = "n"
count = 2
ranks = 2
memory = "1GiB"
memory_bandwidth = 1e9
[nodes.speeds]
float32 = 1e9
[nodes.inside]
latency = 1e-6
bandwidth = 1e9
"""
TEXT = NODE + "[between]\nlatency = 1e-5\nbandwidth = 1e8\n"


@pytest.mark.parametrize("name", PACKAGED)
def test_packaged_machines_have_sources_and_are_written_as_they_are_read(name):
    machine = read_machine(name)
    assert machine.source
    text = toml_of(machine)  # six digits of each number
    assert toml_of(parse_machine(text)) == text


def test_a_link_depends_on_the_nodes_of_its_ranks():
    machine = parse_machine(TEXT + "[[pairs]]\nranks = [3, 0]\nlatency = 0\nbandwidth = 5\n")
    assert [machine.link(a, b).bandwidth for a, b in ((0, 1), (1, 2), (0, 3), (3, 0))] == [1e9, 1e8, 5, 5]


def test_fewer_ranks_fill_nodes_one_after_the_other():
    machine = parse_machine(TEXT).with_ranks(3)
    assert [node for node, _ in machine.places] == [0, 0, 1]
    with pytest.raises(UsageError, match="4 ranks, fewer than 5"):
        parse_machine(TEXT).with_ranks(5)


def test_products_take_rounds_of_tiles():
    """175B's queries, keys and values on eight A100: 16 by 18 tiles, the last third of three rounds idle in part."""
    assert rounds_of_tiles(2048, 4608, 1, 108) == 3 * 108 / (16 * 18)
    assert rounds_of_tiles(2048, 1024, 1, 108) == 1.0  # less than a round: what they lose is fitted
    assert rounds_of_tiles(256 * 108, 128, 1, 108) == 1.0
    assert 1.5 < rounds_of_tiles(256 * 109, 128, 1, 108) < 2 * 108 / 109  # smaller tiles leave less idle


def test_speeds_between_points_follow_a_line_of_logarithms():
    curve = Curve(((1e2, 1.0), (1e4, 100.0)))
    assert curve(1e3) == pytest.approx(10.0)
    assert (curve(1), curve(1e9)) == (1.0, 100.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (TEXT.replace("count = 2", "count = 2\ncolour = 1"), "unknown field 'colour'"),
        ("colour = 1\n" + TEXT, "there are: name, nodes, between, pairs, topology, fitted, source"),
        (NODE, "the field 'between' is missing"),
        (NODE.replace("count = 2", "count = 0"), "the field 'between' is missing"),
        (TEXT.replace('memory = "1GiB"\n', ""), "'memory' is missing"),
        (TEXT.replace("float32 = 1e9", "float32 = 0"), "float32 is 0: it must be above 0"),
        (TEXT.replace("float32 = 1e9", "float32 = -1"), "float32 is -1"),
        (TEXT.replace("float32 = 1e9", "float31 = 1"), "unknown field 'float31'"),
        (TEXT.replace("ranks = 2", "ranks = 0"), "ranks is 0: it must be from 1"),
        (TEXT + "[fitted]\nluck = 2\n", "unknown field 'luck'"),
        (
            TEXT + '[[pairs]]\nranks = [0, 1]\nlatency = 0\nbandwidth = 5\nby_copy = "false"\n',
            "by_copy is 'false': it must be true or false",
        ),
        (TEXT + '[topology]\nkind = "torus"\nshape = [3]\n', "a torus of 3 nodes, but there are 2"),
        (TEXT + '[topology]\nkind = "graph"\nedges = [[0, 0]]\n', "node 0 and node 1 are not connected"),
        (TEXT + "[[pairs]]\nranks = [0, 9]\nlatency = 0\nbandwidth = 1\n", "names rank 9, but there are 4"),
        (TEXT + 'bandwidth = "x', "invalid TOML"),
    ],
)
def test_mistakes_are_one_line(text, said):
    with pytest.raises(UsageError) as error:
        parse_machine(text, "file.toml")
    assert said in str(error.value)
    assert str(error.value).startswith("file.toml")
    assert "\n" not in str(error.value)


def test_a_node_of_one_rank_needs_no_link_inside():
    alone = NODE[: NODE.index("[nodes.inside]")].replace("count = 2", "count = 1").replace("ranks = 2", "ranks = 1")
    assert parse_machine(alone).ranks == 1 and parse_machine(toml_of(parse_machine(alone))).nodes[0].inside.latency == 0
    with pytest.raises(UsageError, match="the field 'inside' is missing"):
        parse_machine(alone.replace("ranks = 1", "ranks = 2"))
