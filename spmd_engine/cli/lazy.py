"""Groups of commands that are imported when they are used, so that a rank loads only what its command needs."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import click

from spmd_engine.errors import one_of
from spmd_engine.importing import many_imports
from spmd_engine.runtime.signals import StopFlag


class LazyGroup(click.Group):
    """A group whose commands are named by their modules: ``{"train": "spmd_engine.cli.train"}``.

    The module has the command under its own name. The help of the group imports them all, for a line of each.
    """

    def __init__(self, *args: Any, modules: Mapping[str, str], **options: Any) -> None:
        super().__init__(*args, **options)
        self.modules = modules

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted(self.modules)

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.modules and not args[0].startswith("-"):
            context.fail(f"no command {args[0]!r}; {one_of(args[0], self.list_commands(context))}")
        return super().resolve_command(context, args)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in self.modules:
            return None
        with StopFlag(), many_imports():
            # A signal meanwhile is handled after the import: a half-loaded program cannot end well.
            return getattr(import_module(self.modules[name]), name)


def modules_of(package: str, *names: str, **modules: str) -> dict[str, str]:
    """Commands in the modules of their own names, or in other ``modules`` of the package."""
    return {name: f"{package}.{module}" for name, module in (dict(zip(names, names, strict=True)) | modules).items()}
