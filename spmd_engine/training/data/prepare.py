"""``data prepare``: encode a corpus as a file of tokens; ranks share the reading, the encoding and the writing."""

from __future__ import annotations

import json
import os
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

import numpy as np

from spmd_engine.arguments import checked
from spmd_engine.comm.agreement.rank_zero import json_from_rank_zero, on_all_ranks, on_rank_zero, text_from_rank_zero
from spmd_engine.comm.group import Group
from spmd_engine.errors import UsageError
from spmd_engine.files import naming
from spmd_engine.foreign import first_few
from spmd_engine.formats.text_documents import (
    Columns,
    Document,
    count_documents,
    documents,
    documents_among,
    find_files,
)
from spmd_engine.formats.token_file import TokenFacts, TokenFile, add_to_digest, layout, open_token_file
from spmd_engine.tokens import Tokenizer
from spmd_engine.tokens.encoding import Encoded, around, encode_conversation, encode_pair, encode_text

HELD_OUT = 20  #: one document of this many is for validation
TOGETHER = 1 << 20  #: characters that are encoded at once, in parallel by a tokenizer's library
_COPIED = 1 << 24  # bytes at a time
TRAIN, VALIDATION = range(2)


@dataclass
class _Part:
    """Documents of one kind that this rank has encoded, with their tokens in temporary files."""

    tokens: BinaryIO
    learnt: BinaryIO
    ends: array = field(default_factory=lambda: array("q"))  # in tokens of this part
    digests: bytearray = field(default_factory=bytearray)

    @property
    def count(self) -> int:
        return self.ends[-1] if self.ends else 0


