"""Options that several commands share, and what they mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from spmd_engine.axes import parse_axes
from spmd_engine.comm.mesh import Mesh
from spmd_engine.configuration import Configuration, default_of
from spmd_engine.engine.parallel_config import ModelConfig
from spmd_engine.errors import UsageError
from spmd_engine.models import ImageShape
from spmd_engine.models.names import IMAGES, MODELS, other_meaning
from spmd_engine.runtime.launchers import launcher_rank
from spmd_engine.training.run_job import read_run, run_folder
from spmd_engine.training.train_config import OF_IMAGES, TrainConfig

__all__ = ["run_folder"]

AUTO = "auto"  #: of ``--mesh``, where it is to be planned

mesh_option = click.option(
    "--mesh",
    metavar="AXIS=SIZE,...",
    help="How ranks are arranged: 'data', 'replicate' and 'shard' cut the batch, 'expert' the batch and the experts, "
    "'model' heads, hidden width and vocabulary or, of images, channels, 'queries' those that share a key head, and "
    "the rest as 'model', 'context' the sequence, 'rows' and 'columns' images, 'pipe' the layers. "
    "[default: data=NUMBER OF RANKS]",
)
device_option = click.option("--device", default="cpu", show_default=True, help="cpu (NumPy) or cuda (CuPy).")
check_option = click.option(
    "--check/--no-check",
    default=True,
    show_default=True,
    help="Compare what ranks call in every collective, so that a mismatch is an error and not a hang.",
)


images_option = click.option(
    "--images",
    metavar="H,W,C,CLASSES",
    help="Of a model of images: their height, width and channels, and the classes. [default: 8,8,1,10; of resnet18 "
    "and resnet50 224,224,3,1000]",
)


def _note_other_meaning(context: click.Context, option: click.Parameter, name: str) -> str:
    """One rule for all commands: a built-in name is that of the built-in model, whatever else has this name."""
    given = context.get_parameter_source(option.name or "") is not ParameterSource.DEFAULT
    if given and (other := other_meaning(name)):
        print_notices([f"--model {name} is the built-in model; for the weights in {other} write --model {other}"])
    return name


def print_notices(notices: Sequence[str]) -> None:
    """Print what the user should know, from rank 0 on standard error."""
    for notice in notices if launcher_rank() == 0 else ():
        click.echo(f"spmd_engine: note: {notice}", err=True)


#: Of ``--model``, for commands that take built-in models and weights.
MODEL: dict[str, Any] = {
    "default": default_of(ModelConfig, "name"),
    "show_default": True,
    "callback": _note_other_meaning,
    "help": f"One of {', '.join(MODELS)}; or weights: a folder, a GGUF file, or org/name in the hub's local cache.",
}
model_option = click.option("--model", **MODEL)


def image_shape(model: str, text: str | None) -> ImageShape | None:
    """What ``--images`` says; raises UsageError if it cannot be read, or the model is none of images."""
    if text is None:
        return None
    if model not in IMAGES:
        raise UsageError(f"--images {text}: {model} is no model of images; choose {' or '.join(IMAGES)}")
    try:
        height, width, channels, classes = (int(size) for size in text.split(","))
    except ValueError:
        raise UsageError(f"--images {text}: write height,width,channels,classes, as in 28,28,1,10") from None
    if min(height, width, channels, classes) < 1:
        raise UsageError(f"--images {text}: sizes are from 1")
    return ImageShape(height, width, channels, classes)


def field_option(kind: type[Configuration], name: str, flag: str = "", **options: Any) -> Callable:
    """An option for a field of a configuration, with the field's default and type; the field checks its range."""
    default = default_of(kind, name)
    shown = f"{default}; images: {OF_IMAGES[name]}" if name in OF_IMAGES else True
    flag = flag or "--" + name.replace("_", "-")
    return click.option(flag, **{"type": type(default), "default": default, "show_default": shown} | options)


def open_mesh(text: str | None, *, check: bool = True) -> Mesh:
    """The mesh that ``--mesh`` describes, over all ranks there are."""
    return Mesh(check=check, **(parse_axes(text) if text else {}))


def with_options(options: Sequence[Callable], command: Callable) -> Callable:
    """The command with these of click's options, which its help lists in their order."""
    for option in reversed(options):
        command = option(command)
    return command


def options_given(context: click.Context) -> dict[str, Any]:
    """The options that were given, not left to their defaults, as a job has them: ``mesh`` as axes and sizes."""
    given = {
        name: value
        for name, value in context.params.items()
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT
    }
    if given.get("mesh") and given["mesh"] != AUTO:
        given["mesh"] = parse_axes(given["mesh"])
    return given


def read_config(run: str | Path) -> TrainConfig:
    """The job of a run, by its ``config.json``, read on rank 0 and given to all. Collective over the world."""
    return read_run(run)


def what_it_computes(job: TrainConfig) -> ModelConfig:
    """A run's model without how it was computed: to be served on another mesh.

    Raises UsageError for a run of a page of ``strategies/``, which has no model to be built anew.
    """
    if job.strategy:
        raise UsageError(f"this is a run of --strategy {job.strategy}: only 'train --resume' continues from those")
    return job.model.changed(dropout=0.0)
