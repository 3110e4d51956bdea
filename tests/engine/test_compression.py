"""Compressed gradients: what they sum to, what they cost, and that training goes on."""

from functools import cache, partial
from itertools import product
from math import ceil, prod

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.engine import AdamW
from spmd_engine.engine.zero.compression import HalfPrecision, PowerSGD, TopK, compression
from spmd_engine.errors import UsageError
from spmd_engine.sharding.groups import Member, ParameterGroup, Sum
from spmd_engine.training import Trainer
from support import tiny

RANKS = 3
SHAPES = {"w0": (9, 8), "bias": (8,), "w1": (8, 3, 4), "scalar": ()}
SIZE = 9 * 8 + 8 + 8 * 12 + 1
ITEM = 8


def make_group():
    members = [Member(name, shape, True, Sum(("data",)), 1) for name, shape in SHAPES.items()]
    return ParameterGroup(0, members)


def gradient(rank, step=0):
    return np.random.default_rng([rank, step]).standard_normal(SIZE)


def summed(make, steps=1, low_rank=None):
    """What each rank has after the last of some steps, the sum of all it had, and bytes sent by all ranks."""

    def program():
        with Mesh(data=RANKS) as mesh:
            one, total = make(make_group()), np.zeros(SIZE)
            for step in range(steps):
                g = gradient(mesh.rank, step)
                if low_rank:
                    g[: 9 * 8] = np.outer(np.arange(9) + mesh.rank, np.arange(8) - 2.0).reshape(-1)
                one.start_all_reduce(g, mesh.group("data")).wait()
                total += g
            return g, total, mesh.ledger.total().sent

    results = run_threads(program, RANKS)
    for g, total, _ in results:
        assert np.array_equal(g, results[0][0]) and np.array_equal(total, results[0][1])  # the same bits everywhere
    return results[0][0], results[0][1], sum(sent for _, _, sent in results)


EXACT = sum(gradient(rank) for rank in range(RANKS))


@pytest.mark.parametrize(("name", "precision"), [("bfloat16", 2**-8), ("float16", 2**-11)])
def test_half_precision_rounds_and_halves_the_bytes(name, precision):
    result, _, sent = summed(partial(compression, name))
    scale = sum(abs(gradient(rank)) for rank in range(RANKS)) + abs(EXACT)
    assert (abs(result - EXACT) <= precision * scale).all()
    assert np.abs(result - EXACT).max() > 0
    assert sent == 2 * SIZE * 2 * (RANKS - 1)


def test_half_precision_scatters_too():
    def program():
        with Mesh(data=RANKS) as mesh:
            sizes = [100, 0, SIZE - 100]
            half = HalfPrecision(np.dtype(np.float16))
            part = half.start_reduce_scatter(gradient(mesh.rank), mesh.group("data"), sizes, None).wait()
            return part

    parts = run_threads(program, RANKS)
    assert [len(part) for part in parts] == [100, 0, SIZE - 100] and parts[0].dtype == np.float64
    np.testing.assert_allclose(np.concatenate(parts), EXACT, atol=1e-2)


def test_top_k_of_everything_is_exact():
    np.testing.assert_allclose(summed(lambda group: TopK(1.0, group))[0], EXACT, rtol=1e-14, atol=1e-14)


def test_top_k_sends_a_fraction_and_keeps_the_rest_for_later():
    steps, count = 60, sum(counts(0.1).values())
    result, total, sent = summed(lambda group: TopK(0.1, group), steps)
    assert sent == steps * RANKS * (RANKS - 1) * count * (ITEM + 4)
    assert 0 < np.count_nonzero(result) <= RANKS * count
    everything = sum(gradient(rank, step) for rank in range(RANKS) for step in range(steps))
    # What was left out is less than what some steps bring: none of it is lost.
    assert np.linalg.norm(total - everything) < 15 * np.linalg.norm(EXACT)
    plain = sum(_largest(gradient(rank, step), 0.1) for rank in range(RANKS) for step in range(steps))
    assert np.linalg.norm(total - everything) < np.linalg.norm(plain - everything)


def counts(fraction):
    """Entries that are sent of each parameter."""
    return {name: ceil(fraction * prod(shape)) for name, shape in SHAPES.items()}


