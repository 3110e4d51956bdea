"""as_distributed: what one device computes, on all ranks, in one line."""

from functools import cache
from math import prod

import numpy as np
import pytest

from spmd_engine import Mesh, ShardedEngine, as_distributed, run_threads
from spmd_engine.arrays import einsum
from spmd_engine.engine import SGD, AdamW
from spmd_engine.engine.batch import batch_of
from spmd_engine.errors import UsageError
from spmd_engine.layers import Attention, Embedding, Head, LayerNorm, Linear, Positions, Residual
from spmd_engine.losses import cross_entropy
from spmd_engine.models import deep_mlp, two_layers
from spmd_engine.training import Trainer
from support.pairwise import in_turn

WIDTH, HIDDEN, BATCH = 5, 7, 11


class OneDevice(ShardedEngine):
    """y[b o] = x[b d] · w[d o] + bias[o], written for one device."""

    def __init__(self):
        rng = np.random.default_rng(0)
        self.parameters = {"w": rng.standard_normal((WIDTH, WIDTH)), "bias": np.zeros(WIDTH)}

    def load_checkpoint(self, params):
        self.parameters = {name: self.block(name, params[name]) for name in ("w", "bias")}

    def forward(self, x):
        self.tape.push(x)
        return einsum("bd,do->bo", x, self.parameters["w"]) + self.parameters["bias"]

    def backward(self, grads):
        x = self.tape.pop()
        self.input_gradient = einsum("bo,do->bd", grads, self.parameters["w"])
        return {"w": einsum("bd,bo->do", x, grads), "bias": grads.sum(axis=0)}


def data(step):
    rng = np.random.default_rng(step)
    return rng.standard_normal((BATCH, WIDTH)), rng.standard_normal((BATCH, WIDTH))


def train(make, optimizer=AdamW, micro_batches=2, **axes):
    """Losses, whole gradients of the last step and whole parameters after some steps."""
    with Mesh(**axes) as mesh:
        engine = make(mesh)
        trainer = Trainer(
            engine,
            optimizer(),
            lambda step: batch_of(*data(step), engine, micro_batches, step),
            lambda step: 0.05,
            grad_clip=0.5,
        )
        losses = [report.loss for report in trainer.run(4)]
        gradients = {name: engine.gather_owned(name, engine.gradients) for name in engine.names}
        return losses, gradients, {name: engine.gather(name) for name in engine.names}


def own(zero):
    return lambda mesh: as_distributed(OneDevice(), mesh, zero=zero)


def layers(zero):
    stack = [Linear(("d", WIDTH), ("f", HIDDEN), activation="relu"), ("last", Linear(("f", HIDDEN), ("d", WIDTH)))]
    return lambda mesh: as_distributed(stack, mesh, zero=zero, dtype=np.float64)


def model(zero):
    return lambda mesh: as_distributed(two_layers(WIDTH, HIDDEN), mesh, zero=zero, dtype=np.float64)


MODELS = {"an engine": (own, (None, 0, 1, 2)), "layers": (layers, (None, 0, 3)), "a model": (model, (None, 2))}
CASES = [(kind, zero) for kind, (_, zeros) in MODELS.items() for zero in zeros]


@cache
def one_device(kind):
    make = (lambda mesh: OneDevice()) if kind == "an engine" else MODELS[kind][0](0)
    return run_threads(lambda: train(make), 1)[0]


@in_turn(3, axes=[{"data": 1}, {"data": 3}, {"replicate": 2, "shard": 2}], **{"kind, zero": CASES})
def test_it_computes_what_one_device_does(kind, zero, axes):
    losses, gradients, parameters = one_device(kind)
    for result in run_threads(lambda: train(MODELS[kind][0](zero), **axes), int(np.prod(list(axes.values())))):
        np.testing.assert_allclose(result[0], losses, rtol=1e-11)
        for ours, theirs in ((result[1], gradients), (result[2], parameters)):
            assert list(ours) == list(theirs)
            for name in ours:
                np.testing.assert_allclose(ours[name], theirs[name], atol=1e-11, err_msg=name)


def test_state_is_in_parts():
    def program(make):
        with Mesh() as mesh:
            engine = make(mesh)
            return sum(x.size for x in engine.parameters.values()), sum(x.size for x in engine.owned.values())

    whole = WIDTH * WIDTH + WIDTH
    for stored, owned in run_threads(program, 3, args=(own(2),)):
        assert stored == whole and abs(owned - whole / 3) <= WIDTH
    sizes = run_threads(program, 3, args=(layers(3),))
    assert sum(stored for stored, _ in sizes) == WIDTH * HIDDEN * 2 + WIDTH + HIDDEN
    assert all(stored == owned for stored, owned in sizes)


