"""Experts anywhere: on every mesh the losses, gradients, parameters and counts are those of one device."""

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.axes import all_positions
from spmd_engine.checkpoints import load_checkpoint, save_checkpoint
from spmd_engine.engine import AdamW, LayeredEngine, schedules
from spmd_engine.engine.batch import make_batch
from spmd_engine.engine.pipeline import Recompute
from spmd_engine.engine.state.assignment import ZeroConfig, assign
from spmd_engine.errors import MeshError, UsageError
from spmd_engine.layers import RouterOptions
from spmd_engine.models import GPTSize, Mixture, gpt
from spmd_engine.sharding import Layout
from spmd_engine.training import Trainer
from support import routed, tiny

BLOCK = Recompute.BLOCK
PARALLEL = {"layout": {"sequence_parallel": True}}
OVER_BOTH = {"layout": {"experts_over": ("data", "context")}}
SCATTERED = {"layout": {"experts": {"block0/moe": (2, 0, 2, 0, 2)}}}  # part 1 has none

#: Mesh, router and number of experts, and how: each appears once with most of the others.
WAYS = [
    ("data=3", "all losses", 5, {"zero": 2}),
    ("expert=2", "position", 5, {"recompute": BLOCK}),
    ("expert=3", "random", 10, SCATTERED | {"of": {"experts": 5}}),
    ("expert=4", "dropless", 10, {"zero": 3}),
    ("expert=4", "probability", 3, {}),  # the last rank has none
    ("expert=6", "dropless", 5, {"zero": 1}),  # the last rank has none, here too
    ("expert=2,data=2", "sigmoid of three", 5, {"zero": 3, "recompute": BLOCK}),
    ("expert=4,data=2", "sigmoid of three", 10, {"zero": 3, "recompute": BLOCK}),
    ("expert=2,model=2", "all losses", 5, PARALLEL),
    ("expert=2,pipe=2", "position", 5, {"schedule": "zero-bubble"}),
    ("expert=2,model=2,pipe=2", "position", 5, PARALLEL | {"schedule": "zero-bubble"}),
    ("data=2,context=2", "all losses", 5, OVER_BOTH | {"zero": 2}),
    ("context=2,expert=2", "probability", 5, {"layout": {"zigzag": True}, "recompute": BLOCK}),
    ("context=2,expert=3", "probability", 5, {"layout": {"zigzag": True}, "recompute": BLOCK}),
    ("replicate=2,shard=2", "balanced", 5, {"layout": {"experts_over": ("shard",)}}),
    ("expert=3,data=2", "dropless", 5, SCATTERED | {"zero": 2}),
]
MESHES = ["data=2", "expert=3", "expert=2,data=2", "expert=2,model=2,pipe=2", "data=2,context=2", "expert=8"]
HOWS = [{}, {"zero": 1}, {"zero": 2}, {"zero": 3}, {"recompute": BLOCK}]


def axes_of(mesh):
    return {axis: int(size) for axis, size in (part.split("=") for part in mesh.split(","))}


def assert_exact(mesh, router, experts, how):
    of = {"router": router, "experts": experts, "shared": 1, **how.get("of", {})}
    how = {name: value for name, value in how.items() if name != "of"}
    of = tuple(of.items())
    routed.assert_as_alone(routed.train(axes_of(mesh), of=of, **how), routed.alone(of=of))


#: What these show, those of more axes show, and those of other ranks that hold none.
LATER = [
    ("expert=4", "dropless"),
    ("expert=6", "dropless"),
    ("expert=4,data=2", "sigmoid of three"),
    ("expert=2,model=2,pipe=2", "position"),
    ("context=2,expert=3", "probability"),
    ("data=3", "all losses"),
    ("expert=2", "position"),
    ("expert=4", "probability"),
    ("replicate=2,shard=2", "balanced"),
    ("data=2,context=2", "all losses"),
]
NOW_AND_LATER = [pytest.param(way, marks=pytest.mark.soak if way[:2] in LATER else []) for way in WAYS]


@pytest.mark.parametrize("way", NOW_AND_LATER, ids=lambda way: f"{way[0]} {way[1]} {way[2]}")
def test_training_is_that_of_one_device(way):
    assert_exact(*way)


@pytest.mark.soak
@pytest.mark.parametrize("how", HOWS, ids=str)
@pytest.mark.parametrize("router", routed.ROUTERS)
@pytest.mark.parametrize("mesh", MESHES)
def test_training_is_that_of_one_device_in_every_way(mesh, router, how):
    assert_exact(mesh, router, 5, how)


