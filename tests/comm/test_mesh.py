"""The mesh: ranks on named axes, their groups, and what belongs to a node."""

import inspect

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads, world
from spmd_engine.axes import all_positions, checked_axes, parse_axes
from spmd_engine.comm import Ledger
from spmd_engine.comm.agreement.rank_zero import share_array, text_from_rank_zero
from spmd_engine.comm.communicators.threads import solo
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.errors import MeshError, UsageError
from support.on_ranks import assert_same

CUBE = {"data": 2, "pipe": 3, "model": 2}


def on_cube(program):
    """``program(mesh)`` on each of the twelve ranks of a mesh of three axes."""

    def on_mesh():
        with Mesh(**CUBE) as mesh:
            return program(mesh)

    return run_threads(on_mesh, 12)


def members(mesh, over):
    """The ranks of a group in its order."""
    return mesh.all_gather(np.array([mesh.rank]), over=over).tolist()


# --- coordinates and groups


def test_the_last_named_axis_varies_fastest():
    expected = [dict(zip(CUBE, where)) for where in np.ndindex(2, 3, 2)]
    assert on_cube(lambda mesh: mesh.coordinates) == expected
    assert on_cube(lambda mesh: mesh.ranks.tolist())[7] == np.arange(12).reshape(2, 3, 2).tolist()


def test_without_axes_all_ranks_are_data():
    assert run_threads(lambda: (dict(Mesh().axes), Mesh().coordinates), 2) == [
        ({"data": 2}, {"data": r}) for r in range(2)
    ]


ORDERS = [
    ("data", [2, 8]),
    ("pipe", [6, 8, 10]),
    ("model", [8, 9]),
    (("data", "model"), [2, 3, 8, 9]),
    (("model", "data"), [2, 8, 3, 9]),
    (["pipe", "model"], [6, 7, 8, 9, 10, 11]),
    (("model", "pipe"), [6, 8, 10, 7, 9, 11]),
    (("model", "pipe", "data"), [0, 6, 2, 8, 4, 10, 1, 7, 3, 9, 5, 11]),
    (("data", "pipe", "model"), list(range(12))),
    (None, list(range(12))),
    ((), [8]),
]


@pytest.mark.parametrize("over, expected", ORDERS)
def test_a_group_has_the_ranks_that_differ_along_its_axes(over, expected):
    def program(mesh):
        group = mesh.group(over)
        assert (group.size, group.rank) == (mesh.axis_size(over), mesh.index(over))
        assert mesh.ranks[tuple(mesh.coordinates.values())] == mesh.rank
        return members(mesh, over)

    groups = on_cube(program)
    assert groups[8] == expected  # data=1, pipe=1, model=0
    assert all(rank in group and groups[group[0]] == group for rank, group in enumerate(groups))
    assert sorted(sum({tuple(group): group for group in groups}.values(), [])) == list(range(12))


@pytest.mark.parametrize("over, axes", [("model", "model"), (("model", "data"), "model,data"), ((), "no axis")])
def test_a_group_is_named_by_its_axes(over, axes):
    assert on_cube(lambda mesh: mesh.group(over).axes) == [axes] * 12


def test_a_group_is_made_once():
    assert all(on_cube(lambda mesh: mesh.group("data") is mesh.group(("data",))))
    assert all(on_cube(lambda mesh: mesh.group(iter(["data", "model"])) is mesh.group(("data", "model"))))


def test_started_calls_take_the_arguments_of_blocking_ones():
    """By position and by name; ``wait`` returns what the blocking method does."""
    calls = {
        "all_reduce": {"arr": np.arange(4.0), "op": "max"},
        "all_gather": {"arr": np.arange(4.0), "axis": 0, "sizes": [4, 4], "label": "gathered"},
        "reduce_scatter": {"arr": np.arange(4.0), "axis": 0, "op": "mean", "sizes": [1, 3]},
        "all_to_all": {"arr": np.arange(4.0), "axis": 0, "concat_axis": 0, "splits": [3, 1]},
        "broadcast": {"arr": np.arange(4.0), "root": 1},
    }

    def program(mesh):
        for name, options in calls.items():
            expected = getattr(mesh, name)(**options, over="model")
            result = getattr(mesh, f"start_{name}")(**options, over="model").wait()
            assert str(result) == str(expected), name
            assert inspect.signature(getattr(mesh, f"start_{name}")) == inspect.signature(getattr(mesh, name))
        assert_same(
            mesh.start_reduce_scatter(np.arange(4.0), 0, "sum", over="model").wait(),
            mesh.reduce_scatter(np.arange(4.0), over="model"),
        )
        sending = mesh.start_send(dest_id=1 - mesh.coordinates["model"], arr=np.arange(3), over="model")
        received = mesh.start_receive(src_id=1 - mesh.coordinates["model"], over="model").wait()
        assert (sending.wait(), received.tolist()) == (None, [0, 1, 2])
        assert mesh.start_barrier("model").wait() is None

    on_cube(program)


