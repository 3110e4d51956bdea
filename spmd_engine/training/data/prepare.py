"""``data prepare``: encode a corpus as a file of tokens; ranks share the reading, the encoding and the writing."""

from __future__ import annotations

import json
import os
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

import numpy as np

from spmd_engine.comm.agreement.rank_zero import json_from_rank_zero, on_all_ranks, on_rank_zero, text_from_rank_zero
from spmd_engine.comm.group import Group
from spmd_engine.errors import UsageError
from spmd_engine.files import naming
from spmd_engine.formats.text_documents import Document, count_documents, documents, find_files
from spmd_engine.formats.token_file import TokenFacts, TokenFile, add_to_digest, layout, open_token_file
from spmd_engine.tokens import Tokenizer
from spmd_engine.tokens.chat import chat_text

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


def prepare(group: Group, paths: Sequence[str], tokenizer: Tokenizer, output: str | Path) -> TokenFile:
    """Encode documents (see ``formats.text_documents``) into a file of tokens. Collective.

    The file does not depend on the number of ranks, and appears when it is complete. Each document is followed by the
    token that ends a text; one of ``HELD_OUT`` documents is for validation. In prompts with completions, and in
    conversations, only the completions and the assistant's answers, with their ends, are targets. Raises UsageError for
    files that cannot be read, and for texts mixed with instructions.
    """
    files = [(name, size) for name, size in json_from_rank_zero(group, lambda: _find_inputs(paths, output))]
    total = sum(size for _, size in files)
    begin, end = (total * group.rank // group.size, total * (group.rank + 1) // group.size)
    with tempfile.TemporaryDirectory(prefix=".prepare-", dir=Path(output).resolve().parent) as folder:
        # Which documents are for validation depends on their numbers, so all ranks count theirs first.
        document_count = on_all_ranks(group, lambda: count_documents(files, begin, end))
        before = int(group.all_gather(np.array([document_count]), label="prepare")[: group.rank].sum())

        @naming(output)
        def encode() -> tuple[list[_Part], np.ndarray]:
            return _spool(_encoded(documents(files, begin, end, TOGETHER), tokenizer), before, folder)

        parts, kinds = on_all_ranks(group, encode)
        kinds = group.all_reduce(kinds, label="prepare")
        if kinds.all():
            raise UsageError(f"{', '.join(paths)}: texts and instructions do not go together; prepare each by itself")
        # A folder that rank 0 has just made has no links, and an unfinished file is removed with it.
        folder_name = text_from_rank_zero(group, lambda: Path(folder).name)
        try:
            unfinished = Path(output).resolve().parent / folder_name / "tokens"
            return _write(group, parts, bool(kinds[1]), tokenizer, len(files), Path(output), unfinished)
        except UsageError as error:
            raise UsageError(f"--output {output}: {error}") from error


def _find_inputs(paths: Sequence[str], output: str | Path) -> list[tuple[str, int]]:
    if not Path(output).resolve().parent.is_dir():
        raise UsageError(f"--output {output}: there is no such folder")
    if Path(output).is_dir():
        raise UsageError(f"--output {output}: a folder; name the file")
    if os.path.exists(output) and not os.path.isfile(output):
        raise UsageError(f"--output {output}: a device or a pipe; name a file, which training can map")
    files = find_files(paths)
    if not sum(size for _, size in files):
        raise UsageError(f"{', '.join(paths)}: there is nothing to read in it")
    return files


#: Tokens of a document, or of a part of it, and, for instructions, which of them are targets.
_Tokens = tuple[np.ndarray, np.ndarray | None]


def _encoded(source: Iterator[Document], tokenizer: Tokenizer) -> Iterator[Iterable[_Tokens]]:
    """The tokens of each document, one after the other, in parts if it is long."""
    dtype = np.uint16 if tokenizer.vocabulary <= 1 << 16 else np.uint32
    end = [] if tokenizer.separator is None else [tokenizer.separator]
    texts: list[str] = []
    size = 0  # characters of the texts

    def of_texts() -> Iterator[list[_Tokens]]:
        nonlocal size
        for tokens in tokenizer.encode_all(texts):
            yield [(np.array(tokens + end, dtype), None)]
        texts.clear()
        size = 0

    def of_long(document: Document) -> Iterator[_Tokens]:
        for tokens in tokenizer.encode_long(document.chunks()):
            yield tokens.astype(dtype), None
        yield np.array(end, dtype), None

    for document in source:
        if document.messages is None and document.prompt is None:
            if document.file is not None or len(document.text) > TOGETHER:
                yield from of_texts()
                yield of_long(document)
                continue
            texts.append(document.text)
            size += len(document.text)
            if size > TOGETHER:
                yield from of_texts()
            continue
        yield from of_texts()
        pieces = _pieces(document, tokenizer, end)
        tokens = np.array([token for piece, _ in pieces for token in piece], dtype)
        yield [(tokens, np.concatenate([np.full(len(piece), learnt, np.uint8) for piece, learnt in pieces]))]
    yield from of_texts()


def _pieces(document: Document, tokenizer: Tokenizer, end: list[int]) -> list[tuple[list[int], bool]]:
    """The pieces of a document: tokens, and whether they are targets."""
    if document.messages is None:
        prompt = tokenizer.encode(document.prompt or "")
        return [(prompt, False), (tokenizer.encode(document.text, special=False) + end, True)]
    pieces, written, messages = [], "", document.messages
    for number, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        before = chat_text(tokenizer, messages[:number])
        after = chat_text(tokenizer, messages[: number + 1], answer=False)
        if not before.startswith(written) or not after.startswith(before):
            raise UsageError(
                "the chat template changes earlier messages when a conversation continues, so its answers cannot be "
                'located. Write {"prompt": ..., "completion": ...} for each answer'
            )
        pieces.append((tokenizer.encode(before[len(written) :], special=False), False))
        pieces.append((tokenizer.encode(after[len(before) :], special=False), True))
        written = after
    if not pieces:
        raise UsageError("a conversation without a message of the assistant has nothing to be learnt")
    return pieces


def _spool(encoded: Iterator[Iterable[_Tokens]], first: int, folder: str) -> tuple[list[_Part], np.ndarray]:
    """Write this rank's documents, numbered from ``first``, to parts for training and for validation. Return the parts,
    and the numbers of texts and of instructions."""
    kinds = np.zeros(2, np.int64)
    parts = [_Part(tempfile.TemporaryFile(dir=folder), tempfile.TemporaryFile(dir=folder)) for _ in range(2)]
    for number, document in enumerate(encoded, first):
        part = parts[VALIDATION if number % HELD_OUT == HELD_OUT // 2 else TRAIN]
        end, digest, learnt = part.count, sha256(), None
        for tokens, learnt in document:
            part.tokens.write(tokens.data)
            end += len(tokens)
            add_to_digest(digest, tokens, "<u4")
            if learnt is not None:  # then this is the whole document
                part.learnt.write(learnt.data)
                add_to_digest(digest, learnt, "<u1")
        part.ends.append(end)
        part.digests += digest.digest()
        kinds[int(learnt is not None)] += 1
    for part in parts:
        part.tokens.flush()
        part.learnt.flush()
    return parts, kinds


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
