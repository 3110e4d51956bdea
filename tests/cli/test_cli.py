"""The command line, as people start it."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file

from spmd_engine.cli import main

ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # one rank alone would take every core and race the others' tests
QUIET = ["--eval-every", "0", "--eval-samples", "2", "--sample", "0"]


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


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
def here(tmp_path, monkeypatch, capsys):
    """The command on one rank, this process: its exit code, output and errors."""
    monkeypatch.chdir(tmp_path)

    def run(*args):
        code = 0
        try:
            main(args)
        except SystemExit as leave:
            code = leave.code
        return code, *capsys.readouterr()

    return run


STEPS = 4
EXACT = ["--model", "gpt-nano", "--dtype", "float64", "--steps", str(STEPS), "--warmup", "3", "--dropout", "0.1"]
EXACT += ["--grad-clip", "1", "--batch-size", "8", *QUIET]


@pytest.fixture(scope="session")
def one_rank(tmp_path_factory):
    return tmp_path_factory.mktemp("exact")


#: Every option that says where and when, on few ranks, and each axis beside another; with more of either in SOAK.
COMPOSITIONS = [
    "data=1",
    "data=3 --zero 3",
    "model=2,data=2 --sequence-parallel",
    "context=2,data=2 --context-method ulysses",
    "pipe=2,data=2 --schedule 1f1b --zero 1 --micro-batches 2",
    "pipe=3 --schedule zero-bubble --micro-batches 4",
    "pipe=2,context=2,model=2 --zero 3 --recompute block",
]
SOAK = [
    "data=8",
    "data=8 --zero 3",
    "model=3",
    "data=2,model=4",
    "model=4,data=2 --sequence-parallel",
    "replicate=2,shard=4",
    "context=4,data=2",
    "context=4,data=2 --context-method ulysses",
    "pipe=2,data=2,model=2 --schedule 1f1b --zero 1 --micro-batches 2",
    "pipe=4,data=2 --schedule interleaved",
    "pipe=8 --schedule zero-bubble --micro-batches 4",
]


@pytest.mark.parametrize("composition", [*COMPOSITIONS, *(pytest.param(c, marks=pytest.mark.soak) for c in SOAK)])
def test_gpt_nano_trains_alike_however_it_is_composed(ok, one_rank, composition):
    """Steps in float64, dropout and clipping on: losses to 1e-9, parameters to 1e-8 of one rank's."""
    mesh, *options = composition.split()
    ranks = int(np.prod([int(part.split("=")[1]) for part in mesh.split(",")]))
    reference, folder = one_rank / "data=1", one_rank / composition.replace(" ", "")
    if ranks > 1 and not (reference / "parameters.safetensors").exists():
        ok(1, "train", *EXACT, "--run", reference)
    ok(ranks, "train", *EXACT, "--mesh", mesh, *options, "--run", folder)
    ours, theirs = ([m["loss"] for m in metrics(each)] for each in (folder, reference))
    assert len(ours) == STEPS
    np.testing.assert_allclose(ours, theirs, rtol=1e-9)
    expected = load_file(reference / "parameters.safetensors")
    parameters = load_file(folder / "parameters.safetensors")
    assert parameters.keys() == expected.keys()
    for name, parameter in parameters.items():
        np.testing.assert_allclose(parameter, expected[name], rtol=0, atol=1e-8, err_msg=name)


def test_train_resume_generate_infer(ok, tmp_path):
    short = ["--batch-size", "4", *QUIET]
    ok(2, "train", "--steps", "6", "--seed", "3", "--warmup", "2", "--run", "whole", "--stop-at", "1", *short)
    ok(2, "train", "--steps", "3", "--seed", "3", "--warmup", "2", "--run", "parts", *short)
    runs = tmp_path / "runs"
    with (runs / "parts" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "loss": 0.0}) + "\n")  # of a run that broke off after its checkpoint
    result = ok(4, "train", "--resume", "--run", "parts", "--steps", "6", "--mesh", "data=2,model=2")
    assert [m["step"] for m in metrics(runs / "parts")] == [1, 2, 3, 4, 5, 6]
    ours, theirs = metrics(runs / "parts"), metrics(runs / "whole")
    for line, other in zip(ours[:1], theirs[:1], strict=True):  # later rates follow from --steps
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-5)
    assert set(ours[0]) == {
        *("step", "loss", "grad_norm", "learning_rate", "tokens", "seconds", "tokens_per_second", "bytes_sent"),
        *("exposed_communication", "gigabytes_per_second", "shares"),
    }
    assert "validation loss" in result.stderr

    texts = [ok(n, "generate", "--run", "runs/parts", "--prompt", "def f(", "--tokens", "8").stdout for n in (1, 2)]
    assert texts[0] == texts[1] and texts[0].startswith("def f(")

    tokens = np.random.default_rng(0).integers(0, 257, (5, 128))
    np.save(tmp_path / "x.npy", tokens)
    for name, ranks, mesh in (("a", 1, "data=1"), ("b", 2, "model=2")):
        files = ["--input", "x.npy", "--output", name]
        ok(ranks, "infer", "--run", "runs/parts", *files, "--mesh", mesh, "--batch-size", 3)
    a, b = np.load(tmp_path / "a"), np.load(tmp_path / "b")
    assert a.shape == (5, 128, 257)
    np.testing.assert_allclose(a, b, atol=1e-4)


