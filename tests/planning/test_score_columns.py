"""The reader of tables that nobody prepared for."""

from importlib import resources

import pytest

from support.script_module import script

Columns = script("score_columns", "benchmarks").Columns
ROW = {"Num_Layers": "24", "d_model": "1024", "heads": "16", "gbs": "32", "TP": "2", "step_ms": "250", "note": "x"}


def run_of(row):
    return Columns.of(list(row)).run(row)


def test_columns_are_recognized_by_their_usual_names():
    columns = Columns.of(list(ROW))
    assert not columns.missing and columns.unused == ["note"]
    taken = {"sequence": 2048, "vocabulary": 51200, "pp": 1, "gpu": "a100"}
    assert columns.assumed == taken | {"recompute": "full, or none with fused attention or ZeRO-3"}
    run = columns.run(ROW)
    assert (run.layers, run.hidden, run.tp, run.micro_batch, run.seconds) == (24, 1024, 2, 32, 0.25)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"gbs": "OOM"}, "gbs is no whole number: 'OOM'"),
        ({"heads": "3"}, "hidden is no multiple of heads"),
        ({"step_ms": ""}, "step_ms is no number above 0"),
        ({"gpus": "3"}, "tp x pp x dp is not the number of GPUs"),
        ({"dp": "3"}, "global_batch is no multiple of micro_batch x dp"),
        ({"GPU": "V100"}, "there is no machine file for GPU 'V100'; there are: a100, h100, h200"),
        ({"cp": "2"}, "cp above 1 is not predicted here"),
        ({"precision": "FP8"}, "precision 'FP8' is not predicted here: products are of 16 bits"),
    ],
)
def test_an_unusable_row_has_a_reason(change, reason):
    assert run_of(ROW | change) == reason


def test_missing_columns_are_listed_with_their_usual_names():
    columns = Columns.of(["gpus", "loss"])
    assert columns.missing == ["layers", "hidden", "global_batch", "a step's time or memory"]
    assert "hidden (as hidden, hidden_size, width, " in columns.help
    assert "a step's time or memory (as step_seconds, iteration_ms, " in columns.help


@pytest.mark.parametrize(
    "speed",
    [
        {"Throughput (T/s/GPU)": "16,384"},
        {"tokens/sec": "65536"},
        {"samples_per_second": "32"},
        {"seconds": "1"},
        {"Model TFLOPS": str(32 * 2048 * (72 * 24 * 1024**2 + 12 * 24 * 2048 * 1024 + 6 * 51200 * 1024) / 4e12)},
    ],
)
def test_seconds_of_a_step_follow_from_a_rate(speed):
    row = {name: value for name, value in ROW.items() if name != "step_ms"}
    assert run_of(row | speed | {"#-GPUs": "4"}).seconds == pytest.approx(1)


def test_the_header_of_a_famous_table_is_understood():
    """arXiv 2104.04473, table 1."""
    row = {"Number of parameters (billion)": "145.6", "Attention heads": "96", "Hidden size": "12288"}
    row |= {"Number of layers": "80", "Tensor model-parallel size": "8", "Pipeline model-parallel size": "8"}
    run = run_of(row | {"Number of GPUs": "1536", "Batch size": "2304", "Achieved teraFLOP/s per GPU": "148"})
    assert (run.layers, run.tp, run.pp, run.dp, run.micro_batch, run.repeats) == (80, 8, 8, 24, 1, "full")
    flops = 96 * 2304 * 2048 * 80 * 12288**2 * (1 + 2048 / (6 * 12288) + 51200 / (16 * 80 * 12288))
    assert run.seconds == pytest.approx(flops / (1536 * 148e12))


def test_full_recomputation_counts_in_flops_that_a_gpu_makes_and_not_in_the_models():
    """arXiv 2104.04473, section 3.5: 96 B s l h^2 (1 + s / 6h + V / 16 l h)."""
    row = {name: value for name, value in ROW.items() if name != "step_ms"} | {"recompute": "full"}
    counted = 96 * 32 * 2048 * 24 * 1024**2 * (1 + 2048 / (6 * 1024) + 51200 / (16 * 24 * 1024)) / 2
    assert run_of(row | {"tflops_per_gpu": "100"}).seconds == pytest.approx(counted / 100e12)
    assert run_of(row | {"model_tflops_per_gpu": "100"}).seconds < 0.8 * counted / 100e12


def test_a_models_shape_is_looked_up_by_its_name():
    row = {"Model": "LLAMA3_70B", "#-GPUs": "64", "GBS": "128", "MBS": "1", "TP": "4", "PP": "4", "VP": "n/a"}
    run = run_of(
        row | {"System": "DGX-H100", "Sequence Length": "8192", "Tokens / sec / GPU": "800", "Precision": "BF16"}
    )
    assert (run.layers, run.hidden, run.kv_heads, run.ffn, run.gated) == (80, 8192, 8, 28672, True)
    assert (run.gpu, run.dp, run.virtual, run.vocabulary) == ("h100", 4, 1, 128256)
    assert run.seconds == pytest.approx(128 * 8192 / (64 * 800))
    assert "layers or hidden is missing" in run_of(row | {"Model": "mystery", "step_s": "1"})


def test_sharding_recomputation_and_memory_are_read_in_many_formats():
    row = ROW | {"Sharding Strategy": "FULL_SHARD", "Activation Checkpointing": "True", "peak_allocated_MiB": "2048"}
    run = run_of(row)
    assert (run.zero, run.recompute, run.memory, run.flash) == (3, "full", 2.0, None)
    assert run_of(ROW | {"fsdp": "yes", "activation_ckpt": "no"}).zero == 3
    assert run_of(ROW | {"fsdp": "0"}).zero == 0 and run_of(ROW | {"Framework": "torchtitan"}).zero == 3


def test_a_row_may_name_a_machine_file(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text((resources.files("spmd_engine.planning") / "machines" / "h100.toml").read_text())
    share_of_peak = {name: value for name, value in ROW.items() if name != "step_ms"} | {"MFU": "50%"}
    run = run_of(share_of_peak | {"gpu": str(file)})
    assert run.gpu == str(file) and run.seconds == pytest.approx(run.flops(repeated=False) / (0.5 * 989e12))
    assert str(tmp_path / "none.toml") in run_of(ROW | {"gpu": str(tmp_path / "none.toml")})
    memory_alone = {name: value for name, value in ROW.items() if name != "step_ms"} | {"memory_gb": "40"}
    assert (run_of(memory_alone).memory, run_of(memory_alone).seconds) == (40.0, None)
