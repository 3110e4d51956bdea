"""The command line, as people start it."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from spmd_engine.training import Job

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


STEPS = 6
EXACT = ["--model", "gpt-nano", "--dtype", "float64", "--steps", str(STEPS), "--warmup", "3", "--dropout", "0.1"]
EXACT += ["--grad-clip", "1", "--batch-size", "8", *QUIET]


@pytest.fixture(scope="session")
def one_rank(tmp_path_factory):
    return tmp_path_factory.mktemp("exact")


COMPOSITIONS = [
    "data=1",
    "data=8 --zero 3",
    "model=4,data=2 --sequence-parallel",
    "context=4,data=2 --context-method ulysses",
    "pipe=2,data=2,model=2 --schedule 1f1b --zero 1 --micro-batches 2",
    "pipe=8 --schedule zero-bubble --micro-batches 4",
    "pipe=2,context=2,model=2 --zero 3 --recompute block",
]
MORE = [
    "data=8",
    "model=3",
    "data=2,model=4",
    "replicate=2,shard=4",
    "context=4,data=2",
    "pipe=4,data=2 --schedule interleaved",
]


@pytest.mark.parametrize("composition", [*COMPOSITIONS, *(pytest.param(c, marks=pytest.mark.soak) for c in MORE)])
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
    ok(2, "train", "--steps", "6", "--seed", "3", "--warmup", "2", "--run", "whole", *short)
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

    texts = [ok(n, "generate", "--run", "runs/parts", "--prompt", "def f(", "--tokens", "8").stdout for n in (1, 3)]
    assert texts[0] == texts[1] and texts[0].startswith("def f(")

    tokens = np.random.default_rng(0).integers(0, 257, (5, 128))
    np.save(tmp_path / "x.npy", tokens)
    for name, ranks, mesh in (("a", 1, "data=1"), ("b", 4, "data=2,model=2")):
        files = ["--input", "x.npy", "--output", name]
        ok(ranks, "infer", "--run", "runs/parts", *files, "--mesh", mesh, "--batch-size", 3)
    a, b = np.load(tmp_path / "a"), np.load(tmp_path / "b")
    assert a.shape == (5, 128, 257)
    np.testing.assert_allclose(a, b, atol=1e-4)


def test_runs_that_cannot_answer_say_why(ok, spmd, tmp_path):
    few = ["--steps", "1", "--batch-size", "2", *QUIET]
    ok(1, "train", "--model", "mlp", "--run", "scores", *few)
    ok(1, "train", "--strategy", "data-parallel", "--run", "page", *few)
    np.save(tmp_path / "x.npy", np.zeros((2, 64)))
    for run, why, command in (
        ("scores", "mlp is no model of text", ["generate"]),
        ("page", "a run of --strategy data-parallel", ["generate"]),
        ("page", "a run of --strategy data-parallel", ["infer", "--input", "x.npy", "--output", "y.npy"]),
    ):
        result = spmd(1, *command, "--run", run)
        assert result.returncode == 2 and why in result.stderr


def test_resume_takes_over_the_run_s_own_options(ok, tmp_path):
    ok(1, "train", "--steps", "1", "--seed", "3", "--batch-size", "2", "--run", "r", *QUIET)
    ok(1, "train", "--steps", "2", "--resume", "--run", "r")
    assert metrics(tmp_path / "runs" / "r")[1]["tokens"] == 2 * 128
    result = ok(1, "train", "--resume", "--run", "r")  # all steps were made: says so, changes nothing
    assert len(metrics(tmp_path / "runs" / "r")) == 2 and "nothing to do" in result.stderr


def test_resume_keeps_the_composition_that_fits_the_new_mesh(ok, tmp_path):
    compose = ["--zero", "3", "--schedule", "interleaved", "--chunks", "3", "--group-cap", "100000"]
    ok(2, "train", "--mesh", "pipe=2", *compose, "--steps", "1", "--batch-size", "2", "--run", "r", *QUIET)
    result = ok(4, "train", "--mesh", "data=2,pipe=2", "--resume", "--run", "r", "--steps", "2", "--stages", "cost")
    config = json.loads((tmp_path / "runs" / "r" / "config.json").read_text())
    kept = {"zero": 3, "schedule": "interleaved", "chunks": 3, "stages": "cost", "group_cap": 100000}
    assert kept.items() <= config["composition"].items() and "note" not in result.stderr
    result = ok(1, "train", "--resume", "--run", "r", "--steps", "3")
    assert "--zero 3 has no effect" not in result.stderr and "--schedule interleaved has no effect" in result.stderr
    assert json.loads((tmp_path / "runs" / "r" / "config.json").read_text())["composition"]["zero"] == 3


@pytest.mark.parametrize("option, value", [("seed", "3"), ("dtype", "float64"), ("batch-size", "4"), ("model", "mlp")])
def test_resume_refuses_what_decides_what_is_computed(spmd, tmp_path, option, value):
    Job.of(model="gpt-nano", batch_size=2, steps=1).write(tmp_path / "config.json")
    result = spmd(1, "train", "--resume", "--run", tmp_path, f"--{option}", value)
    assert result.returncode == 2
    assert f"{option.replace('-', '_')} {value} cannot go on with it" in one_line(result)


def test_a_run_described_by_a_file_is_the_run(ok, tmp_path):
    few = ["--model", "mlp", "--steps", "2", "--batch-size", "4", "--learning-rate", "0.1", *QUIET]
    ok(1, "train", *few, "--run", "first")
    ok(1, "train", "--config", "runs/first/config.json", "--run", "second")
    first, second = tmp_path / "runs" / "first", tmp_path / "runs" / "second"
    assert (first / "config.json").read_text() == (second / "config.json").read_text()
    assert (first / "parameters.safetensors").read_bytes() == (second / "parameters.safetensors").read_bytes()


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


def test_inspect_needs_no_ranks(ok):
    text = ok(1, "inspect", "--mesh", "data=2,model=4").stdout
    assert "931,872 parameters" in text and "8 ranks" in text
    assert "block0/mlp/w0" in text and "d f/model" in text and "v/model d" in text
    assert f"{931872 * 4:,}" in ok(1, "inspect").stdout


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--mesh", "row=2"], 'd is cut over mesh axis "row" inside'),
        (["--compress", "zip"], "unknown compression 'zip'"),
        (["--mesh", "data=2", "--zero", "2", "--compress", "top-k"], "Choose float16 or bfloat16"),
    ],
    ids=lambda x: x[-1] if isinstance(x, list) else "",
)
def test_inspect_shows_nothing_that_train_refuses(spmd, options, why):
    result = spmd(1, "inspect", *options)
    assert result.returncode == 2 and why in result.stderr and not result.stdout


MISTAKES = {
    "unknown model 'huge'": ["--model", "huge"],
    "no such file or folder": ["--data", "/nowhere/at/all"],
    "there is nothing to read in it": ["--data", "empty"],
    "longer than the context of 128": ["--data", "short"],
    "Raise --batch-size to 2": ["--batch-size", "1"],
    "needs 3 ranks, but there are 2": ["--mesh", "data=3"],
    "no customary layout for axis 'rows'": ["--mesh", "rows=2"],
    "cannot read mesh 'data:2'": ["--mesh", "data:2"],
    "Invalid value for '--steps'": ["--steps", "many"],
    "No such option": ["--stepz", "3"],
    "no such run": ["--resume", "--run", "nothing"],
    "holds a run already": ["--run", "taken"],
    "needs CuPy": ["--device", "cuda"],
    "Add --schedule interleaved": ["--chunks", "2"],
    "--stop-at 9 with --steps 5": ["--steps", "5", "--stop-at", "9"],
    "steps is -5: it must be from 0": ["--steps", "-5"],
    "cannot be read as JSON": ["--config", "empty"],
}


@pytest.mark.parametrize("message", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(spmd, tmp_path, message):
    if message == "needs CuPy":
        try:
            import cupy  # noqa: F401

            pytest.skip("CuPy is here")
        except ImportError:
            pass
    (tmp_path / "empty").touch()
    (tmp_path / "short").write_text("too short")
    (tmp_path / "runs" / "taken").mkdir(parents=True)
    (tmp_path / "runs" / "taken" / "parameters.safetensors").touch()
    before = sorted(tmp_path.rglob("*"))
    result = spmd(2, "train", *MISTAKES[message], timeout=60)
    assert result.returncode == 2, result.stderr
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == 1 and message in lines[0] and lines[0].startswith("spmd_engine: "), result.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_help_tells_every_command(ok):
    text = ok(1, "--help").stdout
    for command in ("train", "generate", "infer", "inspect"):
        assert command in text
        assert "--mesh" in ok(1, command, "--help").stdout


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


def test_a_mistake_that_one_rank_finds_is_still_one_line(ok, spmd, tmp_path):
    ok(1, "train", "--steps", "1", "--batch-size", "2", "--run", "r", *QUIET)
    tokens = np.zeros((2, 128), int)
    tokens[1, 5] = 999
    np.save(tmp_path / "x.npy", tokens)
    result = spmd(2, "infer", "--run", "r", "--mesh", "data=2", "--input", "x.npy", "--output", "y.npy", timeout=30)
    assert "rank 1 of 2: spmd_engine: gpt-nano: inputs from 0 to 999" in one_line(result)
    assert not (tmp_path / "y.npy").exists()


def test_damaged_runs_are_one_line(ok, spmd, tmp_path):
    ok(1, "train", "--steps", "1", "--batch-size", "2", "--run", "r", *QUIET)
    folder = tmp_path / "runs" / "r"
    resume = ["train", "--resume", "--run", "r", "--steps", "2"]
    assert "optimizer sgd cannot go on with it" in one_line(spmd(2, *resume, "--optimizer", "sgd"))
    whole = (folder / "parameters.safetensors").read_bytes()
    (folder / "parameters.safetensors").write_bytes(whole[:1000])
    assert "is damaged or cannot be read" in one_line(spmd(2, *resume))
    (folder / "config.json").write_text("{}")
    assert "version is null; this program reads version 1" in one_line(spmd(2, *resume))
    (folder / "config.json").write_text("[")
    assert "cannot be read as JSON" in one_line(spmd(2, *resume))


def test_a_mistake_on_many_ranks_is_one_line_every_time(spmd):
    for _ in range(4):
        result = spmd(8, "train", "--batch-size", "3", timeout=60)
        assert result.returncode == 2 and len(result.stderr.splitlines()) == 1, result.stderr
