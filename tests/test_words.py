"""Words of the package's former dialect do not come back; docs/glossary.md has the terms that replace them."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import spmd_engine
from spmd_engine.cli.options import chosen_settings
from spmd_engine.training.train_config import TrainConfig

PACKAGE = Path(spmd_engine.__file__).parent
DOCS = PACKAGE.parent / "docs"
FORMER = {
    *("foretell", "foretells", "foretold", "tells", "told", "said", "asks"),  # predict; return; need
    *(
        "who",
        "whom",
        "whoever",
        "nobody",
        "someone",
        "somebody",
        "anybody",
        "everybody",
        "everyone",
    ),  # a rank, all ranks
    *("meet", "meets", "meeting"),  # a collective
    *("thing", "things"),  # a name of what it is
}
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def former_words(text):
    """The former words in a text, or in an identifier."""
    return {word.lower() for word in WORD.findall(text)} & FORMER


@cache
def nodes():
    """The nodes of each file's syntax tree."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return [(path.relative_to(PACKAGE), list(ast.walk(ast.parse(path.read_text())))) for path in paths]


def identifiers(nodes):
    """Names that a file defines."""
    for node in nodes:
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                yield node.name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name


def texts_of_errors(nodes):
    for node in nodes:
        if isinstance(node, ast.Raise) and node.exc is not None:
            strings = (each.value for each in ast.walk(node.exc) if isinstance(each, ast.Constant))
            yield from (text for text in strings if isinstance(text, str))


def test_the_words_of_an_identifier():
    assert former_words("meetingOfRanks") == {"meeting"} and former_words("_FOR_WHOM") == {"whom"}
    assert not former_words("tellsign") and not former_words("tasks")


@pytest.mark.parametrize("texts", [identifiers, texts_of_errors], ids=["identifiers", "errors"])
def test_code_has_no_former_words(texts):
    found = [(str(path), text, words) for path, its in nodes() for text in texts(its) if (words := former_words(text))]
    assert not found


def test_files_have_no_former_words():
    assert not [path for path, _ in nodes() if former_words(str(path))]


def test_options_have_no_former_words():
    assert not [name for name in chosen_settings(TrainConfig) if former_words(name)]


def test_headings_of_the_documentation_have_no_former_words():
    headings = [line for path in DOCS.glob("*.md") for line in path.read_text().splitlines() if line.startswith("#")]
    assert len(headings) > 50 and not [line for line in headings if former_words(line)]


# --- Words that leave their meaning to what stands beside them

#: Rooms in which they are still to be replaced.
LATER = ("arrays/", "comm/", "layers/")
WITHOUT_SUBJECT = re.compile(r'(^|\s)#:? of\b|^"""[Oo]f\b')
OF_USERS = {"cut_rows", "may_cut"}  # names that users override


def reworded():
    return [(path, its) for path, its in nodes() if not path.as_posix().startswith(LATER)]


def texts_without_subject(text):
    """The lines whose comment or docstring begins with "of", unless a comment continues that of the line before."""
    before = ""
    for line in map(str.strip, text.splitlines()):
        if WITHOUT_SUBJECT.search(line) and not (line.startswith("#") and before.startswith("#")):
            yield line
        before = line


def test_a_comment_that_goes_on_is_not_one_that_begins():
    assert list(texts_without_subject("x = 1  #: of y\n# the sum\n# of z\n# of z")) == ["x = 1  #: of y"]


def test_comments_and_docstrings_begin_with_their_subject():
    texts = [(path, (PACKAGE / path).read_text()) for path, _ in reworded()]
    assert not [(str(path), line) for path, text in texts for line in texts_without_subject(text)]


def test_names_say_what_they_hold_and_that_shards_are_shards():
    names = [(str(path), name) for path, its in reworded() for name in identifiers(its) if name not in OF_USERS]
    assert not [(path, name) for path, name in names if name == "each" or "cut" in name.split("_")]
