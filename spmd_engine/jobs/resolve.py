"""The first phase of a job: what a command line, a file, a run or a plan describes becomes one complete, checked
description, before a mesh is opened. Rank 0 reads files, and all ranks get the same."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spmd_engine.arrays.precision import dtype_of
from spmd_engine.axes import checked_axes, count_ranks
from spmd_engine.comm import Group, world
from spmd_engine.comm.agreement.rank_zero import json_from_rank_zero
from spmd_engine.comm.mesh import Mesh, mesh_beside
from spmd_engine.configuration import settings_of
from spmd_engine.engine import ModelConfig, ParallelConfig
from spmd_engine.errors import UsageError
from spmd_engine.models.names import IMAGES
from spmd_engine.runtime.launchers import RESTARTS
from spmd_engine.strategies import default_axes, strategy_named
from spmd_engine.training.run_folder import read_job, read_run, run_folder
from spmd_engine.training.train_config import OF_IMAGES, TrainConfig
from spmd_engine.training.workload import PAGE_MODEL

if TYPE_CHECKING:
    from spmd_engine.models import Model
    from spmd_engine.planning.machine.machine import Machine
    from spmd_engine.planning.plan_result import Request

#: Returns the model of a file, which may now run if it is code; the second argument is the model that the user names.
Permit = Callable[[ModelConfig, str | None], ModelConfig]


# --- The job that a command line and its files describe


def job_of_options(
    values: Mapping[str, Any],
    config: str | None = None,
    defaults: Mapping[str, Any] | None = None,
    permit: Permit = lambda model, named: model,
) -> TrainConfig:
    """The job that these options describe, on that of the file ``config``. Collective over the world with a file.

    ``defaults`` hold unless the file has a value.
    """
    job = read_job(config) if config else TrainConfig()
    job = job.changed(model=permit(job.model, values.get("model")))
    missing = {name: value for name, value in (defaults or {}).items() if not config or job.option(name) is None}
    return job.with_options(**missing | dict(values))


def job_to_train(
    values: Mapping[str, Any],
    *,
    permit: Permit,
    run: str | None = None,
    resume: bool = False,
    config: str | None = None,
    plan: str | None = None,
    plans: bool = False,
) -> TrainConfig:
    """The job that the options of ``train`` describe: of the ``run`` that it is to ``resume``, with the composition of
    a file ``plan``, or with one that it ``plans`` for the ranks of the world. Collective over the world with any of
    them. Raises UsageError for options that contradict each other."""
    if resume:
        if not run or config:
            raise UsageError("--resume needs --run NAME, and takes its options from there, not from --config")
        job = read_run(run)
        job = job.changed(model=permit(job.model, values.get("model")))
        return job.resumed(str(run_folder(run)), **_values_after_restart(job, values))
    names_model, named_in = "model" in values, ""
    if plan:
        values, named_in = planned_values(plan, values, permit)
    job = job_of_options(values, config, OF_IMAGES if values.get("model") in IMAGES else None, permit)
    if named_in:
        job = job.changed(model=replace(job.model, named_in=named_in))
    if job.strategy and not names_model and not config:
        job = job.with_options(model=PAGE_MODEL)
    return planned_here(job, values) if plans else job


def _values_after_restart(job: TrainConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """The given options; if ``launch`` has restarted the job, which may have changed its shape since its command, with
    the last composition of the run if that has as many ranks as the world. Collective over the world."""
    with Mesh(world()) as mesh:
        restarts = json_from_rank_zero(mesh.group(), lambda: os.environ.get(RESTARTS, "0"))
        ranks = mesh.size
    last = job.composition
    if restarts == "0" or last.mesh is None or count_ranks(last.mesh) + len(last.ranks_outside) != ranks:
        return dict(given)
    settings = settings_of(TrainConfig)
    others = {name: value for name, value in given.items() if "composition" not in settings[name].path}
    return {**others, "mesh": last.mesh}


# --- A composition that is planned: ``train --plan FILE`` and ``train --mesh auto``
AUTO = "auto"  #: the value of --mesh for a planned mesh
LORA = tuple(name for name, field in settings_of(TrainConfig).items() if field.is_option and "lora" in field.path)
#: Options that a plan decides; another value of them contradicts it.
DECIDED = (
    "mesh", "zero", "sequence_parallel", "context_method", "schedule", "chunks", "stages", "recompute",
    "shares", "state_shares", "min_tensor_size", "rank_order", "offload", "assign", "micro_batches",
    "batch_size", "length", "optimizer", "precision", *LORA,
)  # fmt: skip


def planned_values(path: str, given: Mapping[str, Any], permit: Permit) -> tuple[dict[str, Any], str]:
    """The given options of a job and those of a plan's file, read on rank 0, and ``named_in`` of its model. Collective
    over the world.

    Raises UsageError for a plan for other ranks or another model, for given options that contradict the plan, and for
    code that is not permitted.
    """
    from spmd_engine.planning.plan_result import PlanFile

    with Mesh(world()) as mesh:
        content = json_from_rank_zero(mesh.group(), lambda: PlanFile.read(path).as_json())
        ranks = mesh.size
    plan = PlanFile.from_json(content, path)
    plan.check(ranks, given.get("model"), path)
    model = permit(plan.model, given.get("model"))
    if given.get("model") is not None:
        model = model.changed(name=given["model"])
    decided = {
        **plan.composition.as_json(),
        "micro_batches": plan.micro_batches,
        "batch_size": plan.batch_size,
        "length": plan.length,
        "optimizer": plan.optimizer,
        "precision": plan.model.dtype,
    }
    if (lora := plan.model.lora) is not None:
        decided |= {name: getattr(lora, name.removeprefix("lora_")) for name in LORA}
    for name in DECIDED:
        if name in given and given[name] != decided.get(name):
            flag = "--" + name.replace("_", "-")
            raise UsageError(
                f"{flag} {given[name]} with --plan {path}, which has {decided.get(name) or 'none'}: omit one of them"
            )
    values = {"model": model.name, **decided, **{n: v for n, v in given.items() if n not in DECIDED}}
    return values, model.named_in


def planned_here(job: TrainConfig, given: Mapping[str, Any]) -> TrainConfig:
    """The job with the fastest composition for the ranks of the world, planned on rank 0. Collective over the world.

    Given options of the composition stay, and so do the micro-batches of the job, which affect the results.
    Raises UsageError if no plan fits.
    """
    if job.strategy:
        raise UsageError(f"--mesh {AUTO}: --strategy {job.strategy} has a mesh of its own; omit --mesh auto")
    with Mesh(world()) as mesh:
        content = json_from_rank_zero(mesh.group(), lambda: _plan(job, mesh.size, given))
    return job.changed(composition=ParallelConfig.from_json(content, f"--mesh {AUTO}"))


def unplanned(composition: ParallelConfig) -> ParallelConfig:
    """A composition without the options that a planner searches for."""
    return composition.changed(
        mesh=None, zero=None, sequence_parallel=False, schedule=None, chunks=None, stages=None, recompute="none"
    )


def request_for(job: TrainConfig, model: Model, machine: Machine, ranks: Sequence[int], **options: Any) -> Request:
    """The request to plan a job's composition on numbers of ranks; ``options`` are further fields of ``Request``."""
    from spmd_engine.planning.plan_result import Request

    base, dtype = unplanned(job.composition), dtype_of(job.model.dtype)
    of_job = {"sequence": job.data.length, "optimizer": job.training.optimizer, "lora": job.model.lora}
    return Request(model, machine, ranks, base=base, dtype=dtype, **of_job, **options)


