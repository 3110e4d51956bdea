"""``calibrate``: measure this machine into a machine file."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from spmd_engine.cli.bench.launch import launch
from spmd_engine.cli.output_file import check_ending, output_file
from spmd_engine.comm.mesh import Mesh
from spmd_engine.comm.world import world
from spmd_engine.errors import UsageError
from spmd_engine.planning.machine.files import calibrated_file, read_machine
from spmd_engine.planning.machine.machine import Machine
from spmd_engine.planning.machine.measure import SECONDS, measure_machine
from spmd_engine.planning.machine.text import text_of
from spmd_engine.process.launchers import launcher_rank


@click.command(short_help="Measure this machine into a file that 'plan' reads.")
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Where to write. [default: where 'plan' looks]",
)
@click.option(
    "--seconds", type=click.FloatRange(1, 600), default=SECONDS, show_default=True, help="For products and memory."
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
    if output is not None:
        check_ending("--output", output, ".toml")
    file = output or calibrated_file()
    if launcher_rank() == 0:
        click.echo("measuring products, memory, links and a few steps ...", err=True)
    machine = _of_two(seconds, fit) if world().size == 1 else _measured(seconds, fit)
    if machine is not None:
        _write(file, machine)


def _measured(seconds: float, fit: bool) -> Machine | None:
    """Measured by all ranks at the same time, as they compute in a job; None but on rank 0."""
    from spmd_engine.cli.calibrate_steps import fitted, step_seconds

    with Mesh(world()) as mesh:
        machine = measure_machine(mesh, seconds)
        steps = step_seconds(mesh) if fit else None
    return machine if machine is None or steps is None else fitted(machine, steps)


def _of_two(seconds: float, fit: bool) -> Machine:
    """Measured by two ranks, if there is an mpiexec; by this process, if not."""
    with tempfile.TemporaryDirectory() as folder:
        temporary = Path(folder) / "machine.toml"
        try:
            said = ["--fit" if fit else "--no-fit", "--seconds", str(seconds), "--output", str(temporary)]
            launch(2, ["spmd_engine", "calibrate", *said])
            return read_machine(temporary)
        except (UsageError, OSError) as error:
            click.echo(f"spmd_engine: note: no links were measured ({str(error).splitlines()[0]})", err=True)
            machine = _measured(seconds, fit)
            assert machine is not None
            return machine


def _write(file: Path, machine: Machine) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output {file}: {error.strerror or error}") from error
    with output_file(file) as opened:
        opened.write(text_of(machine).encode())
    node = machine.nodes[0]
    speeds = ", ".join(f"{speed.most / 1e9:,.1f} GFLOP/s in {dtype}" for dtype, speed in node.speeds.items())
    click.echo(
        f"wrote {file}: products at most {speeds}; memory {node.memory_bandwidth.most / 1e9:,.1f} GB/s; between ranks "
        f"{node.inside.bandwidth / 1e9:,.1f} GB/s"
    )
