"""The default layout of a model on a mesh: the letters that each mesh axis shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from spmd_engine.axes import MeshPosition, uneven_axes
from spmd_engine.comm.notation import EVEN, Weights, weighted_lengths
from spmd_engine.errors import MeshError, one_of
from spmd_engine.models.model import Model
from spmd_engine.requirements import Case, effect_along, requirement
from spmd_engine.sharding import Layout

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
    shares: Weights = EVEN,
) -> Layout:
    """Return ``Layout.for_mesh`` with a suitable sharding of heads over ``model``; for images, ``OF_IMAGES``.

    ``model`` shards key heads. If there are fewer key heads than ranks and no axis ``queries``, it shards the queries
    of each key head instead, if this reduces the most queries on a rank. ``shares`` are those of ranks along axes that
    do not shard evenly; ranks and their queries then count by share. Raises MeshError for an unknown axis, and for an
    axis, or ``sequence_parallel``, whose letter the model does not have.
    """
    letters = model.inputs.split()
    of_images = {"h", "w"} <= set(letters)
    if mesh.axes.get("context", 1) > 1 and "s" not in letters:
        alternatives = "'data', 'rows' or 'columns'" if of_images else "'data'"
        raise MeshError(
            f"mesh {mesh}: axis 'context' shards sequences, but {model.name} takes [{model.inputs}]; "
            f"give its ranks to {alternatives}"
        )
    if sequence_parallel and "s" not in letters:
        raise MeshError(
            f"sequence parallel shards sequences, but {model.name} takes [{model.inputs}]; "
            "with 'model' alone it is tensor parallel"
        )
    if of_images:
        return replace(layout_of_images(model, mesh), shares=shares)
    for axis in ("rows", "columns"):
        if axis in mesh.axes:
            raise MeshError(
                f"mesh {mesh}: axis {axis!r} shards images, but {model.name} takes [{model.inputs}]; give its ranks to "
                "'data'"
            )
    attentions = _attentions(model)
    if mesh.axes.get("queries", 1) > 1 and not any("r" in sizes for sizes in attentions):
        raise MeshError(
            f"mesh {mesh}: axis 'queries' shards query heads that share a key head, but {model.name} has none; "
            "give its ranks to 'model'"
        )
    along_model = shares.get("model") or (1,) * mesh.all_axes.get("model", 1)  # one layout for all stages
    queries_sharded = "queries" not in mesh.axes and _queries_divide_better(attentions, along_model)
    layout = Layout.for_mesh(
        mesh,
        sequence_parallel=sequence_parallel,
        zigzag=zigzag,
        queries_sharded=queries_sharded,
        experts_over=experts_over,
    )
    return replace(layout, shares=shares)


def layout_of_images(model: Model, mesh: MeshPosition) -> Layout:
    """Return the layout by ``OF_IMAGES``. The axes of b, h and w together shard n, the samples of whole images."""
    axes_by_letter: dict[str, tuple[str, ...]] = {}
    for axis in mesh.axes:
        if axis not in OF_IMAGES and mesh.axes[axis] > 1:
            raise MeshError(
                f"mesh {mesh}: axis {axis!r} shards nothing that {model.name} has: it takes [{model.inputs}]; "
                f"{one_of(axis, OF_IMAGES)}"
            )
        for letter in OF_IMAGES.get(axis, ""):
            axes_by_letter[letter] = (*axes_by_letter.get(letter, ()), axis)
    axes_by_letter["n"] = tuple(axis for letter in "bhw" for axis in axes_by_letter.get(letter, ()))
    return Layout(axes_by_letter, axes_by_letter)


def with_queries_apart(model: Model, axes: Mapping[str, int]) -> dict[str, int]:
    """Return the axes with the ranks of ``model`` divided between key heads and, on an axis ``queries``, their queries,
    if a rank then computes fewer key heads than with ``model`` alone, and no more queries."""
    ranks, attentions = axes.get("model", 1), _attentions(model)
    if "queries" in axes or not _queries_divide_better(attentions, (1,) * ranks):
        return dict(axes)
    sizes = attentions[0]

    def largest_share(along_model: int) -> tuple[int, int]:
        """Return the most queries, and the most key heads, of a rank."""
        key_heads = -(-sizes["h"] // along_model)
        return key_heads * -(-sizes["r"] // (ranks // along_model)), key_heads

    best = min((n for n in range(1, ranks + 1) if ranks % n == 0), key=largest_share)
    if best == 1:
        return dict(axes)
    divided: dict[str, int] = {}
    for axis, size in axes.items():
        divided |= {"model": best, "queries": ranks // best} if axis == "model" else {axis: size}
    return divided


def note_of_shared_keys(model: Model, axes: Mapping[str, int]) -> str | None:
    """Return a hint if ranks along ``model`` compute key heads that their queries do not read, else None."""
    better = with_queries_apart(model, axes)
    if "queries" not in set(better) - set(axes):
        return None
    return (
        f"every rank along model={axes['model']} computes all {_attentions(model)[0]['h']} key heads of {model.name}; "
        f"with --mesh {MeshPosition(better, {})} it computes those that its queries read"
    )


def attends(model: Model) -> bool:
    """Return whether the model has attention layers, for which a sequence can be sharded in a zigzag."""
    return bool(_attentions(model))


def _attentions(model: Model) -> list[Mapping[str, int]]:
    """Return the sizes of the attention layers of a model."""
    return [layer.sizes for _, layer in model.layers if "h" in layer.sizes]


def _queries_divide_better(attentions: Sequence[Mapping[str, int]], shares: Sequence[int]) -> bool:
    """Return whether all layers have fewer key heads than ranks with a share, and a sharded r reduces the most queries
    of a rank, for its share."""

    def most(heads: int) -> float:
        return max(n / share for n, share in zip(weighted_lengths(heads, shares), shares, strict=True) if share)

    ranks = sum(share > 0 for share in shares)
    queries = [(sizes["h"], sizes.get("r", 1)) for sizes in attentions]
    return bool(queries) and all(h < ranks and h * most(r) < most(h) * r for h, r in queries)


@requirement("experts_over", nearest="Name axes of the mesh")
def _axes_of_experts(case: Case) -> str | None:
    """axes of the mesh"""
    missing = [axis for axis in case.options.expert_axes or () if axis not in case.axes]
    return f"there is no axis {missing[0]!r}" if missing else None


@requirement("experts_over", "rebalance_every", "mesh", of_model=True)
def _parts_of_experts(case: Case) -> str | None:
    """a model with an expert for each part, or more"""
    named_axes, name = case.options.expert_axes, case.model.name
    over = tuple({"expert"} & set(case.axes)) if named_axes is None else named_axes
    parts = MeshPosition(case.axes, {}).axis_size(over)
    fewest = min((layer.sizes["e"] for _, layer in case.model.layers if "e" in layer.sizes), default=None)
    if fewest is None and named_axes is not None:
        return f"{case.text('experts_over')} has no effect: {name} has no experts"
    if fewest is None and parts > 1:
        return f"axis expert={parts} shards only the batch, as data would: {name} has no experts"
    if case.options.rebalance_every and (fewest is None or parts == 1):
        return f"{case.text('rebalance_every')} has no effect: experts are not in parts here"
    if fewest is not None and fewest < parts:
        return f"{fewest} experts over {','.join(over)}={parts}: {parts - fewest} of {parts} parts hold none"
    return None


@requirement("mesh", of_model=True)
def _shared_keys(case: Case) -> str | None:
    """an axis queries where a model has few key heads"""
    is_sized = "model" in case.options.work_shares or uneven_axes(case.axes)
    return None if is_sized else note_of_shared_keys(case.model, case.axes)


REQUIREMENTS = (effect_along("sequence_parallel", "model"), _axes_of_experts, _parts_of_experts, _shared_keys)
