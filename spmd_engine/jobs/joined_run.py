"""``join``: ranks of another launcher take part in a running job."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from spmd_engine.adaptive.joining import Entrance, JoinRequest, facts_of, runs
from spmd_engine.adaptive.shape_changes import ShapeChanges
from spmd_engine.arrays import get_backend
from spmd_engine.comm import Mesh
from spmd_engine.comm.agreement.rank_zero import on_rank_zero, text_from_rank_zero, waits_outside
from spmd_engine.comm.world import merged
from spmd_engine.engine import ModelConfig
from spmd_engine.engine.reshape import ShapeRequest
from spmd_engine.errors import UsageError
from spmd_engine.jobs.resolve import with_shape_of_weights
from spmd_engine.jobs.run_job import CommonChoices, hooks_of, make_run, with_corpus
from spmd_engine.runtime.signals import StopFlag
from spmd_engine.training import Hook, Run, TrainConfig
from spmd_engine.training.run_folder import read_run, run_folder
from spmd_engine.training.workload import open_workload


def join(
    run: str | Path,
    request: ShapeRequest | None = None,
    *,
    wait: float = 600.0,
    entered: Callable[[list[int], int], None] = lambda ranks, step: None,
    permit: Callable[[ModelConfig], ModelConfig] = lambda model: model,
    hooks: Sequence[Hook] = (),
) -> Run:
    """Join the job that trains in the folder ``run``, or under this name in ``runs/``, with all ranks of this world.
    Collective; returns when the run ends, as ``train`` does.

    The ranks read the job's configuration and its data, then wait, up to ``wait`` seconds, until the job takes them in
    after a step. They are idle until a change of shape puts them onto the mesh: ``request``, which the job follows at
    once, or a later one (see ``migrate``). ``entered`` is called on rank 0 of these ranks, with their numbers in the
    job and the number of its steps. ``permit`` gets the model that the run's file names, and returns it by
    ``changed(name=...)`` if it is code that may run here. ``hooks`` are those that the job's ``train`` got. Raises
    UsageError if the job does not run, has other data, other code or another version of this package, or cannot take
    ranks in; the job then goes on without them.
    """
    folder = run_folder(run)
    with Mesh() as mesh, ExitStack() as opened:
        on_rank_zero(mesh.group(), lambda: _check_runs(folder))
        job = read_run(run)
        job = with_shape_of_weights(job.changed(model=permit(job.model)), mesh.group())
        index, processes = mesh.process_on_node
        get_backend(job.device, ~index, processes, job.device_memory)  # the job's ranks have the first devices
        workload = open_workload(job, mesh, placed=False)
        facts = facts_of(with_corpus(workload).as_json())
        entrance = Entrance(mesh.comm, folder, JoinRequest(mesh.size, facts, request, os.urandom(8).hex()), wait)
        texts = entrance.enter()
        if mesh.rank == 0:
            opened.callback(entrance.close)
        with waits_outside(mesh.group(), "waiting until the job takes these ranks in"):
            order = json.loads(text_from_rank_zero(mesh.group(), lambda: next(filter(None, texts))))
        stop = opened.enter_context(StopFlag())  # from now on a signal is one to the whole job
        mesh.barrier()
        if mesh.rank == 0:
            entrance.confirm()
        job = TrainConfig.from_json(order["config"], str(folder))
        job = job.changed(model=job.model.permitted_by(workload.job.model))
        all_ranks = Mesh(merged(mesh.comm, entrance.port, joins=True), **job.mesh_options)
        opened.enter_context(all_ranks)
        engine: Any = workload.engine
        engine.mesh, engine.model = all_ranks, job.model.build(job.composition)  # perhaps other layers by now
        workload = replace(workload, job=job)
        changes = ShapeChanges(workload, joined=order, before=mesh.comm)
        joined = make_run(workload, folder, hooks=hooks_of(workload, changes, [CommonChoices(), *hooks]))
        if mesh.rank == 0:
            entered(order["join"], order["step"])
        joined.train_from_between(order["steps"], stop, lambda: changes.enter(order))
    return joined


def _check_runs(folder: Path) -> None:
    if not runs(folder):
        raise UsageError(f"{folder} has no running job to join; 'train --resume --run {folder}' starts it on any ranks")
