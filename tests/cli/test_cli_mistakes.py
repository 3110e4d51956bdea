"""What the command line refuses: one line, exit code 2, and nothing left behind."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from click import BadParameter

from spmd_engine import Mesh
from spmd_engine.checkpoints import CheckpointFolder
from spmd_engine.cli.values import NumberRange, WholeNumber, WholeRange
from spmd_engine.engine.build import build_engine
from spmd_engine.errors import UsageError, one_of
from spmd_engine.planning.machine.machine import read_machine, toml_of
from spmd_engine.training import TrainConfig
from support.command_line import QUIET, TEXT

pytestmark = pytest.mark.usefixtures("narrow")

LLAMA = Path(__file__).parents[1] / "golden" / "decoders" / "llama"


def test_runs_that_cannot_answer_say_why(here, tmp_path):
    few = ["--steps", "1", "--batch-size", "2", *QUIET, *TEXT]
    here("train", "--model", "mlp", "--run", "scores", *few)
    here("train", "--strategy", "data-parallel", "--run", "page", *few)
    np.save(tmp_path / "x.npy", np.zeros((2, 64)))
    for run, why, command in (
        ("scores", "mlp is not a model of text", ["generate", "--prompt", "def "]),
        ("page", "a run of --strategy data-parallel", ["generate", "--prompt", "def "]),
        ("page", "a run of --strategy data-parallel", ["infer", "--input", "x.npy", "--output", "y.npy"]),
    ):
        code, _, errors = here(*command, "--run", run)
        assert code == 2 and why in errors


def test_generate_takes_no_option_without_what_it_goes_with(here):
    here("train", "--run", "text", "--steps", "0", "--batch-size", "2", *QUIET, *TEXT)
    greedy = "--greedy takes the likeliest token, and --temperature 0.7 samples: omit one"
    lacks = {"--log-probs": "goes with --json", "--system=Be brief": "goes with --chat"}
    for option, why in (lacks | {"--greedy --temperature=0.7": greedy}).items():
        options = [option] if " -" not in option else option.split()
        code, output, errors = here("generate", "--run", "text", "--prompt", "def ", "--tokens", "1", *options)
        assert code == 2 and why in errors and not output


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--mesh", "row=2"], 'd is sharded over mesh axis "row" inside'),
        (["--compress", "zip"], "unknown compression 'zip'"),
        (["--mesh", "data=2", "--zero", "2", "--compress", "top-k"], "Choose float16 or bfloat16"),
    ],
    ids=lambda x: x[-1] if isinstance(x, list) else "",
)
def test_inspect_shows_nothing_that_train_refuses(here, options, why):
    code, output, errors = here("inspect", *options)
    assert code == 2 and why in errors and not output


def test_analyze_shows_no_step_in_which_a_rank_has_no_samples(here):
    code, output, errors = here("analyze", "--mesh", "data=3", "--batch-size", "2")
    assert code == 2 and "Raise --batch-size to 3" in errors and not output


MISTAKES = {
    "unknown model 'huge'": ["--model", "huge"],
    "no such file or folder": ["--data", "/nowhere/at/all"],
    "there is nothing to read in it": ["--data", "empty"],
    "longer than the context of 128": ["--data", "short"],
    "Raise --batch-size to 2": ["--batch-size", "1"],
    "needs 3 ranks, but there are": ["--mesh", "data=3"],
    "no customary layout for axis 'lines'": ["--mesh", "lines=2"],
    "cannot read mesh 'data:2'": ["--mesh", "data:2"],
    "Invalid value for '--steps'": ["--steps", "many"],
    "there is no option --stepz; did you mean --steps?": ["--stepz", "3"],
    "there is no option --lr; did you mean --learning-rate? 'python -m spmd_engine train --help-all'": ["--lr", "1"],
    "there is no option --batch; did you mean --batch-size?": ["--batch", "1"],
    "no such run": ["--resume", "--run", "nothing"],
    "holds a run already": ["--run", "taken"],
    "needs CuPy": ["--device", "cuda"],
    "Add --schedule interleaved": ["--chunks", "2"],
    "--stop-at 9 with --steps 5": ["--steps", "5", "--stop-at", "9"],
    "steps is -5: it must be from 0": ["--steps", "-5"],
    "cannot be read as JSON": ["--config", "empty"],
    "short: not images in a format known here": ["--model", "convnet", "--data", "short"],
    "gpt-nano learns from no images": ["--augment", "shift"],
    "top_k is 9, but there are 8 experts": ["--model", "gpt-moe-nano", "--top-k", "9"],
    "gpt-nano has no experts": ["--experts", "4"],
    "there is no axis 'context'. Name axes": ["--model", "gpt-moe-nano", "--experts-over", "context"],
    "dense 99: blocks are from 0 to": ["--model", "gpt-moe-nano", "--dense-layers", "99"],
}


#: Mistakes that all ranks find alike: in their options, and in the mesh. What rank 0 alone reads is met by the test of
#: damaged runs, and what another rank alone finds has a test of its own.
ON_TWO_RANKS = ("no custom",)
OF_TWO_RANKS = ("Raise --batch-size to 2", "no customary layout for axis 'lines'")  # one rank cannot make them


@pytest.fixture
def kept(tmp_path):
    """What is in the folder before and must be there afterwards, and nothing else."""
    (tmp_path / "empty").touch()
    (tmp_path / "short").write_text("too short")
    taken = tmp_path / "runs" / "taken" / "checkpoints" / "step-00000001"
    taken.mkdir(parents=True)
    (taken / "manifest.json").touch()
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
    assert result.returncode == 2 and message in one_line(result), result.stderr


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("message", [each for each in MISTAKES if each not in OF_TWO_RANKS])
def test_a_mistake_is_one_line_and_exit_code_2(here, message):
    if message == "needs CuPy" and cupy_is_here():
        pytest.skip("CuPy is here")
    code, _, errors = here("train", *MISTAKES[message])
    assert code == 2
    assert_one_line(message, errors)


def one_line(result):
    """The one line that a mistake leaves, whatever the launcher adds when a rank had to end the job."""
    ours = [line for line in result.stderr.splitlines() if "spmd_engine: " in line or "Traceback" in line]
    assert len(ours) == 1 and result.returncode != 0, result.stderr
    return ours[0]


def test_a_mistake_that_one_rank_finds_is_still_one_line(commands_by_mpi, r, tmp_path):
    tokens = np.zeros((2, 128), int)
    tokens[1, 5] = 999
    np.save(tmp_path / "x.npy", tokens)
    command = ["infer", "--run", r.name, "--mesh", "data=2", "--input", "x.npy", "--output", "y.npy"]
    result = commands_by_mpi(2, command)
    assert "rank 1 of 2: spmd_engine: gpt-nano: inputs from 0 to 999" in one_line(result)
    assert not (tmp_path / "y.npy").exists()


def test_nan_is_no_number_of_a_range():
    assert NumberRange(0, 1).convert("0.5", None, None) == 0.5
    with pytest.raises(BadParameter, match="'nan' is no number"):
        NumberRange(0, 1).convert("nan", None, None)


def test_damaged_runs_are_one_line(spmd, here, r):
    resume = ["train", "--resume", "--run", r.name, "--steps", "2"]
    code, _, errors = here(*resume, "--optimizer", "sgd")
    assert code == 2 and "optimizer sgd cannot go on with it" in errors and errors.count("\n") == 1
    file = max(CheckpointFolder(r).newest().glob("model-*.safetensors"))
    file.write_bytes(file.read_bytes()[:1000])
    assert "is damaged: it has 1000 bytes" in one_line(spmd(2, *resume))
    for content, why in (("{}", "version is null; this program reads version 1"), ("[", "cannot be read as JSON")):
        (r / "config.json").write_text(content)
        code, _, errors = here(*resume)
        assert code == 2 and why in errors and errors.count("\n") == 1


@pytest.mark.soak
@pytest.mark.parametrize(("ranks", "times"), [(3, 1), (8, 4)])
def test_a_mistake_on_many_ranks_is_one_line_every_time(spmd, ranks, times):
    for _ in range(times):
        result = spmd(ranks, "train", "--batch-size", "2", timeout=60)
        assert result.returncode == 2 and len(result.stderr.splitlines()) == 1, result.stderr


@pytest.mark.parametrize(
    ("line", "near"),
    [
        ("trian", "train"),
        ("show schedul", "schedule"),
        ("inspect --mesh dta=2", "data"),
        ("inspect --model convnet --mesh row=2", "rows"),
        ("inspect --mesh tensor=2", "model"),
        ("inspect --mesh dp=2", "data"),
        ("inspect --mesh tp=2", "model"),
        ("inspect --mesh pp=2", "pipe"),
        ("train --precision bf16", "bfloat16"),
        ("train --schedule 1F1B", "1f1b"),
        ("inspect --model gpt3-175", "gpt3-175b"),
        ("plan --model LLAMA-nano --ranks 2", "llama-nano"),
        ("plan --ranks 2 --machine a10", "a100"),
        ("train --strategy fuly-sharded", "fully-sharded"),
        ("train --device cude", "cuda"),
        ("train --config job.json", "batch_size"),
        ("plan --ranks 2 --model gpt.toml", "layers"),
        ("plan --ranks 2 --machine m.toml", "name"),
        ("train --model wrong", "qwen3"),
        ("train --model gpt2x", "gpt2"),
        ("train --model ./llama --lora-rank 2 --lora-targets q_prj --data job.json", "q_proj"),
        ("show experts --model gpt-moe-nano --mesh expert=2 --layer block1/mo", "block1/moe"),
    ],
)
def test_a_misspelled_name_is_answered_with_the_nearest(line, near, here, tmp_path):
    (tmp_path / "job.json").write_text('{"version": 1, "data": {"batch-size": 4}}')
    (tmp_path / "gpt.toml").write_text("layer = 2\nwidth = 8\nheads = 2\ncontext = 4\n")
    (tmp_path / "m.toml").write_text("nmae = 'mine'\n" + toml_of(read_machine("cpu")))
    shutil.copytree(LLAMA, tmp_path / "llama")
    shutil.copytree(LLAMA, tmp_path / "wrong")
    config = json.loads((LLAMA / "config.json").read_text())
    (tmp_path / "wrong" / "config.json").write_text(json.dumps(config | {"model_type": "qwen_3"}))
    code, _, error = here(*line.split())
    assert code == 2 and error.count("\n") == 1
    assert f"did you mean {near!r}? There are: {near}" in error


def test_a_misspelled_model_axis_or_parameter_is_answered_with_the_nearest_in_python():
    with pytest.raises(UsageError, match=r"unknown model 'mpl'; did you mean 'mlp'\? There are: mlp, "):
        TrainConfig.of(model="mpl")
    with pytest.raises(UsageError, match="a job has no option 'batchsize'; did you mean 'batch_size'"):
        TrainConfig.of(batchsize=3)
    with Mesh(data=1, model=1) as mesh, pytest.raises(UsageError, match="axis 'modle' .* did you mean 'model'"):
        mesh.all_reduce(np.ones(1), over="modle")
    engine = build_engine(TrainConfig.of(model="mlp").model, Mesh())
    with pytest.raises(UsageError, match="no parameter 'layer_0/weight'; did you mean 'layer_0/weights'"):
        engine.gather("layer_0/weight")


@pytest.mark.parametrize(("text", "number"), [("1e3", 1000), ("1E2", 100), ("7", 7)])
def test_a_whole_number_may_have_an_exponent(text, number):
    assert WholeNumber().convert(text, None, None) == number == WholeRange(min=1).convert(text, None, None)
    for other in ("1.5e0", "1e400", "e"):
        with pytest.raises(BadParameter):
            WholeNumber().convert(other, None, None)


def test_of_many_names_only_the_first_are_listed():
    text = one_of("name30", [f"name{n}" for n in range(60)])
    assert text.startswith("did you mean 'name30'? There are: name30, ") and text.endswith(" and 36 more")
