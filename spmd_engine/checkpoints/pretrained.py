"""Engines with pretrained weights or adapters."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from spmd_engine.checkpoints.hf.weights import Filled, Pretrained, adapter_options, read_adapters
from spmd_engine.checkpoints.read import Sliceable
from spmd_engine.comm.agreement.rank_zero import on_all_ranks, on_rank_zero, text_from_rank_zero
from spmd_engine.comm.group import Group
from spmd_engine.comm.mesh import Mesh
from spmd_engine.engine.layered import LayeredEngine
from spmd_engine.engine.parallel_config import ModelConfig, ParallelConfig, build_engine
from spmd_engine.errors import CheckpointError, UsageError
from spmd_engine.models.load_config import load_config, located
from spmd_engine.models.names import other_meaning


def with_shape(model: ModelConfig, group: Group) -> ModelConfig:
    """A model by path with the shape that rank 0 finds there, and the path from the root; any other as it is.

    Adapters by path get their options likewise. Collective. Raises CheckpointError for what is not there.
    """

    def read() -> str:
        found = model
        if model.path is not None and model.shape is None:
            found = found.changed(name=str(located(model.name).absolute()), shape=load_config(model.name, warn=True))
        if model.adapter is not None and model.lora is None:
            folder = located(model.adapter, "adapter").absolute()
            found = found.changed(adapter=str(folder), lora=adapter_options(folder))
        return json.dumps(found.as_json())

    if model.path is None and model.adapter is None:
        return model
    return ModelConfig.from_json(json.loads(text_from_rank_zero(group, read, CheckpointError)), model.name)


def open_pretrained(
    model: ModelConfig,
    mesh: Mesh,
    composition: ParallelConfig = ParallelConfig(),  # noqa: B008 (immutable)
    *,
    device: str = "cpu",
) -> tuple[LayeredEngine, Pretrained]:
    """The engine of a model by path with its weights, on this mesh, and where each came from. Collective.

    Raises UsageError for a model that has none: one of ``MODELS``, which are drawn.
    """
    if model.path is None:
        other = other_meaning(model.name)
        hint = f"for those in {other} write {other}" if other else "give the path of a folder, or the run that has them"
        raise UsageError(f"{model.name} is a built-in model, which has no weights; {hint}")
    model = with_shape(model, mesh.group())
    engine = build_engine(model, mesh, composition, device=device, drawn=False)
    return engine, load_pretrained(engine, model.name, model.adapter)


def load_pretrained(engine: LayeredEngine, path: str | Path, adapter: str | Path | None = None) -> Pretrained:
    """Load weights into an engine of their shape: each rank reads only its own slices. Collective.

    Adapters that the engine has are those of the folder ``adapter``, if one is given, and else are drawn. Raises
    UsageError, the same on all ranks, for whatever is wrong with the weights on any of them.
    """

    def read() -> tuple[Pretrained, dict[str, Sliceable]]:
        pretrained = Pretrained(path)
        adapters = read_adapters(adapter, pretrained.shape) if adapter is not None else {}
        return pretrained, {name: each.array for name, each in adapters.items()}

    found, adapters = on_all_ranks(engine.group(), read)
    if not {*engine.names} <= found.keys() | adapters.keys():
        engine.initialize(frozen=False)
    on_all_ranks(engine.group(), lambda: engine.load_checkpoint(_weights(engine, found, adapters)))
    on_rank_zero(engine.group(), found.check_copies)
    engine.after_update()
    return found


def _weights(
    engine: LayeredEngine, weights: Mapping[str, Sliceable], adapters: Mapping[str, Sliceable]
) -> dict[str, Sliceable]:
    """Weights and adapters; what neither has is as the engine has it. A frozen head has the table it is tied to."""

    def here(name: str) -> Sliceable:
        def read(spans: tuple[slice, ...]) -> np.ndarray:
            return engine.backend.to_host(engine.parameters[name]).copy()

        return Sliceable(engine.global_shape(name), engine.dtype, read)

    arrays = {**weights, **adapters}
    if "head/table" in engine.buffer_names:
        arrays.setdefault("head/table", arrays["embedding/table"])
    return {name: arrays[name] if name in arrays else here(name) for name in (*engine.names, *engine.buffer_names)}


# --- What went where when weights were loaded, as a table: a line for what all blocks have


_NUMBER = re.compile(r"(?<=block)\d+|(?<=expert)\d+|(?<=\.)\d+(?=\.)")


def table(pretrained: Pretrained, shardings: Mapping[str, str]) -> Iterator[str]:
    """Lines: each parameter with its sharding, and the tensor, its dtype and dims, that it is read from.

    Parameters of several blocks or experts share a line, with ``*`` for the numbers and how many they are.
    """
    alike: dict[tuple[str, ...], int] = {}
    for each in pretrained.filled.values():
        row = _row(each, shardings[each.name])
        alike[row] = alike.get(row, 0) + 1
    rows = [("parameter", "sharding", "", "tensor", "stored as")]
    rows += [(row[0], row[1], f"x {count}" if count > 1 else "", *row[2:]) for row, count in alike.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    yield f"{pretrained.path}: {len(pretrained)} parameters from {pretrained.nbytes / 1e6:,.1f} MB"
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _row(filled: Filled, sharding: str) -> tuple[str, ...]:
    at = "".join(f"[{letter}={number}]" for letter, (number, _) in filled.view.stored.at.items() if letter != "e")
    tensor, name = (_NUMBER.sub("*", each) for each in (filled.tensor.name, filled.name))
    return name, sharding, tensor + at, f"{filled.tensor.dtype} {filled.view.stored.dims} {list(filled.tensor.shape)}"
