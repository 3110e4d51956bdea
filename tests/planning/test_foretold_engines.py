"""Pages of strategies, and engines of one's own, send what was foretold of them."""

from math import prod

import numpy as np
import pytest

from spmd_engine import Mesh, run
from spmd_engine.engine import SGD, ShardedEngine
from spmd_engine.engine.batch import batch_of
from spmd_engine.errors import UsageError
from spmd_engine.planning.analyze_engine import Samples, analyze_engine
from spmd_engine.strategies import STRATEGIES, default_axes, strategy_named
from spmd_engine.strategies.two_convolutions import IMAGE
from spmd_engine.training import Trainer

WIDTH = 6


def ledgers(make, axes, samples):
    """What every rank's ledger gains in a first step."""

    def program():
        with Mesh(**axes) as mesh:
            engine = make(mesh)
            x, y = (np.ones((samples.batch_size, *shape)) for shape in (samples.inputs, samples.targets))
            batch = batch_of(x, y, engine, samples.micro_batches)
            trainer = Trainer(engine, SGD(), lambda step: batch, lambda step: 0.01, step_metrics=False)
            mesh.ledger.clear()
            trainer.step()
            return {where: (each.calls, each.payload, each.sent) for where, each in mesh.ledger.entries.items()}

    return run(program, prod(axes.values()))


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_page_sends_what_was_foretold(name):
    page = strategy_named(name)
    axes = default_axes(page, 4)
    sizes = {"s": 8, "d": WIDTH, "h": IMAGE[0], "w": IMAGE[1], "c": WIDTH}
    shape = tuple(sizes[letter] for letter in page.sample.split()[1:])
    samples = Samples(shape, shape, 8, 2, np.float64)

    def make(mesh):
        return page(WIDTH, 2 if "heads" in page.sizes else 10, mesh, np.float64)

    foretold = analyze_engine(make, axes, samples, optimizer=SGD())
    for rank, ledger in enumerate(ledgers(make, axes, samples)):
        said = foretold.of_rank(rank).ledger()
        if name == "expert-parallel":  # who sends how many rows, data decide
            said, ledger = ({where: line[0] for where, line in each.items()} for each in (said, ledger))
        assert said == ledger, f"rank {rank}"


class Linear(ShardedEngine):
    """As in the README."""

    input_sharding = output_sharding = "b/data d"

    def load_checkpoint(self, params):
        self.parameters = {"w": self.block("w", params["w"])}

    def forward(self, x):
        self.tape.push(x)
        return x @ self.parameters["w"]

    def backward(self, dy):
        return {"w": self.all_reduce(self.tape.pop().T @ dy, over="data")}


def test_an_engine_of_ones_own():
    foretold = analyze_engine(Linear, {"data": 2}, Samples((5,), (3,), 8), parameters={"w": (5, 3)})
    step = foretold.of_rank(0)
    assert step.ledger()["all_reduce", "data", ""] == (1, 5 * 3 * 4, 5 * 3 * 4)
    assert step.flops == 2 * (2 * 4 * 5 * 3)  # forward, and the weights' gradient
    assert foretold.parameters == 15


def test_code_that_looks_at_values_is_told_so():
    class Branching(Linear):
        def forward(self, x):
            return super().forward(x if x[0, 0] > 0 else -x)

    with pytest.raises(UsageError, match="cannot be foretold from shapes.*depends on"):
        analyze_engine(Branching, {"data": 1}, Samples((5,), (3,), 8), parameters={"w": (5, 3)})
