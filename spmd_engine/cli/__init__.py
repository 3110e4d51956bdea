"""The command line: click commands, and how every error is printed."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from io import TextIOWrapper
from traceback import walk_tb
from typing import Any, NoReturn

import click

import spmd_engine
from spmd_engine import __version__
from spmd_engine.errors import UsageError, one_of, similar_to
from spmd_engine.foreign import reason
from spmd_engine.importing import many_imports
from spmd_engine.runtime.ending import end_at_once
from spmd_engine.runtime.launchers import launcher_rank, let_rank_zero_speak
from spmd_engine.runtime.output import lossy_output
from spmd_engine.runtime.signals import StopFlag, exit_code, raise_interrupted

INSTALLED = "spmd-engine"  #: the command of an installed package (``console_scripts`` in setup.cfg)


class CommandGroup(click.Group):
    """A group that answers an unknown command with the nearest name."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        names = self.list_commands(ctx)
        if args[0] not in names and not args[0].startswith("-"):
            ctx.fail(f"no command {args[0]!r}; {one_of(args[0], names)}")
        return super().resolve_command(ctx, args)


class LazyGroup(CommandGroup):
    """A group that imports a command when it is used, so that a rank loads only what its command needs.

    ``modules`` maps the name of each command to the module of the ``package`` that defines it. The help of the group
    imports them all, and lists them by ``headings``.
    """

    def __init__(
        self,
        *args: Any,
        package: str,
        modules: Mapping[str, str],
        headings: Mapping[str, Sequence[str]] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.package, self.modules = package, modules
        self.headings = headings or {"Commands": sorted(modules)}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self.modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.modules:
            return None
        with StopFlag(), many_imports():
            # A signal is handled after the import: a half-imported program cannot end cleanly.
            return getattr(import_module(f"{self.package}.{self.modules[cmd_name]}"), cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, self.modules))
        for heading, names in self.headings.items():
            commands = [(f"{name:<{width}}", self.get_command(ctx, name)) for name in names]
            with formatter.section(heading):
                formatter.write_dl([(name, command.get_short_help_str(200)) for name, command in commands if command])


COMMANDS = {
    "Train and use models": ("train", "data", "checkpoint", "generate", "eval", "infer"),
    "Look at plans, models and runs": ("plan", "analyze", "inspect", "show", "monitor", "report"),
    "Write a model of your own": ("new", "verify"),
    "Run on a cluster": ("doctor", "launch", "migrate", "join", "calibrate", "bench"),
}
#: Under mpiexec, one rank does what they do.
ALONE = ("plan", "analyze", "inspect", "show", "monitor", "report", "new", "migrate")
#: They go on if their standard output is closed; output is all that the others are for.
LASTING = ("train", "launch", "join")
#: Errors of the system about what it is short of, and what to add to their text.
SHORTAGES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM), "; 'doctor' names limits"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "; raise 'ulimit -n'"),
}


@click.group(
    cls=LazyGroup,
    package=__name__,
    modules={name: name for names in COMMANDS.values() for name in names}
    | {"join": "migrate", "eval": "generate", "inspect": "show"},
    headings=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True},
)
@click.version_option(__version__, prog_name="spmd_engine")
@click.pass_context
def cli(context: click.Context) -> None:
    """Train and serve neural networks sharded over any number of ranks, in NumPy or CuPy and MPI.

    Every rank runs the same program. Start any number of ranks with mpiexec; without it there is one:

    \b
      mpiexec -n 8 python -m spmd_engine train                          data parallel on 8 ranks
      mpiexec -n 8 python -m spmd_engine train --mesh data=4,model=2    and tensor parallel in pairs
      mpiexec -n 8 python -m spmd_engine verify --mesh data=4,model=2   compared with one device
      python -m spmd_engine inspect --mesh data=4,model=2               what each rank holds
      python -m spmd_engine show schedule 1f1b --stages 4               a picture of a schedule
      python -m spmd_engine generate --run runs/gpt-nano-1 --prompt "def "

    On every mesh, the same seed gives the same results to rounding.
    """
    if context.invoked_subcommand in ALONE and launcher_rank() > 0:
        context.exit()


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line; a user's mistake gives one line from rank 0 and exit code 2 on every rank."""
    arguments = list(sys.argv[1:] if args is None else args)
    for stream in sys.stdout, sys.stderr:
        if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")  # a name of a file may have bytes that are no characters
    with lossy_output("stderr", *(["stdout"] if arguments[:1] and arguments[0] in LASTING else [])):
        _run(arguments)


