"""Training speed of the engine against PyTorch and JAX: the same model, batch, dtype and cores, in alternating
processes.

    python benchmarks/bench_peers.py --peer-python PATH/TO/python --json peers.json
    python benchmarks/bench_peers.py --only "data parallel" --rounds 3
    python benchmarks/bench_peers.py --only bfloat16 --compile --processor-time

In every round of a comparison each side runs once, in its own processes. The order is reversed from round to round, so
that changes of the machine's speed affect all sides equally. Ratios are taken within a round. All sides are pinned to
the same cores, one per rank and at most two, with one thread per rank.

With "bfloat16", we compute with `--precision bfloat16` and PyTorch with `torch.autocast`. "again" is the same as the
first side: its ratio shows what a difference may be by chance.

Of several settings of a peer the fastest counts; it is marked with *. `peers_protocol.py` defines the models, the
batches and the timing of a step; `peers_convolution.py` does so for convolutions, and `peers_images.py` for a ResNet.
The worker of a peer, `peers_*.py`, describes its settings. This process needs only the standard library and click.
Peers that `--peer-python` cannot import are left out, with one line.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import click

from spmd_engine.cli.bench.measuring import mpiexec

HERE = Path(__file__).resolve().parent
MODELS = {
    "gpt-mini": {"vocabulary": 257, "context": 256, "layers": 6, "width": 384, "heads": 6},
    "gpt-nano": {"vocabulary": 257, "context": 128, "layers": 8, "width": 96, "heads": 6},
}
ADAMW = {"learning_rate": 3e-4, "betas": [0.9, 0.95], "epsilon": 1e-8, "weight_decay": 0.1, "clip_norm": 1.0}
MLP = {"sizes": [784, 128, 127, 10], "batch_size": 128, "learning_rate": 0.01, "clip_norm": 0.0, "block": 40}
CONVOLUTIONS = {
    "3x3, 64 to 64 channels of 32x32": {
        "batch": 32,
        "length": 32,
        "inputs": 64,
        "outputs": 64,
        "kernel": 3,
        "stride": 1,
        "padding": 1,
        "input_gradient": True,
    },
    "7x7 by 2, 3 to 64 channels of 64x64": {
        "batch": 32,
        "length": 64,
        "inputs": 3,
        "outputs": 64,
        "kernel": 7,
        "stride": 2,
        "padding": 3,
        "input_gradient": False,
    },
    "3x3 by 2, 64 to 128 channels of 32x32": {
        "batch": 32,
        "length": 32,
        "inputs": 64,
        "outputs": 128,
        "kernel": 3,
        "stride": 2,
        "padding": 1,
        "input_gradient": True,
    },
    "1x1, 64 to 256 channels of 16x16": {
        "batch": 32,
        "length": 16,
        "inputs": 64,
        "outputs": 256,
        "kernel": 1,
        "stride": 1,
        "padding": 0,
        "input_gradient": True,
    },
}
RESNET = {
    "images": {"length": 64, "channels": 3, "classes": 10},
    "batch_size": 32,
    "learning_rate": 0.01,
    "momentum": 0.9,
}
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
CORES = 2
TIMEOUT = 1800  # seconds for a worker


@dataclass(frozen=True)
class Side:
    """One side of a comparison."""

    name: str  #: the peer; after a comma, its setting
    worker: str
    options: dict = field(default_factory=dict)  #: in addition to the comparison's configuration

    @property
    def peer(self):
        return self.name.partition(",")[0]

    @property
    def package(self):
        """The peer's package that the worker imports; None for the engine."""
        return {"peers_torch": "torch", "peers_jax": "jax"}.get("_".join(self.worker.split("_")[:2]))

    def command(self, ranks, peer_python, config):
        """The command that starts its ranks."""
        arguments = [str(HERE / f"{self.worker}.py"), json.dumps(config | self.options)]
        if self.package == "torch" and ranks > 1:
            starter = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            return [peer_python, *starter, *arguments]
        if self.package:
            return [peer_python, *arguments]
        return [*(mpiexec(ranks) if ranks > 1 else []), sys.executable, *arguments]


