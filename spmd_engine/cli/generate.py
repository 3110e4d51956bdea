"""``generate``: text from a model."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

from spmd_engine.cli.options import LongCommand, open_mesh, takes_job
from spmd_engine.cli.text_model import HELP, SERVED, TextModel, checkpoint_option, open_text_model, run_option
from spmd_engine.cli.values import NumberRange, WholeNumber, WholeRange
from spmd_engine.comm.agreement.rank_zero import json_from_rank_zero, waits_outside
from spmd_engine.errors import UsageError
from spmd_engine.formats.text_documents import Columns, parse_columns, prompts_in
from spmd_engine.serving import Completion, StoppingCriteria
from spmd_engine.serving import generate as generate_texts
from spmd_engine.serving.generation import BATCH, OnText
from spmd_engine.serving.sampling import LARGEST
from spmd_engine.tokens.encoding import encode_chat, encode_prompt
from spmd_engine.training.train_config import TrainConfig

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
        printing = _Printing([text for text, _, _ in texts], echoed, options["as_json"])
        completions = generate_texts(
            served.engine,
            tokens,
            sampling=sampling,
            stopping=stopping,
            tokenizer=served.tokenizer,
            log_probs=options["log_probs"],
            batch_size=options["batch_size"],
            on_text=printing.on_text(),
        )
        if opened.rank == 0:
            printing.finish(completions)


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


class _Printing:
    """Prints texts on standard output: a single text while it is generated, several at the end."""

    def __init__(self, prompts: Sequence[str], echoed: Sequence[bool], as_json: bool) -> None:
        """``echoed``: which prompts are printed before their continuations."""
        self._prompts, self._as_json = prompts, as_json
        self._before = [prompt if echo else "" for prompt, echo in zip(prompts, echoed, strict=True)]
        self._streams, self._started = len(prompts) == 1 and not as_json, False

    def on_text(self) -> OnText | None:
        if not self._streams:
            return None

        def echo(number: int, text: str) -> None:
            self._begin()
            click.echo(text, nl=False)
            sys.stdout.flush()

        return echo

    def _begin(self) -> None:
        """Print the prompt, once, after it has been checked."""
        if not self._started:
            click.echo(self._before[0], nl=False)
        self._started = True

    def finish(self, written: Sequence[Completion]) -> None:
        if self._streams:
            self._begin()
            click.echo()
            return
        for number, (prompt, before, result) in enumerate(zip(self._prompts, self._before, written, strict=True)):
            if self._as_json:
                fields = {key: value for key, value in asdict(result).items() if value is not None}
                click.echo(json.dumps(fields | {"prompt": prompt, "prompt_tokens": len(result.prompt)}))
            else:
                click.echo(f"{'' if number == 0 else chr(10)}--- {number + 1} of {len(written)}\n{before}{result.text}")
