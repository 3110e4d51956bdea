"""``infer``: outputs of a model for inputs, from file to file: an array, images or texts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeGuard

import click
import numpy as np

from spmd_engine.arrays.precision import HALVES, dtype_of
from spmd_engine.checkpoints import Checkpoint, load_checkpoint, open_pretrained
from spmd_engine.cli import generate
from spmd_engine.cli.options import LongCommand, open_mesh, served_model, takes_job
from spmd_engine.cli.values import WholeRange
from spmd_engine.comm import Mesh
from spmd_engine.comm.agreement.rank_zero import on_rank_zero
from spmd_engine.comm.notation import Spec
from spmd_engine.engine import LayeredEngine, ShardedEngine, build_engine
from spmd_engine.engine.distributed import check_dtype, check_mesh, make_engine
from spmd_engine.errors import NotationError, SpmdError, UsageError
from spmd_engine.files import check_ending, output_file
from spmd_engine.foreign import reading
from spmd_engine.formats.text_documents import parse_columns
from spmd_engine.models.names import IMAGES
from spmd_engine.models.user_code import code_named, is_code
from spmd_engine.training import TrainConfig
from spmd_engine.training.data.images import ImageRows, as_floats, check_pixels, check_scale, find_unlabelled
from spmd_engine.training.run_folder import run_folder


@click.command(cls=LongCommand, short_help="Run a model on an array, on images or on texts.")
@click.option(
    "--input",
    "source",
    metavar="X.npy",
    required=True,
    help="Whole inputs; the first dim is the batch. Or images, or texts, for a model of these.",
)
@click.option("--output", "target", metavar="Y.npy", required=True, help="File for the whole outputs.")
@generate.run_option
@generate.checkpoint_option
@click.option("--batch-size", type=WholeRange(min=1), help="Inputs at a time. [default: all]")
@takes_job(*generate.SERVED, config=False, help=generate.HELP)
def infer(source, target, run, checkpoint, batch_size, trust_code, job) -> None:
    """Read inputs on rank 0, run the model on all ranks, and write the outputs from rank 0.

    A model of text takes tokens[b s] (in a run usually bytes, and 256 for the end of a file) and returns logits[b s v].
    A model of images takes images[b h w c], from 0 to 1 or as uint8, and returns scores[b k] of the classes.

    A model of text also takes a file or folder that 'data prepare' reads; each document is a row, and what follows its
    end is NaN. A model of images also takes an image, a folder, whose images are rows in the order of their paths, or a
    data set that 'train' reads. Inputs are read as the model takes them.

    An engine
    of your own is called with mesh=... and dtype=... if it takes these, and with nothing else; its load_checkpoint is
    called if --checkpoint is given. The engine of a run is on the mesh of the run, unless --mesh has another.
    """
    generate.check_weights(run, checkpoint, job)
    run_job = generate.served_run(run, job) if run else None
    served = served_model(run_job) if run_job else None
    axes = run_job.composition.mesh if run_job and run_job.model.engine is not None else None
    if job.composition.shares and (is_code(job.model.name) or (served is not None and served.engine is not None)):
        raise UsageError("--shares goes with a model of layers; an engine of your own has a layout of its own")
    with open_mesh(job, axes) as opened:
        array = on_rank_zero(opened.group(), lambda: _read(source, target))
        if served is not None:
            serving: ShardedEngine
            if (make := served.engine) is not None:
                serving = make_engine(make, opened, dtype=dtype_of(served.dtype))
            else:
                how = {"device": job.device, "drawn": False, "trained": False}
                serving = build_engine(served, opened, job.composition, **how)
            load_checkpoint(run_folder(run), serving)
        elif is_code(job.model.name):
            serving = _open_user_engine(job.model.name, opened, job)
            if checkpoint:
                serving.load_checkpoint(Checkpoint(checkpoint))
        else:
            serving, _ = open_pretrained(job.model, opened, job.composition, device=job.device, trained=False)

        def read_for_model() -> Inputs:
            samples = _samples(source, serving, run, checkpoint, job) if array is None else array
            if not isinstance(samples, list):
                _check_shape(samples, source, serving)
            return samples

        inputs = on_rank_zero(opened.group(), read_for_model)
        outputs = _Outputs()
        with _add_shapes_to_errors(inputs, source, serving):
            serving.inference_loop(_pieces(inputs, batch_size, serving) if inputs is not None else None, outputs)
        on_rank_zero(opened.group(), lambda: _save(target, outputs))


_AT_ONCE = 256  # images whose scale is checked


class _Outputs(list[np.ndarray]):
    """The arrays that ``inference_loop`` writes."""

    write = list.append


def _save(target: str, outputs: list[np.ndarray]) -> None:
    longest = np.max([output.shape for output in outputs], axis=0)[1:]
    if any(output.shape[1:] != (*longest,) for output in outputs):  # texts of several lengths
        ends = [[(0, 0), *((0, most - size) for most, size in zip(longest, output.shape[1:]))] for output in outputs]
        outputs = [np.pad(output, end, constant_values=np.nan) for output, end in zip(outputs, ends, strict=True)]
    whole = np.concatenate(outputs)
    with output_file(target) as file:  # np.save would add .npy to another ending
        np.save(file, whole)
    click.echo(f"wrote {target}: {whole.dtype}[{', '.join(map(str, whole.shape))}]", err=True)


Inputs = np.ndarray | ImageRows | list[np.ndarray]  #: an array, images, or the tokens[1 s] of each text


def _samples(source: str, engine: ShardedEngine, run: str | None, checkpoint: str | None, job: TrainConfig) -> Inputs:
    """The images or texts in a file or folder, for a model of these. Prints what the rows are."""
    if _takes_images(engine):
        images, notes = find_unlabelled(Path(source), engine.model.sample[-1] if engine.model.sample else 3)
        click.echo("; ".join([f"{source}: {len(images):,} images", *notes]), err=True)
        return images
    if not isinstance(engine, LayeredEngine) or not engine.model.vocabulary:
        return read_inputs(source)  # which raises the error
    texts = generate.tokens_in(source, generate.tokenizer_of(run, checkpoint, job), parse_columns(job.data.columns))
    if not texts:
        raise UsageError(f"--input {source}: there is nothing to read in it")
    for where, tokens in texts:
        if not tokens or 0 < engine.model.context < len(tokens):
            raise UsageError(
                f"{where}: {len(tokens):,} tokens; {engine.model.name} reads 1 to {engine.model.context:,}"
            )
    click.echo(
        f"{source}: {len(texts):,} texts, of at most {max(len(tokens) for _, tokens in texts):,} tokens", err=True
    )
    return [np.array([tokens]) for _, tokens in texts]


def _read(source: str, target: str) -> np.ndarray | None:
    """The inputs, if they are an array by their name or content."""
    check_ending("--output", target, ".npy")
    if not Path(target).resolve().parent.is_dir():
        raise UsageError(f"--output {target}: there is no such folder")
    if not Path(source).exists():
        raise UsageError(f"--input {source}: no such file or folder")
    if Path(source).is_dir():
        return None
    with reading(f"--input {source} cannot be read"), open(source, "rb") as file:
        is_array = file.read(len(np.lib.format.MAGIC_PREFIX)) == np.lib.format.MAGIC_PREFIX
    return read_inputs(source) if is_array or source.endswith(".npy") else None


def read_inputs(source: str) -> np.ndarray:
    """The array of an .npy file, mapped; raises UsageError for one that is missing, damaged or empty."""
    if not Path(source).is_file():
        raise UsageError(f"--input {source}: no such file")
    with reading(f"--input {source} is not an .npy array"):
        inputs = np.lib.format.open_memmap(source, mode="r")
        if (size := inputs.offset + inputs.nbytes) != (file_size := Path(source).stat().st_size):
            raise ValueError(f"its header says {inputs.shape}, {size} bytes in all, but it has {file_size}")
    if inputs.dtype.kind not in "biufc":
        raise UsageError(f"--input {source} must be one .npy array of numbers")
    if not inputs.ndim or not len(inputs):
        raise UsageError(f"--input {source}: shape {inputs.shape}; the first dim is the batch, and must not be empty")
    return inputs


def _pieces(inputs: Inputs, size: int | None, engine: ShardedEngine) -> Iterator[np.ndarray]:
    """Batches of ``size`` inputs, a text at a time; pixels scaled as for training."""
    if isinstance(inputs, list):
        yield from inputs
        return
    step = size or len(inputs)
    for start in range(0, len(inputs), step):
        piece = inputs[start : start + step]
        yield as_floats(piece, engine.dtype) if _takes_images(engine) else piece


def _takes_images(engine: ShardedEngine) -> TypeGuard[LayeredEngine]:
    return isinstance(engine, LayeredEngine) and engine.model.name in IMAGES


def _open_user_engine(name: str, mesh: Mesh, job: TrainConfig) -> ShardedEngine:
    engine = make_engine(code_named(name, named_in=job.model.named_in), mesh, dtype=dtype_of(job.model.dtype))
    check_mesh(name, engine, mesh, job.composition.mesh)
    if job.model.dtype in HALVES:
        check_dtype(name, engine, dtype_of(job.model.dtype))
    return engine


def _check_shape(inputs: np.ndarray | ImageRows, source: str, engine: ShardedEngine) -> None:
    """Raise UsageError if whole inputs lack dims that the engine names, have other sizes than its model, or are not
    pixels although its model takes images."""
    letters, sizes = Spec.parse(engine.input_sharding).letters, {}
    fits = len(inputs.shape) >= len(letters)  # dims that the user's engine does not name are whole
    if isinstance(engine, LayeredEngine):
        letters, sizes = engine.model.inputs.replace(" ", ""), engine.model.layers[0][1].sizes
        if engine.model.sample:
            sizes = dict(zip(letters[1:], engine.model.sample, strict=True))
        if _takes_images(engine):
            check_pixels(f"--input {source}", inputs.dtype)
            for first in range(0, len(inputs) if inputs.dtype.kind == "f" else 0, _AT_ONCE):
                largest = float(np.abs(inputs[first : first + _AT_ONCE]).max())
                check_scale(f"--input {source}", largest, inputs.dtype, darkest=0)  # a single image may be black
        fits = len(inputs.shape) == len(letters)
    if not fits or any(sizes.get(letter, n) != n for letter, n in zip(letters, inputs.shape)):
        expected = ", ".join(str(sizes.get(letter, letter)) for letter in letters)
        raise UsageError(
            f"--input {source} has shape {inputs.shape}, but inputs are [{' '.join(letters)}], the batch first: "
            f"save an array of shape ({expected})"
        )


@contextmanager
def _add_shapes_to_errors(inputs: Inputs | None, source: str, engine: ShardedEngine) -> Iterator[None]:
    """Add the shapes to errors of a user's engine, whose forward may be the first to check them."""
    letters = " ".join(Spec.parse(engine.input_sharding).letters) or "any inputs"
    try:
        yield
    except Exception as error:
        if inputs is None or isinstance(inputs, list):  # rank 0 reports it; texts fit the model
            raise
        hint = (
            f"--input {source} has shape {inputs.shape}, and the engine takes [{letters}]: if sizes do not fit, save "
            "inputs of those that its parameters have, or load the --checkpoint that they belong to"
        )
        if isinstance(error, NotationError):
            raise UsageError(f"{error}. {hint}") from error
        if not isinstance(error, SpmdError):
            error.add_note(hint)
        raise
