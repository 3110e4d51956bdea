"""What a layer may have beside parameters: buffers, side outputs, choices, and letters of its own, under everything."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.arrays import einsum
from spmd_engine.checkpoints import load_checkpoint, save_checkpoint
from spmd_engine.engine import AdamW, LayeredEngine, schedules
from spmd_engine.engine.batch import batch_of
from spmd_engine.engine.pipeline import Recompute
from spmd_engine.engine.state.assignment import ZeroConfig
from spmd_engine.errors import NotFiniteError, UsageError
from spmd_engine.layers import (
    MLP,
    Activation,
    Chain,
    Embedding,
    Extra,
    GatedMLP,
    Head,
    Layer,
    LayerNorm,
    Linear,
    Parameter,
    Residual,
    SideOutput,
)
from spmd_engine.losses import cross_entropy, mean_squared_error
from spmd_engine.models import Model, two_layers
from spmd_engine.models.decoder import token_loss
from spmd_engine.sharding import Layout
from spmd_engine.training import Trainer
from support import parts
from support.own_layers import LENGTH, Centred, D, F, V, image_model, images, text_model, tokens
from support.pairwise import in_turn
from support.tiny import mesh_of_one

MICRO_BATCHES, STEPS = 4, 2


def numbers(model, axes, batch, *, sequence_parallel=False, layout=None, schedule=None, zero=None, **how):
    """Losses, side outputs, whole buffers and parameters in parts, after a few steps, of each rank; an evaluation."""

    def program():
        with Mesh(**axes) as mesh:
            chosen = layout or Layout.for_mesh(mesh, sequence_parallel=sequence_parallel)
            if schedule:
                how["schedule"] = schedules.named(schedule)
            engine = LayeredEngine(model, mesh, chosen, dtype=np.float64, seed=5, storage=ZeroConfig(zero), **how)
            batches = lambda step: batch_of(*batch(step), engine, MICRO_BATCHES, step)
            trainer = Trainer(engine, AdamW(), batches, lambda step: 0.05, grad_clip=0.3)
            losses, side = [], []
            for report in trainer.run(STEPS):
                losses.append(report.loss)
                side.append({name: np.array(value) for name, value in report.as_dict().get("side_outputs", {}).items()})
            buffers = {name: engine.gather_buffer(name) for name in engine.buffer_names}
            return losses, side, buffers, parts.stored(engine), trainer.evaluate([batches(99)])

    return run_threads(program, ranks=int(np.prod(list(axes.values()))))


def assert_same(found, expected):
    for rank in found:
        np.testing.assert_allclose(rank[0], expected[0], rtol=1e-11)
        for ours, theirs in zip([*rank[1], rank[2]], [*expected[1], expected[2]], strict=True):
            assert ours.keys() == theirs.keys()
            for name, value in theirs.items():
                np.testing.assert_allclose(ours[name], value, rtol=0, atol=1e-10, err_msg=name)
        np.testing.assert_allclose(rank[4], expected[4], rtol=1e-11)
    parts.assert_parts([rank[3] for rank in found], expected[3], atol=1e-10)


WAYS = {
    "data": ({"data": 3}, {}),
    "tensor": ({"model": 2}, {}),
    "sequence": ({"data": 2, "model": 2}, {"sequence_parallel": True}),
    "context": ({"context": 2}, {}),
    "zero 1": ({"data": 2}, {"zero": 1}),
    "zero 2": ({"data": 3}, {"zero": 2}),
    "zero 3": ({"data": 2}, {"zero": 3, "recompute": Recompute.BLOCK}),
    "recompute": ({"data": 1}, {"recompute": Recompute.BLOCK}),
    "pipe and all": ({"pipe": 2, "data": 2, "model": 2}, {"zero": 2, "sequence_parallel": True}),
    **{
        schedule: ({"pipe": 2}, {"schedule": schedule, "recompute": recompute})
        for schedule, recompute in zip(
            (name for name in schedules.SCHEDULES if name != "sequential"),
            [Recompute.NONE, Recompute.BLOCK] * len(schedules.SCHEDULES),
            strict=False,
        )
    },
}


#: What other ways have, here or in images, in other pairs.
LATER = {
    "tensor", "zero 1", "zero 2", "naive", "gpipe", "1f1b", "zero-bubble-h2", "rows", "channels", "pipe and channels",
    "rows and columns",
}  # fmt: skip


def in_time(ways):
    """The names of the ways, of which those in ``LATER`` are in soak."""
    return [pytest.param(way, marks=[pytest.mark.soak] * (way in LATER)) for way in ways]


@pytest.mark.parametrize("way", in_time(WAYS))
def test_buffers_and_side_outputs_are_those_of_one_device(way):
    axes, how = WAYS[way]
    assert_same(numbers(text_model(), axes, tokens, **how), numbers_of_one_device())


@cache
def numbers_of_one_device():
    return numbers(text_model(), {"data": 1}, tokens)[0]


@pytest.mark.parametrize("of", ["text", "images"])
def test_losses_and_gradients_fit_each_other(of):
    """The directional derivative of the step's loss, auxiliary ones included, in all parameters at once."""
    model, data = (text_model, tokens) if of == "text" else (image_model, images)
    engine = LayeredEngine(model(), mesh_of_one(), Layout(), dtype=np.float64, seed=5)
    batch = batch_of(*data(0), engine, 3)
    rng = np.random.default_rng(0)
    along = {name: rng.standard_normal(p.shape) for name, p in engine.parameters.items()}
    engine.step(batch)
    slope = sum((engine.named(engine.gradients)[name] * along[name]).sum() for name in along)

    def at(distance):
        for name, p in engine.parameters.items():
            p += distance * along[name]
        loss = engine.step(batch)
        for name, p in engine.parameters.items():
            p -= distance * along[name]
        return loss

    if of == "text":
        assert sum(engine.side_outputs[f"block{i}/centred/size"] for i in range(2)) > 0
    np.testing.assert_allclose((at(1e-6) - at(-1e-6)) / 2e-6, slope, rtol=1e-6)


