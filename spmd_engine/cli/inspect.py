"""``inspect``: how a model is sharded, and what each rank of a mesh holds, without starting ranks."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from spmd_engine.cli.options import LongCommand, model_on, output_option, present, takes_job
from spmd_engine.observability.memory import draw_memory, draw_storage
from spmd_engine.observability.shardings import print_shardings
from spmd_engine.training.train_config import TrainConfig

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
    print_shardings(console, job, model, composition)
    console.print()
    present(picture, output, console)
