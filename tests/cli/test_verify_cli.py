"""``python -m spmd_engine verify`` and, under MPI, the function behind it."""

import sys
from pathlib import Path

import pytest

from spmd_engine import Mesh, run_threads, world
from spmd_engine.axes import parse_axes
from spmd_engine.cli import main
from spmd_engine.cli.options import open_mesh
from spmd_engine.engine import AdamW
from spmd_engine.training import TrainConfig
from spmd_engine.verification import Cause, mesh_of_one, verify
from support import tiny
from support.pairwise import in_turn

MINE = """
import numpy as np
from spmd_engine import Mesh
from spmd_engine.engine import ShardedEngine
from spmd_engine.losses import cross_entropy
from spmd_engine.strategies import DataParallel, TensorParallel

class Table(ShardedEngine):
    def __init__(self):
        self.parameters = {"table": np.zeros((11, 4))}

    def load_checkpoint(self, params):
        self.parameters["table"][...] = params["table"]

    def forward(self, x):
        self.tape.push(x)
        return self.parameters["table"][x]

    def backward(self, grads):
        gradient = np.zeros((11, 4))
        np.add.at(gradient, self.tape.pop(), grads)
        return {"table": gradient}

class Scores(Table):
    output_sharding, target_sharding, loss = "b v", "b", staticmethod(cross_entropy)

class Halved(Table):
    def backward(self, grads):
        return {"table": super().backward(grads)["table"] / 2}

class Forgetful(DataParallel):
    def all_reduce(self, arr, op="sum", *, over=None, label=""):
        return arr if label == "dw0" else super().all_reduce(arr, op, over=over, label=label)

def make(mesh, dtype):
    return TensorParallel(4, 6, mesh, dtype)

def empty():
    engine = Table()
    engine.parameters = {}
    return engine

def fixed():
    return DataParallel(4, 6, Mesh(data=2))

def alone():
    return DataParallel(4, 6, Mesh(data=1))

nothing = 3
"""
GPT2 = str(Path(__file__).parents[1] / "golden/decoders/gpt2")
SHORT = ["--length", "8", "--batch-size", "4"]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@pytest.fixture
def verify_on(mpi_run, tmp_path):
    """The command on several ranks."""
    (tmp_path / "mine.py").write_text(MINE)

    def run(ranks, *args):
        return mpi_run(ranks, "-m", "spmd_engine", "verify", *args, env=ONE_THREAD, cwd=tmp_path, timeout=60)

    return run


