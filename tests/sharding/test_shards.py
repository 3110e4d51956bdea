"""Collectives in letters, on virtual ranks."""

from math import prod

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.arrays.windows import Window
from spmd_engine.comm.pending import wait_for
from spmd_engine.errors import MeshError, NotationError
from spmd_engine.sharding import Layout, Shards
from support.numerics import normals

SHAPE = (3, 5, 4)  # b s d


def on_ranks(body, layout=None, sequence_parallel=False, **axes):
    """What ``body(sh)`` returns on each rank."""

    def rank():
        mesh = Mesh(**axes)
        custom = layout or Layout.for_mesh(mesh, sequence_parallel=sequence_parallel)
        return body(Shards(mesh, custom, "layer"))

    return run_threads(rank, ranks=prod(axes.values()))


def stream(sh, x):
    """This rank's part of the residual stream ``x[b s d]``."""
    return x[sh.layout.spec("b s d", "residual").block(x.shape, sh.mesh)]


# --- which axes


def test_axes_are_those_of_the_letters_in_the_order_of_the_mesh():
    layout = Layout({"b": ("y", "x"), "f": ("z",)}, {"s": ("z",)})

    def body(sh):
        assert sh.axes("b") == sh.axes("db") == ("x", "y")
        assert sh.axes("fb") == ("x", "y")  # z has one rank only
        assert sh.axes("d") == sh.axes("s") == sh.axes("s", "residual") == ()
        return sh.is_sharded("b"), sh.is_sharded("f"), sh.is_sharded("d")

    assert on_ranks(body, layout, x=2, y=2, z=1) == [(True, False, False)] * 4


def test_spans_of_all_ranks():
    def body(sh):
        return sh.span("v", 5), sh.span("d", 5), sh.span("s", 2, "residual")

    v, d, s = zip(*on_ranks(body, sequence_parallel=True, model=3))
    assert v == (slice(0, 2), slice(2, 4), slice(4, 5))
    assert d == (slice(0, 5),) * 3
    assert s == (slice(0, 1), slice(1, 2), slice(2, 2))


def test_the_ranks_of_a_letter():
    layout = Layout({"s": ("y", "x"), "b": ("z",)}, {})

    def body(sh):
        group = sh.group_of("s")
        assert sh.group_of("b") is sh.group_of("d") is sh.group_of("s", "residual") is None  # z has one rank only
        assert group.axes == "y,x" and group.rank == sh.mesh.index(("y", "x"))
        return group.all_gather(np.arange(5)[sh.span("s", 5)]).tolist()

    assert on_ranks(body, layout, x=2, y=2, z=1) == [[0, 1, 2, 3, 4]] * 4


# --- what is not cut costs nothing


@pytest.mark.parametrize(
    "layout, axes",
    [
        (Layout(), {"data": 2, "model": 2}),  # nothing is cut
        (None, {"data": 2}),  # the batch alone is
        (None, {"data": 2, "model": 1}),  # an axis of one rank cuts nothing
    ],
)
def test_a_letter_that_is_not_cut_sends_nothing(layout, axes):
    def body(sh):
        x = normals(*SHAPE)
        results = [
            sh.all_reduce(x, "f"),
            sh.all_reduce(x, "hv", "max"),
            sh.all_gather(x, "b s d", "s", across="f"),
            sh.reduce_scatter(x, "b s d", over="f", onto="s"),
            sh.gather_whole(x, "b s v", "v"),
        ]
        return all(result is x for result in results), len(sh.mesh.ledger.entries)

    assert set(on_ranks(body, layout, **axes)) == {(True, 0)}


def test_without_sequence_parallel_only_sums_move():
    def body(sh):
        x = normals(*SHAPE)
        assert sh.all_gather(x, "b s d", "s", across="f") is x
        sh.reduce_scatter(x.copy(), "b s d", over="f", onto="s")
        return list(sh.mesh.ledger.entries)

    assert on_ranks(body, model=2) == [[("all_reduce", "model", "layer")]] * 2


def test_with_sequence_parallel_gathers_and_scatters_move_half_each():
    def body(sh):
        x = normals(*SHAPE)
        sh.all_gather(stream(sh, x), "b s d", "s", across="f")
        sh.reduce_scatter(x, "b s d", over="f", onto="s")
        return dict(sh.mesh.ledger.entries)

    ledgers = on_ranks(body, sequence_parallel=True, model=4)
    for operation in ("all_gather", "reduce_scatter"):
        sent = sum(ledger[operation, "model", "layer"].sent for ledger in ledgers)
        assert sent == 3 * prod(SHAPE) * 8


