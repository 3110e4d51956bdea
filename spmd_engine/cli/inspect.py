"""``inspect``: what each rank of a mesh holds, without starting ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from spmd_engine.arrays.precision import dtype_of
from spmd_engine.axes import MeshPosition, all_positions
from spmd_engine.checkpoints.hf.weights import Pretrained
from spmd_engine.checkpoints.pretrained import table as tensor_table
from spmd_engine.cli.options import model_on, takes_job
from spmd_engine.cli.show.memory import bytes_per_rank
from spmd_engine.cli.show.sharding import placement_text
from spmd_engine.engine.build import composed_assignment, composed_layout
from spmd_engine.engine.helpers import helper_stage
from spmd_engine.engine.state.assignment import PIPE, Assignment, homes_of
from spmd_engine.layers import Parameter
from spmd_engine.layers.declarations import Buffer
from spmd_engine.models import Model
from spmd_engine.runtime.launchers import launcher_rank
from spmd_engine.sharding.groups import Home
from spmd_engine.sharding.layout import Layout
from spmd_engine.training.train_config import TrainConfig

WIDTH = 120  # least columns of a line, so that no name is truncated on narrow terminals


@click.command(short_help="Show how a model is sharded, and bytes per rank.")
@takes_job("model", "images", "precision", "mixture", "lora", "composition", described=True)
def inspect(job: TrainConfig) -> None:
    """Print every parameter with its sharding ("d f/model": f divided over axis model) and what ranks hold.

    No rank is started: any mesh can be inspected anywhere. Parameters are listed as layers use them; what --zero
    shards is stored in parameter groups, and each pass makes one collective for each group.

    \b
      python -m spmd_engine inspect --model gpt2 --mesh data=4,model=8
      python -m spmd_engine inspect --model deep-mlp --mesh data=8 --zero 3 --group-threshold 500000
      python -m spmd_engine inspect --model models/SmolLM2-135M --mesh data=2,model=2 --lora-rank 8
    """
    if launcher_rank() > 0:
        return
    name, dtype = job.model.name, job.model.dtype
    axes = dict(job.composition.mesh or {"data": 1})
    built, composition = model_on(axes, job)
    places = all_positions(axes)
    layout = composed_layout(built, places[0], composition)
    for layer_name, layer in built.layers:
        for part in layer.side_by_side:
            layout.check(layer_name, {"b", "s", *part.sizes}, part.may_cut, part.across)
    itemsize = dtype_of(dtype).itemsize
    assignments = [composed_assignment(built, place, layout, itemsize, composition) for place in _first_ranks(places)]
    pretrained = Pretrained(name) if job.model.path else None
    held = bytes_per_rank(built, axes, composition, dtype=dtype)
    console = Console(highlight=False, width=max(WIDTH, Console().width))
    frozen = {name: entry for name, entry in built.buffers() if entry[0].frozen}
    count = sum(prod(shape) for _, shape in frozen.values())
    adapters = f" of adapters, and {count:,} frozen ones" if frozen else ""
    console.print(f"{name}: {built.parameter_count:,} parameters{adapters}, {dtype}", soft_wrap=True)
    console.print(f"mesh {places[0]}: {len(places)} ranks")
    console.print(f"inputs {layout.spec(built.inputs)}, outputs {layout.spec(built.outputs)}\n")
    if pretrained is not None:
        specs = {name: str(layout.spec(source.view.dims)) for name, source in pretrained.filled.items()}
        for line in tensor_table(pretrained, specs):
            console.print(line, soft_wrap=True, markup=False)
        console.print()
    homes = homes_of(built, layout, places[0])
    stages = _stages_of(built, assignments) if len(assignments) > 1 else {}
    for kind, arrays in ("parameter", dict(built.parameters())), ("frozen weight", frozen):
        if arrays:
            console.print(_arrays(kind, arrays, places[0], layout, homes, stages))
            console.print()
    if any("e" in layer.sizes for _, layer in built.layers):
        console.print(placement_text(built, places, layout).lstrip() + "\n", soft_wrap=True)
    for stage, assignment in enumerate(assignments):
        where = f"stage {stage}: " if len(assignments) > 1 else ""
        others = len(assignment.held) - len(assignment.uses)
        counts = _counted(len(assignment.uses), "layer"), _counted(len(list(assignment.members)), "parameter")
        layers = counts[0] + (f", and {others} that another stage computes," if others else "")
        console.print(f"{where}{layers} with {counts[1]} -> {_counted(len(assignment.groups), 'group')}")
        if assignment.frozen:
            console.print(f"{where}frozen weights in parts -> {_counted(len(assignment.frozen), 'group')}")
    for term in composition.assigned:
        numbers = term.numbers(built)
        where = f" of stage {helper_stage(built, axes, composition, term.rank)}" if len(assignments) > 1 else ""
        names = f"{built.layers[numbers[0]][0]} to {built.layers[numbers[-1]][0]}"
        console.print(
            f"helper rank {term.rank} computes {_counted(len(numbers), 'layer')}{where}, {names}, for its owners"
        )
    console.print()
    console.print(_summary(held))


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
    columns = [kind, "sharding", "whole shape", "on the first rank", *(["stages"] if stages else [])]
    table = Table(*columns, box=None, header_style="bold")
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
        table.add_row(_row_key(name, array), str(spec), *cells, *([",".join(map(str, stages[name]))] if stages else []))
    return table


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


def _summary(held: Sequence[Sequence[tuple[str, int]]]) -> Table:
    """A table of the least and most bytes of each class, over the ranks."""
    table = Table("bytes per rank", "least", "most", box=None, header_style="bold")
    by_rank = np.array([[count for _, count in rank] for rank in held])
    notes = {"optimizer state": "optimizer state (AdamW)", "largest groups": "whole for a while (largest groups)"}
    for (kind, _), counts in zip(held[0], by_rank.T, strict=True):
        table.add_row(notes.get(kind, kind), f"{counts.min():,}", f"{counts.max():,}")
    together = by_rank.sum(axis=1)
    table.add_row("together", f"{together.min():,}", f"{together.max():,}")
    return table


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
