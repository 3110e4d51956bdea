"""Random jobs on four ranks, some of which help, or are idle, on ever other meshes: results are those of one device.

``RANDOM_RANKS_OUTSIDE=200 pytest -m soak`` draws so many jobs.
"""

import os
from itertools import groupby

import numpy as np
import pytest
from test_shape_changes import assert_same, events, job_of

from spmd_engine import TrainConfig, run_threads, train
from spmd_engine.adaptive import ShapeRequest
from support.random_jobs import losses_in

RANKS, MESHES = 4, ({"data": 2}, {"pipe": 2}, {"shard": 2}, {"pipe": 3}, {"data": 3}, {"pipe": 2, "model": (1, 2)})
JOBS = int(os.environ.get("RANDOM_RANKS_OUTSIDE", "6"))


def drawn_shape(job, config):
    """A mesh of at most three of the ranks, options on it, its ranks, and layers for some of the others."""
    rng = job.rng
    axes, how = job._place(1)
    if rng.random() < 0.9:
        axes = dict(MESHES[rng.integers(len(MESHES))])
        how |= {"shares": None, "zero": int(rng.integers(4)), "stages": None, "reshard_after": None}
        if "pipe" in axes and rng.random() < 0.3:
            how |= {"overlap_layers": "1", "schedule": "1f1b"}
        if rng.random() < 0.3:
            what = ",".join(rng.choice(["optimizer", "parameters", "activations"], rng.integers(1, 4), replace=False))
            how |= {"offload": what, "offload_dir": str(job.folder)}
    on_mesh = 3 if axes.get("model") else int(np.prod(list(axes.values())))
    ranks = [0, *sorted(rng.choice(np.arange(1, RANKS), on_mesh - 1, replace=False).tolist())]
    names = [
        name for name, _ in groupby(name.split("/")[0] for name, _ in config.model.build(config.composition).layers)
    ]
    assigned = {}
    for rank in set(range(RANKS)) - set(ranks):
        first, count = rng.integers(len(names)), rng.integers(0, 4)
        assigned |= {name: rank for name in names[first : first + count]}
    how["assign"] = ",".join(f"{name}:rank{rank}" for name, rank in assigned.items()) or None
    return axes, how, ranks


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(JOBS))
def test_ranks_outside_the_mesh_change_no_result(tmp_path, seed):
    job = job_of(seed, tmp_path, save_every=3)
    if job.kind == "page":
        pytest.skip("a page shards itself")
    is_half = seed % 8 == 7
    # At the learning rates that are drawn, some losses rise tenfold; two meshes' roundings of bfloat16 then differ by
    # more than half the loss, without any change of shape. Smaller steps compare what is computed.
    half = {"dtype": "bfloat16", "learning_rate": 1e-3} if is_half else {}
    config = TrainConfig.of(**job.what | {"mesh": {"data": 1}} | half)
    first = config.model.build(config.composition).layers[-1][0].split("/")[0]
    helped = config.with_options(mesh={"data": 3}, assign=f"{first}:rank{1 + seed % 3}")
    requests = {}
    for step in range(1, job.steps - 1):
        axes, how, ranks = drawn_shape(job, config)
        protocol = "live" if job.rng.random() < 0.3 else "stop-and-copy"
        requests[step] = ShapeRequest({"mesh": axes, **how}, ranks=ranks, protocol=protocol)
    run_threads(lambda: train(helped, tmp_path / "run", propose=requests.get, enforce=False), RANKS)
    run_threads(lambda: train(config, tmp_path / "alone"), 1)
    for refused in events(tmp_path / "run", "not reshaped"):
        assert "Error" not in refused["why"], refused  # a sentence, not an exception
    if is_half:
        ours, theirs = losses_in(tmp_path / "run"), losses_in(tmp_path / "alone")
        np.testing.assert_allclose([*ours.values()], [*theirs.values()], rtol=0.05)
    else:
        assert_same(tmp_path / "run", tmp_path / "alone")