@dataclass(frozen=True)
class Comparison:
    """Sides that do the same work on equally many ranks; ratios are those of the first side to the others."""

    name: str
    ranks: int
    config: dict
    sides: list

    @property
    def unit(self):
        return "images/s" if "images" in self.config else "tokens/s" if "context" in self.config else "steps/s"

    @property
    def amount(self):
        """Units of work in a step."""
        if "images" in self.config:
            return self.config["batch_size"]
        return self.config["batch_size"] * self.config["context"] if "context" in self.config else 1


def ours(name="ours", **options):
    return Side(name, "bench_worker_ours", options)


def comparisons(model, batch_size, compiled):
    """All comparisons."""
    gpt = MODELS[model] | ADAMW | {"batch_size": batch_size}
    eager = Side("PyTorch", "peers_torch_eager")
    compile_too = [Side("PyTorch compiled", "peers_torch_eager", {"compile": True})] if compiled else []
    ddp = [
        Side(f"PyTorch DDP, buckets of {size} MiB", "peers_torch_ddp", {"bucket_cap_mb": size}) for size in (25, 200)
    ]
    fsdp = Side("PyTorch FSDP2", "peers_torch_fsdp")
    jax = [
        Side("JAX, a thread a device", "peers_jax"),
        Side("JAX, shared threads", "peers_jax", {"multi_threaded": True}),
    ]
    pipe = {"mesh": {"pipe": 2}, "micro_batches": 8, "stages": "cost"}
    strategies = [
        ours("data parallel"),
        ours("zero 3", zero=3),
        ours("model=2", mesh={"model": 2}),
        ours("pipe=2, 1f1b", **pipe, schedule="1f1b"),
        ours("pipe=2, zero-bubble", **pipe, schedule="zero-bubble"),
    ]
    convolution = [
        Side("ours", "bench_worker_convolution"),
        Side("PyTorch, channels first", "peers_torch_convolution"),
        Side("PyTorch, channels last", "peers_torch_convolution", {"channels_last": True}),
    ]
    images = [Side(side.name, side.worker.replace("convolution", "images"), side.options) for side in convolution]
    twice = [images[0], Side("ours, again", images[0].worker)]
    images_float32 = Side("ours, float32", images[0].worker, {"precision": "float32"})
    half, again, float32 = {"precision": "bfloat16"}, ours("ours, again"), ours("ours, float32", precision="float32")
    return [
        Comparison(f"{model}, 1 rank", 1, gpt, [ours(), again, eager, *compile_too]),
        Comparison(f"{model}, 1 rank, bfloat16", 1, gpt | half, [ours(), again, float32, eager, *compile_too]),
        Comparison(f"{model}, 2 ranks, data parallel", 2, gpt, [ours(), *ddp, *jax]),
        Comparison(f"{model}, 2 ranks, bfloat16", 2, gpt | half, [ours(), *ddp]),
        Comparison(f"{model}, 2 ranks, sharded", 2, gpt, [ours("ours, zero 3", zero=3), fsdp]),
        Comparison(f"{model}, 2 ranks, strategies", 2, gpt, strategies),
        Comparison("mlp, 1 rank", 1, MLP, [ours(), eager]),
        Comparison("mlp, 2 ranks, data parallel", 2, MLP, [ours(), ddp[0]]),
        Comparison("mlp, 4 ranks, data parallel", 4, MLP, [ours(), ddp[0]]),
        *(Comparison(f"convolution, {name}", 1, {"convolution": of}, convolution) for name, of in CONVOLUTIONS.items()),
        Comparison("resnet18, 1 rank, images of 64x64", 1, RESNET, [*twice, *images[1:]]),
        Comparison("resnet18, 1 rank, bfloat16", 1, RESNET | half, [*twice, images_float32, *images[1:]]),
    ]


def can_import(python, *modules):
    """Whether `python` can import these packages."""
    probe = f"import sys, importlib.util as u; sys.exit(not all(map(u.find_spec, {modules!r})))"
    try:
        return subprocess.run([python, "-c", probe], check=False).returncode == 0
    except OSError:
        return False


