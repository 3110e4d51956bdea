"""Dense layers, their letters cut in every way, on virtual ranks: as one device, and what is sent and kept."""

import functools
import itertools
import pickle

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.comm.pending import wait_for
from support.dense import BATCH, INPUTS, ONE, OUTPUTS, Local, Problem, assert_same, linear, on_mesh, problem_of, skip
from support.pairwise import in_turn

WHOLE = [(), ("slice_input",), ("gather_output",), ("slice_input", "gather_output")]
#: Meshes, and which axes cut which letter.
CUTS = [
    ({"data": 3}, {"b": "data"}),
    ({"data": 8}, {"b": "data"}),  # 4 samples: half of the ranks have none
    ({"model": 2}, {"f": "model"}),
    ({"model": 2}, {"d": "model"}),
    ({"model": 3}, {"f": "model"}),
    ({"model": 3}, {"d": "model"}),
    ({"model": 8}, {"f": "model"}),  # 7 columns, 5 rows: the last ranks have none
    ({"model": 8}, {"d": "model"}),
    ({"row": 2, "col": 2}, {"d": "row", "f": "col"}),
    ({"row": 2, "col": 3}, {"d": "row", "f": "col"}),
    ({"row": 2, "col": 3}, {"d": "col", "f": "row"}),
    ({"row": 2, "col": 3}, {"d": "row col"}),
    ({"row": 2, "col": 3}, {"f": "col row"}),  # cut by col first, though row comes first in the mesh
    ({"row": 2, "col": 3}, {"b": "row", "f": "col"}),
    ({"data": 2, "row": 2, "col": 2}, {"b": "data", "d": "row", "f": "col"}),
    ({"row": 2, "col": 2, "data": 2}, {"b": "data", "d": "row", "f": "col"}),
    ({"data": 2, "row": 2, "col": 2}, {"b": "data", "f": "col"}),  # replicated over rows
]


def cut_id(cut):
    return " ".join(f"{letter}/{axes.replace(' ', ',')}" for letter, axes in cut[1].items()) + f" on {cut[0]}"


every_cut = pytest.mark.parametrize("cut", CUTS, ids=cut_id)


# --- many ranks compute what one does, and replicas the same bits


def cuts_and_activations():
    """Every cut with some of WHOLE, without an activation or with one in turn; the other triples in ``soak``."""
    for (i, cut), (j, whole), (k, activation) in itertools.product(*map(enumerate, (CUTS, WHOLE, (None, "gelu")))):
        name = f"{activation}-{'+'.join(whole) or 'as cut'}-{cut_id(cut)}"
        yield pytest.param(cut, whole, activation, id=name, marks=pytest.mark.soak if (i + j + 2 * k) % 4 else ())


@functools.cache
def alone(activation):
    """What one device computes; a skip has no activation."""
    (computed,) = on_mesh(problem_of(skip() if activation == "skip" else linear(activation=activation)), ONE)
    return computed


@pytest.mark.parametrize("cut, whole, activation", list(cuts_and_activations()))
def test_any_cut_as_one_device(cut, whole, activation):
    expected = alone(activation)
    first, *others = on_mesh(problem_of(linear(*whole, activation=activation)), cut)
    assert_same(first, expected)
    for other in others:
        assert all(np.array_equal(other[name], first[name]) for name in first)


@in_turn(2, cut=[pytest.param(cut, id=cut_id(cut)) for cut in CUTS], whole={"as cut": WHOLE[0], "whole": WHOLE[1]})
def test_any_cut_of_a_skip_as_one_device(cut, whole):
    for results in on_mesh(problem_of(skip(*whole)), cut):
        assert_same(results, alone("skip"))


def test_the_input_gradient_can_be_left_out():
    for results in on_mesh(problem_of(linear(input_gradient=False)), CUTS[2]):
        (expected,) = on_mesh(problem_of(linear()), ONE)
        assert "dx" not in results
        assert_same(results, {name: array for name, array in expected.items() if name != "dx"})


# --- what is sent

