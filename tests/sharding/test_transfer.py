"""The exchange between two placements: what arrives, its bytes, its memory, and the adjoint that adds."""

from contextlib import contextmanager

import ml_dtypes
import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.arrays.backend import CPU
from spmd_engine.axes import all_positions
from spmd_engine.errors import UsageError
from spmd_engine.sharding import Layout
from spmd_engine.sharding.placement import ArrayPlacement, Placement
from spmd_engine.sharding.rectangles import Rectangle
from spmd_engine.sharding.transfer import plan_transfer
from support.numerics import normals
from support.on_ranks import on_ranks
from support.pairwise import every_pair, in_turn
from support.traced_memory import peak_of

RANKS = [1, 2, 3, 6, *(pytest.param(n, marks=pytest.mark.soak) for n in (4, 8))]
SHAPE = (11, 6)


def of_spec(spec, axes, shape=SHAPE, dtype=np.float64, **options):
    return ArrayPlacement.of_spec(spec, shape, dtype, all_positions(axes), **options)


def rows(*lengths, halo=(0, 0), shape=SHAPE, dtype=np.float64):
    """So many rows on each rank, and beside them the halo's, where there are so many."""

    def part(start, stop):
        return (Rectangle((start, 0), (stop, shape[1])),)

    ends = np.cumsum([0, *lengths]).tolist()
    pairs = list(zip(ends, ends[1:]))
    owned = [part(a, b) for a, b in pairs]
    held = [part(max(0, a - halo[0]), min(shape[0], b + halo[1])) if a < b else part(a, b) for a, b in pairs]
    return ArrayPlacement.of_rectangles(shape, dtype, held, owned)


def zigzag(ranks, shape=SHAPE, dtype=np.float64):
    """A zigzag sequence: each rank holds an early and a late run of rows."""
    place = all_positions({"context": ranks})[0]
    held = []
    for positions in Layout.for_mesh(place, zigzag=True).positions_by_rank(shape[0], place):
        runs = np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1)
        held.append([Rectangle((int(run[0]), 0), (int(run[-1]) + 1, shape[1])) for run in runs if len(run)])
    return ArrayPlacement.of_rectangles(shape, dtype, held)


