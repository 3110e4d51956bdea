"""The Python code of README and of docs/ runs, from the first block to the last, and the files they name exist."""

import re
from pathlib import Path

import api_reference
import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page):
    text = page.read_text()
    named = [ROOT / name for name in re.findall(r"`((?:spmd_engine|tests|scripts|examples)/[\w/.-]+\.\w+)`", text)]
    linked = [page.parent / name for name in re.findall(r"\]\(([\w/.-]+\.md)", text)]
    assert [path for path in (*named, *linked) if not path.exists()] == []


def test_the_api_reference_is_that_of_the_docstrings():
    assert api_reference.PAGE.read_text() == api_reference.page(), "run: python scripts/api_reference.py"
