"""Context parallelism: by each method, queries meet all keys before them, wherever those are."""

from collections import Counter
from dataclasses import replace
from math import prod
from threading import get_ident

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.arrays.attention import causal_attention
from spmd_engine.comm.pending import wait_for
from spmd_engine.errors import UsageError
from spmd_engine.layers import Attention, LayerNorm, Residual
from spmd_engine.layers.attention import context
from spmd_engine.layers.attention.context import CONTEXT_METHODS, context_method
from spmd_engine.sharding import Layout
from support.layer_harness import BATCH, LENGTH, Problem, assert_same, cut, problem_of, single, solve
from support.pairwise import every_pair

ITEM = 8
WIDTH = 12
DEALS = {"consecutive": False, "zigzag": True}
every_method = pytest.mark.parametrize("method", CONTEXT_METHODS)
either_deal = pytest.mark.parametrize("zigzag", DEALS.values(), ids=DEALS)


def attention(method, heads=3, key_value_heads=None):
    return Attention(WIDTH, heads, key_value_heads, context=context_method(method))


def assert_as_single(problem, axes, **options):
    assert_same(solve(problem, axes, **options), single(problem))


# --- many ranks compute what one does

MESHES = [
    {"context": 2},
    {"context": 3},  # 7 positions do not divide; of the 3 heads one each
    {"context": 4},  # of the 3 heads the last rank has none
    {"data": 2, "context": 3},
    {"context": 2, "model": 2},
    {"model": 3, "context": 2},  # one head a rank: by Ulysses, half of them idle
]


@every_pair(axes=MESHES, method=list(CONTEXT_METHODS), zigzag=DEALS)
def test_attention_as_single(method, zigzag, axes):
    assert_as_single(problem_of(attention(method)), axes, zigzag=zigzag)


@every_pair(axes=[axes for axes in MESHES if "model" in axes], method=list(CONTEXT_METHODS), zigzag=DEALS)
def test_with_the_stream_cut_further(method, zigzag, axes):
    layer = Residual(LayerNorm(WIDTH), attention(method), dropout=0.3)
    assert_as_single(problem_of(layer), axes, zigzag=zigzag, sequence_parallel=True)


@every_pair(window=[1, 3, 40], method=list(CONTEXT_METHODS), zigzag=DEALS)
def test_a_window_of_positions(method, zigzag, window):
    layer = Attention(WIDTH, 3, context=context_method(method), window=window)
    assert_as_single(problem_of(layer, batch=2, length=90), {"context": 3}, zigzag=zigzag)


@every_pair(
    **{"ranks, length": [(4, 1), (4, 3), (3, 2), (2, 64), (3, 301)], "method": list(CONTEXT_METHODS), "zigzag": DEALS}
)
def test_few_tokens_and_many(method, zigzag, ranks, length):
    """The last ranks may have none; the kernel works in several blocks of rows."""
    problem = problem_of(attention(method, heads=2), batch=1, length=length)
    assert_as_single(problem, {"context": ranks}, zigzag=zigzag)


@every_method
@either_deal
def test_a_sequence_cut_over_two_axes(method, zigzag):
    """Also in an order that is not the mesh's: messages go to the rank that has the next part."""
    layout = Layout({"s": ("y", "x")}, {"s": ("y", "x")}, zigzag="s" * zigzag)
    assert_as_single(problem_of(attention(method), length=11), {"x": 2, "y": 3}, layout=layout)


@every_method
def test_forward_alone(method):
    problem = problem_of(attention(method))
    results = solve(problem, {"context": 3}, training=False)
    np.testing.assert_allclose(results["y"], single(problem)["y"], rtol=0, atol=1e-12)


@every_method
def test_float32_stays(method):
    problem = problem_of(attention(method))
    half = {name: array.astype(np.float32) for name, array in problem.p.items()}
    problem = Problem(problem.layer, problem.x.astype(np.float32), problem.dy.astype(np.float32), half)

    def rank():
        local = cut(problem, Mesh(context=2))
        y, saved = problem.layer.forward(local.sh, local.p, local.x, local.ctx)
        dx = wait_for(problem.layer.backward_input(local.sh, local.p, saved, local.dy)[0])
        return y.dtype, dx.dtype

    assert run_threads(rank, ranks=2) == [(np.dtype(np.float32),) * 2] * 2


