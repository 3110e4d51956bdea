"""Options that several commands share, and what they mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import numpy as np

from spmd_engine.arrays.backend import get_backend
from spmd_engine.comm.agreement import text_from_rank_zero
from spmd_engine.comm.mesh import Mesh, parse_axes
from spmd_engine.comm.world import world
from spmd_engine.engine.layered import LayeredEngine
from spmd_engine.errors import UsageError
from spmd_engine.models.names import build_model
from spmd_engine.sharding.layout import Layout

mesh_option = click.option(
    "--mesh",
    metavar="AXIS=SIZE,...",
    help="How ranks are arranged: 'data' cuts the batch, 'model' cuts heads, hidden width and vocabulary. "
    "[default: data=NUMBER OF RANKS]",
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


def build_engine(config: dict[str, Any], mesh: Mesh, *, device: str = "cpu") -> LayeredEngine:
    """The engine that a run's configuration describes, on this mesh."""
    model = build_model(config["model"], config.get("dropout", 0.0))
    layout = Layout.for_mesh(mesh, sequence_parallel=config.get("sequence_parallel", False))
    dtype = np.dtype(config.get("dtype", "float32"))
    backend = get_backend(device, mesh.local_rank)
    return LayeredEngine(model, mesh, layout, seed=config["seed"], dtype=dtype, backend=backend)


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


def run_folder(run: str | Path) -> Path:
    """The folder of a run: a path, or its name under ``runs/``."""
    return Path(run) if "/" in str(run) or Path(run, "config.json").exists() else Path("runs") / run
