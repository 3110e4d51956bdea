"""The customary layout of a model: what a mesh's axes cut, given what the model has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spmd_engine.comm.mesh_position import MeshPosition
from spmd_engine.errors import MeshError
from spmd_engine.models.model import Model
from spmd_engine.sharding.layout import Layout

#: What each mesh axis cuts of images [b h w c]: the samples, rows, columns, or the channels f inside of blocks.
OF_IMAGES = {
    **dict.fromkeys(("data", "replicate", "shard", "expert"), "b"),
    "rows": "h",
    "columns": "w",
    "model": "f",
    "pipe": "",
}


def layout_for(
    model: Model,
    mesh: MeshPosition,
    *,
    sequence_parallel: bool = False,
    zigzag: bool = False,
    experts_over: Sequence[str] | None = None,
) -> Layout:
    """``Layout.for_mesh``, with ``model`` cutting what the model's attention has enough of; of images, ``OF_IMAGES``.

    It cuts key heads; where there are fewer than ranks, the queries that share one, if that leaves less to the
    rank that has most. Raises MeshError for an axis without a customary name, and for one, or ``sequence_parallel``,
    that cuts what the model does not have.
    """
    letters = model.inputs.split()
    of_images = {"h", "w"} <= set(letters)
    if mesh.axes.get("context", 1) > 1 and "s" not in letters:
        nearest = "'data', 'rows' or 'columns'" if of_images else "'data'"
        raise MeshError(
            f"mesh {mesh}: axis 'context' cuts sequences, but {model.name} takes [{model.inputs}]; "
            f"give its ranks to {nearest}"
        )
    if sequence_parallel and "s" not in letters:
        raise MeshError(
            f"sequence parallel cuts sequences, but {model.name} takes [{model.inputs}]; "
            "with 'model' alone it is tensor parallel"
        )
    if of_images:
        return layout_of_images(model, mesh)
    for axis in ("rows", "columns"):
        if axis in mesh.axes:
            raise MeshError(
                f"mesh {mesh}: axis {axis!r} cuts images, but {model.name} takes [{model.inputs}]; give its ranks to "
                "'data'"
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


def layout_of_images(model: Model, mesh: MeshPosition) -> Layout:
    """Letters by ``OF_IMAGES``; and n, samples where rows y and columns x are whole, is cut as b, then as h and w."""
    cuts: dict[str, tuple[str, ...]] = {}
    for axis in mesh.axes:
        if axis not in OF_IMAGES and mesh.axes[axis] > 1:
            *names, last = OF_IMAGES
            raise MeshError(
                f"mesh {mesh}: axis {axis!r} cuts nothing that {model.name} has, which takes [{model.inputs}]; "
                f"name it {', '.join(names)} or {last}"
            )
        for letter in OF_IMAGES.get(axis, ""):
            cuts[letter] = (*cuts.get(letter, ()), axis)
    cuts["n"] = tuple(axis for letter in "bhw" for axis in cuts.get(letter, ()))
    return Layout(cuts, cuts)


def _queries_divide_better(sizes: Mapping[str, int], ranks: int) -> bool:
    """Whether the rank with most query heads has fewer if r is cut, and key heads do not suffice."""
    key_heads, queries = sizes["h"], sizes.get("r", 1)
    return key_heads < ranks and key_heads * -(-queries // ranks) < queries