def test_buffers_are_folded_in_the_order_of_micro_batches():
    """And once a step: with what was put by before, halved, and the sum of the step's counts."""
    engine = LayeredEngine(text_model(), mesh_of_one(), Layout(), dtype=np.float64, seed=5)
    seen = []
    name = "block0/centred"

    class Spy(Centred):
        def forward(self, sh, p, x, ctx):
            y, saved, extra = super().forward(sh, p, x, ctx)
            seen.append((ctx.micro_batch, extra))
            return y, saved, extra

    engine.model.layers[1][1].inner.__class__ = Spy
    trainer = Trainer(engine, AdamW(), lambda step: batch_of(*tokens(step), engine, 3, step), lambda step: 0.05)
    running, counts = np.zeros(D), np.zeros(D)
    for _ in range(2):
        seen.clear()
        trainer.step()
        for _, extra in sorted(seen, key=lambda each: each[0]):
            running = 0.9 * running + 0.1 * extra.updates["running"]
        counts = counts / 2 + sum(extra.updates["seen"] for _, extra in seen)
        np.testing.assert_allclose(engine.buffers[f"{name}/running"], running, rtol=1e-12)
        np.testing.assert_array_equal(engine.buffers[f"{name}/seen"], counts)


def test_passes_of_one_s_own_count_like_those_of_a_step():
    """Forwards and backwards called one by one, then the update: as a step with as many micro-batches."""

    def buffers(by_hand):
        engine = LayeredEngine(text_model(), mesh_of_one(), Layout(), dtype=np.float64, seed=5)
        batch = batch_of(*tokens(0), engine, 3)
        if by_hand:
            for m, micro in enumerate(batch.micro_batches):
                with engine.micro_batch(m):
                    y = engine.forward(micro.inputs)
                    engine.backward(np.zeros_like(y))
            engine.after_update()
        else:
            engine.step(batch)
            engine.after_update()
        return engine.buffers

    expected = buffers(by_hand=False)
    for name, buffer in buffers(by_hand=True).items():
        np.testing.assert_allclose(buffer, expected[name], rtol=1e-13)


