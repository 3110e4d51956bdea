"""The pages of strategies/ send and hold what their docstrings say: to the byte, summed over ranks."""

from collections import Counter
from math import prod

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.engine import AdamW
from spmd_engine.engine.batch import batch_of
from spmd_engine.strategies import STRATEGIES, Pipeline
from spmd_engine.strategies.page import Weight
from spmd_engine.strategies.two_convolutions import IMAGE
from spmd_engine.training import Trainer
from support.pages import HEADS, LAYERS, B, D, F, S, build, data
from support.pairwise import in_turn

P, A, L = 2 * D * F, 4 * D * D, LAYERS * 2 * D * F  # parameters of the two layers, of attention, of the stack
BD, BF, BSD = B * D, B * F, B * S * D
P9, BW, BHW = 9 * P, B * IMAGE[1], B * IMAGE[0] * IMAGE[1]  # windows of 3 x 3


def travelling(micro_batches, n):
    """Rows of samples that do not stay, when rows are cut in n parts, and then samples: n - 1 of n, if all divide."""
    parts = [parts_of(samples, n) for samples in parts_of(B, micro_batches)]
    stay = sum(h * b for part in parts for h, b in zip(parts_of(IMAGE[0], n), part, strict=True))
    return B * IMAGE[0] - stay


