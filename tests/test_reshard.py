"""Arrays cut, gathered and cut anew: every pair of shardings, their bytes, and the way back."""

from itertools import permutations, product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_device import FakeDevice
from numerics import frozen, normals
from on_ranks import DTYPES, assert_same, on_ranks, values
from spmd_engine import Mesh, run
from spmd_engine.arrays.backend import register_backend, unregister_backend
from spmd_engine.comm.place import all_places
from spmd_engine.errors import MeshError, NotationError
from spmd_engine.sharding import Spec, gather, reshard, reshard_plan, shard

DATA_MODEL = ["b s f", "b/data s f", "b s f/data", "b/data s f/model", "b/model s f/data", "b/data s/model f"]
DATA_MODEL += ["b s/data,model f", "b s/model,data f", "b/model,data s f", "b s f/model", "b s/model f"]
DATA_MODEL += ["b/model s/data f"]
CUBE = ["b s f", "b/a s f", "b/a,b s f", "b/b,a s f", "b/a,b,c s f", "b/c s/a f/b", "b s/a,b f", "b s/a,b f/c"]
CUBE += ["b/a s/b f/c", "b/c,b s f/a", "b s f/a,b,c", "b/b s f/c,a"]
MESHES = [({"data": 2, "model": 2}, DATA_MODEL), ({"data": 3, "model": 2}, DATA_MODEL)]
MESHES += [({"a": 2, "b": 2, "c": 2}, CUBE)]
each_mesh = pytest.mark.parametrize("axes, names", MESHES, ids=["2x2", "3x2", "2x2x2"])
SHAPES = [(5, 6, 7), (1, 3, 2)]  # uneven; with empty blocks


def numbered(shape, dtype=np.int64):
    """A whole array in which every element can be told from the others."""
    return frozen(np.arange(prod(shape)).reshape(shape).astype(dtype))


def on_mesh(axes, body):
    """What ``body(mesh)`` returns on each rank."""

    def rank():
        with Mesh(**axes) as mesh:
            return body(mesh)

    return run(rank, prod(axes.values()))


# --- the plan, without ranks

ON = {"data": 2, "model": 2, "expert": 2}


@pytest.mark.parametrize(
    "source, target, moves",
    [
        ("b f", "b f", "nothing to do"),
        ("b/data f/model", "b/data f/model", "nothing to do"),
        ("b f", "b/data f", "slice b by data"),
        ("b/data f", "b/data,model f/expert", "slice b by model, f by expert"),
        ("b/data f", "b f", "all_gather b over data"),
        ("b/data,model f", "b/data f", "all_gather b over model"),
        ("b/data,model f", "b f", "all_gather b over data,model"),
        ("b/data f/model", "b f", "all_gather f over model, then all_gather b over data"),
        ("b/data f", "b f/data", "all_to_all b -> f over data"),
        ("b/data,model f", "b f/data,model", "all_to_all b -> f over data,model"),
        ("b/data f/model", "b f/model,data", "all_to_all b -> f over data"),
        ("b/data f", "b f/model", "slice f by model, then all_gather b over data"),
        ("b/data f", "b f/model,data", "slice f by model, then all_to_all b -> f over data"),
        ("b/data,model f", "b f/model", "all_to_all b -> f over model, then all_gather b over data"),
        # What collectives in a row would send twice, or cannot do.
        ("b/data f/model", "b/model f/data", "exchange over data,model"),
        ("b/data f/model", "b f/data,model", "exchange over data,model"),
        ("b/data,model f", "b f/model,data", "exchange over data,model"),
        ("b/data,model f", "b/model,data f", "exchange over data,model"),
        ("b/data,model f", "b/model f", "exchange over data,model"),
        ("b/data f", "b/model f", "exchange over data"),  # along model everyone has the same
        ("b/data f", "b/model,data f", "exchange over data"),
        ("b/data f", "b f/data,model", "exchange over data"),
        ("b/data f/model s/expert", "b/data f/expert s/model", "exchange over model,expert"),
        ("b/data,model s f", "b s/model f/data", "exchange over data,model"),
        ("b/data s/model f v", "b s f/data v/model", "exchange over data,model"),
    ],
)
def test_plans(source, target, moves):
    plan = reshard_plan(source, target, ON)
    assert str(plan) == moves
    assert reshard_plan(Spec.parse(source), Spec.parse(target), ON) == plan


