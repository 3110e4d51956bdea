"""A model of text with its tokenizer, from a run or from a folder of Hugging Face's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import click

from spmd_engine.checkpoints import load_checkpoint
from spmd_engine.checkpoints.pretrained import open_pretrained
from spmd_engine.cli.options import read_config, run_folder, what_it_computes, with_options
from spmd_engine.comm.mesh import Mesh
from spmd_engine.engine.layered import LayeredEngine
from spmd_engine.engine.parallel_config import ModelConfig, build_engine
from spmd_engine.errors import UsageError
from spmd_engine.models.load_config import ends_at, located, tokenizer_at
from spmd_engine.serving.options import GenerationConfig, read_generation_config
from spmd_engine.tokens import ByteTokenizer, Tokenizer
from spmd_engine.tokens.hugging_face import read_tokenizer


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


_WEIGHTS = (
    click.option(
        "--model",
        metavar="PATH",
        help="Or weights: a folder of Hugging Face's format, a GGUF file, or org/name in the hub's local cache.",
    ),
    click.option("--adapter", metavar="FOLDER", help="With --model: adapters that PEFT wrote."),
    click.option("--dtype", type=click.Choice(["float32", "float64"]), help="Of --model. [default: float32]"),
)


def weights_options(command: Callable) -> Callable:
    """``--model`` and what goes with it, for commands that take weights."""
    return with_options(_WEIGHTS, command)


def text_model_options(command: Callable) -> Callable:
    """``--run`` or ``--model``: which model."""
    return click.option("--run", metavar="DIR", help="Folder that 'train' wrote.")(weights_options(command))


def open_text_model(
    run: str | None, model: str | None, adapter: str | None, dtype: str | None, mesh: Mesh, device: str
) -> TextModel:
    """The model that ``--run`` or ``--model`` names. Collective; raises UsageError if it is none of text."""
    if bool(run) == bool(model):
        raise UsageError("which model? give either --run DIR or --model PATH")
    if run:
        for name, given in (("dtype", dtype), ("adapter", adapter)):
            if given:
                raise UsageError(f"--{name} goes with --model; a run has its own")
        return _of_run(run, mesh, device)
    engine, _ = open_pretrained(ModelConfig(str(model), adapter=adapter, dtype=dtype or "float32"), mesh, device=device)
    path = located(str(model))
    generation = read_generation_config(path) if path.is_dir() else GenerationConfig(ends=ends_at(path))
    return TextModel(engine, tokenizer_at(path), generation)


def _of_run(run: str, mesh: Mesh, device: str) -> TextModel:
    config, folder = read_config(run), run_folder(run)
    engine = build_engine(what_it_computes(config), mesh, device=device, drawn=False)
    if not engine.model.vocabulary:
        raise UsageError(f"{engine.model.name} is no model of text, it takes no tokens")
    load_checkpoint(folder, engine)
    own = (folder / "tokenizer.json").is_file()
    return TextModel(engine, read_tokenizer(folder) if own else ByteTokenizer(), read_generation_config(folder))
