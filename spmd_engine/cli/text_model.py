"""Models of text with their tokenizers, from a run, a folder in Hugging Face's format or a GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click

from spmd_engine.checkpoints import Checkpoint, load_checkpoint
from spmd_engine.checkpoints.pretrained import open_pretrained
from spmd_engine.cli.options import permitted, served_model, trust_option
from spmd_engine.comm.mesh import Mesh
from spmd_engine.engine import ModelConfig, build_engine
from spmd_engine.engine.layered import LayeredEngine
from spmd_engine.errors import UsageError
from spmd_engine.formats.text_documents import ALL, Columns, documents, find_files
from spmd_engine.models.load_config import ends_at, located, tokenizer_at
from spmd_engine.models.user_code import is_code, other_code
from spmd_engine.serving.sampling import GenerationConfig, read_generation_config
from spmd_engine.tokens import ByteTokenizer, Tokenizer
from spmd_engine.tokens.encoding import encode_prompt
from spmd_engine.tokens.hugging_face import read_tokenizer
from spmd_engine.training.data.prepare import encoded_document
from spmd_engine.training.run_folder import read_run, run_folder
from spmd_engine.training.train_config import TrainConfig


@dataclass(frozen=True)
class TextModel:
    """A model with its tokenizer and its configuration of generation."""

    engine: LayeredEngine
    tokenizer: Tokenizer
    generation: GenerationConfig

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end a text. A run has no generation_config.json, but learns the ends that a template writes."""
        end = self.tokenizer.end
        return self.generation.ends or (*(() if end is None else (end,)), *self.tokenizer.turn_ends)


#: Options of the job that choose weights and the mesh.
SERVED = ("model", "adapter", "columns", "precision", "mesh", "shares", "device", "transport", "check")
HELP = {
    "model": "Instead of --run, weights: a folder in Hugging Face's format, a GGUF file, or org/name in the hub's "
    "local cache; or code of your own, with --checkpoint.",
    "adapter": "With --model: a folder of adapters in PEFT's format.",
    "precision": "Dtype of parameters, activations and cached keys. [default: float32; of a run, its own]",
}


def run_option(command: Callable) -> Callable:
    """The options of a command that serves a run: its folder, and whether its code is trusted."""
    return click.option("--run", metavar="DIR", help="Folder of a run of 'train'.")(trust_option(command))


checkpoint_option = click.option(
    "--checkpoint", metavar="PATH", help="With --model CODE: its parameters, a safetensors file or saved folder."
)


def check_weights(run: str | None, checkpoint: str | None, job: TrainConfig) -> None:
    """Raise UsageError unless the command has exactly one of ``--model`` and ``--run``, and options that suit it.

    With ``--run``, ``--model`` may name the run's own code.
    """
    params = click.get_current_context().params
    if bool(params["model"]) == bool(run) and not (run and is_code(job.model.name)):
        raise UsageError("which model? give either --run DIR, --model PATH or --model FILE.py:NAME")
    if params["adapter"] and not params["model"]:
        raise UsageError("--adapter goes with --model; a run has its own")
    if checkpoint and (run or not is_code(job.model.name)):
        raise UsageError("--checkpoint goes with --model FILE.py:NAME; a run, or a model by path, has its own")


def served_run(run: str, job: TrainConfig) -> TrainConfig:
    """The job of ``--run``, whose code may run if ``--model`` names it or with ``--trust-code``. Collective.

    Raises UsageError for code that is not permitted, and for another ``--model`` than that of the run.
    """
    params, run_job = click.get_current_context().params, read_run(run)
    named = job.model.name if params["model"] else None
    if named not in (None, run_job.model.name):
        if is_code(run_job.model.name):
            raise other_code(run_job.model.name, named, run)
        raise UsageError(f"--model {named} with --run {run}, whose model is {run_job.model.name}: omit one of them")
    return run_job.changed(model=permitted(run_job.model, named, params["trust_code"]))


def open_text_model(run: str | None, checkpoint: str | None, job: TrainConfig, mesh: Mesh) -> TextModel:
    """The model of ``--run`` or ``--model``. Collective; raises UsageError for a model that does not take text."""
    check_weights(run, checkpoint, job)
    if run:
        model = served_model(served_run(run, job))
        given = click.get_current_context().params["precision"]
        engine = _build(model.changed(dtype=given) if given else model, mesh, job)
        load_checkpoint(run_folder(run), engine)
        return _with_tokenizer(engine, run_folder(run))
    if is_code(job.model.name):
        engine = _build(job.model, mesh, job)
        if not checkpoint:
            raise UsageError(f"--model {job.model.name} is code, without weights: give --checkpoint PATH, or --run DIR")
        engine.load_checkpoint(Checkpoint(checkpoint))
        return _with_tokenizer(engine, Path(checkpoint))
    engine, _ = open_pretrained(job.model, mesh, job.composition, device=job.device, trained=False)
    path = located(job.model.name)
    generation = read_generation_config(path) if path.is_dir() else GenerationConfig(ends=ends_at(path))
    return TextModel(engine, tokenizer_at(path), generation)


def tokenizer_of(run: str | None, checkpoint: str | None, job: TrainConfig) -> Tokenizer:
    """The tokenizer of what ``open_text_model`` opens."""
    if run or checkpoint:
        return _saved_tokenizer(run_folder(run) if run else Path(checkpoint or ""))
    return tokenizer_at(job.model.name)


def tokens_in(file: str, tokenizer: Tokenizer, columns: Columns | None) -> list[tuple[str, list[int]]]:
    """The place and the tokens of each document of a file; a text has no end, since it may continue."""
    texts = []
    for document in documents(find_files([file]), 0, ALL, ALL, columns):
        if document.is_text and not document.left_out:
            texts.append((document.where, encode_prompt(tokenizer, document.content())))
        elif not document.left_out:
            texts.append((document.where, encoded_document(document, tokenizer).tokens))
    return texts


def _build(model: ModelConfig, mesh: Mesh, job: TrainConfig) -> LayeredEngine:
    engine = build_engine(model, mesh, job.composition, device=job.device, drawn=False, trained=False)
    if not engine.model.vocabulary:
        raise UsageError(f"{engine.model.name} is not a model of text: it takes no tokens")
    return engine


def _with_tokenizer(engine: LayeredEngine, folder: Path) -> TextModel:
    """The model with what a run's folder has of the text: a tokenizer, unless it learnt from bytes."""
    return TextModel(engine, _saved_tokenizer(folder), read_generation_config(folder))


def _saved_tokenizer(folder: Path) -> Tokenizer:
    return read_tokenizer(folder) if (folder / "tokenizer.json").is_file() else ByteTokenizer()
