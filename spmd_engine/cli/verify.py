"""``verify``: whether a strategy computes what one device computes, and if not, where and why it differs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import click
import numpy as np

from spmd_engine.arrays.precision import HALVES, emulated
from spmd_engine.checkpoints.pretrained import open_pretrained, with_shape
from spmd_engine.cli.options import LongCommand, chosen_settings, open_mesh, print_notices, takes_job
from spmd_engine.cli.values import NumberRange, WholeRange
from spmd_engine.comm import Mesh, world
from spmd_engine.comm.agreement.rank_zero import on_all_ranks, on_rank_zero
from spmd_engine.engine import SGD, AdamW, ModelConfig, ParallelConfig, ShardedEngine, build_engine
from spmd_engine.engine.distributed import check_mesh
from spmd_engine.engine.helpers import follow_orders
from spmd_engine.errors import UsageError
from spmd_engine.formats.array_files import npz_names, read_npz
from spmd_engine.formats.tensor import MappedArray
from spmd_engine.models.user_code import code_named, is_code
from spmd_engine.strategies import STRATEGIES, default_axes, strategy_named
from spmd_engine.strategies.two_convolutions import IMAGE
from spmd_engine.training import TrainConfig
from spmd_engine.units import numbers_of
from spmd_engine.verification import Report, engine_and_reference, engine_of_model, fill_zeros, mesh_of_one
from spmd_engine.verification import verify as compare
from spmd_engine.verification.probe import compare_activations
from spmd_engine.verification.reference import batches_for_model, batches_of_shape
from spmd_engine.verification.report import HEADING

MOST_PARTS = 4096  #: micro-batches
LENGTH = 32  #: positions of a sample, by default
#: Options of the job that do not go with a page of strategies/ or an engine of the user.
OF_MODELS = ("model", "images", "dropout", "precision", "device", "transport", "mixture", "lora", "composition")
OF_OWN = ("input_shape", "tokens", "classes")  # for an engine of the user only
WIDTH, HIDDEN, HEADS = 24, 54, 6  # sizes of the small models of strategies/


@click.command(cls=LongCommand, short_help="Compare a sharded engine with one device.")
@click.argument("engine", metavar="[MODULE:NAME|FILE.py:NAME]", required=False)
@click.option("--steps", type=WholeRange(min=1), default=3, help="Optimizer steps.")
@click.option(
    "--tolerance",
    type=NumberRange(0, min_open=True),
    help="Largest difference, relative to a tensor's largest element. [default: 1e-9]",
)
@click.option("--input-shape", metavar="N,N,...", help="For an engine of your own: shape of whole inputs, batch first.")
@click.option(
    "--tokens", type=WholeRange(min=1), help="For an engine of your own: inputs are whole numbers below this."
)
@click.option(
    "--classes", type=WholeRange(min=1), help="For an engine of your own: targets are whole numbers below this."
)
@click.option(
    "--finite-differences/--no-finite-differences",
    default=None,
    help="First compare gradients on one device with finite differences of the loss. [default: for code of your own]",
)
@click.option(
    "--import", "imported", metavar="PATH", help="Compare the model of a folder or GGUF file with --reference."
)
@click.option("--reference", metavar="FILE.npz", help="With --import: tokens, and another program's outputs of layers.")
@takes_job(
    *OF_MODELS,
    *("batch_size", "micro_batches", "length", "optimizer", "learning_rate", "seed", "strategy", "check"),
    defaults={"batch_size": 16, "length": LENGTH, "learning_rate": 1e-3},
    help={
        "precision": "With bfloat16 or float16: compare roundings, with sums in float64. [default: float64]",
        "strategy": f"Verify a page of strategies/ instead: {', '.join(STRATEGIES)}.",
    },
)
@click.pass_context
def verify(context: click.Context, engine: str | None, job: TrainConfig, **options: Any) -> None:
    """Make a few steps sharded and on a single device, in float64 and in lockstep, and compare all tensors.

    The exit code is 0 if outputs, losses, gradients and parameters agree. Otherwise it is 1, and the first tensor that
    differs is named: its layer, index and ranks, and which reduction is missing or doubled, if that explains it.

    \b
      mpiexec -n 8 python -m spmd_engine verify --mesh pipe=2,data=2,model=2 --zero 1
      mpiexec -n 2 python -m spmd_engine verify --model models/SmolLM2-135M --mesh model=2 --lora-rank 8 --batch-size 4
      mpiexec -n 4 python -m spmd_engine verify mine:Engine --mesh data=4 --input-shape 16,8

    Parameters of a model are random, also for a model by path; with adapters, its own weights are read.

    An engine of your own is a class or a function in a MODULE, as in import, or in a FILE.py. It is called with mesh=
    and dtype= if it takes these, and with the values behind its name, as in 'mine:Engine(6, hidden=11)'. It is compared
    with itself on one rank, whose gradients are first compared with finite differences of its loss. Inputs and targets
    are random, and parameters that are all 0 are filled, since zeros hide mistakes. Targets have the shape of the
    outputs or, with --classes, are whole numbers, one for each row of outputs.

    --import compares trained weights with activations of another program: an .npz of tokens and of arrays with the
    names of layers, or hidden_states.0, hidden_states.1, ..., logits. It names the first layer that differs, and where.
    scripts/reference_activations.py writes such a file with transformers.
    """
    of_models = set(chosen_settings(TrainConfig, OF_MODELS)) - {"mesh"}
    if engine is None and job.model.engine is not None:
        engine, of_models = job.model.name, of_models - {"model"}
    model_options = [name for name in context.params if name in of_models and context.params[name] is not None]
    if engine and job.strategy:
        raise UsageError(f"verify {engine} with --strategy {job.strategy}: omit one of them")
    if engine and context.params["config"]:
        raise UsageError(f"verify {engine} with --config: an engine of your own is not a job; omit --config")
    if (engine or job.strategy) and model_options:
        listed = ", ".join(map(_flag, model_options))
        raise UsageError(f"verify {engine or job.strategy}: it has a model and a strategy of its own; omit {listed}")
    for name in OF_OWN:
        if options[name] and not engine:
            raise UsageError(f"{_flag(name)} goes with an engine of your own: verify MODULE:NAME")
    if bool(options["imported"]) != bool(options["reference"]):
        raise UsageError("--import PATH and --reference FILE.npz go together; give both")
    if options["imported"] and job.composition.assigned:
        raise UsageError(
            f"--import with --assign {job.composition.assign}: it compares layers of this rank; omit --assign"
        )
    if job.data.micro_batches > MOST_PARTS:
        raise UsageError(f"--micro-batches {job.data.micro_batches}: verify takes at most {MOST_PARTS}")
    emulation = emulated() if job.model.dtype in HALVES else nullcontext()
    with _open_mesh(job) as mesh, mesh.others as others, emulation:
        if others.have_this:
            if order := others.take():
                described = TrainConfig.from_json(order, "the order of rank 0")
                model = described.model.permitted_by(job.model)
                follow_orders(build_engine(model, mesh, described.composition, device=job.device))
            return
        if options["imported"]:
            paths = options["imported"], options["reference"]
            if not verify_import(*paths, mesh, _composition(job, mesh), job.device, options["tolerance"]):
                sys.exit(1)
            return
        what = job, mesh, options
        report = _verify_own(engine, *what) if engine or job.strategy else _verify_model(*what)
        if mesh.rank == 0:
            click.echo(report.verdict)
        if not report.agrees:
            sys.exit(1)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _composition(job: TrainConfig, mesh: Mesh) -> ParallelConfig:
    composition = job.composition.changed(mesh=mesh.all_axes)
    print_notices(composition.check(mesh.all_axes))
    return composition


def _open_mesh(job: TrainConfig) -> Mesh:
    """Open the job's mesh; for a page of strategies, by default a mesh with the axes of that page."""
    if job.strategy and not job.composition.mesh:
        return open_mesh(job, default_axes(strategy_named(job.strategy), world().size))
    return open_mesh(job, beside=True)


