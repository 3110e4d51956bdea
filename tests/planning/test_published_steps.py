"""Steps on machines that are not here are predicted near what was published of them, with nothing fitted to the rows.

Tolerances are wide: they tell a law that is wrong (FLOPs, what is recomputed, fused attention, bubbles) from a number.
"""

from dataclasses import replace
from statistics import median

import numpy as np
import pytest
from other_systems.description import Transformer, read_system
from other_systems.work import SystemUpdate, model_of

from spmd_engine.planning.machine.machine import read_machine
from spmd_engine.planning.search.cost_model import CostModel
from spmd_engine.planning.search.search_space import Candidate

#: Of what large products reach on each, and of the rest what is usual.
SHARES = {"a100": 0.75, "h100": 0.65}
USUAL = {"product_half": 4e9, "memory_share": 0.8, "pass_seconds": 2e-4, "link_share": 0.7, "wait_seconds": 2e-5}


def predicted(system, gpu, sizes, axes, batch, micro_batch, recompute="none", chunks=1, zero=0):
    """Seconds of a step."""
    mesh = {axis: size for axis, size in axes.items() if size > 1} or {"data": 1}
    data, stages = axes.get("data", 1), axes.get("pipe", 1)
    schedule = ("interleaved" if chunks > 1 else "1f1b") if stages > 1 else None
    candidate = Candidate(
        tuple(mesh.items()),
        batch,
        batch // (micro_batch * data),
        zero=zero,
        schedule=schedule,
        chunks=chunks,
        recompute=recompute,
    )
    if stages > 1 and sizes.layers % (stages * chunks) == 0:
        each = 2 * sizes.layers // (stages * chunks)
        candidate = replace(candidate, stages=tuple(n * each + bool(n) for n in range(stages * chunks)))
    described = read_system(system)
    machine = read_machine(gpu).with_fitted(product_share=SHARES[gpu], **USUAL).with_ranks(candidate.ranks)
    costs = CostModel(model_of(described, sizes), machine, dtype=np.float16, optimizer=SystemUpdate(described))
    return costs.estimator(candidate).estimate().seconds


#: arXiv 2104.04473, table 1, on A100: heads, width, layers, tensor and pipeline ranks, GPUs, batch, TFLOP/s of a GPU;
#: micro-batch and chunks of a stage are of examples/sc21/run_table_1.sh in Megatron-LM.
NARAYANAN = [
    (24, 2304, 24, 1, 1, 32, 512, 137, 16, 1),
    (32, 3072, 30, 2, 1, 64, 512, 138, 16, 1),
    (32, 4096, 36, 4, 1, 128, 512, 142, 16, 1),
    (48, 6144, 40, 8, 1, 256, 1024, 135, 8, 1),
    (64, 8192, 48, 8, 2, 512, 1536, 138, 4, 1),
    (80, 10240, 60, 8, 4, 1024, 1792, 140, 2, 3),
    (96, 12288, 80, 8, 8, 1536, 2304, 148, 2, 2),
    (128, 16384, 96, 8, 16, 1920, 2160, 155, 1, 2),
    (128, 20480, 105, 8, 35, 2520, 2520, 163, 1, 3),
    (160, 25600, 128, 8, 64, 3072, 3072, 163, 1, 1),
]


def test_weak_scaling_of_megatron_from_billions_to_a_trillion_of_parameters():
    errors = []
    for heads, width, layers, tensor, stages, gpus, batch, tflops, micro_batch, chunks in NARAYANAN:
        sizes = Transformer(layers, width, heads, 2048, 51200)
        axes = {"pipe": stages, "data": gpus // (tensor * stages), "model": tensor}
        flops = 96 * batch * 2048 * layers * width**2 * (1 + 2048 / (6 * width) + 51200 / (16 * layers * width))
        seconds = predicted("megatron-lm", "a100", sizes, axes, batch, micro_batch, "block", chunks)
        errors.append(seconds * gpus * tflops * 1e12 / flops - 1)
    assert max(map(abs, errors)) < 0.2
    assert median(map(abs, errors)) < 0.1


#: MPT under FSDP, mosaicml/llm-foundry, scripts/train/benchmarking/README.md (061f2c7ce6): GPU, how many, layers,
#: width, heads, sequence, micro-batch, micro-batches, whether blocks are recomputed, tokens/s of a GPU.
FOUNDRY = [
    ("a100", 64, 80, 8192, 64, 2048, 8, 4, True, 410),
    ("a100", 8, 40, 5120, 40, 2048, 2, 3, False, 2262),
    ("a100", 8, 32, 4096, 32, 65536, 1, 2, True, 1013),
    ("a100", 8, 24, 2048, 16, 8192, 3, 4, False, 13814),
    ("a100", 8, 12, 768, 12, 16384, 4, 2, False, 60040),
    ("h100", 32, 80, 8192, 64, 2048, 2, 16, True, 882),
    ("h100", 16, 40, 5120, 40, 2048, 2, 1, False, 4767),
    ("h100", 8, 32, 4096, 32, 32768, 2, 2, True, 3318),
    ("h100", 8, 32, 2560, 20, 4096, 5, 6, False, 20964),
]


@pytest.mark.parametrize("row", FOUNDRY, ids=lambda row: f"{row[0]}-{row[1]}-{row[3]}-{row[5]}")
def test_fused_attention_under_fsdp_from_short_sequences_to_long_ones(row):
    gpu, gpus, layers, width, heads, sequence, micro_batch, times, again, rate = row
    sizes, batch = Transformer(layers, width, heads, sequence, 50368), micro_batch * times * gpus
    recompute = "block" if again else "none"
    seconds = predicted("fsdp-gpt", gpu, sizes, {"data": gpus}, batch, micro_batch, recompute, zero=3)
    assert seconds == pytest.approx(batch * sequence / (gpus * rate), rel=0.2)


def test_llama_on_eight_thousand_gpus():
    """arXiv 2407.21783, table 4: 405B on 8,192 H100, 430 TFLOP/s each of the model's."""
    sizes = Transformer(126, 16384, 128, 8192, 128256, hidden=53248, key_value_heads=8)
    axes = {"pipe": 16, "data": 64, "model": 8}
    weights = 126 * (2 * 16384**2 + 2 * 16384 * 1024 + 3 * 16384 * 53248) + 128256 * 16384
    flops = 2048 * 8192 * (6 * weights + 6 * 126 * 8192 * 16384)
    seconds = predicted("megatron-core", "h100", sizes, axes, 2048, 1, chunks=8, zero=1)
    assert seconds == pytest.approx(flops / (8192 * 430e12), rel=0.2)