def test_runs_that_cannot_answer_say_why(here, tmp_path):
    few = ["--steps", "1", "--batch-size", "2", *QUIET]
    here("train", "--model", "mlp", "--run", "scores", *few)
    here("train", "--strategy", "data-parallel", "--run", "page", *few)
    np.save(tmp_path / "x.npy", np.zeros((2, 64)))
    for run, why, command in (
        ("scores", "mlp is no model of text", ["generate"]),
        ("page", "a run of --strategy data-parallel", ["generate"]),
        ("page", "a run of --strategy data-parallel", ["infer", "--input", "x.npy", "--output", "y.npy"]),
    ):
        code, _, errors = here(*command, "--run", run)
        assert code == 2 and why in errors


@pytest.fixture(scope="module")
def one_step(tmp_path_factory):
    """A run of one step, to be copied."""
    folder = tmp_path_factory.mktemp("run") / "r"
    options = ["--steps", "1", "--seed", "3", "--batch-size", "2", "--run", str(folder), *QUIET]
    main(["train", *options])
    return folder


@pytest.fixture
def r(one_step, tmp_path):
    """The run of this name, as if it had been made here."""
    return shutil.copytree(one_step, tmp_path / "runs" / "r")


def test_resume_takes_over_the_run_s_own_options(ok, here, r):
    ok(1, "train", "--steps", "2", "--resume", "--run", "r")
    assert metrics(r)[1]["tokens"] == 2 * 128
    code, _, errors = here("train", "--resume", "--run", "r")  # all steps were made: says so, changes nothing
    assert len(metrics(r)) == 2 and code == 0 and "nothing to do" in errors


def test_infer_with_an_engine_of_one_s_own(ok, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from spmd_engine import world, Mesh\n"
        "from spmd_engine.strategies import TensorParallel\n"
        "def make():\n"
        "    return TensorParallel(4, 6, Mesh(model=world().size))\n"
    )
    from safetensors.numpy import save_file

    from spmd_engine.strategies.two_layers import initial_parameters

    whole = initial_parameters(4, 6)
    save_file(whole, tmp_path / "w.safetensors")
    x = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    args = ["--engine", "mine:make", "--checkpoint", "w.safetensors", "--input", "x.npy", "--output", "y.npy"]
    ok(3, "infer", *args)
    w0, w1 = whole.values()
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), np.maximum(x @ w0, 0) @ w1, atol=1e-5)


def test_inspect_needs_no_ranks(here):
    _, text, _ = here("inspect", "--mesh", "data=2,model=4")
    assert "931,872 parameters" in text and "8 ranks" in text
    assert "block0/mlp/w0" in text and "d f/model" in text and "v/model d" in text
    assert f"{931872 * 4:,}" in here("inspect")[1]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--mesh", "row=2"], 'd is cut over mesh axis "row" inside'),
        (["--compress", "zip"], "unknown compression 'zip'"),
        (["--mesh", "data=2", "--zero", "2", "--compress", "top-k"], "Choose float16 or bfloat16"),
    ],
    ids=lambda x: x[-1] if isinstance(x, list) else "",
)
def test_inspect_shows_nothing_that_train_refuses(here, options, why):
    code, output, errors = here("inspect", *options)
    assert code == 2 and why in errors and not output


MISTAKES = {
    "unknown model 'huge'": ["--model", "huge"],
    "no such file or folder": ["--data", "/nowhere/at/all"],
    "there is nothing to read in it": ["--data", "empty"],
    "longer than the context of 128": ["--data", "short"],
    "Raise --batch-size to 2": ["--batch-size", "1"],
    "needs 3 ranks, but there are": ["--mesh", "data=3"],
    "no customary layout for axis 'rows'": ["--mesh", "rows=2"],
    "cannot read mesh 'data:2'": ["--mesh", "data:2"],
    "Invalid value for '--steps'": ["--steps", "many"],
    "No such option": ["--stepz", "3"],
    "no such run": ["--resume", "--run", "nothing"],
    "holds a run already": ["--run", "taken"],
    "needs CuPy": ["--device", "cuda"],
    "needs an axis 'model'": ["--sequence-parallel"],
}


#: One for each place where a mistake is met: options, what rank 0 reads, the number of ranks, a run's folder.
ON_TWO_RANKS = ("Invalid value for '--steps'", "no such file", "Raise --batch-size to 2", "no custom", "holds a run")
OF_TWO_RANKS = ("Raise --batch-size to 2", "no customary layout for axis 'rows'")  # one rank cannot make them


