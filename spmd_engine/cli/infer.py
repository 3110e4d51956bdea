"""``infer``: outputs for inputs, arrays from file to file."""

from __future__ import annotations

from pathlib import Path

import click
import numpy as np

from spmd_engine.cli.engine_by_name import engine_by_name
from spmd_engine.cli.options import (
    check_option,
    device_option,
    mesh_option,
    open_mesh,
    read_config,
    run_folder,
    what_it_computes,
)
from spmd_engine.comm.agreement import on_rank_zero
from spmd_engine.comm.mesh import Mesh
from spmd_engine.engine.base import ShardedEngine
from spmd_engine.engine.composition import build_engine
from spmd_engine.errors import UsageError
from spmd_engine.training.checkpoint import Checkpoint, load_checkpoint


@click.command(short_help="Run a model on an array.")
@click.option("--input", "source", metavar="X.npy", required=True, help="Whole inputs; the first dim is the batch.")
@click.option("--output", "target", metavar="Y.npy", required=True, help="Where whole outputs go.")
@click.option("--run", metavar="DIR", help="Folder that 'train' wrote; inputs are tokens[b s].")
@click.option("--engine", metavar="MODULE:NAME", help="Or your own engine, MODULE as in import: a class or function.")
@click.option("--checkpoint", metavar="FILE", help="Its parameters, a safetensors file.")
@click.option("--batch-size", type=click.IntRange(min=1), help="Inputs at a time. [default: all]")
@mesh_option
@device_option
@check_option
def infer(source, target, run, engine, checkpoint, batch_size, mesh, device, check) -> None:
    """Read an array on rank 0, run the model on all ranks, write the outputs from rank 0.

    A run's inputs are tokens[b s], bytes or 256 for the end of a file, and its outputs logits[b s v]. An engine of
    your own is made without arguments; its load_checkpoint is called with --checkpoint alone.
    """
    if bool(run) == bool(engine):
        raise UsageError("infer needs a model: either --run DIR or --engine MODULE:NAME")
    if run and checkpoint:
        raise UsageError("--checkpoint goes with --engine; a run has its own")
    config = read_config(run) if run else None
    with open_mesh(mesh, check=check) as opened:
        inputs = on_rank_zero(opened.group(), lambda: _read(source, target))
        if run:
            model: ShardedEngine = build_engine(what_it_computes(config), opened, device=device)
            load_checkpoint(run_folder(run), model)
        else:
            model = _own_engine(engine, opened)
            if checkpoint:
                model.load_checkpoint(Checkpoint(checkpoint))
        outputs = _Outputs()
        model.inference_loop(_pieces(inputs, batch_size) if inputs is not None else None, outputs)
        on_rank_zero(opened.group(), lambda: outputs.save(target))


class _Outputs:
    """Something with ``write``: keeps what it is given, to be saved as one array."""

    def __init__(self) -> None:
        self.arrays: list[np.ndarray] = []

    def write(self, array: np.ndarray) -> None:
        self.arrays.append(array)

    def save(self, target: str) -> None:
        with Path(target).open("wb") as file:  # np.save would add .npy to another ending
            np.save(file, np.concatenate(self.arrays))


def _read(source: str, target: str) -> np.ndarray:
    if not Path(target).resolve().parent.is_dir():
        raise UsageError(f"--output {target}: there is no such folder")
    if not Path(source).is_file():
        raise UsageError(f"--input {source}: no such file")
    try:
        inputs = np.load(source, mmap_mode="r")
    except (ValueError, EOFError, OSError) as error:
        raise UsageError(f"--input {source} is not an .npy array: {error}") from error
    if not isinstance(inputs, np.ndarray) or inputs.dtype.kind not in "biufc":
        raise UsageError(f"--input {source} must be one .npy array of numbers")
    if not inputs.ndim or not len(inputs):
        raise UsageError(f"--input {source}: shape {inputs.shape}; the first dim is the batch, and must not be empty")
    return inputs


def _pieces(inputs: np.ndarray, size: int | None):
    step = size or len(inputs)
    return (inputs[start : start + step] for start in range(0, len(inputs), step))


def _own_engine(name: str, mesh: Mesh) -> ShardedEngine:
    made = engine_by_name(name, "--engine")()
    if not isinstance(made, ShardedEngine):
        raise UsageError(f"--engine {name} made a {type(made).__name__}; it must make a ShardedEngine")
    if "_mesh" not in made.__dict__:
        made.mesh = mesh
    return made
