"""Options that several pictures share."""

from __future__ import annotations

from pathlib import Path

import click

from spmd_engine.models.names import MODELS

mesh_option = click.option(
    "--mesh",
    metavar="AXIS=SIZE,...",
    required=True,
    help="The mesh, which need not exist, as in data=2,model=2: its last axis varies fastest.",
)
model_option = click.option(
    "--model",
    default="gpt-nano",
    show_default=True,
    help=f"One of {', '.join(MODELS)}, or a path.",
)
output_option = click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the picture to FILE.svg, or FILE.png (needs Pillow), instead of printing it.",
)
