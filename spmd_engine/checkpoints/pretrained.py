"""Engines with pretrained weights or adapters."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from spmd_engine.arguments import checked
from spmd_engine.arrays.precision import accumulated_in
from spmd_engine.checkpoints.hf.weights import Filled, Pretrained, adapter_options, read_adapters
from spmd_engine.checkpoints.read import Sliceable
from spmd_engine.comm import Group, Mesh
from spmd_engine.comm.agreement.rank_zero import json_from_rank_zero, on_all_ranks, on_rank_zero
from spmd_engine.engine import LayeredEngine, ModelConfig, ParallelConfig, build_engine
from spmd_engine.errors import CheckpointError, UsageError
from spmd_engine.foreign import first_few
from spmd_engine.models.names import load_config, located, other_meaning


def with_shape(model: ModelConfig, group: Group) -> ModelConfig:
    """Return a model that is given by path with its absolute path and the shape that rank 0 reads from it.

    Adapters that are given by path get their options in the same way; any other model is returned unchanged.
    Collective. Raises CheckpointError if a path does not exist.
    """

    def read() -> dict[str, Any]:
        config = model
        if model.path is not None and model.shape is None:
            config = config.changed(name=str(located(model.name).absolute()), shape=load_config(model.name, warn=True))
        if model.adapter is not None and model.lora is None:
            folder = located(model.adapter, "adapter").absolute()
            config = config.changed(adapter=str(folder), lora=adapter_options(folder))
        return config.as_json()

    if model.path is None and model.adapter is None:
        return model
    content = json_from_rank_zero(group, read, CheckpointError)
    return ModelConfig.from_json(content, model.name).permitted_by(model)


def open_pretrained(
    model: ModelConfig,
    mesh: Mesh,
    composition: ParallelConfig = ParallelConfig(),  # noqa: B008 (immutable)
    *,
    device: str = "cpu",
    trained: bool = True,
) -> tuple[LayeredEngine, Pretrained]:
    """The engine, on this mesh, of a model that is given by path, with its weights, and their source. Collective.

    Unless ``trained``, it is for inference alone, and holds neither gradients nor masters.
    Raises UsageError for a built-in model of ``MODELS``: it has no weights, since they are drawn at random.
    """
    if model.path is None:
        other = other_meaning(model.name)
        hint = f"for those in {other} write {other}" if other else "give the path of a folder, or the run that has them"
        raise UsageError(f"{model.name} is a built-in model, which has no weights; {hint}")
    model = with_shape(model, mesh.group())
    engine = build_engine(model, mesh, composition, device=device, drawn=False, trained=trained)
    return engine, load_pretrained(engine, model.name, model.adapter)


@checked(engine="a LayeredEngine, before the path", path="that of a model's folder or file")
def load_pretrained(engine: LayeredEngine, path: str | Path, adapter: str | Path | None = None) -> Pretrained:
    """Load weights into an engine of their shape: each rank reads only its own slices. Collective.

    The engine's adapters are read from the folder ``adapter``, if it is given; otherwise they are drawn. Raises the
    same UsageError on all ranks if the weights are wrong on any rank.
    """

    def read() -> tuple[Pretrained, dict[str, Sliceable]]:
        pretrained = Pretrained(path)
        adapters = read_adapters(adapter, pretrained.shape) if adapter is not None else {}
        return pretrained, {name: adapter.array for name, adapter in adapters.items()}

    pretrained, adapters = on_all_ranks(engine.group(), read)
    if not {*engine.names} <= pretrained.keys() | adapters.keys():
        engine.initialize(frozen=False)
    on_all_ranks(engine.group(), lambda: engine.load_checkpoint(_weights(engine, pretrained, adapters)))
    on_rank_zero(engine.group(), pretrained.check_files)
    engine.after_update()
    return pretrained


def _weights(
    engine: LayeredEngine, weights: Mapping[str, Sliceable], adapters: Mapping[str, Sliceable]
) -> dict[str, Sliceable]:
    """Weights and adapters, and the engine's values of other names. A frozen tied head gets the embedding table."""

    def current(name: str) -> Sliceable:
        def read(spans: tuple[slice, ...]) -> np.ndarray:
            return engine.backend.to_host(engine.parameters[name]).copy()

        return Sliceable(engine.global_shape(name), accumulated_in(engine.dtype), read)

    arrays = {**weights, **adapters}
    if "head/table" in engine.buffer_names:
        arrays.setdefault("head/table", arrays["embedding/table"])
    return {name: arrays[name] if name in arrays else current(name) for name in (*engine.names, *engine.buffer_names)}


# --- A table of the tensor that each parameter was read from, with one line for the same parameter of all blocks


_NUMBER = re.compile(r"(?<=block)\d+|(?<=expert)\d+|(?<=\.)\d+(?=\.)")


def table(pretrained: Pretrained, shardings: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each parameter: its sharding, and the tensor that it is read from, with dtype and dims.

    The same parameter of several blocks or experts has one line, with ``*`` for the number, and a count.
    """
    counts: dict[tuple[str, ...], int] = {}
    for parameter in pretrained.filled.values():
        row = _row(parameter, shardings[parameter.name])
        counts[row] = counts.get(row, 0) + 1
    rows = [("parameter", "sharding", "", "tensor", "stored as")]
    rows += [(row[0], row[1], f"x {count}" if count > 1 else "", *row[2:]) for row, count in counts.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    size = f"{pretrained.nbytes / 1e6:,.1f} MB in {first_few(pretrained.files)}"
    yield f"{pretrained.path}: {len(pretrained)} parameters from {size}"
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _row(filled: Filled, sharding: str) -> tuple[str, ...]:
    at = "".join(f"[{letter}={number}]" for letter, (number, _) in filled.view.stored.at.items() if letter != "e")
    tensor, name = (_NUMBER.sub("*", full_name) for full_name in (filled.tensor.name, filled.name))
    return name, sharding, tensor + at, f"{filled.tensor.dtype} {filled.view.stored.dims} {list(filled.tensor.shape)}"