def test_a_step_that_is_skipped_changes_no_buffer():
    engine = LayeredEngine(text_model(), mesh_of_one(), Layout(), dtype=np.float64, seed=5)

    def nothing_finite(outputs, targets, **options):
        return np.inf, np.zeros_like(outputs)

    Trainer(engine, AdamW(), lambda step: batch_of(*tokens(step), engine), lambda step: 0.05).step()
    before = {name: buffer.copy() for name, buffer in engine.buffers.items()}
    spoilt = Trainer(
        engine, AdamW(), lambda step: batch_of(*tokens(step), engine), lambda step: 0.05, loss=nothing_finite
    )
    with pytest.raises(NotFiniteError):
        spoilt.step()
    for name, buffer in engine.buffers.items():
        np.testing.assert_array_equal(buffer, before[name])


def test_buffers_are_saved_and_loaded_on_any_mesh(tmp_path):
    def program(folder, save):
        with Mesh(**({"pipe": 2, "data": 2} if save else {"model": 2})) as mesh:
            engine = LayeredEngine(text_model(), mesh, Layout.for_mesh(mesh), dtype=np.float64, seed=5)
            if save:
                batches = lambda step: batch_of(*tokens(step), engine, MICRO_BATCHES, step)
                Trainer(engine, AdamW(), batches, lambda step: 0.05).step()
                save_checkpoint(folder, engine)
            else:
                load_checkpoint(folder, engine)
            return {name: engine.gather_buffer(name) for name in engine.buffer_names}

    saved, loaded = (run_threads(program, ranks, args=(tmp_path, ranks == 4)) for ranks in (4, 2))
    assert len(saved[0]) == 4 and all(abs(buffer).max() > 0 for buffer in saved[0].values())
    for name, buffer in saved[0].items():
        np.testing.assert_array_equal(loaded[1][name], buffer)


# --- choices that a recomputation may not make anew


class Fickle(Layer):
    """y[b s d] = x · w[d] where it so decides: otherwise with every call, as rounding could have it."""

    def __init__(self):
        self.sizes, self.parameters = {"d": D}, {"w": Parameter("d", mean=1.0, where="residual")}
        self.calls = 0

    def forward(self, sh, p, x, ctx):
        kept = ctx.decided
        if kept is None:
            self.calls += 1
            kept = np.arange(D) % 2 == self.calls % 2
        return x * kept * p["w"], (x, kept), Extra(decided=kept)

    def backward_input(self, sh, p, saved, dy):
        x, kept = saved
        return dy * kept * p["w"], (x * kept, dy)

    def backward_weight(self, sh, rest, g):
        g.einsum("w", "bsd,bsd->d", *rest)


def test_a_recomputation_decides_nothing_anew():
    def gradients(recompute):
        layers = (("embedding", Embedding(V, D, std=0.5)), ("block0/fickle", Fickle()), ("head", Head(V, D, std=0.5)))
        model = Model("fickle", layers, "b s", "b s v", "b s", token_loss(V), LENGTH, V)
        engine = LayeredEngine(model, mesh_of_one(), Layout(), dtype=np.float64, seed=5, recompute=recompute)
        engine.step(batch_of(*tokens(0), engine, 3))
        return engine.named(engine.gradients)

    kept, again = gradients(Recompute.NONE), gradients(Recompute.BLOCK)
    for name, gradient in kept.items():
        np.testing.assert_allclose(again[name], gradient, rtol=1e-12, atol=1e-15)


# --- other letters


IMAGE_WAYS = {
    "rows": ({"rows": 2}, {"h": ("rows",)}, {}),
    "rows, of which some ranks have none": ({"rows": 6}, {"h": ("rows",)}, {"recompute": Recompute.BLOCK}),
    "rows and columns": ({"rows": 2, "columns": 3}, {"h": ("rows",), "w": ("columns",)}, {"zero": 2}),
    "channels": ({"model": 3}, {"o": ("model",)}, {}),
    "channels both ways": ({"row": 2, "col": 2}, {"c": ("row",), "o": ("col",)}, {"recompute": Recompute.BLOCK}),
    "data, rows and channels": (
        {"data": 2, "rows": 2, "model": 2},
        {"b": ("data",), "h": ("rows",), "o": ("model",)},
        {"zero": 3},
    ),
    "pipe and rows": ({"pipe": 2, "rows": 2}, {"h": ("rows",)}, {"schedule": "zero-bubble"}),
    "pipe and channels": ({"pipe": 2, "model": 2}, {"o": ("model",)}, {"recompute": Recompute.BLOCK}),
}


