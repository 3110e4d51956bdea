"""``train --plan FILE`` and ``train --mesh auto``: a job whose composition is planned."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click
import numpy as np

from spmd_engine.cli.options import chosen_settings
from spmd_engine.comm.agreement.rank_zero import text_from_rank_zero
from spmd_engine.comm.mesh import Mesh
from spmd_engine.comm.world import world
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.errors import UsageError
from spmd_engine.training.train_config import TrainConfig

AUTO = "auto"  #: as --mesh: the mesh is planned
LORA = tuple(chosen_settings(TrainConfig, ["lora"]))
#: Options that a plan decides; another value of them contradicts it.
DECIDED = (
    "mesh", "zero", "sequence_parallel", "context_method", "schedule", "chunks", "stages", "recompute",
    "shares", "state_shares", "min_tensor_size", "micro_batches", "batch_size", "optimizer", "dtype", *LORA,
)  # fmt: skip


def planned_values(path: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """A job's options with those of a plan's file, read on rank 0. Collective over the world.

    Raises UsageError for a plan that does not fit the ranks at hand, or was made for another model, and for options
    that the plan decides otherwise.
    """
    from spmd_engine.planning.plan_result import PlanFile

    with Mesh(world()) as mesh:
        text = text_from_rank_zero(mesh.group(), lambda: json.dumps(PlanFile.read(path).as_json()))
        ranks = mesh.size
    plan = PlanFile.from_json(json.loads(text), path)
    plan.check(ranks, given.get("model"), path)
    decided = {
        **plan.composition.as_json(),
        "micro_batches": plan.micro_batches,
        "batch_size": plan.batch_size,
        "optimizer": plan.optimizer,
        "dtype": plan.model.dtype,
    }
    if (lora := plan.model.lora) is not None:
        decided |= {name: getattr(lora, name.removeprefix("lora_")) for name in LORA}
    for name in DECIDED:
        if name in given and given[name] != decided.get(name):
            flag = "--" + name.replace("_", "-")
            raise UsageError(
                f"{flag} {given[name]} with --plan {path}, which says {decided.get(name)}: omit one of them"
            )
    return {"model": plan.model.name, **decided, **{n: v for n, v in given.items() if n not in DECIDED}}


def planned_here(job: TrainConfig, given: Mapping[str, Any]) -> TrainConfig:
    """The job with the quickest composition for the ranks there are, planned on rank 0. Collective over the world.

    Options of the composition that were given stay, and so do the micro-batches of the job, which are part of what is
    computed. Raises UsageError if no plan fits.
    """
    if job.strategy:
        raise UsageError(f"--mesh {AUTO}: --strategy {job.strategy} has a mesh of its own; omit --mesh auto")
    with Mesh(world()) as mesh:
        text = text_from_rank_zero(mesh.group(), lambda: json.dumps(_plan(job, mesh.size, given)))
    return job.changed(composition=ParallelConfig.from_json(json.loads(text), f"--mesh {AUTO}"))


def unplanned(composition: ParallelConfig) -> ParallelConfig:
    """A composition without what a planner searches for."""
    return composition.changed(
        mesh=None, zero=None, sequence_parallel=False, schedule=None, chunks=None, stages=None, recompute="none"
    )


def _plan(job: TrainConfig, ranks: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """On rank 0: the composition as JSON."""
    from spmd_engine.planning.machine.files import default_machine
    from spmd_engine.planning.plan_result import Request
    from spmd_engine.planning.planner import find_plan
    from spmd_engine.units import readable_bytes, readable_seconds

    names = ("zero", "sequence_parallel", "schedule", "chunks", "recompute")
    fixed = {name: getattr(job.composition, name) for name in names if name in given}
    fixed["micro_batches"] = job.data.micro_batches
    base = unplanned(job.composition)
    result = find_plan(
        Request(
            job.model.build(job.composition),
            default_machine(),
            [ranks],
            [job.data.batch_size],
            fixed=fixed,
            dtype=np.dtype(job.model.dtype),
            optimizer=job.training.optimizer,
            base=base,
            seconds=5.0,
        )
    )
    if result.plan is None:
        raise UsageError(f"--mesh {AUTO}: {result.why_not}")
    evaluation = result.evaluation
    seconds = evaluation.seconds if evaluation else result.plan.seconds
    memory = evaluation.analysis.peak_bytes if evaluation else result.plan.memory
    click.echo(
        f"spmd_engine: planned: {result.plan.candidate}; a step {readable_seconds(seconds)}, "
        f"{readable_bytes(memory)} on the rank that holds most",
        err=True,
    )
    return result.plan.candidate.composition(base).as_json()
