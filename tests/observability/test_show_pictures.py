"""Pictures in colour, in a pipe, as SVG and as PNG: the same cells everywhere."""

import io
import xml.etree.ElementTree as ElementTree

import pytest
from rich.console import Console
from rich.text import Text

from spmd_engine.axes import all_positions
from spmd_engine.cli import main
from spmd_engine.comm.views import ArraySharding, draw_mesh
from spmd_engine.engine.schedules.orders import named
from spmd_engine.observability.collective import EXAMPLES, draw_collective
from spmd_engine.observability.memory import draw_memory
from spmd_engine.observability.render import lines, print_picture
from spmd_engine.pictures import BLUE, COLOURS, YELLOW, Cell, Picture, ink, listed, svg, table, text, tint
from spmd_engine.sharding import Spec
from spmd_engine.training import TrainConfig

SPACE = "{http://www.w3.org/2000/svg}"


def sharding(shape, axes):
    return ArraySharding.of(Spec.parse("b/data f/model"), shape, all_positions(axes)).picture()


def memory(job):
    return draw_memory(job, job.model.build(job.composition), job.composition)


PICTURES = {
    "mesh": lambda: draw_mesh({"data": 2, "model": 3}),
    "sharding": lambda: sharding((5, 2), {"data": 2, "model": 3}),
    "schedule": lambda: named("interleaved").picture(2, 4),
    "memory": lambda: memory(TrainConfig.of(mesh={"data": 2})),
    "collective": lambda: draw_collective("all_gather", 3),
}
every_picture = pytest.mark.parametrize("kind", PICTURES)


def plain(picture, widest=110):
    return [line.plain for line in lines(picture, widest)]


# --- text


def test_cells_that_touch_share_their_border():
    cells = [Cell(0, 0, 4, 2, "a"), Cell(4, 0, 4, 2, "b"), Cell(0, 2, 8, 2, "c"), Cell(10, 1, 3, 2, "d")]
    assert plain(Picture("title", cells))[2:] == [
        "┌───┬───┐",
        "│ a │ b │ ┌──┐",
        "├───┴───┤ │d │",
        "│   c   │ └──┘",
        "└───────┘",
    ]


def test_labels_stay_inside_their_cells():
    cells = [Cell(0, 0, 4, 3, "wide label\n2"), text(0, 4, "ab", 5, "right"), Cell(6, 4, 4, 1, "x", outline=False)]
    assert plain(Picture("", cells))[2:] == ["┌───┐", "│wid│", "│ 2 │", "└───┘", "   ab  x"]


def test_tables_and_notes_stand_below():
    picture = Picture("title", [text(0, 0, "drawing")], table([("", "n"), ("row", "10"), ("r", "9")], "lr"), ["note"])
    assert plain(picture) == ["title", "", "drawing", "", "      n", "row  10", "r     9", "", "note"]


def test_a_wide_drawing_goes_on_below_under_the_same_heading():
    cells = [text(0, 0, "row"), *(Cell(4 + 2 * i, 0, 2, 1, str(i), outline=False, align="left") for i in range(7))]
    picture = Picture("", cells, notes=["0123456789abcdef"], fold=(4, 2))
    assert plain(picture, 11)[2:] == ["row 0 1 2", "", "row 3 4 5", "", "row 6", "", "0123456789abcdef"]
    assert plain(picture, 18)[2] == "row 0 1 2 3 4 5 6"


