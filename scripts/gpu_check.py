"""The first minutes on a machine with a GPU: the tests of devices, `verify`, training against PyTorch, and decoding.

    scripts/gpu_check.sh                        # under ten minutes, with what is installed
    scripts/gpu_check.sh --dry-run              # every part at a tiny size on the CPU

It downloads nothing, and needs neither MPI nor the package installed. Each part runs in a process of its own, and one
that fails or takes too long is a row of the table. The folder has the rows so far, table.json, and what the parts
print, log.txt. A second call with the same folder runs the parts that are missing or have failed. The parts come in
the order of their value: bfloat16 first, compilation by PyTorch last.

Training is gpt2 (124 million parameters) on 16 x 1,024 random tokens, without dropout, as
`benchmarks/peers_protocol.py` describes; decoding is a Llama of 135 million parameters with random weights. `plan`
predicts the step for a packaged machine of the GPU's name, with launches and waits as measured here.
"""

import json
import os
import platform
import re
import signal
import subprocess
import sys
import traceback
from dataclasses import replace
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from time import perf_counter

import click

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
GPT2 = {"vocabulary": 50257, "context": 1024, "layers": 12, "width": 768, "heads": 12, "batch_size": 16}
TINY = {"vocabulary": 257, "context": 16, "layers": 2, "width": 24, "heads": 4, "batch_size": 2}
TRAINING = {"seed": 1, "learning_rate": 3e-4, "betas": [0.9, 0.95], "epsilon": 1e-8, "weight_decay": 0.1}
TRAINING |= {"clip_norm": 1.0, "warmup": 3, "steps": 10, "block": 1, "threads": 2}
#: SmolLM-135M, which is a Llama.
LLAMA = {"width": 576, "heads": 9, "key_value_heads": 3, "head_width": 64, "hidden": 1536, "layers": 30}
LLAMA |= {"vocabulary": 49152, "context": 2048}
TINY_LLAMA = LLAMA | {"width": 24, "heads": 6, "head_width": 4, "hidden": 32, "layers": 2, "vocabulary": 99}
STARTED = perf_counter()
PART_SECONDS, TEST_SECONDS = 150, 240  # at most
PRECISIONS = "bfloat16", "float32", "tf32"
PACKAGES = "numpy", "mpi4py", "cupy-cuda13x", "cupy-cuda12x", "nvidia-cublas", "nvidia-cuda-nvrtc", "torch"
MPI_OF_TWO = "from mpi4py import MPI; assert MPI.COMM_WORLD.size == 2, 'mpiexec starts ranks of another MPI library'"


@click.command()
@click.option("--folder", default=".bench/gpu", type=click.Path(path_type=Path), help="Where to write the results.")
@click.option("--dry-run", is_flag=True, help="Run every part at a tiny size, on the CPU.")
@click.option("--peer-python", default=sys.executable, help="A Python that has PyTorch.")
@click.option("--seconds", default=560, show_default=True, help="Of all parts together.")
@click.option("--work", hidden=True, help="One part, in this process.")
def main(folder, dry_run, peer_python, seconds, work):
    """Check and measure a GPU, print a table, and write it as JSON."""
    if work is not None:
        config = json.loads(work)
        try:
            print(json.dumps(PARTS[config["part"]](config)))
        except Exception as error:
            traceback.print_exc()
            sys.exit(f"{type(error).__name__}: {error}")  # the last line, which notes of an error would be
        return
    folder.mkdir(parents=True, exist_ok=True)
    processes = Processes(folder / "log.txt", seconds, peer_python)
    rows = fill(folder / "table.json", dry_run, parts(processes, dry_run))
    tiny = "DRY RUN, tiny sizes on the CPU: " * dry_run
    print(f"{tiny}{perf_counter() - STARTED:.1f} s; results in {folder}")
    sys.exit(any("failed" in facts for facts in rows.values()))


def fill(file, dry_run, parts):
    """The rows of the table in ``file``, which has each row as soon as it is there; ``parts`` are names and functions
    of the rows before. A row that is there from an earlier call stays, unless its part failed or was left out."""
    rows = {}
    if file.exists() and (before := json.loads(file.read_text()))["dry_run"] == dry_run:
        rows = {name: facts for name, facts in before["rows"].items() if not facts.keys() & {"failed", "left out"}}
    for name, part in parts:
        if name not in rows:
            rows[name] = part(rows)
            file.write_text(json.dumps({"dry_run": dry_run, "rows": rows}, indent=1) + "\n")
        facts = "; ".join(f"{key} {shown(value)}" for key, value in rows[name].items())
        print(f"{name:34} {facts}", flush=True)
    return rows


def parts(processes, dry_run):
    """The name of each row, and a function of the rows before that returns its facts, in the order of their value."""
    device = "cpu" if dry_run else "cuda"
    shape = TRAINING | (TINY | {"warmup": 1, "steps": 2, "threads": 1} if dry_run else GPT2) | {"device": device}
    yield "machine", lambda rows: machine(processes, dry_run)
    yield "launch and wait", lambda rows: processes.part("launches", {"device": device})
    for precision in PRECISIONS:
        config, name = shape | {"precision": precision}, f"gpt2, {precision}"
        yield name, lambda rows, config=config: processes.part("train", config)
        costs = lambda rows, config=config: processes.part("predict", config | rows["launch and wait"])
        yield f"{name}, predicted", costs
        yield f"{name}, PyTorch eager", lambda rows, config=config: processes.peer(config)
        if precision == PRECISIONS[0]:
            yield "tests of devices", lambda rows: processes.tests(dry_run)
            for mesh in "data=2", "model=2":
                yield f"verify, {mesh}", lambda rows, mesh=mesh: processes.verify(mesh, device)
            yield "decoding, Llama 135M", lambda rows: processes.part("decode", {"device": device, "dry_run": dry_run})
    for precision in PRECISIONS:
        config = shape | {"precision": precision, "compile": True}
        yield f"gpt2, {precision}, PyTorch compiled", lambda rows, config=config: processes.peer(config)


