"""A model of text with its tokenizer, from a run or from a folder of Hugging Face's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import click

from spmd_engine.checkpoints import load_checkpoint
from spmd_engine.cli.options import read_config, run_folder, what_it_computes
from spmd_engine.comm.mesh import Mesh
from spmd_engine.engine.composition import build_engine
from spmd_engine.engine.layered import LayeredEngine
from spmd_engine.errors import UsageError
from spmd_engine.serving.options import GenerationConfig
from spmd_engine.tokens import ByteTokenizer, Tokenizer


@dataclass(frozen=True)
class TextModel:
    """What a command that reads or writes text works with."""

    engine: LayeredEngine
    tokenizer: Tokenizer
    generation: GenerationConfig

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end a text."""
        end = self.tokenizer.end
        return self.generation.ends or (() if end is None else (end,))


def text_model_options(command: Callable) -> Callable:
    """``--run`` or ``--model``: which model."""
    command = click.option("--model", metavar="PATH", help="Or a model's folder from Hugging Face, or a GGUF file.")(
        command
    )
    return click.option("--run", metavar="DIR", help="Folder that 'train' wrote.")(command)


def open_text_model(run: str | None, model: str | None, mesh: Mesh, device: str) -> TextModel:
    """The model that ``--run`` or ``--model`` names, on this mesh. Collective. Raises UsageError if it is none of text."""
    if bool(run) == bool(model):
        raise UsageError("which model? give either --run DIR or --model PATH")
    config = read_config(run)
    engine = build_engine(what_it_computes(config), mesh, device=device)
    if not engine.model.vocabulary:
        raise UsageError(f"{engine.model.name} is no model of text, it takes no tokens")
    load_checkpoint(run_folder(run), engine)
    return TextModel(engine, ByteTokenizer(), GenerationConfig())