@every_picture
def test_the_same_text_in_a_pipe_and_in_colour(kind, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")  # of some terminal: nothing to a pipe
    picture, pipe = PICTURES[kind](), io.StringIO()
    print_picture(picture, Console(file=pipe))
    assert pipe.getvalue().splitlines() == plain(picture)
    assert "\x1b" not in pipe.getvalue()
    terminal = io.StringIO()
    print_picture(picture, Console(file=terminal, force_terminal=True, color_system="truecolor", width=200))
    assert "\x1b[" in terminal.getvalue()
    shown = [Text.from_ansi(line).plain.rstrip() for line in terminal.getvalue().splitlines()]
    assert shown == [line.rstrip() for line in plain(picture, 200)]


def test_a_terminal_that_knows_only_ascii():
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    print_picture(draw_mesh({"data": 2}), Console(file=file))
    file.flush()
    assert raw.getvalue().decode("ascii").splitlines()[2:6] == [
        "  data 0   data 1",
        "+--------+--------+",
        "|   0    |   1    |",
        "+--------+--------+",
    ]


def test_neighbouring_blocks_have_different_colours():
    cells = sharding((8, 7), {"data": 8, "model": 7}).drawing
    fills = {(cell.x, cell.y): cell.fill for cell in cells if cell.outline}
    columns, rows = sorted({x for x, _ in fills}), sorted({y for _, y in fills})
    assert len(fills) == 56
    pairs = [((x, y), (right, y)) for y in rows for x, right in zip(columns, columns[1:])]
    pairs += [((x, y), (x, below)) for x in columns for y, below in zip(rows, rows[1:])]
    assert all(fills[one] != fills[other] for one, other in pairs)


def test_colours():
    assert ink(YELLOW) == "#000000" and ink(BLUE) == "#FFFFFF"
    assert tint("#000080", 0.0) == "#000080" and tint("#000080", 1.0) == "#FFFFFF" and tint("#000000", 0.5) == "#808080"
    assert len(set(COLOURS)) == 7
    assert listed(range(8)) == "0,1,2,3,4,5,6,7" and listed(range(9)) == "0,1,2,...,8"


# --- images


def labels(picture):
    return [line for cell in picture.placed() for line in cell.label.split("\n") if line]


@every_picture
def test_svg_has_the_cells_and_labels(kind):
    picture = PICTURES[kind]()
    root = ElementTree.fromstring(svg(picture))
    assert root.tag == SPACE + "svg"
    cells = [cell for cell in picture.placed() if cell.outline or cell.fill]
    rectangles = root.findall(SPACE + "rect")
    assert len(rectangles) == len(cells) > 0
    assert [r.get("fill") for r in rectangles] == [cell.fill or "none" for cell in cells]
    assert [element.text for element in root.findall(SPACE + "text")] == labels(picture)
    width, height = float(root.get("width")), float(root.get("height"))
    for r in rectangles:
        x, y, wide, high = (float(r.get(name)) for name in ("x", "y", "width", "height"))
        assert min(x, y) >= 0 and x + wide <= width and y + high <= height


def test_how_many_cells():
    assert len(ElementTree.fromstring(svg(draw_mesh({"a": 2, "data": 2, "model": 3}))).findall(SPACE + "rect")) == 14
    for name, count in {"all_reduce": 8, "all_gather": 20, "all_to_all": 32}.items():
        assert len(ElementTree.fromstring(svg(draw_collective(name, 4))).findall(SPACE + "rect")) == count


def test_labels_are_escaped():
    picture = Picture("a < b & c", [Cell(0, 0, 9, 2, '<&"', "#FFFFFF")])
    root = ElementTree.fromstring(svg(picture))
    assert [element.text for element in root.findall(SPACE + "text")] == ["a < b & c", '<&"']


@every_picture
def test_every_filled_cell_has_a_label(kind):
    for cell in PICTURES[kind]().placed():
        assert cell.label or not cell.fill


@pytest.mark.parametrize("name", [name for name, example in EXAMPLES.items() if example.moves])
def test_values_keep_the_colour_of_the_rank_they_come_from(name):
    filled = [cell for cell in draw_collective(name, 4).drawing if cell.fill and cell.label]
    colours = {}
    for cell in filled:
        assert colours.setdefault(cell.label, cell.fill) == cell.fill
    assert {label[0]: fill for label, fill in colours.items()} == dict(zip("ABCD", COLOURS)) or name == "broadcast"


def test_written_files(tmp_path, capsys):
    path = tmp_path / "mesh.SVG"
    main(["show", "mesh", "data=2", "--output", str(path)])
    assert capsys.readouterr().out == f"wrote {path}\n"
    assert len(ElementTree.parse(path).getroot().findall(SPACE + "rect")) == 2


@every_picture
def test_png(kind, tmp_path):
    image = pytest.importorskip("PIL.Image")
    from spmd_engine.observability.render import write_image

    picture, path = PICTURES[kind](), tmp_path / "picture.png"
    write_image(picture, path)
    with image.open(path) as written:
        assert written.format == "PNG"
        seen = {colour for _, colour in written.convert("RGB").getcolors(1 << 24)}
    fills = {cell.fill for cell in picture.placed() if cell.fill}
    assert fills and {tuple(bytes.fromhex(fill[1:])) for fill in fills} <= seen


def test_png_without_pillow_names_the_extra(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(SystemExit) as end:
        main(["show", "mesh", "data=2", "--output", str(tmp_path / "mesh.png")])
    assert end.value.code == 2
    assert "pip install 'spmd_engine[png]'" in capsys.readouterr().err
