"""``join``: more ranks for a running job."""

from __future__ import annotations

from typing import Any

import click

from spmd_engine.cli.migrate import parse_ranks
from spmd_engine.cli.options import LongCommand, Quantity, options_of, permitted, trust_option, values_given
from spmd_engine.engine.parallel_config import ModelConfig, ParallelConfig
from spmd_engine.engine.reshape import ShapeRequest
from spmd_engine.errors import UsageError
from spmd_engine.jobs.joined_run import join as join_job
from spmd_engine.runtime.activity import ranges
from spmd_engine.training.train_config import TrainConfig
from spmd_engine.units import SECONDS


@click.command(cls=LongCommand, short_help="Add ranks to a running job.")
@click.argument("run")
@click.option(
    "--ranks",
    metavar="N,N,...",
    help="Ranks of the job on the new mesh, with rank 0. [default: the first]",
)
@click.option(
    "--wait",
    type=Quantity(SECONDS),
    metavar="TIME",
    default=600.0,
    help="Longest wait until the job takes these ranks in. [default: 10min]",
)
@trust_option
@options_of(TrainConfig, ["model", "composition"], without=["compress"], help={"model": "The run's own code, by name."})
def join(run: str, ranks: str | None, wait: float, trust_code: bool, **options: Any) -> None:
    """Join the job that trains in the folder RUN, with all ranks that this mpiexec has started.

    They read the job's configuration and data while the job goes on; between two of its steps both worlds merge, and
    the new ranks get numbers after those of the others. Parameters and optimizer state come from the memory of the
    running ranks. With --mesh, or another option of the job's shape, the job changes its shape at once; without, the
    new ranks are idle until 'migrate' puts them onto the mesh. They end with the job, with the same exit code.

    \b
      mpiexec -n 2 python -m spmd_engine join gpt-nano-1 --mesh data=6
      mpiexec -n 2 python -m spmd_engine join gpt-nano-1
    """
    values, request = values_given(options), None
    named = values.pop("model", None)
    if values or ranks is not None:
        ParallelConfig().changed(**values)  # raises UsageError for a value that no mesh permits
        request = ShapeRequest(values, parse_ranks(ranks))

    def entered(numbers: list[int], step: int) -> None:
        click.echo(f"spmd_engine: joined {run} after step {step}, as rank(s) {ranges(numbers)}", err=True)

    def permit(model: ModelConfig) -> ModelConfig:
        if named not in (None, model.name):
            raise UsageError(f"--model {named} with {run}, whose model is {model.name}: omit --model")
        return permitted(model, named, trust_code)

    join_job(run, request, wait=wait, entered=entered, permit=permit)
