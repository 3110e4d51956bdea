"""``doctor``: what may be wrong with this installation, these ranks, and what connects them."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from spmd_engine.comm import Mesh, world
from spmd_engine.comm.agreement.rank_zero import gather_json
from spmd_engine.errors import UsageError
from spmd_engine.foreign import reason
from spmd_engine.observability.facts import facts_of_rank, facts_of_ranks
from spmd_engine.observability.findings import ERROR, GOOD, WARNING, CheckResult, diagnose, slowest
from spmd_engine.runtime.launchers import launcher_rank, let_rank_zero_speak

TIMEOUT = 60.0  #: seconds that a call may wait for other ranks
COLOURS = {GOOD: "green", WARNING: "yellow", ERROR: "red"}


@click.command(short_help="Examine the installation, the ranks and their links.")
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("runs"),
    help="Where runs will be written.",
)
@click.option("--json", "as_json", is_flag=True, help="Print findings and facts as one JSON object.")
@click.option("--blame", is_flag=True, help="List cores, links and disks, the slowest first.")
def doctor(folder: Path, as_json: bool, blame: bool) -> None:
    """Examine what a job needs, and say of each thing whether it is good, and what to do if it is not.

    Without ranks it examines this process: MPI library, cores, threads, memory, disk, extras. Under mpiexec or srun it
    also compares the ranks with each other, checks and times collectives, and names a rank or a link that is slow. The
    exit code is 1 if something is wrong.

    \b
      python -m spmd_engine doctor
      mpiexec -n 8 python -m spmd_engine doctor
    """
    error, ranks, together, mesh = "", [], {}, None
    try:
        with Mesh(world(), timeout=TIMEOUT) as mesh:
            ranks = gather_json(mesh.group(), facts_of_rank(folder), "doctor")
            gpus = all(isinstance(facts["gpus"], list) and facts["gpus"] for facts in ranks)
            together = facts_of_ranks(mesh, folder, gpus) if mesh.size > 1 else {}
    except Exception as failure:  # ranks cannot join or communicate: each reports what it knows
        error = str(failure) if isinstance(failure, UsageError) else reason(failure)
        ranks = ranks or [json.loads(json.dumps(facts_of_rank(folder)))]
    findings = diagnose(ranks, together, error)
    if blame and not error:
        findings += slowest(ranks, together)
    if (mesh.rank if mesh else launcher_rank()) == 0:
        _print(findings, ranks, together, as_json)
    if error and mesh:  # perhaps on this rank only
        raise UsageError(f"doctor: {error}")
    if any(finding.state == ERROR for finding in findings):
        let_rank_zero_speak()
        sys.exit(1)


def _print(findings: list[CheckResult], ranks: list[Any], together: dict[str, Any], as_json: bool) -> None:
    if as_json:
        listed = [asdict(finding) for finding in findings]
        click.echo(json.dumps({"findings": listed, "ranks": ranks, "together": together}, default=str))
        return
    console = Console(highlight=False, soft_wrap=True)
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        console.print(f"{finding.state:<8}", style=COLOURS[finding.state], end="")
        console.print(f"{finding.name:<{width}}  {finding.text}", markup=False)
        if finding.remedy:
            console.print(f"{'':<{width + 10}}{finding.remedy}", markup=False)
