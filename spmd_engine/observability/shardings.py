"""Which rank holds which part of arrays, parameters and experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

from rich.console import Console
from rich.table import Table

from spmd_engine.arrays.precision import dtype_of
from spmd_engine.axes import MeshPosition, all_positions
from spmd_engine.checkpoints.hf.weights import Pretrained
from spmd_engine.checkpoints.pretrained import table as tensor_table
from spmd_engine.comm.notation import Spec
from spmd_engine.engine import ParallelConfig
from spmd_engine.engine.build import composed_assignment, composed_layout
from spmd_engine.engine.helpers import stages_of
from spmd_engine.engine.state.assignment import PIPE, Assignment, assign, homes_of, misfit, parse_shares
from spmd_engine.errors import UsageError, counted, one_of
from spmd_engine.foreign import parse_json, read_text, reading
from spmd_engine.layers import Buffer, Parameter
from spmd_engine.models import Model
from spmd_engine.observability.render import text_table
from spmd_engine.sharding import Layout, routing_table
from spmd_engine.sharding.groups import Home
from spmd_engine.training import TrainConfig
from spmd_engine.training.observers import MetricsFile
from spmd_engine.units import numbers_of

# --- ``show sharding``: an array's blocks over the ranks, as JAX's ``visualize_array_sharding`` draws them


def parse_shape(text: str) -> tuple[int, ...]:
    """``"8,6"`` as (8, 6); raises UsageError for anything else."""
    return numbers_of(text, "--shape", "whole numbers, as in 8,6") if text.strip() else ()


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


def notes_on_holders(holders: Sequence[MeshPosition]) -> list[str]:
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


# --- ``inspect``: the shardings of a model's arrays, its stages, and its parameter groups


def print_shardings(console: Console, job: TrainConfig, model: Model, composition: ParallelConfig) -> None:
    """Print each array of a model with its sharding on the mesh of the ``composition``, and what each stage computes.

    Raises UsageError for a composition that is impossible.
    """
    axes = dict(composition.mesh or {})
    places = all_positions(axes)
    layout = composed_layout(model, places[0], composition)
    for layer_name, layer in model.layers:
        for part in layer.side_by_side:
            layout.check(layer_name, {"b", "s", *part.sizes}, part.may_cut, part.across)
    itemsize = dtype_of(job.model.dtype).itemsize
    assignments = [composed_assignment(model, place, layout, itemsize, composition) for place in _first_ranks(places)]
    pretrained = Pretrained(job.model.name) if job.model.path else None
    frozen = {name: entry for name, entry in model.buffers() if entry[0].frozen}
    count = sum(prod(shape) for _, shape in frozen.values())
    adapters = f" of adapters, and {count:,} frozen ones" if frozen else ""
    name = job.model.name
    console.print(f"{name}: {model.parameter_count:,} parameters{adapters}, {job.model.dtype}", soft_wrap=True)
    console.print(f"mesh {places[0]}: {len(places)} ranks")
    console.print(f"inputs {layout.spec(model.inputs)}, outputs {layout.spec(model.outputs)}\n")
    if pretrained is not None:
        specs = {name: str(layout.spec(source.view.dims)) for name, source in pretrained.filled.items()}
        for line in tensor_table(pretrained, specs):
            console.print(line, soft_wrap=True, markup=False)
        console.print()
    homes = homes_of(model, layout, places[0])
    stages = _stages_of(model, assignments) if len(assignments) > 1 else {}
    for kind, arrays in ("parameter", dict(model.parameters())), ("frozen weight", frozen):
        if arrays:
            console.print(_arrays(kind, arrays, places[0], layout, homes, stages))
            console.print()
    if any("e" in layer.sizes for _, layer in model.layers):
        console.print(placement_text(model, places, layout).lstrip() + "\n", soft_wrap=True)
    for stage, assignment in enumerate(assignments):
        where = f"stage {stage}: " if len(assignments) > 1 else ""
        others = len(assignment.held) - len(assignment.uses)
        counts = counted(len(assignment.uses), "layer"), counted(len(list(assignment.members)), "parameter")
        layers = counts[0] + (f", and {others} that another stage computes," if others else "")
        console.print(f"{where}{layers} with {counts[1]} -> {counted(len(assignment.groups), 'group')}")
        if assignment.frozen:
            console.print(f"{where}frozen weights in parts -> {counted(len(assignment.frozen), 'group')}")
    for term in composition.assigned:
        numbers = term.numbers(model)
        stages = ", ".join(map(str, stages_of(term, model, axes, composition)))
        where = f" of stage {stages}" if len(assignments) > 1 else ""
        names = f"{model.layers[numbers[0]][0]} to {model.layers[numbers[-1]][0]}"
        console.print(
            f"helper rank {term.rank} computes {counted(len(numbers), 'layer')}{where}, {names}, for its owners"
        )


def _first_ranks(places: Sequence[MeshPosition]) -> list[MeshPosition]:
    """The first rank of each pipeline stage; without a pipeline, the first rank."""
    return [place for place in places if not any(n for axis, n in place.coordinates.items() if axis != PIPE)]


def _arrays(
    kind: str,
    arrays: Mapping[str, tuple[Parameter | Buffer, tuple[int, ...]]],
    place: MeshPosition,
    layout: Layout,
    homes: Mapping[str, Home],
    stages: Mapping[str, Sequence[int]],
) -> Table:
    """A table of the arrays with their shardings and, in a pipeline, the ``stages`` that have them."""
    heads = [kind, "sharding", "whole shape", "on the first rank", *(["stages"] if stages else [])]
    rows = []
    counts: dict[str, list[int]] = {}  # all experts, and those of the first rank
    for name, (array, _) in arrays.items():
        if array.element:
            expert_counts = counts.setdefault(_row_key(name, array), [0, 0])
            expert_counts[0] += 1
            expert_counts[1] += name not in homes or homes[name].has(place)
    for name, (array, shape) in arrays.items():
        in_all, in_shard = "", ""
        if array.element:
            if array.element[1] > 0:  # the others are like the first
                continue
            in_all, in_shard = (f"{count} of " for count in counts[_row_key(name, array)])
        spec = layout.spec(array.dims)
        block = spec.local_shape(shape, place)
        cells = in_all + "x".join(map(str, shape)), in_shard + "x".join(map(str, block))
        rows.append((_row_key(name, array), str(spec), *cells, *([",".join(map(str, stages[name]))] if stages else [])))
    return text_table(heads, rows)


def _stages_of(model: Model, assignments: Sequence[Assignment]) -> dict[str, tuple[int, ...]]:
    """The stages that have each parameter or buffer, by the ``assignments`` of all stages."""
    of_buffers = {
        f"{model.layers[number][0]}/{buffer}": tuple(sorted(stages))
        for assignment in assignments
        for number, stages in assignment.held.items()
        for buffer in model.layers[number][1].buffers
    }
    return {**assignments[0].holders, **of_buffers}


def _row_key(name: str, array: Parameter | Buffer) -> str:
    """The name that the table lists for an array; all experts share one."""
    return name.replace(f"/expert{array.element[1]}/", "/expert*/") if array.element else name