@dataclass
class FileSummary:
    """What was read of a file, and what of it is in the result."""

    file: str
    rows: int = 0
    documents: int = 0
    tokens: int = 0
    learnt: int = 0  #: tokens that are targets
    left_out: dict[str, int] = field(default_factory=dict)  #: numbers of rows, by the reason
    notices: dict[str, int] = field(default_factory=dict)  #: and of rows of which a part is not read
    unread: list[str] = field(default_factory=list)  #: keys or columns that are not read

    def __str__(self) -> str:
        if not self.rows and self.left_out:
            return f"{self.file}: left out: {', '.join(self.left_out)}"
        learnt = f", of which {self.learnt:,} are targets" if self.learnt < self.tokens else ""
        text = f"{self.file}: {self.tokens:,} tokens of {self.documents:,} documents in {self.rows:,} rows{learnt}"
        unread = [f"not read: {first_few(self.unread, 8)}"] if self.unread else []
        return "; ".join([text, *remarks(self.left_out, self.notices), *unread])

    def add(self, document: Document) -> None:
        """Count a row."""
        self.rows += 1
        self.documents += not document.left_out
        self.unread += document.unread
        for reason, counts in ((document.left_out, self.left_out), (document.notice, self.notices)):
            if reason:
                counts[reason] = counts.get(reason, 0) + 1

    def merge(self, other: FileSummary) -> None:
        """Add what another rank has read of the file."""
        for name in ("rows", "documents", "tokens", "learnt"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for mine, theirs in ((self.left_out, other.left_out), (self.notices, other.notices)):
            for reason, count in theirs.items():
                mine[reason] = mine.get(reason, 0) + count
        self.unread += [name for name in other.unread if name not in self.unread]


def remarks(left_out: Mapping[str, int], notices: Mapping[str, int]) -> list[str]:
    """What was left out, and what was not read, in words."""
    return [f"{count:,} left out: {reason}" for reason, count in left_out.items()] + [
        f"{count:,} with {notice}" for notice, count in notices.items()
    ]


@checked()
def prepare(
    group: Group, paths: Sequence[str], tokenizer: Tokenizer, output: str | Path, columns: Columns | None = None
) -> TokenFile:
    """Encode documents (see ``formats.text_documents``) into a file of tokens. Collective.

    The file does not depend on the number of ranks, and appears when it is complete. Each document stands between the
    tokens that begin and end a text; one of ``HELD_OUT`` documents is for validation. In prompts with completions, and
    in conversations, only the completions and the assistant's answers, with their ends, are targets. ``columns`` names
    what to read in rows. Raises UsageError for files that cannot be read, and for texts mixed with instructions.
    """
    return prepare_with_summary(group, paths, tokenizer, output, columns)[0]


def prepare_with_summary(
    group: Group, paths: Sequence[str], tokenizer: Tokenizer, output: str | Path, columns: Columns | None = None
) -> tuple[TokenFile, list[FileSummary]]:
    """``prepare``, with a summary of each file."""
    found, others = json_from_rank_zero(group, lambda: _find_inputs(paths, output, columns))
    files = [(name, size) for name, size in found]
    total = sum(size for _, size in files)
    begin, end = (total * group.rank // group.size, total * (group.rank + 1) // group.size)
    with tempfile.TemporaryDirectory(prefix=".prepare-", dir=Path(output).resolve().parent) as folder:
        before = 0
        if group.size > 1:
            # Which documents are for validation depends on their numbers, so all ranks count theirs first.
            document_count = on_all_ranks(group, lambda: count_documents(files, begin, end))
            before = int(group.all_gather(np.array([document_count]), label="prepare")[: group.rank].sum())

        @naming(output)
        def encode() -> tuple[list[_Part], np.ndarray, dict[str, FileSummary]]:
            return _spool(_encoded(documents(files, begin, end, TOGETHER, columns), tokenizer), before, folder)

        parts, kinds, summaries = on_all_ranks(group, encode)
        kinds = group.all_reduce(kinds, label="prepare")
        if kinds.all():
            raise UsageError(f"{', '.join(paths)}: texts and instructions do not go together; prepare each by itself")
        summary = _merged(group, summaries)
        summary += [FileSummary(name, left_out={kind: 1}) for name, kind in others.items()]
        if not kinds.any():
            raise UsageError(f"{', '.join(paths)}: there is nothing to learn in it{_why(summary)}")
        # A folder that rank 0 has just made has no links, and an unfinished file is removed with it.
        folder_name = text_from_rank_zero(group, lambda: Path(folder).name)
        try:
            unfinished = Path(output).resolve().parent / folder_name / "tokens"
            return _write(group, parts, bool(kinds[1]), tokenizer, len(files), Path(output), unfinished), summary
        except UsageError as error:
            raise UsageError(f"--output {output}: {error}") from error


def _merged(group: Group, summaries: Mapping[str, FileSummary]) -> list[FileSummary]:
    """The summaries of all ranks, one a file."""
    lines = "".join(json.dumps(asdict(summary)) + "\n" for summary in summaries.values())
    gathered = group.all_gather(np.frombuffer(lines.encode(), np.uint8), label="prepare").tobytes()
    merged: dict[str, FileSummary] = {}
    for line in gathered.splitlines():
        summary = FileSummary(**json.loads(line))
        merged.setdefault(summary.file, FileSummary(summary.file)).merge(summary)
    return list(merged.values())


def _why(summary: Sequence[FileSummary]) -> str:
    total = FileSummary("")
    for of_file in summary:
        total.merge(of_file)
    reasons = "; ".join(remarks(total.left_out, {}))
    return f" ({reasons})" if reasons else ""


def _find_inputs(
    paths: Sequence[str], output: str | Path, columns: Columns | None
) -> tuple[list[tuple[str, int]], dict[str, str]]:
    """The files to read, and those in folders that are left out, with the reason."""
    if not Path(output).resolve().parent.is_dir():
        raise UsageError(f"--output {output}: there is no such folder")
    if Path(output).is_dir():
        raise UsageError(f"--output {output}: a folder; name the file")
    if os.path.exists(output) and not os.path.isfile(output):
        raise UsageError(f"--output {output}: a device or a pipe; name a file, which training can map")
    files = find_files(paths)
    if not sum(size for _, size in files):
        raise UsageError(f"{', '.join(paths)}: there is nothing to read in it")
    return documents_among(files, columns, [str(Path(path)) for path in paths])


#: Tokens of a document, or of a part of it, and, for instructions, which of them are targets.
_Tokens = tuple[np.ndarray, np.ndarray | None]


def encoded_document(document: Document, tokenizer: Tokenizer) -> Encoded:
    """The tokens of a document. An instruction is a conversation if the tokenizer has a chat template. Raises
    UsageError, naming its place, for what the template refuses."""
    if document.is_text:
        return encode_text(tokenizer, document.content())
    if document.messages is None and not (document.is_instruction and tokenizer.chat_template):
        between = "\n\n" if document.is_instruction else ""
        return encode_pair(tokenizer, f"{document.prompt}{between}", document.text)
    try:
        return encode_conversation(tokenizer, document.conversation or [], document.tools)
    except UsageError as error:
        raise UsageError(f"{document.where}: {error}") from error


def _encoded(source: Iterable[Document], tokenizer: Tokenizer) -> Iterator[tuple[Document, Iterable[_Tokens]]]:
    """Each document with its tokens, in parts if it is long; without any if it is left out."""
    dtype = np.uint16 if tokenizer.vocabulary <= 1 << 16 else np.uint32
    waiting: list[Document] = []
    size = 0  # characters of the documents that wait

    def of_waiting() -> Iterator[tuple[Document, list[_Tokens]]]:
        nonlocal size
        texts = [document.text for document in waiting if not document.left_out]
        encoded = iter(tokenizer.encode_all(texts))
        for document in waiting:
            if document.left_out:
                yield document, []
                continue
            tokens = next(encoded)
            before, after = around(tokenizer, tokens, tokens)
            yield document, [(np.array([*before, *tokens, *after], dtype), None)]
        waiting.clear()
        size = 0

    for document in source:
        if document.left_out:
            waiting.append(document)
        elif not document.is_text:
            yield from of_waiting()
            encoded = encoded_document(document, tokenizer)
            document = document._replace(notice=encoded.notice or document.notice)
            yield document, [(np.array(encoded.tokens, dtype), encoded.learnt)]
        elif document.file is not None or len(document.text) > TOGETHER:
            yield from of_waiting()
            yield document, _long(document, tokenizer, dtype)
        else:
            waiting.append(document)
            size += len(document.text)
            if size > TOGETHER:
                yield from of_waiting()
    yield from of_waiting()


def _long(document: Document, tokenizer: Tokenizer, dtype: type) -> Iterator[_Tokens]:
    """The tokens of a long text."""
    last = None
    for tokens in filter(len, tokenizer.encode_long(document.chunks())):
        if last is None:
            yield np.array(around(tokenizer, tokens[:_EDGE].tolist(), None)[0], dtype), None
        last = tokens
        yield tokens.astype(dtype), None
    yield np.array(around(tokenizer, [], [] if last is None else last[-_EDGE:].tolist())[1], dtype), None


_EDGE = 16  #: more tokens than a tokenizer adds before or after a text


def _spool(
    encoded: Iterator[tuple[Document, Iterable[_Tokens]]], first: int, folder: str
) -> tuple[list[_Part], np.ndarray, dict[str, FileSummary]]:
    """Write this rank's documents, numbered from ``first``, to parts for training and for validation. Return the parts,
    the numbers of texts and of instructions, and a summary of each file."""
    kinds, summaries = np.zeros(2, np.int64), dict[str, FileSummary]()
    parts = [_Part(tempfile.TemporaryFile(dir=folder), tempfile.TemporaryFile(dir=folder)) for _ in range(2)]
    for number, (document, pieces) in enumerate(encoded, first):
        if document.source not in summaries:
            summaries[document.source] = FileSummary(document.source)
        summary = summaries[document.source]
        summary.add(document)
        if document.left_out:
            continue
        part = parts[VALIDATION if number % HELD_OUT == HELD_OUT // 2 else TRAIN]
        begin, digest, learnt = part.count, sha256(), None
        end = begin
        for tokens, learnt in pieces:
            part.tokens.write(tokens.data)
            end += len(tokens)
            add_to_digest(digest, tokens, "<u4")
            if learnt is not None:  # then this is the whole document
                part.learnt.write(learnt.data)
                add_to_digest(digest, learnt, "<u1")
        part.ends.append(end)
        part.digests += digest.digest()
        kinds[int(learnt is not None)] += 1
        summary.tokens += end - begin
        summary.learnt += end - begin if learnt is None else int(learnt.sum())
    for part in parts:
        part.tokens.flush()
        part.learnt.flush()
    return parts, kinds, summaries


def _write(
    group: Group,
    parts: Sequence[_Part],
    with_learnt: bool,
    tokenizer: Tokenizer,
    files: int,
    output: Path,
    unfinished: Path,
) -> TokenFile:
    mine = np.array([[part.count, len(part.ends)] for part in parts], np.int64)
    by_rank = group.all_gather(mine[None], label="prepare")  # [rank kind (tokens, documents)]
    totals = by_rank.sum(axis=0)
    digests, learnt = [], 0
    for part in parts:
        digest_bytes = np.frombuffer(part.digests, np.uint8)
        digests.append(group.all_gather(digest_bytes, label="prepare").tobytes())
        part.learnt.seek(0)
        while block := part.learnt.read(_COPIED):
            learnt += int(np.frombuffer(block, np.uint8).sum())
    learnt = int(group.all_reduce(np.array(learnt), label="prepare")) if with_learnt else int(totals[:, 0].sum())
    facts = TokenFacts(
        tokens=int(totals[:, 0].sum()),
        train_tokens=int(totals[TRAIN, 0]),
        documents=int(totals[:, 1].sum()),
        train_documents=int(totals[TRAIN, 1]),
        learnt=learnt,
        vocabulary=tokenizer.vocabulary,
        tokenizer_sha256=tokenizer.sha256,
        sha256=sha256(b"".join(digests)).hexdigest(),
        files=files,
    )
    tokenizer_json = json.dumps(dict(tokenizer.files)).encode()
    header, offsets = layout(facts, with_learnt, tokenizer_json)

    @naming(output)
    def begin() -> None:
        with unfinished.open("wb") as file:
            file.write(header)
            file.truncate(offsets["end"])
            file.seek(offsets["tokenizer"])
            file.write(tokenizer_json)

    on_rank_zero(group, begin)
    itemsize = 2 if facts.dtype == "U16" else 4

    @naming(output)
    def fill() -> None:
        with unfinished.open("r+b") as file:
            for kind, part in enumerate(parts):
                tokens, documents_before = (
                    by_rank[: group.rank, kind].sum(axis=0) + totals[:kind].sum(axis=0)
                ).tolist()
                _copy(part.tokens, file, offsets["tokens"] + tokens * itemsize)
                if with_learnt:
                    _copy(part.learnt, file, offsets["learnt"] + tokens)
                file.seek(offsets["ends"] + 8 * documents_before)
                file.write((np.array(part.ends, "<i8") + tokens).astype("<i8").tobytes())

    on_all_ranks(group, fill)
    on_rank_zero(group, lambda: os.replace(unfinished, output))
    return open_token_file(output)


def _copy(source: BinaryIO, target: BinaryIO, offset: int) -> None:
    source.seek(0)
    target.seek(offset)
    while block := source.read(_COPIED):
        target.write(block)
