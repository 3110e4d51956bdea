"""Writes the tables of docs/configuration.md from the dataclasses: ``python scripts/option_tables.py``."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import is_dataclass
from pathlib import Path

from spmd_engine.configuration import ConfigField, range_of, settings_of
from spmd_engine.engine.parallel_config import REQUIREMENTS
from spmd_engine.training import TrainConfig
from spmd_engine.units import BYTES

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
BEGIN, END = "<!-- The tables are written by scripts/option_tables.py. -->\n", "<!-- The tables end. -->\n"
KINDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def tables() -> str:
    """A table for each section of a job, with a row for each of its fields."""
    sections: dict[tuple[str, ...], list[ConfigField]] = defaultdict(list)
    for field in settings_of(TrainConfig).values():
        sections[field.path[:-1]].append(field)
    order = [(), ("model",), ("data",), ("training",), ("composition",)]
    order += [path for path in sections if path not in order]
    texts = []
    for path in order:
        rows = [f"| `{path[-1] if path else 'job'}` | default | values | |", "|---|---|---|---|"]
        rows += [row(field) for field in sections[path] if "help" in field.about]
        texts.append("\n".join(rows) + "\n")
    return "\n".join([*texts, requirements()])


def requirements() -> str:
    """A table of what the options of ``composition`` need."""
    rows = ["| requirement | of | is | without it |", "|---|---|---|---|"]
    for each in REQUIREMENTS:
        options = ", ".join(f"`{option}`" for option in each.options)
        without = "a note" if each.nearest is None else f"refused: {each.nearest[0].lower()}{each.nearest[1:]}"
        rows.append(f"| {each.name} | {options} | {each.needs} | {without} |")
    return "\n".join(rows) + "\n"


def row(field: ConfigField) -> str:
    """``| `batch_size` | 16; images: 64 | from 1 | Samples a step, over all ranks. |``"""
    key = field.path[-1]
    name = f"`{key}`"
    if field.is_option and field.name != key:
        name += f" (`--{field.name.replace('_', '-')}`)"
    elif not field.is_option and not is_dataclass(field.kind):
        name += " (no option)"
    return f"| {name} | {default(field)} | {values(field)} | {field.about['help'].replace('|', chr(92) + '|')} |"


def default(field: ConfigField) -> str:
    """A default as in JSON, and the meaning of null."""
    if field.default is None:
        return f"null: {field.about['unset']}"
    text = field.text(field.default) if field.about.get("unit") == BYTES else json.dumps(field.default)
    return text + (f"; images: {field.about['of_images']:,}" if "of_images" in field.about else "")


def values(field: ConfigField) -> str:
    """The values that a field takes."""
    if is_dataclass(field.kind):
        return "an object, below" if field.name in ("mixture", "lora") else "an object"
    if "choices" in field.about:
        return ", ".join(f"`{choice}`" for choice in field.about["choices"])
    # A limit that only catches typing errors is not listed.
    limits = {name: limit for name, limit in field.about.items() if name != "most" or limit <= 1 << 16}
    kind = field.about.get("unit") or KINDS.get(field.kind, "names with whole numbers")
    text = f"{kind} {range_of(limits)}".rstrip()
    if "unit" in field.about:
        return f"{text}, or a text with a unit"
    if field.kind is str and "metavar" in field.about:
        return f"`{field.about['metavar']}`".replace("|", r"\|")
    return text


def page() -> str:
    """The page with up-to-date tables."""
    head, _, rest = PAGE.read_text().partition(BEGIN)
    return f"{head}{BEGIN}\n{tables()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page())
