"""``eval``: the log-probabilities that a model gives to texts."""

from __future__ import annotations

import json
from collections.abc import Sequence

import click

from spmd_engine.cli.options import LongCommand, open_mesh, takes_job
from spmd_engine.cli.text_model import (
    HELP,
    SERVED,
    TextModel,
    checkpoint_option,
    open_text_model,
    run_option,
    tokens_in,
)
from spmd_engine.cli.values import WholeRange
from spmd_engine.comm.agreement.rank_zero import json_from_rank_zero, waits_outside
from spmd_engine.errors import UsageError
from spmd_engine.formats.text_documents import Columns, parse_columns
from spmd_engine.formats.token_file import is_token_file, open_token_file
from spmd_engine.serving.scoring import Score, score
from spmd_engine.tokens.encoding import encode_prompt
from spmd_engine.training.data.token_data import check_digests


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
