"""Types of options."""

from __future__ import annotations

from math import isnan
from pathlib import Path
from typing import Any

import click

from spmd_engine.errors import one_of

FILE = click.Path(dir_okay=False, path_type=Path)  #: the type of an option that names a file to write


class Choice(click.Choice):
    """One of some texts."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value not in self.choices:
            self.fail(f"{value!r}; {one_of(value, self.choices)}", param, ctx)
        return value


class WholeNumber(click.types.IntParamType):
    """A whole number, also as ``1e3``."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(_whole(value), param, ctx)


class WholeRange(click.IntRange):
    """A whole number in a range, also as ``1e3``."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(_whole(value), param, ctx)


class NumberRange(click.FloatRange):
    """A number in a range, and not NaN, which is neither below nor above a limit."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if isnan(number):
            self.fail(f"{value!r} is no number", param, ctx)
        return number


def _whole(value: Any) -> Any:
    """The whole number that a text such as ``1e3`` means; any other value unchanged."""
    if not isinstance(value, str) or "e" not in value.lower():
        return value
    try:
        number = float(value)
    except ValueError:
        return value
    return int(number) if number.is_integer() and abs(number) < 1 << 53 else value
