"""``calibrate``: measure this machine into a machine file."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from time import process_time

import click
import numpy as np
from threadpoolctl import threadpool_limits

from spmd_engine import units
from spmd_engine.cli.bench.measuring import start_ranks
from spmd_engine.cli.options import Quantity, print_notices
from spmd_engine.cli.values import FILE, Choice
from spmd_engine.comm import Mesh
from spmd_engine.comm.device_transport import open_device
from spmd_engine.comm.world import solo, world
from spmd_engine.engine import AdamW
from spmd_engine.errors import UsageError
from spmd_engine.files import check_ending, output_file
from spmd_engine.planning import analyze
from spmd_engine.planning.machine.machine import Fitted, Machine, calibrated_file, read_machine, toml_of
from spmd_engine.planning.machine.measure import IDLE, SECONDS, measure_machine, share_of_cores
from spmd_engine.planning.machine.product_choice import choose_products
from spmd_engine.planning.simulator.times import ComputeTimes
from spmd_engine.runtime.launchers import launcher_rank
from spmd_engine.training import TrainConfig, Trainer
from spmd_engine.training.workload import make_trainer, open_workload


@click.command(short_help="Measure this machine into a file that 'plan' reads.")
@click.option("--output", type=FILE, help="File to write. [default: the file that 'plan' reads]")
@click.option(
    "--seconds",
    type=Quantity(units.SECONDS),
    default=SECONDS,
    help="Time to measure matrix products and memory, from 1s to 10min.",
)
@click.option(
    *("--offload-dir", "folder"),
    metavar="FOLDER",
    default=".",
    show_default=False,
    help="Folder of --offload, whose disk is measured.",
)
@click.option("--device", type=Choice(["cpu", "cuda"]), default="cpu", help="What is measured.")
@click.option("--fit/--no-fit", default=True, help="Fit the cost of an operation to a few steps.")
@click.option("--force", is_flag=True, help="Measure also while other programs compute; the file says so.")
def calibrate(output: Path | None, seconds: float, folder: str, device: str, fit: bool, force: bool) -> None:
    """Measure matrix products by library, size and dtype, memory, links, and the disk of --offload, in under a minute.

    Under mpiexec, all ranks measure at the same time, and each pair of them measures its link. Without mpiexec, two
    ranks are started. With --device cuda, the GPUs of the ranks are measured, with the cost of a launch and of a wait.

    While other programs compute on the same cores, a message between ranks takes up to hundreds of times as long: then
    nothing is written, and the exit code is 2.

    \b
      python -m spmd_engine calibrate
      mpiexec -n 8 python -m spmd_engine calibrate --output cluster.toml
      python -m spmd_engine calibrate --device cuda --output gpu.toml
    """
    if output is not None:
        check_ending("--output", output, ".toml")
    if not 1 <= seconds <= 600:
        raise UsageError(f"--seconds {seconds:g}: it must be from 1 to 600")
    file = output or calibrated_file()
    if file is None:
        raise UsageError("there is no home folder for the file that 'plan' reads: give --output, or set SPMD_MACHINE")
    if launcher_rank() == 0:
        click.echo("measuring products, memory, links and a few steps ...", err=True)
    if world().size == 1 and device == "cpu":
        machine = _measure_on_two_ranks(seconds, fit, folder, force)
    else:
        machine = _measure(seconds, fit and device == "cpu", folder, force, device)
    if machine is not None:
        _write(file, machine)


def _measure(seconds: float, fit: bool, folder: str, force: bool, device: str = "cpu") -> Machine | None:
    """Measure on all ranks at the same time, as they compute in a job; return None except on rank 0.

    Raises UsageError if other programs compute before, between or after the measurements, unless with ``force``.
    """
    with Mesh(world()) as mesh:
        shares = [_share(mesh, force)]
        print_notices(choose_products(mesh.group(), again=True))
        machine = measure_machine(mesh, seconds, folder, open_device(mesh, device))
        shares.append(_share(mesh, force))
        steps = step_seconds(mesh) if fit else None
        shares.append(_share(mesh, force))
    if machine is None:
        return None
    if min(shares) < IDLE:
        machine = replace(machine, source=f"{machine.source}, while {_OTHERS} took {1 - min(shares):.0%} of the cores")
    return machine if steps is None else fitted(machine, steps)


_OTHERS = "other programs"


def _share(mesh: Mesh, force: bool) -> float:
    """The share of their cores that the ranks get. Collective. Raises UsageError if it is small, without ``force``."""
    share = share_of_cores(mesh)
    if share < IDLE and not force:
        raise UsageError(
            f"calibrate: {_OTHERS} take {1 - share:.0%} of the cores of these ranks, so times would be wrong; nothing "
            "is written. Calibrate when they have ended, or, to measure as it is, with --force"
        )
    return share


def _measure_on_two_ranks(seconds: float, fit: bool, folder: str, force: bool) -> Machine:
    """Measure on two ranks, or in this process if they cannot run. Raises UsageError if they find the machine busy."""
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "machine.toml"
        arguments = ["--fit" if fit else "--no-fit", "--seconds", str(seconds), "--output", str(file)]
        arguments += ["--offload-dir", folder, *["--force"] * force]
        try:
            start_ranks(2, ["-m", "spmd_engine", "calibrate", *arguments])
            return read_machine(file)
        except (UsageError, OSError) as error:
            lines = str(error).splitlines()
            if busy := [line for line in lines if f"calibrate: {_OTHERS}" in line]:
                raise UsageError(busy[0].removeprefix("spmd_engine: ")) from None
            click.echo(f"spmd_engine: note: no links were measured ({lines[0]})", err=True)
            machine = _measure(seconds, fit, folder, force)
            assert machine is not None
            return machine


def _write(file: Path, machine: Machine) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output {file}: {error.strerror or error}") from error
    with output_file(file) as opened:
        opened.write(toml_of(machine).encode())
    node = machine.nodes[0]
    speeds = ", ".join(f"{speed.most / 1e9:,.1f} GFLOP/s in {dtype}" for dtype, speed in node.speeds.items())
    click.echo(
        f"wrote {file}: products at most {speeds}; memory {node.memory_bandwidth.most / 1e9:,.1f} GB/s; between ranks "
        f"{node.inside.bandwidth / 1e9:,.1f} GB/s; disk {node.disk_read / 1e9:,.1f} GB/s read, "
        f"{node.disk_write / 1e9:,.1f} GB/s written"
    )


# --- Numbers that cannot be measured separately are fitted to whole steps of small models on one rank


#: Models and batches of the steps that are timed: for each kind of layers many small operations, few large ones, and
#: some in between.
STEPS = (
    ("mlp", 16),
    ("mlp", 512),
    ("gpt-nano", 2),
    ("gpt-nano", 8),
    ("gpt-mini", 1),
    ("gpt-moe-nano", 4),
    ("convnet", 16),
    ("convnet", 64),
)
WARM, TIMED = 1, 7


def step_seconds(ranks: Mesh) -> np.ndarray:
    """Processor seconds of a step of each of STEPS; NaN for a model that cannot run. Collective.

    All ranks make a step at the same time, independently, and the slowest rank counts, since others would wait for it.
    Steps of the models alternate, so that a slow phase of the machine affects all of them.
    """
    with threadpool_limits(1, "blas"), Mesh(solo()) as mesh:
        trainers = [_open_trainer(job, mesh, ranks) for job in _jobs()]
        rounds = [[_time_step(trainer, ranks) for trainer in trainers] for _ in range(WARM + TIMED)]
    return np.median(ranks.all_reduce(np.array(rounds[WARM:]), "max"), axis=0)


def fitted(machine: Machine, seconds: np.ndarray) -> Machine:
    """The machine with ``pass_seconds`` and ``memory_share`` fitted to ``step_seconds``.

    Least squares of relative errors over the effects of the two numbers, bytes / share + passes * seconds, in addition
    to the products, which are measured. A fit of the products would also absorb the other errors of these small steps,
    and be wrong by them in large steps.
    """
    compute, rows = ComputeTimes(replace(machine, fitted=Fitted())), []
    for job in _jobs():
        batch_size = job.data.batch_size
        analysis = analyze(job.model, {"data": 1}, job.composition, batch_size=batch_size, optimizer=AdamW())
        times = [compute.of(0, computation) for computation in analysis.classes[0].step.computations]
        rows.append([sum(w.products for w in times), sum(w.rest for w in times), float(len(times))])
    finite = np.isfinite(seconds)
    matrix, measured = np.array(rows)[finite], seconds[finite]
    rest = matrix[:, 1:] / measured[:, None]
    memory, per_pass = _solve_non_negative(rest, 1 - matrix[:, 0] / measured)
    return machine.with_fitted(memory_share=float(1 / max(memory, 0.2)), pass_seconds=float(per_pass))


def _jobs() -> list[TrainConfig]:
    return [TrainConfig.of(model=model, batch_size=batch, eval_every=0, sample=0) for model, batch in STEPS]


def _solve_non_negative(matrix: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The least squares solution without negative numbers for a matrix of two columns, by trying all their subsets."""
    best, least = np.zeros(2), np.inf
    for chosen in [0], [1], [0, 1]:
        solution = np.zeros(2)
        solution[chosen] = np.linalg.lstsq(matrix[:, chosen], wanted, rcond=None)[0]
        error = float(((matrix @ solution - wanted) ** 2).sum())
        if (solution >= 0).all() and error < least:
            best, least = solution, error
    return best


def _open_trainer(job: TrainConfig, mesh: Mesh, ranks: Mesh) -> Trainer | None:
    """A trainer of the job; None if a rank lacks scikit-learn, which has the images."""
    try:
        trainer = make_trainer(open_workload(job, mesh))
    except ImportError:
        trainer = None
    return trainer if ranks.all_reduce(np.array(float(trainer is not None)), "min") else None


def _time_step(trainer: Trainer | None, ranks: Mesh) -> float:
    """Processor seconds of a step that all ranks start together."""
    if trainer is None:
        return float("nan")
    ranks.barrier()
    began = process_time()
    trainer.step()
    return process_time() - began
