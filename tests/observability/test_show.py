"""Pictures of meshes, shardings and collectives, as people see them; and what is refused."""

from itertools import product

import numpy as np
import pytest

from spmd_engine.axes import MeshPosition, all_positions
from spmd_engine.cli import main
from spmd_engine.comm.views import ArraySharding
from spmd_engine.observability.collective import EXAMPLES, run_example
from spmd_engine.sharding import Spec


@pytest.fixture
def show(capsys):
    def run(*args):
        main(["show", *args])
        return capsys.readouterr().out

    return run


def drawn(text):
    return text.strip("\n").splitlines()


# --- mesh

NESTED = """
mesh data=2,pipe=2,model=2: 8 ranks

┌──────────────────────────────┐ ┌──────────────────────────────┐
│ data 0                       │ │ data 1                       │
│          model 0   model 1   │ │          model 0   model 1   │
│        ┌─────────┬─────────┐ │ │        ┌─────────┬─────────┐ │
│ pipe 0 │    0    │    1    │ │ │ pipe 0 │    4    │    5    │ │
│        ├─────────┼─────────┤ │ │        ├─────────┼─────────┤ │
│ pipe 1 │    2    │    3    │ │ │ pipe 1 │    6    │    7    │ │
│        └─────────┴─────────┘ │ │        └─────────┴─────────┘ │
└──────────────────────────────┘ └──────────────────────────────┘

axis   size  groups: the ranks that a collective over this axis joins
data      2  {0,4} {1,5} {2,6} {3,7}
pipe      2  {0,2} {1,3} {4,6} {5,7}
model     2  {0,1} {2,3} {4,5} {6,7}
"""


def test_a_mesh_of_three_axes(show):
    assert show("mesh", "data=2,pipe=2,model=2").splitlines() == drawn(NESTED)


def test_a_mesh_of_one_axis(show):
    assert show("mesh", "data=3").splitlines() == drawn("""
mesh data=3: 3 ranks

  data 0   data 1   data 2
┌────────┬────────┬────────┐
│   0    │   1    │   2    │
└────────┴────────┴────────┘

axis  size  groups: the ranks that a collective over this axis joins
data     3  {0,1,2}
""")


def test_many_ranks_go_on_below_and_long_lists_are_cut(show):
    lines = show("mesh", "data=2,model=64").splitlines()
    assert max(map(len, lines)) <= 110
    ranks = [word for line in lines if line.startswith("data") for word in line.split("│")[1:-1]]
    assert sorted(map(int, ranks)) == [*range(128)]
    assert lines[-2].endswith("more") and lines[-1] == "model    64  {0,1,2,...,63} {64,65,66,...,127}"


# --- sharding

CUT = """
"b/data f/model", shape 8 x 6, mesh data=2,model=2

          f 0:3        f 3:6
      ┌────────────┬────────────┐
b 0:4 │   rank 0   │   rank 1   │
      │ [0:4, 0:3] │ [0:4, 3:6] │
      ├────────────┼────────────┤
b 4:8 │   rank 2   │   rank 3   │
      │ [4:8, 0:3] │ [4:8, 3:6] │
      └────────────┴────────────┘

Each rank holds 4 x 3.
"""


def test_two_dims_cut(show):
    text = show("sharding", "b/data f/model", "--shape", "8,6", "--mesh", "data=2,model=2")
    assert text.splitlines() == drawn(CUT)


def test_uneven_and_empty_blocks(show):
    assert show("sharding", "b/data f", "--shape", "2,6", "--mesh", "data=3,model=2").splitlines() == drawn("""
"b/data f", shape 2 x 6, mesh data=3,model=2

      ┌────────────────┐
b 0:1 │   ranks 0,1    │
      │    [0:1, :]    │
      ├────────────────┤
b 1:2 │   ranks 2,3    │
      │    [1:2, :]    │
      ├────────────────┤
b 2:2 │   ranks 4,5    │
      │ [2:2, :] empty │
      └────────────────┘

Uneven: a rank holds from 0 x 6 to 1 x 6.
Each block is on 2 ranks, which differ along model.
""")


