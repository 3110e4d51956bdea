"""Figures in docs/ that a dry run computes are those of ``scripts/figures.py``: CI compares all, this the quickest."""

from support.script_module import script

figures = script("figures")


def test_every_figure_has_a_block_in_the_pages_and_every_block_a_figure():
    pages = (path.read_text() for path in (figures.ROOT / "docs").glob("*.md"))
    assert sorted(name for page in pages for _, name, *_ in figures.BLOCK.findall(page)) == sorted(figures.FIGURES)


def test_launches_are_those_of_the_page_and_another_number_is_noticed():
    text = (figures.ROOT / "docs" / "training.md").read_text()
    (block,) = (match[3] for match in figures.BLOCK.finditer(text) if match[2] == "launches")
    assert figures.launches(block) == block.strip() == figures.launches(block.replace("1,046", "7"))