# --- what they compute


def test_all_reduce_is_in_place():
    def body(sh):
        x = np.full(3, sh.mesh.rank + 1.0)
        assert sh.all_reduce(x, "f") is x
        return x.tolist(), sh.all_reduce(np.full(2, float(sh.mesh.rank)), "f", "max").tolist()

    assert on_ranks(body, data=2, model=2) == [([3.0] * 3, [1.0] * 2)] * 2 + [([7.0] * 3, [3.0] * 2)] * 2


# Of 5 positions, some of 8 ranks have none.
MESHES = [{"model": 2}, {"model": 3}, {"model": 8}, {"data": 2, "model": 2}]


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_the_stream_is_gathered_whole(axes):
    x = normals(*SHAPE)

    def body(sh):
        whole = x[sh.layout.spec("b s d").block(SHAPE, sh.mesh)]
        return np.array_equal(sh.all_gather(stream(sh, x), "b s d", "s", across="f"), whole)

    assert all(on_ranks(body, sequence_parallel=True, **axes))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_a_sum_is_scattered_onto_the_stream(axes, sequence_parallel):
    def body(sh):
        part = sh.span("b", SHAPE[0])
        everyone = [normals(*SHAPE, seed=r)[part] for r in range(axes["model"])]
        total = np.zeros(SHAPE)
        total[part] = sum(everyone)
        y = sh.reduce_scatter(everyone[sh.mesh.coordinates["model"]].copy(), "b s d", over="f", onto="s")
        np.testing.assert_allclose(y, stream(sh, total), atol=1e-14, strict=True)

    on_ranks(body, sequence_parallel=sequence_parallel, **axes)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_scatter_and_gather_are_adjoint(axes, sequence_parallel):
    """<reduce_scatter(x), y> = <x, all_gather(y)>, each element of the stream counted once."""

    def body(sh):
        model = sh.mesh.coordinates["model"]
        x = normals(*SHAPE, seed=model)[sh.span("b", SHAPE[0])]
        y = stream(sh, normals(*SHAPE, seed=99))
        gathered = sh.all_gather(y, "b s d", "s", across="f")
        scattered = sh.reduce_scatter(x.copy(), "b s d", over="f", onto="s")
        once = sequence_parallel or model == 0  # without it every rank of the axis has the same
        return float((scattered * y).sum()) * once, float((x * gathered).sum())

    left, right = np.sum(on_ranks(body, sequence_parallel=sequence_parallel, **axes), axis=0)
    assert left == pytest.approx(right, rel=1e-12)


@pytest.mark.parametrize("size", [2, 3, 7, 13])
def test_gather_whole(size):
    whole = normals(2, size)
    results = on_ranks(lambda sh: sh.gather_whole(whole[:, sh.span("v", size)], "b v", "v"), data=2, model=4)
    for result in results:
        np.testing.assert_array_equal(result, whole)


# --- letters cut by several axes, in an order that is not the mesh's


@pytest.mark.parametrize("order", [("x", "y"), ("y", "x")])
def test_a_letter_cut_by_two_axes(order):
    layout = Layout({"f": order}, {"s": order})
    x = normals(*SHAPE)

    def body(sh):
        everyone = [normals(*SHAPE, seed=r) for r in range(6)]
        gathered = sh.all_gather(stream(sh, x), "b s d", "s", across="f")
        scattered = sh.reduce_scatter(everyone[sh.mesh.rank], "b s d", over="f", onto="s")
        width = x[:, :, sh.span("f", SHAPE[2])]
        np.testing.assert_array_equal(gathered, x)
        np.testing.assert_array_equal(sh.gather_whole(width, "b s f", "f"), x)
        np.testing.assert_allclose(scattered, stream(sh, sum(everyone)), atol=1e-14)

    on_ranks(body, layout, x=2, y=3)


def test_only_the_axes_of_the_other_letter_are_gathered():
    layout = Layout({"f": ("y",), "s": ("x",)}, {"s": ("x", "y")})
    x = normals(*SHAPE)

    def body(sh):
        inside = x[layout.spec("b s d").block(SHAPE, sh.mesh)]
        np.testing.assert_array_equal(sh.all_gather(stream(sh, x), "b s d", "s", across="f"), inside)

    on_ranks(body, layout, x=2, y=2)


