"""``verify``: whether a strategy computes what one device computes, and if not, where and why."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import click

from spmd_engine.cli.composition import build_engine, check_composition, composition_options
from spmd_engine.cli.options import check_option, device_option, mesh_option, open_mesh
from spmd_engine.comm.agreement import on_rank_zero
from spmd_engine.comm.mesh import Mesh
from spmd_engine.engine.base import ShardedEngine
from spmd_engine.engine.optimizers import SGD, AdamW
from spmd_engine.errors import UsageError
from spmd_engine.models.names import MODELS
from spmd_engine.verify import Report, engine_and_reference, fill_zeros, mesh_of_one, verify as compare
from spmd_engine.verify.report import HEADING
from spmd_engine.verify.samples import batches_for_model, batches_of_shape

POSITIVE = click.IntRange(min=1)


@click.command(short_help="Compare a sharded engine with one device.")
@click.argument("engine", metavar="[MODULE:NAME]", required=False)
@click.option("--model", default="gpt-nano", show_default=True, help=f"One of {', '.join(MODELS)}.")
@mesh_option
@click.option("--steps", type=POSITIVE, default=3, show_default=True, help="Optimizer steps.")
@click.option("--batch-size", type=POSITIVE, default=16, show_default=True, help="Samples a step, over all ranks.")
@click.option("--micro-batches", type=POSITIVE, default=1, show_default=True, help="Parts of a batch, one by one.")
@click.option("--context", type=POSITIVE, default=32, show_default=True, help="Positions of a sample, of sequences.")
@click.option("--optimizer", type=click.Choice(["adamw", "sgd"]), default="adamw", show_default=True)
@click.option("--learning-rate", type=click.FloatRange(0, 1e30), default=4e-3, show_default=True)
@click.option("--dropout", type=click.FloatRange(0, 1, max_open=True), default=0.0, show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of parameters and samples.")
@click.option(
    "--tolerance",
    type=click.FloatRange(0, min_open=True),
    help="Of differences, relative to a tensor's largest element. [default: 1e-9]",
)
@click.option("--input-shape", metavar="N,N,...", help="Of an engine of your own: of whole inputs, the batch first.")
@click.option("--tokens", type=POSITIVE, help="Of an engine of your own: inputs are whole numbers below this.")
@composition_options
@device_option
@check_option
def verify(engine: str | None, **options: Any) -> None:
    """Make a few steps sharded and on a single device, in float64 and in lockstep, and compare everything.

    Ends with code 0 if outputs, losses, gradients and parameters agree. Else with code 1, after naming the first
    tensor that does not: its layer, where it is off and on which ranks, and which reduction is missing or made twice,
    if that explains it.

    \b
      mpiexec -n 8 python -m spmd_engine verify --mesh pipe=2,data=2,model=2 --zero 1
      mpiexec -n 4 python -m spmd_engine verify mine:Engine --mesh data=4 --input-shape 16,8

    An engine of your own, a class or a function in a MODULE as in import, is made with mesh=... and dtype=... if it
    takes these; further values stand behind its name, 'mine:Engine(6, hidden=11)'. Inputs and targets are random, and
    parameters that are all 0 are filled, since zeros hide mistakes.
    """
    with open_mesh(options["mesh"], check=options["check"]) as mesh:
        check_composition(options, mesh.axes)
        report = _verify_own(engine, options, mesh) if engine else _verify_model(options, mesh)
        if mesh.rank == 0:
            click.echo(report.verdict)
    if not report.agrees:
        sys.exit(1)


def _verify_model(options: dict[str, Any], mesh: Mesh) -> Report:
    config = {**options, "dtype": "float64"}
    engine = build_engine(config, mesh, device=options["device"])
    alone = {name: config[name] for name in ("model", "dropout", "seed", "dtype")} | {"context_method": "gather"}
    one = mesh_of_one(("data", "context"))
    reference = on_rank_zero(mesh.group(), lambda: build_engine(alone, one, device=options["device"]))
    batches = batches_for_model(
        engine.model,
        options["batch_size"],
        length=options["context"],
        micro_batches=options["micro_batches"],
        seed=options["seed"],
    )
    return _compare(options["model"], engine, reference, batches, options)


def _verify_own(name: str, options: dict[str, Any], mesh: Mesh) -> Report:
    if not options["input_shape"]:
        raise UsageError(f"verify {name} needs --input-shape N,N,...: of whole inputs, the batch first")
    shape = _parse_shape(options["input_shape"])
    engine, reference = engine_and_reference(_find(name), mesh)
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
    )
    return _compare(name, engine, reference, batches, options)


def _compare(
    name: str, engine: ShardedEngine, reference: ShardedEngine | None, batches: Callable, options: dict[str, Any]
) -> Report:
    say = click.echo if engine.device_id == 0 else lambda text: None
    say(f"{name} on mesh {engine.mesh}, beside one device\n\n{HEADING}")
    return compare(
        engine,
        reference,
        batches,
        steps=options["steps"],
        optimizer=AdamW if options["optimizer"] == "adamw" else partial(SGD, 0.9),
        rate=options["learning_rate"],
        tolerance=options["tolerance"],
        on_step=say,
    )


def _parse_shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(n) for n in text.split(","))
    except ValueError:
        raise UsageError(f"--input-shape {text}: write whole numbers, as in 16,8") from None
    if min(shape) < 1:
        raise UsageError(f"--input-shape {text}: sizes are from 1")
    return shape


def _find(name: str) -> Callable[..., Any]:
    """What ``MODULE:NAME`` or ``MODULE:NAME(6, hidden=11)`` is, with the values it is to be called with."""
    module, colon, call = name.partition(":")
    attribute, parenthesis, _ = call.partition("(")
    if not (module and colon and attribute):
        raise UsageError(f"verify {name}: write MODULE:NAME")
    arguments, keywords = [], {}
    try:
        if parenthesis:
            parsed = ast.parse(call.strip(), mode="eval").body
            arguments = [ast.literal_eval(each) for each in parsed.args]
            keywords = {each.arg: ast.literal_eval(each.value) for each in parsed.keywords}
        return partial(getattr(importlib.import_module(module), attribute), *arguments, **keywords)
    except (ImportError, AttributeError, TypeError, ValueError, SyntaxError) as error:
        raise UsageError(f"verify {name}: {error}") from error
