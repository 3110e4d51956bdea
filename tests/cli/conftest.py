"""The command line: on ranks of its own, in this process, and after a run of one step."""

import json
import shutil
from pathlib import Path

import pytest
from threadpoolctl import threadpool_limits

from spmd_engine import run_threads
from spmd_engine.cli import main
from spmd_engine.models.decoder import GPT_SIZES
from support.command_line import ONE_THREAD, QUIET, TEXT


@pytest.fixture
def spmd(mpi_run, tmp_path):
    def run(ranks, *args, **options):
        return mpi_run(ranks, "-m", "spmd_engine", *args, env=ONE_THREAD, cwd=tmp_path, **options)

    return run


@pytest.fixture
def ok(spmd):
    def run(*args, **options):
        result = spmd(*args, **options)
        assert result.returncode == 0, result.stderr
        return result

    return run


@pytest.fixture
def virtual(tmp_path, monkeypatch, capsys):
    """The command on virtual ranks of this process: its output and errors."""
    monkeypatch.chdir(tmp_path)

    def run(ranks, *args):
        capsys.readouterr()
        run_threads(lambda: main(list(map(str, args))), ranks)
        return capsys.readouterr()

    return run


@pytest.fixture
def commands_by_mpi(mpi_run, tmp_path):
    """Commands one after the other on ranks that are started once: what becomes of them. gpt-nano is as here."""
    program, size = Path(__file__).with_name("several_commands.py"), GPT_SIZES["gpt-nano"]
    size = json.dumps({"layers": size.layers, "width": size.width})

    def run(ranks, *commands):
        commands = [json.dumps([str(argument) for argument in command]) for command in commands]
        return mpi_run(ranks, program, size, *commands, env=ONE_THREAD, cwd=tmp_path)

    return run


@pytest.fixture
def several_by_mpi(commands_by_mpi):
    """What each of the commands prints."""

    def run(ranks, *commands):
        result = commands_by_mpi(ranks, *commands)
        assert result.returncode == 0, result.stderr
        *texts, rest = result.stdout.split("-- the end of a command\n")
        assert len(texts) == len(commands) and not rest
        return texts

    return run


@pytest.fixture(params=["virtual", pytest.param("mpi", marks=pytest.mark.soak)])
def several(request):
    """The same on virtual ranks, whose start costs nothing; and in ``soak`` on ranks that are started."""
    if request.param == "mpi":
        return request.getfixturevalue("several_by_mpi")
    virtual = request.getfixturevalue("virtual")
    return lambda ranks, *commands: [virtual(ranks, *command).out for command in commands]


@pytest.fixture
def here(tmp_path, monkeypatch, capsys):
    """The command on one rank, this process: its exit code, output and errors."""
    monkeypatch.chdir(tmp_path)

    def run(*args):
        code = 0
        with threadpool_limits(1, user_api="blas"):  # as ONE_THREAD
            try:
                main(args)
            except SystemExit as leave:
                code = leave.code
        return code, *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def one_step(tmp_path_factory):
    """A run of one step, to be copied."""
    folder = tmp_path_factory.mktemp("run") / "r"
    options = ["--steps", "1", "--seed", "3", "--batch-size", "2", "--run", str(folder), *QUIET, *TEXT]
    main(["train", *options])
    return folder


@pytest.fixture
def r(one_step, tmp_path):
    """The run of this name, as if it had been made here."""
    return shutil.copytree(one_step, tmp_path / "runs" / "r")