def run_worker(side, comparison, peer_python, config):
    """Run a side and return its result; raises ClickException if it fails."""
    command = side.command(comparison.ranks, peer_python, config)
    environment = os.environ | dict.fromkeys(THREAD_VARIABLES, "1")
    try:
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
            timeout=TIMEOUT,
        )
    except subprocess.TimeoutExpired as error:
        raise click.ClickException(f"{side.name} took more than {TIMEOUT} s") from error
    except OSError as error:
        raise click.ClickException(f"{side.name} did not start: {error}") from error
    if done.returncode:
        stderr = done.stderr if len(done.stderr) < 4000 else f"{done.stderr[:2000]}\n...\n{done.stderr[-2000:]}"
        raise click.ClickException(f"{side.name} failed with status {done.returncode}:\n{stderr}")
    try:
        result = json.loads(done.stdout.strip().rpartition("\n")[2])
    except json.JSONDecodeError as error:
        raise click.ClickException(f"{side.name} printed no JSON: {done.stdout[-200:]!r}") from error
    if len(result["step_seconds"]) != config["steps"]:
        raise click.ClickException(f"{side.name} timed {len(result['step_seconds'])} times, not {config['steps']}")
    return result


def run_rounds(comparison, rounds, peer_python, config):
    """The results of each round, by the names of the sides."""
    results = []
    for index in range(rounds):
        order = comparison.sides if index % 2 == 0 else comparison.sides[::-1]
        done = {side.name: run_worker(side, comparison, peer_python, config) for side in order}
        results.append({side.name: done[side.name] for side in comparison.sides})
        speeds = "; ".join(f"{name} {speed_of(result, comparison):,.0f}" for name, result in results[-1].items())
        click.echo(f"{comparison.name}, round {index + 1} of {rounds}, {comparison.unit}: {speeds}", err=True)
    return results


def speed_of(result, comparison):
    return comparison.amount / median(result["step_seconds"])


def spread(values):
    """Median, minimum and maximum of `values`."""
    return {"median": median(values), "min": min(values), "max": max(values)}


def summarize(comparison, rounds):
    """The speed of each side over the rounds, and the ratios of the first side's speed to it."""
    first, sides = comparison.sides[0].name, {}
    for side in comparison.sides:
        results = [one[side.name] for one in rounds]
        memory = median(result["peak_rss_bytes"] for result in results)
        ratios = [speed_of(one[first], comparison) / speed_of(one[side.name], comparison) for one in rounds]
        sides[side.name] = {
            "version": results[0]["version"],
            "speed": spread([speed_of(result, comparison) for result in results]),
            "step_seconds": spread([median(result["step_seconds"]) for result in results]),
            "peak_rss_bytes": memory,
            "first_loss": results[0]["first_loss"],
            "last_loss": results[0]["last_loss"],
            "ratio": spread(ratios),
            "memory_ratio": median(one[first]["peak_rss_bytes"] for one in rounds) / memory,
        }
    for side in comparison.sides:
        rivals = [
            sides[other_side.name]["ratio"]["median"] for other_side in comparison.sides if other_side.peer == side.peer
        ]
        best = side.package and len(rivals) > 1 and sides[side.name]["ratio"]["median"] == min(rivals)
        sides[side.name]["fastest_setting"] = bool(best)
    return {"name": comparison.name, "ranks": comparison.ranks, "unit": comparison.unit, "sides": sides}


def show(summaries):
    """Print the table; ranges are over the rounds, and the last columns are the first side's speed and memory over
    this side's."""
    rows = [("", "version", "speed", "min - max", "", "MiB a rank", "losses", "first / this", "min - max", "memory")]
    for summary in summaries:
        rows.append((summary["name"], *[""] * 9))
        for index, (name, side) in enumerate(summary["sides"].items()):
            speed, ratio, mark = side["speed"], side["ratio"], "*" if side["fastest_setting"] else ""
            compared = (
                ("", "", "")
                if index == 0
                else (
                    f"{ratio['median']:.2f}x",
                    f"{ratio['min']:.2f} - {ratio['max']:.2f}",
                    f"{side['memory_ratio']:.2f}x",
                )
            )
            rows.append(
                (
                    f"  {name}{mark}",
                    side["version"],
                    f"{speed['median']:,.0f}",
                    f"{speed['min']:,.0f} - {speed['max']:,.0f}",
                    summary["unit"],
                    f"{side['peak_rss_bytes'] / 2**20:,.0f}",
                    f"{side['first_loss']:.3f}, {side['last_loss']:.3f}",
                    *compared,
                )
            )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        click.echo("  ".join(cells).rstrip())


