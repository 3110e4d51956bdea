"""Networks on images, cut every way: what one device computes, running statistics included."""

from itertools import product

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.engine import LayeredEngine, schedules
from spmd_engine.engine.batch import batch_of
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.engine.pipeline import Recompute
from spmd_engine.errors import MeshError, UsageError
from spmd_engine.models import ImageShape, build_model, convnet, layout_for
from support.pictures import BATCH, SHAPE, assert_same, pictures, small_convnet, small_resnet, train

MODELS = {
    "convnet": small_convnet,
    "resnet": small_resnet,
    "bottleneck": lambda **how: small_resnet(bottleneck=True, large=False, **how),
}
ALONE = {}
BLOCK = Recompute.BLOCK


def holds(model, axes, *, reshard_after=None, **how):
    """Training on this mesh is what one device does, which is computed once for all tests."""
    if model not in ALONE:
        ALONE[model] = train(MODELS[model](), {"data": 1})[0]
    assert_same(train(MODELS[model](reshard_after=reshard_after), axes, **how), ALONE[model])


#: Each with several things at once.
WAYS = {
    "samples": ("resnet", {"data": 3}, {"zero": 2}),
    "rows": ("bottleneck", {"rows": 2}, {"recompute": BLOCK}),
    "rows, of which some ranks have none": ("convnet", {"rows": 6}, {}),
    "columns": ("resnet", {"columns": 3}, {"zero": 1}),
    "channels": ("bottleneck", {"model": 4}, {}),
    "channels of which some ranks have none": ("resnet", {"model": 8}, {"zero": 3}),
    "channels and rows": ("bottleneck", {"model": 3, "rows": 2}, {"recompute": BLOCK}),
    "channels, then samples": ("resnet", {"model": 3, "columns": 2}, {"reshard_after": 1}),
    "rows and columns": ("convnet", {"columns": 2, "rows": 2}, {"recompute": BLOCK, "zero": 1}),
    "channels, rows and columns": ("resnet", {"model": 2, "rows": 2, "columns": 2}, {}),
    "channels and samples": ("convnet", {"data": 2, "model": 3}, {"zero": 3}),
    "shards": ("convnet", {"replicate": 2, "shard": 2, "rows": 2}, {}),
    "rows, then samples": ("resnet", {"rows": 2, "data": 2}, {"reshard_after": 2, "zero": 3, "recompute": BLOCK}),
    "rows and columns, then samples": ("bottleneck", {"rows": 2, "columns": 2}, {"reshard_after": 1}),
    "stages": ("resnet", {"pipe": 3}, {"schedule": "gpipe"}),
    "stages of rows": ("convnet", {"pipe": 2, "rows": 2}, {"schedule": "1f1b", "reshard_after": 2}),
    "stages of channels": ("bottleneck", {"pipe": 2, "model": 2}, {"schedule": "zero-bubble", "recompute": BLOCK}),
    "stages of samples": ("convnet", {"data": 2, "pipe": 2}, {"schedule": "interleaved", "zero": 2}),
}


#: What other ways have in other pairs.
LATER = {
    "columns", "channels", "channels and rows", "channels, rows and columns", "channels, then samples", "shards",
    "rows and columns, then samples", "stages", "rows, of which some ranks have none", "stages of rows",
}  # fmt: skip


@pytest.mark.parametrize("way", [pytest.param(way, marks=[pytest.mark.soak] * (way in LATER)) for way in WAYS])
def test_any_way_as_one_device(way):
    model, axes, how = WAYS[way]
    holds(model, axes, **how)


MESHES = [
    *({axis: n} for axis in ("data", "rows", "columns", "model") for n in (2, 3, 8)),
    *({a: 2, b: 3} for a, b in (("rows", "columns"), ("model", "rows"), ("data", "rows"), ("columns", "data"))),
    {"model": 2, "rows": 2, "data": 2},
    {"rows": 2, "columns": 2, "data": 2},
    {"pipe": 2, "rows": 2, "model": 2},
]


HOW = [{}, {"zero": 1}, {"zero": 2}, {"zero": 3, "recompute": BLOCK}, {"reshard_after": 2}]


@pytest.mark.soak
@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_every_mesh(model, axes, how):
    holds(model, axes, **how)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("schedule", "axes", "recompute"),
    list(
        product(
            [name for name in schedules.SCHEDULES if name != "sequential"],
            [{"pipe": 2, "data": 2}, {"pipe": 2, "rows": 3}, {"pipe": 2, "model": 2, "columns": 2}],
            [Recompute.NONE, BLOCK],
        )
    ),
    ids=str,
)
def test_every_schedule(schedule, axes, recompute):
    holds("convnet", axes, schedule=schedule, recompute=recompute, reshard_after=2)


# --- sizes, and what is sent


