"""Memory of systems that are not this one: what they save of a block, in which dtypes, is a file of data.

The file is read into a model whose layers keep just what it lists; the engine's own schedules, layouts and stages run
it on shapes, as ``analyze`` does any model. So how many micro-batches are in flight, and what an axis cuts, is found
and not said.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from spmd_engine.arrays.meter import meter
from spmd_engine.arrays.shaped import ShapedArray
from spmd_engine.engine.composition import Composition
from spmd_engine.errors import UsageError
from spmd_engine.layers import Parameter
from spmd_engine.layers.layer import Layer
from spmd_engine.models import Model
from spmd_engine.planning.analyze import analyze
from spmd_engine.planning.step_analysis import RankStep

_DTYPES = {1: np.uint8, 2: np.float16, 4: np.float32, 8: np.float64}
RECOMPUTED = ("none", "selective", "full")


@dataclass(frozen=True)
class Saved:
    """A tensor that a block keeps for its backward."""

    what: str
    dims: str  #: letters, as in "b s d"
    bytes: int  #: an element
    where: str  #: "inside" the block, or on the "residual" stream
    kept_by: tuple[str, ...]  #: kinds of recomputation under which it is kept: of none, selective, full
    times: int = 1  #: how many of them there are


@dataclass(frozen=True)
class System:
    """What another system keeps."""

    name: str
    state: Mapping[str, float]  #: bytes a parameter, by kind
    matrices: Mapping[str, str]  #: of a block: dims by name
    saved: tuple[Saved, ...]


@dataclass(frozen=True)
class Transformer:
    """Sizes of the model that it trains."""

    layers: int
    width: int
    heads: int
    sequence: int

    @property
    def sizes(self) -> dict[str, int]:
        width, heads = self.width, self.heads
        return {"d": width, "h": heads, "k": width // heads, "f": 4 * width, "t": self.sequence}


@dataclass(frozen=True)
class SystemMemory:
    """Of the ranks of one stage."""

    state: int  #: bytes of parameters, gradients and optimizer state
    activations: int  #: bytes kept for backwards, of all micro-batches in flight, at the most


def read_system(name: str | Path) -> System:
    """A system by the name of a file that comes with the package ("megatron"), or by the path of another.

    Raises UsageError, in one line, for a file that cannot be read, or with fields that are unknown or missing.
    """
    path = resources.files("spmd_engine.planning") / "systems" / f"{name}.toml"
    path = path if path.is_file() else Path(name)
    try:
        content = tomllib.loads(path.read_text())
        system = System(**content | {"saved": tuple(_saved(each, name) for each in content["saved"])})
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{name}: no description of a system: {error}") from error
    return system


def _saved(content: Mapping[str, Any], name: str | Path) -> Saved:
    try:
        return Saved(**content | {"kept_by": tuple(content["kept_by"])})
    except (KeyError, TypeError) as error:
        raise UsageError(f"{name}: a tensor that is saved has wrong fields: {error}") from error


def memory_of(
    system: System,
    transformer: Transformer,
    axes: Mapping[str, int],
    *,
    micro_batch: int,
    micro_batches: int,
    recompute: str = "none",
    sequence_parallel: bool = False,
    chunks: int = 1,
) -> list[SystemMemory]:
    """What each stage's ranks hold, on a mesh with axes among data, pipe and model, under 1F1B, interleaved if there
    are several ``chunks`` a stage.

    Raises UsageError for a recomputation that is not one of ``RECOMPUTED``.
    """
    if recompute not in RECOMPUTED:
        raise UsageError(f"recompute {recompute!r}: choose one of {', '.join(RECOMPUTED)}")
    block = _Block(system, transformer, recompute)
    layers = tuple((f"block{number}", block) for number in range(transformer.layers))
    model = Model(system.name, layers, "b s", "b s", "b s", _no_loss, context=transformer.sequence)
    composition = Composition(
        sequence_parallel=sequence_parallel,
        schedule="interleaved" if chunks > 1 else None,
        chunks=chunks if chunks > 1 else None,
    )
    analysis = analyze(
        model,
        axes,
        composition,
        batch_size=micro_batch * micro_batches * axes.get("data", 1),
        micro_batches=micro_batches,
    )
    each = sum(system.state.values())
    return [SystemMemory(round(each * _parameters(kind.step)), _kept(kind.step)) for kind in analysis.classes]


def _parameters(step: RankStep) -> int:
    """Elements of the parameters of a rank."""
    return sum(shard.bytes // np.dtype(shard.dtype).itemsize for shard in step.shards)


def _kept(step: RankStep) -> int:
    """Bytes of activations at the most; those of the batch itself are none that a block keeps."""
    kept = [moment.bytes_by_kind.get("activations", 0) for moment in step.timeline]
    return max(kept, default=0) - step.before.get("activations", 0)


class _Block(Layer):
    """Keeps what a system keeps, and computes nothing."""

    may_cut, across = "bshf", "h"

    def __init__(self, system: System, transformer: Transformer, recompute: str) -> None:
        self.sizes = transformer.sizes
        self.parameters = {name: Parameter(dims) for name, dims in system.matrices.items()}
        self.saved = [each for each in system.saved if recompute in each.kept_by]
        self.sequence = transformer.sequence

    def forward(self, sh, p, x, ctx):
        kept = [self._new(sh, each, len(x)) for each in self.saved for _ in range(each.times)]
        meter().elementwise(1, 0, 0)
        return x, kept

    def _new(self, sh, saved: Saved, samples: int) -> ShapedArray:
        whole = {**self.sizes, "s": self.sequence}
        parts = (sh.span(letter, whole[letter], saved.where) for letter in saved.dims.split()[1:])
        return ShapedArray.new((samples, *(part.stop - part.start for part in parts)), _DTYPES[saved.bytes])

    def backward_input(self, sh, p, saved, dy):
        meter().elementwise(1, 0, 0)
        return dy, None


def _no_loss(sh, outputs, targets, **options):
    return 0.0, outputs