def test_a_mesh_has_the_collectives_of_its_groups():
    def program(mesh):
        x, total = np.full(4, float(mesh.rank)), sum(members(mesh, "model"))
        assert_same(mesh.all_reduce(x, over="model"), np.full(4, float(total)))
        assert_same(mesh.all_reduce(x, "mean", over="model"), np.full(4, total / 2))
        assert_same(mesh.start_all_reduce(x, over="model").wait(), np.full(4, float(total)))
        assert_same(mesh.reduce_scatter(x, over="model"), np.full(2, float(total)))
        assert_same(mesh.all_gather(x[None], 1, over="model"), np.repeat(members(mesh, "model"), 4.0)[None] * 1.0)
        assert_same(mesh.all_to_all(x, over="model"), np.repeat(members(mesh, "model"), 2) * 1.0)
        assert_same(mesh.broadcast(x, 1, over="model"), np.full(4, members(mesh, "model")[1] * 1.0))
        if mesh.coordinates["model"]:
            mesh.send(0, x, over="model")
        else:
            assert_same(mesh.receive(1, over="model"), x + 1)
        mesh.barrier()
        mesh.barrier("pipe")

    on_cube(program)


def test_two_meshes_at_once_do_not_mix_their_messages():
    def program():
        with Mesh(a=2, b=2) as one, Mesh(a=2, b=2) as other:
            factors = {one: 1.0, other: 10.0}
            for mesh in factors:
                mesh.group("b")  # made when first asked for, by all its ranks in the same order
            order = [one, other] if one.rank % 2 else [other, one]
            started = {mesh: mesh.start_all_reduce(np.full(3, factors[mesh]), over="b") for mesh in order}
            for mesh, pending in started.items():
                assert_same(pending.wait(), np.full(3, 2 * factors[mesh]))

    run_threads(program, 4)


# --- uneven stages


def test_a_group_over_uneven_stages_has_all_ranks_of_each():
    def program():
        with Mesh(data=2, pipe=2, model=(1, 2)) as mesh:
            over = "pipe", "model"
            counted, sums = mesh.summed_over(("data", "pipe")), mesh.group(over).all_gather(np.array([mesh.rank]))
            places = [list(place.coordinates.values()) for place in mesh.peers(None)]
            assert places[mesh.index(None)] == list(mesh.coordinates.values())
            assert mesh.axis_size(over) == 3 and mesh.axis_size("pipe") == 2 and mesh.axis_size(None) == 6
            return mesh.axes["model"], mesh.index(over), sums.tolist(), counted, places

    found = run_threads(program, 6)
    assert [size for size, *_ in found] == [1, 2, 2] * 2
    assert [index for _, index, *_ in found] == [0, 1, 2] * 2
    assert [ranks for _, _, ranks, *_ in found] == [[0, 1, 2]] * 3 + [[3, 4, 5]] * 3
    assert [counted for *_, counted, _ in found] == [(("data", "pipe", "model"), at) for at in (1, 1, 0) * 2]
    assert found[0][-1] == [[0, 0, 0], [0, 1, 0], [0, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]]


def test_a_group_over_uneven_stages_alone_is_refused():
    text = "mesh pipe=2,model=2|1: along pipe alone its stages are uneven; add model to pipe"
    raises(MeshError, text, lambda: Mesh(pipe=2, model=(2, 1)).group("pipe"), 3)
    raises(MeshError, "model=1|2|1 has 3 sizes: one for each stage", lambda: Mesh(pipe=2, model=(1, 2, 1)), 4)
    raises(MeshError, "model=1|2 has 2 sizes: one for each stage", lambda: Mesh(data=2, model=(1, 2)), 2)
    assert parse_axes("pipe=2,model=2|2") == {"pipe": 2, "model": 2}


# --- mistakes


def raises(error, text, do, ranks=1):
    with pytest.raises(error) as caught:
        run_threads(do, ranks)
    assert text in str(caught.value)


@pytest.mark.parametrize("over", ["nodel", ("data", "nodel")])
def test_an_unknown_axis(over):
    text = "unknown mesh axis 'nodel' of mesh data=2,model=1; did you mean 'model'? There are: model, data"
    raises(MeshError, text, lambda: Mesh(data=2, model=1).group(over), 2)
    raises(MeshError, text, lambda: Mesh(data=2, model=1).axis_size(over), 2)
    raises(MeshError, text, lambda: Mesh(data=2, model=1).index(over), 2)


def test_an_axis_named_twice():
    raises(MeshError, "data, data: name each axis once", lambda: Mesh().group(("data", "data")))


