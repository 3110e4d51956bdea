"""Models of text with their tokenizers, from a run, a folder in Hugging Face's format or a GGUF file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import click

from spmd_engine.checkpoints import load_checkpoint
from spmd_engine.checkpoints.pretrained import open_pretrained
from spmd_engine.cli.options import served_model
from spmd_engine.comm.mesh import Mesh
from spmd_engine.engine.layered import LayeredEngine
from spmd_engine.engine.parallel_config import build_engine
from spmd_engine.errors import UsageError
from spmd_engine.models.load_config import ends_at, located, tokenizer_at
from spmd_engine.models.user_code import is_code
from spmd_engine.serving.sampling import GenerationConfig, read_generation_config
from spmd_engine.tokens import ByteTokenizer, Tokenizer
from spmd_engine.tokens.hugging_face import read_tokenizer
from spmd_engine.training.run_job import read_run, run_folder
from spmd_engine.training.train_config import TrainConfig


@dataclass(frozen=True)
class TextModel:
    """A model with its tokenizer and its configuration of generation."""

    engine: LayeredEngine
    tokenizer: Tokenizer
    generation: GenerationConfig

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end a text."""
        end = self.tokenizer.end
        return self.generation.ends or (() if end is None else (end,))


#: Options of the job that choose weights and the mesh.
SERVED = ("model", "adapter", "dtype", "mesh", "shares", "device", "check")
HELP = {
    "model": "Instead of --run, weights: a folder in Hugging Face's format, a GGUF file, or org/name in the hub's "
    "local cache.",
    "adapter": "With --model: a folder of adapters in PEFT's format.",
    "dtype": "With --model: the dtype of parameters and activations. [default: float32]",
}
run_option = click.option("--run", metavar="DIR", help="Folder of a run of 'train'.")


def check_weights(*others: Any) -> None:
    """Raise UsageError unless the command has exactly one of ``--model`` and ``others``, and options that suit it."""
    params = click.get_current_context().params
    if sum(map(bool, (params["model"], *others))) != 1:
        names = "--run DIR, --model PATH or --engine MODULE:NAME" if len(others) > 1 else "--run DIR or --model PATH"
        raise UsageError(f"which model? give either {names}")
    for name in ("dtype", "adapter"):
        if params[name] and not params["model"]:
            raise UsageError(f"--{name} goes with --model; a run or an engine of your own has its own")


def open_text_model(run: str | None, job: TrainConfig, mesh: Mesh) -> TextModel:
    """The model of ``--run`` or ``--model``. Collective; raises UsageError for a model that does not take text."""
    check_weights(run)
    if run:
        return _open_run(run, mesh, job)
    if is_code(job.model.name):
        raise UsageError(f"--model {job.model.name} is code, without weights: train it, and give --run")
    engine, _ = open_pretrained(job.model, mesh, job.composition, device=job.device)
    path = located(job.model.name)
    generation = read_generation_config(path) if path.is_dir() else GenerationConfig(ends=ends_at(path))
    return TextModel(engine, tokenizer_at(path), generation)


def _open_run(run: str, mesh: Mesh, job: TrainConfig) -> TextModel:
    folder = run_folder(run)
    engine = build_engine(served_model(read_run(run)), mesh, job.composition, device=job.device, drawn=False)
    if not engine.model.vocabulary:
        raise UsageError(f"{engine.model.name} is not a model of text: it takes no tokens")
    load_checkpoint(folder, engine)
    saved = (folder / "tokenizer.json").is_file()
    return TextModel(engine, read_tokenizer(folder) if saved else ByteTokenizer(), read_generation_config(folder))
