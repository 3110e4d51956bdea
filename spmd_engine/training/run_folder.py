"""The folder of a run, and the job that it holds."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from spmd_engine.arguments import checked
from spmd_engine.checkpoints import CheckpointFolder
from spmd_engine.comm import Mesh, world
from spmd_engine.comm.agreement.rank_zero import json_from_rank_zero
from spmd_engine.errors import UsageError
from spmd_engine.foreign import parse_json, read_bytes
from spmd_engine.training.run import CONFIG
from spmd_engine.training.train_config import TrainConfig


@checked(run="the folder of a run, or its name under runs/")
def run_folder(run: str | Path) -> Path:
    """The folder of a run: a path, or its name under ``runs/``. Raises UsageError for a name that is none."""
    is_none = not str(run) or any(character < " " for character in str(run))
    is_path = "/" in str(run) or not is_none and os.path.exists(Path(run, CONFIG)) and not is_model(Path(run))
    if is_none or not is_path and str(run) in (".", ".."):
        raise UsageError(f"{str(run)!r} is no name of a run; give one, as in gpt-nano-1, or its folder")
    return Path(run) if is_path else Path("runs") / run


def is_model(folder: Path) -> bool:
    """Whether a folder holds a model in Hugging Face's format, whose configuration file is named as a run's."""
    try:
        content = parse_json(read_bytes(folder / CONFIG))
    except (OSError, UsageError, ValueError, RecursionError):
        return False
    return isinstance(content, Mapping) and "model_type" in content


def read_run(run: str | Path) -> TrainConfig:
    """The job of a run, by its ``config.json``. Collective over the world."""
    path = run_folder(run) / CONFIG

    def read() -> tuple[TrainConfig, str]:
        newest = CheckpointFolder(path.parent).newest()
        if os.path.exists(path) and not os.path.isfile(path):
            raise UsageError(f"{path} is no file: move it away; the job is then read from the newest checkpoint")
        if not os.path.isfile(path):
            if newest is None:
                raise UsageError(
                    f"{path}: no such run; --run wants the folder that 'train' wrote, as in runs/gpt-nano-1"
                )
            from spmd_engine.checkpoints.read import read_manifest

            if (config := read_manifest(newest).config) is not None:
                return TrainConfig.from_json(config, f"{newest}"), str(newest)
        try:
            return TrainConfig.read(path), str(path)
        except UsageError as error:
            if newest is None:
                raise
            raise UsageError(f"{error}. Move it away, and the job is taken from {newest}") from error

    return _read_on_rank_zero(read)


def read_job(path: str | Path) -> TrainConfig:
    """The job of a JSON file, read on rank 0. Collective over the world."""
    return _read_on_rank_zero(lambda: (TrainConfig.read(path), str(path)))


def _read_on_rank_zero(read: Callable[[], tuple[TrainConfig, str]]) -> TrainConfig:
    """The job that ``read`` returns on rank 0, with the name of its file."""

    def content() -> tuple[dict[str, Any], str]:
        job, file = read()
        return job.as_json(), file

    with Mesh(world()) as mesh:
        return TrainConfig.from_json(*json_from_rank_zero(mesh.group(), content))
