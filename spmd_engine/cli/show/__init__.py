"""``show``: pictures of what the engine does, drawn without starting a rank."""

from __future__ import annotations

import click

from spmd_engine.cli.show.collective import collective
from spmd_engine.cli.show.communication import communication
from spmd_engine.cli.show.experts import experts
from spmd_engine.cli.show.memory import memory
from spmd_engine.cli.show.mesh import mesh
from spmd_engine.cli.show.schedule import schedule
from spmd_engine.cli.show.sharding import sharding
from spmd_engine.comm.world import launcher_rank


@click.group(short_help="Draw a mesh, a sharding, a schedule, communication, memory, a collective or experts.")
@click.pass_context
def show(context: click.Context) -> None:
    """Draw what the engine does. No rank is started: any mesh can be drawn anywhere.

    \b
      python -m spmd_engine show mesh data=2,pipe=2,model=2
    """
    if launcher_rank() > 0:  # under mpiexec one rank draws
        context.exit()


for command in (mesh, sharding, schedule, communication, memory, collective, experts):
    show.add_command(command)
