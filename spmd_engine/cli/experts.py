"""The options about experts, and the Mixture that they describe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

from spmd_engine.cli.config_file import configured_mixture
from spmd_engine.cli.options import with_options
from spmd_engine.models import Mixture
from spmd_engine.training.train_config import MIXTURE, ROUTER

_OF_MODELS = [
    click.option("--experts", type=int, help="Of a gpt-moe model, in each layer that has any. [default: 8]"),
    click.option("--top-k", type=int, help="Experts that each token chooses. [default: 2]"),
    click.option("--shared-experts", type=int, help="Further ones that all tokens go through. [default: 0]"),
    click.option("--dense-layers", metavar="N,...", help="Blocks whose MLP is dense. [default: none]"),
]
_OF_ROUTERS = [
    click.option(
        "--routing",
        type=click.Choice(["learned", "balanced", "random"]),
        help="For benchmarks: experts in turn, or by chance. [default: learned]",
    ),
    click.option(
        "--capacity-factor",
        type=float,
        help="An expert takes so many times its even share of the micro-batch's tokens; what is more is dropped, and "
        "passes by the residual. [default: takes all]",
    ),
    click.option("--balance-loss", type=float, help="Coefficient of the loss that balances experts. [default: 0.01]"),
    click.option("--z-loss", type=float, help="Of the loss that keeps the router's logits small. [default: 0.001]"),
    click.option("--bias-rate", type=float, help="Of the bias that balances without a loss. [default: 0, none]"),
]


def mixture_options(command: Callable) -> Callable:
    """The options on which a model's shape hangs, for a command."""
    return with_options(_OF_MODELS, command)


def expert_options(command: Callable) -> Callable:
    """Those and the most wanted ones of the router, for a command."""
    return with_options([*_OF_MODELS, *_OF_ROUTERS], command)


def mixture_of(options: Mapping[str, Any]) -> Mixture | None:
    """The Mixture that a command's options describe; None if none of them was given."""
    given = {name: options[name] for name in (*MIXTURE, *ROUTER) if options.get(name) is not None}
    return configured_mixture(given)
