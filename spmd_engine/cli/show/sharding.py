"""``show mesh``, ``show sharding`` and ``show experts``: the ranks of a mesh, and what they hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from spmd_engine.axes import MeshPosition, all_positions, parse_axes
from spmd_engine.cli.options import axes_of, permitted, takes_job
from spmd_engine.cli.show.picture import output_option, present
from spmd_engine.comm.notation import Spec
from spmd_engine.comm.views import ArraySharding, draw_mesh
from spmd_engine.engine.build import composed_layout
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.engine.state.assignment import PIPE, assign, misfit, parse_shares
from spmd_engine.errors import UsageError, one_of
from spmd_engine.foreign import parse_json, read_text, reading
from spmd_engine.models import Model
from spmd_engine.sharding.experts import routing_table
from spmd_engine.sharding.layout import Layout
from spmd_engine.training.observers import MetricsFile
from spmd_engine.training.run_folder import read_run, run_folder
from spmd_engine.training.train_config import TrainConfig

# --- ``show mesh``: ranks by their coordinates, and the groups of each axis


@click.command(short_help="The ranks of a mesh, and each axis' groups.")
@click.argument("axes", metavar="AXIS=SIZE,...")
@output_option
def mesh(axes: str, output: Path | None) -> None:
    """Draw the ranks of a mesh by their coordinates, and list the groups along each axis.

    The last axis varies fastest, so that its ranks, which communicate most, are neighbours, on one node where they fit.
    A collective over an axis joins the ranks that differ along that axis alone. Ranks of one group of the last
    axis have one colour.

    \b
      python -m spmd_engine show mesh data=2,pipe=2,model=2
      python -m spmd_engine show mesh data=4,model=2 --output mesh.svg
    """
    present(draw_mesh(parse_axes(axes)), output)


# --- ``show sharding``: an array's blocks over the ranks, as JAX's ``visualize_array_sharding`` draws them


@click.command(short_help="An array's blocks, and the ranks that hold them.")
@click.argument("spec", metavar="SHARDING", required=False)
@click.option("--shape", metavar="N,...", help="The whole array's shape: a size for each letter.")
@click.option("--param", metavar="NAME", help="A parameter of --model, instead of SHARDING and --shape.")
@takes_job("model", "images", "mesh", "shares", described=True)
@output_option
def sharding(spec: str | None, shape: str | None, param: str | None, job: TrainConfig, output: Path | None) -> None:
    """Draw how an array is sharded: each block with the ranks that hold it and its range of indices.

    SHARDING has a letter for each dim, with the mesh axes that split it: "b/data f" is b split over data, f whole.
    The first dim that is split is drawn from top to bottom, the second from left to right; others are listed below.
    Blocks are as even as possible, the first ones larger, and may be empty; "b/data:3:1", or --shares, gives the first
    of two ranks three quarters.

    \b
      python -m spmd_engine show sharding "b/data f/model" --shape 8,6 --mesh data=2,model=2
      python -m spmd_engine show sharding "b/data f" --shape 8,6 --mesh data=2 --shares data=3:1
      python -m spmd_engine show sharding "v/model,data d" --shape 257,96 --mesh data=2,model=2
      python -m spmd_engine show sharding --param block0/mlp/w0 --model gpt-nano --mesh data=2,model=4
    """
    places = all_positions(axes_of(job))
    if param:
        if spec or shape:
            raise UsageError("show sharding: give either SHARDING and --shape, or --param and --model")
        name = f"{job.model.name} {param} "
        parsed, sizes, places = parameter_sharding(job, param, places)
    elif spec is None or shape is None:
        raise UsageError('show sharding: give SHARDING and --shape, as in: show sharding "b/data d" --shape 8,6')
    else:
        name = ""
        parsed, sizes = with_shares(Spec.parse(spec), job.composition.shares, places[0]), parse_shape(shape)
    present(ArraySharding.of(parsed, sizes, places).picture(name, _notes(places)), output)


def parse_shape(text: str) -> tuple[int, ...]:
    """``"8,6"`` as (8, 6); raises UsageError for anything else."""
    sizes = [size.strip() for size in text.split(",")] if text.strip() else []
    if not all(size.isdecimal() for size in sizes):
        raise UsageError(f"cannot read shape {text!r}; write whole numbers as in 8,6")
    return tuple(map(int, sizes))


def with_shares(spec: Spec, text: str | None, place: MeshPosition) -> Spec:
    """The sharding with these uneven shares; raises UsageError for an axis that does not split it."""
    shares = parse_shares(text, "--shares", dict.fromkeys(spec.axes, 0))
    if why := misfit(shares, place.axes):
        raise UsageError(f"--shares {text} with --mesh {place}: {why}. Give a share for each rank of an axis")
    return Spec(spec.dims, tuple({**dict(spec.weights), **shares}.items()))


def parameter_sharding(
    job: TrainConfig, name: str, places: Sequence[MeshPosition]
) -> tuple[Spec, tuple[int, ...], Sequence[MeshPosition]]:
    """The sharding of a parameter by the layout of the job, its whole shape, and the ranks that hold it."""
    built = job.model.build(job.composition)
    layout = composed_layout(built, places[0], job.composition)
    parameters = dict(built.parameters())
    if name not in parameters:
        close = [other for other in parameters if name.split("/")[-1] in other] or list(parameters)
        raise UsageError(f"{job.model.name} has no parameter {name!r}; it has, for example: {', '.join(close[:4])}")
    assignment = assign(built, places[0], layout, itemsize=4)
    stages, home = assignment.holders[name], assignment.homes.get(name)
    parameter, shape = parameters[name]
    holders = [place for place in places if place.coordinates.get(PIPE, 0) in stages and (not home or home.has(place))]
    return layout.spec(parameter.dims), shape, holders


def _notes(holders: Sequence[MeshPosition]) -> list[str]:
    """Why only some ranks hold a parameter: its stages, and the axes along which one rank alone has its expert."""
    places = {axis: sorted({place.coordinates[axis] for place in holders}) for axis in holders[0].axes}
    some = {axis: at for axis, at in places.items() if len(at) < holders[0].axes[axis]}
    notes = []
    if stages := some.pop(PIPE, None):
        notes.append(f"Pipeline: stage {' and stage '.join(map(str, stages))} alone.")
    if where := " and ".join(f"{axis} {at[0]}" for axis, at in some.items()):
        notes.append(f"Of one expert: only on ranks with {where}, which split the batch in other layers.")
    return notes


# --- ``show experts``: the ranks that hold each expert and, for a run, how many tokens it gets


LOAD = "/load"  # ends the names of the side outputs that count tokens by expert


@click.command(short_help="Ranks that hold each expert, and its load in a run.")
@takes_job("model", "mixture", "mesh", "experts_over", described=True)
@click.option("--run", metavar="NAME", help="A run, for its model and the load that it measured.")
@click.option("--steps", type=click.IntRange(min=1), default=20, show_default=True, help="With --run: its last steps.")
@click.option("--layer", metavar="NAME", help="One layer, such as block0/moe. [default: all together]")
def experts(job: TrainConfig, run: str | None, steps: int, layer: str | None) -> None:
    """Print a line for each expert, with the part and the ranks that hold it, then one for each part. With --run, also
    the mean load of its last steps: pairs of a token and a chosen expert, over the whole batch.

    Outside the layers with experts, axis 'expert' splits the batch, as 'data' does.

    \b
      python -m spmd_engine show experts --model gpt-moe-nano --mesh expert=4,data=2
      python -m spmd_engine show experts --run gpt-moe-nano-1 --layer block0/moe
      python -m spmd_engine show experts --run gpt-moe-nano-1 --mesh expert=8
    """
    axes, over = job.composition.mesh, job.composition.experts_over
    composition = ParallelConfig(experts_over=over)
    loads: Mapping[str, Sequence[float]] = {}
    if run:
        run_job = read_run(run)
        named = "" if job.model.named_in else job.model.name
        job = job.changed(model=permitted(run_job.model, named, trust=False))
        composition = composition if over or axes else run_job.composition
        axes = axes or run_job.composition.mesh
        loads = mean_loads(run_folder(run), steps)
    model = job.model.build(composition)
    places = all_positions(dict(axes or {"data": 1}))
    layout = composed_layout(model, places[0], composition)
    click.echo(f"{job.model.name}, mesh {places[0]}: inputs {layout.spec(model.inputs)}")
    click.echo(placement_text(model, places, layout, loads, layer))


def placement_text(
    model: Model,
    places: Sequence[MeshPosition],
    layout: Layout,
    loads: Mapping[str, Sequence[float]] | None = None,
    layer: str | None = None,
) -> str:
    """Routing tables: one for all layers with equal placement, with the sums of their loads, or that of one ``layer``.

    ``loads`` are those of each layer's experts, by the layer's name. Raises UsageError if there is no such layer.
    """
    routed = {name: model_layer.sizes["e"] for name, model_layer in model.layers if "e" in model_layer.sizes}
    if not routed or layer not in (None, *routed):
        which = f" {layer!r}" if routed else ""
        nearest = one_of(layer, routed) if routed else "try gpt-moe-nano"
        raise UsageError(f"{model.name} has no layer{which} with experts; {nearest}")
    axes = layout.axes("e")
    names_by_placement: dict[tuple[int, ...], list[str]] = {}
    for name in [layer] if layer else routed:
        names_by_placement.setdefault(layout.parts(name, "e", routed[name], places[0]), []).append(name)
    parts = places[0].axis_size(axes)
    ranks = [[place.index(None) for place in places if place.index(axes) == part] for part in range(parts)]
    texts = []
    for placement, names in names_by_placement.items():
        layer_loads = [loads[name] for name in names if loads and name in loads]
        total_loads = [sum(expert_loads) for expert_loads in zip(*layer_loads, strict=True)] if layer_loads else None
        over = f"over {','.join(axes)}" if parts > 1 else "on every rank"
        texts.append(f"\n{_listed_layers(names)}: {len(placement)} experts {over}\n")
        texts.append(routing_table(placement, parts, total_loads, ranks))
    return "\n".join(texts)


def mean_loads(folder: Path, steps: int) -> dict[str, list[int]]:
    """The mean load of each layer's experts in the last ``steps`` of a run, from its ``metrics.jsonl``."""
    path = folder / MetricsFile.NAME
    with reading(f"{path} cannot be read"):
        lines = [parse_json(line) for line in read_text(path).splitlines()]
    outputs = [line["side_outputs"] for line in lines if "side_outputs" in line][-steps:]
    names = [name for name in (outputs[-1] if outputs else {}) if name.endswith(LOAD)]
    if not names:
        raise UsageError(f"{path} has no load of experts: the run made no step, or its model has no experts")
    by_name = {name: zip(*(output[name] for output in outputs), strict=True) for name in names}
    return {
        name.removesuffix(LOAD): [round(sum(of_expert) / len(outputs)) for of_expert in of_layer]
        for name, of_layer in by_name.items()
    }


def _listed_layers(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) < 4 else f"{names[0]}, ..., {names[-1]} ({len(names)} layers)"