def test_axes_of_one_rank_cut_nothing():
    assert str(reshard_plan("b/data,model f", "b/model f/data", {"data": 1, "model": 2})) == "nothing to do"
    assert str(reshard_plan("b/data,model f", "b f/model,data", {"data": 1, "model": 2})) == (
        "all_to_all b -> f over model"
    )


@st.composite
def specs(draw, letters="bsf", axes=("x", "y", "z")):
    """Any sharding of three dims over three axes."""
    cuts = {letter: [] for letter in letters}
    for axis in draw(st.permutations(axes)):
        if letter := draw(st.sampled_from(["", *letters])):
            cuts[letter].append(axis)
    return Spec(tuple((letter, tuple(names)) for letter, names in cuts.items()))


def elements(spec, shape, place):
    """The numbers of the elements that a rank has."""
    return set(numbered(shape)[spec.block(shape, place)].ravel().tolist())


@settings(max_examples=500)
@given(specs(), specs(), st.tuples(*[st.integers(1, 3)] * 3), st.tuples(*[st.integers(0, 5)] * 3))
def test_no_plan_sends_more_than_what_ranks_lack(source, target, sizes, shape):
    """Every way has to bring each rank what its new block has and its old one had not; none brings more."""
    axes = dict(zip("xyz", sizes))
    plan = reshard_plan(source, target, axes)
    lacking = sum(len(elements(target, shape, p) - elements(source, shape, p)) for p in all_places(axes))
    assert sum(plan.sent(shape, np.int8, place.coordinates) for place in all_places(axes)) == lacking


@given(specs(), specs(), st.tuples(*[st.integers(1, 3)] * 3))
def test_the_moves_of_a_plan_lead_from_source_to_target(source, target, sizes):
    axes = dict(zip("xyz", sizes))
    plan = reshard_plan(source, target, axes)
    specs = [move.source for move in plan.moves] + [move.target for move in plan.moves[-1:]]
    assert [move.target for move in plan.moves[:-1]] == specs[1:-1]
    shape = (5, 4, 7)
    for place in all_places(axes):
        ends = (specs[0], specs[-1]) if specs else (source, source)
        assert [end.block(shape, place) for end in ends] == [s.block(shape, place) for s in (source, target)]


def test_what_a_plan_saves():
    """Gathering all and slicing again would always do; it sends more wherever blocks move."""
    shape, whole = (6, 6, 6), "b s f"
    for axes, names in MESHES:
        for source, target in permutations(names, 2):
            plans = reshard_plan(source, target, axes), reshard_plan(source, whole, axes)
            direct, gathered = (
                sum(p.sent(shape, float, place.coordinates) for place in all_places(axes)) for p in plans
            )
            assert direct < gathered or (direct == gathered and (target == whole or gathered == 0)), (source, target)


# --- every pair


def is_called(plan, move, shape, mesh):
    """Whether a move is a collective call here: an exchange of nothing, among these ranks, is none."""
    nothing = str(move).startswith("exchange") and not any(
        plan.sent(shape, np.int8, peer.coordinates) for peer in mesh.peers(move.over)
    )
    return bool(move.over) and not nothing


@each_mesh
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_pair_and_its_bytes(axes, names, shape):
    whole = numbered(shape)

    def body(mesh):
        for source, target in product(names, names):
            mesh.ledger.clear()
            plan = reshard_plan(source, target, mesh.axes)
            x = whole[Spec.parse(source).block(shape, mesh)]
            result = reshard(x, source, target, mesh, shape=shape, label="moved")
            assert_same(result, whole[Spec.parse(target).block(shape, mesh)], source, target)
            assert result.flags.c_contiguous or not plan.moves
            assert mesh.ledger.total().sent == plan.sent(shape, whole.dtype, mesh.coordinates), (source, target)
            assert mesh.ledger.total() == mesh.ledger.total(label="moved")
            assert mesh.ledger.total().calls == sum(is_called(plan, move, shape, mesh) for move in plan.moves)

    on_mesh(axes, body)


