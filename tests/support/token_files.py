"""Texts, pairs of prompt and completion, and the files of their tokens."""

import json
from hashlib import sha256

from spmd_engine import Mesh, run_threads
from spmd_engine.tokens import ByteTokenizer
from spmd_engine.tokens.hugging_face import TOKENIZER
from spmd_engine.training.data.prepare import prepare

SMALL_TEXT = {"model": "gpt-nano", "length": 16, "steps": 2, "batch_size": 3, "eval_samples": 2, "sample": 0}


TEXTS = [f"document {number}: " + "abc " * (number * 7 % 30) for number in range(40)]


PAIRS = [(f"what is {number}?", f" {number} is {number * number}" * (number % 4 + 1)) for number in range(40)]


def write_texts(folder):
    for number, text in enumerate(TEXTS[:5]):
        (folder / "texts").mkdir(exist_ok=True)
        (folder / "texts" / f"{number}.txt").write_text(text)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS[5:])
    (folder / "texts" / "more.jsonl").write_text(lines)
    return str(folder / "texts")


def write_pairs(folder):
    lines = (json.dumps({"prompt": prompt, "completion": completion}) + "\n" for prompt, completion in PAIRS)
    (folder / "pairs.jsonl").write_text("".join(lines))
    return str(folder / "pairs.jsonl")


class KeptTokenizer(ByteTokenizer):
    """Bytes, by a tokenizer whose text is kept beside the tokens."""

    files = {TOKENIZER: "{}"}
    sha256 = sha256(b"{}").hexdigest()


def prepared(path, output, ranks=1, tokenizer=None):
    def program():
        with Mesh(data=ranks) as mesh:
            return prepare(mesh.group(), [path], tokenizer or ByteTokenizer(), output)

    return run_threads(program, ranks)[0]