def test_a_product_that_is_not_the_number_of_ranks():
    text = "mesh data=4,model=2 needs 8 ranks, but there are 3. Change the sizes, or call run_threads(..., ranks=8)"
    raises(MeshError, text, lambda: Mesh(data=4, model=2), 3)
    with pytest.raises(MeshError, match="but there are 1. Change the sizes, or start with: mpiexec -n 8 "):
        Mesh(solo(), data=4, model=2)


@pytest.mark.parametrize("axes", ["data=2", 2, {"data": 2}])
def test_axes_without_names_are_refused(axes):
    with pytest.raises(UsageError, match=r"give axes by name, as in Mesh\(data=2, model=2\)"):
        Mesh(axes)


@pytest.mark.parametrize("size", [0, -1, 1.0, "1", None, True])
def test_sizes_are_whole_numbers_from_one(size):
    raises(MeshError, f"mesh axis 'data' has size {size!r}; sizes are whole", lambda: Mesh(data=size))


@pytest.mark.parametrize(
    "axes, text",
    [
        ({"data": 10**30}, "mesh data=1000000000000000000000000000000: the product of the sizes is above 65536"),
        ({"data": 300, "model": 300}, "mesh data=300,model=300: the product of the sizes is above 65536"),
        ({"pipe": 2, "model": [1, 10**14]}, "the product of the sizes is above 65536"),
        ({"pipe": 2, "model": [0, 3]}, "mesh axis 'model' has size [0, 3]; sizes are whole numbers from 1"),
        ({"pipe": 2, "model": [1, "2"]}, "mesh axis 'model' has size [1, '2']; sizes are whole numbers from 1"),
        ({"pipe": 2, "model": []}, "model= has 0 sizes: one for each stage is needed"),
    ],
)
def test_axes_that_no_world_has_are_refused_when_they_are_read(axes, text):
    for read in (checked_axes, all_positions, lambda axes: ParallelConfig(mesh=axes)):
        with pytest.raises(MeshError) as error:
            read(axes)
        assert text in str(error.value)


@pytest.mark.parametrize(
    "text, axes",
    [
        ("data=4", {"data": 4}),
        ("data=4,model=2", {"data": 4, "model": 2}),
        (" model = 2 , data=4,", {"model": 2, "data": 4}),
    ],
)
def test_parse_axes(text, axes):
    assert parse_axes(text) == axes
    assert list(parse_axes(text)) == list(axes)  # their order says where they lie
    assert parse_axes(str(run_threads(lambda: Mesh(**axes), np.prod(list(axes.values())))[0])) == axes


@pytest.mark.parametrize(
    "text, error",
    [
        ("", "names no axis"),
        (" , ", "names no axis"),
        ("data", "cannot read mesh 'data' at 'data'; write axes as in data=4,model=2"),
        ("data=\N{SUPERSCRIPT TWO}", "cannot read mesh 'data=²' at 'data=²'; write axes as in data=4,model=2"),
        ("data=", "at 'data='"),
        ("data=4,model=x", "at 'model=x'"),
        ("data=-1", "at 'data=-1'"),
        ("data=4;model=2", "at 'data=4;model=2'"),
        ("=4", "at '=4'"),
        ("2d=4", "at '2d=4'"),
        ("data=2,data=2", "names axis 'data' twice"),
    ],
)
def test_what_parse_axes_cannot_read(text, error):
    with pytest.raises(MeshError) as caught:
        parse_axes(text)
    assert error in str(caught.value)


def test_mesh_errors_are_usage_errors():
    assert issubclass(MeshError, UsageError)


# --- nodes


def test_ranks_of_a_node_are_kept_together():
    """Dealt out to two nodes in turn, but the model axis stays inside one."""

    def program():
        with Mesh(data=2, model=3) as mesh:
            nodes = [mesh.nodes[rank] for rank in members(mesh, "model")]
            return mesh.ranks.tolist(), mesh.node_count, nodes, mesh.group().rank

    results = run_threads(program, 6, nodes=["east", "west"] * 3)
    for rank, (ranks, node_count, nodes, place) in enumerate(results):
        assert ranks == [[0, 2, 4], [1, 3, 5]]
        assert node_count == 2
        assert nodes == [["east", "west"][rank % 2]] * 3
        assert place == [0, 3, 1, 4, 2, 5][rank]  # of a group over all axes, in the mesh's order


def test_collectives_over_ranks_dealt_out_to_nodes():
    def program():
        with Mesh(data=2, model=2) as mesh:
            return mesh.all_gather(np.array([mesh.rank])).tolist(), members(mesh, "data")

    results = run_threads(program, 4, nodes=["a", "b", "b", "a"])
    assert [whole for whole, _ in results] == [[0, 3, 1, 2]] * 4
    assert [data for _, data in results] == [[0, 1], [0, 1], [3, 2], [3, 2]]


