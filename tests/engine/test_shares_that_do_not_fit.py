"""A composition that does not fit the share of one rank is refused by all ranks, none of which goes on."""

import math

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.axes import parse_axes
from spmd_engine.engine import LayeredEngine
from spmd_engine.engine.offload.config import Offload
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.engine.state.assignment import ZeroConfig
from spmd_engine.errors import UsageError
from spmd_engine.models import deep_mlp, gpt
from spmd_engine.sharding import Layout
from support import tiny
from support.real_steps import build

UNEVEN = "pipe=2,model=1|2"


def errors(mesh, make):
    """What each rank raises while it makes its engine, '' if nothing."""

    def program():
        with Mesh(**parse_axes(mesh)) as opened:
            try:
                make(opened)
            except UsageError as error:
                return str(error)
        return ""

    return run_threads(program, tiny.ranks_of(parse_axes(mesh)))


def sequence_parallel(mesh, **storage):
    layout = Layout.for_mesh(mesh, sequence_parallel=True)
    return LayeredEngine(gpt(tiny.SIZE), mesh, layout, storage=ZeroConfig(**storage))


def test_all_ranks_refuse_to_offload_parameters_that_some_hold_in_parts(tmp_path):
    """Under sequence parallelism only the second stage sums gradients over model, and stores their sums in parts."""
    offload = Offload(("parameters",), str(tmp_path))
    said = errors(UNEVEN, lambda mesh: sequence_parallel(mesh, zero=1, places=offload))
    assert said == ["rank 1 of 3: --offload parameters with --zero 1: every rank holds them whole; choose --zero 3"] * 3


def test_all_ranks_refuse_a_compression_that_some_cannot_use():
    said = errors(UNEVEN, lambda mesh: sequence_parallel(mesh, zero=1, compress="top-k:0.5"))
    assert said == ["rank 1 of 3: compression 'top-k:0.5' needs whole gradients on every rank, not parts (ZeRO)"] * 3


def test_all_ranks_refuse_parameters_beyond_the_memory_of_one_node(monkeypatch):
    monkeypatch.setattr("spmd_engine.engine.zero.parameter_store.memory_here", lambda: 3000)
    said = errors(
        "pipe=2", lambda mesh: LayeredEngine(deep_mlp(6, 16), mesh, stages=(0, 1))
    )  # 1 pair of layers, then 2
    assert len(set(said)) == 1 and said[0].startswith("rank 1 of 2: its parameters alone are ")


def test_a_large_share_beyond_the_memory_of_a_node_is_refused(monkeypatch):
    """An equal part would fit."""
    whole = 4 * sum(math.prod(shape) for _, (_, shape) in deep_mlp(4, 16).parameters())
    monkeypatch.setattr("spmd_engine.engine.zero.parameter_store.memory_here", lambda: whole * 3 // 4)
    composition = ParallelConfig(zero=3, state_shares="data=7:1", min_tensor_size=0)
    said = errors("data=2", lambda mesh: build(deep_mlp(4, 16), mesh, composition, np.float32))
    assert len(set(said)) == 1 and said[0].startswith("rank 0 of 2: its parameters alone are "), said
    composition = composition.changed(state_shares=None)
    assert errors("data=2", lambda mesh: build(deep_mlp(4, 16), mesh, composition, np.float32)) == [""] * 2


@pytest.mark.parametrize("zero", [1, 2])
def test_a_composition_that_offloads_parameters_held_whole_is_refused_before_the_engine_is_made(zero):
    composition = ParallelConfig(zero=zero, offload="parameters")
    composition.check({"pipe": 2})
    for mesh in (UNEVEN, "data=2", "pipe=2,shard=2"):
        with pytest.raises(UsageError, match=f"--offload parameters .*: with --zero {zero} every rank holds them who"):
            composition.check(parse_axes(mesh))
