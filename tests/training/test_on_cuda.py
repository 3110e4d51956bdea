"""Whole steps on the stand-in for CuPy, of each family and each strategy, give what NumPy gives."""

import json
from functools import cache, partial
from math import prod
from threading import get_ident

import numpy as np
import pytest

import fake_cupy
import fake_nccl
import pages
from fake_cupy import events, math_mode
from linear_engine import Linear
from random_jobs import FAMILIES, RandomJob
from spmd_engine import Mesh, TrainConfig, batch_of, run_threads, train
from spmd_engine.adaptive import ShapeRequest
from spmd_engine.arrays.backend import get_backend
from spmd_engine.arrays.meta.device import DeviceShapes
from spmd_engine.arrays.precision import dtype_of, emulated
from spmd_engine.comm.device_transport import choose_transport
from spmd_engine.engine import SGD, AdamW, LayeredEngine, making_on
from spmd_engine.engine.build import build_engine
from spmd_engine.engine.distributed import make_engine
from spmd_engine.engine.model_config import ModelConfig
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.errors import UsageError
from spmd_engine.layers import RouterOptions
from spmd_engine.models import DecoderConfig, GPTSize, Mixture, gpt
from spmd_engine.models.convnet import ImageShape, resnet
from spmd_engine.models.decoder import GPT_SIZES
from spmd_engine.models.lora import LoRAOptions
from spmd_engine.models.names import IMAGES
from spmd_engine.planning import analyze
from spmd_engine.serving import SamplingOptions, StoppingCriteria, generate
from spmd_engine.strategies import STRATEGIES
from spmd_engine.training import Trainer

FAMILY = {family.name: str(family) for family in FAMILIES}
GPT2, LLAMA = {"model": FAMILY["gpt2"]}, {"model": FAMILY["llama"]}
MOE = {
    "model": "gpt-moe-nano",
    "mixture": Mixture(5, 1, 7, "", RouterOptions(bias_rate=0.1)),
    "dropout": 0.1,
    "length": 5,
}
JOBS = {
    "gpt2": (GPT2, "data=1"),
    "llama": (LLAMA, "data=1"),
    "gemma2 with documents": ({"model": FAMILY["gemma2"], "documents": "apart"}, "data=1"),
    "experts by capacity": (MOE, "data=1"),
    "mlp": ({"model": "mlp"}, "row=2,col=2"),
    "convnet": ({"model": "convnet", "batch_size": 4}, "data=1"),
    "resnet": ({"model": "resnet-nano", "augment": "shift-flip", "batch_size": 4}, "rows=2,data=2"),
    "adapters": ({**LLAMA, "lora": LoRAOptions(rank=2)}, "data=2"),
    "zero 1": ({**GPT2, "zero": 1}, "data=2"),
    "zero 3": ({**GPT2, "zero": 3}, "data=2"),
    "compressed": ({**GPT2, "compress": "powersgd", "group_threshold": 0}, "data=2"),
    "hybrid sharded": ({**LLAMA, "recompute": "block"}, "replicate=2,shard=2"),
    "tensor and sequence": ({**GPT2, "sequence_parallel": True}, "model=2"),
    "pipeline": ({**GPT2, "schedule": "zero-bubble"}, "pipe=2"),
    "ring": ({**LLAMA, "context_method": "ring"}, "context=2"),
    "ulysses": ({**LLAMA, "context_method": "ulysses"}, "context=2"),
    "experts": ({"model": FAMILY["olmoe"]}, "expert=2,data=2"),
    "four axes": ({**LLAMA, "zero": 1}, "pipe=2,model=2"),
}


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """Of the files; two of the built-in models have fewer and narrower layers here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(GPT_SIZES, "gpt-moe-nano", GPTSize(2, 24, 6, 16, mixture=Mixture()))
        small = partial(resnet, blocks=(1, 1), width=4, large=False)
        patch.setitem(IMAGES, "resnet-nano", (small, ImageShape()))
        yield tmp_path_factory.mktemp("jobs")


@pytest.fixture(scope="module")
def data(folder):
    """A function: the data of a model."""
    made = RandomJob(0, folder)
    made._images()
    images = {"convnet": str(folder / "images.npz"), "resnet-nano": str(folder / "images.npz")}
    text, letters = made._text(), made._tokens()
    return lambda model: images.get(model, text if model in ("mlp", "deep-mlp") else letters)


def losses(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [[line["loss"], line["grad_norm"]] for line in lines if "loss" in line]


#: Without what the losses of steps do not depend on.
STEPS_ALONE = {"eval_every": 0, "eval_samples": 2, "sample": 0, "save_every": 0}


def run(what, mesh, folder, device, data, *, steps=2, turned=None, turns_at=1, **options):
    how = {
        "dtype": "float64", "steps": steps, "eval_samples": 6, "warmup": 2, "batch_size": 8, "micro_batches": 2,
        "learning_rate": 0.02, "grad_clip": 0.3, "sample": 5, "save_every": 1, "mesh": mesh, "device": device,
        "data": data(what["model"]),
    }  # fmt: skip
    if what["model"] not in ("mlp", "convnet", "resnet-nano"):
        how["length"] = 12
    job = TrainConfig.of(**how | what)
    requests = {turns_at: ShapeRequest(turned)} if turned else {}
    ranks = prod(int(size) for _, size in (axis.split("=") for axis in mesh.split(",")))
    run_threads(lambda: train(job, folder, propose=requests.get, **options), ranks)
    return losses(folder)


def some(quick, names):
    """The names, of which the others than ``quick`` take minutes together."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.soak) for name in names]


