"""The usual layout of a model: which letters a mesh's axes shard, given the letters that the model has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spmd_engine.axes import MeshPosition
from spmd_engine.errors import MeshError, one_of
from spmd_engine.models.model import Model
from spmd_engine.sharding.layout import Layout

#: The letter of images [b h w c] that each mesh axis shards: samples, rows, columns, or the channels f inside blocks.
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
    """``Layout.for_mesh``, with ``model`` on the heads that the model has enough of; for images, ``OF_IMAGES``.

    It shards key heads; or, where these are fewer than ranks, the queries that share one, if the rank with most then
    has less, and no axis ``queries`` shards them. Raises MeshError for an axis without a usual name, and for one, or
    ``sequence_parallel``, whose letter the model does not have.
    """
    letters = model.inputs.split()
    of_images = {"h", "w"} <= set(letters)
    if mesh.axes.get("context", 1) > 1 and "s" not in letters:
        nearest = "'data', 'rows' or 'columns'" if of_images else "'data'"
        raise MeshError(
            f"mesh {mesh}: axis 'context' shards sequences, but {model.name} takes [{model.inputs}]; "
            f"give its ranks to {nearest}"
        )
    if sequence_parallel and "s" not in letters:
        raise MeshError(
            f"sequence parallel shards sequences, but {model.name} takes [{model.inputs}]; "
            "with 'model' alone it is tensor parallel"
        )
    if of_images:
        return layout_of_images(model, mesh)
    for axis in ("rows", "columns"):
        if axis in mesh.axes:
            raise MeshError(
                f"mesh {mesh}: axis {axis!r} shards images, but {model.name} takes [{model.inputs}]; give its ranks to "
                "'data'"
            )
    ranks, attentions = mesh.axes.get("model", 1), _attentions(model)
    if mesh.axes.get("queries", 1) > 1 and not any("r" in sizes for sizes in attentions):
        raise MeshError(
            f"mesh {mesh}: axis 'queries' shards query heads that share a key head, of which {model.name} has none; "
            "give its ranks to 'model'"
        )
    queries_cut = "queries" not in mesh.axes and _queries_divide_better(attentions, ranks)
    return Layout.for_mesh(
        mesh,
        sequence_parallel=sequence_parallel,
        zigzag=zigzag,
        queries_cut=queries_cut,
        experts_over=experts_over,
    )


def layout_of_images(model: Model, mesh: MeshPosition) -> Layout:
    """Letters by ``OF_IMAGES``; and n, samples with whole rows y and columns x, is sharded as b, then as h and w."""
    cuts: dict[str, tuple[str, ...]] = {}
    for axis in mesh.axes:
        if axis not in OF_IMAGES and mesh.axes[axis] > 1:
            raise MeshError(
                f"mesh {mesh}: axis {axis!r} shards nothing that {model.name} has, which takes [{model.inputs}]; "
                f"{one_of(axis, OF_IMAGES)}"
            )
        for letter in OF_IMAGES.get(axis, ""):
            cuts[letter] = (*cuts.get(letter, ()), axis)
    cuts["n"] = tuple(axis for letter in "bhw" for axis in cuts.get(letter, ()))
    return Layout(cuts, cuts)


def with_queries_apart(model: Model, axes: Mapping[str, int]) -> dict[str, int]:
    """The same ranks, those along ``model`` divided between the key heads and, on an axis ``queries``, the queries that
    share one, if so a rank computes fewer key heads than with ``model`` alone, and no more queries."""
    ranks, attentions = axes.get("model", 1), _attentions(model)
    if "queries" in axes or not _queries_divide_better(attentions, ranks):
        return dict(axes)
    sizes = attentions[0]

    def most(along_model: int) -> tuple[int, int]:
        """The most queries, and key heads, that a rank has."""
        key_heads = -(-sizes["h"] // along_model)
        return key_heads * -(-sizes["r"] // (ranks // along_model)), key_heads

    best = min((each for each in range(1, ranks + 1) if ranks % each == 0), key=most)
    if best == 1:
        return dict(axes)
    divided: dict[str, int] = {}
    for axis, size in axes.items():
        divided |= {"model": best, "queries": ranks // best} if axis == "model" else {axis: size}
    return divided


def note_of_shared_keys(model: Model, axes: Mapping[str, int]) -> str | None:
    """A hint if ranks along ``model`` compute key heads that their queries do not read, else None."""
    better = with_queries_apart(model, axes)
    if "queries" not in set(better) - set(axes):
        return None
    return (
        f"every rank along model={axes['model']} computes all {_attentions(model)[0]['h']} key heads of {model.name}; "
        f"with --mesh {MeshPosition(better, {})} it computes those that its queries read"
    )


def attends(model: Model) -> bool:
    """Whether the model has attention layers, for which a sequence can be sharded in a zigzag."""
    return bool(_attentions(model))


def _attentions(model: Model) -> list[Mapping[str, int]]:
    """The sizes of its attention layers."""
    return [layer.sizes for _, layer in model.layers if "h" in layer.sizes]


def _queries_divide_better(attentions: Sequence[Mapping[str, int]], ranks: int) -> bool:
    """Whether in all of them the rank with most query heads has fewer if r is sharded, and key heads do not suffice."""
    return bool(attentions) and all(
        sizes["h"] < ranks and sizes["h"] * -(-sizes.get("r", 1) // ranks) < sizes.get("r", 1) for sizes in attentions
    )