@pytest.mark.mpi(ranks=3)
@pytest.mark.parametrize(
    "method, zigzag",
    [
        pytest.param(method, zigzag, marks=[] if (i + zigzag) % 2 else pytest.mark.soak)
        for i, method in enumerate(CONTEXT_METHODS)
        for zigzag in (False, True)
    ],
)
def test_over_mpi(method, zigzag):
    """The same on processes, with blocks that are too large to be sent before somebody receives them."""
    problem = problem_of(Attention(96, 3, context=context_method(method)), batch=4, length=200)
    layer = problem.layer
    with Mesh(context=3) as mesh:
        local = cut(problem, mesh, zigzag=zigzag)
        y, saved = layer.forward(local.sh, local.p, local.x, local.ctx)
        dx = wait_for(layer.backward_input(local.sh, local.p, saved, local.dy)[0])
        own = local.sh.layout.positions(200, mesh)
    expected = single(problem)
    np.testing.assert_allclose(y, expected["y"][:, own], rtol=0, atol=1e-11)
    np.testing.assert_allclose(dx, expected["dx"][:, own], rtol=0, atol=1e-10)


# --- queries that share a key head

SHARED = [(4, 2), (6, 2), (6, 1), (6, 3)]
CUT = {"heads cut": False, "queries cut": True}


@pytest.mark.parametrize("heads, key_value_heads", SHARED)
def test_shared_keys_are_repeated_keys(heads, key_value_heads):
    """As if each query had a copy of its key head; the head's gradients are the sums of the copies'."""
    shared, whole = attention("gather", heads, key_value_heads), attention("gather", heads)
    problem, copies = problem_of(shared), heads // key_value_heads

    def repeated(name, array):
        if name.startswith(("key", "value")):
            array = np.repeat(array, copies, axis=array.ndim - 2)
        return array.reshape([whole.sizes[letter] for letter in whole.parameters[name].dims.split()])

    p = {name: repeated(name, array) for name, array in problem.p.items()}
    expected, results = single(replace(problem, layer=whole, p=p)), single(problem)
    for name, array in results.items():
        right = expected[name]
        if name.startswith(("dkey", "dvalue")):
            *before, _, width = right.shape
            right = right.reshape(*before, key_value_heads, copies, width).sum(axis=-2)
        np.testing.assert_allclose(array, right.reshape(array.shape), rtol=0, atol=1e-12, err_msg=name)


@every_pair(
    **{
        "heads, key_value_heads": SHARED,
        "axes": [{"model": 2}, {"model": 3}, {"model": 4}, {"data": 2, "model": 2}],
        "queries_sharded": CUT,
    }
)
def test_shared_keys_as_single(heads, key_value_heads, axes, queries_sharded):
    """Also with more ranks than heads, and than queries that share one: then some have nothing to do."""
    problem = problem_of(attention("gather", heads, key_value_heads))
    for sequence_parallel in (False, True):
        assert_as_single(problem, axes, queries_sharded=queries_sharded, sequence_parallel=sequence_parallel)


@every_pair(method=list(CONTEXT_METHODS), zigzag=DEALS, queries_sharded=CUT)
def test_shared_keys_over_context_and_model(method, zigzag, queries_sharded):
    problem = problem_of(attention(method, 6, 2))
    options = {"zigzag": zigzag, "queries_sharded": queries_sharded, "sequence_parallel": True}
    assert_as_single(problem, {"context": 3, "model": 2}, **options)


def test_heads_and_queries_cut_over_two_axes():
    cuts = {"h": ("x",), "r": ("y",)}
    problem = problem_of(attention("gather", 6, 2))
    assert_as_single(problem, {"x": 2, "y": 3}, layout=Layout(cuts, {"s": ("x", "y")}))


# --- what is sent


def sent(layer, axes, length=LENGTH, **options):
    """Bytes of a forward, and those of a backward, by operation, all ranks together."""
    problem = problem_of(layer, length=length)

    def rank():
        mesh = Mesh(**axes)
        local = cut(problem, mesh, **options)
        _, saved = layer.forward(local.sh, local.p, local.x, local.ctx)
        forward = {key: entry.sent for key, entry in mesh.ledger.entries.items()}
        mesh.ledger.clear()
        layer.backward_input(local.sh, local.p, saved, local.dy)
        return forward, {key: entry.sent for key, entry in mesh.ledger.entries.items()}

    totals = Counter(), Counter()
    for ways in run_threads(rank, ranks=prod(axes.values())):
        for total, entries in zip(totals, ways):
            for (operation, over, label), number in entries.items():
                assert (over, label) == ("context", "layer")
                total[operation] += number
    return [{operation: number for operation, number in total.items() if number} for total in totals]