def cases(n):
    """Pairs of placements on n ranks, by name."""
    line = {"data": n}
    square = {"data": n // 2, "model": 2} if n % 2 == 0 else {"data": n, "model": 1}
    uneven = [11 * i // (n * (n + 1) // 2) for i in range(n, 0, -1)]  # the last, perhaps, none
    uneven[0] += 11 - sum(uneven)
    backwards = ArrayPlacement.of_rectangles(SHAPE, np.float64, rows(*uneven).held[::-1])
    return {
        "cut otherwise": (of_spec("b/data d/model", square), of_spec("b/model d/data", square)),
        "copies to parts": (of_spec("b d/model", square), of_spec("b/data d", square)),
        "gathered": (of_spec("b/data d", line), of_spec("b d", line)),
        "parts to a few": (of_spec("b/data d", line), of_spec("b d/model", square, among={"data": (0,)})),
        "intervals": (rows(*uneven), of_spec("b d/data", line)),
        "the other way round": (rows(*uneven), backwards),
        "zigzag": (zigzag(n), of_spec("s/data d", line)),
        "to zigzag": (rows(*uneven), zigzag(n)),
        "halos": (of_spec("h/data w", line), of_spec("h/data w", line, halos={"h": (1, 2)})),
        "halos one way": (rows(*uneven), rows(*uneven, halo=(0, 2))),
        "halos past a neighbour": (rows(*uneven), rows(*uneven, halo=(5, 4))),
        "halos of halos": (rows(*uneven, halo=(1, 1)), rows(*uneven[::-1], halo=(2, 0))),
    }


each_case = pytest.mark.parametrize("case", cases(1))
each_number = pytest.mark.parametrize("n", RANKS)


def placed(array, whole, rank):
    """A rank's blocks of the whole array."""
    return [whole[(..., *each.index)].copy() for each in array.held[rank]]


def elements(array, rank):
    """Which elements a rank holds, by brute force."""
    mask = np.zeros(array.shape, bool)
    for each in array.held[rank]:
        mask[(..., *each.index)] = True
    return mask


def execute(operation, n, blocks, **options):
    """Every rank's result for every rank's ``blocks``, and what its ledger counted."""

    def program():
        with Mesh(rank=n) as mesh:
            result = operation.execute(mesh.group(), blocks[mesh.rank], **options)
            return result, mesh.ledger.total().sent

    results, sent = zip(*run_threads(program, n))
    assert list(sent) == [operation.bytes_sent(rank) for rank in range(n)]
    return results


# --- what arrives, and the bytes


@every_pair(case=list(cases(1)), n=RANKS, piece_bytes={"at-once": 1 << 20, "in-pieces": 40})
def test_everyone_has_what_is_placed_there(case, n, piece_bytes):
    source, target = cases(n)[case]
    whole = np.arange(66.0).reshape(SHAPE)
    plan = plan_transfer(Placement({"x": source}), Placement({"x": target}), piece_bytes=piece_bytes)
    results = execute(plan, n, [{"x": placed(source, whole, rank)} for rank in range(n)])
    for rank, result in enumerate(results):
        for block, expected in zip(result["x"], placed(target, whole, rank), strict=True):
            np.testing.assert_array_equal(block, expected, strict=True)


@each_case
def test_parts_of_a_transfer_are_its_elements(case, n=4):
    """In portions, unevenly; and all portions but the last again at once."""
    source, target = cases(n)[case]
    whole = np.arange(1.0, 67.0).reshape(SHAPE)
    plan = plan_transfer(Placement({"x": source}), Placement({"x": target}))

    def program():
        with Mesh(rank=n) as mesh:
            rank, nothing = mesh.rank, np.zeros(SHAPE)
            out, again = ({"x": placed(target, nothing, rank)} for _ in range(2))
            sets = [{"x": placed(source, x, rank)} for x in (whole, whole)]

            def move(start, stop, blocks):
                part = plan.part(rank, start, stop, 7)
                received = part.exchange(mesh.group(), part.pack(sets, CPU), "part")
                part.unpack(received, [{"x": placed(target, nothing, rank)}, blocks])

            for start, stop in (0, 2), (2, 3), (3, 7):
                move(start, stop, out)
            sent = mesh.ledger.total().sent
            move(0, 3, again)
            move(3, 7, again)
            return out["x"], again["x"], sent

    for rank, (out, again, sent) in enumerate(run_threads(program, n)):
        received = np.where(elements(source, rank), 0, whole)
        assert sent == 2 * plan.bytes_sent(rank)
        for found in out, again:
            for block, expected in zip(found, placed(target, received, rank), strict=True):
                np.testing.assert_array_equal(block, expected, strict=True)


@in_turn(2, case=list(cases(1)), piece_bytes={"at-once": 1 << 20, "in-pieces": 40})
def test_several_sets_of_blocks_move_in_the_collectives_of_one(case, piece_bytes, n=4):
    source, target = cases(n)[case]
    wholes = [np.arange(66.0).reshape(SHAPE) + 100 * number for number in range(3)]
    plan = plan_transfer(Placement({"x": source}), Placement({"x": target}), piece_bytes=piece_bytes)

    def program():
        with Mesh(rank=n) as mesh:
            sets = [
                ({"x": placed(source, whole, mesh.rank)}, {"x": placed(target, -whole, mesh.rank)}) for whole in wholes
            ]
            plan.execute_all(mesh.group(), sets)
            return [out["x"] for _, out in sets], mesh.ledger.total()

    for rank, (found, moved) in enumerate(run_threads(program, n)):
        assert moved.calls == sum(plan.rounds.values()) and moved.sent == len(wholes) * plan.bytes_sent(rank)
        for blocks, whole in zip(found, wholes, strict=True):
            for block, expected in zip(blocks, placed(target, whole, rank), strict=True):
                np.testing.assert_array_equal(block, expected, strict=True)


@in_turn(2, case=list(cases(1)), n=RANKS)
def test_what_a_rank_lacks_comes_once_and_nothing_else(case, n):
    source, target = cases(n)[case]
    plan = plan_transfer(Placement({"x": source}), Placement({"x": target}))
    lacking = [8 * int((elements(target, rank) & ~elements(source, rank)).sum()) for rank in range(n)]
    assert [plan.bytes_received(rank) for rank in range(n)] == lacking
    assert sum(plan.bytes_sent(rank) for rank in range(n)) == sum(lacking)


@pytest.mark.parametrize("n", [3, 8])
def test_several_arrays_and_dtypes_are_one_transfer(n):
    shapes = {"matrix": (7, 5), "number": (), "nothing": (0, 3), "bits": (9,), "long": (4, 3, 2, 5)}
    dtypes = {"matrix": np.float32, "number": np.float32, "nothing": np.int8, "bits": bool, "long": ml_dtypes.bfloat16}
    rng = np.random.default_rng(0)
    whole = {name: np.asarray(rng.integers(0, 2, shape)).astype(dtypes[name]) for name, shape in shapes.items()}
    axes = {"data": n}
    before = {"matrix": "a/data b", "number": "", "nothing": "a b/data", "bits": "a/data", "long": "a b c d/data"}
    after = {"matrix": "a b/data", "number": "", "nothing": "a/data b", "bits": "a", "long": "a/data b c d"}
    source, target = (
        Placement(
            {
                name: of_spec(spec, axes, shapes[name], dtypes[name], among=among if name == "number" else None)
                for name, spec in specs.items()
            }
        ).checked()
        for specs, among in ((before, {"data": (1,)}), (after, None))
    )
    plan = plan_transfer(source, target, piece_bytes=64)
    blocks = [{name: placed(array, whole[name], rank) for name, array in source.items()} for rank in range(n)]
    for rank, result in enumerate(execute(plan, n, blocks)):
        for name, array in target.items():
            for block, expected in zip(result[name], placed(array, whole[name], rank), strict=True):
                np.testing.assert_array_equal(block, expected, strict=True)


def test_from_one_set_of_ranks_to_another():
    """From a mesh of 2 x 2 on ranks 0 to 3 to one of 3 on ranks 3 to 5: rank 3 keeps what it has."""
    whole = normals(*SHAPE)
    source = Placement({"x": of_spec("b/data d/model", {"data": 2, "model": 2})}).on([0, 1, 2, 3], 6)
    target = Placement({"x": of_spec("b/data d", {"data": 3})}).on([5, 4, 3], 6)
    plan = plan_transfer(source, target)
    assert source.nbytes(5) == target.nbytes(0) == 0 and target.nbytes(4) == 4 * 6 * 8
    results = execute(plan, 6, [{"x": placed(source["x"], whole, rank)} for rank in range(6)])
    for rank, first in (5, 0), (4, 4), (3, 8):
        np.testing.assert_array_equal(results[rank]["x"][0], whole[first : first + 4])
    assert results[0]["x"] == [] and plan.bytes_received(3) == 3 * 3 * 8  # its rows' other columns


def test_neighbours_on_the_node_give_first_and_copies_share_the_work():
    everywhere = of_spec("b d", {"data": 4}, among={"data": (0, 1, 2)}, shape=(6, 4))
    names = [f"x{i}" for i in range(4)]
    source = Placement(dict.fromkeys(names, everywhere))
    target = Placement(dict.fromkeys(names, of_spec("b d", {"data": 4}, among={"data": (3,)}, shape=(6, 4))))

    def sent(nodes):
        plan = plan_transfer(source, target, nodes=nodes)
        return [plan.bytes_sent(rank) // (24 * 8) for rank in range(4)]

    assert sent(None) == [2, 1, 1, 0]
    assert sent("aabb") == [0, 0, 4, 0]
    assert sent("abab") == [0, 4, 0, 0]
    assert sent("aaab") == [2, 1, 1, 0]


def test_into_memory_that_is_there_in_part_already():
    """A halo's target is its source with room around it."""
    whole, n = normals(*SHAPE), 3
    source, target = of_spec("h/data w", {"data": n}), of_spec("h/data w", {"data": n}, halos={"h": (1, 1)})
    plan = plan_transfer(Placement({"x": source}), Placement({"x": target}))

    def program():
        with Mesh() as mesh:
            (owned,), (held,) = source.held[mesh.rank], target.held[mesh.rank]
            padded = np.full(held.shape, np.nan)
            inside = padded[owned.within(held).index]
            inside[...] = whole[owned.index]
            result = plan.execute(mesh.group(), {"x": [inside]}, out={"x": [padded]})
            assert result["x"][0] is padded
            np.testing.assert_array_equal(padded, whole[held.index])

    run_threads(program, n)


# --- in pieces


class Counting:
    """A group that says how large its pieces are."""

    def __init__(self, group):
        self.group, self.size, self.rank, self.axes, self.pieces = group, group.size, group.rank, group.axes, []

    def all_to_all(self, x, **options):
        result = self.group.all_to_all(x, **options)
        self.pieces.append((x.nbytes, result[0].nbytes))
        return result


@in_turn(2, case=list(cases(1)), adjoint={"forward": False, "adjoint": True})
def test_pieces_are_no_larger_than_allowed_and_no_more_than_needed(case, adjoint):
    n, most = 4, 96
    source, target = (Placement({"x": each}) for each in cases(n)[case])
    plan = plan_transfer(source, target, piece_bytes=most)
    operation = plan.adjoint() if adjoint else plan

    def program():
        with Mesh() as mesh:
            group = Counting(mesh.group())
            blocks = [np.zeros(each.shape) for each in operation.source["x"].held[mesh.rank]]
            operation.execute(group, {"x": blocks})
            return group.pieces

    everyone = run_threads(program, n)
    assert max(max(pair) for pieces in everyone for pair in pieces) <= most
    largest = max(max(plan.bytes_sent(rank), plan.bytes_received(rank)) for rank in range(n))
    assert {len(pieces) for pieces in everyone} == set(plan.rounds.values())
    assert -(-largest // most) <= len(everyone[0]) <= 2 * -(-largest // most)


@pytest.mark.parametrize("adjoint", [False, True], ids=["forward", "adjoint"])
def test_memory_beside_the_blocks_is_bounded(adjoint):
    """8 MiB cut by columns instead of rows: beside the new blocks, some 128 KiB a rank and not 2 MiB."""
    n, shape, most = 4, (1024, 1024), 1 << 16
    source, target = of_spec("b/data d", {"data": n}, shape), of_spec("b d/data", {"data": n}, shape)
    plan = plan_transfer(Placement({"x": source}), Placement({"x": target}), piece_bytes=most)
    operation = plan.adjoint() if adjoint else plan

    @contextmanager
    def program():
        with Mesh() as mesh:
            x = np.ones(operation.source["x"].held[mesh.rank][0].shape)
            yield mesh, lambda: operation.execute(mesh.group(), {"x": [x]})

    peak = peak_of(program, n)
    assert peak <= 8 * np.prod(shape) + n * 8 * most


# --- the adjoint


@every_pair(case=list(cases(1)), n=RANKS, piece_bytes={"at-once": 1 << 20, "in-pieces": 56})
def test_the_adjoint_is_the_transpose(case, n, piece_bytes):
    """<A x, y> = <x, A' y> for any blocks x and y: of copies, too, each rank has its own numbers."""
    source, target = cases(n)[case]
    plan = plan_transfer(Placement({"x": source}), Placement({"x": target}), piece_bytes=piece_bytes)
    rng = np.random.default_rng(n)
    x, y = (
        [{"x": [rng.standard_normal(each.shape) for each in held]} for held in array.held] for array in (source, target)
    )

    def inner(one, other):
        pairs = zip([b for rank in one for b in rank["x"]], [b for rank in other for b in rank["x"]], strict=True)
        return sum(np.vdot(a, b) for a, b in pairs)

    there, back = execute(plan, n, x), execute(plan.adjoint(), n, y)
    np.testing.assert_allclose(inner(there, y), inner(x, back), rtol=1e-12)
    assert plan.adjoint().adjoint() is plan


@each_number
@pytest.mark.parametrize("case", [case for case in cases(1) if "halos" in case])
def test_what_overlaps_is_added_on_its_owner(case, n):
    """Of ones everywhere, each element's owner gets the number of ranks that hold it."""
    source, target = cases(n)[case]
    plan = plan_transfer(Placement({"x": source}), Placement({"x": target}), from_owners=True)
    ones = [{"x": [np.ones(each.shape) for each in held]} for held in target.held]
    holders = sum(elements(target, rank).astype(float) for rank in range(n))
    results = execute(plan.adjoint(), n, ones)
    for rank, result in enumerate(results):
        owned = np.zeros(SHAPE, bool)
        for part in source.owned[rank]:
            owned[part.index] = True
        for block, part in zip(result["x"], source.held[rank], strict=True):
            np.testing.assert_array_equal(block, np.where(owned, holders, 0)[part.index])


@pytest.mark.parametrize("piece_bytes", [1 << 20, 8])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=str)
def test_sums_are_made_in_the_order_of_ranks(dtype, piece_bytes):
    """The sum of four numbers of very different size depends on their order; 16-bit floats are added in float32."""
    n, shape = 4, (9,)
    source, target = of_spec("b/data", {"data": n}, shape, dtype), of_spec("b", {"data": n}, shape, dtype)
    plan = plan_transfer(Placement({"x": source}), Placement({"x": target}), piece_bytes=piece_bytes)
    rng = np.random.default_rng(0)
    y = [(rng.standard_normal(shape) * scale).astype(dtype) for scale in (1, 1e3, 1e-3, 1e3)]
    total = y[0].astype(np.float32)
    for each in y[1:]:
        total = total + each.astype(np.float32)
    results = execute(plan.adjoint(), n, [{"x": [each]} for each in y])
    assert np.concatenate([each["x"][0] for each in results]).tobytes() == total.astype(dtype).tobytes()


def test_it_adds_to_what_is_there():
    source, target = rows(4, 7), rows(4, 7, halo=(1, 0))
    plan = plan_transfer(Placement({"x": source}), Placement({"x": target}))
    out = [{"x": [np.full(each.shape, 10.0) for each in held]} for held in source.held]

    def program():
        with Mesh() as mesh:
            blocks = {"x": [np.ones(each.shape) for each in target.held[mesh.rank]]}
            plan.adjoint().execute(mesh.group(), blocks, out=out[mesh.rank])

    run_threads(program, 2)
    assert out[0]["x"][0][:, 0].tolist() == [11, 11, 11, 12] and (out[1]["x"][0] == 11).all()


# --- elsewhere than in host memory


@pytest.mark.parametrize("adjoint", [False, True], ids=["forward", "adjoint"])
def test_arrays_on_a_device_stay_there(adjoint, device):
    source, target = rows(5, 6), rows(3, 8, halo=(2, 0))
    plan = plan_transfer(Placement({"x": source}), Placement({"x": target}), piece_bytes=64)
    operation = plan.adjoint() if adjoint else plan

    def program():
        with Mesh() as mesh:
            blocks = [np.full(each.shape, 1.0 + mesh.rank) for each in operation.source["x"].held[mesh.rank]]
            on_host = operation.execute(mesh.group(), {"x": blocks})["x"]
            there = operation.execute(mesh.group(), {"x": [device.asarray(each) for each in blocks]})["x"]
            for block, expected in zip(there, on_host, strict=True):
                assert device.owns(block)
                np.testing.assert_array_equal(block.memory, expected)

    run_threads(program, 2)


@pytest.mark.parametrize(
    "ranks", [pytest.param(n, id=f"mpi-{n}", marks=pytest.mark.mpi(ranks=n)) for n in (2, 3, 4)] + [6]
)
def test_on_threads_and_on_mpi(ranks):
    whole = normals(*SHAPE)

    def program():
        with Mesh() as mesh:
            for name, (source, target) in cases(mesh.size).items():
                plan = plan_transfer(Placement({"x": source}), Placement({"x": target}), piece_bytes=200)
                mesh.ledger.clear()
                blocks = plan.execute(mesh.group(), {"x": placed(source, whole, mesh.rank)})["x"]
                assert mesh.ledger.total().sent == plan.bytes_sent(mesh.rank), name
                for block, expected in zip(blocks, placed(target, whole, mesh.rank), strict=True):
                    np.testing.assert_array_equal(block, expected, strict=True)
                y = [np.ones(each.shape) for each in target.held[mesh.rank]]
                back = plan.adjoint().execute(mesh.group(), {"x": y})["x"]
                counts = [sum(each.sum() for each in some) for some in (y, back)]
                here, there = mesh.all_reduce(np.array(counts))
                assert here == there, name

    on_ranks(program, None if ranks < 6 else ranks)


# --- what is refused


def test_what_nobody_has():
    torn = ArrayPlacement.of_rectangles((4, 3), np.float64, [[Rectangle((0, 0), (2, 3))], [Rectangle((3, 0), (4, 3))]])
    with pytest.raises(UsageError, match=r"w: ranks hold 9 of its 12 elements.* No rank holds the one at \(2, 0\)"):
        plan_transfer(Placement({"w": torn}), Placement({"w": of_spec("b d", {"data": 2}, (4, 3))}))


@pytest.mark.parametrize(
    "target, words",
    [
        ({"y": of_spec("b d", {"data": 2})}, "no rank has 'y'; there are: x"),
        ({"x": of_spec("b d", {"data": 2}, (3, 3))}, r"x is float64\[11, 6\] before and float64\[3, 3\] after"),
        ({"x": of_spec("b d", {"data": 2}, dtype=np.float32)}, r"float64\[11, 6\] before and float32\[11, 6\] after"),
        ({"x": of_spec("b d", {"data": 3})}, r"from 2 ranks to 3: say by Placement.on"),
    ],
)
def test_placements_that_do_not_go_together(target, words):
    with pytest.raises(UsageError, match=words):
        plan_transfer(Placement({"x": of_spec("b/data d", {"data": 2})}), Placement(target))


def test_blocks_that_are_not_those_that_are_placed():
    plan = plan_transfer(Placement({"x": rows(5, 6)}), Placement({"x": rows(6, 5)}))

    def program():
        with Mesh() as mesh, pytest.raises(UsageError, match=r"x on rank [01] are float64\[4, 6\]; the placement has"):
            plan.execute(mesh.group(), {"x": [np.ones((4, 6))]})

    run_threads(program, 2)
