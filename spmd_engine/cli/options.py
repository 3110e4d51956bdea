"""Options of the command line, made from the fields of configurations, and the jobs that they describe."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spmd_engine.arrays import get_backend
from spmd_engine.cli.values import FILE, Choice, WholeNumber
from spmd_engine.comm import Mesh
from spmd_engine.comm.device_transport import choose_transport
from spmd_engine.configuration import ConfigField, Configuration, settings_of
from spmd_engine.engine import ModelConfig, ParallelConfig
from spmd_engine.errors import UsageError
from spmd_engine.jobs.resolve import job_of_options, mesh_of
from spmd_engine.models import Model
from spmd_engine.models.names import MODELS, has_weights, other_meaning
from spmd_engine.models.user_code import file_of, is_code, not_permitted, shown, with_arguments
from spmd_engine.planning.machine.product_choice import choose_products
from spmd_engine.runtime.launchers import launcher_rank
from spmd_engine.training import TrainConfig
from spmd_engine.units import BYTES, bytes_of, seconds_of

if TYPE_CHECKING:
    from rich.console import Console

    from spmd_engine.pictures import Picture

# --- Options from the fields of a configuration


class SettingOption(click.Option):
    """An option that is listed by its name, and accepted by its old names, too.

    ``section`` is its heading in the help of a ``LongCommand``, whose first page lists it if it is ``common``.
    """

    def __init__(self, *args: Any, section: str = "", common: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self.section, self.common = section, common

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        listed = copy(self)
        listed.opts = self.opts[:1]
        return click.Option.get_help_record(listed, ctx)


def rare_option(*flags: str, **options: Any) -> Callable:
    """An option of a command alone that is not on the first page of its help."""
    return click.option(*flags, cls=SettingOption, **options)


class LongCommand(click.Command):
    """A command with many options: ``--help`` lists those that most users need, with the first sentence of each help;
    ``--help-all`` lists all options, by section of the configuration, with their whole help."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        count = sum(isinstance(param, click.Option) for param in self.params)
        about = f"Show the whole help, of all {count} options, by section."
        show = {"is_eager": True, "expose_value": False, "callback": self._show_all}
        self.params.append(click.Option(["--help-all"], is_flag=True, help=about, **show))

    def _show_all(self, ctx: click.Context, _: click.Parameter, value: bool) -> None:
        if value and not ctx.resilient_parsing:
            ctx.meta[_ALL] = True
            click.echo(ctx.get_help(), color=ctx.color)
            ctx.exit()

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options of the first page in one list, or all of them under headings."""
        rows: dict[str, list[tuple[str, str]]] = defaultdict(list)
        every = ctx.meta.get(_ALL)
        for option in (param for param in self.get_params(ctx) if isinstance(param, click.Option)):
            if (every or getattr(option, "common", True)) and (record := option.get_help_record(ctx)):
                section = getattr(option, "section", "") if every else ""
                text = record[1] if every else _first_sentence(record[1])
                rows[f"{section} options".strip().capitalize()].append((record[0], text))
        for heading, records in rows.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def _first_sentence(text: str) -> str:
    """The first sentence of an option's help, with the default and the range in brackets at its end."""
    about = re.search(r"(\s+\[[^]]*])*$", text)
    assert about
    sentence, *more = text[: about.start()].split(". ")
    return f"{sentence}{'.' * bool(more)}{about[0]}"


_ALL = f"{__name__}.all"  #: a key of click's context: whether the whole help is shown


class Quantity(click.ParamType):
    """Bytes or seconds, with a unit: ``2GiB``, ``100ms``; or bytes a second, ``1GB/s``."""

    def __init__(self, unit: str) -> None:
        self.unit, self.name = unit, "size" if unit == BYTES else "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if not isinstance(value, str):
            return value
        where = param.opts[0] if param else self.unit
        return bytes_of(value.removesuffix("/s"), where) if self.unit == BYTES else seconds_of(value, where)


def chosen_settings(
    configuration: type[Configuration], names: Collection[str] = (), without: Collection[str] = ()
) -> dict[str, ConfigField]:
    """The fields that are options, by name: those in ``names`` or in sections with these names; by default all."""
    options = {name: setting for name, setting in settings_of(configuration).items() if setting.is_option}
    sections = set(names) - options.keys()
    return {
        name: setting
        for name, setting in options.items()
        if name not in without and (not names or name in names or sections & set(setting.path))
    }


