"""The first minutes on a machine with a GPU: the tests of devices, `verify`, training against PyTorch, and decoding.

    scripts/gpu_check.sh --json gpu.json        # under ten minutes, with what is installed
    scripts/gpu_check.sh --dry-run              # every part at a tiny size on the CPU

It downloads nothing. Each part runs in a process of its own, and one that fails or takes too long is a line of the
table. Training is gpt2 (124 million parameters) on 16 x 1,024 random tokens, without dropout, as `peers_protocol.py`
describes; decoding is a Llama of 135 million parameters with random weights. `plan` predicts the step for a packaged
machine of the GPU's name, with launches and waits as measured here.
"""

import json
import os
import platform
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from time import perf_counter

import click

HERE = Path(__file__).resolve().parent
GPT2 = {"vocabulary": 50257, "context": 1024, "layers": 12, "width": 768, "heads": 12, "batch_size": 16}
TINY = {"vocabulary": 257, "context": 16, "layers": 2, "width": 24, "heads": 4, "batch_size": 2}
TRAINING = {"seed": 1, "learning_rate": 3e-4, "betas": [0.9, 0.95], "epsilon": 1e-8, "weight_decay": 0.1}
TRAINING |= {"clip_norm": 1.0, "warmup": 3, "steps": 10, "block": 1, "threads": 2}
#: SmolLM-135M, which is a Llama.
LLAMA = {"width": 576, "heads": 9, "key_value_heads": 3, "head_width": 64, "hidden": 1536, "layers": 30}
LLAMA |= {"vocabulary": 49152, "context": 2048}
TINY_LLAMA = LLAMA | {"width": 24, "heads": 6, "head_width": 4, "hidden": 32, "layers": 2, "vocabulary": 99}
STARTED, LIMIT = perf_counter(), 590  # seconds of all parts
PRECISIONS = "float32", "tf32", "bfloat16"
PACKAGES = "numpy", "mpi4py", "cupy-cuda13x", "cupy-cuda12x", "nvidia-cublas", "nvidia-cuda-nvrtc", "torch"


@click.command()
@click.option("--json", "output", default="gpu_check.json", type=click.Path(path_type=Path), help="Where to write it.")
@click.option("--dry-run", is_flag=True, help="Run every part at a tiny size, on the CPU.")
@click.option("--peer-python", default=sys.executable, help="A Python that has PyTorch.")
@click.option("--work", hidden=True, help="One part, in this process.")
def main(output, dry_run, peer_python, work):
    """Check and measure a GPU, print a table, and write it as JSON."""
    if work is not None:
        config = json.loads(work)
        print(json.dumps(PARTS[config["part"]](config)))
        return
    device = "cpu" if dry_run else "cuda"
    rows = [("machine", machine(dry_run))]
    shape = TRAINING | (TINY | {"warmup": 1, "steps": 2, "threads": 1} if dry_run else GPT2) | {"device": device}
    costs = part({"part": "launches", "device": device})
    rows.append(("launch and wait", costs))
    tests = ["tests/arrays/test_cuda_launches.py"] if dry_run else ["-m", "gpu", "tests"]
    rows.append(("tests of devices", run([sys.executable, "-m", "pytest", "-q", "-p", "no:hypothesispytest", *tests])))
    for mesh in "data=2", "model=2":
        command = ["verify", "--model", "gpt-nano", "--mesh", mesh, "--device", device, "--steps", "2"]
        rows.append((f"verify, {mesh}", run(["mpiexec", "-n", "2", sys.executable, "-m", "spmd_engine", *command])))
    for precision in PRECISIONS:
        config = shape | {"precision": precision}
        rows.append((f"gpt2, {precision}", part(config | {"part": "train"})))
        rows.append((f"gpt2, {precision}, predicted", part(config | {"part": "predict"} | costs)))
        for name, compiled in ("eager", False), ("compiled", True):
            rows.append((f"gpt2, {precision}, PyTorch {name}", peer(peer_python, config | {"compile": compiled})))
    rows.append(("decoding, Llama 135M", part({"part": "decode", "device": device, "dry_run": dry_run})))
    table = {"dry_run": dry_run, "seconds": round(perf_counter() - STARTED, 1), "rows": dict(rows)}
    output.write_text(json.dumps(table, indent=1) + "\n")
    print(f"{'DRY RUN, tiny sizes on the CPU: ' if dry_run else ''}{table['seconds']} s; written to {output}")
    for name, facts in rows:
        print(f"{name:34} {'; '.join(f'{key} {shown(value)}' for key, value in facts.items())}")
    sys.exit(any("failed" in facts for _, facts in rows))


def shown(value):
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value


def machine(dry_run):
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if not dry_run:
        command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        found |= run(command)
    return found


# --- processes


def run(command, seconds=240):
    """The last line that a command prints, and its seconds; or why it failed."""
    began, variables = perf_counter(), dict(os.environ)
    seconds = min(seconds, STARTED + LIMIT - began)
    if seconds < 5:
        return {"left out": f"the other parts took {LIMIT} seconds"}
    variables["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{variables['PATH']}"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, cwd=HERE.parent, env=variables)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"failed": str(error)[:200]}
    lines = (done.stdout if done.returncode == 0 else done.stderr or done.stdout).strip().splitlines() or ["nothing"]
    return {"result" if done.returncode == 0 else "failed": lines[-1][:200], "seconds": perf_counter() - began}


def part(config):
    """What a part of PARTS returns, in a process of its own."""
    done = run([sys.executable, __file__, "--work", json.dumps(config)])
    return json.loads(done["result"]) if "result" in done else done


