"""Memory of other systems, from a file that lists the tensors they save of a block, with their dtypes.

The file becomes a model whose layers keep only the listed tensors. The engine's schedules, layouts and stages run it on
shapes, like any model in ``analyze``. So the number of micro-batches in flight and the effect of each axis are results,
not inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from other_systems.description import RECOMPUTED, SavedTensor, System, Transformer
from spmd_engine.arrays.meta.array import ShapedArray
from spmd_engine.arrays.meta.meter import meter
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.errors import UsageError
from spmd_engine.layers import Parameter
from spmd_engine.layers.layer import Layer
from spmd_engine.models import Model
from spmd_engine.planning.dry_run.analyze import analyze
from spmd_engine.planning.dry_run.step_analysis import Phases, RankStep

_DTYPES = {1: np.uint8, 2: np.float16, 4: np.float32, 8: np.float64}
#: The ZeRO stage from which each kind of state is sharded.
CUT_FROM = {"parameters": 3, "gradients": 2, "optimizer state": 1}


@dataclass(frozen=True)
class SystemMemory:
    """Memory of the ranks of one stage."""

    state: int  #: bytes of parameters, gradients and optimizer state
    activations: int  #: peak bytes kept for backwards, of all micro-batches in flight
    with_repeated: int  #: the same, with the temporary activations of a recomputed block
    gathered: int = 0  #: bytes of parameters and gradients that ZeRO unshards temporarily

    @property
    def peak(self) -> int:
        """Peak bytes of all together."""
        return self.state + self.with_repeated + self.gathered


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
    zero: int = 0,
) -> list[SystemMemory]:
    """Memory of each stage's ranks, on a mesh with axes among data, pipe and model, under 1F1B, interleaved if stages
    have several ``chunks``. ``zero`` is the ZeRO stage over data.

    Raises UsageError if ``recompute`` is not one of ``RECOMPUTED``.
    """
    if recompute not in RECOMPUTED:
        raise UsageError(f"recompute {recompute!r}: choose one of {', '.join(RECOMPUTED)}")
    block = _LayerPart(
        system.matrices, [tensor for tensor in system.saved if tensor.of == "block"], transformer, recompute
    )
    layers = [(f"block{number}", block) for number in range(transformer.layers)]
    stages = None
    if system.first:
        layers.insert(0, ("first", _LayerPart(system.first, [], transformer, recompute)))
    if system.last:
        saved = [tensor for tensor in system.saved if tensor.of == "last"]
        layers.append(("last", _LayerPart(system.last, saved, transformer, recompute)))
    count = axes.get("pipe", 1) * chunks
    if len(layers) > transformer.layers and transformer.layers % count == 0:  # equally many blocks on every stage
        blocks_per_stage = transformer.layers // count
        stages = ",".join(str(number * blocks_per_stage + bool(number and system.first)) for number in range(count))
    model = Model(system.name, tuple(layers), "b s", "b s", "b s", _no_loss, context=transformer.sequence)
    composition = ParallelConfig(
        sequence_parallel=sequence_parallel,
        schedule="interleaved" if chunks > 1 else None,
        chunks=chunks if chunks > 1 else None,
        stages=stages if count > 1 else None,
    )
    analysis = analyze(
        model,
        axes,
        composition,
        batch_size=micro_batch * micro_batches * axes.get("data", 1),
        micro_batches=micro_batches,
    )
    data = axes.get("data", 1)
    state = sum(size / (data if zero >= CUT_FROM.get(name, 4) else 1) for name, size in system.state.items())
    unsharded = _unsharded_bytes(system, zero) if data > 1 else 0.0
    memories = []
    for kind in analysis.classes:
        activations, most = _activations(kind.step)
        gathered = _largest_block(kind.step) * unsharded
        memories.append(SystemMemory(round(state * _parameters(kind.step)), activations, most, round(gathered)))
    return memories


def _unsharded_bytes(system: System, zero: int) -> float:
    """Bytes per parameter of an unsharded block: the block, the prefetched next one, and its gradient."""
    parameters = 2 * system.state.get("parameters", 0) if zero >= 3 else 0
    return parameters + (system.state.get("gradients", 0) if zero >= 2 else 0)


def _parameters(step: RankStep) -> int:
    """Elements of a rank's parameters."""
    return sum(shard.bytes // np.dtype(shard.dtype).itemsize for shard in step.shards)


def _largest_block(step: RankStep) -> int:
    """Elements of the parameters of a rank's largest layer."""
    sizes: dict[str, int] = {}
    for shard in step.shards:
        layer = shard.name.partition("/")[0]
        sizes[layer] = sizes.get(layer, 0) + shard.bytes // np.dtype(shard.dtype).itemsize
    return max(sizes.values(), default=0)


def _activations(step: RankStep) -> tuple[int, int]:
    """Peak bytes of activations, without and with temporaries; the batch itself does not count."""
    batch = step.before.get("activations", 0)
    ours = (Phases.NORM, Phases.UPDATE)  # this engine's optimizer has temporaries of its own
    moments = [m.bytes_by_kind for m in step.timeline if step.computations[m.computation].phase not in ours]
    activations = [held.get("activations", 0) for held in moments]
    with_temporaries = [held.get("activations", 0) + held.get("temporaries", 0) for held in moments]
    return max(activations, default=batch) - batch, max(with_temporaries, default=batch) - batch


class _LayerPart(Layer):
    """A layer that saves the tensors of a system and computes nothing."""

    costs_only = True
    may_cut, across = "bshrfv", "h"

    def __init__(
        self, matrices: Mapping[str, str], saved: Sequence[SavedTensor], transformer: Transformer, recompute: str
    ) -> None:
        letters = {
            letter for dims in (*matrices.values(), *(tensor.dims for tensor in saved)) for letter in dims.split()
        }
        self.sizes = {letter: size for letter, size in transformer.sizes.items() if letter in letters | {"h"}}
        self.parameters = {name: Parameter(dims) for name, dims in matrices.items()}
        self.saved = [tensor for tensor in saved if recompute in tensor.kept_by]
        self.repeated = [tensor for tensor in saved if recompute not in tensor.kept_by and "none" in tensor.kept_by]
        self.sequence = transformer.sequence

    def forward(self, sh, p, x, ctx):
        saved = [self._new(sh, tensor, len(x)) for tensor in self.saved for _ in range(tensor.times)]
        meter().elementwise(1, 0, 0)
        return x, saved

    def _new(self, sh, saved: SavedTensor, samples: int) -> ShapedArray:
        sizes = {**self.sizes, "s": self.sequence}
        parts = (sh.span(letter, sizes[letter], saved.where) for letter in saved.dims.split()[1:])
        return ShapedArray.new((samples, *(part.stop - part.start for part in parts)), _DTYPES[saved.bytes])

    def backward_input(self, sh, p, saved, dy):
        recomputed = [self._new(sh, tensor, len(dy)) for tensor in self.repeated for _ in range(tensor.times)]
        meter().elementwise(1, 0, 0)
        del recomputed  # allocated during the backward of the block
        return dy, None


def _no_loss(sh, outputs, targets, **options):
    return 0.0, outputs
