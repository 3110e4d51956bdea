"""Runs of jobs: ``train`` begins or resumes a run, on any number of ranks; with ``join`` more ranks take part in it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spmd_engine.adaptive.joining import Entrance, JoinRequest, facts_of, runs
from spmd_engine.adaptive.monitor import CrossingLog
from spmd_engine.adaptive.shape_changes import ShapeChanges
from spmd_engine.arguments import checked
from spmd_engine.arrays.backend import get_backend
from spmd_engine.checkpoints import CheckpointFolder
from spmd_engine.checkpoints.format.folder import find_checkpoint, make_folder, replace_file
from spmd_engine.comm.agreement.rank_zero import on_all_ranks, on_rank_zero, text_from_rank_zero, waits_outside
from spmd_engine.comm.device_transport import choose_transport
from spmd_engine.comm.group import Group
from spmd_engine.comm.mesh import Mesh
from spmd_engine.comm.world import merged
from spmd_engine.engine import ModelConfig
from spmd_engine.engine.layered import LayeredEngine
from spmd_engine.engine.reshape import ShapeRequest
from spmd_engine.errors import UsageError, counted
from spmd_engine.jobs.resolve import resolve, with_shape_of_weights
from spmd_engine.models.names import short_name
from spmd_engine.planning.dry_run.first_step_check import first_step_check
from spmd_engine.planning.machine.product_choice import choose_products
from spmd_engine.runtime.signals import StopFlag
from spmd_engine.tokens import ByteTokenizer, Tokenizer
from spmd_engine.training.expert_load import Rebalancer
from spmd_engine.training.hooks import Hook
from spmd_engine.training.observers import EventLog, MetricsFile, Observer, lines_up_to
from spmd_engine.training.run import CONFIG, Run
from spmd_engine.training.run_folder import is_model, read_run, run_folder
from spmd_engine.training.train_config import AdaptConfig, CorpusFacts, StepConfig, TrainConfig
from spmd_engine.training.workload import Workload, make_trainer, open_workload, rate_of

if TYPE_CHECKING:
    from spmd_engine.formats.token_file import TokenFile

PROMPT = "def "  #: the beginning of a sample
TEMPERATURE = 0.8  #: temperature of samples


@checked({"trace": 0})
def train(
    job: TrainConfig | Mapping[str, Any] | str | Path | None = None,
    run: str | Path | None = None,
    *,
    resume: bool = False,
    given: Collection[str] = (),
    stop_at: int | None = None,
    trace: int = 0,
    observers: Sequence[Observer] = (),
    enforce: bool = True,
    propose: Callable[[int], ShapeRequest | None] = lambda step: None,
    hooks: Sequence[Hook] = (),
) -> Run:
    """Train a job: a TrainConfig, its JSON, or a file of that. Collective over the world; returns the Run when done.

    ``run`` is the folder for results, or its name under ``runs/``; None makes a new one, ``runs/MODEL-NUMBER``. With
    ``resume`` the run continues from its checkpoint, without the options of its composition that the mesh does not
    permit, unless they are ``given``. ``stop_at`` ends the run before the job's last step; ``trace`` is the number of
    steps to trace. After each step but the last and traced ones, ``propose(step)`` is called on rank 0 and may return a
    request to change the shape of the job; see also ``migrate``. ``hooks`` act between the parts of the job, on every
    rank, beside those of this package. A helper rank, which is not on the mesh, has a Run, too.
    Raises UsageError for a job that cannot run.
    """
    resolved = resolve(job, resume, given)
    job, steps = resolved.job, resolved.job.training.steps
    if stop_at is not None and not 0 < stop_at <= steps:
        raise UsageError(f"--stop-at {stop_at} with --steps {steps}: it must be from 1 to {steps}")
    if resume and run is None:
        raise UsageError("--resume needs --run NAME: name the run to continue")
    with resolved.open_mesh() as mesh:
        get_backend(job.device, *mesh.process_on_node, memory=job.device_memory)
        early = [CommonChoices(), *hooks]
        notices = [*resolved.notices, *(notice for hook in early for notice in hook.prepare(job, mesh.all_ranks()))]
        if mesh.others.have_this:
            return _train_outside(job, mesh, early)
        with mesh.others:
            workload = open_workload(job, mesh)
            notices += _notices_without_effect(workload)
            folder = Path(text_from_rank_zero(mesh.group(), lambda: _open_folder(job, run, resume)))
            if job.adapt is not None:
                from spmd_engine.adaptive.adapter import Adapter  # which imports much, and few jobs need it

                adapter, given_propose = Adapter(job.adapt), propose
                observers, propose = [*observers, adapter], lambda step: given_propose(step) or adapter.propose(step)
            observers = [*observers, CrossingLog(job.adapt or AdaptConfig())]
            changes = ShapeChanges(workload, propose)
            new_run = make_run(workload, folder, observers, trace, hooks_of(workload, changes, early, enforce))
            with new_run.locked():  # before anything is read from or written to the folder
                loaded = _begin(new_run, workload, resume)
                if resume:
                    notices += _notices_of_rates(new_run, workload) + notices_of_change(new_run)
                parameters = workload.parameter_count  # on all ranks: an engine may have to exchange shapes
                new_run.notify("opened", workload, parameters, notices)
                new_run.notify("loaded", loaded)
                if mesh.rank == 0 and mesh.others.ranks:
                    composition = job.composition.changed(mesh=dict(mesh.all_axes))
                    config = with_corpus(workload).changed(composition=composition).as_json()
                    order = {"config": config, "folder": str(folder), "steps": stop_at or steps}
                    mesh.others.send(order, mesh.others.ranks)
                new_run.train(stop_at or steps)
    return new_run


def _train_outside(job: TrainConfig, mesh: Mesh, early: Sequence[Hook]) -> Run:
    """The part of a rank that is not on the mesh at first: it follows the orders of rank 0."""
    with StopFlag(to_save=False) as stop:
        if not (order := mesh.others.take(lambda: stop.received)):
            sys.exit()
        stop.to_save = True
        described = TrainConfig.from_json(order["config"], "the order of rank 0")
        job = described.changed(model=described.model.permitted_by(job.model))
        workload = open_workload(job, mesh.alone(), placed=False)  # it reads the data by itself, as ranks that join do
        workload.engine.mesh = mesh
        new_run = make_run(workload, Path(order["folder"]), hooks=hooks_of(workload, ShapeChanges(workload), early))
        new_run.train_from_between(order["steps"], stop)
    return new_run


class CommonChoices(Hook):
    """Lets all ranks of a job use the same libraries of matrix products, and the same transport between devices."""

    def prepare(self, job: TrainConfig, ranks: Group) -> list[str]:
        notices = choose_products(ranks, job.products, dtype=job.model.dtype, device=job.device)
        return notices + choose_transport(ranks, get_backend(job.device), job.transport)


def hooks_of(workload: Workload, changes: ShapeChanges, early: Sequence[Hook], enforce: bool = True) -> list[Hook]:
    """The hooks of a job, on ranks that begin it and on those that join it; ``early`` are those that prepare."""
    check = first_step_check(workload, enforce)
    return [*([check] if check else []), Rebalancer(workload.job.composition), *early, changes]


def _notices_without_effect(workload: Workload) -> list[str]:
    """Notices of options with no or little effect on the model, whose sizes may be those of the data."""
    job, engine = workload.job, workload.engine
    notices = []
    if job.model.code is not None:
        notices = [f"the model is code: {job.model.name}, SHA-256 {job.model.code[:12]}... of its file"]
    if job.training.optimizer == "adamw" and job.training.momentum != StepConfig().momentum:
        notices.append(
            f"momentum {job.training.momentum:g} has no effect: it is that of sgd, and the optimizer is adamw"
        )
    steps, warmup = job.training.decay_steps or job.training.steps, job.training.warmup or 0
    if warmup > steps:
        notices.append(
            f"warmup {warmup} is longer than {counted(steps, 'step')}: the learning rate stays below its peak"
        )
    if job.shards_itself or not isinstance(engine, LayeredEngine):
        return notices
    return notices + job.composition.check(engine.mesh.all_axes, engine.model)


def _begin(run: Run, workload: Workload, resume: bool) -> list[str]:
    """Resume the run, or begin it in its folder; return a table of its initial weights."""
    trainer = run.trainer
    if workload.job.composition.storage.places.kinds:  # a full disk is found before the run begins
        on_all_ranks(trainer.engine.group(), lambda: trainer.optimizer.prepare(trainer.engine))
    if resume:
        run.resume()
        return []
    loaded = _load_weights(workload)
    run.write_config()
    if (file := workload.token_file) is not None:
        run.on_rank_zero(lambda: keep_tokenizer(file, run.folder))
    return loaded


def notices_of_rates(before: StepConfig, now: StepConfig, done: int) -> list[str]:
    """A notice if the learning rate after ``done`` steps is another with the options ``now`` than with those of the
    checkpoint, or if it keeps the curve of another number of steps."""
    rates = [rate_of(training)(done) for training in (before, now)]
    ends = [training.decay_steps or training.steps for training in (before, now)]
    step = f"the learning rate of step {done + 1} is {rates[1]:.3g}"
    if rates[0] != rates[1]:
        keeps = f"; --decay-steps {ends[0]} keeps its curve" if ends[0] != ends[1] else ""
        return [f"{step}; with the options of the checkpoint it would be {rates[0]:.3g}{keeps}"]
    if before.steps != now.steps and ends[1] != now.steps:
        stretched = rate_of(now.changed(decay_steps=now.steps))(done)
        other = f"; with --decay-steps {now.steps} it would be {stretched:.3g}" if stretched != rates[1] else ""
        return [f"{step}, as before, on its curve of {ends[1]} steps{other}"]
    return []


def _notices_of_rates(run: Run, workload: Workload) -> list[str]:
    """The ``notices_of_rates`` of a run that has been resumed, on rank 0."""
    from spmd_engine.checkpoints.read import read_manifest

    newest = CheckpointFolder(run.folder).newest() if workload.engine.device_id == 0 else None
    with suppress(UsageError):  # a checkpoint without a job, or with one of another version
        if newest is not None:
            before = TrainConfig.from_json(read_manifest(newest).config).training
            return notices_of_rates(before, workload.job.training, run.steps_done)
    return []


def notices_of_change(run: Run) -> list[str]:
    """A notice, on rank 0, of the last change of shape, if the job ended in its first step, and it is not repeated."""
    if run.engine.device_id != 0:
        return []
    events, steps = (lines_up_to(run.folder / file.NAME, sys.maxsize) for file in (EventLog, MetricsFile))
    shapes = [event for event in map(json.loads, events) if event.get("event") in ("started", "reshaped")]
    last, done = shapes[-1] if shapes else {}, json.loads(steps[-1])["step"] if steps else 0
    mesh = last.get("mesh")
    if last.get("event") != "reshaped" or done > last["step"] or mesh == str(run.engine.mesh):
        return []
    return [
        f"the change to mesh {mesh} after step {last['step']} is not repeated: the job ended in its first step there"
    ]


def _load_weights(workload: Workload) -> list[str]:
    """Load the initial weights of the job's model, if there are any; return a table of their tensors."""
    model, engine = workload.job.model, workload.engine
    if model.path is None or not isinstance(engine, LayeredEngine):
        return []
    from spmd_engine.checkpoints.pretrained import load_pretrained, table

    pretrained = load_pretrained(engine, model.path, model.adapter)
    specs = {name: str(engine.layout.spec(source.view.dims)) for name, source in pretrained.filled.items()}
    return list(table(pretrained, specs))


