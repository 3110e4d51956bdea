"""Options that several pictures share."""

from __future__ import annotations

from pathlib import Path

import click

from spmd_engine.engine.optimizers import OPTIMIZERS

mesh_option = click.option(
    "--mesh",
    metavar="AXIS=SIZE,...",
    required=True,
    help="The mesh, which need not exist, as in data=2,model=2: its last axis varies fastest.",
)
output_option = click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the picture to FILE.svg, or FILE.png (needs Pillow), instead of printing it.",
)
dtype_option = click.option("--dtype", type=click.Choice(["float32", "float64"]), default="float32", show_default=True)
optimizer_option = click.option("--optimizer", type=click.Choice(list(OPTIMIZERS)), default="adamw", show_default=True)