@cache
def numbers_of_images_on_one_device():
    return numbers(image_model(), {"data": 1}, images, layout=Layout())[0]


@pytest.mark.parametrize("way", in_time(IMAGE_WAYS))
def test_layers_may_have_any_letters(way):
    axes, cuts, how = IMAGE_WAYS[way]
    layout = Layout(cuts, cuts)
    assert_same(numbers(image_model(), axes, images, layout=layout, **how), numbers_of_images_on_one_device())


def test_a_letter_that_a_layer_needs_whole_may_not_be_cut():
    def program():
        with Mesh(rows=2) as mesh:
            LayeredEngine(text_model(), mesh, Layout({"d": ("rows",)}, {"d": ("rows",)}))

    with pytest.raises(UsageError, match="d is sharded over mesh axis"):
        run_threads(program, ranks=2)


# --- what a layer's author may do wrong, one thing at a time


class Gated(Layer):
    """y[b s d] = relu(x · up[d f]) · down[f d] + bias[d], without a mistake."""

    may_cut, across = "bsf", "f"

    def __init__(self):
        self.sizes = {"d": D, "f": F}
        self.parameters = {
            "up": Parameter("d f", std=0.1),
            "down": Parameter("f d", std=0.1),
            "bias": Parameter("d", where="residual"),
        }

    def forward(self, sh, p, x, ctx):
        z = einsum("bsd,df->bsf", x, p["up"])
        h = np.maximum(z, 0)
        return sh.all_reduce(einsum("bsf,fd->bsd", h, p["down"]), over="f") + p["bias"], (x, z, h)

    def backward_input(self, sh, p, saved, dy):
        x, z, h = saved
        dz = einsum("bsd,fd->bsf", dy, p["down"]) * (z > 0)
        return sh.start_all_reduce(einsum("bsf,df->bsd", dz, p["up"]), over="f"), (x, h, dz, dy)

    def backward_weight(self, sh, rest, g):
        x, h, dz, dy = rest
        g.einsum("up", "bsd,bsf->df", x, dz)
        g.einsum("down", "bsf,bsd->fd", h, dy)
        g.add("bias", dy.sum((0, 1)))


def forward(change):
    return {"forward": lambda self, *args: change(*Gated.forward(self, *args))}


def backward(change):
    return {"backward_input": lambda self, *args: change(*Gated.backward_input(self, *args))}


def weights(add):
    return {"backward_weight": lambda self, sh, rest, g: (Gated.backward_weight(self, sh, rest, g), add(g, *rest))[1]}


def declares(**declared):
    def init(self):
        Gated.__init__(self)
        for name, value in declared.items():
            setattr(self, name, {**getattr(self, name), **value} if isinstance(value, dict) else value)

    return {"__init__": init}


def assigned(g, x, h, dz, dy):
    g["up"] = dz


def added(g, x, h, dz, dy):
    g["up"] += dz


def in_place(self):
    self.parameters["up"] = Parameter("d f")