@pytest.fixture
def verify_here(tmp_path, monkeypatch, capsys):
    """The command in this process, alone or as one rank of several: its exit code, output and errors."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)

    def run(*args):
        code = 0
        try:
            main(["verify", *args])
        except SystemExit as leave:
            code = leave.code
        return code, *capsys.readouterr()

    return run


def assert_agrees(text):
    lines = text.splitlines()
    assert lines[-1].startswith("agrees to ") and [line.split()[0] for line in lines[-5:-1]] == ["step", "1", "2", "3"]
    return lines[2:-5]


PIPELINE = ["--mesh", "pipe=2,model=2", "--schedule", "zero-bubble", "--micro-batches", "2", "--sequence-parallel"]
CONTEXT = ["--mesh", "context=2", "--zero", "3", "--context-method", "ulysses", "--dropout", "0.1"]
OWN = ["mine:make", "--mesh", "model=2", "--input-shape", "5,4"]


@pytest.mark.soak  # as on virtual ranks; what does not agree is told by MPI ranks below
def test_what_agrees_ends_with_code_0(verify_on):
    result = verify_on(2, *OWN, *SHORT)
    assert result.returncode == 0 and not result.stderr, result.stderr
    assert_agrees(result.stdout)


def test_what_agrees_on_virtual_ranks(virtual):
    assert_agrees(virtual(4, "verify", *PIPELINE, *SHORT, "--model", GPT2).out)


def test_a_compression_is_held_to_the_given_tolerance(virtual, capsys):
    compressed = ["--mesh", "data=2", "--compress", "bfloat16", *SHORT, "--optimizer", "sgd", "--model", "mlp"]
    compressed += ["--no-finite-differences"]
    assert_agrees(virtual(2, "verify", *compressed, "--tolerance", "0.1").out)
    with pytest.raises(SystemExit, match="1"):
        virtual(2, "verify", *compressed, "--tolerance", "1e-6")
    assert "step 1: gradient of" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            ["--model", "mlp", "--precision", "bfloat16", "--seed", "0"], id="a ReLU that a rounding turns on"
        ),
        pytest.param(["--model", GPT2, "--length", "12", "--precision", "bfloat16", "--seed", "2"], id="AdamW's signs"),
    ],
)
def test_what_roundings_grow_to_is_no_mistake(virtual, options):
    shape = ["--mesh", "model=2", "--batch-size", "4", "--steps", "3", "--no-finite-differences"]
    assert "ranks sum 16-bit floats" in virtual(2, "verify", *options, *shape).out


UNEVEN = {"pipe=2,model=1|3": "0,3", "pipe=2,model=3|2": "0,10"}  #: behind a ReLU


@in_turn(2, mesh=list(UNEVEN))
def test_a_stage_may_end_with_a_layer_that_does_not_say_how_many_channels_it_has(virtual, mesh):
    options = ["--model", "convnet", "--stages", UNEVEN[mesh], "--batch-size", "4", "--micro-batches", "2"]
    assert_agrees(virtual(tiny.ranks_of(parse_axes(mesh)), "verify", "--mesh", mesh, *options).out)


def test_sums_of_halos_gradients_are_among_those_of_16_bit_floats(virtual):
    options = ["--model", "convnet", "--reshard-after", "2", "--precision", "bfloat16", "--batch-size", "4"]
    verdict = virtual(2, "verify", "--mesh", "rows=2", *options, "--steps", "1").out
    assert "ranks sum 16-bit floats in block1/conv\n" in verdict


def test_ranks_are_compared_in_any_order(virtual):
    def place():
        with open_mesh(TrainConfig.of(model="mlp", mesh={"pipe": 2}, rank_order="1,0")) as mesh:
            return mesh.coordinates["pipe"]

    assert run_threads(place, 2) == [1, 0]
    order = ["--model", "mlp", "--mesh", "pipe=2", "--rank-order", "1,0", "--batch-size", "4"]
    assert_agrees(virtual(2, "verify", *order).out)


AGREEING = [
    pytest.param(PIPELINE, id="pipe", marks=pytest.mark.mpi(ranks=4)),
    pytest.param(CONTEXT, id="context", marks=pytest.mark.mpi(ranks=2)),
]


@pytest.mark.soak
@pytest.mark.parametrize("args", AGREEING)
def test_what_agrees_on_all_ranks(verify_here, args):
    code, out, err = verify_here(*args, *SHORT)
    assert (code, err) == (0, "")
    if world().rank == 0:
        assert_agrees(out)


@pytest.mark.parametrize(
    "args",
    [
        ["--model", "mlp", "--optimizer", "sgd"],
        ["--strategy", "ring-attention"],
        ["--strategy", "pipeline", "--mesh", "pipe=1", "--micro-batches", "2"],
        ["spmd_engine.strategies:DataParallel(3, hidden_dim=4)", "--input-shape", "5,3"],
        ["mine:Table", "--input-shape", "5", "--tokens", "11"],
        ["mine:Scores", "--input-shape", "5", "--tokens", "11", "--classes", "4"],
    ],
    ids=lambda args: " ".join(args[:2]),
)
def test_models_pages_and_engines_of_one_s_own(verify_here, args):
    code, out, err = verify_here(*args, *SHORT)
    assert (code, err) == (0, "")
    between = assert_agrees(out)
    compared = ["one device's gradients are those of finite differences, to "]
    assert [line[: len(compared[0])] for line in between if line] == ([] if "--model" in args else compared)


@pytest.mark.mpi(ranks=2)
def test_what_does_not_agree_is_explained_and_ends_with_code_1(verify_here):
    code, out, err = verify_here("mine:Forgetful(4, 6)", "--input-shape", "6,4")
    assert (code, err) == (1, "")
    if world().rank == 0:
        assert "step 1: gradient of layer_0/weights (layer layer_0) differs on ranks 0, 1" in out
        assert out.count("summed over data it would be right: a reduction over data is missing") == 1


def test_what_is_wrong_on_one_device_too_ends_with_code_1(verify_here):
    args = ["mine:Halved", "--input-shape", "5", "--tokens", "11"]
    code, out, err = verify_here(*args)
    assert (code, err) == (1, "") and "gradient of table is wrong on one device, too" in out
    assert "it is 0.5 times what it should be" in out
    assert verify_here(*args, "--no-finite-differences")[0] == 0


@pytest.mark.mpi(ranks=2)
def test_rounding_is_no_agreement_where_none_is_tolerated(verify_here):
    code, out, _ = verify_here("--model", "mlp", "--tolerance", "1e-30", "--steps", "1", *SHORT)
    assert code == 1 and ("step 1: " in out or world().rank > 0)


MISTAKES = {
    "needs --input-shape N,N,...": ["mine:make"],
    "--input-shape 5,x: write whole numbers": ["mine:make", "--input-shape", "5,x"],
    "--input-shape 5,0: sizes must be from 1": ["mine:make", "--input-shape", "5,0"],
    "write MODULE:NAME or FILE.py:NAME": ["mine", "--input-shape", "5,4"],
    "there is no file ../other.py": ["../other.py:make", "--input-shape", "5,4"],
    "write the path of a file with its ending .py": ["../mine:make", "--input-shape", "5,4"],
    "No module named 'yours'": ["yours:Engine", "--input-shape", "5,4"],
    "has no attribute 'Engine'": ["mine:Engine", "--input-shape", "5,4"],
    "3 is not a callable object": ["mine:nothing", "--input-shape", "5,4"],
    "Forgetful needs model_dim, hidden_dim": ["mine:Forgetful", "--input-shape", "5,4"],
    "malformed node or string": ["mine:Forgetful(4, six)", "--input-shape", "5,4"],
    "made an engine without parameters": ["mine:empty", "--input-shape", "5,4"],
    "omit --zero": ["mine:make", "--zero", "1", "--input-shape", "5,4"],
    "omit one of them": ["mine:make", "--strategy", "pipeline"],
    "it also needs the axes model": ["--strategy", "tensor-parallel", "--mesh", "data=1"],
    "unknown strategy 'magic'": ["--strategy", "magic"],
    "unknown model 'huge'": ["--model", "huge"],
    "Add --schedule interleaved": ["--chunks", "2"],
    "compression changes sums, and one device does not": ["--compress", "float16"],
    "it makes the mesh data=2, of 2 ranks. Let it take the mesh": ["mine:fixed", "--input-shape", "5,4"],
    "start: mpiexec -n 2 python -m spmd_engine verify ... --mesh data=2": ["mine:fixed", "--input-shape", "5,4"],
    "a mesh of its own, data=1, instead of --mesh x=1": ["mine:alone", "--mesh", "x=1", "--input-shape", "5,4"],
    "--classes goes with an engine of your own": ["--classes", "4"],
    "the engine's loss is the mean squared error": ["mine:Table", "--input-shape", "5", "--classes", "4"],
    "Invalid value for '--steps'": ["--steps", "0"],
}


@pytest.mark.parametrize("message", MISTAKES)
def test_a_mistake_is_one_line_and_code_2(verify_here, message):
    code, _, err = verify_here(*MISTAKES[message])
    assert code == 2 and err.startswith("spmd_engine: ") and message in err and err.count("\n") == 1


def test_an_engine_in_a_file_of_another_folder(verify_here, tmp_path, monkeypatch):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    (there / "borrowing.py").write_text("from lying_beside import Table\n")
    (there / "lying_beside.py").write_text(MINE)
    (there / "json.py").write_text(MINE)
    monkeypatch.chdir(here)
    arguments = ["--input-shape", "5", "--tokens", "4", "--steps", "1"]
    assert verify_here("../there/borrowing.py:Table", *arguments)[0] == 0
    code, _, err = verify_here("../there/json.py:Table", *arguments)
    assert code == 2 and "has the name of another module" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("message", "name"),
    [
        ("Let it take the mesh", "mine:fixed"),  # when the ranks know of each other
        ("No module", "yours:E"),  # before, as of `train`
    ],
)
@pytest.mark.soak  # `train` and `infer` on two ranks tell theirs in the same place
def test_of_all_ranks_one_tells_the_mistake(verify_on, message, name):
    result = verify_on(2, name, "--input-shape", "5,4")
    lines = [line for line in result.stderr.splitlines() if "spmd_engine: " in line or "Traceback" in line]
    assert result.returncode == 2 and len(lines) == 1 and message in lines[0], result.stderr


# --- under MPI


class Lazy(AdamW):
    """Does not update the parameters of one rank of three."""

    def update(self, engine, *args, **options):
        if engine.device_id == 2:
            before = {name: parameter.copy() for name, parameter in engine.parameters.items()}
        super().update(engine, *args, **options)
        if engine.device_id == 2:
            for name, parameter in engine.parameters.items():
                parameter[...] = before[name]


@pytest.mark.mpi(ranks=3)
@pytest.mark.parametrize("optimizer", [pytest.param(AdamW, marks=pytest.mark.soak), Lazy])
def test_under_mpi(optimizer):
    with Mesh(data=3) as mesh:
        reference = tiny.make_engine(mesh_of_one()) if mesh.rank == 0 else None
        report = verify(tiny.make_engine(mesh, zero=1), reference, tiny.batch, steps=2, optimizer=optimizer)
    if optimizer is AdamW:
        assert report.agrees and report.distance < 1e-11
    else:
        found = report.disagreement
        assert (found.what, found.ranks, found.findings[0].cause) == ("parameter embedding/table", (2,), Cause.STALE)
