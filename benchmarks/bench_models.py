"""Times loading and exporting the folder of a real model, against reading and hashing it once.

    mpiexec -n 4 python benchmarks/bench_models.py --mesh data=2,model=2 --rounds 5

The 135M Llama of benchmarks/bench_decoding.py with random weights in float32, 538 MB, is loaded as `--model PATH` does,
then saved as a checkpoint and exported from there as a folder of Hugging Face's format and as one safetensors file.
Each operation alternates with reading and hashing as many bytes, each rank its share; with also writing them, with
fsync; and with one rank reading and hashing all of them. All reads are from the page cache, so the disk does not count.
Before each operation as much is written and removed, because a virtual machine must get memory for the page cache again
after a pause. Each line has the time until all ranks are done, and the CPU seconds of all ranks.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import statistics
import tempfile
from pathlib import Path

import numpy as np
from bench_checkpoints import AT_ONCE, timed
from bench_decoding import SHAPE, write_model

from spmd_engine import Mesh
from spmd_engine.axes import parse_axes
from spmd_engine.checkpoints import Checkpoint, save_checkpoint
from spmd_engine.checkpoints.format.manifest import MODEL
from spmd_engine.checkpoints.hf.export import export_huggingface
from spmd_engine.checkpoints.pretrained import load_pretrained
from spmd_engine.checkpoints.rewrite import export_checkpoint
from spmd_engine.comm.agreement.rank_zero import text_from_rank_zero
from spmd_engine.engine.build import build_engine
from spmd_engine.engine.model_config import ModelConfig

COMPARED = (("load", "read and hash"), ("load", "on one rank"), ("export, huggingface", "read, hash, write"))
COMPARED += (("export, huggingface", "on one rank"), ("export, safetensors", "read, hash, write"))


def read_and_hash(source: Path, rank: int, ranks: int, target: Path | None = None) -> None:
    """Read and hash this rank's share of the file, in whole blocks; with ``target`` also copy it."""
    data, digest = bytearray(AT_ONCE), hashlib.sha256()
    blocks = -(-source.stat().st_size // AT_ONCE)
    with source.open("rb", buffering=0) as file:
        copy = target.open("wb", buffering=0) if target else None
        file.seek(rank * blocks // ranks * AT_ONCE)
        for _ in range(rank * blocks // ranks, (rank + 1) * blocks // ranks):
            part = memoryview(data)[: file.readinto(data)]
            digest.update(part)
            if copy:
                copy.write(part)
        if copy:
            os.fsync(copy.fileno())
            copy.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mesh", default="", help="for example data=2,model=2; default: all ranks on model")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with Mesh() as all_ranks:
        axes = parse_axes(options.mesh) if options.mesh else {"model": all_ranks.size}
        world = all_ranks.group()
        folder = Path(text_from_rank_zero(world, lambda: tempfile.mkdtemp(dir=".", prefix="bench-models-")))
        model = folder / "model"
        write_model(model)
        weights, rank, ranks = next(model.glob("*.safetensors")), world.rank, world.size
        times_by_name: dict[str, list[tuple[float, float]]] = {}
        with Mesh(**axes) as mesh:
            engine = build_engine(ModelConfig("llama", shape=SHAPE), mesh, drawn=False)
            load_pretrained(engine, model)
            save_checkpoint(folder / "run", engine, step=0)
            checkpoint = Checkpoint(folder / "run")
            out, single, plain = folder / "out", folder / "out.safetensors", folder / f"plain-{rank}"
            operations = {
                "load": lambda: load_pretrained(engine, model),
                "read and hash": lambda: read_and_hash(weights, rank, ranks),
                "on one rank": lambda: None if rank else read_and_hash(weights, 0, 1),
                "export, huggingface": lambda: export_huggingface(checkpoint, SHAPE, out, world),
                "read, hash, write": lambda: read_and_hash(weights, rank, ranks, plain),
                "export, safetensors": lambda: export_checkpoint(checkpoint, MODEL, single, world),
            }
            for _ in range(options.rounds + 1):
                for name, operation in operations.items():
                    operations["read, hash, write"]()  # not counted: the first write after a pause waits for memory
                    plain.unlink()
                    times_by_name.setdefault(name, []).append(timed(world, operation))
                    plain.unlink(missing_ok=True)
                    if rank == 0:
                        shutil.rmtree(out, ignore_errors=True)
                        single.unlink(missing_ok=True)
        world.barrier()
        if rank:
            return
        size = weights.stat().st_size
        shutil.rmtree(folder)
    print(f"{size / 1e6:.0f} MB, {ranks} ranks, mesh {axes}")
    for name, times in times_by_name.items():
        wall, cpu = (statistics.median(kind) for kind in zip(*times[1:], strict=True))
        print(f"  {name:20} {wall * 1e3:6.0f} ms, CPU {cpu * 1e3:6.0f} ms")
    for one, other in COMPARED:
        ratios = np.array(times_by_name[one][1:]) / np.array(times_by_name[other][1:])
        texts = [f"{np.median(values):.2f}x ({values.min():.2f}-{values.max():.2f})" for values in ratios.T]
        print(f"  {one} / {other}: {', CPU '.join(texts)}")


if __name__ == "__main__":
    main()