def shown(value):
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value


def machine(processes, dry_run):
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if not dry_run:
        command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        found |= processes.run(command)
    return found


def tests_of_devices(folder):
    """The files below ``folder`` with tests that are marked gpu, and those that take fixtures of such a file."""
    texts = {path: path.read_text() for path in sorted(folder.rglob("test_*.py"))}
    marked = {path for path, text in texts.items() if re.search(r"pytest\.mark\.gpu\b", text)}
    imported = re.compile(rf"^from ({'|'.join(path.stem for path in marked) or '-'}) import", re.MULTILINE)
    return [path for path, text in texts.items() if path in marked or imported.search(text)]


# --- processes


class Processes:
    """Starts a process for each part, within a number of seconds from the start of the script.

    What the processes print is appended to the file ``log``.
    """

    def __init__(self, log, seconds, peer_python):
        self.log, self.limit, self.peer_python = log, seconds, peer_python
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        modules = os.pathsep.join(filter(None, [str(ROOT), str(BENCHMARKS), os.environ.get("PYTHONPATH")]))
        self.variables = os.environ | {"PATH": path, "PYTHONPATH": modules}

    def run(self, command, seconds=PART_SECONDS):
        """A command's last line, or its last line of JSON, and its seconds; or why it failed or was left out."""
        began = perf_counter()
        left = STARTED + self.limit - began
        if left < 5:
            return {"left out": f"the other parts took {self.limit} seconds"}
        seconds = min(seconds, left)
        with self.log.open("ab+") as log:
            log.write(f"\n--- {' '.join(map(str, command))}\n".encode())
            log.flush()
            start = log.tell()
            # In a session of its own, so that what it has started ends with it.
            options = {"stdout": log, "stderr": log, "cwd": ROOT, "env": self.variables, "start_new_session": True}
            try:
                process = subprocess.Popen(command, **options)
            except OSError as error:
                return {"failed": str(error)[:200]}
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            log.seek(start)
            lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()] or ["nothing"]
        taken = {"seconds": perf_counter() - began}
        if code is None:
            return {"failed": f"no end after {seconds:.0f} seconds, at: {lines[-1][:150]}"} | taken
        if code:
            return {"failed": lines[-1].strip("= ")[:200]} | taken
        return {"result": next((line for line in reversed(lines) if line[0] == "{"), lines[-1].strip("= "))} | taken

    def part(self, name, config):
        """What a part of PARTS returns."""
        command = [sys.executable, __file__, "--work", json.dumps(config | {"part": name})]
        done = self.run(command)
        return json.loads(done["result"]) if "result" in done else done

    def tests(self, dry_run):
        files = tests_of_devices(ROOT / "tests")
        chosen = [ROOT / "tests/arrays/test_cuda_launches.py"] if dry_run else ["-m", "gpu", *files]
        return self.run([sys.executable, "-m", "pytest", "-v", "-p", "no:hypothesispytest", *chosen], TEST_SECONDS)

    def verify(self, mesh, device):
        """`verify` on two ranks: of mpiexec if it works, else threads."""
        arguments = ["--model", "gpt-nano", "--mesh", mesh, "--device", device, "--steps", "2"]
        if not self.has_mpi:
            return self.part("verify", {"arguments": arguments}) | {"ranks": "threads"}
        return self.run(["mpiexec", "-n", "2", sys.executable, "-m", "spmd_engine", "verify", *arguments])

    @cached_property
    def has_mpi(self):
        return "result" in self.run(["mpiexec", "-n", "2", sys.executable, "-c", MPI_OF_TWO], 30)

    def peer(self, config):
        """The same step by PyTorch."""
        if "result" not in self.torch:
            return {"left out": self.torch.get("left out", f"{self.peer_python} has no PyTorch")}
        done = self.run([self.peer_python, BENCHMARKS / "peers_torch_eager.py", json.dumps(config)])
        if "result" not in done:
            return done
        result = json.loads(done["result"])
        return rates(result["step_seconds"], config) | {"peak bytes": result["peak_rss_bytes"], "by": result["version"]}

    @cached_property
    def torch(self):
        return self.run([self.peer_python, "-c", "import torch; print(torch.__version__)"])


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
    from spmd_engine.planning.machine.machine import Curve, read_machine
    from spmd_engine.planning.simulator.step_evaluation import evaluate_step

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
    from spmd_engine.engine.build import build_engine
    from spmd_engine.engine.model_config import ModelConfig
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


def verify(config):
    """`verify` on two threads as ranks; it prints what differs, and ends this process, if results do not agree."""
    from spmd_engine import run_threads
    from spmd_engine.cli.verify import verify

    run_threads(lambda: verify.main(config["arguments"], standalone_mode=False), ranks=2)
    return {"result": "agrees"}


PARTS = {"launches": launches, "train": train, "predict": predict, "decode": decode, "verify": verify}

if __name__ == "__main__":
    main()