def test_the_engine_itself_has_what_was_trained():
    def program():
        inner = OneDevice()
        engine = as_distributed(inner)
        trainer = Trainer(engine, SGD(), lambda step: batch_of(*data(step), engine, step=step), lambda step: 0.1)
        trainer.step()
        assert np.array_equal(inner.parameters["w"], engine.gather("w"))
        outputs = []
        engine.inference_loop([data(0)[0]], type("Outputs", (), {"write": lambda self, y: outputs.append(y)})())
        if engine.device_id == 0:
            np.testing.assert_allclose(outputs[0], data(0)[0] @ inner.parameters["w"] + inner.parameters["bias"])

    run_threads(program, 3)


SEQUENCES = np.random.default_rng(1).standard_normal((4, 9, WIDTH + 1))


@pytest.mark.parametrize("axes", [{"data": 2}, {"context": 3}, {"model": 2}], ids=str)
def test_layers_that_attend_take_sequences_of_any_length(axes):
    def program(axes):
        with Mesh(**axes) as mesh:
            attention = Residual(LayerNorm(WIDTH + 1), Attention(WIDTH + 1, heads=2))
            engine = as_distributed([attention], mesh, inputs="b s d", outputs="b s d", dtype=np.float64)
            return engine.step(batch_of(SEQUENCES, 2 * SEQUENCES, engine))

    ranks = prod(axes.values())
    assert run_threads(program, ranks, args=(axes,)) == pytest.approx(
        run_threads(program, 1, args=({},)) * ranks, rel=1e-12
    )


@pytest.mark.parametrize("axes", [{"data": 2}, {"model": 2}, {"data": 2, "model": 3}], ids=str)
def test_layers_that_end_in_classes(axes):
    tokens = np.random.default_rng(2).integers(0, 11, (4, 9))

    def program(axes):
        with Mesh(**axes) as mesh:
            layers = [("embedding", Embedding(11, WIDTH)), ("head", Head(11, WIDTH, tied="embedding/table"))]
            letters = {"inputs": "b s", "outputs": "b s v", "loss": cross_entropy}
            engine = as_distributed(layers, mesh, **letters, dtype=np.float64)
            loss = engine.step(batch_of(tokens, tokens[:, ::-1], engine))
            return loss, engine.gather_owned("embedding/table", engine.gradients)

    (expected, gradient), *_ = run_threads(program, 1, args=({},))
    for loss, found in run_threads(program, prod(axes.values()), args=(axes,)):
        assert loss == pytest.approx(expected, rel=1e-12)
        np.testing.assert_allclose(found, gradient, rtol=1e-10, atol=1e-14)


def test_a_loss_that_does_not_know_of_cuts_is_refused_where_there_are():
    def program():
        layers = [Linear(("d", WIDTH), ("f", HIDDEN))]
        engine = as_distributed(layers, Mesh(model=2), outputs="b f", loss=lambda y, targets, count: (0.0, y))
        x = np.ones((2, WIDTH), np.float32)
        with pytest.raises(UsageError, match="'b f' are sharded over model, which this loss does not support"):
            engine.step(batch_of(x, np.ones((2, HIDDEN), np.float32), engine))

    run_threads(program, 2)


@pytest.mark.parametrize("make", [OneDevice, lambda: two_layers(WIDTH, HIDDEN)])
def test_letters_and_loss_are_said_of_layers_alone(make):
    with pytest.raises(UsageError, match="has its own outputs, loss"):
        as_distributed(make(), Mesh(), outputs="b d", loss=cross_entropy)


def test_a_table_of_positions_says_how_long_they_may_be():
    def program():
        engine = as_distributed([Positions(8, WIDTH + 1)], inputs="b s d", outputs="b s d")
        with pytest.raises(UsageError, match="a sequence of 9, but the context is 8"):
            engine.step(batch_of(SEQUENCES, SEQUENCES, engine))

    run_threads(program, 1)


class Cut(OneDevice):
    shardings = {"w": "d o/data"}


class Mixed(OneDevice):
    def __init__(self):
        super().__init__()
        self.parameters["bias"] = self.parameters["bias"].astype(np.float32)


class Empty(OneDevice):
    def __init__(self):
        pass