@each_mesh
def test_every_pair_without_being_told_the_shape(axes, names):
    whole = numbered((5, 6, 7))

    def body(mesh):
        for source, target in product(names, names):
            mesh.ledger.clear()
            plan = reshard_plan(source, target, mesh.axes)
            x = shard(whole, source, mesh)
            assert_same(reshard(x, f"{source} -> {target}", mesh), shard(whole, target, mesh), source, target)
            exchanged = str(plan).startswith("exchange")
            lengths = x.ndim * 8 * (mesh.axis_size(Spec.parse(source).axes) - 1) if exchanged else 0
            sent = plan.sent(whole.shape, whole.dtype, mesh.coordinates)
            assert mesh.ledger.total().sent == sent + lengths, (source, target)

    on_mesh(axes, body)


@pytest.mark.parametrize("check", [True, False])
def test_without_comparing_calls(check):
    whole = numbered((5, 6, 7))

    def rank():
        with Mesh(data=2, model=2, check=check) as mesh:
            for source, target in permutations(DATA_MODEL, 2):
                x = shard(whole, source, mesh)
                assert_same(reshard(x, source, target, mesh), shard(whole, target, mesh), source, target)

    run(rank, 4)


@given(specs(), specs(), st.tuples(*[st.integers(1, 2)] * 3), st.tuples(*[st.integers(0, 5)] * 3))
def test_any_pair_there_and_back(source, target, sizes, shape):
    whole = numbered(shape, np.int16)

    def body(mesh):
        x = shard(whole, source, mesh)
        y = reshard(x, source, target, mesh)
        assert_same(y, shard(whole, target, mesh))
        assert_same(reshard(y, target, source, mesh, shape=shape), x)
        assert_same(gather(y, target, mesh), whole)

    on_mesh(dict(zip("xyz", sizes)), body)


@pytest.mark.parametrize("dtype", [*DTYPES, np.dtype("S3"), np.dtype("i4,f8")], ids=str)
def test_any_dtype(dtype):
    whole = values((5, 4), dtype, 0) if dtype.kind in "biufcV" and not dtype.fields else np.zeros((5, 4), dtype)
    if dtype.kind == "S" or dtype.fields:
        whole.view(np.uint8)[...] = np.arange(whole.nbytes).reshape(5, -1) % 251

    def body(mesh):
        x = shard(whole, "b/data f/model", mesh)
        for target in "b f", "b/model f/data", "b f/model,data", "b/model f":
            assert_same(reshard(x, "b/data f/model", target, mesh), shard(whole, target, mesh))

    on_mesh({"data": 2, "model": 2}, body)


def spread(x):
    """The same values with gaps between them in memory."""
    big = np.zeros([2 * n for n in x.shape], x.dtype)
    big[tuple(slice(None, None, 2) for _ in x.shape)] = x
    return big[tuple(slice(None, None, 2) for _ in x.shape)]


def test_blocks_that_are_not_contiguous():
    whole = numbered((6, 5))

    def body(mesh):
        for source, target in permutations(["b/data f/model", "b/model f/data", "b f", "b f/model,data"], 2):
            result = reshard(spread(shard(whole, source, mesh)), source, target, mesh)
            assert_same(result, shard(whole, target, mesh))

    on_mesh({"data": 2, "model": 2}, body)


def test_an_array_on_a_device_stays_there():
    device = FakeDevice()
    register_backend(device)
    try:
        whole = numbered((5, 4))

        def body(mesh):
            for source, target in permutations(["b/data f/model", "b/model f/data", "b f", "b f/model,data"], 2):
                x = shard(device.asarray(whole), source, mesh)
                result = reshard(x, source, target, mesh)
                assert device.owns(result)
                assert_same(result.memory, shard(whole, target, mesh))

        on_mesh({"data": 2, "model": 2}, body)
    finally:
        unregister_backend(device)


