"""Options that several commands share, and what they mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import numpy as np

from spmd_engine.comm.agreement import text_from_rank_zero
from spmd_engine.comm.mesh import Mesh, parse_axes
from spmd_engine.comm.world import world
from spmd_engine.errors import UsageError

mesh_option = click.option(
    "--mesh",
    metavar="AXIS=SIZE,...",
    help="How ranks are arranged: 'data', 'replicate' and 'shard' cut the batch, 'model' heads, hidden width and "
    "vocabulary, 'context' the sequence, 'pipe' the layers. [default: data=NUMBER OF RANKS]",
)
device_option = click.option("--device", default="cpu", show_default=True, help="cpu (NumPy) or cuda (CuPy).")
check_option = click.option(
    "--check/--no-check",
    default=True,
    show_default=True,
    help="Compare what ranks call in every collective, so that a mismatch is an error and not a hang.",
)


def open_mesh(text: str | None, *, check: bool = True) -> Mesh:
    """The mesh that ``--mesh`` describes, over all ranks there are."""
    return Mesh(check=check, **(parse_axes(text) if text else {}))


def read_config(run: str | Path) -> dict[str, Any]:
    """``config.json`` of a run, read on rank 0 and given to all. Collective over the world."""
    path = run_folder(run) / "config.json"

    def read() -> str:
        if not path.is_file():
            raise UsageError(f"{path}: no such run; --run wants the folder that 'train' wrote, as in runs/gpt-nano-1")
        try:
            config = json.loads(path.read_text())
            missing = {"model", "seed", "dtype"} - set(config)
            np.dtype(config.get("dtype"))
        except (ValueError, TypeError) as error:
            raise UsageError(f"{path} is damaged: {error}") from error
        if missing:
            raise UsageError(f"{path} does not say: {', '.join(sorted(missing))}")
        return json.dumps(config)

    with Mesh(world()) as mesh:
        return json.loads(text_from_rank_zero(mesh.group(), read))


def what_it_computes(config: dict[str, Any]) -> dict[str, Any]:
    """A run's configuration without how it was computed: to be served on another mesh.

    Raises UsageError for a run of a page of ``strategies/``, which has no model to be built anew.
    """
    if config.get("strategy"):
        raise UsageError(f"this is a run of --strategy {config['strategy']}: only 'train --resume' goes on from those")
    return {k: config[k] for k in ("model", "seed", "dtype")}


def run_folder(run: str | Path) -> Path:
    """The folder of a run: a path, or its name under ``runs/``."""
    return Path(run) if "/" in str(run) or Path(run, "config.json").exists() else Path("runs") / run
