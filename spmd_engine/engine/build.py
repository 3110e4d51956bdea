"""The engine that a composition of a model describes, and its parts: the layout, and the assignment of each rank."""

from __future__ import annotations

from spmd_engine.arrays import get_backend
from spmd_engine.arrays.precision import dtype_of
from spmd_engine.axes import MeshPosition
from spmd_engine.comm import Mesh
from spmd_engine.comm.device_transport import open_device
from spmd_engine.engine.helpers import AssignedLayers
from spmd_engine.engine.layered import LayeredEngine
from spmd_engine.engine.model_config import ModelConfig
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.engine.state.assignment import Assignment, assign
from spmd_engine.models import Model, layout_for
from spmd_engine.models.layouts import attends
from spmd_engine.sharding import Layout


def build_engine(
    model: ModelConfig,
    mesh: Mesh,
    composition: ParallelConfig = ParallelConfig(),  # noqa: B008 (immutable)
    *,
    device: str = "cpu",
    drawn: bool = True,
    placed: bool = True,
    trained: bool = True,
) -> LayeredEngine:
    """The engine that a composition of a model describes, on this mesh; unless ``drawn``, its parameters are zeros.

    Unless ``placed``, or if it is one of the mesh's ``others``, this rank is outside the engine's mesh, and the given
    one may have any size; it then computes the layers that the composition assigns to it.
    Unless ``trained``, the engine is for inference alone, and holds neither gradients nor masters.
    Raises UsageError if the composition cannot work there.
    """
    engine_model = model.build(composition)
    if not placed or mesh.others.have_this:
        backend = get_backend(device, *mesh.process_on_node)
        outside = LayeredEngine(engine_model, mesh, seed=model.seed, dtype=model.dtype, backend=backend, placed=False)
        if mesh.others.world.rank in composition.ranks_outside:
            ranks = mesh.others.on_mesh
            outside.assigned = AssignedLayers(engine_model, composition, ranks, mesh, outside.dtype, backend)
        return outside
    return LayeredEngine(
        engine_model,
        mesh,
        composed_layout(engine_model, mesh, composition),
        seed=model.seed,
        dtype=dtype_of(model.dtype),
        backend=open_device(mesh, device),
        drawn=drawn,
        trained=trained,
        **composition.how_on(mesh.axes),
    )


def composed_layout(model: Model, place: MeshPosition, composition: ParallelConfig) -> Layout:
    """The letters of a model that each mesh axis shards in this composition; raises UsageError if the composition
    cannot work there."""
    composition.check(place.all_axes, model)
    return layout_for(
        model,
        place,
        sequence_parallel=composition.sequence_parallel,
        # balances causal attention between ranks; with ulysses each rank has the whole sequence
        zigzag="context" in place.axes and composition.context_method != "ulysses" and attends(model),
        experts_over=composition.expert_axes,
        shares=composition.work_shares,
    )


def composed_assignment(
    model: Model, place: MeshPosition, layout: Layout, itemsize: int, composition: ParallelConfig
) -> Assignment:
    """The share of the rank at ``place``, as the composition stores parameters and divides layers among stages."""
    return assign(
        model,
        place,
        layout,
        itemsize,
        storage=composition.storage,
        stages=composition.division,
        chunks_per_stage=composition.schedule_on(place.axes).chunks,
    )
