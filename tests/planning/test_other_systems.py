"""Memory of Megatron-LM, from a description of what it saves, is what was published of it.

arXiv 2205.05198: figure 1 (GiB a GPU, first stage; digitised, in steps of 1/16 or finer) and figure 7 (activations as
percent of those without any technique). Eight ranks of tensor parallelism, sequences of 2048.
"""

import pytest
from other_systems.description import Transformer, read_system
from other_systems.memory import memory_of

from spmd_engine.errors import UsageError

MODELS = {  # transformer, stages, chunks a stage, samples of a micro-batch
    "22B": (Transformer(48, 6144, 64, 2048), 1, 1, 4),
    "175B": (Transformer(96, 12288, 96, 2048), 8, 3, 1),
    "530B": (Transformer(105, 20480, 128, 2048), 35, 3, 1),
    "1T": (Transformer(128, 25600, 160, 2048), 64, 1, 1),
}
FIGURE_1 = {  # state; activations without any technique; with sequence parallelism and selective recomputation
    "22B": (45.5625, 59.25, 9.5625),
    "175B": (45.5625, 66.84375, 12.3515625),
    "530B": (31.640625, 114.0234375, 23.076171875),
    "1T": (32.958984375, 131.25, 26.5625),
}
FIGURE_7 = {  # sequence parallel; selective; both; full
    "22B": (66.84, 49.42, 16.18, 7.64),
    "175B": (62.04, 56.53, 18.49, 8.71),
    "530B": (58.31, 62.04, 20.27, 9.42),
    "1T": (58.31, 62.04, 20.27, 9.42),
}


def first_stage(name, **options):
    transformer, stages, chunks, samples = MODELS[name]
    axes = {"pipe": stages, "model": 8} if stages > 1 else {"model": 8}
    micro_batches = 2 * stages if chunks > 1 else stages
    found = memory_of(
        read_system("megatron"),
        transformer,
        axes,
        micro_batch=samples,
        micro_batches=micro_batches,
        chunks=chunks,
        **options,
    )
    return found[0]


@pytest.mark.parametrize("name", ["22B"])
def test_memory_is_as_published(name):
    plain = first_stage(name)
    both = first_stage(name, sequence_parallel=True, recompute="selective")
    for found, published in zip((plain.state, plain.activations, both.activations), FIGURE_1[name], strict=True):
        assert found / 2**30 == pytest.approx(published, abs=0.01)
    techniques = [
        first_stage(name, sequence_parallel=True),
        first_stage(name, recompute="selective"),
        both,
        first_stage(name, recompute="full"),
    ]
    for found, published in zip(techniques, FIGURE_7[name], strict=True):
        assert 100 * found.activations / plain.activations == pytest.approx(published, abs=0.15)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["175B", "530B", "1T"])
def test_memory_of_many_stages_is_as_published(name):
    test_memory_is_as_published(name)


def test_a_description_with_unknown_fields_is_one_line(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('name = "mine"\n[state]\n[matrices]\n[[saved]]\nwhat = "x"\ncolour = "red"\nkept_by = []\n')
    with pytest.raises(UsageError, match=r"mine.toml: a tensor that is saved has wrong fields.*colour"):
        read_system(file)


@pytest.mark.parametrize("zero", range(4))
def test_zero_shards_state_as_in_its_paper(zero):
    """Rajbhandari et al. (2020), figure 1: 16, 4 + 12/N, 2 + 14/N and 16/N bytes a parameter."""
    layers, width, vocabulary, ranks = 4, 64, 1000, 4
    transformer = Transformer(layers, width, 4, 32, vocabulary)
    system = read_system("megatron-deepspeed")
    options = {"micro_batch": 1, "micro_batches": 1, "recompute": "full"}
    (found,) = memory_of(system, transformer, {"data": ranks}, zero=zero, **options)
    whole = {0: 16, 1: 4, 2: 2, 3: 0}[zero]
    parameters = 12 * layers * width**2 + 2 * vocabulary * width
    assert found.state == parameters * (whole + (16 - whole) / ranks)
    table, block = vocabulary * width, 12 * width**2
    assert table > block
    assert found.gathered == table * {0: 0, 1: 0, 2: 2, 3: 6}[zero]


def test_a_recomputed_block_is_held_temporarily():
    layers, width, sequence, samples = 4, 64, 32, 2
    system, transformer = read_system("megatron"), Transformer(layers, width, 4, sequence)
    options = {"micro_batch": samples, "micro_batches": 1}
    (plain,) = memory_of(system, transformer, {"data": 1}, **options)
    (full,) = memory_of(system, transformer, {"data": 1}, recompute="full", **options)
    one = 2 * samples * sequence * width  # the input of a block in 16 bits
    assert full.activations == layers * one
    assert full.with_repeated == layers * one + plain.activations // layers - one
