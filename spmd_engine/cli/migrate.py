"""``migrate`` and ``join``: a running job changes its shape, and takes in more ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from math import inf
from pathlib import Path
from typing import Any

import click

from spmd_engine.adaptive.joining import LockedFile, remove_unheld, runs
from spmd_engine.cli.options import LongCommand, Quantity, options_of, permitted, trust_option, values_given
from spmd_engine.cli.values import Choice, WholeNumber
from spmd_engine.engine import ModelConfig, ParallelConfig
from spmd_engine.engine.reshape import PROTOCOLS, ShapeRequest
from spmd_engine.errors import UsageError
from spmd_engine.files import naming
from spmd_engine.foreign import reading
from spmd_engine.jobs.run_job import join as join_job
from spmd_engine.observability.progress import live_migration_text
from spmd_engine.observability.run_record import JsonLines
from spmd_engine.planning.plan_result import PlanFile
from spmd_engine.runtime.activity import ranges
from spmd_engine.training import TrainConfig
from spmd_engine.training.observers import EventLog
from spmd_engine.training.run_folder import run_folder
from spmd_engine.units import SECONDS, numbers_of, readable_bytes, readable_seconds

EVERY = 0.1  #: seconds between two looks for the answer
MOST_MOVES = 8  #: pairs of ranks that a line lists


def wait_option(help: str) -> Callable:
    """The longest wait for the job; ``help`` says for what."""
    return click.option("--wait", type=Quantity(SECONDS), default="10min", help=help)


@click.command(cls=LongCommand, short_help="Change how a running job is spread over its ranks.")
@click.argument("run")
@click.option("--plan", metavar="FILE", help="Spread the model as in a file of 'plan --output'.")
@click.option(
    "--ranks",
    metavar="N,N,...",
    help="Ranks of the job on the mesh, with rank 0. [default: as now if as many, else the first]",
)
@click.option(
    "--protocol",
    type=Choice(PROTOCOLS),
    help="How arrays move: between two steps, in memory or by a checkpoint; or live, while steps go on. "
    "[default: stop-and-copy]",
)
@click.option(
    "--experts",
    metavar="LAYER=N:N...,...",
    help="The part of each expert of a layer, along the axes that split experts, as in block0/moe=0:1:1:0. "
    "[default: as now if the axes stay, else even parts]",
)
@click.option("--at", metavar="STEP", type=WholeNumber(), help="Change after this step. [default: the next]")
@wait_option("Longest wait for the answer; a live migration that takes longer is given up.")
@click.option(
    "--dry-run", is_flag=True, help="Print what would move, and for how long, by each protocol; move nothing."
)
@options_of(TrainConfig, ["composition"], without=["compress"])
def migrate(
    run: str,
    plan: str | None,
    ranks: str | None,
    protocol: str | None,
    experts: str | None,
    at: int | None,
    wait: float,
    dry_run: bool,
    **options: Any,
) -> None:
    """Change the mesh, the ZeRO stage or other options of the job that trains in the folder RUN, between two steps.

    Parameters and optimizer state move, and the job goes on with the same results, to rounding. Options that
    are not given stay as they are, or become their defaults if they do not fit the new mesh. A mesh of fewer ranks than
    were started leaves the others idle until they are taken back. A change that is impossible is refused with its
    reason, and the job continues as it was.

    \b
      python -m spmd_engine migrate gpt-nano-1 --mesh data=2,model=2 --zero 1
      python -m spmd_engine migrate gpt-nano-1 --mesh data=2 --ranks 0,3
      python -m spmd_engine migrate gpt-nano-1 --stages 0,5 --protocol live
      python -m spmd_engine migrate gpt-nano-1 --mesh data=2,model=2 --dry-run
    """
    folder = run_folder(run)
    log = folder / EventLog.NAME
    if not log.is_file():
        raise UsageError(f"{folder}: no such run; name the folder that 'train' writes, as in runs/gpt-nano-1")
    values, model = values_given(options), None
    if plan is not None:
        if values:
            raise UsageError(f"--{next(iter(values)).replace('_', '-')} with --plan {plan}, which decides it: omit one")
        file = PlanFile.read(plan)
        values, model = file.composition.as_json(), file.model.name
        values.pop("compress")
    if not values and ranks is None and experts is None:
        raise UsageError("migrate needs the new shape: --mesh, --zero, another option of it, --ranks, or --plan")
    if dry_run and protocol is not None:
        raise UsageError(f"--protocol {protocol} with --dry-run, which prints all protocols: omit one")
    ParallelConfig().changed(**values)  # raises UsageError for a value that no mesh permits
    how: dict[str, Any] = {"within": wait, "experts": _experts(experts), "dry_run": dry_run}
    request = ShapeRequest(values, _ranks(ranks), at or 0, model, os.urandom(8).hex(), protocol or PROTOCOLS[0], **how)
    events = JsonLines(log)
    events.open()
    for _ in events:  # those before the request
        pass
    if not runs(folder):
        raise UsageError(f"{folder} has no running job; 'train --resume --run {folder}' takes these options, too")
    file = _ask(folder / ShapeRequest.FILE, request)
    try:
        with reading(f"{log}: its answer cannot be read"):
            _tell(folder, _answer(folder, events, request.id, wait))
    finally:
        file.close()  # withdraws the request if the job has not removed it


def _ask(path: Path, request: ShapeRequest) -> LockedFile:
    """Write the request, unless that of another ``migrate`` waits there. That of a killed one is replaced."""
    try:
        with naming(path):
            remove_unheld(path)
            return LockedFile.create(path, request.as_json())
    except FileExistsError:
        raise UsageError(f"{path}: another 'migrate' waits for its answer; end it to withdraw its request") from None


def _tell(folder: Path, answer: Mapping[str, Any]) -> None:
    """Print the answer of the job, or raise it as UsageError if it is a refusal."""
    if answer["event"] not in ("reshaped", "estimated"):
        raise UsageError(f"{folder}: refused after step {answer['step']}: {answer.get('why', 'its run has ended')}")
    for notice in answer["notices"]:
        click.echo(f"spmd_engine: note: {notice}", err=True)
    if answer["event"] == "reshaped":
        click.echo(f"{folder}: after step {answer['step']} {answer['after']} (before: {answer['before']})")
        return
    click.echo(f"{folder}: a change after step {answer['step']} from {answer['from']} to {answer['to']} would take:")
    for protocol, estimate in answer["protocols"].items():
        click.echo(f"  {protocol:<16}  {_estimate_text(estimate)}")
    click.echo("nothing has changed; without --dry-run, --protocol chooses one")


def _estimate_text(estimate: Mapping[str, Any]) -> str:
    """What a protocol would move, and how long: see ``estimate_change``."""
    if "refused" in estimate:
        return f"not possible: {estimate['refused']}"
    moves = [f"{ranks} {readable_bytes(nbytes)}" for ranks, nbytes in estimate["moves"].items()]
    listed = ", ".join(moves[:MOST_MOVES]) + (f" and {len(moves) - MOST_MOVES} more" if moves[MOST_MOVES:] else "")
    what = f"{readable_bytes(estimate['bytes'])} between ranks" + (f" ({listed})" if moves else "")
    if "saved" in estimate:
        what = f"{readable_bytes(estimate['saved'])} to the disk, {readable_bytes(estimate['loaded'])} back"
    times = readable_seconds(estimate["seconds"]), readable_seconds(estimate["stops"])
    stops = "while steps stop" if estimate["stops"] == estimate["seconds"] else f"of which steps stop for {times[1]}"
    return f"about {times[0]}, {stops}; {what}"


def _ranks(text: str | None) -> tuple[int, ...] | None:
    """The numbers in ``--ranks``; None for None."""
    return numbers_of(text, "--ranks", "the numbers of ranks, as in 0,1,3") if text is not None else None


def _experts(text: str | None) -> dict[str, list[int]] | None:
    """``"block0/moe=0:1:1"`` as {"block0/moe": [0, 1, 1]}."""
    if text is None:
        return None
    try:
        terms = [term.split("=") for term in text.split(",")]
        return {layer.strip(): [int(part) for part in parts.split(":")] for layer, parts in terms}
    except ValueError:
        raise UsageError(f"--experts {text}: write the part of each expert, as in block0/moe=0:1:1:0") from None


def _answer(folder: Path, events: JsonLines, request: str, wait: float) -> dict[str, Any]:
    """The event of the run in ``folder`` that answers a request, among those that are not read yet."""
    end = time.monotonic() + wait
    while time.monotonic() < end:
        goes_on = runs(folder)  # before the events: it may write its answer, and end
        events.open()
        for event in events:
            if event.get("request") == request and event.get("event") == "migrating":
                click.echo(f"{folder}: {live_migration_text(event['step'], event)}")
                end = inf  # the job itself gives it up
            elif event.get("request") == request and "event" in event:
                return event
            if event.get("event") == "closed":
                raise UsageError(f"{folder}: the job has ended, after step {event.get('step')}, without the change")
        if not goes_on:
            raise UsageError(f"{folder}: the job has ended without an answer; 'train --resume' continues its run")
        time.sleep(EVERY)
    raise UsageError(f"{folder}: no answer in {wait:g} s, and the request is withdrawn; does the job still run?")


# --- ``join``: on ranks of another launcher


@click.command(cls=LongCommand, short_help="Add ranks to a running job.")
@click.argument("run")
@click.option(
    "--ranks",
    metavar="N,N,...",
    help="Ranks of the job on the new mesh, with rank 0. [default: the first]",
)
@wait_option("Longest wait until the job takes these ranks in.")
@trust_option
@options_of(TrainConfig, ["model", "composition"], without=["compress"], help={"model": "The run's own code, by name."})
def join(run: str, ranks: str | None, wait: float, trust_code: bool, **options: Any) -> None:
    """Join the job that trains in the folder RUN, with all ranks that this mpiexec has started.

    They read the job's configuration and data while the job goes on; between two of its steps both worlds merge, and
    the new ranks get numbers after those of the others. Parameters and optimizer state come from the memory of the
    running ranks. With --mesh, or another option of the job's shape, the job changes its shape at once; without, the
    new ranks are idle until 'migrate' puts them onto the mesh. They end with the job, with the same exit code.

    \b
      mpiexec -n 2 python -m spmd_engine join gpt-nano-1 --mesh data=6
      mpiexec -n 2 python -m spmd_engine join gpt-nano-1
    """
    values, request = values_given(options), None
    named = values.pop("model", None)
    if values or ranks is not None:
        ParallelConfig().changed(**values)  # raises UsageError for a value that no mesh permits
        request = ShapeRequest(values, _ranks(ranks))

    def entered(numbers: list[int], step: int) -> None:
        click.echo(f"spmd_engine: joined {run} after step {step}, as rank(s) {ranges(numbers)}", err=True)

    def permit(model: ModelConfig) -> ModelConfig:
        if named not in (None, model.name):
            raise UsageError(f"--model {named} with {run}, whose model is {model.name}: omit --model")
        return permitted(model, named, trust_code)

    join_job(run, request, wait=wait, entered=entered, permit=permit)