# --- by weights

WEIGHTED = ["b s f", "b/data s f", "b/data:3:1 s f", "b s/data:1:2 f/model:0:1", "b/model,data:1:4 s f", "b s f/model"]


@pytest.mark.parametrize("told", [True, False], ids=["shape-told", "shape-asked"])
def test_every_pair_by_weights(told):
    whole, axes = numbered((7, 6, 5)), {"data": 2, "model": 2}

    def body(mesh):
        for source, target in product(WEIGHTED, WEIGHTED):
            mesh.ledger.clear()
            plan, x = reshard_plan(source, target, mesh.axes), shard(whole, source, mesh)
            result = reshard(x, source, target, mesh, shape=whole.shape if told else None, label="moved")
            assert_same(result, shard(whole, target, mesh), source, target)
            assert_same(gather(x, source, mesh), np.asarray(whole))
            if told:
                mesh.ledger.clear()
                plan.do(x, mesh, shape=whole.shape)
                assert mesh.ledger.total().sent == plan.sent(whole.shape, whole.dtype, mesh.coordinates)

    on_mesh(axes, body)
    for source, target in product(WEIGHTED, WEIGHTED):
        plan = reshard_plan(source, target, axes)
        ranks = all_places(axes)
        specs = Spec.parse(source), Spec.parse(target)
        old, new = ([elements(spec, whole.shape, rank) for rank in ranks] for spec in specs)
        sent = sum(plan.sent(whole.shape, np.int8, rank.coordinates) for rank in ranks)
        assert sent == sum(len(there - here) for here, there in zip(old, new, strict=True))


# --- shard and gather


def test_a_shard_is_a_contiguous_copy():
    whole = np.arange(12.0).reshape(3, 4)

    def body(mesh):
        for sharding in "b/data f", "b f/model", "b f":
            block = shard(whole, sharding, mesh)
            assert block.flags.c_contiguous and not np.may_share_memory(block, whole)
        assert mesh.ledger.total().calls == 0
        return shard(whole, "b/data f/model", mesh)

    blocks = on_mesh({"data": 2, "model": 2}, body)
    expected = [whole[:2, :2], whole[:2, 2:], whole[2:, :2], whole[2:, 2:]]
    for block, part in zip(blocks, expected):
        assert_same(block, part)


def test_gather_is_one_all_gather_a_letter():
    whole = numbered((5, 7))

    def body(mesh):
        x = shard(whole, "b/data,expert f/model", mesh)
        assert_same(gather(x, "b/data,expert f/model", mesh, label="seen"), whole)
        assert set(mesh.ledger.entries) == {("all_gather", axes, "seen") for axes in ("data,expert", "model")}
        return mesh.ledger.total().sent

    assert sum(on_mesh({"data": 2, "model": 2, "expert": 2}, body)) == whole.nbytes * (8 - 1)


def test_what_is_not_cut_costs_nothing():
    x = normals(3, 4)

    def body(mesh):
        assert gather(x, "b f", mesh) is x
        assert reshard(x, "b/data f", "b/data f", mesh) is x
        return mesh.ledger.total().calls

    assert on_mesh({"data": 2}, body) == [0, 0]


def test_a_number_has_no_letters():
    x = np.array(3.0)
    assert on_mesh({"data": 2}, lambda mesh: float(gather(shard(x, "", mesh), "", mesh))) == [3.0, 3.0]