@pytest.fixture(scope="module")
def of_cpu(folder, data):
    """A function: the losses of a job of JOBS in float64 on the CPU, which is trained once."""
    return cache(lambda name: run(*JOBS[name], folder / name, "cpu", data))


#: Jobs whose parts others have, too.
REPEATED = {"llama", "zero 1", "pipeline"}


@pytest.mark.parametrize("name", some(JOBS.keys() - REPEATED, JOBS))
def test_a_job_on_cuda_has_the_losses_of_the_cpu(name, data, of_cpu, tmp_path, cuda):
    np.testing.assert_allclose(run(*JOBS[name], tmp_path, "cuda", data), of_cpu(name), rtol=1e-9)


@pytest.mark.parametrize("transport", ["nccl", "staged"])
@pytest.mark.parametrize(
    "name",
    some(
        {"pipeline", "experts"},
        ["zero 3", "hybrid sharded", "tensor and sequence", "pipeline", "ring", "ulysses", "experts", "four axes"],
    ),
)
def test_a_job_by_another_transport_has_the_losses_of_the_cpu(
    name, transport, data, of_cpu, tmp_path, cuda, monkeypatch
):
    """By default virtual ranks copy: here each has a device of its own, in the same memory."""
    monkeypatch.setattr(fake_cupy.Device, "pci_bus_id", property(lambda _: f"{get_ident()}"))
    what, mesh = JOBS[name]
    with fake_nccl.installed() as communicators:
        found = run({**what, **STEPS_ALONE, "transport": transport}, mesh, tmp_path, "cuda", data)
    np.testing.assert_allclose(found, of_cpu(name), rtol=1e-9)
    assert bool(communicators.created) == (transport == "nccl")


#: Meshes of fewer ranks than those of JOBS, for halves.
OF_HALVES = {"resnet": "rows=2", "experts": "expert=2"}


def half_job(name, dtype):
    """A job of JOBS in a 16-bit dtype, and its mesh."""
    what, mesh = JOBS[name]
    if name in OF_HALVES:
        what, mesh = what | {"batch_size": 4, "micro_batches": 1}, OF_HALVES[name]
    return what | STEPS_ALONE | {"dtype": dtype}, mesh


#: How far the losses and norms of two steps may be apart where sums are float32: a rounding of one can differ.
ROUNDED = 0.03


