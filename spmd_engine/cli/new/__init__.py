"""``new``: a folder to start a model of one's own from."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from shutil import rmtree

import click

from spmd_engine.errors import UsageError

TEMPLATES = ("model.py", "test_model.py", "job.sh", "README.md")
_NAMES = "surrogateescape"  # a name may have bytes that are no characters


@click.command(short_help="Write a folder to start a model of your own from.")
@click.argument("folder", metavar="NAME", type=click.Path(path_type=Path))
def new(folder: Path) -> None:
    """Write a folder with a model, its test, a job script for Slurm and a README with the commands to run them.

    \b
      python -m spmd_engine new mine
      cd mine && python -m pytest
      mpiexec -n 2 python -m spmd_engine train --model model.py:classifier --data samples.npz
    """
    texts = {name: files(__name__).joinpath(f"{name}.template").read_text() for name in TEMPLATES}
    try:
        folder.mkdir(parents=True)
        try:
            for name, text in texts.items():
                (folder / name).write_bytes(text.replace("{{NAME}}", folder.resolve().name).encode(errors=_NAMES))
        except BaseException:
            rmtree(folder, ignore_errors=True)
            raise
    except FileExistsError:
        raise UsageError(f"{folder} exists; give another name") from None
    except OSError as error:
        raise UsageError(f"{folder} cannot be made: {error.strerror}") from error
    click.echo(f"wrote {folder}: {', '.join(TEMPLATES)}")
