"""Training speed of the engine against eager PyTorch, one thread each, in alternating processes.

    python scripts/bench_peers.py --peer-python PATH/TO/python --json peers.json

The parent needs only the standard library and click. In every round it runs both workers, one after
the other, and swaps their order from round to round, so that a machine that slows down or speeds up
meets both sides alike.

A worker is `WORKER.py CONFIG` where CONFIG is a JSON object: vocabulary, context, layers, width, heads,
batch_size, warmup, steps, seed, threads, learning_rate, betas, epsilon, weight_decay, clip_norm. It
trains a tied-head GPT-2 in float32 without dropout, GPT-2's init, AdamW (decay on tables and matrices
only) and global-norm clipping, on the batches

    numpy.random.default_rng(seed).integers(0, vocabulary, (warmup + steps, batch_size, context + 1))

one per step, tokens [:, :-1] and targets [:, 1:]. A step is timed from before zeroing the gradients until
the loss is a Python float and the parameters are updated. The last line the worker prints is a JSON object:
step_seconds (the timed steps, without warm-up) and peak_rss_bytes, and for the report, if it likes,
first_loss, last_loss and version. Random tokens cannot be learned, so both losses stay near ln(vocabulary).
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

import click

HERE = Path(__file__).resolve().parent
WORKERS = {"ours": HERE / "bench_worker_ours.py", "torch": HERE / "torch_gpt.py"}
MODELS = {
    "gpt-mini": {"vocabulary": 257, "context": 256, "layers": 6, "width": 384, "heads": 6},
    "gpt-nano": {"vocabulary": 257, "context": 128, "layers": 8, "width": 96, "heads": 6},
}
TRAINING = {"threads": 1, "learning_rate": 3e-4, "betas": [0.9, 0.95], "epsilon": 1e-8, "weight_decay": 0.1,
            "clip_norm": 1.0}
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS",
                    "VECLIB_MAXIMUM_THREADS", "NUMEXPR_NUM_THREADS")
INSTALL = "{} lacks torch or numpy: pip install torch==2.13.0 numpy (or choose another --peer-python)"


def has_torch(python):
    """Whether `python` can import torch and NumPy."""
    probe = "import sys, importlib.util as u; sys.exit(not all(map(u.find_spec, ('torch', 'numpy'))))"
    try:
        return subprocess.run([python, "-c", probe], check=False).returncode == 0
    except OSError:
        return False


def run_worker(side, python, config):
    """Run one worker process to its end and return its result."""
    environment = os.environ | dict.fromkeys(THREAD_VARIABLES, str(config["threads"]))
    done = subprocess.run([python, str(WORKERS[side]), json.dumps(config)], env=environment,
                          stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise click.ClickException(f"the {side} worker failed with status {done.returncode}")
    try:
        result = json.loads(done.stdout.strip().rpartition("\n")[2])
    except json.JSONDecodeError as error:
        raise click.ClickException(f"the {side} worker printed no JSON: {done.stdout[-200:]!r}") from error
    if len(result["step_seconds"]) != config["steps"]:
        raise click.ClickException(f"the {side} worker timed {len(result['step_seconds'])} steps, "
                                   f"not {config['steps']}")
    return result


def spread(values):
    """Median, least and greatest of `values`."""
    return {"median": median(values), "min": min(values), "max": max(values)}


def summarize(rounds, config):
    """Per side the tokens/s over the rounds' medians, and the paired ratios ours / torch."""
    tokens = config["batch_size"] * config["context"]
    speeds = {side: [tokens / median(one[side]["step_seconds"]) for one in rounds] for side in WORKERS}
    sides = {
        side: {
            "tokens_per_second": spread(speeds[side]),
            "step_seconds": spread([second for one in rounds for second in one[side]["step_seconds"]]),
            "peak_rss_bytes": max(one[side]["peak_rss_bytes"] for one in rounds),
            "version": rounds[0][side].get("version"),
            "first_loss": rounds[0][side].get("first_loss"),
            "last_loss": rounds[0][side].get("last_loss"),
        } for side in WORKERS}
    ratios = [ours / peer for ours, peer in zip(speeds["ours"], speeds["torch"], strict=True)]
    return {"sides": sides, "ratio": spread(ratios)}


def show(summary):
    """Print the table; min - max is over the rounds."""
    rows = [("side", "version", "tokens/s", "min - max", "s/step", "peak MiB", "first loss", "last loss")]
    for side, result in summary["sides"].items():
        speed = result["tokens_per_second"]
        losses = ["-" if result[key] is None else f"{result[key]:.3f}" for key in ("first_loss", "last_loss")]
        rows.append((side, result["version"] or "-", f"{speed['median']:.0f}",
                     f"{speed['min']:.0f} - {speed['max']:.0f}", f"{result['step_seconds']['median']:.4f}",
                     f"{result['peak_rss_bytes'] / 2**20:.0f}", *losses))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    ratio = summary["ratio"]
    click.echo(f"ours / torch in tokens/s: {ratio['median']:.3f} ({ratio['min']:.3f} - {ratio['max']:.3f})")


POSITIVE = click.IntRange(min=1)


@click.command(context_settings={"show_default": True})
@click.option("--peer-python", default=sys.executable, show_default="this one", help="Has torch and numpy.")
@click.option("--model", type=click.Choice(list(MODELS)), default="gpt-mini")
@click.option("--batch-size", type=POSITIVE, default=8, help="Sequences a step.")
@click.option("--steps", type=POSITIVE, default=5, help="Timed steps of every worker.")
@click.option("--warmup", type=click.IntRange(min=0), default=2, help="Untimed steps before them.")
@click.option("--rounds", type=POSITIVE, default=5, help="How often both sides run.")
@click.option("--seed", default=0, help="Of the batches and the parameters.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path),
              help="Also write the configuration, the summary and every timed step here.")
def main(peer_python, model, rounds, json_path, **options):
    """Measure training tokens/s of the engine and of eager PyTorch, one thread each."""
    if not has_torch(peer_python):
        click.echo(INSTALL.format(peer_python), err=True)
        sys.exit(2)
    config = MODELS[model] | TRAINING | options
    pythons = {"ours": sys.executable, "torch": peer_python}
    results = []
    for index in range(rounds):
        order = list(WORKERS) if index % 2 == 0 else list(reversed(WORKERS))
        results.append({side: run_worker(side, pythons[side], config) for side in order})
        medians = (f"{side} {median(results[-1][side]['step_seconds']):.4f} s/step" for side in WORKERS)
        click.echo(f"round {index + 1} of {rounds}: {', '.join(medians)}", err=True)
    summary = summarize(results, config)
    click.echo(f"{model}, {config['batch_size']} x {config['context']} tokens a step, one thread, "
               f"{rounds} rounds of {config['steps']} steps")
    show(summary)
    if json_path:
        report = {"model": model, "config": config} | summary | {"rounds": results}
        json_path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
