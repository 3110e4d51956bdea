"""``verify``: whether a strategy computes what one device computes, and if not, where and why."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import click
import numpy as np
from click.core import ParameterSource

from spmd_engine.checkpoints.pretrained import open_pretrained, with_shape
from spmd_engine.cli.adapters import lora_of, lora_options
from spmd_engine.cli.composition import COMPOSITION, composition_of, composition_options
from spmd_engine.cli.config_file import config_option
from spmd_engine.cli.engine_by_name import check_mesh, engine_by_name
from spmd_engine.cli.experts import expert_options, mixture_of
from spmd_engine.cli.options import (
    check_option,
    device_option,
    image_shape,
    images_option,
    mesh_option,
    model_option,
    open_mesh,
)
from spmd_engine.comm.agreement.rank_zero import on_all_ranks, on_rank_zero
from spmd_engine.comm.mesh import Mesh
from spmd_engine.comm.world import world
from spmd_engine.engine.base import ShardedEngine
from spmd_engine.engine.optimizers import SGD, AdamW
from spmd_engine.engine.parallel_config import ModelConfig, ParallelConfig
from spmd_engine.errors import UsageError
from spmd_engine.formats import MappedArray, npz_names, read_npz
from spmd_engine.strategies import STRATEGIES, default_axes, strategy_named
from spmd_engine.strategies.two_convolutions import IMAGE
from spmd_engine.training.train_config import LORA, MIXTURE, ROUTER
from spmd_engine.verification import (
    Distances,
    GradientCheck,
    Report,
    engine_and_reference,
    engine_of_model,
    fill_zeros,
    mesh_of_one,
)
from spmd_engine.verification import verify as compare
from spmd_engine.verification.activations import compare_activations
from spmd_engine.verification.reference import batches_for_model, batches_of_shape
from spmd_engine.verification.report import HEADING

POSITIVE, PARTS = click.IntRange(min=1), click.IntRange(1, 4096)
#: Options that mean nothing to an engine of one's own.
OF_MODELS = ("model", "images", "dropout", "device", *MIXTURE, *ROUTER, *LORA, *COMPOSITION)
OF_OWN = ("input_shape", "tokens", "classes")  # and to nothing else
WIDTH, HIDDEN, HEADS = 24, 54, 6  # of the small models of strategies/


@click.command(short_help="Compare a sharded engine with one device.")
@config_option
@click.argument("engine", metavar="[MODULE:NAME|FILE.py:NAME]", required=False)
@model_option
@images_option
@mesh_option
@click.option("--steps", type=POSITIVE, default=3, show_default=True, help="Optimizer steps.")
@click.option("--batch-size", type=POSITIVE, default=16, show_default=True, help="Samples a step, over all ranks.")
@click.option("--micro-batches", type=PARTS, default=1, show_default=True, help="Parts of a batch, one by one.")
@click.option("--length", type=POSITIVE, default=32, show_default=True, help="Positions of a sample, of sequences.")
@click.option("--optimizer", type=click.Choice(["adamw", "sgd"]), default="adamw", show_default=True)
@click.option("--learning-rate", type=click.FloatRange(0, 1e30), default=1e-3, show_default=True)
@click.option("--dropout", type=click.FloatRange(0, 1, max_open=True), default=0.0, show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of parameters and samples.")
@click.option(
    "--tolerance",
    type=click.FloatRange(0, min_open=True),
    help="Of differences, relative to a tensor's largest element. [default: 1e-9]",
)
@click.option("--strategy", metavar="NAME", help=f"Verify a page of strategies/ instead: {', '.join(STRATEGIES)}.")
@click.option("--input-shape", metavar="N,N,...", help="Of an engine of your own: of whole inputs, the batch first.")
@click.option("--tokens", type=POSITIVE, help="Of an engine of your own: inputs are whole numbers below this.")
@click.option("--classes", type=POSITIVE, help="Of an engine of your own: targets are whole numbers below this.")
@click.option(
    "--finite-differences/--no-finite-differences",
    default=None,
    help="Compare one device's gradients with finite differences of its loss first. [default: of engines of one's own]",
)
@click.option("--import", "imported", metavar="PATH", help="Verify a model's folder, or GGUF file, beside --reference.")
@click.option("--reference", metavar="FILE.npz", help="With --import: tokens, and what layers make of them elsewhere.")
@expert_options
@lora_options
@composition_options
@device_option
@check_option
@click.pass_context
def verify(context: click.Context, engine: str | None, **options: Any) -> None:
    """Make a few steps sharded and on a single device, in float64 and in lockstep, and compare everything.

    Ends with code 0 if outputs, losses, gradients and parameters agree. Else with code 1, after naming the first
    tensor that does not: its layer, where it is off and on which ranks, and which reduction is missing or made twice,
    if that explains it.

    \b
      mpiexec -n 8 python -m spmd_engine verify --mesh pipe=2,data=2,model=2 --zero 1
      mpiexec -n 2 python -m spmd_engine verify --model models/SmolLM2-135M --mesh model=2 --lora-rank 8 --batch-size 4
      mpiexec -n 4 python -m spmd_engine verify mine:Engine --mesh data=4 --input-shape 16,8

    Parameters of a model are random, of one by path, too; but with adapters its own weights are read.

    An engine of your own, a class or a function in a MODULE as in import or in a FILE.py, is made with mesh=... and
    dtype=... if it takes these; further values stand behind its name, 'mine:Engine(6, hidden=11)'. It is compared with
    itself on one rank, whose gradients are first compared with finite differences of its loss. Inputs and targets are
    random, and parameters that are all 0 are filled, since zeros hide mistakes. Targets are like the outputs or, with
    --classes, whole numbers, one for each row of outputs.

    With --import, weights that others have trained are beside activations that their program made, an .npz of tokens
    and of arrays called as layers are, or hidden_states.0, hidden_states.1, ..., logits: the first layer that differs
    is named, and where. scripts/reference_activations.py makes one with transformers.
    """
    strategy = options["strategy"]
    given = [each for each in OF_MODELS if context.get_parameter_source(each) is not ParameterSource.DEFAULT]
    if engine and strategy:
        raise UsageError(f"verify {engine} or --strategy {strategy}, one of them")
    if (engine or strategy) and given:
        listed = ", ".join("--" + each.replace("_", "-") for each in given)
        raise UsageError(f"verify {engine or strategy}: it is a strategy and a model of its own, without {listed}")
    for each in OF_OWN:
        if options[each] and not engine:
            raise UsageError(f"--{each.replace('_', '-')} says what an engine of your own takes: verify MODULE:NAME")
    if bool(options["imported"]) != bool(options["reference"]):
        raise UsageError("verify --import PATH --reference FILE.npz: they go together")
    with _open_mesh(options) as mesh:
        if options["imported"]:
            composition = composition_of(options, mesh.axes)
            where = options["imported"], options["reference"]
            if not verify_import(*where, mesh, composition, options["device"], options["tolerance"]):
                sys.exit(1)
            return
        if strategy:
            report = _verify_page(strategy, options, mesh)
        elif engine:
            report = _verify_own(engine, options, mesh)
        else:
            report = _verify_model(options, mesh)
        if mesh.rank == 0:
            click.echo(report.verdict)
    if not report.agrees:
        sys.exit(1)


def _open_mesh(options: dict[str, Any]) -> Mesh:
    """The mesh that was asked for; of a page of strategies, one with its axes."""
    if options["strategy"] and not options["mesh"]:
        return Mesh(check=options["check"], **default_axes(strategy_named(options["strategy"]), world().size))
    return open_mesh(options["mesh"], check=options["check"])


def _verify_model(options: dict[str, Any], mesh: Mesh) -> Report:
    composition = composition_of(options, mesh.axes)
    if options["compress"] != "none" and not options["tolerance"]:
        raise UsageError(
            f"verify --compress {options['compress']}: it changes sums on purpose, which one device does not. Leave it "
            "out, or say by --tolerance how much is fine"
        )
    shape = image_shape(options["model"], options["images"])
    images, mixture = asdict(shape) if shape else None, mixture_of(options)
    model = ModelConfig(options["model"], options["dropout"], "float64", options["seed"], images, mixture)
    model = with_shape(model.changed(lora=lora_of(options)), mesh.group())
    engine = engine_of_model(model, mesh, composition, device=options["device"])
    alone, axes = ParallelConfig(), {"data": 1}
    if "context" in mesh.axes:  # whatever the ranks' method, one device needs none
        alone, axes = ParallelConfig(context_method="gather"), axes | {"context": 1}
    reference = on_rank_zero(
        mesh.group(), lambda: engine_of_model(model, mesh_of_one(axes), alone, device=options["device"])
    )
    batches = batches_for_model(
        engine.model,
        options["batch_size"],
        length=options["length"],
        micro_batches=options["micro_batches"],
        seed=options["seed"],
    )
    return _compare(options["model"], engine, reference, batches, options, own=False)


def _verify_own(name: str, options: dict[str, Any], mesh: Mesh) -> Report:
    if not options["input_shape"]:
        raise UsageError(f"verify {name} needs --input-shape N,N,...: of whole inputs, the batch first")
    return _verify_made(name, engine_by_name(name, "verify"), _parse_shape(options["input_shape"]), options, mesh)


def _verify_page(name: str, options: dict[str, Any], mesh: Mesh) -> Report:
    page = strategy_named(name)
    if missing := [axis for axis in page.axes if axis not in mesh.axes]:
        raise UsageError(f"--strategy {name} with --mesh {mesh}: it needs the axes {', '.join(missing)}, too")
    sizes = {"b": options["batch_size"], "s": options["length"], "d": WIDTH}
    sizes |= {"h": IMAGE[0], "w": IMAGE[1], "c": WIDTH}
    shape = tuple(sizes[letter] for letter in page.sample.split())
    return _verify_made(name, partial(page, WIDTH, HEADS if "heads" in page.sizes else HIDDEN), shape, options, mesh)


def _verify_made(
    name: str, make: Callable[..., Any], shape: tuple[int, ...], options: dict[str, Any], mesh: Mesh
) -> Report:
    engine, reference = engine_and_reference(make, mesh)
    check_mesh(name, engine, mesh, options["mesh"])
    started = compare(engine, reference, lambda engine, step: None, steps=0)
    if not started.agrees:  # which the same values for all would hide
        return started
    fill_zeros(engine, reference, options["seed"])
    batches = batches_of_shape(
        engine,
        reference,
        shape,
        micro_batches=options["micro_batches"],
        seed=options["seed"],
        below=options["tokens"],
        classes=options["classes"],
    )
    return _compare(name, engine, reference, batches, options, own=True)


def _compare(
    name: str,
    engine: ShardedEngine,
    reference: ShardedEngine | None,
    batches: Callable,
    options: dict[str, Any],
    own: bool,
) -> Report:
    def say(text: object) -> None:
        if engine.device_id == 0:
            click.echo(text)

    def say_gradients(check: GradientCheck) -> None:
        say(f"{check}\n")

    def say_step(distances: Distances) -> None:
        say(f"{HEADING}\n{distances}" if distances.step == 1 else distances)

    say(f"{name} on mesh {engine.mesh}, beside one device\n")
    return compare(
        engine,
        reference,
        batches,
        steps=options["steps"],
        optimizer=AdamW if options["optimizer"] == "adamw" else partial(SGD, 0.9),
        rate=options["learning_rate"],
        tolerance=options["tolerance"],
        finite_differences=own if options["finite_differences"] is None else options["finite_differences"],
        on_gradients=say_gradients,
        on_step=say_step,
    )


def _parse_shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(n) for n in text.split(","))
    except ValueError:
        raise UsageError(f"--input-shape {text}: write whole numbers, as in 16,8") from None
    if min(shape) < 1:
        raise UsageError(f"--input-shape {text}: sizes are from 1")
    return shape


# --- ``verify --import PATH --reference FILE``: an imported model beside activations of another program


TOLERANCE = 1e-4  #: of activations in float32, relative to a layer's largest


def verify_import(
    path: str, reference: str, mesh: Mesh, composition: ParallelConfig, device: str, tolerance: float | None
) -> bool:
    """Print how far each layer is from its reference, and which is the first that differs; whether none does."""
    tolerance = tolerance or TOLERANCE
    arrays = on_all_ranks(mesh.group(), lambda: _read(reference))
    engine, pretrained = open_pretrained(ModelConfig(path, dtype="float64"), mesh, composition, device=device)
    distances = compare_activations(engine, arrays, tolerance)
    first = next((each for each in distances if each.place is not None), None)
    if mesh.rank > 0:
        return first is None
    click.echo(f"{path} on mesh {mesh}, beside {reference}\n")
    width = max(len(each.layer) for each in distances)
    for each in distances:
        said = "" if each.place is None else f"  off, first at sample {each.place[0]}, position {each.place[1]}"
        click.echo(f"{each.layer:<{width}}  {each.distance:8.1e}{said}")
    if first is None:
        click.echo(f"\nall {len(distances)} agree to {tolerance:g}")
        return True
    tensors = [each.tensor.name for name, each in pretrained.filled.items() if name.startswith(f"{first.layer}/")]
    click.echo(
        f"\n{first.layer} is the first that differs, by {first.distance:.1e} (allowed is {tolerance:g}). It has "
        f"{', '.join(dict.fromkeys(tensors)) or 'no parameters'}"
    )
    return False


def _read(path: str) -> dict[str, np.ndarray]:
    arrays = {name: read_npz(path, name) for name in npz_names(path)}
    return {name: each.open() if isinstance(each, MappedArray) else each for name, each in arrays.items()}