COUNTS = {"counts": SideOutput("d", summed="bs", where="residual")}
WRONG = {
    "forward: nothing": (
        forward(lambda y, saved: None),
        r"forward of block0/own returned None; return \(outputs, what",
    ),
    "forward: outputs alone": (forward(lambda y, saved: y), "returned an array of shape .*what the backward needs"),
    "forward: outputs are None": (
        forward(lambda y, saved: (None, saved)),
        r"outputs must be an array \[b s d\], not None",
    ),
    "forward: four": (forward(lambda y, saved: (y, saved, y, y)), "returned a tuple of 4"),
    "forward: width": (forward(lambda y, saved: (y[..., :3], saved)), r"outputs \[b s d\] of .*, but d is 6 on"),
    "forward: cropped": (forward(lambda y, saved: (y[:, 1:], saved)), "but s is 7 in inputs"),
    "forward: turned": (forward(lambda y, saved: (y.transpose(1, 0, 2), saved)), "but b is 3 in inputs"),
    "forward: flat": (
        forward(lambda y, saved: (y.reshape(-1, D), saved)),
        r"shape \(21, 6\), but \[b s d\] is declared",
    ),
    "forward: precision": (
        forward(lambda y, saved: (y / np.sqrt(2), saved)),
        "float64 from inputs of float32; NumPy's",
    ),
    "forward: arguments": (
        {"forward": lambda self, p, x: x},
        r"it takes \(self, p, x\), but is called with \(self, sh, p, x, ctx\)",
    ),
    "forward: unknown": (
        {"forward": lambda self, sh, p, x, ctx: (x * p["W"], x)},
        "this layer has no parameter 'W'; there are: .*up, down",
    ),
    "forward: no Extra": (
        forward(lambda y, saved: (y, saved, {"a": 1})),
        "returned a dict as the third value; return an",
    ),
    "forward: unknown update": (
        forward(lambda y, saved: (y, saved, Extra(updates={"mean": y}))),
        r"Extra\(updates=...\) has 'mean', but buffers of the layer has none",
    ),
    "forward: unknown output": (
        forward(lambda y, saved: (y, saved, Extra(outputs={"n": 1}))),
        "but side_outputs of the layer",
    ),
    "forward: shape of an output": (
        forward(lambda y, saved: (y, saved, Extra(outputs={"counts": np.ones(3)}))) | {"side_outputs": COUNTS},
        r"'counts' \[d\] of shape \(3,\), but d is 6 on this rank",
    ),
    "forward: a loss is missing": (
        {"side_outputs": {"size": SideOutput(loss=True)}},
        "the loss 'size' of side_outputs is",
    ),
    "backward: nothing": (
        backward(lambda dx, rest: None),
        r"backward_input of block0/own returned None; return \(the inputs'",
    ),
    "backward: gradient alone": (backward(lambda dx, rest: dx), "returned an array .* what backward_weight needs"),
    "backward: no gradient": (backward(lambda dx, rest: (None, rest)), "gradient of the inputs must be an array"),
    "backward: width": (backward(lambda dx, rest: (dx[..., :3], rest)), "gradient of the inputs .* but d is 6 on"),
    "backward: cropped": (backward(lambda dx, rest: (dx[:, 1:], rest)), "but s is 7 in gradient of the outputs"),
    "backward: precision": (backward(lambda dx, rest: (dx / np.sqrt(2), rest)), "float64 from gradient of the outputs"),
    "backward: no loss": (
        forward(lambda y, saved: (y, saved, Extra(outputs={"size": 1.0})))
        | {"side_outputs": {"size": SideOutput(loss=True)}},
        r"it takes \(self, sh, p, saved, dy\), but is called with \(self, sh, p, saved, dy, side\)",
    ),
    "weights: forgotten": (
        {"backward_weight": lambda self, sh, rest, g: g.einsum("up", "bsd,bsf->df", rest[0], rest[2])},
        "backward_weight of block0/own added nothing to the gradient of down, bias",
    ),
    "weights: not defined": (
        {"backward_weight": Layer.backward_weight},
        "added nothing to the gradient of up, down, bias",
    ),
    "weights: unknown": (
        weights(lambda g, *rest: g.add("W", rest[0])),
        "backward_weight of block0/own: this layer has no parameter 'W'",
    ),
    "weights: returned": (weights(lambda g, *rest: {"up": rest[0]}), r"returned a dict; add gradients to g instead"),
    "weights: assigned": (weights(assigned), r"g\['up'\] cannot be assigned: gradients are added up, by g.add"),
    "weights: added to": (weights(added), r"g\['up'\] \+= ...: write g.add\('up', array\)"),
    "weights: broadcast": (
        weights(lambda g, *rest: g.add("bias", rest[3].sum())),
        r"g.add\('bias'\): the array has shape \(\)",
    ),
    "weights: turned": (
        weights(lambda g, *rest: g.einsum("up", "bsd,bsf->fd", rest[0], rest[2])),
        "backward_weight of block0",
    ),
    "declared: size": (
        declares(parameters={"gate": Parameter("d g")}),
        "'gate'] has dims \"d g\", but sizes has no g: add it",
    ),
    "declared: half a number": (declares(sizes={"f": F / 2}), "sizes is {'d': 6, 'f': 5.0}: give each letter a whole"),
    "declared: an array": (
        declares(parameters={"up": np.zeros((D, F))}),
        r"parameters\['up'\] is a ndarray: make it a Par",
    ),
    "declared: letters alone": (
        declares(parameters={"up": "d f"}),
        r"parameters\['up'\] is a str: make it a Parameter",
    ),
    "declared: a list": (declares(parameters=[Parameter("d f")]), "parameters is a list: make it a dict of names"),
    "declared: in place": ({"__init__": in_place}, "assign a dict first, as in self.parameters"),
    "declared: inputs": (declares(inputs="b s d"), r"inputs is a str: make it a Activation\(\"b s d\"\)"),
    "declared: other letters": ({"outputs": Activation("b d")}, r"shape \(3, 7, 6\), but \[b d\] is declared"),
}


