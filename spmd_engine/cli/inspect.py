"""``inspect``: what each rank of a mesh would hold, without starting it."""

from __future__ import annotations

from math import prod

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from spmd_engine.cli.options import mesh_option
from spmd_engine.comm.mesh import parse_axes
from spmd_engine.comm.world import launcher_rank
from spmd_engine.models.names import build_model
from spmd_engine.sharding.layout import Layout
from spmd_engine.sharding.place import all_places


@click.command(short_help="Show how a model is cut, and bytes per rank.")
@click.option("--model", default="gpt-nano", show_default=True, help="gpt-nano, gpt-mini or gpt2.")
@mesh_option
@click.option("--dtype", type=click.Choice(["float32", "float64"]), default="float32", show_default=True)
@click.option("--sequence-parallel", is_flag=True, help="Cut the sequence over 'model' between layers.")
def inspect(model: str, mesh: str | None, dtype: str, sequence_parallel: bool) -> None:
    """Print every parameter with its sharding ("d f/model": f divided over axis model) and what ranks hold.

    No rank is started: any mesh can be inspected anywhere.
    """
    if launcher_rank() > 0:
        return
    places = all_places(parse_axes(mesh) if mesh else {"data": 1})
    built = build_model(model)
    layout = Layout.for_mesh(places[0], sequence_parallel=sequence_parallel)
    itemsize = np.dtype(dtype).itemsize
    table = Table("parameter", "sharding", "whole shape", "on rank 0", box=None, header_style="bold")
    held = np.zeros(len(places), np.int64)
    for name, (parameter, shape) in built.parameters():
        spec = layout.spec(parameter.dims)
        blocks = [spec.local_shape(shape, place) for place in places]
        held += [prod(block) for block in blocks]
        table.add_row(name, str(spec), "x".join(map(str, shape)), "x".join(map(str, blocks[0])))
    console = Console(highlight=False, width=None)
    console.print(f"{model}: {built.parameter_count:,} parameters, {dtype}")
    console.print(f"mesh {places[0]}: {len(places)} ranks")
    console.print(f"inputs {layout.spec(built.inputs)}, outputs {layout.spec(built.outputs)}\n")
    console.print(table)
    summary = Table("bytes per rank", "least", "most", box=None, header_style="bold")
    for kind, copies in (("parameters", 1), ("gradients", 1), ("optimizer state (AdamW)", 2), ("together", 4)):
        summary.add_row(kind, *(f"{int(n) * itemsize * copies:,}" for n in (held.min(), held.max())))
    console.print()
    console.print(summary)
