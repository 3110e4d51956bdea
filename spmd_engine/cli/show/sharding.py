"""``show sharding``: an array's blocks over the ranks, as JAX's ``visualize_array_sharding`` draws them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import prod
from pathlib import Path

import click

from spmd_engine.axes import MeshPosition, all_positions
from spmd_engine.cli.options import axes_of, takes_job
from spmd_engine.cli.show.picture import COLOURS, Picture, grid, listed
from spmd_engine.cli.show.render import output_option, present
from spmd_engine.engine.state.assignment import PIPE, assign
from spmd_engine.engine.state.split_weights import misfit, parse_shares
from spmd_engine.errors import UsageError
from spmd_engine.models import layout_for
from spmd_engine.sharding.notation import Spec
from spmd_engine.training.train_config import TrainConfig

MOST = 1024  # blocks


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
        cut, sizes, places = parameter_sharding(job, param, places)
    elif spec is None or shape is None:
        raise UsageError('show sharding: give SHARDING and --shape, as in: show sharding "b/data d" --shape 8,6')
    else:
        name = ""
        cut, sizes = with_shares(Spec.parse(spec), job.composition.shares, places[0]), parse_shape(shape)
    present(draw_sharding(cut, sizes, places, name), output)


def parse_shape(text: str) -> tuple[int, ...]:
    """``"8,6"`` as (8, 6); raises UsageError for anything else."""
    sizes = [size.strip() for size in text.split(",")] if text.strip() else []
    if not all(size.isdecimal() for size in sizes):
        raise UsageError(f"cannot read shape {text!r}; write whole numbers as in 8,6")
    return tuple(map(int, sizes))


def with_shares(spec: Spec, text: str | None, place: MeshPosition) -> Spec:
    """The sharding with these uneven shares; raises UsageError for an axis that does not split it."""
    shares = parse_shares(text, "--shares", spec.axes, least=0)
    if why := misfit(shares, place.axes):
        raise UsageError(f"--shares {text} with --mesh {place}: {why}. Give a share for each rank of an axis")
    return Spec(spec.dims, tuple({**dict(spec.weights), **shares}.items()))


def parameter_sharding(
    job: TrainConfig, name: str, places: Sequence[MeshPosition]
) -> tuple[Spec, tuple[int, ...], Sequence[MeshPosition]]:
    """How the default layout shards a parameter of a model, its whole shape, and the ranks whose stage has it."""
    built = job.model.build(job.composition)
    layout = layout_for(built, places[0])
    parameters = dict(built.parameters())
    if name not in parameters:
        close = [known for known in parameters if name.split("/")[-1] in known] or list(parameters)
        raise UsageError(f"{job.model.name} has no parameter {name!r}; it has, for example: {', '.join(close[:4])}")
    assignment = assign(built, places[0], layout, itemsize=4)
    stages, home = assignment.holders[name], assignment.homes.get(name)
    parameter, shape = parameters[name]
    having = [place for place in places if place.coordinates.get(PIPE, 0) in stages and (not home or home.has(place))]
    return layout.spec(parameter.dims), shape, having


def draw_sharding(spec: Spec, shape: Sequence[int], places: Sequence[MeshPosition], name: str = "") -> Picture:
    """The blocks of an array of the whole ``shape`` over these ranks of a mesh; ``name`` begins the title."""
    mesh = places[0]
    blocks = [spec.block(shape, place) for place in places]
    if (count := mesh.axis_size(spec.axes)) > MOST:
        raise UsageError(f'sharding "{spec}" on mesh {mesh} has {count} blocks; at most {MOST} can be drawn')
    down, across, *others = _drawn([dim for dim, (_, axes) in enumerate(spec) if axes], len(shape))
    ranks: dict[tuple[int, int], list[int]] = defaultdict(list)
    first: dict[tuple[int, int], tuple[slice, ...]] = {}
    for place, block in zip(places, blocks, strict=True):
        where = _part(spec, down, place), _part(spec, across, place)
        ranks[where].append(_rank(place))
        first.setdefault(where, block)
    rows, columns = (max(parts) + 1 for parts in zip(*ranks, strict=True))
    cells = grid(
        [_name(spec, down, first[row, 0]) for row in range(rows)],
        [_name(spec, across, first[0, column]) for column in range(columns)],
        [[_label(ranks[r, c], first[r, c], spec, others) for c in range(columns)] for r in range(rows)],
        # Steps of 3 and 1 of 7 colours: neighbours never have the same.
        [[COLOURS[(3 * r + c) % len(COLOURS)] for c in range(columns)] for r in range(rows)],
    )
    title = f'{name}"{spec}", shape {_by(shape)}, mesh {mesh}'
    notes = [_sizes(blocks)]
    notes += [_not_drawn(spec, dim, places, blocks) for dim in others]
    reach = {axis: len({place.coordinates[axis] for place in places}) for axis in mesh.axes}
    if reach.get(PIPE, 1) < mesh.axes.get(PIPE, 1):
        stages = sorted({place.coordinates[PIPE] for place in places})
        notes.append(f"Pipeline: stage {' and stage '.join(map(str, stages))} alone.")
    if alone := [axis for axis, size in mesh.axes.items() if axis != PIPE and reach[axis] < size]:
        where = " and ".join(f"{axis} {mesh.coordinates[axis]}" for axis in alone)
        notes.append(f"One expert's: ranks with {where} alone, which cut the batch elsewhere.")
    if copied := [axis for axis, count in reach.items() if count > 1 and axis not in spec.axes]:
        copies = prod(reach[axis] for axis in copied)
        notes.append(f"Each block is on {copies} ranks, which differ along {' and '.join(copied)}.")
    return Picture(title, cells, notes=notes)


def _rank(place: MeshPosition) -> int:
    return place.index(place.axes)


def _drawn(cut: Sequence[int], dims: int) -> tuple[int | None, ...]:
    """The dim that goes down, the one that goes across, and those that are cut but not drawn."""
    if len(cut) == 1:  # the last dim lies across, as a vector and a matrix' columns do
        return (None, cut[0]) if cut[0] == dims - 1 else (cut[0], None)
    return tuple(cut) if cut else (None, None)


def _part(spec: Spec, dim: int | None, place: MeshPosition) -> int:
    """Which part of a dim a rank has, counted along it."""
    return place.index(spec.dims[dim][1] if dim is not None else ())


def _name(spec: Spec, dim: int | None, block: Sequence[slice]) -> str:
    return f"{spec.dims[dim][0]} {_range(block[dim])}" if dim is not None else ""


def _label(ranks: Sequence[int], block: Sequence[slice], spec: Spec, others: Sequence[int]) -> str:
    """The ranks and, below, what they hold: ``[0:4, :]``, with the letter of a dim that is cut but not drawn."""
    indices = []
    for dim, ((letter, axes), part) in enumerate(zip(spec, block, strict=True)):
        indices.append(letter if dim in others else _range(part) if axes else ":")
    empty = any(part.start == part.stop for dim, part in enumerate(block) if dim not in others)
    held = f"[{', '.join(indices)}]" + (" empty" if empty else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed(ranks)}\n{held}"


def _range(part: slice) -> str:
    return f"{part.start}:{part.stop}"


def _by(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes)) or "of a number"


def _sizes(blocks: Sequence[Sequence[slice]]) -> str:
    """``Each rank holds 4 x 3.``, or from the smallest to the largest."""
    sizes = {tuple(part.stop - part.start for part in block) for block in blocks}
    held = sorted(sizes, key=lambda size: (prod(size), size))
    if held == [()]:
        return "Each rank holds one number."
    if len(held) == 1:
        return f"Each rank holds {_by(held[0])}."
    return f"Uneven: a rank holds from {_by(held[0])} to {_by(held[-1])}."


def _not_drawn(spec: Spec, dim: int, places: Sequence[MeshPosition], blocks: Sequence[Sequence[slice]]) -> str:
    """``h/context is not drawn: 0:2 on ranks 0,2; 2:4 on ranks 1,3.``"""
    letter, axes = spec.dims[dim]
    ranks: dict[str, list[int]] = defaultdict(list)
    for place, block in zip(places, blocks, strict=True):
        ranks[_range(block[dim])].append(_rank(place))
    parts = [f"{part} on ranks {listed(held)}" for part, held in ranks.items()]
    if len(parts) > 4:
        parts[3:-1] = ["..."]
    return f"{letter}/{','.join(axes)} is not drawn: {'; '.join(parts)}."
