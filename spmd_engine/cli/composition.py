"""The options that compose a strategy, as a ParallelConfig."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

from spmd_engine.cli.experts import mixture_of
from spmd_engine.cli.options import image_shape, print_notices, with_options
from spmd_engine.configuration import default_of
from spmd_engine.engine.parallel_config import PIPELINES, RECOMPUTE, ParallelConfig
from spmd_engine.layers.attention.methods import CONTEXT_METHODS
from spmd_engine.models import Model
from spmd_engine.models.load_config import is_description
from spmd_engine.models.names import build_model

_OPTIONS = [
    click.option(
        "--zero",
        type=int,
        help="Store in parts: 1 the optimizer's state, 2 gradients too, 3 parameters too. "
        "[default: 3 over an axis 'shard', else nothing]",
    ),
    click.option("--sequence-parallel", is_flag=True, help="Cut the sequence over 'model' between layers."),
    click.option(
        "--context-method", type=click.Choice(list(CONTEXT_METHODS)), help="How 'context' attends. [default: ring]"
    ),
    click.option("--experts-over", metavar="AXIS,...", help="Axes that cut the experts. [default: expert]"),
    click.option(
        "--recut-after",
        metavar="BLOCKS",
        type=int,
        help="Of images: after so many blocks cut samples over 'rows' and 'columns', too. [default: never]",
    ),
    click.option(
        "--rebalance-every",
        metavar="STEPS",
        type=int,
        default=default_of(ParallelConfig, "rebalance_every"),
        show_default=True,
        help="Move experts to where there is room, by the load measured since; 0: never.",
    ),
    click.option(
        "--schedule", type=click.Choice(PIPELINES), help="Order of micro-batches along 'pipe'. [default: 1f1b]"
    ),
    click.option("--chunks", type=int, help="Of layers a stage, for interleaved. [default: 2]"),
    click.option("--stages", metavar="even|cost|N,N,...", help="Layers a stage; N: first of each. [default: even]"),
    click.option(
        "--recompute",
        type=click.Choice(RECOMPUTE),
        default="none",
        show_default=True,
        help="In the backward, instead of keeping activations: every block, or attention.",
    ),
    click.option(
        "--compress",
        metavar="none|bfloat16|float16|top-k:FRACTION|powersgd:RANK",
        default="none",
        show_default=True,
        help="How gradients travel. The last two need whole gradients (no --zero); what they leave out of a step "
        "comes with later ones, also after --resume on the same mesh.",
    ),
    click.option(
        "--group-threshold",
        metavar="BYTES",
        type=int,
        default=default_of(ParallelConfig, "group_threshold"),
        show_default=True,
        help="Neighbouring parameters share a collective up to this size ...",
    ),
    click.option(
        "--group-cap",
        metavar="BYTES",
        type=int,
        default=default_of(ParallelConfig, "group_cap"),
        show_default=True,
        help="... and none that would make it larger than this.",
    ),
    click.option(
        "--shares",
        metavar="AXIS=N:N...,...",
        help="Of the samples, for unequal ranks: data=3:1 gives the first thrice as many. [default: as many each]",
    ),
    click.option(
        "--state-shares",
        metavar="AXIS=N:N...,...",
        help="The same of what --zero stores in parts: by memory, where --shares go by speed. [default: as much each]",
    ),
    click.option(
        "--min-tensor-size",
        metavar="BYTES",
        type=int,
        default=default_of(ParallelConfig, "min_tensor_size"),
        show_default=True,
        help="Parameters below this --zero stores in no parts: they are whole on every rank.",
    ),
]
#: Names of these options: but for ``compress``, they say how something is computed, not what.
COMPOSITION = (
    "zero", "sequence_parallel", "context_method", "experts_over", "rebalance_every", "recut_after", "schedule",
    "chunks", "stages", "recompute", "compress", "group_threshold", "group_cap", "shares", "state_shares",
    "min_tensor_size",
)  # fmt: skip


def composition_options(command: Callable) -> Callable:
    """All of the options above, for a command."""
    return with_options(_OPTIONS, command)


def composition_of(options: Mapping[str, Any], axes: Mapping[str, int], model: Model | None = None) -> ParallelConfig:
    """The ParallelConfig that a command's options describe on a mesh with these axes.

    Says what has no effect there; raises UsageError for what makes no sense.
    """
    composition = ParallelConfig(mesh=axes, **{name: options[name] for name in COMPOSITION})
    print_notices(composition.check(axes, model))
    return composition


def model_of(name: str, images: str | None, options: Mapping[str, Any]) -> Model:
    """The model of this name that a command's options describe, of ``images`` as they say, and how it is computed; or
    that of a file without weights, which ``plan`` takes, too."""
    if is_description(name):
        from spmd_engine.planning.report.model_file import planned_model

        how = {each: options[each] for each in ("context_method", "recut_after")}
        return planned_model(name, base=ParallelConfig(**how))
    return build_model(
        name,
        context_method=options["context_method"] or "ring",
        sample=image_shape(name, images),
        recut_after=options["recut_after"],
        mixture=mixture_of(options),
    )