@pytest.mark.parametrize("name", some({"gpt2", "resnet"}, JOBS))
def test_a_job_in_bfloat16_has_the_losses_of_the_cpu_but_for_rounding(name, data, tmp_path, cuda):
    (what, mesh), (here, there) = half_job(name, "bfloat16"), (tmp_path / "cpu", tmp_path / "cuda")
    expected = run(what, mesh, here, "cpu", data)
    np.testing.assert_allclose(run(what, mesh, there, "cuda", data), expected, rtol=ROUNDED)


#: In bfloat16 a CPU alone rounds the probabilities of attention.
EMULATED = [(name, "bfloat16") for name in ("mlp", "convnet", "resnet")]
EMULATED += [(name, "float16") for name in ("gpt2", "experts", "zero 3", "four axes")]
EMULATED += [pytest.param("llama", "float16", marks=pytest.mark.soak)]


@pytest.mark.parametrize(("name", "dtype"), EMULATED)
def test_sums_in_float64_give_what_the_cpu_gives(name, dtype, data, tmp_path, cuda):
    (what, mesh), (here, there) = half_job(name, dtype), (tmp_path / "cpu", tmp_path / "cuda")
    with emulated():
        expected = run(what, mesh, here, "cpu", data)
        np.testing.assert_allclose(run(what, mesh, there, "cuda", data), expected, rtol=1e-9)


def test_a_job_in_float16_scales_its_loss(data, tmp_path, cuda):
    what = LLAMA | {"dtype": "float16", "zero": 1}
    here, there = (run(what, "data=2", tmp_path / device, device, data) for device in ("cpu", "cuda"))
    np.testing.assert_allclose(there, here, rtol=ROUNDED)
    lines = map(json.loads, (tmp_path / "cuda" / "metrics.jsonl").read_text().splitlines())
    assert {line["loss_scale"] for line in lines if "loss" in line} == {2.0**16}


def test_tf32_is_for_float32_on_a_device(data, tmp_path, cuda):
    modes = []
    job = TrainConfig.of(model="mlp", steps=1, tf32=True, device="cuda", data=data("mlp"), eval_samples=2)
    run_threads(lambda: (train(job, tmp_path / "a"), modes.append(math_mode())), 1)
    run_threads(lambda: (train(job.with_options(tf32=False), tmp_path / "b"), modes.append(math_mode())), 1)
    assert modes == [3, 0]  # CUBLAS_TF32_TENSOR_OP_MATH, CUBLAS_DEFAULT_MATH
    with pytest.raises(UsageError, match="--tf32: a CPU has no products of TF32"):
        run_threads(lambda: train(job.with_options(device="cpu"), tmp_path / "c"), 1)
    with pytest.raises(UsageError, match="--tf32 with --precision bfloat16"):
        run_threads(lambda: train(job.with_options(dtype="bfloat16"), tmp_path / "d"), 1)


# --- launches of a step, and how often the host waits, of models of few layers


def of_text(family, layers, **options):
    shape = DecoderConfig(
        width=24,
        heads=12,
        key_value_heads=4,
        head_width=2,
        hidden=14,
        layers=layers,
        vocabulary=13,
        context=16,
        **options,
    )
    return ModelConfig(name=family, shape=shape), (2, 16), (2, 16)


