"""``scripts/new_tests_against``: which tests are new, and what their outcomes say."""

import subprocess
import sys
from xml.etree import ElementTree

import pytest

from support.script_module import script

new_tests = script("new_tests_against")

OLD = """
@pytest.mark.parametrize("x", [1])
def test_kept(x):
    assert x

def test_altered():
    assert 1

class TestGroup:
    def test_inside(self):
        assert 1
"""
NEW = (
    OLD.replace("assert 1\n\nclass", "assert 2  # altered\n\nclass") + "\n    def test_added(self):\n        assert 1\n"
)


def test_a_test_is_new_if_its_source_is():
    assert new_tests.new_functions(NEW, "") == [
        "test_kept",
        "test_altered",
        "TestGroup::test_inside",
        "TestGroup::test_added",
    ]
    assert new_tests.new_functions(NEW, OLD) == ["test_altered", "TestGroup::test_added"]
    assert new_tests.new_functions("# moved\n\n\n" + OLD, OLD) == []
    assert new_tests.new_functions(OLD.replace("[1]", "[1, 2]"), OLD) == ["test_kept"]  # a case more


@pytest.mark.parametrize(
    "cases, outcome",
    [
        ('<testcase classname="tests.cli.test_a" name="test_b[1]"/>', "passed"),
        (
            '<testcase classname="tests.cli.test_a" name="test_b[1]"/>'
            '<testcase classname="tests.cli.test_a" name="test_b[2]"><failure/></testcase>',
            "failed",
        ),
        ('<testcase classname="tests.cli.test_a" name="test_b"><error/></testcase>', "failed"),
        ('<testcase classname="tests.cli.test_a" name="test_b"><skipped/></testcase>', "skipped"),
        ('<testcase classname="" name="tests.cli.test_a"><error/></testcase>', "no import"),
        ('<testcase classname="tests.cli.test_a" name="test_bc"/>', "not run"),
        ("", "not run"),
    ],
)
def test_the_outcome_is_that_of_the_worst_case(cases, outcome):
    assert new_tests._outcome("tests/cli/test_a.py::test_b", ElementTree.fromstring(f"<all>{cases}</all>")) == outcome


@pytest.mark.parametrize(
    "before, now, code",
    [("failed", "passed", 0), ("passed", "passed", 1), ("failed", "failed", 1), ("no import", "passed", 0)],
)
def test_a_test_that_passes_before_is_no_proof(capsys, before, now, code):
    assert new_tests.report(["t.py::test_b"], {"t.py::test_b": now}, {"t.py::test_b": before}) == code
    assert f"{before:12}{now:12}t.py::test_b" in capsys.readouterr().out


def test_junit_names_a_file_that_cannot_be_imported(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text("from json import missing\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=x.xml", "tests"]
    subprocess.run(command, cwd=tmp_path, stdout=subprocess.DEVNULL)
    cases = list(ElementTree.parse(tmp_path / "x.xml").iter("testcase"))
    assert new_tests._outcome("tests/test_a.py::test_b", cases) == "no import"