def test_an_order_places_ranks_and_rank_zero_reads_wherever_it_is():
    def program():
        with Mesh(data=2, model=2, order=[3, 1, 0, 2]) as mesh:
            world = mesh.group()
            shared = share_array(world, [np.arange(3)] if mesh.rank == 0 else None)
            return mesh.ranks.tolist(), text_from_rank_zero(world, lambda: str(mesh.rank)), shared.tolist(), world.rank

    for rank, (ranks, reader, shared, place) in enumerate(run_threads(program, 4, nodes=["a", "b", "a", "b"])):
        assert ranks == [[3, 2], [0, 1]]  # numbers are those of ranks counted node by node: 0, 2, 1, 3
        assert reader == "0" and shared == [0, 1, 2] and place == [2, 3, 1, 0][rank]
    with pytest.raises(MeshError, match="rank order 0,0: it must have each of 0 to 1 once"):
        run_threads(lambda: Mesh(data=2, order=[0, 0]), 2)


# --- the end of a mesh


def test_close_frees_what_the_mesh_made_and_nothing_else():
    class Freed(list):
        def watch(self, comm):
            comm.free = lambda: self.append(comm)

    def program():
        freed = Freed()
        with Mesh(data=2, model=2) as mesh:
            made = [mesh.group(over).comm for over in ("data", "model", ("model", "data"), ())]
            assert mesh.group().comm is world()  # in the same order: the mesh needs no other
            for comm in (*made, world()):
                freed.watch(comm)
        assert freed == made
        mesh.close()  # again: nothing is left to free
        assert freed == made

    run_threads(program, 4)


def test_with_closes_after_an_error_too():
    def program():
        freed = []
        with pytest.raises(ZeroDivisionError), Mesh(data=2) as mesh:
            mesh.group(()).comm.free = lambda: freed.append(True)
            raise ZeroDivisionError
        assert freed == [True]

    run_threads(program, 2)


def test_a_ledger_and_a_communicator_may_be_given():
    def program():
        ledger, comm = Ledger(), world().subset([1, 0])
        mesh = Mesh(comm, data=2, ledger=ledger)
        mesh.all_reduce(np.ones(3))
        assert mesh.rank == 1 - world().rank
        assert ledger.total("all_reduce").calls == 1

    run_threads(program, 2)


def open_and_close(meshes, **axes):
    for i in range(meshes):
        with Mesh(**axes) as mesh:
            for over in axes:
                assert mesh.all_reduce(np.array(i), over=over) == i * mesh.axis_size(over)


@pytest.mark.parametrize("over", ["data", None], ids=["subset", "all ranks"])
def test_a_closed_mesh_refuses_calls(over):
    def program():
        with Mesh(data=2, model=2) as mesh:
            group = mesh.group(over)
            group.barrier()
        for call in (lambda: mesh.barrier(over), group.barrier, group.start_barrier, lambda: group.receive(0)):
            with pytest.raises(MeshError, match="is closed, by its 'with' or close"):
                call()

    run_threads(program, 4)


@pytest.mark.mpi(ranks=2)
def test_meshes_of_the_same_ranks_share_a_communicator():
    """So there may be any number of them, though MPI libraries refuse some two thousand communicators."""
    used = set()
    for _ in range(50):
        with Mesh(data=2, model=1) as mesh:
            assert mesh.all_reduce(np.array(1), over="data") == 2
            used.add(id(mesh.group("data").comm))
    assert len(used) == 1


@pytest.mark.soak
@pytest.mark.mpi(ranks=2, timeout_s=200)
def test_meshes_by_the_thousand():
    """MPI libraries refuse some two thousand communicators that are not given back."""
    open_and_close(2100, data=2, model=1)


@pytest.mark.soak
@pytest.mark.mpi(ranks=4, timeout_s=300)
def test_many_meshes_of_several_groups():
    open_and_close(5000, data=2, model=2)


@pytest.mark.mpi(ranks=4)
@pytest.mark.parametrize("over, expected", [("data", [0, 2]), ("model", [0, 1]), (("model", "data"), [0, 2, 1, 3])])
def test_groups_under_mpi(over, expected):
    with Mesh(data=2, model=2) as mesh:
        group = members(mesh, over)
        assert mesh.rank > 0 or group == expected
        assert mesh.group(over).rank == mesh.index(over) == group.index(mesh.rank)


@pytest.mark.mpi(ranks=2)
def test_a_group_may_be_made_while_others_wait_for_this_rank():
    """Rank 0 is the first to make a communicator, and rank 1 waits for a sum that both have begun."""
    pending = Mesh(timeout=100).start_all_reduce(np.ones(100_000))
    if world().rank == 1:
        pending.wait()
    world().subset([1, 0]).free()
    pending.wait()
