"""``show``, and ``inspect``: pictures of what the engine does, without starting a rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import click
from rich.console import Console

from spmd_engine.axes import all_positions, parse_axes
from spmd_engine.cli import CommandGroup
from spmd_engine.cli.options import (
    LongCommand,
    axes_of,
    model_on,
    output_option,
    permitted,
    present,
    renamed,
    takes_job,
)
from spmd_engine.cli.values import Choice, WholeRange
from spmd_engine.comm.notation import Spec
from spmd_engine.comm.views import ArraySharding, draw_mesh
from spmd_engine.engine import ParallelConfig
from spmd_engine.engine.build import composed_layout
from spmd_engine.engine.schedules.orders import named
from spmd_engine.errors import UsageError
from spmd_engine.observability import shardings
from spmd_engine.observability.collective import EXAMPLES, MOST, draw_collective, transports_on_mesh
from spmd_engine.observability.memory import draw_memory, draw_storage
from spmd_engine.observability.run_record import RunRecord
from spmd_engine.observability.step import draw_communication, print_transfers
from spmd_engine.planning import analyze
from spmd_engine.training import TrainConfig
from spmd_engine.training.run_folder import read_run, run_folder
from spmd_engine.training.workload import step_of

WIDTH = 120  # least columns of a line, so that no name is truncated on narrow terminals


@click.command(cls=LongCommand, short_help="Show how a model is sharded, and bytes per rank.")
@takes_job("model", "images", "precision", "mixture", "lora", "composition", "optimizer", described=True)
@click.option("--storage", is_flag=True, help="Print where each kind of array lives, instead.")
@output_option
def inspect(job: TrainConfig, storage: bool, output: Path | None) -> None:
    """Print every parameter with its sharding ("d f/model": f divided over axis model) and what ranks hold.

    No rank is started: any mesh can be inspected anywhere. Parameters are listed as layers use them; what --zero
    shards is stored in parameter groups, and each pass makes one collective for each group.

    The picture shows the bytes of parameters, gradients and optimizer state: with --zero rank by rank, without it under
    each ZeRO stage. What is sharded is whole while it is used: the largest groups. 'analyze' adds activations. With
    --storage, a table says of each kind of array which part a rank holds, in which dtype, where, and in how many bytes.

    \b
      python -m spmd_engine inspect --model gpt2 --mesh data=4,model=8 --output memory.svg
      python -m spmd_engine inspect --model deep-mlp --mesh data=8 --zero 3 --group-threshold 500000
      python -m spmd_engine inspect --model models/SmolLM2-135M --mesh data=2,model=2 --lora-rank 8
    """
    axes = dict(job.composition.mesh or {"data": 1})
    model, composition = model_on(axes, job)
    console = Console(highlight=False, width=max(WIDTH, Console().width))
    if storage:
        present(draw_storage(job, model, composition), output, console)
        return
    picture = draw_memory(job, model, composition)
    shardings.print_shardings(console, job, model, composition)
    console.print()
    present(picture, output, console)


MOST_PARTS = 64  #: micro-batches that can be drawn


@click.group(cls=CommandGroup, short_help="Draw meshes, shardings, experts, schedules, communication, collectives.")
def show() -> None:
    """Draw what the engine does. No rank is started: any mesh can be drawn anywhere.

    \b
      python -m spmd_engine show mesh data=2,pipe=2,model=2
    """


@show.command(short_help="The ranks of a mesh, and each axis' groups.")
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


@show.command(cls=LongCommand, short_help="An array's blocks, and the ranks that hold them.")
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
        parsed, sizes, places = shardings.parameter_sharding(job, param, places)
    elif spec is None or shape is None:
        raise UsageError('show sharding: give SHARDING and --shape, as in: show sharding "b/data d" --shape 8,6')
    else:
        name = ""
        parsed = shardings.with_shares(Spec.parse(spec), job.composition.shares, places[0])
        sizes = shardings.parse_shape(shape)
    present(ArraySharding.of(parsed, sizes, places).picture(name, shardings.notes_on_holders(places)), output)


@show.command(cls=LongCommand, short_help="Ranks that hold each expert, and its load in a run.")
@takes_job("model", "mixture", "mesh", "experts_over", described=True, defaults={"model": "gpt-moe-nano"})
@click.option("--run", metavar="NAME", help="A run, for its model and the load that it measured.")
@click.option("--steps", type=WholeRange(min=1), default=20, help="With --run: its last steps.")
@click.option("--layer", metavar="NAME", help="One layer, such as block0/moe. [default: all together]")
def experts(job: TrainConfig, run: str | None, steps: int, layer: str | None) -> None:
    """Print a line for each expert, with the part and the ranks that hold it, then one for each part. With --run, also
    the mean load of its last steps: pairs of a token and a chosen expert, over the whole batch; the parts are those
    of its last step, or with --mesh or --experts-over even ones.

    Outside the layers with experts, axis 'expert' splits the batch, as 'data' does.

    \b
      python -m spmd_engine show experts --model gpt-moe-nano --mesh expert=4,data=2
      python -m spmd_engine show experts --run gpt-moe-nano-1 --layer block0/moe
      python -m spmd_engine show experts --run gpt-moe-nano-1 --mesh expert=8
    """
    axes, over = job.composition.mesh, job.composition.experts_over
    composition = ParallelConfig(experts_over=over)
    loads: Mapping[str, Sequence[float]] = {}
    placed: Mapping[str, tuple[int, ...]] = {}
    if run:
        run_job = read_run(run)
        named = "" if job.model.named_in else job.model.name
        job = job.changed(model=permitted(run_job.model, named, trust=False))
        if not (over or axes):
            composition, placed = run_job.composition, RunRecord.read(run_folder(run)).experts
        axes = axes or run_job.composition.mesh
        loads = shardings.mean_loads(run_folder(run), steps)
    model = job.model.build(composition)
    places = all_positions(dict(axes or {"data": 1}))
    layout = replace(composed_layout(model, places[0], composition), experts=placed)
    click.echo(f"{job.model.name}, mesh {places[0]}: inputs {layout.spec(model.inputs)}")
    click.echo(shardings.placement_text(model, places, layout, loads, layer))


@show.command(short_help="The timeline of a pipeline's schedule.")
@click.argument("name", metavar="SCHEDULE")
@click.option("--stages", type=WholeRange(1, 64), default=4, help="Of the pipeline.")
@click.option("--micro-batches", type=WholeRange(1, 512), default=8, help="Of a step.")
@click.option("--chunks", type=WholeRange(1, 16), help="Chunks of layers a stage. [default: 2 if interleaved]")
@output_option
def schedule(name: str, stages: int, micro_batches: int, chunks: int | None, output: Path | None) -> None:
    """Draw stage by time what a schedule computes: F forward, B backward, or its parts, I for the input and W for the
    weights, each with the number of the micro-batch; chunks of layers have small letters.

    A forward, an input part and a weight part each take one unit of time a stage, and transfers none. Below are the
    bubble, which is the idle part of all stages' time, and how many micro-batches' activations a stage holds at most.

    \b
      python -m spmd_engine show schedule 1f1b --stages 4 --micro-batches 8
      python -m spmd_engine show schedule interleaved --stages 4 --micro-batches 8 --chunks 2
      python -m spmd_engine show schedule zero-bubble --stages 4 --micro-batches 8 --output zero-bubble.svg

    SCHEDULE is naive, gpipe, 1f1b, interleaved, zero-bubble or zero-bubble-h2.
    """
    present(named(name, chunks).picture(stages, micro_batches), output)


@show.command(cls=LongCommand, short_help="What a rank sends in a step, and when.")
@takes_job(
    *("model", "images", "precision", "mixture", "composition", "batch_size", "micro_batches"),
    described=True,
    defaults={"batch_size": 16},
)
@click.option("--rank", type=WholeRange(min=0), default=0, help="The rank to draw.")
@output_option
def communication(job: TrainConfig, rank: int, output: Path | None) -> None:
    """List what one rank sends in a step, and draw the step: a column for each computation, and below a bar for each
    collective and message, from its start to the computation that waits for it.

    A layer that communicates in its middle is several computations with one name.

    \b
      python -m spmd_engine show communication --model gpt-nano --mesh data=4
      python -m spmd_engine show communication --model gpt-nano --mesh data=2,model=2 --zero 3
      python -m spmd_engine show communication --mesh pipe=2,data=2 --micro-batches 2 --schedule zero-bubble
    """
    axes = axes_of(job)
    mesh = all_positions(axes)
    if rank >= len(mesh):
        raise UsageError(f"--rank {rank} with --mesh {mesh[0]}: ranks are from 0 to {len(mesh) - 1}")
    if job.data.micro_batches > MOST_PARTS:
        raise UsageError(f"--micro-batches {job.data.micro_batches}: at most {MOST_PARTS} can be drawn")
    model, composition = model_on(axes, job)
    analysis = analyze(model, axes, composition, **step_of(job))
    title = f"{job.model.name}, mesh {mesh[0]}: a step of rank {rank}"
    if output is None:
        print_transfers(analysis.of_rank(rank), Console(highlight=False, soft_wrap=True))
    present(draw_communication(analysis.of_rank(rank), mesh[rank], title, analysis.approximate), output)


@show.command(short_help="What a collective does to small vectors.")
@click.argument("name", metavar="COLLECTIVE", type=Choice(list(EXAMPLES)))
@click.option("--ranks", type=WholeRange(2, MOST), default=4, help="Virtual ranks to run it on.")
@click.option("--mesh", metavar="AXIS=SIZE,...", help="Print which transports move its data on such a mesh, by size.")
@click.option("--nodes", type=WholeRange(1), default=1, help="Nodes of that mesh.")
@output_option
def collective(name: str, ranks: int, mesh: str | None, nodes: int, output: Path | None) -> None:
    """Draw what a collective does to a small vector of each rank, before and after.

    COLLECTIVE is all_reduce, all_gather, reduce_scatter, all_to_all, broadcast or send_receive (a shift along a
    ring). It is executed, on virtual ranks. Values keep the colour of the rank they come from; sums have none.

    \b
      python -m spmd_engine show collective all_reduce
      python -m spmd_engine show collective all_to_all --ranks 3 --output all_to_all.svg
      python -m spmd_engine show collective all_reduce --mesh data=4,model=2 --nodes 2
    """
    if mesh is None:
        present(draw_collective(name, ranks), output)
    elif name == "send_receive":
        raise UsageError("show collective send_receive --mesh: send and receive are messages on every mesh")
    else:
        click.echo("\n".join(transports_on_mesh(name, parse_axes(mesh), nodes)))


show.add_command(renamed(inspect, "memory", "show memory"))