def _plan(job: TrainConfig, ranks: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """Plan the composition on rank 0, and return it as JSON."""
    from spmd_engine.planning.machine.machine import default_machine
    from spmd_engine.planning.planner import find_plan
    from spmd_engine.units import readable_bytes, readable_seconds

    names = ("zero", "sequence_parallel", "schedule", "chunks", "recompute")
    fixed = {name: getattr(job.composition, name) for name in names if name in given}
    fixed["micro_batches"] = job.data.micro_batches
    model = job.model.build(job.composition)
    sizes = [job.data.batch_size]
    request = request_for(job, model, default_machine(), [ranks], batch_sizes=sizes, fixed=fixed, seconds=5.0)
    result = find_plan(request)
    if result.plan is None:
        raise UsageError(f"--mesh {AUTO}: {result.why_not}")
    evaluation = result.evaluation
    seconds = evaluation.seconds if evaluation else result.plan.seconds
    memory = evaluation.analysis.peak_bytes if evaluation else result.plan.memory
    print(
        f"spmd_engine: planned: {result.plan.candidate}; a step {readable_seconds(seconds)}, "
        f"{readable_bytes(memory)} on the rank that holds most",
        file=sys.stderr,
        flush=True,
    )
    return result.plan.candidate.composition(request.base).as_json()


# --- The job on the ranks of this world


@dataclass(frozen=True)
class ResolvedJob:
    """A job that can run on the ranks of this world, and notices of the options that it goes on without."""

    job: TrainConfig
    axes: Mapping[str, Any]  #: axes of its mesh; empty: all ranks along "data"
    others: Sequence[int]  #: the ranks outside the mesh that compute layers
    notices: Sequence[str] = ()

    def open_mesh(self) -> Mesh:
        """Open the mesh, beside the helper ranks. Collective over the world; raises UsageError if the world has another
        number of ranks."""
        return mesh_of(self.job, self.axes, self.others, **self.job.mesh_options)


def mesh_of(job: TrainConfig, axes: Mapping[str, Any], others: Sequence[int], **options: Any) -> Mesh:
    """Open the mesh of a job with these axes, beside the ``others``. ``options`` are those of ``Mesh``."""
    return mesh_beside(others, axes, order=job.composition.order, **options)


def resolve(
    job: TrainConfig | Mapping[str, Any] | str | Path | None, resume: bool = False, given: Collection[str] = ()
) -> ResolvedJob:
    """Complete and check a job, its JSON, or that of a file, before anything of it is built. Collective over the world.

    A job of a page of strategies gets a mesh with the axes of that page. A run that is resumed goes on without the
    options that its mesh does not permit, unless they are ``given``, and without helper ranks if there are only the
    ranks of its mesh. Raises UsageError for a job that cannot run.
    """
    if isinstance(job, (str, Path)):
        job = read_job(job)
    elif not isinstance(job, TrainConfig):
        job = TrainConfig.from_json({} if job is None else job, "train")
    axes: Any = job.composition.mesh or {}
    if job.strategy and not axes:
        axes = default_axes(strategy_named(job.strategy), world().size)
    others, notices = _others_of(job, axes, resume, given), []
    if job.composition.assigned and not others:
        notices = [f"continues without --assign {job.composition.assign} (there are no more ranks)"]
        job = job.changed(composition=job.composition.changed(assign=None))
    if job.model.path is not None or job.model.adapter is not None:
        with Mesh(world()) as all_ranks:
            job = with_shape_of_weights(job, all_ranks.group())
    if job.model.lora is not None and job.model.path is None:
        raise UsageError(f"adapters need trained weights, and {job.model.name} has none: give --model PATH")
    on_mesh = checked_axes(axes or {"data": world().size - len(others)})
    if not job.shards_itself and count_ranks(on_mesh) == world().size - len(others):
        composition, left_out = job.composition, []
        model = job.model.build(composition)
        if resume:
            composition, left_out = composition.fitted(on_mesh, model, given)
        composition.check(on_mesh, model)
        job, notices = job.changed(composition=composition), left_out + notices
    return ResolvedJob(job, axes, others, notices)


def _others_of(job: TrainConfig, axes: Mapping[str, Any], resume: bool, given: Collection[str]) -> Sequence[int]:
    others = job.composition.ranks_outside
    if others and job.shards_itself:
        raise UsageError(f"--assign: {job.strategy or job.model.name} shards itself; helper ranks compute layers")
    if others and job.adapt is not None:
        raise UsageError("--assign with --adapt: the policy knows no helper ranks; omit one of them")
    if others and resume and "assign" not in given:
        left = world().size - len(others)
        return others if max(others) < world().size and count_ranks(axes or {"": left}) == left else []
    return others


def with_shape_of_weights(job: TrainConfig, group: Group) -> TrainConfig:
    """The job; its model gets the shape of its initial weights, if there are any. Collective."""
    if job.model.path is None and job.model.adapter is None:
        return job
    from spmd_engine.checkpoints.pretrained import with_shape

    return job.changed(model=with_shape(job.model, group))