def with_corpus(workload: Workload) -> TrainConfig:
    """The job of a workload, which from now on is for data that equal these."""
    return workload.job.changed(corpus=CorpusFacts(workload.corpus.files, workload.corpus.sha256))


def make_run(
    workload: Workload, folder: Path, observers: Sequence[Observer] = (), trace: int = 0, hooks: Sequence[Hook] = ()
) -> Run:
    """The run of a workload in its folder; see ``Run`` and ``train``."""
    job, engine, corpus = with_corpus(workload), workload.engine, workload.corpus

    def sample() -> str:
        if not (job.sample and workload.writes and isinstance(engine, LayeredEngine)):
            return ""
        tokenizer = _tokenizer(workload)
        if tokenizer is None or tokenizer.vocabulary > engine.model.vocabulary:  # or tokens without texts
            return ""
        from spmd_engine.serving import SamplingOptions, StoppingCriteria, generate
        from spmd_engine.tokens.encoding import encode_prompt

        sampling = SamplingOptions(sample=True, temperature=TEMPERATURE, seed=job.model.seed)
        ends = () if tokenizer.end is None else (tokenizer.end,)
        stopping = StoppingCriteria(job.sample, ends, slide=True)
        (completion,) = generate(
            engine, [encode_prompt(tokenizer, PROMPT)], sampling=sampling, stopping=stopping, tokenizer=tokenizer
        )
        return PROMPT + (completion.text or "")

    return Run(
        folder,
        make_trainer(workload),
        validation=workload.validation,
        eval_every=job.training.eval_every,
        save_every=job.training.save_every,
        keep=job.training.keep,
        background=job.training.save_in_background,
        go_on_unsaved=job.training.go_on_unsaved,
        check_replicas_every=job.training.check_replicas_every,
        config=job.as_json(),
        facts={"model": job.model.name, "seed": job.model.seed, "corpus_sha256": corpus.sha256},
        observers=observers,
        trace=trace,
        sample=sample,
        hooks=hooks,
    )