ITEM = 8  # bytes of a float64
X, Y = BATCH * INPUTS * ITEM, BATCH * OUTPUTS * ITEM  # bytes of the whole input, and output
#: cut, options: bytes that all ranks together send forward and backward, by operation. An all_reduce of S bytes
#: over n ranks sends 2 S (n-1), an all_gather S (n-1); each happens in as many groups as the other axes make,
#: on blocks that add up to the whole where those axes cut it, and on whole copies where they do not.
BYTES = {
    "column": (({"model": 3}, {"f": "model"}), (), {}, {"all_reduce": 2 * X * 2}),
    "row": (({"model": 3}, {"d": "model"}), (), {"all_reduce": 2 * Y * 2}, {}),
    "column gathered": (
        ({"model": 3}, {"f": "model"}),
        ("gather_output",),
        {"all_gather": Y * 2},
        {"all_reduce": 2 * X * 2},
    ),
    "row sliced": (
        ({"model": 3}, {"d": "model"}),
        ("slice_input",),
        {"all_reduce": 2 * Y * 2},
        {"all_gather": X * 2},
    ),
    "2-D": (
        ({"row": 2, "col": 3}, {"d": "row", "f": "col"}),
        (),
        {"all_reduce": 2 * Y * (2 - 1)},
        {"all_reduce": 2 * X * (3 - 1)},
    ),
    "2-D whole": (
        ({"row": 2, "col": 3}, {"d": "row", "f": "col"}),
        ("slice_input", "gather_output"),
        {"all_reduce": 2 * Y * (2 - 1), "all_gather": Y * (3 - 1) * 2},  # gathered in each of 2 rows
        {"all_reduce": 2 * X * (3 - 1), "all_gather": X * (2 - 1) * 3},  # and in each of 3 columns
    ),
    "2-D and data": (
        ({"data": 2, "row": 2, "col": 2}, {"b": "data", "d": "row", "f": "col"}),
        (),
        {"all_reduce": 2 * Y * (2 - 1)},
        {"all_reduce": 2 * X * (2 - 1)},
    ),
    "data": (({"data": 3}, {"b": "data"}), (), {}, {}),
}


@pytest.mark.parametrize("name", BYTES)
def test_bytes_of_a_layer(name):
    cut, whole, *expected = BYTES[name]

    def sent(local):
        def account():
            entries = {key[0]: entry.sent for key, entry in local.mesh.ledger.entries.items()}
            assert all(entry.calls == 1 for entry in local.mesh.ledger.entries.values())
            assert {key[2] for key in local.mesh.ledger.entries} <= {"layer"}
            local.mesh.ledger.clear()
            return entries

        _, saved = local.forward()
        forward = account()
        dx, rest = local.backward_input(saved)
        local.backward_weight(rest)
        wait_for(dx)
        return forward, account()

    for ours, theirs in zip(zip(*on_mesh(problem_of(linear(*whole)), cut, sent)), expected):
        totals = {operation: sum(rank[operation] for rank in ours) for operation in ours[0]}
        assert totals == theirs


# --- what is not kept, and when the weights' turn comes


@pytest.mark.parametrize("layer", [linear(activation="gelu"), skip()], ids=["linear", "skip"])
def test_micro_batches_in_flight_and_weights_that_wait(layer):
    first, other = problem_of(layer), problem_of(layer, seed=50)
    second = Problem(layer, other.x, other.dy, first.p)
    before = pickle.dumps(layer)

    def rank():
        with Mesh(row=2, col=2) as mesh:
            cuts = {"d": "row", "f": "col"}
            both = [Local(problem, mesh, cuts) for problem in (first, second)]
            saved = [local.forward()[1] for local in both]
            rests = [local.backward_input(one)[1] for local, one in zip(both, saved)]
            for local, rest in zip(both, rests):
                local.backward_weight(rest)
            return [local.gradients() for local in both]

    for results in run_threads(rank, 4):
        for problem, gradients in zip((first, second), results):
            (expected,) = on_mesh(problem, ONE)
            assert_same(gradients, {name: expected[name] for name in gradients})
    assert pickle.dumps(layer) == before
