"""What other systems compute, from the description of their operations, is what was published of it."""

from collections import Counter

import numpy as np
import pytest
from other_systems.description import System, Transformer, read_system
from other_systems.work import SystemUpdate, model_of

from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.errors import UsageError
from spmd_engine.planning import analyze
from spmd_engine.planning.dry_run.step_analysis import Computation, Phases, Product, Products
from spmd_engine.planning.machine.machine import read_machine
from spmd_engine.planning.simulator.times import ComputeTimes, bytes_of

LAYERS, WIDTH, HEADS, SEQUENCE, VOCABULARY, SAMPLES = 2, 64, 4, 32, 256, 3
SIZES = Transformer(LAYERS, WIDTH, HEADS, SEQUENCE, VOCABULARY)
MEGATRON = read_system("megatron-deepspeed")


def step(axes, repeats="none", system=MEGATRON, **options):
    """Of the first rank."""
    model = model_of(system, SIZES, repeats)
    found = analyze(
        model, axes, ParallelConfig(**options), batch_size=SAMPLES, dtype=np.float16, optimizer=SystemUpdate(system)
    )
    return found.classes[0].step


def published(factor):
    """FLOPs of a step: arXiv 2104.04473, section 3.5, and 2205.05198, appendix A; ``factor`` of blocks: 72, or 96 with
    all of them repeated."""
    blocks = factor * SAMPLES * SEQUENCE * LAYERS * WIDTH**2 * (1 + SEQUENCE / (6 * WIDTH))
    return blocks + 6 * SAMPLES * SEQUENCE * WIDTH * VOCABULARY


def test_flops_are_as_published():
    assert step({"data": 1}).flops == published(72)
    assert step({"data": 1}, recompute="block").flops == published(96)


def test_selective_recomputation_repeats_scores_and_mixing():
    """arXiv 2205.05198, section 5: 4 b s^2 h more for each block."""
    more = step({"data": 1}, "selective").flops - step({"data": 1}).flops
    assert more == 4 * SAMPLES * SEQUENCE**2 * WIDTH * LAYERS


def test_tensor_parallel_ranks_share_the_work_and_sum_twice_a_block_and_way():
    found = step({"model": 4})
    assert found.flops == published(72) / 4
    sums = Counter(each.payload for each in found.communications if each.operation == "all_reduce")
    # two forward and two backward in a block; behind the table; the gradient before the logits
    assert sums[2 * SAMPLES * SEQUENCE * WIDTH] == 4 * LAYERS + 2


def test_sequence_parallel_ranks_gather_and_scatter_instead():
    found = step({"model": 4}, sequence_parallel=True)
    calls = Counter(each.operation for each in found.communications)
    assert calls["reduce_scatter"] == calls["all_gather"] == 4 * LAYERS + 2
    assert found.flops == published(72) / 4


def test_sums_of_inputs_gradients_travel_while_weights_get_theirs_where_the_file_says_so():
    later = read_system("megatron-lm")
    assert (later.work, later.update) == (MEGATRON.work, 58)  # like the other, but for what it says itself
    for system, hidden in ((MEGATRON, 0), (later, 2 * LAYERS + 1)):
        found = step({"model": 4}, system=system)
        during = [found.computations[each.begins : each.ends] for each in found.communications]
        assert sum(any(c.phase == Phases.BACKWARD_WEIGHTS for c in some) for some in during) == hidden
        assert found.flops == published(72) / 4


def test_the_update_moves_the_bytes_that_the_file_says():
    found = step({"data": 1})
    parameters = 12 * LAYERS * WIDTH**2 + VOCABULARY * WIDTH  # the head has the table
    moved = [each.bytes_read + each.bytes_written for each in found.computations if each.phase == Phases.UPDATE]
    assert sum(moved) == 32 * parameters


def test_impossible_work_is_an_error_of_one_line(tmp_path):
    with pytest.raises(UsageError, match="recompute 'full': choose one of none, selective"):
        model_of(MEGATRON, SIZES, "full")
    with pytest.raises(UsageError, match="mine: its file does not list the work of first, attention, mlp, last"):
        model_of(System("mine", {}, {}, ()), SIZES)
    file = tmp_path / "mine.toml"
    for wrong in ('product = "s, k"', 'gather = "h"\nreduce = "h"', 'elements = "b"\ncolour = "red"'):
        operation = f'[[work]]\npart = "mlp"\nwhat = "x"\n{wrong}\n'
        file.write_text('name = "mine"\nsaved = []\n[state]\n[matrices]\n' + operation)
        with pytest.raises(UsageError, match=r"mine.toml: an operation has wrong fields"):
            read_system(file)


def test_fused_attention_makes_two_products_forward_five_backward_of_the_half_that_is_not_masked():
    """arXiv 2307.08691, section 3.1; and stores none of them."""
    system = read_system("fsdp-gpt")
    fused = [p for each in step({"data": 1}, system=system).computations for p in each.products if p.fused]
    scores = SAMPLES * SEQUENCE**2 * WIDTH  # FLOPs of one product over them, of half
    assert sum(each.flops for each in fused) == (2 + 5) * scores * LAYERS
    # of each head: a [s k] and a [k t] forward, and 2.5 of both backward
    sides = 2 * SEQUENCE * WIDTH // HEADS
    assert sum(map(bytes_of, fused)) == 3.5 * 2 * SAMPLES * HEADS * sides * LAYERS
    dense = published(72) - 12 * SAMPLES * SEQUENCE**2 * WIDTH * LAYERS
    assert step({"data": 1}, system=system).flops == dense + 7 * scores * LAYERS


def test_queries_share_keys_and_values_in_llamas_blocks():
    sizes = Transformer(LAYERS, WIDTH, HEADS, SEQUENCE, VOCABULARY, hidden=96, key_value_heads=2)
    found = analyze(model_of(read_system("fsdp"), sizes), {"data": 1}, batch_size=SAMPLES, dtype=np.float16)
    weights = LAYERS * (2 * WIDTH**2 + WIDTH**2 + 3 * WIDTH * 96) + VOCABULARY * WIDTH  # two heads of keys and values
    attention = 7 * SAMPLES * SEQUENCE**2 * WIDTH * LAYERS
    assert found.classes[0].step.flops == 6 * SAMPLES * SEQUENCE * weights + attention


def test_a_fused_kernel_has_the_speed_that_is_published_of_such_and_not_what_is_fitted():
    # On an H100 by mma; sums in float32 without tensor cores are slower.
    for name, itemsize, speed in ("a100", 2, 312e12), ("h100", 2, 622e12), ("h100", 4, 67e12), ("h200", 4, 67e12):
        machine = read_machine(name).with_ranks(1).with_fitted(product_share=0.5, product_half=1e12)
        product = Product(4096, 4096, 128, batch=64, itemsize=itemsize, fused=0.4)
        computation = Computation("x", "x", "forward", products=Products([product]), calls=1)
        seconds = ComputeTimes(machine).of(0, computation).products
        assert seconds == pytest.approx(product.flops / (0.4 * speed), rel=1e-2)