def options_of(
    configuration: type[Configuration],
    names: Collection[str] = (),
    without: Collection[str] = (),
    defaults: Mapping[str, Any] | None = None,
    help: Mapping[str, str] | None = None,
) -> Callable:
    """A decorator that gives a command an option for each of the ``chosen_settings``.

    An option that is not given is None. ``defaults`` and ``help`` replace what the help shows of a field; with another
    ``help``, it shows no default of the field.
    """

    def decorate(command: Callable) -> Callable:
        chosen = chosen_settings(configuration, names, without)
        if "model" in chosen:
            command = _SET(command)
        for name, setting in reversed(chosen.items()):
            command = _option(setting, (defaults or {}).get(name), (help or {}).get(name))(command)
        return command

    return decorate


def _option(setting: ConfigField, default: Any, help: str | None) -> Callable:
    about = setting.about
    flags = ["--" + name.replace("_", "-") for name in (setting.name, *about.get("old_names", ()))]
    options: dict[str, Any] = {"metavar": about.get("metavar")}
    if setting.kind is bool:
        flags = [f"{flag}/--no-{flag[2:]}" for flag in flags]
    elif "choices" in about:
        options["type"] = Choice(about["choices"])
    elif "unit" not in about:
        options["type"] = WholeNumber() if setting.kind is int else float if setting.kind is float else str
    else:
        options["metavar"] = "SIZE" if about["unit"] == BYTES else "TIME"
    if setting.path == ("model", "name"):
        options["callback"] = _note_other_meaning
    text = (help or about["help"]).replace("`", "'")
    shown = "" if help else about.get("unset") or setting.text(setting.default)
    if "of_images" in about:
        shown += f"; images: {about['of_images']}"
    if default is not None:
        shown = str(default)
    text += f" [default: {shown}]" if shown and shown != "off" else ""
    listed = {"section": ([*setting.path[:-1]] or ["job"])[-1], "common": about.get("common", False)}
    return click.option(setting.name, *flags, default=None, help=text, cls=SettingOption, **listed, **options)


#: Arguments of a model's code, which become a part of the model's name.
_SET = rare_option(
    "--set",
    "arguments",
    metavar="NAME=VALUE",
    multiple=True,
    help="An argument for the code of --model, as in --set hidden=64; may be repeated.",
)


def values_given(params: Mapping[str, Any]) -> dict[str, Any]:
    """The given options of a job among a command's parameters, by name, with their values."""
    settings = settings_of(TrainConfig)
    values = {
        name: settings[name].read(value) for name, value in params.items() if value is not None and name in settings
    }
    if arguments := params.get("arguments"):
        values["model"] = with_arguments(values.get("model", TrainConfig().model.name), arguments)
    return values


# --- The job that a command line describes


def takes_job(
    *names: str,
    config: bool = True,
    described: bool = False,
    defaults: Mapping[str, Any] | None = None,
    help: Mapping[str, str] | None = None,
) -> Callable:
    """A decorator that gives a command the options of a job and, with ``config``, an option for a file that has a job.
    It calls the command with the ``job`` that they describe.

    ``names`` choose the options. ``defaults`` hold for the command, unless the file has a value. With
    ``described``, ``--model`` may be the path of a file that describes a model.
    """

    def decorate(command: Callable) -> Callable:
        chosen = chosen_settings(TrainConfig, names)

        @wraps(command)
        def run(*args: Any, **values: Any) -> Any:
            path = values.pop("config") if config else None
            names_given = [*chosen, *(["arguments"] if "model" in chosen else [])]
            given_options = values_given({name: values.pop(name) for name in names_given})
            return command(*args, job=_job_of(given_options, path, defaults or {}, described), **values)

        run = options_of(TrainConfig, names, defaults=defaults, help=help)(run)
        return _CONFIG(run) if config else run

    return decorate


_CONFIG = click.option(
    "--config", metavar="FILE", help="A job in JSON, such as the config.json of a run; options override its values."
)


def _job_of(options: dict[str, Any], path: str | None, defaults: Mapping[str, Any], described: bool) -> TrainConfig:
    name = options.get("model")
    if described and name is not None and not (name in MODELS or has_weights(name) or is_code(name)):
        others = {key: value for key, value in options.items() if key != "model"}
        job = job_of_options(others, path, defaults)
        return job.changed(model=DescribedModel(**vars(job.model) | {"name": name}))
    return job_of_options(options, path, defaults)


@dataclass(frozen=True)
class DescribedModel(ModelConfig):
    """A model by a file that describes it and has no weights: it can be analyzed and not trained."""

    def __post_init__(self) -> None:
        Configuration.__post_init__(self)

    def build(self, composition: ParallelConfig) -> Model:
        """The model; raises UsageError for a name that is neither a model nor a file."""
        from spmd_engine.planning.planner import planned_model

        return planned_model(self.name, self.lora, composition)


def _note_other_meaning(context: click.Context, option: click.Parameter, name: str | None) -> str | None:
    """Print a note if ``--model`` is both a built-in model, which is then used, and the name of weights."""
    if name is not None and launcher_rank() == 0 and (other := other_meaning(name)):
        print_notices([f"--model {name} is the built-in model; for the weights in {other} write --model {other}"])
    return name


