"""The options that compose a strategy, which combinations make no sense, and the engine they describe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click
import numpy as np

from spmd_engine.arrays.backend import get_backend
from spmd_engine.comm.mesh import Mesh
from spmd_engine.engine import schedules
from spmd_engine.engine.compression import compression
from spmd_engine.engine.layered import LayeredEngine
from spmd_engine.engine.plan import Storage
from spmd_engine.engine.recompute import Recompute
from spmd_engine.engine.stages import parse_division
from spmd_engine.errors import UsageError
from spmd_engine.layers.names import CONTEXT_METHODS
from spmd_engine.models import layout_for
from spmd_engine.models.names import build_model
from spmd_engine.sharding.groups import CAP, THRESHOLD

_PIPELINES = [name for name in schedules.SCHEDULES if name != "sequential"]
_OPTIONS = [
    click.option(
        "--zero",
        type=click.IntRange(1, 3),
        help="Store in parts: 1 the optimizer's state, 2 gradients too, 3 parameters too. "
        "[default: 3 over an axis 'shard', else nothing]",
    ),
    click.option("--sequence-parallel", is_flag=True, help="Cut the sequence over 'model' between layers."),
    click.option(
        "--context-method", type=click.Choice(list(CONTEXT_METHODS)), help="How 'context' attends. [default: ring]"
    ),
    click.option(
        "--schedule", type=click.Choice(_PIPELINES), help="Order of micro-batches along 'pipe'. [default: 1f1b]"
    ),
    click.option("--chunks", type=click.IntRange(min=1), help="Of layers a stage, for interleaved. [default: 2]"),
    click.option("--stages", metavar="even|cost|N,N,...", help="Layers a stage; N: first of each. [default: even]"),
    click.option(
        "--recompute",
        type=click.Choice([each.value for each in Recompute]),
        default="none",
        show_default=True,
        help="In the backward, instead of keeping activations: every block, or attention.",
    ),
    click.option(
        "--compress",
        metavar="none|bfloat16|float16|top-k:FRACTION|powersgd:RANK",
        default="none",
        show_default=True,
        help="How gradients travel. The last two need whole gradients (no --zero); what they leave out of a step is "
        "not saved, so a resumed run differs a little from one that was not stopped.",
    ),
    click.option(
        "--group-threshold",
        metavar="BYTES",
        type=click.IntRange(min=0),
        default=THRESHOLD,
        show_default=True,
        help="Neighbouring parameters share a collective up to this size ...",
    ),
    click.option(
        "--group-cap",
        metavar="BYTES",
        type=click.IntRange(min=0),
        default=CAP,
        show_default=True,
        help="... and none that would make it larger than this.",
    ),
]
#: Names of these options: but for ``compress``, they say how something is computed, not what.
COMPOSITION = (
    "zero", "sequence_parallel", "context_method", "schedule", "chunks", "stages", "recompute", "compress",
    "group_threshold", "group_cap",
)  # fmt: skip


def composition_options(command: Callable) -> Callable:
    """All of the options above, for a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def check_composition(options: Mapping[str, Any], axes: Mapping[str, int]) -> None:
    """Raise UsageError for options that mean nothing on a mesh, with the nearest that do."""
    mesh = ",".join(f"{axis}={size}" for axis, size in axes.items())

    def refuse(what: str, why: str, nearest: str) -> None:
        raise UsageError(f"{what} with --mesh {mesh}: {why}. {nearest}")

    given = {name for name in COMPOSITION if options.get(name) is not None}
    if options.get("sequence_parallel") and "model" not in axes:
        refuse("--sequence-parallel", "it needs an axis 'model'", "To cut the sequence alone, add context=N")
    if "context_method" in given and "context" not in axes:
        refuse(f"--context-method {options['context_method']}", "it needs an axis 'context'", "Add context=N")
    for name in ("schedule", "chunks", "stages"):
        if name in given and axes.get("pipe", 1) == 1:
            refuse(f"--{name} {options[name]}", "it needs an axis 'pipe' of 2 or more", "Add pipe=N")
    if "chunks" in given and options.get("schedule") != "interleaved" and options["chunks"] > 1:
        refuse(f"--chunks {options['chunks']}", "several chunks a stage are interleaved", "Add --schedule interleaved")
    if "replicate" in axes and "shard" not in axes and not options.get("zero"):
        refuse("axis 'replicate'", "it says that state is in parts over another axis", "Name it data, or add shard=N")
    compress, zero = options.get("compress") or "none", Storage(options.get("zero")).stage(axes)
    if not compression(compress).in_parts and zero:
        refuse(f"--compress {compress}", "state in parts (ZeRO) needs parts of sums", "Choose float16 or bfloat16")
    if options.get("zero") and not {"data", "shard", "context"} & set(axes):
        refuse(
            f"--zero {options['zero']}", "there are no copies to store in parts", "Add an axis data, shard or context"
        )


def storage_of(config: Mapping[str, Any]) -> Storage:
    """How a configuration stores parameters, gradients and optimizer state."""
    return Storage(
        config.get("zero"),
        config.get("group_threshold", THRESHOLD),
        config.get("group_cap", CAP),
        config.get("compress", "none"),
    )


def build_engine(config: Mapping[str, Any], mesh: Mesh, *, device: str = "cpu") -> LayeredEngine:
    """The engine that a configuration describes, on this mesh. ``config`` may lack any of the composing options."""
    check_composition(config, mesh.axes)
    method = config.get("context_method") or "ring"
    model = build_model(config["model"], config.get("dropout", 0.0), method)
    layout = layout_for(
        model,
        mesh,
        sequence_parallel=bool(config.get("sequence_parallel")),
        balanced="context" in mesh.axes and method != "ulysses",  # whose ranks all have the whole sequence
    )
    schedule = None
    if mesh.axes.get("pipe", 1) > 1:
        schedule = schedules.named(config.get("schedule") or "1f1b", config.get("chunks"))
    return LayeredEngine(
        model,
        mesh,
        layout,
        seed=config["seed"],
        dtype=np.dtype(config.get("dtype", "float32")),
        backend=get_backend(device, mesh.local_rank),
        storage=storage_of(config),
        schedule=schedule,
        stages=parse_division(config.get("stages") or "even"),
        recompute=Recompute(config.get("recompute", "none")),
    )