def parts_of(length, n):
    return [length // n + (i < length % n) for i in range(n)]


def one_axis(sent, calls, *held):
    """Formulas on one axis: numbers sent, calls of each rank, and held (parameters, gradients, owned, saved)."""
    return lambda m, n: (sent(n, m), {op: n * each for op, each in calls(m).items()}, *(each(n) for each in held))


E = 5  # experts


def leaving(m, n):
    """Rows whose expert is on another rank, in a step of m micro-batches on n ranks."""
    router = Weight((D, E), inputs=D).initial(3, "router", np.float64)
    owner = np.repeat(np.arange(n), [len(part) for part in np.array_split(np.arange(E), n)])
    rows = 0
    for micro_batch in np.array_split(data(STRATEGIES["expert-parallel"], 0)[0], m):
        for rank, x in enumerate(np.array_split(micro_batch, n)):
            rows += (owner[(x @ router).argmax(axis=1)] != rank).sum()
    return rows


whole, cut = (lambda n: n * P), (lambda n: P)
#: strategy -> for m micro-batches on a mesh of these sizes, of all ranks together: numbers sent a step, calls by
#: operation, parameters, gradients, owned, and saved by a forward of the whole batch
COSTS = {
    "data-parallel": one_axis(
        lambda n, m: 2 * P * (n - 1) * m, lambda m: {"all_reduce": 2 * m}, whole, whole, whole, lambda n: BD + BF
    ),
    "sharded-optimizer": one_axis(
        lambda n, m: 2 * P * (n - 1),
        lambda m: {"reduce_scatter": 2, "all_gather": 2},
        *(whole, cut, cut, lambda n: BD + BF),
    ),
    "sharded-gradients": one_axis(
        lambda n, m: P * (n - 1) * (m + 1),
        lambda m: {"reduce_scatter": 2 * m, "all_gather": 2},
        *(whole, cut, cut, lambda n: BD + BF),
    ),
    "fully-sharded": one_axis(
        lambda n, m: 3 * P * (n - 1) * m,
        lambda m: {"reduce_scatter": 2 * m, "all_gather": 4 * m},
        *(cut, cut, cut, lambda n: BD + BF),
    ),
    "column-parallel": one_axis(
        lambda n, m: (2 * BF + 3 * BD) * (n - 1),
        lambda m: {"all_gather": 2 * m, "reduce_scatter": m, "all_reduce": m},
        *(cut, cut, cut, lambda n: n * (BD + BF) + BF),
    ),
    "tensor-parallel": one_axis(
        lambda n, m: 4 * BD * (n - 1), lambda m: {"all_reduce": 2 * m}, cut, cut, cut, lambda n: n * BD + BF
    ),
    "sequence-parallel": one_axis(
        lambda n, m: 5 * BSD * (n - 1),
        lambda m: {"all_gather": 3 * m, "reduce_scatter": 2 * m},
        *(cut, cut, cut, lambda n: BSD + B * S * F),
    ),
    "attention-heads": one_axis(
        lambda n, m: 4 * BSD * (n - 1),
        lambda m: {"all_reduce": 2 * m},
        *[lambda n: A] * 3,
        lambda n: n * BSD + 4 * BSD + B * HEADS * S * S,
    ),
    "ring-attention": lambda m, n: (
        6 * BSD * (n - 1) + 2 * A * (n - 1) * m,
        {"send": 3 * (n - 1) * n * m, "receive": 3 * (n - 1) * n * m, "all_reduce": 4 * n * m},
        *[n * A] * 3,
        5 * BSD + B * S * HEADS,
    ),
    "replicate-shard": lambda m, r, n: (
        (3 * r * P * (n - 1) + 2 * P * (r - 1)) * m,
        {"all_gather": 4 * m * r * n, "reduce_scatter": 2 * m * r * n, "all_reduce": 2 * m * r * n},
        *[r * P] * 3,
        BD + BF,
    ),
    "two-dimensional": lambda m, r, c: (
        4 * BF * (r - 1) + 4 * BD * (c - 1),
        {"all_reduce": 4 * m * r * c},
        *[P] * 3,
        c * BD + r * BF,
    ),
    "expert-parallel": lambda m, n: (
        4 * D * leaving(m, n) + (E * (n - 1) + 2 * D * E * (n - 1)) * m,
        {"all_to_all": 5 * n * m, "all_reduce": n * m},
        *[E * P + n * D * E] * 3,
        3 * BD + BF + B * E + 2 * B + 2 * n * E,
    ),
    "pipeline": lambda m, p: (
        2 * BD * (p - 1),
        {"send": 2 * (p - 1) * m, "receive": 2 * (p - 1) * m},
        *[L] * 3,
        LAYERS * (BD + BF),
    ),
    "channel-split": one_axis(
        lambda n, m: 4 * BHW * D * (n - 1),
        lambda m: {"all_reduce": 2 * m},
        *[lambda n: P9] * 3,
        lambda n: BHW * (n * D + F),
    ),
    "spatial": one_axis(
        lambda n, m: (4 * BW * (D + F) + 2 * P9 * m) * (n - 1),
        lambda m: {"all_to_all": 4 * m, "all_reduce": 2 * m},
        *[lambda n: n * P9] * 3,
        lambda n: BW * (IMAGE[0] + 2 * (n - 1)) * (D + F),
    ),
    "vertical-cnn": lambda m, p: (
        2 * BHW * D * (p - 1),
        {"send": 2 * (p - 1) * m, "receive": 2 * (p - 1) * m},
        *[9 * L] * 3,
        LAYERS * BHW * (D + F),
    ),
    "hybrid-cnn": lambda m, n: (
        4 * BW * D * (n - 1) + 2 * (D + F) * IMAGE[1] * travelling(m, n) + 2 * P9 * (n - 1) * m,
        {"all_to_all": 6 * m * n, "all_reduce": 2 * m * n},
        *[n * P9] * 3,
        BW * (IMAGE[0] + 2 * (n - 1)) * D + 2 * BHW * F,
    ),
    "hybrid": lambda m, p, n, t: (
        4 * LAYERS * BD * (t - 1) + 2 * t * BD * (p - 1) + 2 * L * (n - 1),
        {
            "send": 2 * (p - 1) * m * n * t,
            "receive": 2 * (p - 1) * m * n * t,
            "all_reduce": 2 * LAYERS * m * n * t + 2 * p * n * t,
        },
        *[n * L] * 3,
        LAYERS * (t * BD + BF),
    ),
}
SIZES = {1: [(2,), (3,), (4,)], 2: [(2, 2), (2, 3), (3, 2)], 3: [(2, 2, 2), (3, 2, 2)]}
CASES = [(name, sizes) for name in COSTS for sizes in SIZES[len(STRATEGIES[name].axes)]]
OTHERS = {"loss", "gradient norm", "check", "metrics"}  # of any engine's step: some numbers of 8 bytes


def test_every_strategy_that_sends_is_here():
    assert {*COSTS, "single-device"} == set(STRATEGIES)


@in_turn(5, **{"name, sizes": CASES, "micro_batches": [1, 3]})
def test_costs_are_those_of_the_docstring(name, sizes, micro_batches):
    strategy = STRATEGIES[name]

    def program():
        with Mesh(**dict(zip(strategy.axes, sizes, strict=True))) as mesh:
            engine = build(strategy, mesh)
            trainer = Trainer(
                engine,
                AdamW(),
                lambda step: batch_of(*data(strategy, step), engine, micro_batches),
                lambda step: 0.1,
            )
            mesh.ledger.clear()
            trainer.step()
            sent = Counter()
            for (operation, _, label), entry in mesh.ledger.entries.items():
                if label not in OTHERS:
                    sent += Counter({"bytes": entry.sent, operation: entry.calls})
            held = [size(arrays) for arrays in (engine.parameters, engine.gradients, engine.owned)]
            assert {kind: size(state) for kind, state in trainer.optimizer.state.items()} == {
                "mean": held[2],
                "square": held[2],
            }
            engine.forward(batch_of(*data(strategy, 0), engine).micro_batches[0].inputs)
            return sent, [*held, saved(engine.tape)]

    sent, held = zip(*run_threads(program, prod(sizes)), strict=True)
    numbers, calls, *numbers_held = COSTS[name](micro_batches, *sizes)
    assert sum(sent, Counter()) == {"bytes": 8 * numbers, **calls}
    assert np.sum(held, axis=0).tolist() == [8 * each for each in numbers_held]


def size(arrays):
    return sum(array.nbytes for array in arrays.values())


def saved(tape):
    """Bytes of what a forward has saved."""
    arrays = []
    while len(tape):
        arrays += tape.pop()
    return sum(array.nbytes for array in arrays)


class Watched(Pipeline):
    """Writes down what it does."""

    def forward(self, x):
        self.__dict__.setdefault("done", []).append("F")
        return super().forward(x)

    def backward(self, grads):
        self.done.append("B")
        return super().backward(grads)


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 2), (2, 4), (4, 2), (4, 6)])
def test_a_pipeline_keeps_no_more_micro_batches_than_stages_follow(stages, micro_batches):
    def program():
        with Mesh(pipe=stages) as mesh:
            engine = build(Watched, mesh)
            engine.step(batch_of(*data(Pipeline, 0), engine, micro_batches))
            return "".join(engine.done)

    for stage, done in enumerate(run_threads(program, stages)):
        ahead = min(stages - 1 - stage, micro_batches)
        assert done == "F" * ahead + "FB" * (micro_batches - ahead) + "B" * ahead
        under_way = np.cumsum([1 if each == "F" else -1 for each in done])
        assert under_way.max() == min(stages - stage, micro_batches)