@pytest.mark.soak
@pytest.mark.parametrize("schedule", [name for name in schedules.SCHEDULES if name != "sequential"])
def test_every_schedule(schedule):
    assert_exact("expert=2,pipe=2", "all losses", 5, {"schedule": schedule, "recompute": BLOCK})


# --- who has what


def plans(mesh, experts=5, zero=None, **layout):
    places = all_positions(axes_of(mesh))
    built = routed.model(experts=experts)
    made = Layout.for_mesh(places[0], **layout)
    return [assign(built, place, made, 8, storage=ZeroConfig(zero, threshold=2000)) for place in places], places


def of_experts(plan, layer=0):
    return {name.split("/")[2] for member in plan.members if (name := member.name).startswith(f"block{layer}/moe/exp")}


def test_experts_are_as_even_as_can_be_and_some_ranks_have_none():
    held, _ = plans("expert=4", experts=10)
    assert [len(of_experts(plan)) for plan in held] == [3, 3, 2, 2]
    held, _ = plans("expert=4,data=2", experts=3)
    assert [sorted(of_experts(plan)) for plan in held[::2]] == [["expert0"], ["expert1"], ["expert2"], []]


def test_a_layout_says_where_each_layer_s_experts_are():
    held, _ = plans("expert=3")
    even = [of_experts(plan, 1) for plan in held]
    places = all_positions({"expert": 3})
    layout = Layout.for_mesh(places[0], experts={"block1/moe": (2, 0, 2, 0, 2)})
    held = [assign(routed.model(), place, layout, 8) for place in places]
    assert [of_experts(plan, 1) for plan in held] == [{"expert1", "expert3"}, set(), {"expert0", "expert2", "expert4"}]
    assert [of_experts(plan, 0) for plan in held] == even  # of this layer nothing was said


def test_groups_are_the_same_under_the_same_names_on_all_ranks_that_have_them():
    """Else ranks would call each other's collectives in other orders, or with other arrays."""
    held, places = plans("expert=4,data=2", zero=3)
    content = {}
    for plan, place in zip(held, places, strict=True):
        for group in plan.groups:
            there = content.setdefault(group.name, [])
            there.append((place.coordinates["expert"], [(m.name, m.shape) for m in group.members], group.summed))
    for name, said in content.items():
        assert all(each[1:] == said[0][1:] for each in said), name
        dense = "expert" in said[0][2].over
        assert len({expert for expert, *_ in said}) == (4 if dense else 1), name


def test_gradients_of_experts_are_summed_over_the_axes_that_replicate_them():
    held, _ = plans("replicate=2,expert=2,data=2")
    sums = {member.name.split("/")[-2][:6]: member.summed.over for member in held[0].members}
    assert sums["expert"] == ("replicate", "data")
    assert sums["attent"] == ("replicate", "expert", "data")


def test_every_element_is_counted_once():
    def program():
        with Mesh(expert=3, data=2) as mesh:
            engine = routed.engine_on(mesh, routed.model(experts=4), zero=2)
            return {name for name in engine.names if engine.counts_here(name)}, engine.names

    found = run_threads(program, 6)
    everywhere = [name for counted, _ in found for name in counted if name.startswith("block0/moe/expert")]
    assert len(everywhere) == len(set(everywhere)) * 2 and len(set(everywhere)) == 8  # ZeRO: the rows of two owners


@pytest.mark.parametrize("over", ["model", "pipe"])
def test_experts_cannot_be_where_tokens_are_the_same(over):
    with pytest.raises(MeshError, match=f"over axis {over!r}, along which ranks have the same tokens or none"):
        Layout.for_mesh(all_positions({"data": 2, over: 2})[0], experts_over=(over,))


@pytest.mark.parametrize("parts", [(0, 1), (0, 1, 2, 3, 0), (0, 0, 0, 0, -1)])
def test_parts_that_are_not_there_are_refused(parts):
    layout = Layout.for_mesh(all_positions({"expert": 3})[0], experts={"block0/moe": parts})
    with pytest.raises(MeshError, match="block0/moe: 5 experts in parts .* parts are 0 to 2"):
        assign(routed.model(), all_positions({"expert": 3})[0], layout, 8)


# --- moving


def test_experts_move_between_steps_with_their_state():
    def move(engine, optimizer):
        layout = Layout.for_mesh(engine.mesh, experts={"block0/moe": (2, 2, 0, 1, 0), "block1/moe": (1, 1, 1, 1, 1)})
        engine.reshard(engine.mesh, layout, optimizer=optimizer, storage=ZeroConfig(1))
        assert len([n for n in engine.parameters if "block1/moe/expert" in n]) == (10 if engine.device_id == 1 else 0)

    found = routed.train({"expert": 3}, between=move, zero=1)
    routed.assert_as_alone(found, routed.alone())


