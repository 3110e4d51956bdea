"""``calibrate``: measure this machine into a machine file."""

from __future__ import annotations

from pathlib import Path

import click

from spmd_engine.cli.bench.launch import launch
from spmd_engine.comm.mesh import Mesh
from spmd_engine.comm.world import world
from spmd_engine.errors import UsageError
from spmd_engine.planning.machine import Machine
from spmd_engine.planning.machine_file import read_machine
from spmd_engine.planning.machine_text import text_of
from spmd_engine.planning.machines_here import calibrated_file
from spmd_engine.planning.measure import measure_machine


@click.command(short_help="Measure this machine into a file that 'plan' reads.")
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Where to write. [default: where 'plan' looks]",
)
@click.option(
    "--seconds", type=click.FloatRange(1, 600), default=6.0, show_default=True, help="For products and memory."
)
@click.option("--fit/--no-fit", default=True, show_default=True, help="Fit what an operation costs to a few steps.")
def calibrate(output: Path | None, seconds: float, fit: bool) -> None:
    """Measure matrix products by size and dtype, memory, and links: in under a minute.

    Under mpiexec every rank measures, all at the same time, and every pair of them their link. Alone, two ranks are
    started.

    \b
      python -m spmd_engine calibrate
      mpiexec -n 8 python -m spmd_engine calibrate --output cluster.toml
    """
    file = output or calibrated_file()
    machine = _of_two(file, seconds, fit) if world().size == 1 else _measured(seconds, fit)
    if machine is not None:
        _write(file, machine)


def _measured(seconds: float, fit: bool) -> Machine | None:
    """Measured by all ranks at the same time, as they compute in a job; None but on rank 0."""
    from spmd_engine.cli.calibrate_steps import fitted, step_seconds

    with Mesh(world()) as mesh:
        machine = measure_machine(mesh, seconds)
        steps = mesh.all_reduce(step_seconds(), "mean") if fit else None
    return machine if machine is None or steps is None else fitted(machine, steps)


def _of_two(file: Path, seconds: float, fit: bool) -> Machine:
    """Measured by two ranks, if there is an mpiexec; by this process, if not."""
    temporary = file.with_suffix(".two")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        said = ["--fit" if fit else "--no-fit", "--seconds", str(seconds), "--output", str(temporary)]
        launch(2, ["spmd_engine", "calibrate", *said])
        return read_machine(temporary)
    except (UsageError, OSError) as error:
        click.echo(f"spmd_engine: note: no links were measured ({str(error).splitlines()[0]})", err=True)
        machine = _measured(seconds, fit)
        assert machine is not None
        return machine
    finally:
        temporary.unlink(missing_ok=True)


def _write(file: Path, machine: Machine) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text_of(machine))
    except OSError as error:
        raise UsageError(f"--output {file}: {error.strerror or error}") from error
    click.echo(f"wrote {file}")
