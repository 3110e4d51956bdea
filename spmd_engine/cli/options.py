"""Options that several commands share, and what they mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import numpy as np

from spmd_engine.arrays.backend import get_backend
from spmd_engine.comm.agreement import on_rank_zero
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
    return LayeredEngine(model, mesh, layout, seed=config["seed"], dtype=dtype, backend=get_backend(device))


def read_config(run: str | Path) -> dict[str, Any]:
    """``config.json`` of a run, read on rank 0 and given to all. Collective over the world."""
    path = Path(run) / "config.json"

    def read() -> bytes:
        if not path.is_file():
            raise UsageError(f"{path}: no such run; --run wants the folder that 'train' wrote, as in runs/gpt-nano-1")
        text = path.read_bytes()
        try:
            json.loads(text)
        except ValueError as error:
            raise UsageError(f"{path} is damaged: {error}") from error
        return text

    with Mesh(world()) as mesh:
        text = on_rank_zero(mesh.group(), read)
        data = np.frombuffer(text, np.uint8) if text is not None else None
        return json.loads(mesh.broadcast(data, label="config").tobytes())
