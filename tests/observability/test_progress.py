"""The bar of `train`: on a terminal only, and no line of any process is torn."""

import io
import re
import sys

import pytest

from spmd_engine.observability import progress
from spmd_engine.observability.progress import Bar
from spmd_engine.runtime.launchers import terminal
from spmd_engine.training import Trainer
from support.command_line import QUIET, TEXT

pytestmark = pytest.mark.usefixtures("narrow")

PLACE = "/dev/null"  # no terminal: 80 columns


def shown(output):
    """The lines that a terminal shows, without those at its end that are empty."""
    rows, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[\d*[A-Z]|[\r\n]|[^\r\n\x1b]+", output):
        if part == "\r":
            column = 0
        elif part == "\n":
            row, column = row + 1, 0
            rows += [""] * (row + 1 - len(rows))
        elif part == "\x1b[J":
            rows[row:] = [rows[row][:column]]
        elif part.startswith("\x1b["):
            assert part.endswith("A")
            row -= int(part[2:-1])
        else:
            line = rows[row].ljust(column)
            rows[row] = line[:column] + part + line[column + len(part) :]
            column += len(part)
    return "\n".join(rows).rstrip("\n").split("\n")


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


def on_screen(monkeypatch):
    """Standard error is a terminal, from now on."""
    monkeypatch.setattr("sys.stderr", screen := Terminal())
    monkeypatch.setattr(Bar, "PERIOD", 0.0)
    return screen


def test_lines_of_this_and_of_other_processes_stay_whole(monkeypatch):
    screen = on_screen(monkeypatch)
    bar = Bar(PLACE, 0, 4)
    assert shown(screen.getvalue())[-1].startswith("training  ───")
    bar.show(1, "loss 2.5")
    print("a warning\nof two lines", file=sys.stderr)
    screen.write("another rank\n")  # through mpiexec: it does not know of the bar
    bar.show(2, "loss 2.4")
    assert re.fullmatch(r"loss 2\.4  ━{20}─{20}  2/4  0:00:00 left", shown(screen.getvalue())[-1])
    screen.write("^C[mpiexec] Sending\n[mpiexec] Press\n")
    sys.stderr.write("half ")
    assert shown(screen.getvalue())[-1] == "half "  # no bar below it
    bar.show(3, "loss 2.3")
    sys.stderr.write("a line\n")
    bar.close()
    lines = ["a warning", "of two lines", "another rank", "^C[mpiexec] Sending", "[mpiexec] Press", "half a line"]
    assert shown(screen.getvalue()) == lines
    assert sys.stderr is screen


@pytest.mark.parametrize("columns", [1, 20, 60, 200])
def test_a_bar_is_no_wider_than_the_terminal(monkeypatch, columns):
    screen = on_screen(monkeypatch)
    monkeypatch.setattr(progress, "columns", lambda path: columns)
    bar = Bar(PLACE, 0, 1000)
    bar.show(999, "loss 2.5  accuracy 97.1%  12,345 images/s")
    assert len(shown(screen.getvalue())[-1]) == min(columns - 1, 107)
    bar.close()


def test_only_terminals_that_can_move_the_cursor_have_a_bar(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", io.StringIO())
    assert terminal(levels=0) is None
    monkeypatch.setattr("sys.stderr", Terminal())
    assert terminal()
    for name in ("dumb", None):
        monkeypatch.setenv("TERM", name) if name else monkeypatch.delenv("TERM")
        assert terminal() is None


JOB = ["train", "--model", "gpt-nano", *TEXT, *QUIET, "--length", "16", "--batch-size", "2", "--steps", "4"]


@pytest.fixture
def on_terminal(monkeypatch):
    monkeypatch.setattr("spmd_engine.observability.progress.terminal", lambda: PLACE)
    monkeypatch.setattr(Bar, "PERIOD", 0.0)


def test_a_run_leaves_no_bar(here, on_terminal):
    code, _, output = here(*JOB, "--run", "one")
    lines = shown(output)
    assert code == 0 and "2/4" in output and not any("/4" in line for line in lines)
    assert lines[0].startswith("gpt-nano: ") and lines[-1].startswith("validation loss ") and len(lines) == 4
    assert not isinstance(sys.stderr, Bar)


def test_no_bar_stays_after_an_exception(here, on_terminal, monkeypatch, capsys):
    def fail(self):
        if self.steps_done == 2:
            raise RuntimeError("broken")
        return step(self)

    step = Trainer.step
    monkeypatch.setattr(Trainer, "step", fail)
    with pytest.raises(RuntimeError, match="broken"):
        here(*JOB, "--run", "one")
    output = capsys.readouterr().err
    assert "2/4" in output and not any("/4" in line for line in shown(output))
    assert not isinstance(sys.stderr, Bar)


def test_without_a_terminal_there_are_lines(here, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    code, _, errors = here(*JOB, "--run", "one")
    assert code == 0 and "\x1b" not in errors
    assert [line.split()[1] for line in errors.splitlines() if line.startswith("step ")] == ["0", *"1234", "4"]