def _run(arguments: list[str]) -> None:
    command = INSTALLED if os.path.basename(sys.argv[0]) == INSTALLED else "python -m spmd_engine"  # for usage lines
    try:
        # As in cli.main, which would print an empty line on every interrupted rank.
        with raise_interrupted(), cli.make_context(command, arguments) as context:
            cli.invoke(context)
    except (SystemExit, click.exceptions.Exit) as leave:
        if isinstance(leave.__context__, BrokenPipeError):  # rich ends the program so
            _end_without_reader()
        if where := _where_own_code_ended(leave):
            _fail(f"{where}: this code ended the program ({reason(leave)}) instead of returning")
        if isinstance(leave, SystemExit):
            raise
        if leave.exit_code:  # --help ends with 0
            sys.exit(leave.exit_code)
    except click.ClickException as error:  # raised before ranks communicate, equally on every rank
        if launcher_rank() == 0:
            is_unknown = isinstance(error, click.NoSuchOption)
            message = _no_such_option(error) if is_unknown else error.format_message()  # help, for a group alone
            click.echo(message if message.startswith("Usage:") else f"spmd_engine: {message}", err=True)
        let_rank_zero_speak()
        sys.exit(2)
    except UsageError as error:
        _fail(str(error))
    except MemoryError as error:
        why = str(error) or "an allocation failed; try a smaller batch, more micro-batches or more ranks"
        _fail(f"there is not enough memory for this: {why}; 'doctor' names limits of memory")
    except BrokenPipeError:
        _end_without_reader()
    except OSError as error:
        if error.filename is None and error.errno not in SHORTAGES:  # not about a file
            raise
        where = f"{error.filename}: " if error.filename is not None else ""
        _fail(f"{where}{error.strerror}{SHORTAGES.get(error.errno or 0, '')}")
    except KeyboardInterrupt as error:
        end_at_once(f"spmd_engine: {str(error) or 'interrupted'}", exit_code(error, arguments))


def _fail(message: str) -> NoReturn:
    from spmd_engine.comm.world import fail  # with NumPy, which 'new' and --help do without

    fail(f"spmd_engine: {message}")
    sys.exit(2)


def _no_such_option(error: click.NoSuchOption) -> str:
    assert error.ctx is not None  # click's parser passes its context
    flags = [flag for param in error.ctx.command.get_params(error.ctx) for flag in param.opts]
    near = similar_to(error.option_name, (flag for flag in flags if flag.startswith("--")))
    every = "--help-all" if "--help-all" in flags else "--help"
    hint = f"did you mean {near[0]}? " if near else ""
    return f"there is no option {error.option_name}; {hint}'{error.ctx.command_path} {every}' lists all options"


def _end_without_reader() -> NoReturn:
    """The reader of our output has closed it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(128 + signal.SIGPIPE)


def _where_own_code_ended(leave: BaseException) -> str:
    """Where a user's own code raised an exception that ends the program, as FILE:LINE; "" if this program raised it."""
    for frame, line in reversed(list(walk_tb(leave.__traceback__))):
        file = frame.f_code.co_filename
        if file.startswith(_PACKAGE):
            return ""
        is_library = file.startswith((_PYTHON, "<")) and "site-packages" not in file  # such as exit(), argparse
        if not is_library and not file.startswith(_CLICK):
            return f"{file}:{line}"
    return ""


_PACKAGE, _PYTHON, _CLICK = (os.path.dirname(str(module.__file__)) + os.sep for module in (spmd_engine, os, click))