def test_a_stream_cut_over_some_of_the_axes_of_a_sum_is_an_error():
    layout = Layout({"f": ("x", "y")}, {"s": ("y",)})
    with pytest.raises(NotationError) as error:
        on_ranks(lambda sh: sh.reduce_scatter(np.ones(SHAPE), "b s d", over="f", onto="s"), layout, x=2, y=2)
    for words in ("f is sharded over ('x', 'y')", "s only over ('y',)"):
        assert words in str(error.value)


def test_a_label_names_the_layer_in_the_ledger():
    def body(sh):
        sh.all_reduce(np.ones(3), "f")
        return list(sh.mesh.ledger.entries), sh.label

    assert on_ranks(body, model=2) == [([("all_reduce", "model", "layer")], "layer")] * 2


# --- rows to whoever is to have them


@pytest.mark.parametrize("started", [False, True])
def test_rows_go_to_the_ranks_of_a_letter_and_back(started):
    """Rank r sends (r + i) % 3 rows to rank i; rank 2 gets none from rank 1, and rank 0 keeps none."""

    def body(sh):
        splits = [(sh.mesh.rank + i) % 3 for i in range(3)]
        x = np.array([[sh.mesh.rank, to, k] for to, count in enumerate(splits) for k in range(count)], float)
        x = x.reshape(-1, 3)
        y, received = sh.all_to_all(x, splits, over="e")
        assert received == [(sender + sh.mesh.rank) % 3 for sender in range(3)]
        assert y.tolist() == [[sender, sh.mesh.rank, k] for sender, count in enumerate(received) for k in range(count)]
        if started:
            back = sh.start_all_to_all(y, received, over="e", received=splits).wait()
        else:
            back, again = sh.all_to_all(y, received, over="e", received=splits)
            assert again == splits
        np.testing.assert_array_equal(back, x)
        return sh.mesh.ledger.total("all_to_all").calls

    calls = on_ranks(body, Layout({"e": ("expert",)}, {}), expert=3)
    assert calls == [2] * 3  # how many rows come is told with the agreement


def test_rows_of_a_whole_letter_stay():
    def body(sh):
        x = np.ones((4, 2))
        y, received = sh.all_to_all(x, [4], over="e")
        assert y is x and received == [4] and sh.start_all_to_all(x, [4], over="e") is x

    on_ranks(body, Layout({}, {}), data=2)


# --- halos


WINDOWS = {
    "3": Window(3, before=1, after=1),
    "behind only": Window(3, after=2),
    "before only": Window(4, before=3),
    "1, nothing to come": Window(1),
    "even": Window(2),  # one output less than inputs
    "same, even, stride 2": Window.same(4, 2, 1, 7),
    "7, stride 2": Window(7, stride=2, before=3, after=3),
    "a stride beyond the window": Window(1, stride=3),
    "dilated": Window(3, dilation=3, before=3, after=3),
    "more padding than window": Window(2, before=3, after=2),
    "trimmed": Window(2, before=-2, after=-1),
}


@pytest.mark.parametrize("ranks", [1, 2, 3, 9])
@pytest.mark.parametrize("window", WINDOWS)
def test_a_halo_is_what_outputs_read_and_its_adjoint_adds(ranks, window):
    """<halo(x), dy> = <x, add(dy)>, summed over ranks; of 7 rows on 9 ranks some have none."""
    whole, window = normals(2, 7, 3), WINDOWS[window]

    def body(sh):
        how = "b h c", {"h": (7, window)}
        part, outputs = sh.span("h", 7), sh.span("h", window.outputs(7))
        reach = sh.reach("h", 7, window)
        assert (reach.own, reach.outputs) == ((part.start, part.stop), (outputs.start, outputs.stop))
        x = whole[:, part].copy()
        wide = sh.with_halo(x, *how)
        np.testing.assert_array_equal(wide, whole[:, slice(*reach.needed)])
        np.testing.assert_array_equal(wait_for(sh.start_with_halo(x, *how)), wide)
        if ranks > 1:
            read = [i for p in range(*reach.outputs) for i in taps(window, p)]
            inside = [i for i in range(7) if read and min(read) <= i <= max(read)]
            assert list(range(*reach.needed)) == inside
        dy = normals(*wide.shape, seed=7 + sh.mesh.rank)
        dx = sh.add_halo(dy, *how)
        np.testing.assert_array_equal(wait_for(sh.start_add_halo(dy, *how)), dx)
        assert dx.shape == whole[:, part].shape
        return (wide * dy).sum(), (whole[:, part] * dx).sum()

    forward, backward = zip(*on_ranks(body, Layout({"h": ("rows",)}, {}), rows=ranks))
    assert np.isclose(sum(forward), sum(backward), rtol=1e-12)


