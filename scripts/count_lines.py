"""Code lines and files of each package against the budget in ``lines.toml``: ``make lines``.

A code line has at least one token that is not a comment or a docstring. A feature that needs more lines raises the
budget in its first commit and gives the reason there.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUDGET = ROOT / "lines.toml"
ROW = "{:<14}{:>7}{:>8}{:>9}{:>8}{:>12}{:>19}"
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def docstring_lines(tree: ast.Module) -> set[int]:
    """The line numbers of all docstrings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            lines.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return lines


def count(text: str) -> Counter[str]:
    """The lines of code of a module, their characters without indentation, and its lines of docstrings."""
    docstrings, code = docstring_lines(ast.parse(text)), set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NOT_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    code -= docstrings
    lines = text.splitlines()
    characters = sum(len(lines[number - 1].strip()) for number in code)
    return Counter(files=1, code=len(code), characters=characters, docstrings=len(docstrings))


def main() -> int:
    """Print the report; returns 1 if a budget is exceeded."""
    budget = tomllib.loads(BUDGET.read_text())
    packages: dict[str, Counter[str]] = {}
    for path in sorted((ROOT / "spmd_engine").rglob("*.py")):
        place = path.relative_to(ROOT / "spmd_engine").parts
        package = place[0] if len(place) > 1 else "(root)"
        packages.setdefault(package, Counter()).update(count(path.read_text()))
    packages["total"] = sum(packages.values(), Counter())
    exceeded = []
    print(ROW.format("package", "files", "budget", "code", "budget", "docstrings", "characters a line"))
    for package, counter in packages.items():
        allowed = budget.get(package, {"files": 0, "code": 0})
        density = round(counter["characters"] / max(counter["code"], 1), 1)
        counts = counter["files"], allowed["files"], counter["code"], allowed["code"], counter["docstrings"], density
        print(ROW.format(package, *counts))
        exceeded += [
            f"{package}: {counter[k]:,} {k}, {allowed[k]:,} allowed" for k in allowed if counter[k] > allowed[k]
        ]
    for line in exceeded:
        print(f"over the budget of {BUDGET.name}: {line}", file=sys.stderr)
    return 1 if exceeded else 0


if __name__ == "__main__":
    sys.exit(main())
