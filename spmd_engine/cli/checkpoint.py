"""``checkpoint``: inspect, verify and rewrite checkpoints, without MPI and without the model."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import click

from spmd_engine.checkpoints import Checkpoint
from spmd_engine.checkpoints.digest import differences, digest_of_checkpoint, digest_text
from spmd_engine.checkpoints.format.manifest import MODEL, OPTIMIZER, Manifest
from spmd_engine.checkpoints.hf.export import NAMES, export_adapters, export_gguf, export_huggingface
from spmd_engine.checkpoints.hf.weights import Pretrained, merged
from spmd_engine.checkpoints.rewrite import export_checkpoint, problems, reshard_checkpoint
from spmd_engine.cli.values import Choice, WholeRange
from spmd_engine.comm import Group, Mesh
from spmd_engine.comm.agreement.rank_zero import on_all_ranks, on_rank_zero
from spmd_engine.errors import UsageError
from spmd_engine.files import check_ending
from spmd_engine.foreign import reading
from spmd_engine.models.names import shape_named
from spmd_engine.runtime.launchers import launcher_rank
from spmd_engine.training.run_folder import run_folder
from spmd_engine.training.train_config import TrainConfig

MOST_FILES = 4096  #: most files of each kind in a rewritten checkpoint


@click.group(short_help="Inspect, verify and rewrite checkpoints.")
def checkpoint() -> None:
    """Inspect checkpoints, verify that they are whole, and rewrite them. This needs neither MPI nor the model.

    A checkpoint is a folder of safetensors files with a manifest, which lists the blocks of every array with their
    places and hashes. Any mesh loads any checkpoint, without conversion.

    PATH is a run (its folder, or its name under runs/), for its newest checkpoint, or the folder of one checkpoint,
    such as runs/gpt-nano-1/checkpoints/step-00000600.
    """


@checkpoint.command()
@click.argument("path")
@click.option("--arrays/--no-arrays", default=None, help="List every array. [default: with --json alone]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def inspect(path: str, arrays: bool | None, as_json: bool) -> None:
    """Print a summary of a checkpoint, or all its arrays, without reading them."""
    opened, manifest = _open(path)
    sizes = {section: sum(array.nbytes for array in held.values()) for section, held in manifest.sections.items()}
    facts = {
        "path": str(opened.path),
        "step": manifest.step,
        "written_on": manifest.mesh,
        "files": len(manifest.file_names()),
        "bytes": sizes,
        **{name: value for name, value in manifest.facts.items() if name != "report"},  # in metrics.jsonl, as a rule
    }
    listed = [
        {"section": section, "name": name, "shape": array.shape, "dtype": array.dtype, "blocks": len(array.blocks)}
        for section, held in manifest.sections.items()
        for name, array in held.items()
    ]
    if as_json:
        click.echo(json.dumps(facts | ({"arrays": listed} if arrays is not False else {}), indent=2))
        return
    readable = {"bytes": ", ".join(f"{section} {count:,}" for section, count in sizes.items())}
    counts = ", ".join(f"{section} {len(held)}" for section, held in manifest.sections.items())
    readable["arrays"] = counts if arrays else f"{counts}; --arrays lists them"
    for name, value in (facts | readable).items():
        click.echo(f"{name:<16}{value}")
    if arrays:
        width = max((len(entry["name"]) for entry in listed), default=0)
        for entry in listed:
            shape = f"{entry['dtype']}[{', '.join(map(str, entry['shape']))}]"
            click.echo(f"{entry['section']:<10}{entry['name']:<{width}}  {shape:<24}{entry['blocks']} block(s)")


@checkpoint.command()
@click.argument("path")
def verify(path: str) -> None:
    """Check all of a checkpoint: hashes, headers, finite values. Exit code 1, and a line each, for problems."""
    opened, manifest = _open(path)
    wrong = 0
    for problem in problems(opened):
        click.echo(problem, err=True)
        wrong += 1
    if wrong:
        sys.exit(1)
    blocks = sum(len(array.blocks) for held in manifest.sections.values() for array in held.values())
    size = f"{blocks} blocks, {manifest.nbytes / 1e6:.1f} MB"
    click.echo(f"{opened.path}: sound; {size}, step {manifest.step}")


@checkpoint.command()
@click.argument("path")
@click.argument("other", required=False)
@click.option("--arrays", is_flag=True, help="Also print a line for every array.")
def digest(path: str, other: str | None, arrays: bool) -> None:
    """Print a digest of all arrays, which does not depend on how they are sharded: it is equal across meshes.

    With OTHER, compare the two: the exit code is 1, with a line for each array and range of rows, if they differ.
    """
    digests = digest_of_checkpoint(_open(path)[0])
    if arrays:
        for name, array_digest in digests.items():
            click.echo(f"{array_digest.text()}  {name}")
    click.echo(f"{digest_text(digests)}  {path}")
    if other is None:
        return
    others = digest_of_checkpoint(_open(other)[0])
    click.echo(f"{digest_text(others)}  {other}")
    different = differences(digests, others)
    for difference in different:
        click.echo(difference)
    if different:
        sys.exit(1)


@checkpoint.command()
@click.argument("path")
@click.argument("folder")
@click.option("--files", type=WholeRange(1, MOST_FILES), default=1, help="Files of each kind.")
def reshard(path: str, folder: str, files: int) -> None:
    """Rewrite a checkpoint into FOLDER, that of a run, in another number of files.

    Any mesh loads any checkpoint without this; but file systems may prefer few large files, or many small ones.
    """
    with reading(f"{folder} cannot be written"):
        click.echo(str(reshard_checkpoint(_open(path)[0], folder, files)))


@checkpoint.command()
@click.argument("path")
@click.argument("target")
@click.option("--optimizer", is_flag=True, help="Export the optimizer's state instead of the model.")
@click.option(
    "--format",
    "kind",
    type=Choice(["safetensors", "huggingface", "gguf", "peft"]),
    default="safetensors",
    help="One file with our names, a folder for transformers, a file for llama.cpp, or a folder of adapters for PEFT.",
)
@click.option(
    "--dtype",
    type=Choice(list(NAMES)),
    default="float32",
    help="Dtype in a folder or GGUF file; there float32, float16 or bfloat16.",
)
def export(path: str, target: str, optimizer: bool, kind: str, dtype: str) -> None:
    """Write the parameters and buffers of a checkpoint as one plain safetensors file TARGET, every array whole.

    Under mpiexec, the ranks share the work and write in parallel. 'infer --checkpoint FILE' reads the file. With
    --format huggingface, TARGET is a folder with config.json, for 'AutoModelForCausalLM.from_pretrained' and for
    --model; it gets the tokenizer of the run's tokens, and adapters are merged into the weights. With --format gguf
    TARGET is a file with the same content. With --format peft it is a folder with the adapters only.
    """
    if kind != "safetensors" and optimizer:
        raise UsageError(f"--format {kind} has only parameters; omit --optimizer")
    check_ending("export", target, *_ENDINGS.get(kind, ()))
    opened, manifest = _open(path)
    with Mesh() as mesh, reading(f"{target} cannot be written"):
        group = mesh.group() if mesh.size > 1 else None
        if kind != "safetensors":
            _export_for_others(opened, manifest.config, target, kind, dtype, group)
        else:
            export_checkpoint(opened, OPTIMIZER if optimizer else MODEL, target, group)
    if launcher_rank() == 0:
        click.echo(target)


@checkpoint.command()
@click.argument("model")
@click.argument("target")
@click.option(
    "--format",
    "kind",
    type=Choice(["huggingface", "gguf"]),
    help="A folder for transformers, or a file for llama.cpp. [default: gguf if TARGET ends with .gguf]",
)
@click.option("--dtype", type=Choice(list(NAMES)), default="float32", help="Dtype of the weights.")
def convert(model: str, target: str, kind: str | None, dtype: str) -> None:
    """Write a pretrained MODEL, a GGUF file or a folder, in the other format, as TARGET, without a run.

    Blocks of a GGUF file are unpacked. The tokenizer is handed on. Under mpiexec, the ranks share the work.
    """
    kind = kind or ("gguf" if target.endswith(".gguf") else "huggingface")
    check_ending("convert", target, *_ENDINGS.get(kind, ()))
    with Mesh() as mesh, reading(f"{target} cannot be written"):
        pretrained = on_all_ranks(mesh.group(), lambda: Pretrained(model))
        on_rank_zero(mesh.group(), pretrained.check_files)
        group = mesh.group() if mesh.size > 1 else None
        _WRITERS[kind](pretrained, pretrained.shape, target, group, dtype=dtype, beside=pretrained.path)
    if launcher_rank() == 0:
        click.echo(target)


_ENDINGS = {"safetensors": [".safetensors"], "gguf": [".gguf"]}  #: endings of files, by format
_WRITERS = {"gguf": export_gguf, "huggingface": export_huggingface}  #: for other programs, by format


def _export_for_others(
    opened: Checkpoint, config: Any, target: str, kind: str, dtype: str, group: Group | None
) -> None:
    model = TrainConfig.from_json(config, f"{opened.path}: config").model
    shape = model.shape or shape_named(model.name)
    shape = shape.changed(mixture=model.mixture or shape.mixture, vocabulary=model.vocabulary or shape.vocabulary)
    if kind == "peft":
        if model.lora is None:
            raise UsageError(f"{opened.path} has no adapters; --format huggingface writes all of it")
        export_adapters(opened, shape, model.lora, target, group, dtype=dtype, base=model.path)
        return
    arrays = opened if model.lora is None else merged(opened, shape, model.lora)
    run = opened.path.resolve().parent.parent
    _WRITERS[kind](arrays, shape, target, group, dtype=dtype, beside=model.path, tokenizer=run)


def _open(path: str) -> tuple[Checkpoint, Manifest]:
    folder = run_folder(path)
    opened = Checkpoint(folder if os.path.exists(folder) else path)
    if not opened.manifest.sections:
        raise UsageError(f"{path} is a plain safetensors file; this is for checkpoints, which are folders")
    return opened, opened.manifest