def a_step(layer, bare=False, layers=None, **how):
    own = layers or [("block0/own", layer if bare else Residual(LayerNorm(D), layer))]
    layers = [("embedding", Embedding(V, D)), *own, ("head", Head(V, D))]
    model = Model("toy", tuple(layers), "b s", "b s v", "b s", token_loss(V), LENGTH, V)
    engine = LayeredEngine(model, mesh_of_one(), Layout(), **how)
    return engine.step(batch_of(*tokens(0), engine, 3))


@in_turn(2, case=list(WRONG), bare={"in a block": False, "in the list": True})
def test_a_mistake_of_a_layer_s_author_is_one_line(case, bare):
    changed, message = WRONG[case]
    kind = type("Own", (Layer if "not defined" in case else Gated,), {**vars(Gated), **changed})
    with pytest.raises(UsageError, match=message) as raised:
        a_step(kind(), bare)
    assert str(raised.value).startswith("Own.") and "\n" not in str(raised.value)


@pytest.mark.parametrize("how", [{}, {"recompute": "block"}, {"storage": ZeroConfig(3)}], ids=str)
def test_a_layer_without_a_mistake_is_not_refused(how):
    assert a_step(type("Own", (Gated,), dict(vars(Gated)))(), **how) == a_step(Gated())


def test_a_gradient_forgotten_in_parts_of_the_optimizer_s_is_found_too():
    changed, message = WRONG["weights: forgotten"]
    with pytest.raises(UsageError, match=message):
        a_step(type("Own", (Gated,), changed)(), storage=ZeroConfig(3))


def test_a_layer_in_a_layer_is_named_with_both():
    class Around(Layer):
        def __init__(self, inner):
            self.inner, self.sizes, self.parameters = inner, inner.sizes, inner.parameters

        def forward(self, sh, p, x, ctx):
            return self.inner.forward(sh, p, x, ctx)

        def backward_input(self, sh, p, saved, dy):
            return self.inner.backward_input(sh, p, saved, dy)

        def backward_weight(self, sh, rest, g):
            self.inner.backward_weight(sh, rest, g)

    assert a_step(Around(Gated())) == a_step(Gated())
    both = "Around.forward of block0/own: Own.forward of block0/own: this layer has no parameter 'W'"
    with pytest.raises(UsageError, match=both):
        a_step(Around(type("Own", (Gated,), WRONG["forward: unknown"][0])()))


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([("own", Gated)], r"Model: layers\[1\]\[1\] is the class Gated; give pairs of a name and a Layer"),
        ([Gated()], r"Model: layers\[1\] is a Gated; give pairs of a name and a Layer"),
        ([("own", Gated()), ("own", Gated())], "two layers are called 'own'; give each a name of its own"),
    ],
)
def test_a_list_that_is_none_of_layers_is_refused(layers, message):
    with pytest.raises(UsageError, match=message):
        a_step(None, layers=layers)


def test_layers_whose_sizes_do_not_fit_are_refused_and_both_named():
    layers = ("first", Linear(("d", 8), ("f", 32))), ("second", Linear(("f", 16), ("d", 8)))
    with pytest.raises(
        UsageError, match=r"m: first \(Linear\) makes f of size 32, but second \(Linear\) takes f of 16"
    ):
        Model("m", layers, "b d", "b d", "b d", mean_squared_error)
    with pytest.raises(UsageError, match=r"norm \(LayerNorm\) makes d of size 4, but \(MLP\) takes d of 8"):
        Residual(LayerNorm(4), MLP(8, 16))