def test_residual_networks_are_as_large_as_everybody_s():
    """The numbers of parameters that torchvision gives."""
    assert build_model("resnet18").parameter_count == 11_689_512
    assert build_model("resnet50").parameter_count == 25_557_032


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_network_cut_in_channels_sends_what_is_whole_between_its_blocks(ranks):
    """Together (n - 1) times: what is gathered (stem, projections, the head's inputs' gradient) once, of what is
    reduced (blocks' outputs and their inputs' gradients, scores) twice the bytes."""

    def program():
        with Mesh(model=ranks) as mesh:
            engine = LayeredEngine(small_resnet(), mesh, dtype=np.float64)
            batch = batch_of(*pictures(0), engine)
            engine.count(batch)
            mesh.ledger.clear()
            engine.step(batch)
            return {
                name: sum(e.sent for (_, _, label), e in mesh.ledger.entries.items() if label == name)
                for name in (*dict(engine.model.layers), "gradients")
            }

    found = [sum(each) for each in zip(*(rank.values() for rank in run_threads(program, ranks)))]
    stem, first, half, mean, scores = (8 * BATCH * n for n in (2 * 2 * 3, 2 * 2 * 3, 1 * 1 * 6, 6, 5))
    expected = {
        "stem/gather": stem,
        "block0/residual": 2 * first + 2 * stem,
        "block1/residual": 2 * half + 2 * first + half,
        "block2/residual": 2 * half + 2 * half,
        "head": 2 * scores + mean,
    }
    names = [*dict(small_resnet().layers), "gradients"]
    assert dict(zip(names, found)) == {name: (ranks - 1) * expected.get(name, 0) for name in names}


def test_a_model_is_built_for_the_images_at_hand():
    model = build_model("convnet", sample=ImageShape(28, 28, 3, 7))
    shapes = {name: shape for name, (_, shape) in model.parameters()}
    assert shapes["block0/conv/weights"] == (3, 3, 3, 32) and shapes["head/weights"] == (64, 7)
    assert model.sample == (28, 28, 3)


def activations(axes, model):
    """Bytes that each rank's forward keeps for its backward."""

    def program():
        with Mesh(**axes) as mesh:
            engine = LayeredEngine(model, mesh, dtype=np.float64)
            kept = {}

            def wrap(name, layer):
                class Seen(type(layer)):
                    def forward(self, *given):
                        y, saved, *extra = super().forward(*given)
                        kept[name] = saved
                        return y, saved, *extra

                seen = object.__new__(Seen)
                seen.__dict__ = layer.__dict__
                return seen

            x = np.zeros((2, *model.sample))
            with engine.wrapped(wrap):
                engine.step(batch_of(x, np.zeros(2, int), engine))
            whole = {id(array): array for array in arrays_in(list(kept.values()))}
            return sum(array.nbytes for array in whole.values())

    return run_threads(program, int(np.prod(list(axes.values()))))


def arrays_in(thing):
    if isinstance(thing, np.ndarray):
        yield thing
    elif isinstance(thing, (list, tuple, dict)):
        for each in thing.values() if isinstance(thing, dict) else thing:
            yield from arrays_in(each)


def test_what_is_kept_of_images_cut_in_n_parts_is_an_nth_and_the_halos():
    """Of the inputs of convolutions a row on either side is kept besides; of all else nothing."""
    model = convnet(ImageShape(64, 32, 3, 10), channels=(8, 8))
    (alone,) = activations({"data": 1}, model)
    row = 2 * 32 * 8 * (3 + 8)  # bytes of what both convolutions keep of a row of inputs
    for ranks in (2, 4):
        for kept in activations({"rows": ranks}, model):
            assert alone / ranks < kept <= alone / ranks + 2 * row + 1000


# --- mistakes, and what is said


@pytest.mark.parametrize(
    ("model", "axes", "message"),
    [
        ("convnet", {"context": 2}, "takes .b h w c.; give its ranks to 'data', 'rows' or 'columns'"),
        ("convnet", {"row": 2}, "axis 'row' shards nothing that convnet has"),
        ("gpt-nano", {"rows": 2}, "axis 'rows' shards images, but gpt-nano takes .b s."),
        ("mlp", {"columns": 2}, "axis 'columns' shards images, but mlp takes .b d."),
    ],
)
def test_an_axis_that_cuts_nothing_is_refused(model, axes, message):
    def program():
        with Mesh(**axes) as mesh, pytest.raises(MeshError, match=message):
            layout_for(build_model(model), mesh)

    run_threads(program, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: build_model("convnet", reshard_after=4), "--reshard-after 4: the model has 4 blocks; choose 1 to 3"),
        (lambda: build_model("gpt-nano", reshard_after=1), "no model of images; choose convnet or"),
        (lambda: build_model("resnet18", dropout=0.1), "resnet18 has no dropout"),
        (lambda: convnet(channels=(4,)), "they come in pairs"),
    ],
)
def test_a_mistake_is_named(make, message):
    with pytest.raises(UsageError, match=message):
        make()


def test_images_of_another_size_are_refused():
    engine = LayeredEngine(small_convnet())
    with pytest.raises(UsageError, match=r"have shape \(8, 8, 2\), the model was built for \(8, 7, 2\)"):
        batch_of(np.zeros((3, 8, 8, 2)), np.zeros(3, int), engine)


def test_so_thin_a_cut_that_halos_outweigh_what_ranks_have_is_noted():
    model = convnet(SHAPE)
    (notice,) = ParallelConfig().check({"rows": 8}, model)
    assert "rows=8" in notice and "more than" in notice
    assert ParallelConfig().check({"rows": 2}, model) == []
    assert ParallelConfig().check({"data": 8}, model) == []