def processor():
    """The name of this CPU, and its fastest instructions for bfloat16."""
    cpu = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    fields = dict(line.split(":", 1) for line in cpu.splitlines() if ":" in line)
    fields = {name.strip(): value.split() for name, value in fields.items()}
    unit = next((unit for unit in ("amx_bf16", "avx512_bf16") if unit in fields.get("flags", ())), "none for bfloat16")
    family = f"family {' '.join(fields.get('cpu family', '?'))}, model {' '.join(fields.get('model', '?'))}"
    return f"{' '.join(fields.get('model name', ['CPU']))} ({family}; {unit})"


def available(chosen, peer_python):
    """The comparisons with the sides that can run; prints once what is left out."""
    packages = {side.package for comparison in chosen for side in comparison.sides if side.package}
    missing = {package for package in sorted(packages) if not can_import(peer_python, package, "numpy")}
    for package in sorted(missing):
        click.echo(
            f"{peer_python} lacks {package} or numpy, its rows are left out: pip install {package} numpy, or "
            "choose another --peer-python",
            err=True,
        )
    left = []
    for comparison in chosen:
        sides = [side for side in comparison.sides if side.package not in missing]
        if len(sides) > 1:
            left.append(Comparison(comparison.name, comparison.ranks, comparison.config, sides))
    return left


POSITIVE = click.IntRange(min=1)


@click.command(context_settings={"show_default": True}, help=__doc__.partition("\n")[0])
@click.option("--peer-python", default=sys.executable, show_default="this one", help="A Python with torch or jax.")
@click.option("--only", metavar="TEXT", default="", help="Only comparisons whose names contain this.")
@click.option("--model", type=click.Choice(list(MODELS)), default="gpt-mini")
@click.option("--batch-size", type=click.IntRange(min=8), default=8, help="Sequences per step, over all ranks.")
@click.option("--compile", "compiled", is_flag=True, help="Also compare with torch.compile.")
@click.option("--processor-time", is_flag=True, help="Time steps of one rank so: for a machine with other load.")
@click.option("--products", default="auto", help="What computes our matrix products, as in train.")
@click.option("--steps", type=POSITIVE, default=5, help=f"Timed, of every worker; mlp: blocks of {MLP['block']} steps.")
@click.option("--warmup", type=click.IntRange(min=0), default=2, help="Steps (mlp: blocks) before the timed ones.")
@click.option("--rounds", type=POSITIVE, default=5, help="Rounds in which all sides run.")
@click.option("--seed", default=0, help="Seed of the batches and the parameters.")
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write the configurations, the summaries and every timed step here.",
)
def main(peer_python, only, model, batch_size, compiled, rounds, json_path, **options):
    all_comparisons = comparisons(model, batch_size, compiled)
    chosen = [comparison for comparison in all_comparisons if only in comparison.name]
    if not chosen:
        raise click.ClickException(
            f"--only {only!r}: there are {'; '.join(comparison.name for comparison in all_comparisons)}"
        )
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    summaries, reports, failed = [], [], False
    for comparison in available(chosen, peer_python):
        config = comparison.config | options | {"ranks": comparison.ranks, "threads": 1}
        if cores:
            os.sched_setaffinity(0, cores[: min(comparison.ranks, CORES)])  # workers inherit it
        try:
            results = run_rounds(comparison, rounds, peer_python, config)
        except click.ClickException as error:
            click.echo(f"{comparison.name} is left out: {error.message}", err=True)
            failed = True
            continue
        summaries.append(summarize(comparison, results))
        reports.append(summaries[-1] | {"config": config, "rounds": results})
        if json_path:
            json_path.write_text(json.dumps(reports, indent=1) + "\n")
    if summaries:
        click.echo(processor())
        show(summaries)
    sys.exit(int(failed or not summaries))


if __name__ == "__main__":
    main()
