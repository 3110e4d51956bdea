"""Whatever is typed: the command does something, or one line says what is wrong; never a traceback, never a hang."""

import signal

import click
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spmd_engine.cli import cli, main
from spmd_engine.runtime.supervisor import Supervisor

pytestmark = pytest.mark.usefixtures("narrow")

LIMIT = 60  # seconds that a small command may take, on a machine that is busy
NUMBERS = ["-1", "0", "1", "2", "3", "7", "1000000", "99999999999999", "1e3", "0x10", "x", "", "1.5"]
FLOATS = ["-1", "0", "0.5", "1", "1e400", "nan", "inf", "-0.0", "1e-400", "x", ""]
MESHES = ["data=1", "data=2", "model=1", "data=0", "data", "=", "a=b=c", "data=1,data=1", "ü=1", "pipe=1,model=1", ","]
PATHS = ["text", "empty", "binary", "folder", "nowhere", "run", "run.json", "/dev/null", "text/x", "\0", "x" * 300]
#: Given last, so that what a line begins ends soon.
SHORT = {
    "train": ["--steps", "1", "--model", "mlp", "--batch-size", "2", "--eval-samples", "2", "--sample", "0"],
    "verify": ["--model", "mlp", "--batch-size", "2"],
    "generate": ["--tokens", "2"],
}
LEFT_OUT = {"bench", "calibrate"}  # start jobs of their own that take minutes


def commands(command, path=()):
    """All commands of the tree with the words that call them."""
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            if name not in LEFT_OUT:
                yield from commands(command.get_command(click.Context(command), name), (*path, name))
    else:
        yield path, command


COMMANDS = dict(commands(cli))


def values(parameter):
    """Texts for an option or an argument, most of them such that could have been meant."""
    junk = st.text(max_size=8).filter(lambda text: "\0" not in text)
    if isinstance(parameter.type, click.Choice):
        return st.sampled_from([*parameter.type.choices, "x"])
    if isinstance(parameter.type, (click.types.IntParamType, click.IntRange)):
        return st.sampled_from(NUMBERS)
    if isinstance(parameter.type, (click.types.FloatParamType, click.FloatRange)):
        return st.sampled_from(FLOATS)
    return st.one_of(st.sampled_from(MESHES), st.sampled_from([each for each in PATHS if "\0" not in each]), junk)


@st.composite
def lines(draw):
    path = draw(st.sampled_from(sorted(COMMANDS)))
    command = COMMANDS[path]
    words = list(path)
    options = [each for each in command.params if isinstance(each, click.Option)]
    for option in draw(st.lists(st.sampled_from(options), max_size=5)) if options else ():
        words.append(draw(st.sampled_from([*option.opts, *option.secondary_opts])))
        if not option.is_flag:
            words.append(draw(values(option)))
    for argument in command.params:
        if isinstance(argument, click.Argument) and draw(st.integers(0, 9)):
            words.append(draw(values(argument)))
    if not draw(st.integers(0, 9)):
        words.append(draw(st.text(max_size=5).filter(lambda text: "\0" not in text)))
    return words + SHORT.get(path[0], [])


def too_long(number, frame):
    raise TimeoutError(f"longer than {LIMIT} s")


def outcome(words, capsys):
    """Run a command line here; its exit code, and what it wrote to stderr."""
    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(LIMIT)
    code = 0
    try:
        main(words)
    except SystemExit as left:
        code = left.code or 0
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return code, capsys.readouterr().err


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with files of several kinds, and one run; nothing is launched from it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("something to learn from, again and again\n" * 300)
    (tmp_path / "empty").touch()
    (tmp_path / "binary").write_bytes(bytes(range(256)) * 9)
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr(Supervisor, "run", lambda self: 0)
    main(["train", "--run", "./run", "--data", "text", *SHORT["train"]])
    (tmp_path / "run.json").write_text((tmp_path / "run" / "config.json").read_text())
    return tmp_path


def check(words, capsys):
    code, said = outcome(words, capsys)
    assert code in (0, 1, 2, 141), (words, code)
    assert "Traceback" not in said, words
    if code == 2:
        lines = [line for line in said.splitlines() if line.startswith("spmd_engine:") and ": note: " not in line]
        assert len(lines) == 1, (words, said)


def drawn(count):
    quiet = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.filter_too_much]
    return settings(max_examples=count, deadline=None, derandomize=True, suppress_health_check=quiet, database=None)


@drawn(3)
@given(words=lines())
def test_a_line_does_something_or_is_one_error(words, here, capsys):
    check(words, capsys)


@pytest.mark.parametrize("command", ["train", "plan", "inspect --mesh data=1"])
def test_a_name_that_no_file_can_have_is_one_error(here, capsys, command):
    check([*command.split(), "--model", "x" * 4000], capsys)
    assert outcome([*command.split(), "--model", "x" * 4000], capsys)[0] == 2


@pytest.mark.soak
@pytest.mark.timeout(3000)
@drawn(1000)
@given(words=lines())
def test_a_thousand_lines(words, here, capsys):
    check(words, capsys)
