"""verify of steps in 16-bit floats: what differs since the mesh rounds elsewhere, and mistakes among roundings."""

import numpy as np

from spmd_engine import Mesh, run_threads
from spmd_engine.arrays.precision import dtype_of, emulated
from spmd_engine.engine import SGD, AdamW
from spmd_engine.sharding.shards import Shards
from spmd_engine.verification import verify
from spmd_engine.verification.reference import batches_for_model
from spmd_engine.verification.report import Distances, Report
from support import tiny
from support.tiny import mesh_of_one


def verified(axes, alter=lambda engine: None, optimizer=AdamW, **options):
    def program():
        with Mesh(**axes) as mesh:
            engine = tiny.make_engine(mesh, dtype=dtype_of("bfloat16"), **options)
            alter(engine)
            first = mesh.rank == 0
            reference, exact = (
                tiny.make_engine(mesh_of_one(), dtype=dtype) if first else None
                for dtype in (dtype_of("bfloat16"), np.float64)
            )
            batches = batches_for_model(engine.model, 4, length=8)
            how = {"steps": 2, "finite_differences": False, "optimizer": optimizer}
            return verify(engine, reference, batches, exact=exact, **how)

    with emulated():
        return run_threads(program, tiny.ranks_of(axes))[0]


def test_verify_says_what_differs_since_the_mesh_rounds_elsewhere():
    report = verified({"model": 2})
    assert report.agrees and 1e-4 < max(step.of_gradients for step in report.steps) < 0.3
    assert {"block0/attention", "block1/mlp"} <= set(report.rounded_in)
    assert "gradient of block0/mlp/w0" in report.differing
    assert "ranks sum 16-bit floats in " in report.verdict
    assert verified({"data": 2}, zero=3).verdict.startswith("agrees to ")


def test_verify_updates_the_exact_engine_as_the_others():
    made = []

    def optimizer():
        made.append(SGD(momentum=0.5))
        return made[-1]

    assert verified({"model": 2}, optimizer=optimizer).agrees
    assert sum(bool(each.state) for each in made) == 2 + 2  # of the ranks, of the reference and of the exact engine


def test_verify_finds_mistakes_among_roundings():
    def scale_weights(engine):
        if engine.mesh.rank == 1:  # of one rank's block, as a missing factor would
            engine.parameters["block1/mlp/w1"][...] *= 1.2
            engine.filled()

    report = verified({"model": 2}, alter=scale_weights)
    assert not report.agrees and report.disagreement.name == "block1/mlp/w1"


def test_verify_finds_a_missing_sum_among_roundings(monkeypatch):
    plain = Shards.start_reduce_scatter
    missing = "block1/mlp"

    def reduce_scatter(sh, x, *args, **options):
        return x if sh.label == missing and sh.mesh.size > 1 else plain(sh, x, *args, **options)

    monkeypatch.setattr(Shards, "start_reduce_scatter", reduce_scatter)
    report = verified({"model": 2})
    assert not report.agrees and report.disagreement.layer.startswith("block")


def test_a_large_difference_of_parameters_after_a_rounded_step_is_explained():
    steps = [Distances(1, 1.0, 1e-3, 2e-3, 2.0)]
    verdict = Report(steps, 1e-9, rounded_in=("mlp",), differing=("output of mlp",)).verdict
    assert "loss and gradients agree to 2e-03" in verdict
    assert "parameters agree to 2e+00: AdamW divides gradients by their size" in verdict