@pytest.mark.parametrize(
    ("engine", "zero", "message"),
    [
        (Cut, None, "already sharded over mesh axes"),
        (Empty, None, "no parameters yet"),
        (Mixed, None, "several dtypes, float32, float64"),
        (OneDevice, 3, "choose 0, 1 or 2"),
    ],
)
def test_what_cannot_be_spread_is_refused(engine, zero, message):
    with pytest.raises(UsageError, match=message):
        as_distributed(engine(), Mesh(), zero=zero)


STACK = [Linear(("d", WIDTH), ("f", HIDDEN)), Linear(("f", HIDDEN), ("d", WIDTH))]


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("gpt-nanno", {}, "unknown model 'gpt-nanno'; did you mean 'gpt-nano'"),
        (
            "gpt-nano",
            {"schedul": "1f1b"},
            "no option 'schedul' for this model; choose from: zero, dropout, dtype, seed",
        ),
        ("./gpt2", {}, "./gpt2 is a path; train it by"),
        (OneDevice, {}, "the class OneDevice is no list of layers, no Model, no engine and no name"),
        (None, {}, "None is no list of layers"),
        (STACK[0], {}, "a Linear is no list of layers"),
        ([STACK[0], np.tanh], {}, "give layers, or pairs of a name and a layer; <ufunc 'tanh'> is none"),
        ([(STACK[0], "up")], {}, "'up' is none"),
        ([], {}, "the list is empty"),
        ([("up", STACK[0]), ("up", STACK[1])], {}, "two layers are called 'up'"),
        (STACK, {"schedule": "zerobubble"}, "no schedule 'zerobubble'; did you mean 'zero-bubble'"),
        (STACK, {"recompute": "blocks"}, "no recompute 'blocks'; there are: none, block, attention"),
        (STACK, {"stages": "halves"}, "cannot read stages 'halves'"),
        (STACK, {"zero_stage": 1}, "no option 'zero_stage' for this model; choose from: zero, layout"),
        (STACK, {"dtype": "float33"}, "dtype is 'float33'; did you mean 'float32'"),
        (STACK, {"mesh": {"data": 1}}, r"mesh is a dict; make it a Mesh, as Mesh\(data=2\)"),
    ],
)
def test_what_is_no_model_and_what_is_no_option_is_one_line(model, options, message):
    with pytest.raises(UsageError, match=message):
        as_distributed(model, **options)


def test_an_engine_takes_no_options_but_its_stage_of_zero():
    with pytest.raises(UsageError, match="no option 'schedule' for this model; choose from: zero"):
        as_distributed(OneDevice(), schedule="1f1b")


@pytest.mark.parametrize(
    ("method", "returned", "message"),
    [
        ("backward", lambda engine, dy: None, "OneDevice.backward returned None; return {name: gradient}"),
        ("backward", lambda engine, dy: dict(engine.parameters), "OneDevice: forward pushes 1 more than backward pops"),
        ("forward", lambda engine, x: None, "OneDevice.forward returned None"),
    ],
)
def test_an_engine_for_one_device_is_checked_like_others(method, returned, message):
    kind = type("OneDevice", (OneDevice,), {method: returned})
    with pytest.raises(UsageError, match=message):
        engine = as_distributed(kind())
        engine.step(batch_of(*data(0), engine))


def test_the_command_line_s_words_are_taken():
    def program():
        with Mesh(pipe=2) as mesh:
            words = {"schedule": "zero-bubble", "recompute": "block", "stages": "0,1"}
            engine = as_distributed(deep_mlp(6, 8), mesh, **words)
            named = as_distributed("deep-mlp", mesh, **words, seed=3, dtype="float64")
            assert [each.schedule.name for each in (engine, named)] == ["zero-bubble"] * 2
            assert (named.seed, named.dtype, len(named.assignment.chunks[0])) == (3, np.float64, 1)

    run_threads(program, 2)
    assert as_distributed(STACK, schedule="zero-bubble").schedule.name == "sequential"  # of one stage, as with train


def test_a_model_by_name_is_the_command_line_s():
    def losses(make):
        with Mesh() as mesh:
            engine = make(mesh)
            x, y = np.ones((4, 64), np.float32), np.zeros((4, 64), np.float32)
            return [r.loss for r in Trainer(engine, SGD(), lambda s: batch_of(x, y, engine), lambda s: 0.1).run(2)]

    by_name = run_threads(lambda: losses(lambda mesh: as_distributed("two-layers", mesh, seed=5)), 2)
    assert by_name == run_threads(lambda: losses(lambda mesh: as_distributed(two_layers(), mesh, seed=5)), 2)
