"""``data``: corpora as files of tokens."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from spmd_engine.cli.options import open_mesh, takes_job
from spmd_engine.cli.show_images import print_images
from spmd_engine.comm.agreement.rank_zero import on_all_ranks, on_rank_zero
from spmd_engine.files import check_ending
from spmd_engine.formats.token_file import TokenFile, open_token_file
from spmd_engine.models.load_config import tokenizer_at
from spmd_engine.runtime.launchers import launcher_rank
from spmd_engine.tokens import ByteTokenizer, Tokenizer
from spmd_engine.training.data.prepare import prepare as prepare_file
from spmd_engine.training.data.token_data import check_digests

BYTES, SHEET = "bytes", "contact-sheet.png"


@click.group(short_help="Encode a corpus once, as a file of tokens.")
def data() -> None:
    """Encode a corpus once, as a file of tokens that training maps: train --data FILE."""


@data.command()
@click.argument("paths", nargs=-1, required=True)
@click.option("--output", metavar="FILE", required=True, help="File to write.")
@click.option(
    "--tokenizer",
    metavar="PATH",
    default=BYTES,
    show_default=True,
    help="A model's folder or GGUF file, or tokenizer.json.",
)
@takes_job("check", config=False)
def prepare(paths, output, tokenizer, job) -> None:
    """Encode text files, folders of them, and .jsonl files. Several ranks share the work.

    A document is a file, or a line of a .jsonl file: {"text": ...}, or instructions: {"prompt": ..., "completion": ...}
    or {"messages": [{"role": ..., "content": ...}, ...]}, written by the tokenizer's chat template. In instructions,
    the loss counts only completions and the assistant's answers. One document in 20 is held out for validation.
    """
    check_ending("--output", output, ".tokens", ".bin")
    with open_mesh(job) as mesh:
        chosen: Tokenizer = ByteTokenizer()
        if tokenizer != BYTES:
            chosen = on_all_ranks(mesh.group(), lambda: tokenizer_at(tokenizer))
        file = prepare_file(mesh.group(), paths, chosen, output)
        on_rank_zero(mesh.group(), lambda: click.echo(_description(file)))


@data.command()
@click.argument("path")
@click.option("--verify", is_flag=True, help="Read all tokens and compare their digest.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def inspect(path: str, verify: bool, as_json: bool) -> None:
    """Print the counts and digests of a file of tokens."""
    file = open_token_file(path)
    if verify:
        check_digests(file, file.digests(0, file.facts.documents))
    if launcher_rank() == 0:
        click.echo(json.dumps(asdict(file.facts)) if as_json else _description(file))


@data.command()
@click.argument("path")
@click.option("-n", "count", type=click.IntRange(1, 100), default=5, show_default=True, help="Images of each class.")
@click.option("--output", metavar="FILE", default=SHEET, show_default=True, help="Contact sheet of images to write.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(path: str, count: int, output: str, as_json: bool) -> None:
    """Print the classes of a data set of images, and write the first images of each class as the model will see them.

    PATH is what train --data takes for images. What of it is not read is printed, too, with the reason.
    """
    if launcher_rank() == 0:
        print_images(path, count, output, as_json)


def _description(file: TokenFile) -> str:
    facts, others = file.facts, file.facts.documents - file.facts.train_documents
    learnt = f", of which {facts.learnt:,} are targets" if file.learnt is not None else ""
    return "\n".join(
        [
            f"{file.path}: {facts.tokens:,} tokens of {facts.documents:,} documents, {facts.files:,} file(s){learnt}",
            f"{facts.train_documents:,} training documents, {others:,} for validation"
            + ("" if others else ": the end of the training documents is used"),
            f"vocabulary {facts.vocabulary:,}, tokenizer {facts.tokenizer_sha256[:16]}, digest {facts.sha256[:16]}",
        ]
    )