#: The model, its inputs and targets; the most launches, waits, and arrays copied to the device. Fused attention takes
#: as many launches for two samples as for any number.
GPT2_STEP = lambda batch: (gpt(GPTSize(3, 24, 12, 16, 13), dropout=0.1), (batch, 16), (batch, 16))
COUNTS = {
    "gpt2": (lambda: GPT2_STEP(2), 318, 2, 3),
    "gpt2 without fused attention": (lambda: GPT2_STEP(16), 442, 2, 3),
    "llama": (lambda: of_text("llama", 4), 335, 2, 3),
    # Experts chosen in turn, as the dry run assumes; a wait of each layer, and one for side outputs.
    "moe": (
        lambda: of_text("olmoe", 4, mixture=Mixture(8, 0, 7, router=RouterOptions(routing="balanced"))),
        1037,
        2 + 4 + 1,
        3,
    ),
    "resnet18": (
        lambda: (resnet(ImageShape(32, 32, 3, 10), "resnet18", blocks=(2, 2, 2, 2), width=4), (4, 32, 32, 3), (4,)),
        1000,
        2,
        4,  # the targets twice: for the loss, and for the accuracy
    ),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", COUNTS)
def test_a_step_launches_and_waits_as_often_as_the_dry_run_counts(name, dtype, cuda, monkeypatch):
    make, launches, waits, copies = COUNTS[name]
    model, inputs, targets = make()
    if name.endswith("without fused attention"):
        # At batch 16 x 1,024 the parts of attention are those of 16 tokens in a work space that is as much smaller.
        monkeypatch.setattr(cuda.kernels, "flash_attention", None)
        monkeypatch.setenv("SPMD_FLASH_ATTENTION", "0")  # in the dry run
        monkeypatch.setattr(cuda, "workspace", int(cuda.workspace * (16 / 1024) ** 2))
    monkeypatch.setattr(DeviceShapes, "workspace", cuda.workspace)
    with Mesh() as mesh:
        if isinstance(model, ModelConfig):
            engine = build_engine(model.changed(dtype=dtype), mesh, device="cuda")
        else:
            engine = LayeredEngine(model, mesh, backend=cuda, dtype=dtype_of(dtype))
        rng = np.random.default_rng(0)
        x = rng.integers(0, 10, inputs) if len(inputs) == 2 else rng.standard_normal(inputs).astype(np.float32)
        y = rng.integers(0, 10, targets)
        batches = lambda step: batch_of(x, y, engine, 1, step)
        trainer = Trainer(engine, AdamW(), batches, lambda step: 1e-3, grad_clip=1.0)
        trainer.step()
        events().clear()
        trainer.step()
        counted = len(events().launches), events().syncs, events().count("from_host")
    assert counted[1:] == (waits, copies)
    assert counted[0] <= launches * (1 if dtype == "float32" else 1.6)
    sequence = inputs[1] if len(inputs) == 2 else None
    planned = analyze(model, {"data": 1}, batch_size=inputs[0], sequence=sequence, device="cuda", dtype=dtype)
    step = planned.classes[0].step
    assert (step.waits, step.copies) == counted[1:]
    assert abs(step.launches - counted[0]) <= (4 if (name, dtype) == ("resnet18", "bfloat16") else 0)


def test_a_run_resumes_and_changes_its_shape(data, tmp_path, cuda):
    """From a checkpoint of two devices on one, with other shards, and then on another mesh without a file between."""
    expected = run(GPT2, "data=1", tmp_path / "cpu", "cpu", data, steps=3)
    run({**GPT2, "zero": 3}, "data=2", tmp_path / "cuda", "cuda", data, steps=3, stop_at=1)
    found = run(
        GPT2, "model=2", tmp_path / "cuda", "cuda", data, steps=3, resume=True, turned={"mesh": "pipe=2"}, turns_at=2
    )
    np.testing.assert_allclose(found, expected, rtol=1e-9)


@pytest.mark.parametrize("family", ["gpt2", "gemma3", "olmoe"])
def test_generated_texts(family, cuda):
    def write(device):
        with Mesh(model=2) as mesh:
            model = ModelConfig(name=FAMILY[family], dtype="float64", seed=3)
            engine = build_engine(model, mesh, ParallelConfig(), device=device)
            drawn, stopping = SamplingOptions(sample=True, seed=2, top_p=0.9), StoppingCriteria(8)
            return [each.tokens for each in generate(engine, [[1, 2, 3], [4]], sampling=drawn, stopping=stopping)]

    assert run_threads(write, 2, args=["cuda"]) == run_threads(write, 2, args=["cpu"])


# --- pages of strategies/, and engines of one's own


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy(name, cuda):
    axes = pages.meshes(STRATEGIES[name])[1]

    def program(device):
        with making_on(get_backend(device)):
            losses, *arrays = pages.train(name, axes, AdamW, 2)
        assert all(x is None or (device == "cuda") == cuda.owns(x) for kind in arrays for x in kind.values())
        host = [{key: x if x is None else get_backend("cpu").asarray(x) for key, x in kind.items()} for kind in arrays]
        return losses, *host

    for found, expected in zip(*(run_threads(program, prod(axes.values()), args=[each]) for each in ("cuda", "cpu"))):
        pages.assert_trained_alike(found, expected)


def test_an_engine_of_one_s_own(cuda):
    def program(device):
        engine = make_engine(Linear, Mesh(), device=device)
        engine.load_checkpoint({"w": np.arange(6.0).reshape(3, 2)})
        x, y = np.random.default_rng(0).standard_normal((2, 8, 3))
        trainer = Trainer(engine, SGD(), lambda step: batch_of(x, y[:, :2], engine, 2, step), lambda step: 0.1)
        return [report.loss for report in trainer.run(3)] + [trainer.evaluate([batch_of(x, y[:, :2], engine)])]

    np.testing.assert_allclose(*(run_threads(program, 2, args=[device]) for device in ("cuda", "cpu")), rtol=1e-12)


def test_an_engine_of_one_s_own_takes_the_best_transport(cuda, monkeypatch):
    """Without a call of ``choose_transport``, which comes first where there is one."""
    monkeypatch.setattr(fake_cupy.Device, "pci_bus_id", property(lambda _: f"{get_ident()}"))

    def program(chosen):
        with Mesh(data=2) as mesh:
            if chosen:
                choose_transport(mesh.group(), cuda, chosen)
            engine = make_engine(Linear, mesh, device="cuda")
            engine.all_reduce(cuda.asarray(np.ones(3)), over="data")

    with fake_nccl.installed() as communicators:
        run_threads(program, 2, args=["staged"])
        assert not communicators.created
        run_threads(program, 2, args=[None])
        assert sorted(communicators.created) == [(2, 0), (2, 1)]


def test_an_engine_with_parameters_on_the_host_is_refused(cuda):
    class OnHost(Linear):
        def __init__(self):
            self.parameters = {"w": np.zeros((3, 2))}

    with pytest.raises(UsageError, match="OnHost: w is not on device 'cuda'; make parameters by self.xp"):
        run_threads(lambda: make_engine(OnHost, Mesh(), device="cuda"), 1)


@pytest.mark.parametrize("axes, how", [({"data": 3}, {"zero": 3}), ({"pipe": 3}, {}), ({"context": 3}, {})], ids=str)
def test_the_host_of_a_rank_waits_as_often_with_others_by_nccl(axes, how, cuda, monkeypatch):
    """Twice in a step, for the norm of the gradient and the loss: never for a collective or a message."""
    monkeypatch.setattr(fake_cupy.Device, "pci_bus_id", property(lambda _: f"{get_ident()}"))

    def program():
        with Mesh(**axes) as mesh:
            assert "NCCL" in choose_transport(mesh.group(), cuda)[0]
            model = ModelConfig(name=FAMILY["gpt2"], dtype="float64")
            engine = build_engine(model, mesh, ParallelConfig(**how), device="cuda")
            x = np.random.default_rng(0).integers(0, 10, (6, 12))
            batches = lambda step: batch_of(x, x, engine, 2, step)
            trainer = Trainer(engine, AdamW(), batches, lambda step: 1e-3, grad_clip=1.0)
            trainer.step()
            before = mesh.ledger.total().calls
            events().clear()
            trainer.step()
            assert events().syncs <= 2 and not events().count("start_to_host")
            return mesh.ledger.total().calls - before

    with fake_nccl.installed():
        assert min(run_threads(program, 3)) > 3
