"""The files for other programs (workflow, Dockerfile, Conda, site) name commands, extras and pages that exist."""

import re
from configparser import ConfigParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = [".github/workflows/ci.yml", "Dockerfile", "environment.yml", "Makefile", ".ci/run", "scripts/release"]
SETUP = ConfigParser()
SETUP.read(ROOT / "setup.cfg")
EXTRAS = SETUP["options.extras_require"].keys()


@pytest.mark.parametrize("file", FILES)
def test_commands_and_extras_in_a_file_exist(file):
    text = (ROOT / file).read_text()
    targets = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands = re.findall(r"(?:^|run: |&& )make ((?:[a-z-]+ ?)+)$", text, re.MULTILINE)
    assert {target for command in commands for target in command.split()} <= {*targets}
    installed = re.findall(r"\.venv/installed-([a-z0-9-]+)", text) + re.findall(
        r"\(VENV\)/installed-([a-z0-9-]+)", text
    )
    extras = [name for names in installed for name in names.split("-")] + re.findall(r"\[(mpich|test)\]", text)
    assert {*extras} <= {*EXTRAS}
    assert all((ROOT / path).exists() for path in re.findall(r"bash ([\w./]+)$", text, re.MULTILINE))


def test_files_for_containers_run_what_the_readme_runs():
    readme = (ROOT / "README.md").read_text()
    for command in ("make train", "make test"):
        assert re.search(rf"^{command} ", readme, re.MULTILINE)
        assert all(command in (ROOT / file).read_text() for file in ("Dockerfile", "environment.yml"))


def test_versions_in_the_conda_file_are_those_of_the_package():
    text = (ROOT / "environment.yml").read_text()
    required = SETUP["options"]["install_requires"].split() + [f"python{SETUP['options']['python_requires']}"]
    versions = dict(re.findall(r"- (mpi4py|numpy|python)>=([\d.]+)", text))
    assert {f"{name}>={version}" for name, version in versions.items()} <= {*required} and len(versions) == 3


def test_the_site_has_every_page():
    named = re.findall(r"- ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = [str(page.relative_to(ROOT)) for page in ROOT.glob("docs/*.md")]
    others = ["README.md", "benchmarks/README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
    assert sorted(named) == sorted(pages + others)


def test_the_changelog_describes_the_version():
    (version,) = re.findall(r'^__version__ = "(.+)"$', (ROOT / "spmd_engine/__init__.py").read_text(), re.MULTILINE)
    assert f"\n## {version}\n" in (ROOT / "CHANGELOG.md").read_text()
    assert SETUP["metadata"]["version"] == "attr: spmd_engine.__version__"
