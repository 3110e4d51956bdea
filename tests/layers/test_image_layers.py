"""Convolutions, pooling and norms of images, their letters cut in every way, on virtual ranks: as one device."""

from functools import cache

import numpy as np
import pytest

from spmd_engine import Mesh
from spmd_engine.arrays.windows import Window
from spmd_engine.errors import UsageError
from spmd_engine.layers import (
    AveragePool,
    BatchNorm,
    Chain,
    Conv2d,
    ForwardContext,
    GlobalPool,
    GroupNorm,
    MaxPool,
    ReLU,
    Reshard,
    ResidualBlock,
    convolution,
)
from spmd_engine.layers.images import inner_outputs, part_of
from spmd_engine.sharding import Layout, Shards
from support.image_layers import BATCH, IMAGE, ONE, Problem, assert_as_one_device, assert_same, slope, solve
from support.numerics import normals
from support.pairwise import in_turn

CONVOLUTIONS = {
    "3x3": Conv2d(("c", 4), ("f", 7), IMAGE, 3, padding=1),
    "back": Conv2d(("f", 5), ("c", 4), IMAGE, 3, padding=1),
    "even, same, stride 2": Conv2d(("c", 4), ("f", 3), IMAGE, (4, 2), stride=2, padding="same"),
    "padded on one side": Conv2d(("f", 4), ("c", 3), IMAGE, (3, 2), padding=((2, 0), (0, 3))),
    "dilated": Conv2d(("c", 2), ("f", 3), IMAGE, 3, dilation=(2, 3), stride=(1, 2), padding=3),
    "gaps": Conv2d(("c", 2), ("f", 3), IMAGE, 1, stride=3, bias=False),
    "all of it": Conv2d(("c", 2), ("f", 3), IMAGE, IMAGE),
    "one letter": Conv2d(("f", 5), ("f", 7), IMAGE, 3, padding=1),
    "groups": Conv2d(("f", 6), ("f", 9), IMAGE, 3, groups=3, padding="same"),
    "depthwise": Conv2d(("f", 5), ("f", 10), IMAGE, (3, 1), groups=5, stride=2),
}
_BRANCH = [
    ("conv0", Conv2d(("c", 4), ("f", 5), IMAGE, 3, stride=2, padding=1, bias=False)),
    ("norm0", BatchNorm(("f", 5))),
    ("relu0", ReLU("bhwf")),
    ("conv1", Conv2d(("f", 5), ("c", 4), (4, 3), 3, padding=1, bias=False)),
    ("norm1", BatchNorm(("c", 4))),
]
_SHORTCUT = [("conv", Conv2d(("c", 4), ("c", 4), IMAGE, 1, stride=2)), ("norm", BatchNorm(("c", 4)))]
OTHERS = {
    "maxima": MaxPool(IMAGE, 3, stride=2, padding=1, letters="bhwf"),
    "maxima of parts": MaxPool(IMAGE, (2, 3), letters="bhwf"),
    "average": AveragePool(IMAGE, 3, stride=2, padding=1, count_include_pad=True, letters="bhwf"),
    "average without padding": AveragePool(IMAGE, 2, stride=1, padding="same", count_include_pad=False, letters="bhwf"),
    "mean": GlobalPool(IMAGE, "bhwf"),
    "batch norm": BatchNorm(("f", 5)),
    "group norm": GroupNorm(("f", 6), 3, IMAGE),
    "layer norm": GroupNorm(("f", 5), 1, IMAGE),
    "relu": ReLU("bhwf"),
    "block": ResidualBlock(Chain(*_BRANCH), Chain(*_SHORTCUT)),
}
LAYERS = CONVOLUTIONS | OTHERS
CUTS = {
    "samples": ({"data": 4}, {"b": ("data",)}),
    "rows": ({"rows": 2}, {"h": ("rows",)}),
    "rows in 8 parts": ({"rows": 8}, {"h": ("rows",)}),
    "columns": ({"columns": 4}, {"w": ("columns",)}),
    "channels": ({"model": 3}, {"f": ("model",)}),
    "channels in 8 parts": ({"model": 8}, {"f": ("model",)}),
    "rows and columns": ({"rows": 3, "columns": 2}, {"h": ("rows",), "w": ("columns",)}),
    "all": (
        {"model": 2, "data": 2, "rows": 2},
        {"b": ("data",), "h": ("rows",), "f": ("model",)},
    ),
    "channels by shares": ({"model": 3}, {"f": ("model",)}, {"model": (0, 5, 2)}),
    "rows and columns by shares": (
        {"rows": 3, "columns": 2},
        {"h": ("rows",), "w": ("columns",)},
        {"rows": (1, 0, 2), "columns": (1, 3)},
    ),
}


def problem_of(name):
    layer = LAYERS[name]
    letter = layer.inputs.dims[-1]
    channels = {"one letter": 5, "groups": 6, "depthwise": 5, "block": 4}.get(name) or layer.sizes.get(letter, 5)
    return Problem(layer, channels)


SOON = "samples", "rows in 8 parts", "channels", "channels by shares", "all"  # the others take long, together


