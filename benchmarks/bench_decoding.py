"""Decoding, prefill, fine-tuning and memory of a 135M Llama in float32: the engine against transformers.

    python benchmarks/bench_decoding.py --peer-python PATH/TO/python        # with torch, transformers, peft
    python benchmarks/bench_decoding.py --rounds 5 --only "batch 1,clock"

The model is a Llama with 30 layers of width 576, 9 heads, 3 key heads, FFN 1,536, 49,152 tokens and random weights,
written as a folder that both sides read. In every round each side runs once, in its own process with one thread; the
order is reversed from round to round. A row is the least CPU time of its repeats, so other work on the machine has
little effect. `clock` compares two ranks along `model` with one by wall time, and needs an idle machine.
`decoding_protocol.py` defines the rows.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import click
from decoding_protocol import NEW, RANK, ROWS

from spmd_engine import Mesh
from spmd_engine.checkpoints.hf.export import export_huggingface
from spmd_engine.checkpoints.read import Sliceable
from spmd_engine.cli.bench.measuring import mpiexec
from spmd_engine.engine.build import build_engine
from spmd_engine.engine.model_config import ModelConfig
from spmd_engine.models import DecoderConfig

HERE = Path(__file__).resolve().parent
SHAPE = DecoderConfig(
    layers=30, width=576, heads=9, key_value_heads=3, hidden=1536, vocabulary=49152, context=2048, epsilon=1e-5
)
#: The goals: how many times as fast as transformers; for `memory`, the largest fraction of its bytes.
GOALS = {"memory": 0.8, "batch 1": 1.3, "batch 8": 1.0, "prefill": 1.1, "train": 1.05, "adapters": 1.05, "clock": 1.4}
SAID = {
    "memory": "largest resident size after a prompt of 128, bytes",
    "batch 1": f"{NEW} tokens of 1 text",
    "batch 8": f"{NEW} tokens of 8 texts",
    "prefill": "a prompt of 512",
    "train": "a step of 2 x 256 tokens with AdamW",
    "adapters": f"the same of adapters of rank {RANK} alone (PEFT's)",
    "clock": f"{NEW} tokens of 1 text on 2 ranks against 1 rank, wall time",
}


def write_model(folder):
    """Write the folder with random weights. Collective."""
    with Mesh() as mesh:
        engine = build_engine(ModelConfig("llama", shape=SHAPE), mesh)
        arrays = {name: engine.gather(name) for name in engine.names}
        sliceable = {name: Sliceable(array.shape, array.dtype, array.__getitem__) for name, array in arrays.items()}
        export_huggingface(sliceable, SHAPE, folder, mesh.group())


def result_of(worker, rows, folder, python=sys.executable, ranks=1):
    """The result of a worker."""
    command = [python, str(HERE / f"{worker}.py"), str(folder), ",".join(rows)]
    command = [*(mpiexec(ranks) if ranks > 1 else []), *command]
    environment = os.environ | dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    if python != sys.executable:
        environment.pop("PYTHONPATH", None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=1800)
    if done.returncode:
        raise click.ClickException(f"{worker} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


@click.command(help=__doc__.splitlines()[0])
@click.option("--peer-python", help="A Python with torch and transformers; without it, only the engine is measured.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--only", default=",".join(ROWS), show_default=True, help="Rows, separated by commas.")
@click.option("--folder", type=click.Path(path_type=Path), help="Folder of the model; written if it is absent.")
def main(peer_python, rounds, only, folder):
    rows = [row for row in ROWS if row in only.split(",")]
    cpu_rows = [row for row in rows if row != "clock"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = folder or Path(temporary, "llama-135m")
        if not (folder / "config.json").is_file():
            folder.mkdir(parents=True, exist_ok=True)
            write_model(folder)
        runs = {"ours": lambda: result_of("decoding_ours", cpu_rows, folder)} if cpu_rows else {}
        if peer_python and cpu_rows:
            runs["transformers"] = lambda: result_of("decoding_transformers", cpu_rows, folder, peer_python)
        if "clock" in rows:
            runs["1 rank"] = lambda: result_of("decoding_ours", ["clock"], folder)
            runs["2 ranks"] = lambda: result_of("decoding_ours", ["clock"], folder, ranks=2)
        results = {name: [] for name in runs}
        for number in range(rounds):
            for name in reversed(runs) if number % 2 else runs:
                results[name].append(runs[name]())
    for row in rows:
        sides = ("2 ranks", "1 rank") if row == "clock" else ("ours", "transformers")
        click.echo(line(row, *([result[row] for result in results.get(side, [])] for side in sides)))


def line(row, ours, theirs):
    """A row of the table: medians, and the median and range of the ratios."""
    text = f"{SAID[row]:<62} {shown(row, median(ours)):>9}"
    if not theirs:
        return text
    ratios = [one / other if row == "memory" else other / one for one, other in zip(ours, theirs, strict=True)]
    ratio_text = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    goal = f"{'at most' if row == 'memory' else 'at least'} {GOALS[row]}"
    return f"{text} {shown(row, median(theirs)):>9}   {ratio_text}, {goal}"


def shown(row, value):
    return f"{value / 1e6:,.0f} MB" if row == "memory" else f"{value:.3f} s"


if __name__ == "__main__":
    main()