def _verify_model(job: TrainConfig, mesh: Mesh, options: dict[str, Any]) -> Report:
    composition = _composition(job, mesh)
    if composition.compress != "none" and not options["tolerance"]:
        raise UsageError(
            f"verify --compress {composition.compress}: compression changes sums, and one device does not compress. "
            "Omit it, or give the difference that is acceptable: --tolerance"
        )
    half = job.model.dtype in HALVES
    given = with_shape(job.model, mesh.group())
    model = given if half else given.changed(dtype="float64")
    engine = engine_of_model(model, mesh, composition, device=job.device)
    if mesh.rank == 0:
        mesh.others.send(job.changed(model=model, composition=composition).as_json(), mesh.others.ranks)
    plain, axes = ParallelConfig(), {"data": 1}
    if "context" in mesh.axes:  # one device needs no other context method
        plain, axes = ParallelConfig(context_method="gather"), axes | {"context": 1}

    def on_one_device(model: ModelConfig) -> ShardedEngine | None:
        return on_rank_zero(mesh.group(), lambda: engine_of_model(model, mesh_of_one(axes), plain, device=job.device))

    reference = on_one_device(model)
    exact = on_one_device(given.changed(dtype="float64")) if half else None
    batches = batches_for_model(
        engine.model,
        job.data.batch_size,
        length=job.data.length or LENGTH,
        micro_batches=job.data.micro_batches,
        seed=job.model.seed,
    )
    return _compare(job.model.name, engine, reference, batches, job, options, own=is_code(job.model.name), exact=exact)


