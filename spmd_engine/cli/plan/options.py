"""Options of ``plan``, and the Request that they describe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import click
import numpy as np
from click.core import ParameterSource

from spmd_engine.axes import parse_axes
from spmd_engine.cli.adapters import lora_of
from spmd_engine.cli.composition import COMPOSITION
from spmd_engine.cli.options import MODEL, with_options
from spmd_engine.engine.parallel_config import PIPELINES, RECOMPUTE, ParallelConfig
from spmd_engine.engine.pipeline.stages import parse_division
from spmd_engine.errors import UsageError
from spmd_engine.layers.attention.methods import CONTEXT_METHODS
from spmd_engine.models.names import IMAGES
from spmd_engine.planning.machine.files import default_machine
from spmd_engine.planning.report.model_file import planned_model
from spmd_engine.planning.report.plan_result import Request
from spmd_engine.planning.search.goals import Limits
from spmd_engine.training.train_config import OF_IMAGES, DataConfig
from spmd_engine.units import bytes_of

_SOURCE = [
    click.option("--model", **MODEL | {"help": "As train's; or a TOML file with a GPT's layers, width, heads and "
                                               "context, or a config.json."}),
    click.option("--machine", metavar="NAME|FILE", help="a100, h100, h200, edge, cpu, or a file as 'calibrate' writes. "
                 "[default: what calibrate wrote here, else cpu]"),
    click.option("--ranks", type=int, help="Number of ranks. [default: those of --mesh, or the machine's cores]"),
    click.option("--batch-size", metavar="N[,N...]", help="Samples per step over all ranks; the best of several. "
                 "[default: as train's]"),
    click.option("--sequence", type=int, help="Tokens per sample. [default: the model's context]"),
    click.option("--dtype", type=click.Choice(["float32", "float64"]), default="float32", show_default=True),
    click.option("--optimizer", type=click.Choice(["adamw", "sgd"]), default="adamw", show_default=True),
]  # fmt: skip
_FIXED = [
    click.option("--mesh", metavar="AXIS=SIZE,...", help="Evaluate this composition; other options default to those of "
                 "train."),
    click.option("--micro-batches", type=int, help="Fix it."),
    click.option("--zero", type=click.IntRange(0, 3), help="Fix it."),
    click.option("--sequence-parallel/--no-sequence-parallel", default=None, help="Fix it."),
    click.option("--context-method", type=click.Choice(list(CONTEXT_METHODS)), help="With --mesh."),
    click.option("--experts-over", metavar="AXIS,...", help="With --mesh."),
    click.option("--recut-after", type=int, metavar="BLOCKS", help="With --mesh."),
    click.option("--schedule", type=click.Choice(PIPELINES), help="Fix it."),
    click.option("--chunks", type=int, help="Fix it."),
    click.option("--stages", metavar="even|cost|N,N,...", help="Fix it."),
    click.option("--recompute", type=click.Choice(RECOMPUTE), help="Fix it."),
    click.option("--compress", default="none", show_default=True, help="Compression of gradients."),
    click.option("--group-threshold", type=int, help="Bytes up to which neighbouring parameters share a group."),
    click.option("--group-cap", type=int, help="Most bytes of a parameter group."),
    click.option("--shares", metavar="AXIS=N:N...,...", help="Shares of samples by rank. With --mesh."),
    click.option("--state-shares", metavar="AXIS=N:N...,...", help="Shares of ZeRO state by rank. With --mesh."),
    click.option("--min-tensor-size", metavar="BYTES", type=int, help="ZeRO does not shard smaller parameters."),
    click.option("--axes", metavar="AXIS,...", help="Mesh axes to consider. [default: all that can shard the model]"),
]  # fmt: skip


#: Options of a composition that are not searched.
_BASE = (
    "compress", "group_threshold", "group_cap", "context_method", "experts_over", "recut_after", "shares",
    "state_shares", "min_tensor_size",
)  # fmt: skip


def source_options(command: Callable) -> Callable:
    """Add the options for the model, the machine and the batch."""
    return with_options(_SOURCE, command)


def fixed_options(command: Callable) -> Callable:
    """Add the options that fix choices of the search."""
    return with_options(_FIXED, command)


def request_of(context: click.Context) -> Request:
    """The Request of a command line; raises UsageError for options that contradict each other."""
    options = context.params
    given = {name for name in options if context.get_parameter_source(name) is not ParameterSource.DEFAULT}
    machine = default_machine(options["machine"])
    axes = parse_axes(options["mesh"]) if options["mesh"] else None
    ranks = _ranks(options, axes, machine)
    fixed = _fixed(options, given, axes)
    base = ParallelConfig(
        **{name: options[name] for name in _BASE if options[name] is not None and name in COMPOSITION}
    )
    model = planned_model(options["model"], lora_of(options), base)
    limits = Limits(
        memory=bytes_of(options["memory"], "--memory") if options["memory"] else None,
        latency=options["latency"],
        bandwidth=bytes_of(options["bandwidth"], "--bandwidth") if options["bandwidth"] else None,
        compute=options["compute"],
    )
    if options["sequence"] is not None and options["sequence"] < 1:
        raise UsageError(f"--sequence {options['sequence']}: it must be at least 1")
    return Request(
        model,
        machine,
        [n for n in range(1, ranks + 1) if ranks % n == 0] if options["fewer"] else [ranks],
        _batch_sizes(options),
        options["goal"],
        limits,
        fixed,
        axes=_axes(options["axes"]),
        sequence=options["sequence"],
        dtype=np.dtype(options["dtype"]),
        optimizer=options["optimizer"],
        base=base,
        seconds=options["seconds"],
    )


def _axes(text: str | None) -> list[str] | None:
    return [axis.strip() for axis in text.split(",") if axis.strip()] if text else None


def _ranks(options: Mapping[str, Any], axes: Mapping[str, int] | None, machine) -> int:
    ranks = options["ranks"]
    if axes is not None:
        if ranks is not None and prod(axes.values()) != ranks:
            raise UsageError(f"--mesh {options['mesh']} has {prod(axes.values())} ranks, and --ranks is {ranks}")
        ranks = prod(axes.values())
    if ranks is None:
        ranks = round(machine.nodes[0].cores or machine.nodes[0].ranks)
    if ranks < 1:
        raise UsageError(f"--ranks {ranks}: it must be at least 1")
    if machine.ranks and ranks > machine.ranks:
        raise UsageError(f"machine {machine.name} has {machine.ranks} ranks, fewer than --ranks {ranks}")
    return ranks


def _batch_sizes(options: Mapping[str, Any]) -> list[int]:
    if options["batch_size"] is None:
        return [OF_IMAGES["batch_size"] if options["model"] in IMAGES else DataConfig().batch_size]
    try:
        sizes = [int(size) for size in options["batch_size"].split(",")]
    except ValueError:
        raise UsageError(f"--batch-size {options['batch_size']}: give an integer, or several as in 16,32") from None
    if min(sizes) < 1:
        raise UsageError(f"--batch-size {options['batch_size']}: it must be at least 1")
    return sizes


def _fixed(options: Mapping[str, Any], given: set[str], axes: Mapping[str, int] | None) -> dict[str, Any]:
    names = ("micro_batches", "zero", "sequence_parallel", "schedule", "chunks", "recompute")
    fixed = {name: options[name] for name in names if name in given and options[name] is not None}
    if options["micro_batches"] is not None and options["micro_batches"] < 1:
        raise UsageError(f"--micro-batches {options['micro_batches']}: it must be at least 1")
    if options["stages"]:
        division = parse_division(options["stages"])
        fixed["stages"] = options["stages"] if isinstance(division, str) else tuple(division)
    if axes is not None:
        fixed["mesh"] = axes
    elif isinstance(fixed.get("stages"), str):
        raise UsageError(
            f"--stages {options['stages']}: the planner divides stages; give --mesh as well, or the first layers"
        )
    return fixed