# --- bytes by the formulas


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize(
    "source, target, operation, formula",
    [
        ("b f", "b/data f", None, lambda whole, n: 0),
        ("b/data f", "b f", "all_gather", lambda whole, n: whole * (n - 1) // n),
        ("b/data f", "b f/data", "all_to_all", lambda whole, n: whole * (n - 1) // n**2),
    ],
)
def test_bytes_of_each_collective(n, source, target, operation, formula):
    whole = normals(12, 24)

    def body(mesh):
        reshard(shard(whole, source, mesh), source, target, mesh)
        assert {key[0] for key in mesh.ledger.entries} == ({operation} if operation else set())
        return mesh.ledger.total().sent

    assert on_mesh({"data": n}, body) == [formula(whole.nbytes, n)] * n


def test_an_exchange_sends_to_nobody_what_he_has():
    """Swapped axes on 2 x 2: the ranks on the diagonal keep all they have, the other two swap theirs."""
    whole = normals(4, 6)

    def body(mesh):
        reshard(shard(whole, "b/data f/model", mesh), "b/data f/model -> b/model f/data", mesh, shape=whole.shape)
        return mesh.ledger.total("all_to_all").sent

    block = whole.nbytes // 4
    assert on_mesh({"data": 2, "model": 2}, body) == [0, block, block, 0]


def test_copies_share_the_work():
    """Of the two who have what a rank lacks, the one at its own place along model sends: not one of them to both."""
    whole = normals(8, 1)

    def body(mesh):
        reshard(shard(whole, "b/data f", mesh), "b/data f -> b/model f", mesh, shape=whole.shape)
        return mesh.ledger.total("all_to_all").sent

    half = whole.nbytes // 2
    assert on_mesh({"data": 2, "model": 2}, body) == [half, 0, 0, half]


# --- the backward


@each_mesh
def test_the_backward_is_the_way_back(axes, names):
    """<y, R x> = <R' y, x>, where x and y are arrays cut over ranks, copies alike, and each element counts once.

    Where no axis is left out of either sharding there are no copies, and R is a permutation of all ranks'
    elements: then this is the inner product of everything on all ranks, and R' its transpose.
    """
    shape = (5, 6, 7)
    whole_x, whole_y = normals(*shape, seed=1), normals(*shape, seed=2)

    def body(mesh):
        def inner(one, other, spec):
            copies = mesh.size // mesh.axis_size(Spec.parse(spec).axes)
            return np.vdot(one, other) / copies

        products = []
        for source, target in permutations(names, 2):
            x, y = shard(whole_x, source, mesh), shard(whole_y, target, mesh)
            there, back = reshard(x, source, target, mesh), reshard(y, target, source, mesh)
            products.append((inner(y, there, target), inner(back, x, source)))
        return products

    forward, backward = sum(map(np.array, on_mesh(axes, body))).T
    np.testing.assert_allclose(forward, backward, rtol=1e-12)
    np.testing.assert_allclose(forward, np.vdot(whole_y, whole_x), rtol=1e-12)


def test_without_copies_it_is_a_permutation_and_back_its_inverse():
    full = [spec for spec in CUBE if len(Spec.parse(spec).axes) == 3]
    assert len(full) >= 5

    def body(mesh):
        for source, target in permutations(full, 2):
            x = normals(*Spec.parse(source).local_shape((5, 6, 7), mesh), seed=mesh.rank)
            y = reshard(x, source, target, mesh)
            everything = [np.sort(mesh.all_gather(each.reshape(-1))) for each in (x, y)]
            np.testing.assert_array_equal(*everything)
            assert_same(reshard(y, target, source, mesh), np.asarray(x))

    on_mesh({"a": 2, "b": 2, "c": 2}, body)


# --- what is refused


@pytest.mark.parametrize(
    "source, target, error, words",
    [
        ("b/data f", "b s/data", NotationError, ['"b/data f" -> "b s/data"', "letters bf and bs differ", "same dims"]),
        ("b/data f", "f b", NotationError, ['"b/data f" -> "f b"', "transpose"]),
        ("b/data f", "b f/pipe", MeshError, ['"b/data f" -> "b f/pipe"', 'axis "pipe"', "has only data, model"]),
        ("b/data f", "b/model f/model", NotationError, ['axis "model" cuts b and f']),
        ("b/data f/", "b f", NotationError, ['cannot read sharding "b/data f/" at "f/"']),
    ],
)
def test_shardings_that_do_not_go_together(source, target, error, words):
    with pytest.raises(error) as raised:
        reshard_plan(source, target, {"data": 2, "model": 2})
    for each in words:
        assert each in str(raised.value)


@pytest.mark.parametrize("sides", [("b f",), ("b f -> b f -> b f",), ("b f", "b f"), ("b f -> b f",)])
def test_a_side_or_the_mesh_is_missing(sides):
    def body(mesh):
        complete = sides[-1] in ("b f", "b f -> b f") and sides != ("b f",)
        with pytest.raises(NotationError, match="reshard takes"):
            reshard(np.ones((2, 2)), *sides, mesh=None if complete else mesh)

    on_mesh({"data": 1}, body)


def test_the_forms_of_a_call():
    whole = numbered((4, 4))

    def body(mesh):
        x = shard(whole, "b/data f", mesh)
        forms = [
            reshard(x, "b/data f", "b f/data", mesh),
            reshard(x, "b/data f->b f/data", mesh),
            reshard(x, "b/data f -> b f/data", mesh=mesh),
            reshard(x, Spec.parse("b/data f"), Spec.parse("b f/data"), mesh=mesh),
            reshard_plan("b/data f", "b f/data", mesh.axes).do(x, mesh),
        ]
        for result in forms:
            assert_same(result, shard(whole, "b f/data", mesh))

    on_mesh({"data": 2}, body)


@pytest.mark.parametrize(
    "block, target, shape, words",
    [
        ((2, 3, 1), "b f/data", None, "the array has 3 dims"),
        ((2, 3), "b f/data", (5, 3), r"has the block \(3, 3\) at data=0; the block there is \(2, 3\)"),
        ((2, 3), "b f/data", (4, 4), r"has the block \(2, 4\) at data=[01]; the block there is \(2, 3\)"),
    ],
)
def test_a_block_that_does_not_fit(block, target, shape, words):
    def body(mesh):
        reshard(np.ones(block), "b/data f", target, mesh, shape=shape)

    with pytest.raises(NotationError, match=words):
        on_mesh({"data": 2}, body)


@pytest.mark.parametrize("target", ["b f", "b f/data"])
def test_blocks_that_are_cut_otherwise(target):
    """Three rows and one are not how four are cut in two; both ranks see it in what comes together."""

    def body(mesh):
        with pytest.raises(NotationError, match=r"4 long together along b, so this rank's must be 2; it is [31]"):
            reshard(np.ones((3 - 2 * mesh.rank, 4)), "b/data f", target, mesh)

    on_mesh({"data": 2}, body)


def test_all_ranks_raise_alike_before_they_exchange():
    """Six rows cut by data, then by model, are 2, 1, 2 and 1."""

    def body(mesh):
        rows = [2, 1, 1, 2][mesh.rank]
        with pytest.raises(NotationError) as raised:
            reshard(np.ones((rows, 4)), "b/data,model f", "b/model,data f", mesh)
        return str(raised.value)

    texts = on_mesh({"data": 2, "model": 2}, body)
    assert len(set(texts)) == 1
    assert "has the block (2, 4) at data=1, model=0; the block there is (1, 4)" in texts[0]


# --- under MPI


@pytest.mark.parametrize(
    "ranks, axes",
    [
        pytest.param(None, {"data": 3}, id="mpi-3", marks=pytest.mark.mpi(ranks=3)),
        pytest.param(None, {"data": 2, "model": 2}, id="mpi-4", marks=pytest.mark.mpi(ranks=4)),
        pytest.param(4, {"data": 2, "model": 2}, id="threads-4"),
    ],
)
def test_on_threads_and_on_mpi(ranks, axes):
    whole = normals(5, 6, 7)
    names = [name for name in DATA_MODEL if set(Spec.parse(name).axes) <= set(axes)]

    def program():
        with Mesh(**axes) as mesh:
            for source, target in permutations(names, 2):
                x = shard(whole, source, mesh)
                assert_same(reshard(x, source, target, mesh), shard(whole, target, mesh), source, target)
            assert_same(gather(shard(whole, names[1], mesh), names[1], mesh), np.asarray(whole))

    on_ranks(program, ranks)
