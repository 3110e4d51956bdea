"""``generate``: text from a model; and ``eval``: the log-probabilities that it gives to texts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from spmd_engine.checkpoints import Checkpoint, load_checkpoint, open_pretrained
from spmd_engine.cli.options import LongCommand, open_mesh, permitted, served_model, takes_job, trust_option
from spmd_engine.cli.values import NumberRange, WholeNumber, WholeRange
from spmd_engine.comm import Mesh
from spmd_engine.comm.agreement.rank_zero import json_from_rank_zero, waits_outside
from spmd_engine.engine import LayeredEngine, ModelConfig, build_engine
from spmd_engine.errors import UsageError
from spmd_engine.formats.text_documents import ALL, Columns, documents, find_files, parse_columns, prompts_in
from spmd_engine.formats.token_file import is_token_file, open_token_file
from spmd_engine.models.names import ends_at, located, tokenizer_at
from spmd_engine.models.user_code import is_code, other_code
from spmd_engine.serving import Completion, StoppingCriteria
from spmd_engine.serving import generate as generate_texts
from spmd_engine.serving.generation import BATCH, OnText
from spmd_engine.serving.sampling import LARGEST, GenerationConfig, read_generation_config
from spmd_engine.serving.scoring import Score, score
from spmd_engine.tokens import ByteTokenizer, Tokenizer
from spmd_engine.tokens.encoding import encode_chat, encode_prompt
from spmd_engine.tokens.hugging_face import read_tokenizer
from spmd_engine.training import TrainConfig
from spmd_engine.training.data.prepare import encoded_document
from spmd_engine.training.data.token_data import check_digests
from spmd_engine.training.run_folder import read_run, run_folder

# --- Models of text with their tokenizers, from a run, a folder in Hugging Face's format or a GGUF file


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
    """The job of ``--run`` in the ``--precision``, whose code may run if ``--model`` names it or with ``--trust-code``.
    Collective.

    Raises UsageError for code that is not permitted, and for another ``--model`` than that of the run.
    """
    params, run_job = click.get_current_context().params, read_run(run)
    named = job.model.name if params["model"] else None
    if named not in (None, run_job.model.name):
        if is_code(run_job.model.name):
            raise other_code(run_job.model.name, named, run)
        raise UsageError(f"--model {named} with --run {run}, whose model is {run_job.model.name}: omit one of them")
    model = permitted(run_job.model, named, params["trust_code"])
    return run_job.changed(model=model.changed(dtype=params["precision"] or model.dtype))


def open_text_model(run: str | None, checkpoint: str | None, job: TrainConfig, mesh: Mesh) -> TextModel:
    """The model of ``--run`` or ``--model``. Collective; raises UsageError for a model that does not take text."""
    check_weights(run, checkpoint, job)
    if run:
        engine = _build(served_model(served_run(run, job)), mesh, job)
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


# --- Texts


TOKENS = 240  #: most new tokens, without a limit of the model


@click.command(cls=LongCommand, short_help="Write text with a model.")
@run_option
@checkpoint_option
@click.option("--prompt", "prompts", multiple=True, help="The beginning of a text; may be repeated.")
@click.option(
    "--prompts",
    "file",
    metavar="FILE",
    help="A prompt a line; in a .jsonl, .json, .csv or .parquet file, a row with prompt or messages.",
)
@click.option("--chat", is_flag=True, help="Treat prompts as messages of a user, in the model's chat template.")
@click.option("--echo/--no-echo", default=None, help="Print prompts before the texts. [default: except for messages]")
@click.option("--system", metavar="TEXT", help="With --chat: the system message.")
@click.option(
    "--tokens", type=WholeRange(min=1), help=f"Most new tokens. [default: the model's own limit, or {TOKENS}]"
)
@click.option("--temperature", type=NumberRange(0, LARGEST), help="Divides logits; 0: greedy.")
@click.option("--top-k", type=WholeRange(min=0), help="Sample from this many of the likeliest tokens; 0: all.")
@click.option("--top-p", type=NumberRange(0, 1), help="Sample from the likeliest tokens with this total probability.")
@click.option(
    "--min-p", type=NumberRange(0, 1), help="Sample from tokens with this fraction of the largest probability."
)
@click.option("--repetition-penalty", type=NumberRange(1e-6, LARGEST), help="Above 1: repeat tokens less.")
@click.option("--greedy", is_flag=True, help="Take the likeliest token, whatever the model's own configuration says.")
@click.option("--seed", type=WholeNumber(), default=0, help="Seed of sampling.")
@click.option("--samples", type=WholeRange(min=1), default=1, help="Texts for each prompt.")
@click.option("--stop", multiple=True, help="A string that ends a text; may be repeated.")
@click.option("--ignore-end", is_flag=True, help="Continue when the model would end.")
@click.option(
    "--slide/--no-slide",
    default=None,
    help="Beyond the context, continue from its last half. [default: except for a model by path]",
)
@click.option("--batch-size", type=WholeRange(min=1), default=BATCH, help="Texts at a time.")
@click.option("--log-probs", is_flag=True, help="With --json: the log-probability of each token.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print an object a line for each text, with its tokens and its end."
)
@takes_job(*SERVED, config=False, help=HELP)
def generate(run: str | None, checkpoint: str | None, job: TrainConfig, **options: Any) -> None:
    """Continue prompts with a model, on any mesh. Each text is printed after its prompt; for messages (--chat), the
    reply alone.

    The likeliest token is taken, unless an option of sampling is given or the model's generation_config.json asks for
    sampling. Samples depend on the seed, the prompt and the options alone, not on the mesh or the other prompts. A text
    ends at the model's end token, at a --stop string (which is not printed), after --tokens, or at the context.
    """
    if options["log_probs"] and not options["as_json"]:
        raise UsageError("--log-probs goes with --json, which prints them")
    sampled = [name for name in ("temperature", "top_k", "top_p", "min_p") if options[name]]
    if options["greedy"] and sampled:
        option = sampled[0].replace("_", "-")
        raise UsageError(f"--greedy takes the likeliest token, and --{option} {options[sampled[0]]} samples: omit one")
    columns = parse_columns(job.data.columns)
    with open_mesh(job) as opened:
        with waits_outside(opened.group(), "reading --prompts"):  # perhaps from a terminal
            named = options["prompts"], options["file"], columns
            prompts = json_from_rank_zero(opened.group(), lambda: _prompts(*named))
        served = open_text_model(run, checkpoint, job, opened)
        texts = [_text_of(served, prompt, options) for prompt in prompts for _ in range(options["samples"])]
        tokens = [tokens for _, tokens, _ in texts]
        defaults = served.generation
        for name in defaults.unknown if opened.rank == 0 else ():
            click.echo(f"generation_config.json: {name} is not supported, and ignored", err=True)
        chosen = {name: options[name] for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
        sampling = defaults.sampling.with_given(**chosen, seed=options["seed"])
        if options["greedy"]:
            sampling = sampling.changed(sample=False)
        stopping = StoppingCriteria(
            options["tokens"] or defaults.tokens or TOKENS,
            () if options["ignore_end"] else served.ends,
            tuple(options["stop"]),
            bool(run or checkpoint) if options["slide"] is None else options["slide"],
        )
        echoed = [plain if options["echo"] is None else options["echo"] for _, _, plain in texts]
        before = [text if echo else "" for (text, _, _), echo in zip(texts, echoed, strict=True)]
        on_text = _streaming(before[0]) if len(texts) == 1 and not options["as_json"] else None
        completions = generate_texts(
            served.engine,
            tokens,
            sampling=sampling,
            stopping=stopping,
            tokenizer=served.tokenizer,
            log_probs=options["log_probs"],
            batch_size=options["batch_size"],
            on_text=on_text,
        )
        if opened.rank == 0 and on_text:
            on_text(0, "\n")
        elif opened.rank == 0:
            _print(completions, [text for text, _, _ in texts], before, options["as_json"])


def _prompts(texts: Sequence[str], file: str | None, columns: Columns | None = None) -> list[Any]:
    """The prompts: texts, or messages with the tools that the assistant may call."""
    prompts: list[Any] = list(texts)
    if file is not None:
        rows = prompts_in(file, columns)
        prompts += [row.text if row.messages is None else [row.messages, row.tools] for row in rows]
    if not prompts:
        raise UsageError("generate needs a prompt: give --prompt TEXT or --prompts FILE")
    return prompts


def _text_of(served: TextModel, prompt: str | list, options: dict[str, Any]) -> tuple[str, list[int], bool]:
    """The text of a prompt, its tokens, and whether it is no conversation."""
    if isinstance(prompt, str) and not options["chat"]:
        if options["system"] is not None:
            raise UsageError("--system goes with --chat, or with prompts that are messages")
        return prompt, encode_prompt(served.tokenizer, prompt), True
    messages, tools = ([{"role": "user", "content": prompt}], None) if isinstance(prompt, str) else prompt
    if options["system"] is not None:
        messages = [{"role": "system", "content": options["system"]}, *messages]
    return *encode_chat(served.tokenizer, messages, tools), False


def _streaming(before: str) -> OnText:
    """Prints a text while it is generated; first what stands ``before`` it, once that has been checked."""
    waiting = [before]

    def echo(number: int, text: str) -> None:
        click.echo("".join([*waiting, text]), nl=False)
        waiting.clear()
        sys.stdout.flush()

    return echo


def _print(written: Sequence[Completion], prompts: Sequence[str], before: Sequence[str], as_json: bool) -> None:
    """Print several texts at the end, each with what stands ``before`` it."""
    for number, result in enumerate(written):
        if as_json:
            fields = {key: value for key, value in asdict(result).items() if value is not None}
            click.echo(json.dumps(fields | {"prompt": prompts[number], "prompt_tokens": len(result.prompt)}))
        else:
            title = f"--- {number + 1} of {len(written)}"
            click.echo(f"{chr(10) * bool(number)}{title}\n{before[number]}{result.text}")


# --- Log-probabilities of texts


@click.command(cls=LongCommand, name="eval", short_help="Score texts: log-probabilities, perplexity.")
@run_option
@checkpoint_option
@click.option("--text", "texts", multiple=True, help="A text; may be repeated.")
@click.option(
    "--file",
    "files",
    metavar="FILE",
    multiple=True,
    help="A file of text, or of rows, each scored by itself; or the held-out part of a token file.",
)
@click.option("--stride", type=WholeRange(min=1), help="Tokens between windows. [default: half the context]")
@click.option("--batch-size", type=WholeRange(min=1), default=8, help="Windows at a time.")
@click.option("--json", "as_json", is_flag=True, help="Print an object a line, with each token's log-probability.")
@takes_job(*SERVED, config=False, help=HELP)
def eval(run, checkpoint, texts, files, stride, batch_size, as_json, trust_code, job) -> None:
    """Print the mean negative log-probability of a token, in nats, and the perplexity of each text.

    Each token is scored given the tokens before it; the first token of a text is not scored. A text longer than the
    context is read in overlapping windows.
    """
    columns = parse_columns(job.data.columns)
    with open_mesh(job) as opened:
        served = open_text_model(run, checkpoint, job, opened)
        with waits_outside(opened.group(), "reading --file"):  # perhaps from a terminal
            named = json_from_rank_zero(opened.group(), lambda: _read(served, texts, files, columns))
        scores = score(served.engine, [tokens for _, tokens in named], stride=stride, batch_size=batch_size)
        if opened.rank == 0:
            for (name, tokens), scored in zip(named, scores, strict=True):
                click.echo(json.dumps(_as_json(name, tokens, scored)) if as_json else _line(name, scored))


def _read(
    served: TextModel, texts: Sequence[str], files: Sequence[str], columns: Columns | None
) -> list[tuple[str, list[int]]]:
    """Names and tokens of the texts and files."""
    named = [(text if len(text) < 40 else text[:37] + "...", encode_prompt(served.tokenizer, text)) for text in texts]
    for file in files:
        if is_token_file(file):
            tokens = open_token_file(file)
            check_digests(tokens, tokens.digests(0, tokens.facts.documents))
            held_out = tokens.tokens[tokens.facts.train_tokens :].tolist()
            if not held_out:
                raise UsageError(f"{file} holds out no documents: score a file of text instead")
            named.append((file, held_out))
            continue
        named += tokens_in(file, served.tokenizer, columns) or [(file, [])]
    if not named:
        raise UsageError("eval needs a text: give --text TEXT or --file FILE")
    for name, tokens in named:
        if len(tokens) < 2:
            raise UsageError(f"{name!r} has {len(tokens)} token(s); at least two are needed to score one")
    return named


def _line(name: str, scored: Score) -> str:
    count = len(scored.log_probs)
    return f"{name!r}: {count:,} tokens, {scored.nats:.4f} nats each, perplexity {scored.perplexity:.3f}"


def _as_json(name: str, tokens: list[int], scored: Score) -> dict:
    return {
        "text": name,
        "tokens": tokens,
        "log_probs": scored.log_probs.tolist(),
        "nats": scored.nats,
        "perplexity": scored.perplexity,
    }
