"""Whole jobs on the stand-in for CuPy, of each family and each form of parallelism, have the losses of NumPy."""

import json
from functools import cache, partial
from math import prod
from threading import get_ident

import numpy as np
import pytest

from spmd_engine import TrainConfig, run_threads, train
from spmd_engine.adaptive import ShapeRequest
from spmd_engine.arrays.precision import emulated
from spmd_engine.errors import UsageError
from spmd_engine.layers import RouterOptions
from spmd_engine.models import GPTSize, Mixture
from spmd_engine.models.convnet import ImageShape, resnet
from spmd_engine.models.decoder import GPT_SIZES
from spmd_engine.models.lora import LoRAOptions
from spmd_engine.models.names import IMAGES
from support import fake_cupy, fake_nccl
from support.fake_cupy import math_mode
from support.random_jobs import FAMILIES, RandomJob

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
    "resnet": ({"model": "resnet-nano", "augment": "shift-flip", "batch_size": 4}, "rows=2"),
    "adapters": ({**LLAMA, "lora": LoRAOptions(rank=2)}, "data=2"),
    "zero 1": ({**GPT2, "zero": 1}, "data=2"),
    "zero 3": ({**GPT2, "zero": 3}, "data=2"),
    "compressed": ({**GPT2, "compress": "powersgd", "group_threshold": 0}, "data=2"),
    "hybrid sharded": ({**LLAMA, "recompute": "block"}, "replicate=2,shard=2"),
    "tensor and sequence": ({**GPT2, "sequence_parallel": True}, "model=2"),
    "pipeline": ({**GPT2, "schedule": "zero-bubble"}, "pipe=2"),
    "ring": ({**LLAMA, "context_method": "ring"}, "context=2"),
    "ulysses": ({**LLAMA, "context_method": "ulysses"}, "context=2"),
    "experts": ({"model": FAMILY["olmoe"]}, "expert=2"),
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
STEPS_ALONE = {"eval_every": 0, "eval_samples": 2, "sample": 0, "save_every": 0, "batch_size": 4}


def steps_of(name, **more):
    """A job of JOBS that only trains, and its mesh: in one micro-batch, except for a pipeline."""
    what, mesh = JOBS[name]
    return what | STEPS_ALONE | {"micro_batches": 1 + ("pipe" in mesh), **more}, mesh


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
    """A function: the losses of the steps of a job of JOBS in float64 on the CPU, which is trained once."""
    return cache(lambda name: run(*steps_of(name), folder / name, "cpu", data))


#: Jobs of which each has parts that no other has.
STEPS = {"gemma2 with documents", "experts by capacity", "mlp", "resnet", "compressed", "ring", "tensor and sequence"}
#: Jobs that also evaluate, save and write a sample here; that of the others takes minutes together.
WHOLE = {"adapters"}


@pytest.mark.parametrize("name", some(STEPS, JOBS))
def test_steps_of_a_job_on_cuda_have_the_losses_of_the_cpu(name, data, of_cpu, tmp_path, cuda):
    np.testing.assert_allclose(run(*steps_of(name), tmp_path, "cuda", data), of_cpu(name), rtol=1e-9)


@pytest.mark.parametrize("name", some(WHOLE, JOBS))
def test_a_whole_job_on_cuda_has_the_losses_of_the_cpu(name, data, tmp_path, cuda):
    found, expected = (run(*JOBS[name], tmp_path / device, device, data) for device in ("cuda", "cpu"))
    np.testing.assert_allclose(found, expected, rtol=1e-9)


@pytest.mark.parametrize("transport", ["nccl", pytest.param("staged", marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    "name",
    some(
        {"pipeline"},
        ["zero 3", "hybrid sharded", "tensor and sequence", "pipeline", "ring", "ulysses", "experts", "four axes"],
    ),
)
def test_a_job_by_another_transport_has_the_losses_of_the_cpu(
    name, transport, data, of_cpu, tmp_path, cuda, monkeypatch
):
    """By default virtual ranks copy: here each has a device of its own, in the same memory."""
    monkeypatch.setattr(fake_cupy.Device, "pci_bus_id", property(lambda _: f"{get_ident()}"))
    with fake_nccl.installed() as communicators:
        found = run(*steps_of(name, transport=transport), tmp_path, "cuda", data)
    np.testing.assert_allclose(found, of_cpu(name), rtol=1e-9)
    assert bool(communicators.created) == (transport == "nccl")


#: How far the losses and norms of two steps may be apart where sums are float32: a rounding of one can differ.
ROUNDED = 0.03


@pytest.mark.parametrize("name", some({"gpt2"}, JOBS))
def test_a_job_in_bfloat16_has_the_losses_of_the_cpu_but_for_rounding(name, data, tmp_path, cuda):
    (what, mesh), (here, there) = steps_of(name, dtype="bfloat16"), (tmp_path / "cpu", tmp_path / "cuda")
    expected = run(what, mesh, here, "cpu", data)
    np.testing.assert_allclose(run(what, mesh, there, "cuda", data), expected, rtol=ROUNDED)


#: In bfloat16 a CPU alone rounds the probabilities of attention.
EMULATED = [("convnet", "bfloat16"), ("experts", "float16")]
LATER = [(name, "bfloat16") for name in ("mlp", "resnet")]
LATER += [(name, "float16") for name in ("gpt2", "llama", "zero 3", "pipeline", "four axes")]
EMULATED += [pytest.param(*case, marks=pytest.mark.soak) for case in LATER]


@pytest.mark.parametrize(("name", "dtype"), EMULATED)
def test_sums_in_float64_give_what_the_cpu_gives(name, dtype, data, tmp_path, cuda):
    (what, mesh), (here, there) = steps_of(name, dtype=dtype), (tmp_path / "cpu", tmp_path / "cuda")
    with emulated():
        expected = run(what, mesh, here, "cpu", data)
        np.testing.assert_allclose(run(what, mesh, there, "cuda", data), expected, rtol=1e-9)
    assert dtype != "float16" or loss_scales(there) == {2.0**16}


def loss_scales(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["loss_scale"] for line in lines if "loss" in line}


@pytest.mark.soak
def test_a_job_in_float16_has_the_losses_of_the_cpu_but_for_rounding(data, tmp_path, cuda):
    what = LLAMA | STEPS_ALONE | {"dtype": "float16", "zero": 1}
    here, there = (run(what, "data=2", tmp_path / device, device, data) for device in ("cpu", "cuda"))
    np.testing.assert_allclose(there, here, rtol=ROUNDED)
    assert loss_scales(tmp_path / "cuda") == {2.0**16}


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


def test_a_run_resumes_and_changes_its_shape(data, tmp_path, cuda):
    """From a checkpoint of two devices on one, with other shards, and then on another mesh without a file between."""
    expected = run(GPT2, "data=1", tmp_path / "cpu", "cpu", data, steps=3)
    run({**GPT2, "zero": 3}, "data=2", tmp_path / "cuda", "cuda", data, steps=3, stop_at=1)
    found = run(
        GPT2, "model=2", tmp_path / "cuda", "cuda", data, steps=3, resume=True, turned={"mesh": "pipe=2"}, turns_at=2
    )
    np.testing.assert_allclose(found, expected, rtol=1e-9)
