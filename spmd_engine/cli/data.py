"""``data``: corpora as files of tokens."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from spmd_engine.cli.options import open_mesh, takes_job
from spmd_engine.cli.values import WholeRange
from spmd_engine.comm.agreement.rank_zero import on_all_ranks, on_rank_zero
from spmd_engine.errors import UsageError
from spmd_engine.files import check_ending, output_file
from spmd_engine.foreign import first_few
from spmd_engine.formats.text_documents import (
    ALL,
    CHUNK,
    Columns,
    documents,
    documents_among,
    find_files,
    format_name,
    parse_columns,
)
from spmd_engine.formats.token_file import TokenFile, is_token_file, open_token_file
from spmd_engine.models.names import tokenizer_at
from spmd_engine.runtime.launchers import launcher_rank
from spmd_engine.tokens import ByteTokenizer, Tokenizer
from spmd_engine.training import TrainConfig
from spmd_engine.training.data.contact_sheet import as_lines, holds_images, show_images
from spmd_engine.training.data.prepare import FileSummary, encoded_document, prepare_with_summary
from spmd_engine.training.data.token_data import check_digests

BYTES, SHEET = "bytes", "contact-sheet.png"


@click.group(short_help="Encode a corpus once, as a file of tokens.")
def data() -> None:
    """Encode a corpus once, as a file of tokens that training maps: train --data FILE."""


@data.command()
@click.argument("paths", nargs=-1, required=True)
@click.option("--output", metavar="FILE", required=True, help="File to write.")
@click.option("--tokenizer", metavar="PATH", default=BYTES, help="A model's folder or GGUF file, or tokenizer.json.")
@takes_job("columns", "check", config=False)
def prepare(paths, output, tokenizer, job) -> None:
    """Encode text files, folders of them, and rows of .jsonl, .json, .csv, .tsv and .parquet files, also compressed
    (.gz, .zst). Several ranks share the work.

    A document is a file, or a row: {"text": ...}, or instructions: {"prompt": ..., "completion": ...}, {"instruction":
    ..., "input": ..., "output": ...} or {"messages": [{"role": ..., "content": ...}, ...]}, written by the tokenizer's
    chat template. In instructions, the loss counts only completions and the assistant's answers. One document in 20 is
    held out for validation. 'data show' prints documents as the model sees them.
    """
    columns = parse_columns(job.data.columns)
    check_ending("--output", output, ".tokens", ".bin")
    with open_mesh(job) as mesh:
        chosen: Tokenizer = ByteTokenizer()
        if tokenizer != BYTES:
            chosen = on_all_ranks(mesh.group(), lambda: tokenizer_at(tokenizer))
        file, summary = prepare_with_summary(mesh.group(), paths, chosen, output, columns)
        on_rank_zero(mesh.group(), lambda: click.echo("\n".join([*_by_file(summary), _description(file)])))


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


_LISTED = 20  #: most files of which a summary is printed


def _by_file(summary: Sequence[FileSummary]) -> list[str]:
    """A line a file, first those of which something is not read; nothing for a single file without remarks."""
    ordered = sorted(summary, key=lambda of_file: not (of_file.left_out or of_file.notices))
    lines = [str(of_file) for of_file in ordered[:_LISTED]]
    if len(ordered) > _LISTED:
        rest = FileSummary(f"{len(ordered) - _LISTED:,} more files")
        for of_file in ordered[_LISTED:]:
            rest.merge(of_file)
        lines.append(str(rest))
    return lines


# --- Documents as the model sees them

_WIDTH = 100  #: characters of a line of tokens
REFUSED = "refused"  #: the kind of a file of a folder that cannot be read
_MOST_TOKENS = 400  #: most tokens of a document that is printed


@data.command()
@click.argument("path")
@click.option("--model", metavar="PATH", default=BYTES, help="As --tokenizer of 'data prepare'.")
@click.option("-n", "count", type=WholeRange(1, 100), default=5, help="Documents of each kind, or images.")
@click.option("--output", metavar="FILE", default=SHEET, help="Contact sheet of images to write.")
@click.option("--json", "as_json", is_flag=True, help="Print an object a line for each document, with all its tokens.")
@takes_job("columns", config=False)
def show(path: str, model: str, count: int, output: str, as_json: bool, job: TrainConfig) -> None:
    """Print the first documents of each kind in a file, a folder or a file of tokens, as the model will see them.

    For a data set of images: print its classes, and write the first images of each as the model will see them. What is
    not read is printed, too, with the reason.

    Tokens are separated by |. Those that are learnt stand on lines with ">", and are green in a terminal; the others
    are read only. A line break in a token is shown as \\n. The tokens that begin and end a document are among them.
    """
    if launcher_rank() > 0:
        return
    if Path(path).exists() and holds_images(path):
        print_images(path, count, output, as_json)
        return
    columns, found = parse_columns(job.data.columns), False
    for document in _in_token_file(path, count) if is_token_file(path) else _in_texts(path, model, count, columns):
        found = found or document["kind"] != REFUSED
        click.echo(json.dumps(document, ensure_ascii=False) if as_json else "\n".join(_as_lines(document)))
    if not found:
        raise UsageError(f"{path}: there is nothing to read in it")


def _in_texts(path: str, model: str, count: int, columns: Columns | None) -> Iterator[dict[str, Any]]:
    """The first documents of each kind of file and row."""
    tokenizer: Tokenizer = ByteTokenizer() if model == BYTES else tokenizer_at(model)
    seen, found = Counter[tuple[str, str]](), find_files([path])
    try:
        files, others = documents_among(found, columns, [str(Path(path))])
    except UsageError:
        if len(found) == 1:
            raise
        files, others = found, {}  # each tells below what is wrong with it
    for name, what in others.items():
        yield {"where": name, "kind": what, "left_out": what}
    for file in files:
        try:
            yield from _in_text(file, tokenizer, count, columns, seen)
        except UsageError as error:
            if len(files) == 1:
                raise
            yield {"where": file[0], "kind": REFUSED, "left_out": str(error)}


def _in_text(
    file: tuple[str, int], tokenizer: Tokenizer, count: int, columns: Columns | None, seen: Counter[tuple[str, str]]
) -> Iterator[dict[str, Any]]:
    """The documents of a file of which fewer than ``count`` of their kind have been ``seen``."""
    ending = format_name(file[0])
    if seen[ending, "text"] >= count and ending == "text":
        return
    for number, document in enumerate(documents([file], 0, ALL, CHUNK, columns), 1):
        kind = document.left_out or document.kind
        if document.file is not None:
            chunks = document.chunks()
            begin, more = next(chunks, b""), next(chunks, b"")
            notice = f"of its first {len(begin):,} bytes" if more else ""
            document = document._replace(file=None, text=begin.decode(errors="ignore"), notice=notice)
        seen[ending, kind] += 1
        if seen[ending, kind] <= count:
            facts = {"where": document.where, "row": number, "kind": kind}
            if document.left_out:
                yield {**facts, "left_out": document.left_out}
                continue
            encoded = encoded_document(document, tokenizer)
            learnt = [1] * len(encoded.tokens) if encoded.learnt is None else encoded.learnt.tolist()
            if notice := encoded.notice or document.notice:
                facts["notice"] = notice
            if document.unread:
                facts["not_read"] = [*document.unread]
            yield {**facts, **_tokens(tokenizer, encoded.tokens, learnt), "text": encoded.text}
        elif number > 100 * count:
            break


def _in_token_file(path: str, count: int) -> Iterator[dict[str, Any]]:
    from spmd_engine.tokens.hugging_face import tokenizer_of

    file = open_token_file(path)
    tokenizer: Tokenizer = tokenizer_of(file.tokenizer, path) if file.tokenizer else ByteTokenizer()
    for number, end in enumerate(file.ends[:count].tolist(), 1):
        span = slice(int(file.ends[number - 2]) if number > 1 else 0, end)
        tokens = file.tokens[span].tolist()
        learnt = [1] * len(tokens) if file.learnt is None else file.learnt[span].tolist()
        yield {"where": path, "row": number, "kind": "tokens", **_tokens(tokenizer, tokens, learnt)}


def _tokens(tokenizer: Tokenizer, tokens: list[int], learnt: list[int]) -> dict[str, Any]:
    return {"tokens": tokens, "pieces": [tokenizer.piece(token) for token in tokens], "learnt": learnt}


def _as_lines(document: dict[str, Any]) -> Iterator[str]:
    """A title, then the tokens of the document in lines, each of them either learnt or not."""
    title = f"--- {document['where']}: {document['kind']}"
    if "left_out" in document:
        refused = f": {document['left_out']}" if document["kind"] == REFUSED else ", left out"
        yield f"{title}{refused}"
        return
    pieces, learnt = document["pieces"], document["learnt"]
    about = [f"{title}, {len(pieces):,} tokens, {sum(learnt):,} of them learnt"]
    about += [document["notice"]] if "notice" in document else []
    yield ", ".join(about + [f"not read: {first_few(document['not_read'], 8)}"] if "not_read" in document else about)
    line, size, shown = [], 0, min(len(pieces), _MOST_TOKENS)
    for at in range(shown):
        piece = json.dumps(pieces[at], ensure_ascii=False)[1:-1]
        line.append(piece)
        size += len(piece) + 1
        if at + 1 == shown or learnt[at + 1] != learnt[at] or size > _WIDTH:
            text = "|".join(line)
            yield f"> {click.style(text, fg='green')}" if learnt[at] else f"  {text}"
            line, size = [], 0
    if shown < len(pieces):
        yield f"  ... {len(pieces) - shown:,} more tokens"


# --- Data sets of images


def print_images(path: str, count: int, output: str, as_json: bool) -> None:
    """Print the classes of a data set of images, and what of it is not read; write ``output``, its contact sheet."""
    check_ending("--output", output, ".png")
    facts, sheet = show_images(path, count)
    with output_file(Path(output)) as file:
        file.write(sheet)
    if as_json:
        click.echo(json.dumps({**facts, "sheet": output}))
    else:
        click.echo("\n".join([*as_lines(facts), f"wrote {output}"]))
