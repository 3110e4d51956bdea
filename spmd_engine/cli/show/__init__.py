"""``show``: pictures of what the engine does, without starting a rank."""

from __future__ import annotations

import click

from spmd_engine.cli import LazyGroup
from spmd_engine.runtime.launchers import launcher_rank


@click.group(
    cls=LazyGroup,
    package=__name__,
    modules={
        **{name: "sharding" for name in ("mesh", "sharding", "experts")},
        **{name: "schedule" for name in ("schedule", "communication")},
        **{"memory": "memory", "collective": "collective"},
    },
    short_help="Draw a mesh, a sharding, a schedule, communication, memory, a collective or experts.",
)
@click.pass_context
def show(context: click.Context) -> None:
    """Draw what the engine does. No rank is started: any mesh can be drawn anywhere.

    \b
      python -m spmd_engine show mesh data=2,pipe=2,model=2
    """
    if launcher_rank() > 0:  # under mpiexec one rank draws
        context.exit()