def taps(window, output):
    """By definition: what an output reads, padding included."""
    return [output * window.stride - window.before + tap * window.dilation for tap in range(window.size)]


@pytest.mark.parametrize("axes", [{"rows": 2, "columns": 3}, {"columns": 2, "rows": 4, "data": 2}])
def test_halos_of_two_letters_come_at_once_corners_included(axes):
    """And are counted: each rank is sent the elements that it lacks, once."""
    whole = normals(4, 5, 7, 2)
    reads = {"h": (5, Window(3, before=1, after=1)), "w": (7, Window(3, stride=2, before=1, after=1))}

    def body(sh):
        h, w, b = sh.span("h", 5), sh.span("w", 7), sh.span("b", 4)
        rows, columns = (sh.reach(letter, *reads[letter]) for letter in "hw")
        wide = sh.with_halo(whole[b, h, w].copy(), "b h w c", reads)
        np.testing.assert_array_equal(wide, whole[b, slice(*rows.needed), slice(*columns.needed)])
        wanted, own = np.zeros((2, 5, 7), bool)
        wanted[slice(*rows.needed), slice(*columns.needed)] = True
        own[h, w] = True
        lacking = 8 * 2 * (b.stop - b.start) * int((wanted & ~own).sum())
        sh.mesh.barrier()
        return lacking, sh.mesh.ledger.total().sent

    cuts = {letter: (axis,) for letter, axis in {"h": "rows", "w": "columns", "b": "data"}.items() if axis in axes}
    layout = Layout(cuts, {})
    lacking, sent = zip(*on_ranks(body, layout, **axes))
    assert sum(sent) == sum(lacking) > 0


def test_reductions_may_be_waited_for_later():
    def body(sh):
        x = np.full(SHAPE, 1.0 + sh.mesh.rank)
        whole = sh.start_all_reduce(x.copy(), "f").wait()
        np.testing.assert_array_equal(whole, np.full(SHAPE, 3.0))
        part = sh.start_reduce_scatter(x.copy(), "b s d", over="f", onto="s").wait()
        np.testing.assert_array_equal(part, stream(sh, whole))
        assert sh.start_all_reduce(x, "d") is x  # whole: nothing to wait for

    on_ranks(body, sequence_parallel=True, model=2)


# --- a letter cut in a zigzag: no rank's part of it is an interval

READS = {"s": (8, Window(3, before=2))}
TAKEN_FOR_AN_INTERVAL = {
    "span": lambda sh, x: sh.span("s", 8),
    "reach": lambda sh, x: sh.reach("s", *READS["s"]),
    "with_halo": lambda sh, x: sh.with_halo(x, "b s d", READS),
    "add_halo": lambda sh, x: sh.add_halo(x, "b s d", READS),
    "gather_whole": lambda sh, x: sh.gather_whole(x, "b s d", "s"),
    "gather_rows": lambda sh, x: sh.gather_rows(x, over="s"),
}


@pytest.mark.parametrize("name", TAKEN_FOR_AN_INTERVAL)
def test_a_zigzag_is_not_taken_for_an_interval(name):
    def body(sh):
        with pytest.raises(MeshError, match=r"^layer takes .* s is sharded over context in a zigzag"):
            TAKEN_FOR_AN_INTERVAL[name](sh, np.ones((2, 4, 3)))

    on_ranks(body, Layout({"s": ("context",)}, {}, "s"), context=2)


def test_a_letter_that_a_zigzag_leaves_whole_is_an_interval():
    layout = Layout({"s": ("context",), "b": ("data",)}, {}, "s")
    assert on_ranks(lambda sh: sh.span("s", 8), layout, context=1, data=2) == [slice(0, 8)] * 2
