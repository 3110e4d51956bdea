"""The engine of a model to be verified, with values in which mistakes show."""

from __future__ import annotations

from spmd_engine.arrays.random import key_of, normal
from spmd_engine.checkpoints.pretrained import open_pretrained
from spmd_engine.comm.mesh import Mesh
from spmd_engine.engine.layered import LayeredEngine
from spmd_engine.engine.parallel_config import ModelConfig, ParallelConfig, build_engine
from spmd_engine.verification.reference import DEVIATION


def engine_of_model(
    model: ModelConfig, mesh: Mesh, composition: ParallelConfig, *, device: str = "cpu"
) -> LayeredEngine:
    """A model on a mesh, with random parameters. Collective.

    What adapters leave frozen is read, if the model is one by path, and else random; they themselves are not the zeros
    with which half of them begin, behind which the others would have no gradients.
    """
    if model.lora is None or model.path is None:
        engine = build_engine(model, mesh, composition, device=device)
    else:
        engine, _ = open_pretrained(model, mesh, composition, device=device)
    if model.lora is not None:
        _draw_zeros(engine)
    return engine


def _draw_zeros(engine: LayeredEngine) -> None:
    """Give it random values in place of parameters that begin as zeros."""
    for name, target in engine.parameters.items():
        parameter, shape = engine.store.described[name]
        if parameter.mean == parameter.std == 0 and target.size:
            key = key_of(engine.seed, "verify", name)
            target += DEVIATION * normal(key, shape, engine.dtype, engine.index(name), engine.backend)
    engine.filled()