def print_notices(notices: Sequence[str]) -> None:
    """Print notes for the user, from rank 0 on standard error."""
    for notice in notices if launcher_rank() == 0 else ():
        click.echo(f"spmd_engine: note: {notice}", err=True)


def renamed(command: click.Command, name: str, old: str) -> click.Command:
    """A command under its former name, in full ``old``, for one release: unlisted, and with a note that it prints."""
    former = copy(command)
    former.name, former.hidden = name, True

    def run(**params: Any) -> Any:
        print_notices([f"'{old}' is now '{command.name}'; the next release has that name alone"])
        assert command.callback
        return command.callback(**params)

    former.callback = run
    return former


def axes_of(job: TrainConfig) -> dict[str, int]:
    """The mesh of a job that is drawn or analyzed; raises UsageError if the job has no mesh."""
    if not job.composition.mesh:
        raise UsageError("--mesh is missing: give the axes of a mesh, which need not exist, as in data=2,model=2")
    return dict(job.composition.mesh)


def model_on(axes: Mapping[str, int], job: TrainConfig) -> tuple[Model, ParallelConfig]:
    """The model of a job, and how it is spread over a mesh with these axes.

    Prints notes on options without effect; raises UsageError for an impossible composition.
    """
    composition = job.composition.changed(mesh=axes)
    model = job.model.build(composition)
    print_notices(composition.check(axes, model))
    return model, composition


def open_mesh(job: TrainConfig, axes: Mapping[str, int] | None = None, *, beside: bool = False) -> Mesh:
    """The mesh of a job, over all ranks, with its libraries of products and its transport; ``axes`` if it has no mesh.
    ``beside``: whether some ranks may be helper ranks, which are not on it.

    Prints notices of a library that cannot be used, and of how arrays on devices travel.
    """
    others = job.composition.ranks_outside
    if others and not beside:
        raise UsageError(f"--assign {job.composition.assign}: only 'train' and 'verify' have helper ranks; omit it")
    mesh = mesh_of(job, job.composition.mesh or axes or {}, others, check=job.check)
    print_notices(choose_products(mesh.all_ranks(), job.products, dtype=job.model.dtype, device=job.device))
    backend = get_backend(job.device, *mesh.process_on_node, memory=job.device_memory)
    print_notices(choose_transport(mesh.all_ranks(), backend, job.transport))
    return mesh


def served_model(job: TrainConfig) -> ModelConfig:
    """The model of a run, for another mesh, without dropout.

    Raises UsageError for a run of a page of ``strategies/``, whose model cannot be built again.
    """
    if job.strategy:
        raise UsageError(f"this is a run of --strategy {job.strategy}: only 'train --resume' continues from those")
    return job.model.changed(dropout=0.0)


# --- Pictures


output_option = click.option(
    "--output",
    type=FILE,
    help="Write the picture to FILE.svg, or FILE.png (needs Pillow), instead of printing it.",
)


def present(picture: Picture, output: Path | None, console: Console | None = None) -> None:
    """Print a picture, in colour on a terminal, or write it to ``output``."""
    from rich.console import Console

    from spmd_engine.observability.render import print_picture, write_image

    if output is None:
        print_picture(picture, console or Console())
        return
    write_image(picture, output)
    click.echo(f"wrote {output}")


# --- Code that a file names


trust_option = rare_option(
    "--trust-code",
    is_flag=True,
    help="Run the code of your own that the file of a run, a job or a plan names, as it is now; its path and SHA-256 "
    "are printed first. Without it, name the code by --model.",
)


def permitted(model: ModelConfig, named: str | None, trust: bool) -> ModelConfig:
    """The model of a file; if it is code, it may run from now on, since the user has ``named`` it or trusts the file.

    Prints the path and the SHA-256 of code that is trusted, and whether it differs from what the file records. Raises
    UsageError for code that is neither named nor trusted. A model of which ``named`` is not the name stays as it is.
    """
    if not is_code(model.name) or not model.named_in or named not in (None, model.name):
        return model
    if named is None and not trust:
        raise not_permitted(model.name, model.named_in, ", or give --trust-code")
    now, path = model.changed(name=model.name), file_of(model.name)
    file = shown(str(path.resolve())) if path else "a module without a file"
    if named is None:
        print_notices([f"{model.named_in} names code, which runs: {shown(model.name)}, {file}, SHA-256 {now.code}"])
    if model.code != now.code:
        recorded = f"SHA-256 {model.code}" if model.code else "no SHA-256"
        print_notices([f"{file} differs from the code that {model.named_in} records, {recorded}"])
    return now