def test_a_vector_lies_across(show):
    assert show("sharding", "b/model,data", "--shape", "5", "--mesh", "data=2,model=2").splitlines() == drawn("""
"b/model,data", shape 5, mesh data=2,model=2

  b 0:2    b 2:3    b 3:4    b 4:5
┌────────┬────────┬────────┬────────┐
│ rank 0 │ rank 2 │ rank 1 │ rank 3 │
│ [0:2]  │ [2:3]  │ [3:4]  │ [4:5]  │
└────────┴────────┴────────┴────────┘

Uneven: a rank holds from 1 to 2.
""")


def test_dims_that_are_not_drawn_are_named_with_their_cuts(show):
    spec = "b/data s/context h/model k"
    lines = show("sharding", spec, "--shape", "4,8,3,2", "--mesh", "data=2,context=2,model=2").splitlines()
    assert lines[4] == "b 0:2 │    ranks 0,1     │    ranks 2,3     │"
    assert lines[5] == "      │ [0:2, 0:4, h, :] │ [0:2, 4:8, h, :] │"
    assert lines[-1] == "h/model is not drawn: 0:2 on ranks 0,2,4,6; 2:3 on ranks 1,3,5,7."


def test_an_array_that_is_whole_everywhere(show):
    lines = show("sharding", "b d", "--shape", "4,6", "--mesh", "data=9").splitlines()
    assert lines[3:5] == ["│ ranks 0,1,2,...,8 │", "│      [:, :]       │"]
    assert lines[-2:] == ["Each rank holds 4 x 6.", "Each block is on 9 ranks, which differ along data."]


def test_a_parameter_of_a_model(show):
    text = show("sharding", "--param", "block0/mlp/w0", "--model", "gpt-nano", "--mesh", "data=2,model=4")
    assert text.startswith('gpt-nano block0/mlp/w0 "d f/model", shape 96 x 384, mesh data=2,model=4\n')
    assert "ranks 1,5" in text and "[:, 96:192]" in text


def test_a_parameter_is_on_the_stages_that_use_it(show):
    first = show("sharding", "--param", "positions/table", "--mesh", "pipe=2,data=2")
    assert "ranks 0,1 " in first and "Pipeline: stage 0 alone." in first
    tied = show("sharding", "--param", "embedding/table", "--mesh", "pipe=3,data=1")
    assert "ranks 0,2 " in tied and "Pipeline: stage 0 and stage 2 alone." in tied


@pytest.mark.parametrize("spec", ["b/data f/model", "b/model,data f", "b f/data", "b s/model f/data", "f/data,model"])
@pytest.mark.parametrize("mesh", [{"data": 2, "model": 3}, {"model": 2, "data": 5}])
def test_every_rank_is_drawn_on_the_block_it_holds(spec, mesh):
    spec, shape = Spec.parse(spec), (7, 2, 4)
    shape = shape[: len(spec.dims)]
    cells = [
        cell.label for cell in ArraySharding.of(spec, shape, all_positions(mesh)).picture().drawing if cell.outline
    ]
    seen = {}
    for label in cells:
        ranks, index = label.split("\n")
        for rank in ranks.split(" ")[1].split(","):
            seen[int(rank)] = index.removesuffix(" empty")[1:-1].split(", ")
    for rank, where in enumerate(product(*(range(size) for size in mesh.values()))):
        block = spec.block(shape, MeshPosition(mesh, dict(zip(mesh, where))))
        whole = [":" if not axes else f"{part.start}:{part.stop}" for part, (_, axes) in zip(block, spec)]
        assert seen.pop(rank) == whole
    assert not seen


# --- collectives

#: Four ranks, before and after: the drawings that everybody knows, in numbers.
KNOWN = {
    "all_reduce": ([[1], [2], [3], [4]], [[10]] * 4),
    "all_gather": ([["A"], ["B"], ["C"], ["D"]], [["A", "B", "C", "D"]] * 4),
    "reduce_scatter": ([[1, 2, 3, 4]] * 4, [[4], [8], [12], [16]]),
    "all_to_all": (
        [[f"{letter}{part}" for part in range(4)] for letter in "ABCD"],
        [[f"{letter}{part}" for letter in "ABCD"] for part in range(4)],
    ),
    "broadcast": ([["A"], [""], [""], [""]], [["A"]] * 4),
    "send_receive": ([["A"], ["B"], ["C"], ["D"]], [["D"], ["A"], ["B"], ["C"]]),
}


def test_the_numbers_of_every_collective():
    assert KNOWN.keys() == EXAMPLES.keys()
    for name, (before, after) in KNOWN.items():
        ours = [[vector.tolist() for vector in vectors] for vectors in run_example(name, 4)]
        assert ours == [before, after], name