def _largest(g, fraction):
    kept = np.zeros_like(g)
    for span, count in zip(make_group().spans.values(), counts(fraction).values(), strict=True):
        places = span.start + np.argsort(abs(g[span]))[-count:]
        kept[places] = g[places]
    return kept


def test_powersgd_is_exact_for_what_has_low_rank():
    """A sum of matrices of rank two is found by a rank of two; vectors are sent as they are."""
    result, _, _ = summed(lambda group: PowerSGD(2, group), low_rank=True)
    expected = EXACT.copy()
    expected[: 9 * 8] = sum(np.outer(np.arange(9) + r, np.arange(8) - 2.0) for r in range(RANKS)).reshape(-1)
    np.testing.assert_allclose(result[: 9 * 8], expected[: 9 * 8], atol=1e-9)
    np.testing.assert_allclose(result[9 * 8 : 9 * 8 + 8], expected[9 * 8 : 9 * 8 + 8], atol=1e-12)
    assert result[-1] == pytest.approx(EXACT[-1], abs=1e-12)


def test_powersgd_sends_thin_matrices_and_loses_nothing_for_good():
    steps, r = 60, 2
    _, total, sent = summed(lambda group: PowerSGD(r, group), steps)
    thin = r * (9 + 8) + r * (8 + 12)
    assert sent == steps * 2 * (thin + 8 + 1) * ITEM * (RANKS - 1)
    everything = sum(gradient(rank, step) for rank in range(RANKS) for step in range(steps))
    assert np.linalg.norm(total - everything) < 20 * np.linalg.norm(EXACT)
    assert np.linalg.norm(total - everything) < 0.5 * np.linalg.norm(everything)


@pytest.mark.parametrize("text", ["zip", "top-k:x", "top-k:0", "top-k:2", "powersgd:0", "powersgd:x", "float16:3"])
def test_what_is_no_compression_is_refused(text):
    with pytest.raises(UsageError):
        compression(text, make_group())


def losses(compress, axes, **options):
    def program():
        with Mesh(**axes) as mesh:
            engine = tiny.make_engine(mesh, compress=compress, **options)
            trainer = Trainer(engine, AdamW(), lambda step: tiny.batch(engine, 0), lambda step: 0.02, grad_clip=1.0)
            reports = [trainer.step() for _ in range(6)]
            parameters = {name: engine.gather(name) for name in engine.names}
            held = engine.parameters.items()
            alike = all(np.array_equal(x, engine.block(name, parameters[name])) for name, x in held)
            return [report.loss for report in reports], parameters, alike

    return run_threads(program, tiny.ranks_of(axes))


@cache
def plain_losses():
    """On one device: as on any mesh, to rounding."""
    return losses("none", {"data": 1})[0][0]


WAYS = [("bfloat16", {}), ("float16", {"zero": 2}), ("top-k:0.3", {}), ("powersgd:4", {})]
AXES = [{"data": 3}, {"data": 2, "model": 2}, {"pipe": 2, "data": 2}]


def ways_on_meshes():
    """Every way on a mesh, in turn; the other pairs are in ``soak``."""
    for (i, (compress, options)), (j, axes) in product(enumerate(WAYS), enumerate(AXES)):
        marks = () if j == i % 3 and (i, j) != (3, 0) or (i, j) == (3, 1) else pytest.mark.soak
        yield pytest.param(axes, compress, options, id=f"{tiny.mesh_id(axes)}-{compress}-{options}", marks=marks)


@pytest.mark.parametrize("axes, compress, options", list(ways_on_meshes()))
def test_training_goes_on_and_replicas_stay_alike(compress, options, axes):
    plain = plain_losses()
    results = losses(compress, axes, **options)
    ours = results[0][0]
    assert plain[-1] < plain[0] - 0.1  # one batch, again and again
    assert plain[0] - ours[-1] > 0.6 * (plain[0] - plain[-1])
    for result in results:
        assert result[0] == ours and result[2]
        for name, parameter in result[1].items():
            assert np.array_equal(parameter, results[0][1][name]), name


def test_parts_and_sparse_gradients_do_not_go_together():
    def program():
        with Mesh(data=2) as mesh, pytest.raises(UsageError, match="needs whole gradients on every rank"):
            tiny.make_engine(mesh, compress="top-k", zero=1)

    run_threads(program, 2)
