"""``--config FILE`` of commands that look at a job, or prove it, and do not train it."""

from __future__ import annotations

from typing import Any

import click

from spmd_engine.errors import UsageError
from spmd_engine.models import Mixture
from spmd_engine.models.lora import LoRAOptions
from spmd_engine.training.run_job import read_job
from spmd_engine.training.train_config import LORA, MIXTURE, ROUTER, TrainConfig

_JOB = "spmd_engine.job"  # in a context's meta
_OF_THE_COMMAND = ("steps", "config")  # how long a job trains says nothing of how it is looked at


def _take(context: click.Context, _: click.Parameter, path: str | None) -> None:
    if path is None:
        return
    job = read_job(path)
    context.meta[_JOB] = job
    names = {each.name for each in context.command.params if each.name} - {*_OF_THE_COMMAND}
    if job.strategy:
        names &= {"strategy", "mesh"}
    if job.model.mixture is None:
        names -= {*MIXTURE, *ROUTER}
    if job.model.lora is None:
        names -= set(LORA)
    found = {name: _option(job, name) for name in names}
    context.default_map = {name: value for name, value in found.items() if value is not None}


def _option(job: TrainConfig, name: str) -> Any:
    """The value of a command's option in a job, as the command line would write it; None if a job has none."""
    if name == "images":
        sizes = job.model.images
        return ",".join(str(sizes[each]) for each in ("height", "width", "channels", "classes")) if sizes else None
    if name == "mesh":
        axes = job.composition.mesh
        return ",".join(f"{axis}={size}" for axis, size in axes.items()) if axes else None
    try:
        return job.option(name)
    except UsageError:  # an option of the command alone
        return None


config_option = click.option(
    "--config",
    metavar="FILE",
    is_eager=True,
    expose_value=False,
    callback=_take,
    help="A job in JSON, such as a run's config.json: its model, mesh and composition, unless options say else.",
)


def configured_mixture(given: dict[str, Any]) -> Mixture | None:
    """The mixture of experts of the command's ``--config``, with the options that are ``given``; None for the usual."""
    return _configured(given).model.mixture


def configured_lora(given: dict[str, Any]) -> LoRAOptions | None:
    """Its adapters, with the options that are ``given``; None for none."""
    return _configured(given).model.lora


def _configured(given: dict[str, Any]) -> TrainConfig:
    context = click.get_current_context(silent=True)
    job = context.meta.get(_JOB, TrainConfig()) if context else TrainConfig()
    return job.with_options(**given) if given else job