def _verify_own(name: str | None, job: TrainConfig, mesh: Mesh, options: dict[str, Any]) -> Report:
    """Verify an engine of the user, by its name; None: the page of strategies/ that the job names."""
    given, data = options["input_shape"], job.data
    if name is None:
        name = job.strategy
        assert name
        page = strategy_named(name)
        if missing := [axis for axis in page.axes if axis not in mesh.axes]:
            raise UsageError(f"--strategy {name} with --mesh {mesh}: it also needs the axes {', '.join(missing)}")
        sizes = {"b": data.batch_size, "s": data.length, "d": WIDTH, "h": IMAGE[0], "w": IMAGE[1], "c": WIDTH}
        shape = tuple(sizes[letter] for letter in page.sample.split())
        make = partial(page, WIDTH, HEADS if "heads" in page.sizes else HIDDEN)
    elif given:
        make = code_named(name, "verify", named_in="")
        shape = numbers_of(given, "--input-shape", "whole numbers, as in 16,8", 1)
    else:
        raise UsageError(f"verify {name} needs --input-shape N,N,...: the shape of whole inputs, the batch first")
    engine, reference = engine_and_reference(make, mesh)
    check_mesh(name, engine, mesh, job.composition.mesh)
    no_batch: Any = None  # no step runs
    started = compare(engine, reference, no_batch, steps=0)
    if not started.agrees:  # fill_zeros would hide this difference
        return started
    fill_zeros(engine, reference, job.model.seed)
    batches = batches_of_shape(
        engine,
        reference,
        shape,
        micro_batches=data.micro_batches,
        seed=job.model.seed,
        below=options["tokens"],
        classes=options["classes"],
    )
    return _compare(name, engine, reference, batches, job, options, own=True)


def _compare(
    name: str,
    engine: ShardedEngine,
    reference: ShardedEngine | None,
    batches: Callable,
    job: TrainConfig,
    options: dict[str, Any],
    own: bool,
    exact: ShardedEngine | None = None,
) -> Report:
    def echo(text: object) -> None:
        if engine.device_id == 0:
            click.echo(text)

    training = job.training
    echo(f"{name} on mesh {engine.mesh}, compared with one device\n")
    return compare(
        engine,
        reference,
        batches,
        steps=options["steps"],
        optimizer=AdamW if training.optimizer == "adamw" else partial(SGD, 0.9),
        rate=training.learning_rate,
        tolerance=options["tolerance"],
        finite_differences=own if options["finite_differences"] is None else options["finite_differences"],
        on_gradients=lambda check: echo(f"{check}\n"),
        on_step=lambda step: echo(f"{HEADING}\n{step}" if step.step == 1 else step),
        exact=exact,
    )


# --- ``verify --import PATH --reference FILE``: an imported model and activations of another program

TOLERANCE = 1e-4  #: difference of float32 activations, relative to a layer's largest


def verify_import(
    path: str, reference: str, mesh: Mesh, composition: ParallelConfig, device: str, tolerance: float | None
) -> bool:
    """Print the distance of each layer from its reference, and the first that differs; return whether all agree."""
    tolerance = tolerance or TOLERANCE
    arrays = on_all_ranks(mesh.group(), lambda: _read(reference))
    model = ModelConfig(path, dtype="float64")
    engine, pretrained = open_pretrained(model, mesh, composition, device=device, trained=False)
    distances = compare_activations(engine, arrays, tolerance)
    first = next((row for row in distances if row.place is not None), None)
    if mesh.rank > 0:
        return first is None
    click.echo(f"{path} on mesh {mesh}, compared with {reference}\n")
    width = max(len(row.layer) for row in distances)
    for row in distances:
        where = "" if row.place is None else f"  off, first at sample {row.place[0]}, position {row.place[1]}"
        click.echo(f"{row.layer:<{width}}  {row.distance:8.1e}{where}")
    if first is None:
        click.echo(f"\nall {len(distances)} agree to {tolerance:g}")
        return True
    tensors = [source.tensor.name for name, source in pretrained.filled.items() if name.startswith(f"{first.layer}/")]
    click.echo(
        f"\n{first.layer} is the first that differs, by {first.distance:.1e} (allowed is {tolerance:g}). It has "
        f"{', '.join(dict.fromkeys(tensors)) or 'no parameters'}"
    )
    return False


def _read(path: str) -> dict[str, np.ndarray]:
    arrays = {name: read_npz(path, name) for name in npz_names(path)}
    return {name: array.open() if isinstance(array, MappedArray) else array for name, array in arrays.items()}
