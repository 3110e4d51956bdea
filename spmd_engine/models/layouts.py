"""The customary layout of a model: what a mesh's axes cut, given what the model has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spmd_engine.comm.mesh import Mesh
from spmd_engine.errors import MeshError
from spmd_engine.models.model import Model
from spmd_engine.sharding.layout import Layout


def layout_for(
    model: Model,
    mesh: Mesh,
    *,
    sequence_parallel: bool = False,
    zigzag: bool = False,
    experts_over: Sequence[str] | None = None,
) -> Layout:
    """``Layout.for_mesh``, with ``model`` cutting what the model's attention has enough of.

    It cuts key heads; where there are fewer than ranks, the queries that share one, if that leaves less to the
    rank that has most. Raises MeshError for an axis without a customary name, and for a ``context`` axis, or
    ``sequence_parallel``, if the model has no sequence.
    """
    if mesh.axes.get("context", 1) > 1 and "s" not in model.inputs.split():
        raise MeshError(
            f"mesh {mesh}: axis 'context' cuts sequences, but {model.name} takes [{model.inputs}]; "
            "give its ranks to 'data'"
        )
    if sequence_parallel and "s" not in model.inputs.split():
        raise MeshError(
            f"sequence parallel cuts sequences, but {model.name} takes [{model.inputs}]; "
            "with 'model' alone it is tensor parallel"
        )
    ranks = mesh.axes.get("model", 1)
    attentions = [layer.sizes for _, layer in model.layers if "h" in layer.sizes]
    queries_cut = bool(attentions) and all(_queries_divide_better(sizes, ranks) for sizes in attentions)
    return Layout.for_mesh(
        mesh,
        sequence_parallel=sequence_parallel,
        zigzag=zigzag,
        queries_cut=queries_cut,
        experts_over=experts_over,
    )


def _queries_divide_better(sizes: Mapping[str, int], ranks: int) -> bool:
    """Whether the rank with most query heads has fewer if r is cut, and key heads do not suffice."""
    key_heads, queries = sizes["h"], sizes.get("r", 1)
    return key_heads < ranks and key_heads * -(-queries // ranks) < queries
