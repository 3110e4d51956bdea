"""``bench``: speed on this machine. Comparisons alternate within one run, and give medians, spread and ratios."""

import click

from spmd_engine.cli import LazyGroup


@click.group(
    cls=LazyGroup,
    package=__name__,
    modules={"train": "train", "layers": "train", "collectives": "collectives", "products": "products"},
    short_help="Measure speed, bytes and memory.",
)
def bench() -> None:
    """Measure training, layers, collectives and matrix products on this machine.

    These commands start ranks themselves: run them without mpiexec. Comparisons alternate within one run, so that
    changes of the machine's speed affect all alike; figures are medians, with the range over rounds.

    \b
      python -m spmd_engine bench train --model gpt-mini --ranks 2
      python -m spmd_engine bench layers --model gpt-mini
      python -m spmd_engine bench collectives --ranks 2
      python -m spmd_engine bench products
    """