@pytest.fixture
def kept(tmp_path):
    """What is in the folder before and must be there afterwards, and nothing else."""
    (tmp_path / "empty").touch()
    (tmp_path / "short").write_text("too short")
    (tmp_path / "runs" / "taken").mkdir(parents=True)
    (tmp_path / "runs" / "taken" / "parameters.safetensors").touch()
    before = sorted(tmp_path.rglob("*"))
    yield
    assert sorted(tmp_path.rglob("*")) == before


def cupy_is_here():
    try:
        import cupy  # noqa: F401
    except ImportError:
        return False
    return True


def on_two_ranks(message):
    return pytest.param(message, marks=[] if message.startswith(ON_TWO_RANKS) else pytest.mark.soak)


def assert_one_line(message, errors):
    lines = [line for line in errors.splitlines() if line.strip()]
    assert len(lines) == 1 and message in lines[0] and lines[0].startswith("spmd_engine: "), errors


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("message", [on_two_ranks(message) for message in MISTAKES])
def test_a_mistake_of_two_ranks_is_one_line_and_exit_code_2(spmd, message):
    if message == "needs CuPy" and cupy_is_here():
        pytest.skip("CuPy is here")
    result = spmd(2, "train", *MISTAKES[message], timeout=60)
    assert result.returncode == 2, result.stderr
    assert_one_line(message, result.stderr)


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("message", [each for each in MISTAKES if each not in OF_TWO_RANKS])
def test_a_mistake_is_one_line_and_exit_code_2(here, message):
    if message == "needs CuPy" and cupy_is_here():
        pytest.skip("CuPy is here")
    code, _, errors = here("train", *MISTAKES[message])
    assert code == 2
    assert_one_line(message, errors)


def test_help_tells_every_command(ok, here):
    text = ok(1, "--help").stdout
    for command in ("train", "generate", "infer", "inspect"):
        assert command in text
        code, output, _ = here(command, "--help")
        assert code == 0 and "--mesh" in output


def test_a_run_broken_off_and_resumed_is_the_run_that_was_not(ok, tmp_path):
    common = ["--steps", "4", "--batch-size", "2", "--dtype", "float64", "--warmup", "2", *QUIET]
    ok(1, "train", *common, "--run", "whole")
    ok(2, "train", *common, "--stop-at", "2", "--run", "parts")
    ok(2, "train", "--resume", "--run", "parts", "--mesh", "model=2")
    ours, theirs = ([m["loss"] for m in metrics(tmp_path / "runs" / name)] for name in ("parts", "whole"))
    np.testing.assert_allclose(ours, theirs, rtol=1e-11)


def one_line(result):
    """The one line that a mistake leaves, whatever the launcher adds when a rank had to end the job."""
    ours = [line for line in result.stderr.splitlines() if "spmd_engine: " in line or "Traceback" in line]
    assert len(ours) == 1 and result.returncode != 0, result.stderr
    return ours[0]


def test_a_mistake_that_one_rank_finds_is_still_one_line(spmd, r, tmp_path):
    tokens = np.zeros((2, 128), int)
    tokens[1, 5] = 999
    np.save(tmp_path / "x.npy", tokens)
    result = spmd(2, "infer", "--run", r.name, "--mesh", "data=2", "--input", "x.npy", "--output", "y.npy", timeout=30)
    assert "rank 1 of 2: spmd_engine: gpt-nano: inputs from 0 to 999" in one_line(result)
    assert not (tmp_path / "y.npy").exists()


def test_damaged_runs_are_one_line(spmd, here, r):
    resume = ["train", "--resume", "--run", r.name, "--steps", "2"]
    code, _, errors = here(*resume, "--optimizer", "sgd")
    assert code == 2 and "was saved with another optimizer" in errors and errors.count("\n") == 1
    whole = (r / "parameters.safetensors").read_bytes()
    (r / "parameters.safetensors").write_bytes(whole[:1000])
    assert "is damaged or cannot be read" in one_line(spmd(2, *resume))
    (r / "config.json").write_text("{}")
    assert "does not say: dtype, model, seed" in one_line(spmd(2, *resume))
    (r / "config.json").write_text("[")
    code, _, errors = here(*resume)
    assert code == 2 and "is damaged" in errors and errors.count("\n") == 1


@pytest.mark.parametrize(("ranks", "times"), [(4, 2), pytest.param(8, 4, marks=pytest.mark.soak)])
def test_a_mistake_on_many_ranks_is_one_line_every_time(spmd, ranks, times):
    for _ in range(times):
        result = spmd(ranks, "train", "--batch-size", "3", timeout=60)
        assert result.returncode == 2 and len(result.stderr.splitlines()) == 1, result.stderr