def test_a_collective_drawn(show):
    assert show("collective", "reduce_scatter", "--ranks", "2").splitlines()[:12] == drawn("""
reduce_scatter on 2 ranks

         rank 0     rank 1
        ┌───┬───┐  ┌───┬───┐
before  │ 1 │ 2 │  │ 1 │ 2 │
        └───┴───┘  └───┴───┘

         y = mesh.reduce_scatter(x)

        ┌───┐      ┌───┐
after   │ 2 │      │ 4 │
        └───┘      └───┘
""")


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("ranks", [2, 3, 12])
def test_collectives_on_other_numbers_of_ranks(show, name, ranks):
    text = show("collective", name, "--ranks", str(ranks))
    _, after = run_example(name, ranks)
    assert len(after) == ranks and f"{name} on {ranks} ranks" in text
    if name == "all_reduce":
        np.testing.assert_array_equal(after, ranks * (ranks + 1) // 2)
    assert f"rank {ranks - 1}" in text and max(map(len, text.splitlines())) <= 110


# --- what is refused

SHARDING = ["sharding", "b/data f", "--shape", "8,6", "--mesh"]
MISTAKES = {
    "write axes as in data=4,model=2": ["mesh", "nonsense"],
    "sizes are whole numbers from 1": ["mesh", "data=0"],
    "at most 1024 can be drawn": ["mesh", "data=2000"],
    'axis "data", which the mesh does not have; there are: model': [*SHARDING, "model=2"],
    "has 2 dims, the array has shape (8,)": ["sharding", "b/data f", "--shape", "8", "--mesh", "data=2"],
    "--shape 8,x: write whole numbers, as in 8,6": ["sharding", "b/data f", "--shape", "8,x", "--mesh", "data=2"],
    "cannot read sharding": ["sharding", "batch", "--shape", "8", "--mesh", "data=2"],
    "has 2000 blocks": [*SHARDING, "data=2000"],
    "--mesh is missing": SHARDING[:-1],
    "give SHARDING and --shape": ["sharding", "b/data", "--mesh", "data=2"],
    "either SHARDING and --shape, or --param": [*SHARDING, "data=2", "--param", "w"],
    "has no parameter 'w9'; it has, for example: embedding/table": ["sharding", "--param", "w9", "--mesh", "data=2"],
    "unknown model 'huge'": ["communication", "--model", "huge", "--mesh", "data=2"],
    "no customary layout for axis 'lines'": ["communication", "--mesh", "lines=2"],
    "too few for 99 stages; take fewer": ["communication", "--mesh", "pipe=99"],
    "'nonsense'; there are: all_reduce": ["collective", "nonsense"],
    "1 is not in the range": ["collective", "all_reduce", "--ranks", "1"],
    "no schedule 'nonsense'": ["schedule", "nonsense"],
    "one chunk of layers a stage, not 2": ["schedule", "1f1b", "--chunks", "2"],
    "is too long to draw": ["schedule", "naive", "--stages", "64", "--micro-batches", "512"],
    "write a picture as .svg or .png": ["mesh", "data=2", "--output", "mesh.pdf"],
    "cannot be written (No such file or directory)": ["mesh", "data=2", "--output", "/nowhere/at/all/mesh.svg"],
}


@pytest.mark.parametrize("message", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(capsys, message):
    with pytest.raises(SystemExit) as end:
        main(["show", *MISTAKES[message]])
    said = capsys.readouterr()
    assert end.value.code == 2 and not said.out
    assert said.err.startswith("spmd_engine: ") and said.err.count("\n") == 1 and message in said.err


@pytest.mark.parametrize("command", ["mesh", "sharding", "experts", "schedule", "collective"])
def test_help_teaches_by_example(capsys, command):
    main(["show", command, "--help"])
    said = capsys.readouterr().out
    assert f"  python -m spmd_engine show {command} " in said


def test_under_a_launcher_one_rank_speaks(capsys, monkeypatch):
    monkeypatch.setenv("PMI_RANK", "1")
    main(["show", "mesh", "data=2"])
    assert not capsys.readouterr().out
    monkeypatch.setenv("PMI_RANK", "0")
    main(["show", "mesh", "data=2"])
    assert "2 ranks" in capsys.readouterr().out
