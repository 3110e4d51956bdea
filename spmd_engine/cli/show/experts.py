"""``show experts``: the ranks that hold each expert and, for a run, how many tokens it gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from spmd_engine.axes import MeshPosition, all_positions
from spmd_engine.cli.options import takes_job
from spmd_engine.engine.parallel_config import ParallelConfig, composed_layout
from spmd_engine.errors import UsageError, one_of
from spmd_engine.foreign import parse_json, read_text, reading
from spmd_engine.models import Model
from spmd_engine.sharding.experts import routing_table
from spmd_engine.sharding.layout import Layout
from spmd_engine.training.observers import MetricsFile
from spmd_engine.training.run_job import read_run, run_folder
from spmd_engine.training.train_config import TrainConfig

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
        of_run = read_run(run)
        job = job.changed(model=of_run.model)
        composition = composition if over or axes else of_run.composition
        axes = axes or of_run.composition.mesh
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
    """Routing tables: one for all layers with the same placement, their loads added up, or of one ``layer``.

    ``loads`` are those of each layer's experts, by the layer's name. Raises UsageError if there is no such layer.
    """
    routed = {name: each.sizes["e"] for name, each in model.layers if "e" in each.sizes}
    if not routed or layer not in (None, *routed):
        which = f" {layer!r}" if routed else ""
        nearest = one_of(layer, routed) if routed else "try gpt-moe-nano"
        raise UsageError(f"{model.name} has no layer{which} with experts; {nearest}")
    axes = layout.axes("e")
    alike: dict[tuple[int, ...], list[str]] = {}
    for name in [layer] if layer else routed:
        alike.setdefault(layout.parts(name, "e", routed[name], places[0]), []).append(name)
    parts = places[0].axis_size(axes)
    ranks = [[place.index(None) for place in places if place.index(axes) == part] for part in range(parts)]
    texts = []
    for placement, names in alike.items():
        known = [loads[name] for name in names if loads and name in loads]
        together = [sum(each) for each in zip(*known, strict=True)] if known else None
        over = f"over {','.join(axes)}" if parts > 1 else "on every rank"
        texts.append(f"\n{_listed(names)}: {len(placement)} experts {over}\n")
        texts.append(routing_table(placement, parts, together, ranks))
    return "\n".join(texts)


def mean_loads(folder: Path, steps: int) -> dict[str, list[int]]:
    """The mean load of each layer's experts in the last ``steps`` of a run, from its ``metrics.jsonl``."""
    path = folder / MetricsFile.NAME
    with reading(f"{path} cannot be read"):
        lines = [parse_json(line) for line in read_text(path).splitlines()]
    told = [line["side_outputs"] for line in lines if "side_outputs" in line][-steps:]
    names = [name for name in (told[-1] if told else {}) if name.endswith(LOAD)]
    if not names:
        raise UsageError(f"{path} has no load of experts: the run made no step, or its model has no experts")
    by_name = {name: zip(*(each[name] for each in told), strict=True) for name in names}
    return {
        name.removesuffix(LOAD): [round(sum(of_expert) / len(told)) for of_expert in of_layer]
        for name, of_layer in by_name.items()
    }


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) < 4 else f"{names[0]}, ..., {names[-1]} ({len(names)} layers)"