LATER = [pytest.param(cut, marks=pytest.mark.soak) for cut in CUTS if cut not in SOON]


@in_turn(4, name=list(LAYERS), cut=[*SOON, *LATER])
def test_any_cut_as_one_device(name, cut):
    for results, _ in solve(problem_of(name), CUTS[cut]):
        assert_same(results, alone(name))


@cache
def alone(name):
    ((results, _),) = solve(problem_of(name), ONE)
    return results


@pytest.mark.parametrize("name", LAYERS)
def test_backward_is_the_slope_of_forward(name):
    found, expected = slope(problem_of(name))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@in_turn(2, name=["3x3", "even, same, stride 2", "dilated", "all of it"], cut=["rows in 8 parts", "rows and columns"])
def test_inner_outputs_are_computed_while_the_halo_travels(name, cut, monkeypatch):
    problem = problem_of(name)
    waited = solve(problem, CUTS[cut])
    monkeypatch.setattr(convolution, "OVERLAP_FROM", 0)
    for (results, sent), (expected, as_much) in zip(solve(problem, CUTS[cut]), waited, strict=True):
        assert sent == as_much
        np.testing.assert_allclose(results["y"], expected["y"], rtol=0, atol=1e-13)
    assert_as_one_device(problem, CUTS[cut])


# --- what is sent


UNGROUPED = [name for name in CONVOLUTIONS if "groups" not in name and name != "depthwise"]


@in_turn(3, name=UNGROUPED, cut=["rows", "columns", "rows in 8 parts"])
def test_halos_are_the_bytes_that_outputs_lack(name, cut):
    """Forward, what outputs read and their rank has not, element by element; backward, the same."""
    problem, (axes, cuts) = problem_of(name), CUTS[cut]
    axis, dim = next(iter(axes)), 0 if "h" in cuts else 1
    window = (problem.layer.windows.rows, problem.layer.windows.columns)[dim]
    row = 8 * BATCH * IMAGE[1 - dim] * problem.x.shape[3]  # bytes of a row, or of a column
    ranks, outputs = axes[axis], window.outputs(IMAGE[dim])
    lacking = 0
    for own, made in zip(spans(IMAGE[dim], ranks), spans(outputs, ranks), strict=True):
        lacking += len(interval(window, made, IMAGE[dim]) - set(own))
    assert sum(sent for _, sent in solve(problem, (axes, cuts))) == 2 * row * lacking


