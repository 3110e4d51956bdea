"""The options about adapters, and the LoRAOptions that they describe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

from spmd_engine.cli.config_file import configured_lora
from spmd_engine.cli.options import with_options
from spmd_engine.models import Model
from spmd_engine.models.lora import LoRAOptions, with_adapters
from spmd_engine.models.names import family_of
from spmd_engine.training.train_config import LORA

_OPTIONS = [
    click.option("--lora-rank", type=int, help="Freeze the model, train adapters of this rank. [default: trains all]"),
    click.option("--lora-alpha", type=float, help="Their factor is this / rank. [default: 16]"),
    click.option("--lora-targets", metavar="NAME,...", help="Weights that have them, as q_proj. [default: all]"),
]


def lora_options(command: Callable) -> Callable:
    """The options of adapters, for a command."""
    return with_options(_OPTIONS, command)


def lora_of(options: Mapping[str, Any]) -> LoRAOptions | None:
    """The adapters that a command's options describe; None if none of them was given: all parameters are trained."""
    return configured_lora({name: options[name] for name in LORA if options[name] is not None})


def adapted(model: Model, name: str, options: Mapping[str, Any]) -> Model:
    """The model of this name with the adapters that a command's options describe; as it is, if they describe none."""
    lora = lora_of(options)
    return model if lora is None else with_adapters(model, lora, family_of(name))