def peer(python, config):
    """The same step by PyTorch."""
    if subprocess.run([python, "-c", "import torch"], capture_output=True).returncode:
        return {"left out": f"{python} has no PyTorch"}
    done = run([python, str(HERE / "peers_torch_eager.py"), json.dumps(config)])
    if "result" not in done:
        return done
    result = json.loads(done["result"])
    return rates(result["step_seconds"], config) | {"peak bytes": result["peak_rss_bytes"], "by": result["version"]}


def rates(seconds, config):
    step = median(seconds)
    return {"tokens/s": config["batch_size"] * config["context"] / step, "step, ms": step * 1e3}


# --- the parts


def launches(config):
    """Seconds of a launch and of a wait: see `calibrate`."""
    from spmd_engine.arrays.backend import get_backend
    from spmd_engine.planning.machine.measure import launch_and_wait

    launch, wait = launch_and_wait(get_backend(config["device"]))
    return {"launch_seconds": launch, "sync_seconds": wait}


def model_of(config):
    """The model, and the dtype of its products' operands; TF32 is a way to multiply float32."""
    from spmd_engine.models import GPTSize, gpt

    size = GPTSize(*(config[name] for name in ("layers", "width", "heads", "context", "vocabulary")))
    return gpt(size), "bfloat16" if config["precision"] == "bfloat16" else "float32"


def train(config):
    from peers_protocol import make_batches, peak_memory, time_steps

    from spmd_engine import Mesh, batch_of
    from spmd_engine.arrays.backend import get_backend
    from spmd_engine.arrays.precision import dtype_of
    from spmd_engine.engine import AdamW, LayeredEngine
    from spmd_engine.training import Trainer

    backend, (model, dtype) = get_backend(config["device"]), model_of(config)
    backend.allow_tf32(config["precision"] == "tf32" and backend.on_device)
    with Mesh() as mesh:
        engine = LayeredEngine(model, mesh, backend=backend, dtype=dtype_of(dtype))
        batches = make_batches(config)
        optimizer = AdamW(tuple(config["betas"]), config["epsilon"], config["weight_decay"])
        batch = lambda step: batch_of(*batches[step % len(batches)], engine, step=step)
        trainer = Trainer(engine, optimizer, batch, lambda step: config["learning_rate"], grad_clip=config["clip_norm"])
        _, loss, _, *marks = time_steps(config, lambda step: trainer.step().loss)
    seconds = [after - before for before, after in zip(marks, marks[1:], strict=False)][config["warmup"] :]
    pool = backend.xp.get_default_memory_pool().total_bytes() if backend.on_device else peak_memory()
    return rates(seconds, config) | {"peak bytes": int(pool), "last loss": float(loss)}


def predict(config):
    """The predicted step on a packaged machine of the GPU's name, or on an H100."""
    from spmd_engine.engine.parallel_config import ParallelConfig
    from spmd_engine.planning.machine.files import read_machine
    from spmd_engine.planning.machine.machine import Curve
    from spmd_engine.planning.search.plan_evaluation import evaluate_step

    names = [name for name in ("a100", "h100", "h200") if name.upper() in device_name(config["device"])]
    machine = read_machine((names or ["h100"])[0]).with_ranks(1)
    costs = {name: config[name] for name in ("launch_seconds", "sync_seconds") if config.get(name)}
    machine = replace(machine, nodes=tuple(replace(node, **costs) for node in machine.nodes))
    (model, dtype), plain = model_of(config), ParallelConfig()
    if config["precision"] == "tf32":  # NVIDIA's data sheets: half of the speed of bfloat16
        half = Curve.flat(machine.nodes[0].speeds["bfloat16"].most / 2)
        speeds = {**machine.nodes[0].speeds, "float32": half}
        machine = replace(machine, nodes=(replace(machine.nodes[0], speeds=speeds),))
    sizes = {"sequence": config["context"], "dtype": dtype}
    found = evaluate_step(model, machine, {"data": 1}, plain, config["batch_size"], 1, **sizes)
    step = found.analysis.classes[0].step
    counts = {"launches": step.launches, "waits": step.waits, "copies": step.copies}
    return rates([found.seconds], config) | counts | {"peak bytes": found.analysis.peak_bytes, "machine": machine.name}


def device_name(device):
    if device == "cpu":
        return ""
    import cupy

    return cupy.cuda.runtime.getDeviceProperties(0)["name"].decode().upper()


def decode(config):
    import numpy as np

    from spmd_engine import Mesh
    from spmd_engine.engine.parallel_config import ModelConfig, build_engine
    from spmd_engine.models import DecoderConfig
    from spmd_engine.serving import StoppingCriteria, generate

    shape, new = (TINY_LLAMA, 4) if config["dry_run"] else (LLAMA, 64)
    with Mesh() as mesh:
        engine = build_engine(ModelConfig(name="llama", shape=DecoderConfig(**shape)), mesh, device=config["device"])
        found = {}
        for batch in 1, 8:
            prompts = np.random.default_rng(0).integers(0, shape["vocabulary"], (batch, 16)).tolist()
            seconds = []
            for _ in range(2):
                began = perf_counter()
                generate(engine, prompts, stopping=StoppingCriteria(new))
                seconds.append(perf_counter() - began)
            found[f"batch {batch}, tokens/s"] = batch * new / seconds[-1]
    return found


PARTS = {"launches": launches, "train": train, "predict": predict, "decode": decode}

if __name__ == "__main__":
    main()
