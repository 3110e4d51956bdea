"""Pages of strategies, and engines of one's own, send what was predicted of them."""

from math import prod

import numpy as np
import pytest

from spmd_engine import Mesh, as_distributed, batch_of, run_threads
from spmd_engine.engine import SGD, LayeredEngine
from spmd_engine.engine.distributed import make_engine
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.engine.state.assignment import ZeroConfig
from spmd_engine.errors import UsageError
from spmd_engine.layers import MLP
from spmd_engine.models import GPTSize, gpt, two_layers
from spmd_engine.observability.step import _layers
from spmd_engine.planning.dry_run.analyze import Samples, analyze, analyze_engine
from spmd_engine.planning.dry_run.engine import kind_of
from spmd_engine.strategies import STRATEGIES, default_axes, strategy_named
from spmd_engine.strategies.two_convolutions import IMAGE
from spmd_engine.training import Trainer
from spmd_engine.verification import mesh_of_one
from support.linear_engine import Drawn, Linear
from support.pairwise import in_turn

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

    return run_threads(program, prod(axes.values()))


@in_turn(2, name=list(STRATEGIES))
def test_a_strategy_sends_what_its_dry_run_predicts(name):
    page = strategy_named(name)
    axes = default_axes(page, 4)
    sizes = {"s": 8, "d": WIDTH, "h": IMAGE[0], "w": IMAGE[1], "c": WIDTH}
    shape = tuple(sizes[letter] for letter in page.sample.split()[1:])
    samples = Samples(shape, shape, 8, 2, np.float64)

    def make(mesh):
        return page(WIDTH, 2 if "heads" in page.sizes else 10, mesh, np.float64)

    predicted = analyze_engine(make, axes, samples, optimizer=SGD())
    for rank, ledger in enumerate(ledgers(make, axes, samples)):
        expected = predicted.of_rank(rank).ledger()
        if name == "expert-parallel":  # how many rows a rank sends depends on values
            expected, ledger = ({where: line[0] for where, line in each.items()} for each in (expected, ledger))
        assert expected == ledger, f"rank {rank}"


def with_weights(kind):
    """Makes engines of this kind that have loaded w[5 3]."""

    def make(mesh):
        engine = make_engine(kind, mesh)
        engine.load_checkpoint({"w": np.zeros((5, 3), np.float32)})
        return engine

    return make


def test_a_user_engine_sends_what_its_dry_run_predicts():
    predicted = analyze_engine(with_weights(Linear), {"data": 2}, Samples((5,), (3,), 8))
    step = predicted.of_rank(0)
    assert step.ledger()["all_reduce", "data", ""] == (1, 5 * 3 * 4, 5 * 3 * 4)
    assert step.flops == 2 * (2 * 4 * 5 * 3)  # forward, and the weights' gradient
    assert predicted.parameters == 15
    table = _layers(step)
    assert list(table.columns[0].cells) == ["the engine"] and list(table.columns[-1].cells) == [
        f"{step.bytes_sent:,.0f}"
    ]


def test_code_that_reads_values_is_an_error():
    class Branching(Linear):
        def forward(self, x):
            return super().forward(x if x[0, 0] > 0 else -x)

    with pytest.raises(UsageError, match="cannot be computed from shapes alone.*depends on"):
        analyze_engine(with_weights(Branching), {"data": 1}, Samples((5,), (3,), 8))


SIZE = GPTSize(layers=2, width=16, heads=4, context=12, vocabulary=32)


@pytest.mark.parametrize("model", [two_layers(8, 16), gpt(SIZE)], ids=lambda model: model.name)
@pytest.mark.parametrize(
    ("axes", "zero"),
    [({"data": 2}, 0), ({"data": 2}, 3), ({"data": 2, "model": 2}, 1), ({"pipe": 2, "data": 2}, 2)],
    ids=str,
)
def test_a_list_of_layers_is_analyzed_as_an_engine(model, axes, zero):
    """What ``analyze`` says of the same model: what is sent, and what a rank holds when the step begins."""
    sample = (12,) if model.vocabulary else (8,)
    make = lambda mesh: LayeredEngine(model, mesh, storage=ZeroConfig(zero))
    found = analyze_engine(make, axes, Samples(sample, sample, 8), checks=False)
    expected = analyze(model, axes, ParallelConfig(zero=zero), batch_size=8, every=True)
    assert [each.step.before for each in found.classes] == [each.step.before for each in expected.classes]
    assert list(map(sent, found.classes)) == list(map(sent, expected.classes))


def sent(of_class):
    return sorted((each.operation, each.axes, each.label, each.payload) for each in of_class.step.communications)


def test_an_engine_of_as_distributed_is_analyzed():
    def make(mesh):
        engine = Linear()
        engine.mesh, engine.input_sharding, engine.output_sharding = mesh_of_one(), "", ""
        engine.load_checkpoint({"w": np.ones((5, 3))})
        return as_distributed(engine, mesh)

    samples = Samples((5,), (3,), 8, 2, np.float64)
    predicted = analyze_engine(make, {"data": 2}, samples, optimizer=SGD())
    for rank, ledger in enumerate(ledgers(make, {"data": 2}, samples)):
        assert predicted.of_rank(rank).ledger() == ledger


def test_a_dry_run_counts_parameters_of_the_job_s_dtype():
    analysis = analyze_engine(Drawn, {"data": 1}, Samples((3,), (2,), 4))
    assert [shard.dtype for shard in analysis.classes[0].step.shards] == ["float32"]


def test_layers_are_equal_by_their_content_even_if_it_contains_itself():
    def made(table):
        def recursive(n):
            return recursive(n - 1)

        layer = MLP(4, 8)
        layer.function, layer.table, layer.xp, layer.itself = recursive, table, np, layer
        return layer

    kind = kind_of(made(np.arange(3)))
    assert kind == kind_of(made(np.arange(3))) and hash(kind)
    assert kind != kind_of(made(np.arange(1, 4)))