def test_only_what_moves_is_sent():
    def program():
        with Mesh(expert=2) as mesh:
            engine = routed.engine_on(mesh, routed.model(experts=4))
            layout = Layout.for_mesh(mesh, experts={"block1/moe": (0, 1, 1, 1)})
            engine.reshard(mesh, layout, storage=ZeroConfig(threshold=2000))
            return mesh.ledger.total(label="reshard").sent

    assert run_threads(program, 2) == [2 * 12 * 10 * 8, 0]  # expert 1 of one layer: two matrices


@pytest.mark.parametrize(
    "after",
    [
        *(pytest.param(axes, marks=pytest.mark.soak) for axes in ({"data": 4}, {"expert": 2, "model": 2})),
        {"pipe": 2, "expert": 2},
    ],
    ids=str,
)
def test_a_training_goes_on_on_another_mesh(after):
    def move(engine, optimizer):
        other = Mesh(**after)
        engine.reshard(other, Layout.for_mesh(other), optimizer=optimizer, storage=ZeroConfig(1))

    found = routed.train({"expert": 4}, between=move, zero=3, of=(("experts", 5),))
    routed.assert_as_alone(found, routed.alone(of=(("experts", 5),)))


def test_a_checkpoint_goes_on_on_another_mesh(tmp_path):
    """Experts under their global names: whoever has one now finds it, with its optimizer state."""
    expected = routed.alone(of=(("router", "all losses"),), steps=3)

    def program(axes, first, last):
        with Mesh(**axes) as mesh:
            engine, optimizer = routed.engine_on(mesh, routed.model("all losses"), zero=2), AdamW()
            if first:
                assert load_checkpoint(tmp_path, engine, optimizer)["step"] == first
            trainer = Trainer(
                engine,
                optimizer,
                lambda step: tiny.batch(engine, step, 2),
                lambda step: 0.05,
                grad_clip=0.3,
                first_step=first,
            )
            losses = [number for report in trainer.run(last) for number in (report.loss, report.grad_norm)]
            save_checkpoint(tmp_path, engine, optimizer, step=last)
            return losses

    losses = (
        run_threads(lambda: program({"expert": 4}, 0, 2), 4)[0] + run_threads(lambda: program({"data": 3}, 2, 3), 3)[0]
    )
    np.testing.assert_allclose(losses, expected[0]["losses"][:6], rtol=1e-9)


# --- what is wrong is said


def test_too_few_experts_for_a_token():
    with pytest.raises(UsageError, match="top_k is 2, but there are 1 experts"):
        routed.model(experts=1)


def test_the_gradient_fits_the_loss():
    """The directional derivative of the step's loss, auxiliary ones included, in all parameters at once."""
    built = routed.model("all losses", shared=1)
    with Mesh() as mesh:
        engine = routed.engine_on(mesh, built)
        for _, p in engine.parameters.items():
            p *= 10.0  # so that what experts do is more than rounding
        batch = tiny.batch(engine, 0, 3)
        rng = np.random.default_rng(0)
        along = {name: rng.standard_normal(p.shape) for name, p in engine.parameters.items()}
        engine.step(batch)
        gradients = engine.named(engine.gradients)
        slope = sum((gradients[name] * along[name]).sum() for name in along)

        def at(distance):
            for name, p in engine.parameters.items():
                p += distance * along[name]
            loss = engine.step(batch)
            for name, p in engine.parameters.items():
                p -= distance * along[name]
            return loss

        np.testing.assert_allclose((at(1e-7) - at(-1e-7)) / 2e-7, slope, rtol=1e-5)


def test_documents_that_begin_alike_lose_the_same_tokens_on_every_mesh():
    """Equal tokens have equal weights, but for rounding errors that differ between meshes."""
    mixture = Mixture(3, 0, 8, "", RouterOptions(capacity_factor=0.6, drop_by="probability"))
    built = gpt(GPTSize(layers=2, width=64, heads=4, context=8, vocabulary=13, mixture=mixture))
    rows = np.random.default_rng(4).integers(0, 13, (34, 3))
    rows[:, 0] = rows[0, 0]

    def loss(axes):
        def program():
            with Mesh(**axes) as mesh:
                engine = LayeredEngine(built, mesh, dtype=np.float64, seed=4)
                return engine.step(make_batch(lambda samples: (rows[samples, :-1], rows[samples, 1:]), 34, 1, engine))

        return run_threads(program, tiny.ranks_of(axes))[0]

    expected = loss({"data": 1})
    for axes in {"data": 2}, {"model": 3}, {"data": 2, "expert": 2}:
        np.testing.assert_allclose(loss(axes), expected, rtol=1e-12, err_msg=str(axes))