@every_pair(n=[2, 3, 4], key_value_heads=[6, 2], zigzag=DEALS)
def test_gathered_keys_are_sent_once_each_way(n, key_value_heads, zigzag):
    both = 2 * BATCH * LENGTH * key_value_heads * 2 * ITEM  # keys and values, heads 2 wide
    forward, backward = sent(attention("gather", 6, key_value_heads), {"context": n}, zigzag=zigzag)
    assert forward == {"all_gather": both * (n - 1)}
    assert backward == {"reduce_scatter": both * (n - 1)}


@every_pair(n=[2, 3, 4], key_value_heads=[6, 2], zigzag=DEALS)
def test_a_ring_sends_each_block_to_all_others_and_its_gradients_home(n, key_value_heads, zigzag):
    both = 2 * BATCH * LENGTH * key_value_heads * 2 * ITEM
    forward, backward = sent(attention("ring", 6, key_value_heads), {"context": n}, zigzag=zigzag)
    assert forward == {"send": both * (n - 1)}
    assert backward == {"send": both * (n - 1) + both * n}


@every_pair(n=[2, 3, 4], key_value_heads=[6, 2], zigzag=DEALS)
def test_heads_are_exchanged_four_times_each_way(n, key_value_heads, zigzag):
    """What stays with each rank is its positions of its own heads."""

    def moved(heads, each):  # heads to be cut, and columns of each
        stays = sum(part(LENGTH, n, r) * part(heads, n, r) for r in range(n))
        return BATCH * (LENGTH * heads - stays) * each * ITEM

    queries, keys = moved(key_value_heads, WIDTH // key_value_heads), moved(key_value_heads, 2)
    forward, backward = sent(attention("ulysses", 6, key_value_heads), {"context": n}, zigzag=zigzag)
    assert forward == backward == {"all_to_all": 2 * queries + 2 * keys}


def part(length, n, r):
    return length // n + (r < length % n)


# --- what a ring does not do


@pytest.mark.parametrize("ranks", [2, 4])
def test_only_queries_that_see_a_key_are_compared(monkeypatch, ranks):
    """Consecutive parts: rank i attends to i + 1 blocks. Zigzag: all attend to all, with equal work in every step."""
    calls = {}

    def counting(q, k, v, positions, key_positions, **options):
        assert q.shape[1] == len(positions) and key_positions[0] <= positions[0]
        seen = int((key_positions[None, :] <= positions[:, None]).sum())
        calls.setdefault(get_ident(), []).append(seen)
        return causal_attention(q, k, v, positions, key_positions, **options)

    monkeypatch.setattr(context, "causal_attention", counting)
    problem = problem_of(attention("ring"), length=24)

    def work(zigzag):
        def rank():
            local = cut(problem, Mesh(context=ranks), zigzag=zigzag)
            calls[get_ident()] = []
            problem.layer.forward(local.sh, local.p, local.x, local.ctx)
            return calls[get_ident()]

        return run_threads(rank, ranks=ranks)

    assert [len(seen) for seen in work(zigzag=False)] == list(range(1, ranks + 1))
    first, *others = work(zigzag=True)
    assert len(first) == ranks and all(seen == first for seen in others)
    assert sum(first) * ranks == 24 * 25 // 2


# --- what is refused


def test_an_unknown_method_is_an_error():
    with pytest.raises(UsageError, match="unknown context method 'rings'; did you mean 'ring'. There are: ring"):
        context_method("rings")


@pytest.mark.parametrize("length", [0, LENGTH + 1])
def test_positions_that_do_not_fit_are_an_error(length):
    problem = problem_of(attention("ring"))

    def rank():
        local = cut(problem, Mesh(context=2))
        return problem.layer.forward(local.sh, local.p, local.x, replace(local.ctx, length=length))

    with pytest.raises(UsageError, match=f"s is sharded over context: of a sequence of {length} "):
        run_threads(rank, ranks=2)


@pytest.mark.parametrize("heads, key_value_heads", [(5, 5), (4, 3), (4, 0), (4, 8)])
def test_heads_that_do_not_divide_are_an_error(heads, key_value_heads):
    with pytest.raises(UsageError, match=f"{heads} heads must divide .* {key_value_heads} key heads"):
        attention("gather", heads, key_value_heads)
