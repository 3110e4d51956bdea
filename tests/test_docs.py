"""The Python code of README and of docs/ runs, from the first block to the last; their commands and files exist."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import api_reference
import click
import pytest

from spmd_engine.cli import cli

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        exec(compile(block, str(page), "exec"), names)


def test_each_program_of_the_readme_runs_by_itself(tmp_path, monkeypatch):
    """A reader copies one program; a block without imports is an excerpt."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGES[0].read_text(), re.MULTILINE | re.DOTALL)
    programs = [block for block in blocks if re.search(r"^(import|from) ", block, re.MULTILINE)]
    assert len(programs) > 1
    for program in programs:
        exec(compile(program, "README.md", "exec"), {"__name__": "page"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_exist(page):
    text = page.read_text()
    named = [
        ROOT / name for name in re.findall(r"`((?:spmd_engine|tests|scripts|benchmarks|examples)/[\w/.-]+\.\w+)`", text)
    ]
    linked = [page.parent / name for name in re.findall(r"\]\(([\w/.-]+\.md)", text)]
    assert [path for path in (*named, *linked) if not path.exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_headings_that_a_page_links_to_exist(page):
    for name, anchor in re.findall(r"\]\(([\w/.-]*)#([\w-]+)\)", page.read_text()):
        headings = re.findall(r"^#+ (.+)$", (page.parent / name if name else page).read_text(), re.MULTILINE)
        assert anchor in [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_the_api_reference_is_that_of_the_docstrings():
    assert api_reference.PAGE.read_text() == api_reference.page(), "run: python scripts/api_reference.py"


# --- commands

ACTIVATION = ". .venv/bin/activate"


def commands_of(text):
    """The arguments of each ``python -m spmd_engine`` of a text, up to the end of the line or of the code."""
    lines = text.replace("\\\n", " ").splitlines()
    found = [re.search(r"(?:python -m spmd_engine|spmd-engine)( [^`]*)", line) for line in lines]
    return [shlex.split(match[1], comments=True) for match in found if match]


def parse(arguments, command=cli):
    """Parse a whole command as the command line does, without running it."""
    context = command.make_context(command.name, list(arguments))
    if isinstance(command, click.Group):
        _, inner, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        parse(rest, inner)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_options_of_a_page_exist(page):
    unknown = []
    for arguments in commands_of(page.read_text()):
        try:
            parse(arguments)
        except click.exceptions.Exit:  # --help
            pass
        except click.UsageError as error:  # many lines of pages go on with what the command does
            if "COMMAND" not in arguments and re.match("No such option|no command", error.format_message()):
                unknown.append(f"{shlex.join(arguments)}: {error.format_message()}")
    assert unknown == []


def test_the_readme_says_how_to_activate_the_environment_before_its_first_command_that_needs_it():
    text = PAGES[0].read_text()
    assert 0 < text.index(ACTIVATION) < text.index("mpiexec -n") and text.count(ACTIVATION) == 1


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_train_ends_with_commands_for_the_run_that_it_has_made(tmp_path):
    for name in ("Makefile", "setup.cfg", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    mpiexec = tmp_path / ".venv" / "bin" / "mpiexec"
    mpiexec.parent.mkdir(parents=True)
    mpiexec.write_text("#!/bin/sh\nmkdir -p runs/gpt-nano-7\ntouch runs/gpt-nano-7/report.html\n")
    mpiexec.chmod(0o755)
    (tmp_path / ".venv" / "installed-mpich").touch()
    command, shell = ["make", "--silent", "train", "RANKS=3"], {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, cwd=tmp_path, env=shell, capture_output=True, text=True, check=True)
    label, _, activation = done.stdout.strip().splitlines()[0].partition(": ")
    assert (label, activation.strip()) == ("first, once in each shell", ACTIVATION)
    first, second, third = commands_of(done.stdout)
    for arguments in (first, second, third):
        parse(arguments)
    assert first[:3] == ["generate", "--run", "gpt-nano-7"] and second[-1] in third
    assert done.stdout.count("mpiexec -n 3 python -m spmd_engine") == 2