def spans(length, parts):
    """As even as can be, the first ones longer: by definition."""
    sizes = [length // parts + (i < length % parts) for i in range(parts)]
    starts = np.cumsum([0, *sizes]).tolist()
    return [range(a, b) for a, b in zip(starts, starts[1:])]


def interval(window, outputs, length):
    """From the first to the last tap of these outputs, padding left out."""
    taps = [p * window.stride - window.before + t * window.dilation for p in outputs for t in range(window.size)]
    return {i for i in range(length) if taps and min(taps) <= i <= max(taps)}


# --- ties, borders, statistics


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_ties_go_to_the_first_in_the_order_of_the_whole_image(ranks):
    """All are equal: the gradient of each window belongs to its first element, also where a neighbour has it."""
    pool = MaxPool((8, 8), 3, stride=2, padding=1, letters="bhwc")

    def expected():
        dx = np.zeros((1, 8, 8, 1))
        for p in range(4):
            for q in range(4):
                dx[0, max(0, 2 * p - 1), max(0, 2 * q - 1)] += 1
        return dx

    problem = Problem(pool, 1, batch=1, image=(8, 8))
    problem.x, problem.dy = np.ones((1, 8, 8, 1)), np.ones((1, 4, 4, 1))
    for results, _ in solve(problem, ({"rows": ranks}, {"h": ("rows",)})):
        np.testing.assert_array_equal(results["dx"], expected())


def test_a_batch_norm_is_over_everything_and_its_running_variance_is_unbiased():
    problem = problem_of("batch norm")
    flat = problem.x.reshape(-1, 5)
    for results, _ in solve(problem, CUTS["all"]):
        np.testing.assert_allclose(results["mean"], flat.mean(0), rtol=0, atol=1e-13)
        np.testing.assert_allclose(results["variance"], flat.var(0, ddof=1), rtol=1e-12)
        normal = (flat - flat.mean(0)) / np.sqrt(flat.var(0) + 1e-5)
        y = normal * problem.p["scale"] + problem.p["shift"]
        np.testing.assert_allclose(results["y"], y.reshape(problem.x.shape), rtol=0, atol=1e-12)


def test_in_evaluation_a_batch_norm_uses_what_ran():
    norm, x = BatchNorm(("c", 2), momentum=0.25), normals(2, 3, 3, 2)
    p = {"scale": np.ones(2), "shift": np.zeros(2), "mean": np.zeros(2), "variance": np.ones(2)}
    sh, ctx = Shards(Mesh(), Layout({}, {}), "norm"), ForwardContext(None, None, training=True)
    _, _, extra = norm.forward(sh, p, x, ctx)
    for name, buffer in norm.buffers.items():
        p[name] = buffer.fold(p[name], extra.updates[name])
    mean, variance = 0.25 * x.mean((0, 1, 2)), 0.75 + 0.25 * x.reshape(-1, 2).var(0, ddof=1)
    y, saved = norm.forward(sh, p, x, ForwardContext(None, None, training=False))
    np.testing.assert_allclose(y, (x - mean) / np.sqrt(variance + 1e-5), rtol=1e-12)
    assert saved is None


def test_statistics_do_not_lose_what_a_large_mean_hides():
    """In float32, about 10,000: the sum of squares minus the square of the sum would be noise."""
    x = (10_000 + normals(4, 8, 8, 1)).astype(np.float32)
    norm = BatchNorm(("c", 1))
    p = {"scale": np.ones(1, np.float32), "shift": np.zeros(1, np.float32)}
    sh = Shards(Mesh(), Layout({}, {}), "norm")
    y, *_ = norm.forward(sh, p, x, ForwardContext(None, None, training=True))
    assert abs(y.std() - 1) < 1e-3 and abs(y.mean()) < 1e-2


# --- from one cut to another

RECUTS = {
    "rows for samples": ({"rows": 2}, {"h": ("rows",), "n": ("rows",)}),
    "rows and columns for samples, of which some ranks have none": (
        {"rows": 3, "columns": 2},
        {"h": ("rows",), "w": ("columns",), "n": ("rows", "columns")},
    ),
    "rows for copies": ({"rows": 4}, {"h": ("rows",)}),
    "some samples stay": (
        {"rows": 2, "data": 2, "model": 2},
        {"b": ("data",), "h": ("rows",), "n": ("data", "rows"), "c": ("model",)},
    ),
    "rows for samples, both by shares": (
        {"rows": 3, "model": 2},
        {"h": ("rows",), "n": ("rows",), "c": ("model",)},
        {"rows": (3, 0, 1), "model": (1, 2)},
    ),
}


@pytest.mark.parametrize("cut", RECUTS)
def test_reshard_changes_only_which_rank_holds_what(cut):
    problem = Problem(Reshard(IMAGE), 5)
    for results, _ in solve(problem, RECUTS[cut]):
        np.testing.assert_array_equal(results["y"], problem.x)
        np.testing.assert_array_equal(results["dx"], problem.dy)


def test_reshard_from_rows_to_samples_sends_all_but_what_stays():
    """Of 4 samples and 8 rows on 4 ranks each has a quarter before and after, and a sixteenth both times."""
    problem = Problem(Reshard((8, 2)), 3, batch=4, image=(8, 2))
    for _, sent in solve(problem, ({"rows": 4}, {"h": ("rows",), "n": ("rows",)})):
        assert sent == 2 * problem.x.nbytes * 3 // 16


# --- mistakes


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Conv2d(("c", 4), ("f", 6), IMAGE, 3, groups=2), "give both the same letter"),
        (lambda: Conv2d(("f", 4), ("f", 6), IMAGE, 3, groups=4), "4 groups do not divide them"),
        (lambda: Conv2d(("c", 4), ("f", 6), IMAGE, 8), "windows of 8 x 8 do not fit into images of 7 x 6"),
        (lambda: Conv2d(("c", 4), ("f", 6), IMAGE, 3, padding="valid"), 'write "same", a number'),
        (lambda: GroupNorm(("c", 5), 2, IMAGE), "5 channels are not 2 groups"),
        (lambda: Chain(("a", ReLU("bhwc")), ("b", ReLU("bhwf"))), r"a makes \[b h w c\], and b takes \[b h w f\]"),
        (lambda: ResidualBlock(Chain(*_BRANCH[:1])), r"branch returns \[b h w f\]"),
    ],
)
def test_a_mistake_is_named(make, message):
    with pytest.raises(UsageError, match=message):
        make()


def test_window_of_a_part_and_inner_outputs_by_definition():
    window, length = Window(3, stride=2, dilation=2, before=3, after=2), 11
    all_taps = [[p * 2 - 3 + 2 * t for t in range(3)] for p in range(window.outputs(length))]
    for first in range(len(all_taps) + 1):
        for stop in range(first, len(all_taps) + 1):
            begin, end = window.needs(first, stop, length)
            part = part_of(window, (first, stop), (begin, end))
            assert part.outputs(end - begin) == stop - first
            for own in [(0, 4), (3, 8), (5, 11), (4, 4)]:
                inner = inner_outputs(window, length, own, (first, stop))
                read = {p: range(max(0, all_taps[p][0]), min(length, all_taps[p][-1] + 1)) for p in range(first, stop)}
                inside = [p for p, inputs in read.items() if all(own[0] <= i < own[1] for i in inputs)]
                assert list(range(*inner)) == (inside if own[0] < own[1] else [])


def test_one_device_needs_nobody():
    for results, sent in solve(problem_of("3x3"), ONE):
        assert sent == 0 and results["y"].shape == (BATCH, *IMAGE, 7)