def test_samples_of_another_width_are_refused():
    engine = LayeredEngine(two_layers(8, 16), mesh_of_one())
    with pytest.raises(UsageError, match=r"inputs \[b d\] have shape \(4, 6\), but d is 8 in layer_0 \(Linear\)"):
        batch_of(np.zeros((4, 6)), np.zeros((4, 8)), engine)


@pytest.mark.parametrize("loss", [mean_squared_error, cross_entropy, lambda y, targets, *, count: (0.0, y)])
def test_a_model_takes_losses_of_whole_samples(loss):
    targets = "b" if loss is cross_entropy else "b d"
    model = Model("m", (("only", Linear(("f", 4), ("d", 3))),), "b f", "b d", targets, loss)
    engine = LayeredEngine(model, mesh_of_one(), dtype=np.float64)
    x, y = np.ones((2, 4)), np.zeros((2, 3)) if targets == "b d" else np.zeros(2, int)
    expected, _ = loss(engine.forward(x), y, count=y.size)
    assert engine.step(batch_of(x, y, engine)) == pytest.approx(expected)
    assert replace(model, name="other").loss is model.loss


def of_one(layer, inputs="b d", loss=mean_squared_error):
    return Model("m", (("a", layer),), inputs, "b f", "b f", loss)


REFUSED = {
    r"Linear: inputs is 5; give a letter and its size, as \(\"d\", 64\)": lambda: Linear(5, 3),
    r"Linear: inputs\[1\] is '5'; give a letter": lambda: Linear(("d", "5"), ("f", 3)),
    "MLP: width is 4.5; give a whole number": lambda: MLP(4.5, 8),
    "Embedding: vocabulary is -3; it must be from 1": lambda: Embedding(-3, 4),
    "LayerNorm: width is '4'; give a whole number": lambda: LayerNorm("4"),
    "GatedMLP: hidden is 0; it must be from 1": lambda: GatedMLP(4, 0),
    "Chain: give pairs of a name and a layer": Chain,
    "m: inputs is 'bd'; write letters with blanks between": lambda: of_one(Linear(("d", 5), ("f", 3)), "bd"),
    "Model: inputs is a list of 2; give a text": lambda: of_one(Linear(("d", 5), ("f", 3)), ["b", "d"]),
    "Model: loss is None; give a function": lambda: of_one(Linear(("d", 5), ("f", 3)), loss=None),
    r"inputs \[b d\] must be an array of these dims, not a list of 1": lambda: LayeredEngine(
        two_layers(8, 16), mesh_of_one()
    ).forward([[1.0] * 8]),
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_model_of_wrong_types_is_refused_when_it_is_made(message):
    with pytest.raises(UsageError, match=message):
        REFUSED[message]()


class InPlace(MLP):
    """An MLP that scales its input, or its outputs' gradient, where other layers have it, too."""

    def __init__(self, changed):
        super().__init__(4, 8)
        self.changed = changed

    def forward(self, sh, p, x, ctx):
        x *= 2 if self.changed == "x" else 1
        return super().forward(sh, p, x, ctx)

    def backward_input(self, sh, p, saved, dy):
        dy *= 2 if self.changed == "dy" else 1
        return super().backward_input(sh, p, saved, dy)


@pytest.mark.parametrize(("changed", "method"), [("x", "forward"), ("dy", "backward_input")])
def test_a_layer_that_changes_its_argument_in_place_is_named(changed, method):
    layers, letters = (("a", Residual(LayerNorm(4), InPlace(changed))),), ["b s d"] * 3
    model = Model("m", layers, *letters, mean_squared_error, context=3)
    engine, x = LayeredEngine(model, mesh_of_one()), np.arange(24, dtype=np.float32).reshape(2, 3, 4) ** 2
    with pytest.raises(UsageError, match=f"InPlace.{method} of a changes its argument {changed} in place"):
        engine.step(batch_of(x, 0 * x, engine))