def _tokenizer(workload: Workload) -> Tokenizer | None:
    """The tokenizer of this workload's tokens; None if its library is not installed."""
    file = workload.token_file
    if file is None or not file.tokenizer:
        return ByteTokenizer()
    from spmd_engine.tokens.hugging_face import tokenizer_of

    return tokenizer_of(file.tokenizer, file.path) if find_spec("tokenizers") else None


def keep_tokenizer(file: TokenFile, folder: Path) -> None:
    """Write the files of the model's tokenizer to the run's folder."""
    from spmd_engine.tokens.hugging_face import CONFIG, TEMPLATE, TOKENIZER

    files = file.tokenizer
    for name in files.keys() & {CONFIG, TEMPLATE, TOKENIZER}:  # other names could be paths
        replace_file(folder / name, files[name])


# --- The folder


def _open_folder(job: TrainConfig, run: str | Path | None, resume: bool) -> str:
    """Open the run's folder on rank 0, and make it for a new run. A run without a checkpoint may begin again."""
    if run is not None:
        folder = run_folder(run)
        if resume:
            find_checkpoint(folder)  # raises CheckpointError if there is none
            return str(folder)
        if CheckpointFolder(folder).newest():
            raise UsageError(f"{folder} holds a run already; give --resume to continue it, or another --run")
        if is_model(folder):
            raise UsageError(f"{folder} holds a model, whose {CONFIG} a run would replace; give another --run")
        make_folder(folder)
        return str(folder)
    number = 1
    while True:
        folder = Path("runs") / f"{short_name(job.model.name)}-{number}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:  # perhaps another job has just made it
            number += 1
        else:
            return str(folder)


# --- Ranks of another launcher take part in a running job


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
